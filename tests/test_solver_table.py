"""The right values of the table "Solver": known optima, honest statuses, kept limits.

Unit times, no hop latency, memory 1 held from F to W, unless said.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.backends import answers_of
from zbsolve.errors import InfeasibleError
from zbsolve.formulations.backends import BACKENDS
from zbsolve.formulations.common import FormulationResult, Status
from zbsolve.model.instance import Instance, equal_stages, make_instance
from zbsolve.model.judge import check
from zbsolve.model.schedule import Schedule
from zbsolve.model.simulator import simulate_for
from zbsolve.plan.check import check_plan
from zbsolve.solver.portfolio import solve

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:pulp")

SOLVERS: dict[str, Callable[..., FormulationResult]] = {
    backend.name: answers_of(backend) for backend in BACKENDS if backend.models(equal_stages(2, 2))
}


def warm_start(instance: Instance, objective: str) -> Schedule:
    """The heuristic's schedule."""
    plan = solve(instance, objective=objective, solver="heuristic").plan  # type: ignore[arg-type]
    return plan.schedule()


# (p, m), changes, {objective: optimum}, solvers that close it in seconds (MILPs: the small ones).
ALL = ("cpsat", "milp-highs", "milp-cbc")
ROWS = [
    # Makespan: head of device 3 (3 F) and its 8 * 3 of work. Span: the work alone.
    pytest.param((4, 8), {}, {"makespan": 27.0}, ("cpsat", "milp-highs"), id="no-cap-makespan"),
    pytest.param((4, 8), {}, {"span": 24.0}, ("cpsat",), id="no-cap-span"),
    pytest.param((4, 8), {"memory_cap": 4.0}, {"makespan": 27.0, "span": 27.0}, ("cpsat",), id="cap-4"),
    # Few micro-batches: the path of the last one, F down, B up, and device 0's W: m + 2p + 2.
    pytest.param((4, 3), {}, {"makespan": 13.0}, ALL, id="m3"),
    pytest.param((4, 1), {}, {"makespan": 9.0}, ALL, id="m1"),
    pytest.param((1, 3), {}, {"makespan": 9.0}, ALL, id="p1"),
    pytest.param((4, 4), {}, {"makespan": 15.0}, ALL, id="m4"),
    # 15 and six hops on the way down and up.
    pytest.param((4, 4), {"t_comm": 1.0}, {"makespan": 21.0}, ALL, id="hop-1"),
    # (m + p - 1) (T_F + T_B)
    pytest.param((4, 4), {"t_w": 0.0}, {"makespan": 14.0}, ALL, id="no-W"),
    # One micro-batch at a time: F0 F1 B1 B0 W0, 5 each.
    pytest.param((2, 4), {"memory_cap": [1.0, 1.0]}, {"makespan": 20.0}, ALL, id="caps-1-1"),
    # In whole milliseconds it would be 235.
    pytest.param(
        (3, 4),
        {"t_f": 18.522, "t_b": 18.086, "t_w": 9.337, "t_comm": 0.601},
        {"makespan": 231.389},
        ALL,
        id="unrounded",
    ),
]


@pytest.mark.parametrize(("size", "changes", "optima", "names"), ROWS)
def test_known_optima(
    size: tuple[int, int], changes: dict[str, float], optima: dict[str, float], names: tuple[str, ...]
) -> None:
    """Each solver that is up to the size proves the optimum, for the unrounded instance."""
    instance = equal_stages(*size, **changes)  # type: ignore[arg-type]
    for objective, best in optima.items():
        for name in names:
            result = SOLVERS[name](instance, objective, time_limit=60.0)
            assert result.status is Status.OPTIMAL, (name, objective, result)
            assert result.bound == pytest.approx(best, rel=1e-6)
            assert result.orders is not None
            schedule = simulate_for(instance, result.orders, objective)
            assert check(instance, schedule) == []
            assert schedule.cost(objective) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(("size", "changes", "optima", "names"), ROWS)
def test_known_optima_through_the_front(
    size: tuple[int, int], changes: dict[str, float], optima: dict[str, float], names: tuple[str, ...]
) -> None:
    """The portfolio reaches the same optima and calls them optimal; makespan and span are both stated."""
    instance = equal_stages(*size, **changes)  # type: ignore[arg-type]
    for objective, best in optima.items():
        plan = solve(instance, objective=objective, time_limit=30.0).plan  # type: ignore[arg-type]
        assert plan.status == "optimal"
        assert plan.cost == pytest.approx(best, rel=1e-9)
        assert plan.makespan >= plan.span
        assert check_plan(plan) == []


def test_no_cap_makespan_is_never_the_span() -> None:
    """p = 4, m = 8 without a cap: the plan of least span (24) states a makespan of 27 or more."""
    plan = solve(equal_stages(4, 8), objective="span", time_limit=30.0).plan
    assert plan.span == pytest.approx(24.0)
    assert plan.makespan >= 27.0 - 1e-9


