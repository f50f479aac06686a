"""A model as its layers: what one device measures layer by layer, and stages made of runs of layers.

Times and activation memory of a stage are the sums of its layers'. What a pass needs only while it runs
(``peak_*``) is that of its hungriest layer, so a stage's memory is never understated. Fusing across layer
boundaries, caches that a longer run of layers warms, and allocator effects are not modelled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from zbsolve.errors import InputError
from zbsolve.files.documents import raise_first, read_document
from zbsolve.files.models import FileModel, JsonTuple
from zbsolve.model.instance import ModelFactory, NonNegative, Stage
from zbsolve.model.recompute import folded
from zbsolve.partition.cluster import Host

SCHEMA = "zbsolve.layers/1"


class Layer(FileModel):
    """One layer's pass times and memory, in the profile's units; fields as a stage's.

    Attributes
    ----------
    static_mem : float
        Parameters, gradients and optimizer states.
    mem_out : float
        Size of what it hands to the next layer (and gets back as a gradient): hops and recomputation need it.
    """

    name: str | None = None
    t_f: NonNegative
    t_b: NonNegative
    t_w: NonNegative
    t_bw: NonNegative | None = None
    mem_b: NonNegative = 0.0
    mem_w: NonNegative = 0.0
    peak_f: NonNegative = 0.0
    peak_b: NonNegative = 0.0
    peak_w: NonNegative = 0.0
    static_mem: NonNegative = 0.0
    mem_out: NonNegative = 0.0

    @property
    def cost(self) -> float:
        """Device time of one micro-batch, backward split."""
        return self.t_f + self.t_b + self.t_w


class LayerProfile(FileModel):
    """A model as its layers, in order, for micro-batches of ``microbatch_size`` samples.

    ``model`` is what was profiled, where that is known: instances made of the layers carry it.
    """

    schema_: Literal["zbsolve.layers/1"] = Field(default="zbsolve.layers/1", alias="schema")
    name: str = "unnamed"
    time_unit: str = "ms"
    memory_unit: str = "MiB"
    microbatch_size: Annotated[int, Field(ge=1)] = 1
    model: ModelFactory | None = None
    layers: Annotated[JsonTuple[Layer], Field(min_length=1)]

    def to_json(self) -> str:
        """The file's text: a line a layer, what is zero or not given left out."""
        data = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        rows = [
            json.dumps({k: v for k, v in layer.items() if v != 0 or k in ("t_f", "t_b", "t_w")})
            for layer in data.pop("layers")
        ]
        head = json.dumps(data, indent=1).removesuffix("\n}")
        return f'{head},\n "layers": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"

    def scaled(self, microbatch_size: int) -> LayerProfile:
        """The profile for another micro-batch size, every time and activation in proportion.

        The model's own micro-batches are of the size that was profiled: the scaled profile is of none.
        Small micro-batches run less efficiently than that: profile at each size where it matters.
        """
        if microbatch_size == self.microbatch_size:
            return self
        factor = microbatch_size / self.microbatch_size
        layers = tuple(
            layer.model_copy(
                update={
                    field: None if value is None else value * factor
                    for field in _PER_MICROBATCH
                    for value in (getattr(layer, field),)
                }
            )
            for layer in self.layers
        )
        return self.model_copy(update={"layers": layers, "microbatch_size": microbatch_size, "model": None})


_PER_MICROBATCH = (
    *("t_f", "t_b", "t_w", "t_bw", "mem_b", "mem_w"),
    *("peak_f", "peak_b", "peak_w", "mem_out"),
)


def load_layers(path: str | Path) -> LayerProfile:
    """Read a layer profile."""
    data = read_document(path, SCHEMA)
    try:
        return LayerProfile.model_validate(data)
    except ValidationError as error:
        raise_first(error, str(path))


def _checkpointed(profile: LayerProfile, first: int, end: int, plain: Stage) -> dict[str, float]:
    """What recomputation layer by layer changes of a stage, as an R that is not yet folded into B.

    Each layer is made anew from its input when the backward comes to it. Then the inputs of the layers before
    it are still held, and, where B and W are apart, what W needs of those behind it. ``mem_b`` is the most
    that is held without the latter (a BW leaves nothing for W), ``peak_b`` covers what they add.
    """
    inputs = [profile.layers[i - 1].mem_out if i else 0.0 for i in range(first, end)]
    run = profile.layers[first:end]
    ahead, behind = 0.0, math.fsum(layer.mem_w for layer in run)
    fused = split = 0.0
    for size, layer in zip(inputs, run, strict=True):
        behind -= layer.mem_w
        fused = max(fused, ahead + layer.mem_b)
        split = max(split, ahead + layer.mem_b + behind)
        ahead += size
    mem_b = min(plain.mem_b, fused)
    more = max(0.0, min(split, max(plain.mem_b, plain.mem_w)) - max(mem_b, plain.mem_w))
    return {
        "t_r": plain.t_f,
        "mem_r": min(mem_b, ahead),
        "mem_b": mem_b,
        "peak_b": plain.peak_b + more,
        "peak_bw": plain.peak_fused,
    }


