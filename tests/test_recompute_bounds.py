"""Combinatorial bounds of instances that recompute, under tight memory, against an exhaustive search."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.joint_oracle import every_decision, has_schedule_below, random_problem
from zbsolve.bounds.catalogue import all_bounds
from zbsolve.errors import InfeasibleError
from zbsolve.model.instance import Instance
from zbsolve.model.serial import require_feasible
from zbsolve.partition.layers import Keep


def recomputing_instance(seed: int) -> Instance | None:
    """A decision of a random problem with at least one stage that recomputes; None where it does not fit."""
    rng = random.Random(seed)
    problem = replace(random_problem(seed), keeps=(Keep.recompute, Keep.plain))
    decisions = [d for d in every_decision(problem) if Keep.recompute in d.keep]
    instance = problem.instance(rng.choice(decisions))
    if instance.memory_cap is not None:
        # Just enough for one micro-batch, or half as much again: there memory decides most.
        factor = rng.choice([1.0, 1.5])
        needs = [_need(instance, d) for d in range(instance.num_devices)]
        instance = instance.with_changes(memory_cap=[factor * need for need in needs])
    try:
        require_feasible(instance)
    except InfeasibleError:
        return None
    return instance


def _need(instance: Instance, device: int) -> float:
    held = [instance.stages[s] for s in instance.stages_on(device)]
    most = sum(max(stage.mem_b, stage.mem_w) + stage.highest_peak for stage in held)
    return instance.static(device) + most


def assert_bounds_hold(seed: int) -> None:
    """Each bound by itself, for both objectives: no schedule with R's in any place is below it."""
    instance = recomputing_instance(seed)
    if instance is None:
        return
    objectives = ("makespan", "span") if instance.num_tasks <= 12 else ("makespan",)
    for objective in objectives:
        highest: dict[str, float] = {}
        for bound in all_bounds(instance, objective):
            highest[bound.method] = max(bound.value, highest.get(bound.method, 0.0))
        limit = max(highest.values())
        assert not has_schedule_below(instance, objective, limit - 1e-6 * max(1.0, limit)), highest


def test_bounds_hold_wherever_recomputations_run() -> None:
    """Two hundred tiny instances."""
    for seed in range(200):
        assert_bounds_hold(seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(8))
def test_bounds_hold_wherever_recomputations_run_thousands(part: int) -> None:
    """The same on 8,000 instances."""
    for seed in range(1_000 * part, 1_000 * (part + 1)):
        assert_bounds_hold(seed)