@pytest.mark.parametrize("name", SOLVERS)
def test_no_memory_at_all_is_infeasible(name: str) -> None:
    """Cap 0: each solver proves it; the front names the devices, the need of 1 and what they have."""
    instance = equal_stages(4, 3, memory_cap=0.0)
    assert SOLVERS[name](instance, "makespan", time_limit=30.0).status is Status.INFEASIBLE
    with pytest.raises(InfeasibleError, match=r"devices 0-3 need 1 .* have 0"):
        solve(instance)


def test_gain_over_1f1b_is_a_share_of_the_step() -> None:
    """p = 4, m = 64: 1F1B takes (64 + 3) * 3 = 201, the optimum 3 + 64 * 3 = 195: 3.0 % of the step."""
    instance = equal_stages(4, 64)
    best = solve(instance, time_limit=20.0).plan
    base = solve(instance, solver="1f1b").plan
    assert (base.makespan, best.makespan, best.status) == (201.0, 195.0, "optimal")
    assert f"{(base.makespan - best.makespan) / base.makespan:.1%}" == "3.0%"


def test_a_short_limit_returns_the_warm_start_every_time() -> None:
    """0.01 s with a warm start, 20 runs: a valid plan of at most its cost, with a bound, all alike."""
    instance = equal_stages(4, 8, 1.0, 1.5, 0.7, memory_cap=3.0)
    warm = warm_start(instance, "makespan")
    costs = set()
    for _ in range(20):
        plan = solve(instance, time_limit=0.01, warm_start=warm.orders).plan
        assert plan.status == "feasible"
        assert 0 < plan.lower_bound < plan.makespan <= warm.makespan
        costs.add(plan.makespan)
    assert len(costs) == 1
    for name, run in SOLVERS.items():
        result = run(instance, "makespan", time_limit=0.01, hint=warm)
        assert result.status is Status.FEASIBLE, name
        assert result.orders is not None


@pytest.mark.parametrize("name", ["milp-highs", "milp-cbc"])
def test_a_milp_at_its_limit_tells_no_lie(name: str) -> None:
    """p = 4, m = 8, cap 4 (optimum 27): after 1 s not "infeasible", "optimal" only at 27, no bound above."""
    instance = equal_stages(4, 8, memory_cap=4.0)
    result = SOLVERS[name](instance, "makespan", time_limit=1.0)
    assert result.status is not Status.INFEASIBLE
    assert result.bound is None or result.bound <= 27.0 + 1e-9
    if result.status is Status.OPTIMAL:
        assert result.bound == pytest.approx(27.0)


def test_without_cbc_another_solver_takes_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CBC's binary is missing: a warning of one line names it, and the plan is still proven by another.

    Times and cap are such that bounds and heuristics alone leave a gap, so that the solver is asked.
    """
    monkeypatch.setattr("pulp.PULP_CBC_CMD.pulp_cbc_path", "/nonexistent/cbc")
    times = ((1.0, 3.0, 0.5), (2.5, 1.0, 2.0), (1.5, 1.5, 0.5))
    stages = [{"device": d, "t_f": f, "t_b": b, "t_w": w} for d, (f, b, w) in enumerate(times)]
    instance = make_instance(num_devices=3, num_microbatches=4, stages=stages, memory_cap=2.0)
    plan = solve(instance, solver="milp-cbc", time_limit=20.0).plan
    assert check_plan(plan) == []
    warnings = [record.getMessage() for record in caplog.records if "/nonexistent/cbc" in record.getMessage()]
    assert len(warnings) == 1
    assert "\n" not in warnings[0]
    assert plan.status == "optimal"


@pytest.mark.parametrize(
    ("p", "m", "limit"), [(16, 128, 10.0), pytest.param(32, 256, 20.0, marks=pytest.mark.slow)]
)
def test_large_instances_end_in_time_with_a_bound(p: int, m: int, limit: float) -> None:
    """6,144 and 24,576 tasks: a valid plan with a bound, at most a few seconds after the limit."""
    instance = equal_stages(p, m, 1.0, 1.1, 0.9, t_comm=0.1).with_memory_cap("1p")
    began = time.monotonic()
    plan = solve(instance, time_limit=limit).plan
    assert time.monotonic() - began < 2 * limit + 10.0
    assert 0 < plan.lower_bound <= plan.makespan
    assert plan.gap < 0.2


def test_deterministic_plans_are_equal_to_the_byte() -> None:
    """Two runs with one seed and a deterministic limit give the same file."""
    instance = equal_stages(3, 6, 1.0, 1.5, 0.7, t_comm=0.1, memory_cap=2.0)
    first, second = (
        solve(instance, time_limit=0.5, seed=7, deterministic=True).plan.to_json() for _ in range(2)
    )
    assert first == second
