"""What a sweep varies, and what one configuration costs.

A configuration is p x d devices (pipeline x data parallel), a placement, a micro-batch size b, m
micro-batches per replica, a share of the devices' memory, and a schedule. Replicas are consecutive devices of
the cluster; a step takes as long as its slowest replica, plus the all-reduce of the gradients, which is not
overlapped here. Every answer is a function of configuration and inputs alone: no clock decides anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from zbsolve.errors import InfeasibleError, InputError, UndecidedError
from zbsolve.partition.cluster import Cluster
from zbsolve.partition.layers import Keep, LayerProfile, join_profiles
from zbsolve.partition.problem import CHUNKS, Decision, DecisionProblem, Placement
from zbsolve.partition.search import decide
from zbsolve.partition.splits import balanced_split
from zbsolve.plan.plan import Plan
from zbsolve.solver.portfolio import solve

# What a configuration costs depends on these rules; another number makes stored results void.
RULES = 4

# Families that the joint search divides per configuration and pipeline device.
STEPS = 6

# Gradients of 2 bytes beside 16 of static memory a parameter (mixed-precision Adam).
GRADIENT_SHARE = 0.125


@dataclass(frozen=True, slots=True)
class Config:
    """One point of the grid. ``schedule`` is ``solved`` (split and order decided jointly) or a baseline.

    ``recompute``: stages may checkpoint their layers.
    """

    p: int
    d: int
    placement: Placement
    microbatch_size: int
    m: int
    memory: float
    schedule: str
    recompute: bool = False

    def __str__(self) -> str:
        extra = ", recompute allowed" if self.recompute else ""
        return (
            f"p={self.p} d={self.d} {self.placement} b={self.microbatch_size} m={self.m} "
            f"memory x{self.memory:g} {self.schedule}{extra}"
        )


@dataclass(frozen=True, slots=True)
class Grid:
    """Values to cross. Without ``m`` it follows from the global batch: m = B / (b d), where that is whole."""

    p: tuple[int, ...]
    d: tuple[int, ...] = (1,)
    placements: tuple[Placement, ...] = ("linear",)
    microbatch_sizes: tuple[int, ...] = (1,)
    m: tuple[int, ...] = ()
    global_batch: int | None = None
    memory: tuple[float, ...] = (1.0,)
    schedules: tuple[str, ...] = ("solved",)
    recompute: tuple[bool, ...] = (False,)

    def configs(self, cluster: Cluster) -> list[Config]:
        """Every configuration that has enough devices, in a fixed order."""
        if bool(self.m) == (self.global_batch is not None):
            raise InputError("give either the micro-batches (-m) or the global batch (--batch)")
        found = list(dict.fromkeys(self._crossed(cluster)))
        if not found:
            raise InputError(self._nothing_left(cluster.num_devices))
        return found

    def _nothing_left(self, devices: int) -> str:
        """Why no configuration is left."""
        replicas = [d for d in self.d if d * min(self.p) <= devices]
        if not replicas:
            return (
                f"no configuration is left: {min(self.p)} pipeline devices x {min(self.d)} replicas are more "
                f"than the cluster's {devices} devices: use fewer"
            )
        units = sorted({b * d for b in self.microbatch_sizes for d in replicas})
        return (
            f"no configuration is left: a batch of {self.global_batch} is no multiple of micro-batch size x "
            f"replicas ({', '.join(map(str, units))}): change the batch, or the micro-batch size (-b)"
        )

    def _crossed(self, cluster: Cluster) -> Iterator[Config]:
        for p, d, placement, b in product(self.p, self.d, self.placements, self.microbatch_sizes):
            if p * d > cluster.num_devices:
                continue
            counts = self.m
            if self.global_batch is not None:
                counts = () if self.global_batch % (b * d) else (self.global_batch // (b * d),)
            for m, memory, schedule, recompute in product(
                counts, self.memory, self.schedules, self.recompute
            ):
                if recompute and schedule != "solved":
                    continue
                yield Config(p, d, placement, b, m, memory, schedule, recompute)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What every configuration of a sweep shares. One profile per micro-batch size that was measured."""

    profiles: tuple[LayerProfile, ...]
    cluster: Cluster

    def profile(self, microbatch_size: int) -> LayerProfile:
        """The profile of that size, else the nearest one in proportion."""
        nearest = min(
            self.profiles,
            key=lambda profile: (abs(profile.microbatch_size - microbatch_size), profile.microbatch_size),
        )
        return nearest.scaled(microbatch_size)

    def require_one_kind(self) -> None:
        """Refuse profiles in different units, or two for one micro-batch size."""
        join_profiles([profile.model_copy(update={"microbatch_size": 1}) for profile in self.profiles])
        sizes = [profile.microbatch_size for profile in self.profiles]
        if len(set(sizes)) < len(sizes):
            raise InputError("two layer profiles have the same microbatch_size: give one of each")

    def digest(self) -> str:
        """A fingerprint of the inputs and the rules."""
        data = [
            RULES,
            STEPS,
            *(p.model_dump(mode="json") for p in self.profiles),
            self.cluster.model_dump(mode="json"),
        ]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def key(self, config: Config) -> str:
        """The name under which a configuration's result is stored."""
        text = self.digest() + json.dumps(asdict(config), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a configuration costs; times in the profile's unit, memory in its unit.

    Attributes
    ----------
    status : str
        ``ok``; ``infeasible`` (does not fit in memory), ``undecided`` (none found within the steps, and
        none proven impossible) or ``not applicable``, then with a reason.
    step : float
        Makespan of the slowest replica plus the all-reduce.
    lower_bound : float
        No plan for this configuration has a shorter step (for a baseline: on its own split).
    peak_memory : float
        Of the device that holds most (in the slowest replica).
    slowest : int
        Number of the slowest replica, whose figures and layers these are.
    """

    status: str
    reason: str = ""
    step: float = 0.0
    makespan: float = 0.0
    all_reduce: float = 0.0
    per_sample: float = 0.0
    lower_bound: float = 0.0
    peak_memory: float = 0.0
    slowest: int = 0
    layers_per_stage: tuple[int, ...] = ()
    keep: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        """From :func:`dataclasses.asdict`'s JSON."""
        lists = {field: tuple(data[field]) for field in ("layers_per_stage", "keep")}
        return cls(**{**data, **lists})


def evaluate(inputs: Inputs, config: Config, steps: int = STEPS) -> Outcome:
    """Cost of one configuration: the slowest replica, and the all-reduce between replicas.

    ``steps``: families that the joint search divides for a replica, per pipeline device.
    """
    profile = inputs.profile(config.microbatch_size)
    cluster = inputs.cluster.with_memory(config.memory)
    parts = [cluster.part(number * config.p, config.p) for number in range(config.d)]
    slowest: tuple[Plan, float, tuple[int, ...], tuple[str, ...]] | None = None
    number = 0
    try:
        for part in dict.fromkeys(parts):
            found = _replica(profile, part, config, steps)
            if slowest is None or found[0].makespan > slowest[0].makespan:
                slowest, number = found, parts.index(part)
    except InfeasibleError as error:
        return Outcome("infeasible", str(error))
    except UndecidedError as error:
        return Outcome("undecided", str(error))
    except InputError as error:
        return Outcome("not applicable", str(error))
    assert slowest is not None
    plan, bound, split, keep = slowest
    reduce = all_reduce(plan.instance.static_mem or (), cluster, config)
    step = plan.makespan + reduce
    return Outcome(
        status="ok",
        step=step,
        makespan=plan.makespan,
        all_reduce=reduce,
        per_sample=step / (config.d * config.m * config.microbatch_size),
        lower_bound=bound + reduce,
        peak_memory=max(plan.peak_memory),
        slowest=number,
        layers_per_stage=split,
        keep=keep,
    )


def _replica(
    profile: LayerProfile, part: Cluster, config: Config, steps: int
) -> tuple[Plan, float, tuple[int, ...], tuple[str, ...]]:
    keeps = (Keep.plain, Keep.checkpoint) if config.recompute else (Keep.plain,)
    problem = DecisionProblem(profile, part, config.p, config.m, placements=(config.placement,), keeps=keeps)
    if config.schedule == "solved":
        result = decide(problem, time_limit=1e9, steps=steps * config.p)
        kept = tuple(keep.value for keep in result.decision.keep)
        return result.plan, result.lower_bound, result.decision.split, kept
    stages = CHUNKS[config.placement] * config.p
    split = balanced_split([layer.cost for layer in profile.layers], stages)
    fixed = DecisionProblem(
        profile, part, config.p, config.m, placements=(config.placement,), split=split, fixed_order=True
    )
    decision = Decision(config.placement, tuple(range(config.p)), split, (Keep.plain,) * stages)
    plan = solve(fixed.instance(decision), solver=config.schedule).plan
    return plan, plan.lower_bound, split, (Keep.plain.value,) * stages


def all_reduce(static: Sequence[float], cluster: Cluster, config: Config) -> float:
    """Ring all-reduce of the gradients of each rank over its d replicas; the slowest rank counts.

    2 (d - 1) / d of the gradients pass each link, in 2 (d - 1) turns of its latency.
    """
    d, p = config.d, config.p
    if d == 1:
        return 0.0
    longest = 0.0
    for rank, held in enumerate(static):
        ring = [number * p + rank for number in range(d)]
        links = [cluster.link(a, b) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
        share = held * GRADIENT_SHARE / d
        longest = max(longest, 2 * (d - 1) * max(link.hop(share) for link in links))
    return longest
