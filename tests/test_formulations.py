"""The exact formulations against exhaustive search, and what they may claim."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.brute_force import brute_force
from tests.strategies import small_instances
from zbsolve.errors import EnvironmentFailedError
from zbsolve.formulation import FormulationResult, Status, canonical, make_ticks
from zbsolve.formulations import milp
from zbsolve.formulations.cpsat import solve_cpsat
from zbsolve.formulations.milp import solve_milp
from zbsolve.graph import BW, B, F, Task, W
from zbsolve.instance import Instance, equal_stages, make_instance
from zbsolve.schedule import check
from zbsolve.simulator import simulate, simulate_for

Solve = Callable[..., FormulationResult]


def solve_highs(instance: Instance, objective: str, **options: object) -> FormulationResult:
    return solve_milp(instance, objective, backend="highs", **options)  # type: ignore[arg-type]


def solve_cbc(instance: Instance, objective: str, **options: object) -> FormulationResult:
    return solve_milp(instance, objective, backend="cbc", **options)  # type: ignore[arg-type]


# PuLP 3 announces the interface of PuLP 4, which the requirements exclude.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:pulp")

SOLVERS: dict[str, Solve] = {"cpsat": solve_cpsat, "milp-highs": solve_highs, "milp-cbc": solve_cbc}
OBJECTIVES = ("makespan", "span")
RANDOM = settings(
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def cost_of(instance: Instance, objective: str, result: FormulationResult) -> float:
    assert result.orders is not None
    schedule = simulate_for(instance, result.orders, objective)
    assert check(instance, schedule) == []
    return schedule.cost(objective)


def serial_orders(instance: Instance) -> tuple[tuple[Task, ...], ...]:
    """One micro-batch after the other, W right behind its B."""
    orders: list[list[Task]] = [[] for _ in range(instance.num_devices)]
    for j in range(instance.num_microbatches):
        for s, stage in enumerate(instance.stages):
            orders[stage.device].append(Task(F, s, j))
        for s in reversed(range(instance.num_stages)):
            orders[instance.stages[s].device] += [Task(B, s, j), Task(W, s, j)]
    return tuple(tuple(order) for order in orders)


@RANDOM
@given(small_instances())
def test_all_solvers_find_the_exhaustive_optimum(instance: Instance) -> None:
    """CP-SAT and MILP by HiGHS and CBC equal brute force on both objectives, infeasibility included."""
    truth = brute_force(instance)
    for objective in OBJECTIVES:
        best = truth.span if objective == "span" else truth.makespan
        for name, solve in SOLVERS.items():
            result = solve(instance, objective, time_limit=60.0)
            if math.isinf(best):
                assert result.status is Status.INFEASIBLE, (name, objective, result)
                continue
            assert result.status is Status.OPTIMAL, (name, objective, best, result)
            assert cost_of(instance, objective, result) == pytest.approx(best, rel=1e-6, abs=1e-6), name
            assert result.bound is not None
            assert result.bound <= best * (1 + 1e-9) + 1e-9, (name, objective)
