"""Layers to stages: the contiguous split whose busiest stage is least busy.

The split is exact for one stage per device (linear placement). It looks at times alone: memory is for the
instance that it makes, and which order is best on it is for the solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zbsolve.errors import InputError
from zbsolve.instance import Instance, NonNegative, make_instance, raise_first, read_json

SCHEMA = "zbsolve.layers/1"


class Layer(BaseModel):
    """One layer's pass times and the activation memory it holds, in the profile's units (as a stage's)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str | None = None
    t_f: NonNegative
    t_b: NonNegative
    t_w: NonNegative
    mem_b: NonNegative = 0.0
    mem_w: NonNegative = 0.0
    static_mem: NonNegative = 0.0

    @property
    def cost(self) -> float:
        """Device time of one micro-batch."""
        return self.t_f + self.t_b + self.t_w


class LayerProfile(BaseModel):
    """A model as its layers, in order: what one device measures layer by layer."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)

    schema_: Literal["zbsolve.layers/1"] = Field(default="zbsolve.layers/1", alias="schema")
    name: str = "unnamed"
    time_unit: str = "ms"
    memory_unit: str = "MiB"
    layers: Annotated[tuple[Layer, ...], Field(min_length=1)]

    @field_validator("layers", mode="before")
    @classmethod
    def _accept_json_array(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


def load_layers(path: str | Path) -> LayerProfile:
    """Read a layer profile."""
    data = read_json(path)
    if isinstance(data, dict) and data.get("schema") != SCHEMA:
        raise InputError(f'{path}: schema: is {data.get("schema")!r}: give a layer profile, "{SCHEMA}"')
    try:
        return LayerProfile.model_validate(data)
    except ValidationError as error:
        raise_first(error, str(path))


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, sizes at most one apart. The last stages get fewer: they often hold the head."""
    _require_enough(layers, stages)
    return tuple(layers // stages + (1 if s < layers % stages else 0) for s in range(stages))


def balanced_split(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Layers per stage with the least possible bottleneck; among those, the least sum of squared loads.

    Dynamic program over (layers placed, stages used), first for the bottleneck, then for the
    squares of the loads that stay within it. O(n^2 p) for n layers and p stages. Every layer lands in
    exactly one stage and no stage is empty.
    """
    n = len(costs)
    _require_enough(n, stages)
    total = [0.0, *accumulate(costs)]

    def load(first: int, last: int) -> float:
        return total[last] - total[first]

    bottleneck = [load(0, k) for k in range(n + 1)]
    for used in range(2, stages + 1):
        bottleneck = [
            min((max(bottleneck[i], load(i, k)) for i in range(used - 1, k)), default=float("inf"))
            for k in range(n + 1)
        ]
    # Rounding of prefix sums must not rule out the split that reaches the bottleneck.
    limit = bottleneck[n] * (1 + 1e-12)
    squares = [load(0, k) ** 2 if k > 0 and load(0, k) <= limit else float("inf") for k in range(n + 1)]
    cuts: list[list[int]] = []
    for used in range(2, stages + 1):
        following, cut = [float("inf")] * (n + 1), [0] * (n + 1)
        for k in range(used, n + 1):
            options = [(squares[i] + load(i, k) ** 2, i) for i in range(used - 1, k) if load(i, k) <= limit]
            if options:
                following[k], cut[k] = min(options)
        squares = following
        cuts.append(cut)
    ends = [n]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    return tuple(b - a for a, b in pairwise([0, *reversed(ends)]))


def stage_loads(costs: Sequence[float], split: Sequence[int]) -> list[float]:
    """Sum of costs per stage."""
    ends = list(accumulate(split))
    return [sum(costs[end - size : end]) for end, size in zip(ends, split, strict=True)]


def imbalance(costs: Sequence[float], split: Sequence[int]) -> float:
    """How far the busiest stage is above the mean: 0 is perfect, 0.25 wastes a quarter of the mean."""
    loads = stage_loads(costs, split)
    mean = sum(loads) / len(loads)
    return max(loads) / mean - 1 if mean > 0 else 0.0


def instance_of_split(
    profile: LayerProfile, split: Sequence[int], num_microbatches: int, t_comm: float
) -> Instance:
    """The instance in which stage s, on device s, is the s-th run of layers."""
    ends = list(accumulate(split))
    stages, static = [], []
    for device, (end, size) in enumerate(zip(ends, split, strict=True)):
        run = profile.layers[end - size : end]
        stages.append(
            {
                "device": device,
                **{
                    field: sum(getattr(layer, field) for layer in run)
                    for field in ("t_f", "t_b", "t_w", "mem_b", "mem_w")
                },
                "name": f"layers {end - size}-{end - 1}",
            }
        )
        static.append(sum(layer.static_mem for layer in run))
    return make_instance(
        name=profile.name,
        time_unit=profile.time_unit,
        memory_unit=profile.memory_unit,
        num_devices=len(split),
        num_microbatches=num_microbatches,
        stages=stages,
        t_comm=t_comm,
        static_mem=static,
    )


def _require_enough(layers: int, stages: int) -> None:
    if stages < 1:
        raise InputError(f"{stages} stages: give at least 1")
    if layers < stages:
        raise InputError(f"{layers} layers cannot fill {stages} stages: use fewer stages or more layers")