def join_profiles(profiles: Sequence[LayerProfile]) -> LayerProfile:
    """One profile of several profiled one after the other (the parts of a model, in order).

    What several factories build, no one of them does: it is of no known model.
    """
    first = profiles[0]
    for other in profiles[1:]:
        for field in ("time_unit", "memory_unit", "microbatch_size"):
            if getattr(other, field) != getattr(first, field):
                raise InputError(
                    f"layer profiles {first.name} and {other.name}: {field} is {getattr(first, field)} and "
                    f"{getattr(other, field)}: give profiles of one kind"
                )
    layers = tuple(layer for profile in profiles for layer in profile.layers)
    return first.model_copy(update={"layers": layers} | ({"model": None} if len(profiles) > 1 else {}))


class Keep(StrEnum):
    """What happens to a stage's activations between F and B.

    ``recompute``: the whole stage runs F again from its input, as the runtime's R does. ``checkpoint``: the
    model itself does, layer by layer within the backward (activation checkpointing of each layer).
    """

    plain = "plain"
    recompute = "recompute"
    checkpoint = "checkpoint"
    offload = "offload"


def stage_of(
    profile: LayerProfile,
    first: int,
    end: int,
    *,
    device: int,
    speed: float = 1.0,
    keep: Keep = Keep.plain,
    host: Host | None = None,
) -> Stage:
    """Layers ``first`` to ``end - 1`` as one stage on a device of a speed.

    The stage can fuse when every layer has a ``t_bw``. With ``recompute`` only the stage's input is kept
    between F and B, and F runs again as an R of its own, anywhere between both. With ``checkpoint`` each
    layer's input is kept, and F runs again within B (``t_b`` and ``t_bw`` grow by ``t_f``,
    :mod:`zbsolve.model.recompute`). With ``offload`` nothing is kept, and F and B are longer by the part of
    the transfer that the host's ``overlap`` does not hide. In all, what W needs stays on the device from B to
    W.
    """
    run = profile.layers[first:end]

    def total(field: str) -> float:
        return math.fsum(getattr(layer, field) for layer in run)

    def hungriest(field: str) -> float:
        return max(float(getattr(layer, field)) for layer in run)

    mem_b, name = total("mem_b"), f"layers {first}-{end - 1}"
    # The profile's fields were validated; sums of them need no second look.
    plain = Stage.model_construct(
        device=device,
        t_f=total("t_f") / speed,
        t_b=total("t_b") / speed,
        t_w=total("t_w") / speed,
        t_bw=None if any(layer.t_bw is None for layer in run) else total("t_bw") / speed,
        mem_b=mem_b,
        mem_w=total("mem_w"),
        peak_f=hungriest("peak_f"),
        peak_b=hungriest("peak_b"),
        peak_w=hungriest("peak_w"),
        name=name if keep is Keep.plain else f"{name}: {keep.value}",
    )
    if keep is Keep.plain:
        return plain
    if keep is Keep.recompute:
        kept = min(mem_b, profile.layers[first - 1].mem_out if first else 0.0)
        return plain.model_copy(update={"t_r": plain.t_f, "mem_r": kept})
    if keep is Keep.checkpoint:
        return folded(plain.model_copy(update=_checkpointed(profile, first, end, plain)))
    if host is None:
        raise InputError('offload: the cluster has no "host": give its bandwidth')
    # As a recomputation that keeps nothing, whose R is the wait for what comes back; F waits for it to go.
    wait_f, wait_b = (max(0.0, mem_b / host.bandwidth - host.overlap * own) for own in (plain.t_f, plain.t_b))
    stage = folded(plain.model_copy(update={"t_r": wait_b, "mem_r": 0.0}))
    return stage.model_copy(update={"t_f": plain.t_f + wait_f, "peak_f": plain.peak_f + mem_b})
