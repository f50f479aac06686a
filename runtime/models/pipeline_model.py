"""The models that a pipeline can run, and how their layers become stages.

A model is a list of layers, each called with the previous one's output; a stage is a run of consecutive
layers. :class:`PipelineModel` is all that ``--model package.module:factory`` has to offer. The built-in
``gpt`` is a small decoder-only transformer that predicts the next character of a text shipped with it.

Every rank builds the whole model from one seed and keeps the layers of its own stages. Connections that
skip a boundary are not modelled: what a later layer needs has to be in the value passed along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from zbsolve.errors import InputError
from zbsolve.model.instance import Instance
from zbsolve.runtime.values import flatten, spread, unflatten


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a step.

    ``inputs`` go to the first layer, ``targets`` to the loss: values as of :mod:`zbsolve.runtime.values`.
    ``weight`` is the share of the step's loss; the weights of a step sum to 1, so a micro-batch of 3 rows
    out of 7 has 3/7 and the step's loss is the mean over all rows.
    """

    inputs: Any
    targets: Any
    weight: float


@runtime_checkable
class PipelineModel(Protocol):
    """What a factory returns.

    Attributes
    ----------
    layers : sequence of nn.Module
        In order. Each takes one value and returns one: a tensor, or nested containers of tensors and
        constants (:mod:`zbsolve.runtime.values`).
    """

    layers: Sequence[nn.Module]

    def loss(self, output: Any, targets: Any) -> torch.Tensor:
        """Scalar loss of one micro-batch: the mean over its rows."""
        ...

    def microbatches(self, step: int, count: int) -> Sequence[MicroBatch]:
        """The data of a step, cut into ``count`` micro-batches. The same on every rank."""
        ...


def cut_rows(
    inputs: Any, targets: Any, count: int, *, input_axes: Any = 0, target_axes: Any = 0
) -> list[MicroBatch]:
    """Cut a batch along its rows, spread as evenly as they go, each micro-batch weighted by its rows.

    Parameters
    ----------
    inputs, targets : value
        A tensor, or nested tuples, lists and dicts of tensors and constants; every micro-batch gets the
        constants.
    input_axes, target_axes : int, None, or nested like the value
        Along which axis of each tensor the rows lie: one for all of a value, or one for each part. Position
        ids of shape (3, rows, T) have theirs at 1. A tensor with None is handed to every micro-batch whole.

    Raises
    ------
    InputError
        Tensors of different numbers of rows, none that has rows, or fewer rows than micro-batches.
    """
    parts = [
        (kind, *flatten(value, kind), spread(axes, value, f"{kind[:-1]}_axes"))
        for kind, value, axes in (("inputs", inputs, input_axes), ("targets", targets, target_axes))
    ]
    rows: int | None = None
    cuts: list[list[Sequence[torch.Tensor]]] = []
    for kind, tensors, spec, axes in parts:
        cut: list[Sequence[torch.Tensor]] = []
        of_tensors = [axis for axis, leaf in zip(axes, spec.leaves, strict=True) if leaf is None]
        for tensor, axis in zip(tensors, of_tensors, strict=True):
            if axis is None:
                cut.append([tensor] * count)
                continue
            if not -tensor.dim() <= axis < tensor.dim():
                raise InputError(
                    f"{kind}: a tensor of shape {tuple(tensor.shape)} has no axis {axis}: name its rows' "
                    "axis, or None to hand it to every micro-batch whole"
                )
            rows = tensor.shape[axis] if rows is None else rows
            if tensor.shape[axis] != rows:
                raise InputError(
                    f"{kind}: a tensor of shape {tuple(tensor.shape)} has {tensor.shape[axis]} rows along "
                    f"axis {axis} where another has {rows}: name the axis of its rows ({kind[:-1]}_axes)"
                )
            cut.append(tensor.tensor_split(count, axis))
        cuts.append(cut)
    if rows is None:
        raise InputError("no tensor has rows to cut: give one axis at least")
    if rows < count:
        raise InputError(f"{rows} rows cannot fill {count} micro-batches: give at least one row each")
    sizes = [len(part) for part in torch.arange(rows).tensor_split(count)]
    # Copies: a slice would keep the whole batch alive, and count as such, for as long as any is in flight.
    both = [
        [unflatten([piece[number].clone() for piece in cut], spec) for number in range(count)]
        for cut, (_, _, spec, _) in zip(cuts, parts, strict=True)
    ]
    return [MicroBatch(i, t, size / rows) for i, t, size in zip(*both, sizes, strict=True)]


# --- layers to stages ---------------------------------------------------------------------------


def check_split(split: Sequence[int], layers: int, stages: int) -> tuple[int, ...]:
    """``split`` when it gives every layer to exactly one of ``stages`` stages, none of them empty."""
    if len(split) != stages:
        raise InputError(f"--layers-per-stage has {len(split)} entries for {stages} stages: give one a stage")
    if min(split) < 1 or sum(split) != layers:
        given = ",".join(str(n) for n in split)
        raise InputError(
            f"--layers-per-stage {given} sums to {sum(split)}: give {layers} layers in all, at least one each"
        )
    return tuple(split)


def stage_ranges(split: Sequence[int]) -> list[range]:
    """The layers of each stage."""
    ends = [0]
    for size in split:
        ends.append(ends[-1] + size)
    return [range(a, b) for a, b in pairwise(ends)]


def stage_name(layers: Sequence[nn.Module], held: range) -> str:
    """A stage's name in an instance: which layers it has, e.g. ``layers 0-4: Embed, 4 x Block``."""
    kinds = [(kind, len(list(run))) for kind, run in groupby(type(layers[i]).__name__ for i in held)]
    listed = ", ".join(kind if count == 1 else f"{count} x {kind}" for kind, count in kinds)
    return f"layers {held.start}-{held.stop - 1}: {listed}"


def recorded_split(instance: Instance) -> tuple[int, ...] | None:
    """Layers per stage as a profile recorded them in the stage names, or None when it did not."""
    sizes = []
    following = 0
    for stage in instance.stages[: instance.chain]:
        words = (stage.name or "").partition(":")[0].split()
        first, dash, last = words[1].partition("-") if len(words) == 2 and words[0] == "layers" else ("",) * 3
        if not (dash and first.isdecimal() and last.isdecimal() and int(first) == following):
            return None
        sizes.append(int(last) + 1 - following)
        following = int(last) + 1
    return tuple(sizes) if min(sizes) > 0 else None


class StageLayers(nn.Module):
    """The layers of one stage, called one after the other."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._in_order = tuple(layers)

    def forward(self, value: Any) -> Any:
        for layer in self._in_order:
            value = layer(value)
        return value
