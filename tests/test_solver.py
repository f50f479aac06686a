"""The portfolio: certificates, objectives, anytime, fallbacks, Ctrl-C."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings

import zbsolve.solver.portfolio as solver_module
from tests.brute_force import brute_force
from tests.strategies import small_instances
from tests.test_search import random_instance
from zbsolve.errors import EnvironmentFailedError, InfeasibleError, InputError
from zbsolve.model.instance import Instance, equal_stages
from zbsolve.plan.check import check_plan
from zbsolve.solver.portfolio import Progress, solve


@pytest.fixture(scope="module")
def open_instance() -> Instance:
    """A small instance that heuristics and closed-form bounds leave open."""
    seeded = (random_instance(seed, placement) for seed in range(200) for placement in ("linear", "v"))
    return next(
        instance
        for instance in seeded
        if instance.num_stages * instance.num_microbatches <= 14
        and solve(instance, solver="heuristic").plan.gap > 0.01
    )


@settings(max_examples=25, derandomize=True, deadline=None)
@given(small_instances(max_passes=3))
def test_auto_closes_tiny_instances_at_the_brute_force_optimum(instance: Instance) -> None:
    """Cost = bound = exhaustive optimum under both objectives; infeasible exactly when nothing fits."""
    optimum = brute_force(instance)
    for objective, best in (("makespan", optimum.makespan), ("span", optimum.span)):
        if math.isinf(best):
            with pytest.raises(InfeasibleError, match="needs"):
                solve(instance, objective=objective, time_limit=10)  # type: ignore[arg-type]
            continue
        plan = solve(instance, objective=objective, time_limit=10).plan  # type: ignore[arg-type]
        assert plan.cost == pytest.approx(best, abs=1e-6)
        assert plan.status == "optimal"
        assert check_plan(plan) == []


def test_progress_only_ever_improves() -> None:
    """The stream's cost falls and its bound rises; the last line is the plan's."""
    lines: list[Progress] = []
    result = solve(
        equal_stages(3, 6, 2.0, 3.0, 1.0, 0.7, memory_cap=2.0), time_limit=5, progress=lines.append
    )
    assert lines == list(result.history)
    assert all(a.cost >= b.cost and a.bound <= b.bound for a, b in pairwise(lines))
    assert lines[-1].cost == pytest.approx(result.plan.cost)


def test_warm_start_is_a_floor() -> None:
    """Orders given by the user are never made worse, whatever the limit."""
    instance = equal_stages(4, 12, 2.0, 3.0, 1.0, 0.7, memory_cap=3.0)
    first = solve(instance, time_limit=3).plan
    again = solve(instance, time_limit=0.01, warm_start=first.schedule().orders).plan
    assert again.cost <= first.cost * (1 + 1e-9)


def test_ctrl_c_keeps_the_best(open_instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in a later phase returns what the earlier ones found."""

    def interrupt(_search: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(solver_module.SOLVERS, "auto", (interrupt,))
    result = solve(open_instance)
    assert result.interrupted
    assert check_plan(result.plan) == []


def test_a_missing_milp_backend_hands_over(
    open_instance: Instance, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """HiGHS failing, CBC answers; the failure is named in one warning."""
    import zbsolve.formulations.milp as milp

    real = milp.solve_milp

    def without_highs(*args: object, backend: str, **options: object) -> object:
        if backend == "highs":
            raise EnvironmentFailedError("HiGHS is missing: pip install highspy")
        return real(*args, backend=backend, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(milp, "solve_milp", without_highs)
    result = solve(open_instance, solver="milp", time_limit=20)
    assert check_plan(result.plan) == []
    assert any("HiGHS is missing" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "gurobi"}, "gurobi"),
        ({"time_limit": 0.0}, "positive"),
        ({"solver": "interleaved"}, "chunks"),
    ],
)
def test_bad_questions_get_one_line(options: dict[str, object], message: str) -> None:
    """Unknown solver, no time, a baseline that does not apply."""
    with pytest.raises(InputError, match=message):
        solve(equal_stages(2, 2), **options)  # type: ignore[arg-type]


def test_a_baseline_over_the_cap_says_what_it_needs() -> None:
    """GPipe with 8 micro-batches does not fit into memory for 4."""
    with pytest.raises(InfeasibleError, match=r"gpipe does not fit: devices 0-3 need 8 MiB each, have 4"):
        solve(equal_stages(4, 8, memory_cap=4.0), solver="gpipe")


def test_deterministic_plans_are_byte_identical() -> None:
    """Same seed, deterministic mode: the same file, no clock in it."""
    instance = equal_stages(3, 5, 2.0, 3.0, 1.0, 0.7, memory_cap=2.0)
    texts = {solve(instance, time_limit=2, seed=7, deterministic=True).plan.to_json() for _ in range(2)}
    assert len(texts) == 1


def test_fusing_only_where_it_pays() -> None:
    """A fused backward that is 30 % shorter is used, one that is longer is not."""
    base = equal_stages(2, 4)
    cheap = base.with_changes(stages=[stage.model_copy(update={"t_bw": 1.4}) for stage in base.stages])
    assert solve(cheap, time_limit=5).plan.cost < solve(base, time_limit=5).plan.cost
    dear = base.with_changes(stages=[stage.model_copy(update={"t_bw": 3.0}) for stage in base.stages])
    plan = solve(dear, time_limit=5).plan
    assert {task.kind for order in plan.schedule().orders for task in order} == {"F", "B", "W"}


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_limit_too_short_for_one_step_still_gives_a_plan(deterministic: bool) -> None:
    """1e-6 s: the constructive heuristics run, and nothing divides by the steps that fit (none)."""
    instance = equal_stages(3, 6, 1.0, 2.0, 1.5, 0.3, memory_cap=2.0)
    result = solve(instance, time_limit=1e-6, deterministic=deterministic)
    assert check_plan(result.plan) == []
