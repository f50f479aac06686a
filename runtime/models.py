"""The models that a pipeline can run, and how their layers become stages.

A model is a list of layers, each called with the previous one's output; a stage is a run of consecutive
layers. :class:`PipelineModel` is all that ``--model package.module:factory`` has to offer. The built-in
``gpt`` is a small decoder-only transformer that predicts the next character of a text shipped with it.

Every rank builds the whole model from one seed and keeps the layers of its own stages. Connections that
skip a boundary are not modelled: what a later layer needs has to be in the value passed along.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby, pairwise
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as functional
from torch import nn

from zbsolve.errors import InputError
from zbsolve.instance import Instance
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


def load_model(name: str, seed: int) -> PipelineModel:
    """Build ``gpt`` or ``package.module:factory`` (called without arguments) after seeding torch.

    Raises
    ------
    InputError
        When the name cannot be imported or what it returns is not a :class:`PipelineModel`.
    """
    factory: Callable[[], Any]
    if name == "gpt":
        factory = GPT
    else:
        module, _, attribute = name.partition(":")
        if not module or not attribute:
            raise InputError(f"--model {name}: give gpt, or package.module:factory")
        try:
            factory = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise InputError(f"--model {name}: {error}: give an importable package.module:factory") from None
    torch.manual_seed(seed)
    model = factory()
    if not isinstance(model, PipelineModel):
        raise InputError(
            f"--model {name}: it returned a {type(model).__name__} without layers, loss and microbatches: "
            "return a zbsolve.runtime.models.PipelineModel"
        )
    return model


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


# --- the built-in GPT ---------------------------------------------------------------------------


class Embed(nn.Module):
    """Token and position embedding: ids (rows, T) to activations (rows, T, d)."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        result: torch.Tensor = self.token(ids) + self.position(places)
        return result


class Block(nn.Module):
    """Causal self-attention and a 4 d MLP, each behind a LayerNorm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(rows, length, width))
        result: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return result


class Head(nn.Module):
    """Final norm and the projection to logits."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.project(self.norm(x))
        return result


class GPT:
    """A character-level GPT of ten layers (embedding, eight blocks, head); 6.4 M parameters.

    Sized so that one F of half the model takes 10-30 ms on one CPU core.
    """

    def __init__(
        self, width: int = 256, blocks: int = 8, heads: int = 4, context: int = 128, rows: int = 2
    ) -> None:
        text = resources.files("zbsolve.runtime").joinpath("corpus.txt").read_text(encoding="utf-8")
        alphabet = sorted(set(text))
        number = {character: i for i, character in enumerate(alphabet)}
        self.text = torch.tensor([number[character] for character in text])
        self.context, self.rows = context, rows
        self.layers: Sequence[nn.Module] = [
            Embed(len(alphabet), context, width),
            *(Block(width, heads) for _ in range(blocks)),
            Head(width, len(alphabet)),
        ]

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross entropy of the next character, mean over all positions."""
        return functional.cross_entropy(output.flatten(0, 1), targets.flatten())

    def microbatches(self, step: int, count: int) -> list[MicroBatch]:
        """``rows`` windows of the text per micro-batch, drawn anew each step."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(
            len(self.text) - self.context, (count * self.rows,), generator=generator
        ).tolist()
        windows = torch.stack([self.text[s : s + self.context + 1] for s in starts])
        return cut_rows(windows[:, :-1], windows[:, 1:], count)
