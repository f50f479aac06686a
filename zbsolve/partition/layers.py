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
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zbsolve.cluster import Host
from zbsolve.errors import InputError
from zbsolve.instance import NonNegative, Stage, raise_first, read_document

SCHEMA = "zbsolve.layers/1"


class Layer(BaseModel):
    """One layer's pass times and memory, in the profile's units; fields as a stage's.

    Attributes
    ----------
    static_mem : float
        Parameters, gradients and optimizer states.
    mem_out : float
        Size of what it hands to the next layer (and gets back as a gradient): hops and recomputation need it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

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


class LayerProfile(BaseModel):
    """A model as its layers, in order, for micro-batches of ``microbatch_size`` samples."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)

    schema_: Literal["zbsolve.layers/1"] = Field(default="zbsolve.layers/1", alias="schema")
    name: str = "unnamed"
    time_unit: str = "ms"
    memory_unit: str = "MiB"
    microbatch_size: Annotated[int, Field(ge=1)] = 1
    layers: Annotated[tuple[Layer, ...], Field(min_length=1)]

    @field_validator("layers", mode="before")
    @classmethod
    def _accept_json_array(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

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
        return self.model_copy(update={"layers": layers, "microbatch_size": microbatch_size})


_PER_MICROBATCH = (
    *("t_f", "t_b", "t_w", "t_bw", "mem_b", "mem_w"),
    *("peak_f", "peak_b", "peak_w", "mem_out"),
)


def load_layers(path: str | Path) -> LayerProfile:
    """Read a layer profile."""
    data = read_document(path, SCHEMA, "a layer profile")
    try:
        return LayerProfile.model_validate(data)
    except ValidationError as error:
        raise_first(error, str(path))


def join_profiles(profiles: Sequence[LayerProfile]) -> LayerProfile:
    """One profile of several profiled one after the other (the parts of a model, in order)."""
    first = profiles[0]
    for other in profiles[1:]:
        for field in ("time_unit", "memory_unit", "microbatch_size"):
            if getattr(other, field) != getattr(first, field):
                raise InputError(
                    f"layer profiles {first.name} and {other.name}: {field} is {getattr(first, field)} and "
                    f"{getattr(other, field)}: give profiles of one kind"
                )
    layers = tuple(layer for profile in profiles for layer in profile.layers)
    return first.model_copy(update={"layers": layers})


class Keep(StrEnum):
    """What happens to a stage's activations between F and B."""

    plain = "plain"
    recompute = "recompute"
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

    The stage can fuse when every layer has a ``t_bw``. With ``recompute`` only its input is kept between F
    and B, B runs F again (``t_b`` and ``t_bw`` grow by ``t_f``) and holds what F made while it runs. With
    ``offload`` nothing is kept, and F and B are longer by the part of the transfer that the host's
    ``overlap`` does not hide. In both, what W needs stays on the device from B to W.
    """
    run = profile.layers[first:end]

    def total(field: str) -> float:
        return math.fsum(getattr(layer, field) for layer in run)

    def hungriest(field: str) -> float:
        return max(float(getattr(layer, field)) for layer in run)

    t_f, t_b, t_w = (total(field) / speed for field in ("t_f", "t_b", "t_w"))
    t_bw = None if any(layer.t_bw is None for layer in run) else total("t_bw") / speed
    mem_b, mem_w = total("mem_b"), total("mem_w")
    peak_f, peak_b, peak_w = (hungriest(field) for field in ("peak_f", "peak_b", "peak_w"))
    name = f"layers {first}-{end - 1}"
    if keep is Keep.plain:
        return _stage(device, t_f, t_b, t_w, t_bw, mem_b, mem_w, peak_f, peak_b, peak_w, None, name)
    kept = min(mem_b, profile.layers[first - 1].mem_out if first else 0.0)
    longer_f, longer_b = 0.0, t_f
    if keep is Keep.offload:
        if host is None:
            raise InputError('offload: the cluster has no "host": give its bandwidth')
        transfer, kept = mem_b / host.bandwidth, 0.0
        longer_f = max(0.0, transfer - host.overlap * t_f)
        longer_b = max(0.0, transfer - host.overlap * t_b)
        peak_f += mem_b
    return _stage(
        device,
        t_f + longer_f,
        t_b + longer_b,
        t_w,
        None if t_bw is None else t_bw + longer_b,
        kept,
        mem_w,
        peak_f,
        # While B runs it holds as much as a plain one, more than what is kept before and after.
        max(mem_b, mem_w) + peak_b - max(kept, mem_w),
        peak_w,
        mem_b - kept + max(peak_b, peak_w),
        f"{name}: {keep.value}",
    )


def _stage(
    device: int,
    t_f: float,
    t_b: float,
    t_w: float,
    t_bw: float | None,
    mem_b: float,
    mem_w: float,
    peak_f: float,
    peak_b: float,
    peak_w: float,
    peak_bw: float | None,
    name: str,
) -> Stage:
    # The profile's fields were validated; sums of them need no second look.
    return Stage.model_construct(
        device=device,
        t_f=t_f,
        t_b=t_b,
        t_w=t_w,
        t_bw=t_bw,
        mem_b=mem_b,
        mem_w=mem_w,
        peak_f=peak_f,
        peak_b=peak_b,
        peak_w=peak_w,
        peak_bw=peak_bw,
        name=name,
    )
