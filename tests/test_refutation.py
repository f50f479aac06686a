"""Refuting costs by the orders of every device: never a cost that some schedule has, and hand-worked values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from tests.brute_force import brute_force
from tests.strategies import small_instances
from tests.test_windows import KIND, some_schedules
from zbsolve.bounds import best_bound
from zbsolve.errors import InfeasibleError
from zbsolve.graph import W
from zbsolve.instance import Instance
from zbsolve.memory import require_feasible
from zbsolve.precedence import back
from zbsolve.refutation import Refutation, refuted_bounds


@settings(max_examples=150, derandomize=True, deadline=None)
@given(small_instances(max_passes=10, capped=True))
def test_no_schedule_is_refuted_at_its_own_cost(instance: Instance) -> None:
    """Nor does it contradict the heads and tails that hold in all schedules of its cost."""
    try:
        require_feasible(instance)
    except InfeasibleError:
        return
    first = instance.stages[0].device
    schedules = some_schedules(instance)
    for objective in ("makespan", "span"):
        refutation = Refutation(instance, objective, least_move=0.0)
        # From the longest to the shortest, as a search goes: each starts from what the one before left.
        for schedule in sorted(schedules, key=lambda s: -s.cost(objective)):
            assert refutation.refutes(schedule.cost(objective)) is False
            own = [t for t in schedule if instance.stages[t.task.stage].device == first]
            begin = 0.0 if objective == "makespan" else min(t.start for t in own)
            end = schedule.makespan if objective == "makespan" else max(t.end for t in own)
            for timed in schedule:
                kind, s, j = timed.task
                fusible = instance.stages[s].t_bw is not None
                if kind is W and fusible:
                    continue  # stands in for the rest of its backward
                left_at = timed.start + back(instance.stages[s]) if KIND[kind] == 1 and fusible else timed.end
                assert timed.start - begin >= refutation.heads[KIND[kind], s, j] - 1e-6
                assert end - left_at >= refutation.tails[KIND[kind], s, j] - 1e-6


@settings(max_examples=60, derandomize=True, deadline=None)
@given(small_instances())
def test_nothing_up_from_the_optimum_is_refuted(instance: Instance) -> None:
    """The bound found by refutation is none above the best of all schedules, under both objectives."""
    optimum = brute_force(instance)
    if not np.isfinite(optimum.makespan):
        return
    for objective, best in (("makespan", optimum.makespan), ("span", optimum.span)):
        found = list(refuted_bounds(Refutation(instance, objective), 0.0, best))
        assert all(bound.value <= best + 1e-9 for bound in found)
        for cost in (best, 1.1 * best):
            assert Refutation(instance, objective).refutes(cost) is False
