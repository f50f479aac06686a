"""The decision as a whole: which layers form a stage, on which device, and what is kept between F and B.

A :class:`DecisionProblem` is everything that is given; a :class:`Decision` is one answer without its order of
passes; :meth:`DecisionProblem.instance` is the scheduling instance that the answer leaves to the solver.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from zbsolve.errors import InputError
from zbsolve.model.instance import Instance, ModelCut, Stage, make_instance, place
from zbsolve.model.objective import Objective
from zbsolve.partition.cluster import Cluster, DeviceClass, device_classes
from zbsolve.partition.layers import Keep, LayerProfile, stage_of

Placement = Literal["linear", "loop", "v"]
PLACEMENTS: tuple[Placement, ...] = ("linear", "loop", "v")
# Chunks a device, by placement.
CHUNKS: dict[Placement, int] = {"linear": 1, "loop": 2, "v": 2}


@dataclass(frozen=True, slots=True)
class Decision:
    """One answer. ``devices[r]`` is the cluster's device at place r of the pipeline (rank r).

    ``split`` are the layers per stage and ``keep`` what each stage does with its activations, both in model
    order.
    """

    placement: Placement
    devices: tuple[int, ...]
    split: tuple[int, ...]
    keep: tuple[Keep, ...]


@dataclass(frozen=True)
class DecisionProblem:
    """What is given, and what is free.

    Attributes
    ----------
    num_devices : int
        Devices to use (p), at most the cluster's. Which, and in which order, is part of the decision.
    placements : tuple
        Placements to choose from: linear (one stage a device), loop and v (two).
    keeps : tuple
        What may happen to a stage's activations between F and B.
    split : tuple of int, optional
        Layers per stage where they are not free.
    fixed_order : bool
        Whether place r is the cluster's device r.
    """

    profile: LayerProfile
    cluster: Cluster
    num_devices: int
    num_microbatches: int
    objective: Objective = "makespan"
    placements: tuple[Placement, ...] = ("linear",)
    keeps: tuple[Keep, ...] = (Keep.plain,)
    split: tuple[int, ...] | None = None
    fixed_order: bool = False

    def __post_init__(self) -> None:
        for field in ("time_unit", "memory_unit"):
            mine, other = getattr(self.profile, field), getattr(self.cluster, field)
            if mine != other:
                raise InputError(
                    f"{field}: the layer profile has {mine!r}, the cluster {other!r}: give both in one unit"
                )
        p, n = self.num_devices, len(self.profile.layers)
        if not 1 <= p <= self.cluster.num_devices:
            raise InputError(f"{p} devices: the cluster has {self.cluster.num_devices}: use 1 to that many")
        if Keep.offload in self.keeps and self.cluster.host is None:
            raise InputError('offload: the cluster has no "host": give its bandwidth')
        fitting = tuple(placement for placement in self.placements if CHUNKS[placement] * p <= n)
        if not fitting:
            stages = min(CHUNKS[placement] for placement in self.placements) * p
            raise InputError(f"{n} layers cannot fill {stages} stages: use fewer devices or more layers")
        object.__setattr__(self, "placements", fitting)
        if self.split is not None:
            if sum(self.split) != n or min(self.split) < 1:
                given = ",".join(map(str, self.split))
                raise InputError(
                    f"the split {given} has {sum(self.split)} layers: give all {n}, at least one a stage"
                )
            fitting = tuple(q for q in fitting if CHUNKS[q] * p == len(self.split))
            if not fitting:
                raise InputError(f"the split has {len(self.split)} stages for {p} devices: give one a stage")
            object.__setattr__(self, "placements", fitting)

    @cached_property
    def classes(self) -> tuple[DeviceClass, ...]:
        """Devices that can change places without any effect; each one by itself where the order is fixed."""
        if not self.fixed_order:
            return device_classes(self.cluster)
        each = self.cluster.each[: self.num_devices]
        return tuple(DeviceClass((d,), device.speed, device.memory) for d, device in enumerate(each))

    @cached_property
    def _stages(self) -> dict[tuple[int, int, int, Keep], Stage]:
        return {}

    def stage(self, first: int, end: int, cls: int, keep: Keep = Keep.plain) -> Stage:
        """Layers ``first`` to ``end - 1`` on a device of class ``cls`` (``device`` means nothing)."""
        key = (first, end, cls, keep)
        found = self._stages.get(key)
        if found is None:
            speed = self.classes[cls].speed
            found = stage_of(
                self.profile, first, end, device=0, speed=speed, keep=keep, host=self.cluster.host
            )
            self._stages[key] = found
        return found

    @cached_property
    def _static(self) -> list[float]:
        return [0.0, *accumulate(layer.static_mem for layer in self.profile.layers)]

    def static(self, first: int, end: int) -> float:
        """Static memory of a run of layers."""
        return self._static[end] - self._static[first]

    def instance(self, decision: Decision) -> Instance:
        """The scheduling instance of a decision, its device r being the cluster's ``decision.devices[r]``.

        It is the one that a plan file of the decision has: a cost or a bound is of its schedules.
        """
        self._require_whole(decision)
        p, each, layers = self.num_devices, self.cluster.each, self.profile.layers
        places = place(p, decision.placement)
        ends = list(accumulate(decision.split))
        stages, static, hops = [], [0.0] * p, []
        for s, (end, size, r, keep) in enumerate(
            zip(ends, decision.split, places, decision.keep, strict=True)
        ):
            speed = each[decision.devices[r]].speed
            stages.append(
                stage_of(
                    self.profile,
                    end - size,
                    end,
                    device=r,
                    speed=speed,
                    keep=keep,
                    host=self.cluster.host,
                )
            )
            static[r] += self.static(end - size, end)
            if s + 1 < len(places):
                here, there = decision.devices[r], decision.devices[places[s + 1]]
                size_out = layers[end - 1].mem_out
                hops.append(0.0 if here == there else self.cluster.link(here, there).hop(size_out))
        caps: list[float] | None = [each[d].memory for d in decision.devices]
        assert caps is not None
        if all(math.isinf(cap) for cap in caps):
            caps = None
        else:
            # JSON knows no infinity: where one device is unlimited, more than it can ever hold.
            most = self._most_memory(stages) + sum(static)
            caps = [min(cap, max(most, 1.0)) if math.isinf(cap) else cap for cap in caps]
        return make_instance(
            name=self.profile.name,
            time_unit=self.profile.time_unit,
            memory_unit=self.profile.memory_unit,
            num_devices=p,
            num_microbatches=self.num_microbatches,
            stages=stages,
            t_comm=hops,
            memory_cap=caps,
            static_mem=static,
            model=self._model(decision),
        )

    def _model(self, decision: Decision) -> ModelCut | None:
        """The profiled model under this split; None where its stages would do other work than it does.

        A plan has R's for recomputation; what else is not plain the model itself would do.
        """
        if self.profile.model is None or not {Keep.plain, Keep.recompute}.issuperset(decision.keep):
            return None
        return ModelCut(**self.profile.model.model_dump(), layers_per_stage=tuple(decision.split))

    def _most_memory(self, stages: Sequence[Stage]) -> float:
        each = (max(s.mem_b, s.mem_w) + s.peak_f + s.peak_b + s.peak_w + s.peak_fused for s in stages)
        return self.num_microbatches * math.fsum(each)

    def _require_whole(self, decision: Decision) -> None:
        """Every layer exactly once, every device at most once: an error of the caller otherwise."""
        stages = CHUNKS[decision.placement] * self.num_devices
        if len(decision.split) != stages or sum(decision.split) != len(self.profile.layers):
            raise InputError(
                f"the split {decision.split} is none of {len(self.profile.layers)} layers in {stages} stages"
            )
        if min(decision.split) < 1 or len(set(decision.devices)) != self.num_devices:
            raise InputError(f"{decision}: an empty stage, or a device twice")
