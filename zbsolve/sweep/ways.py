"""The ways to use all devices of a cluster, costed as in a sweep.

The fastest come first, in front of them the simplest of those that are about as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from zbsolve.partition.cluster import Cluster
from zbsolve.partition.layers import Keep
from zbsolve.partition.problem import DecisionProblem, Placement
from zbsolve.sweep.grid import Config, Grid, Inputs, Outcome, evaluate

# Families that the joint search divides per pipeline device, for each way.
STEPS = 4

# Below this share of the step a gain is called none: a profile is not that exact.
WORTH_IT = 0.01


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration and what it costs."""

    config: Config
    outcome: Outcome


def ways(
    cluster: Cluster, global_batch: int, sizes: tuple[int, ...], placements: tuple[Placement, ...]
) -> list[Config]:
    """Every way that uses all devices."""
    n = cluster.num_devices
    counts = tuple(k for k in range(1, n + 1) if n % k == 0)
    grid = Grid(p=counts, d=counts, placements=placements, microbatch_sizes=sizes, global_batch=global_batch)
    # One device has no use for a second chunk; half the devices are no faster than all of them.
    return [
        config
        for config in grid.configs(cluster)
        if not (config.p == 1 and config.placement != "linear") and config.p * config.d == n
    ] or grid.configs(cluster)


def costed(
    inputs: Inputs, configs: Iterable[Config], say: Callable[[str], None], steps: int = STEPS
) -> list[Candidate]:
    """Those that fit, fastest first; in front of them the simplest of those that are about as fast."""
    found = []
    for config in configs:
        say(str(config))
        outcome = evaluate(inputs, config, steps)
        if outcome.status == "ok":
            found.append(Candidate(config, outcome))
    found.sort(key=_effort)
    fastest = min((c.outcome.per_sample for c in found), default=0.0)
    best = min(
        (c for c in found if c.outcome.per_sample <= fastest * (1 + WORTH_IT)), key=_simplicity, default=None
    )
    return [] if best is None else [best, *(c for c in found if c is not best)]


def _effort(candidate: Candidate) -> tuple[float, int, bool]:
    return round(candidate.outcome.per_sample, 9), *_simplicity(candidate)[:2]


def _simplicity(candidate: Candidate) -> tuple[int, bool, bool, float]:
    """Fewer pipeline devices, one chunk each, nothing recomputed."""
    config = candidate.config
    return config.p, config.placement != "linear", config.recompute, candidate.outcome.per_sample


def problem_of(inputs: Inputs, candidate: Candidate) -> DecisionProblem:
    """The decision that the slowest replica of a candidate leaves open."""
    config = candidate.config
    first = candidate.outcome.slowest * config.p
    part = inputs.cluster.with_memory(config.memory).part(first, config.p)
    return DecisionProblem(
        inputs.profile(config.microbatch_size),
        part,
        config.p,
        config.m,
        placements=(config.placement,),
        keeps=(Keep.plain, Keep.checkpoint) if config.recompute else (Keep.plain,),
    )
