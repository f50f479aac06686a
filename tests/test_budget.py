"""Budgets, and that every phase of a solve keeps one that is over or runs out at any moment."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zbsolve.solver.state as state_module
from tests.test_search import random_instance
from zbsolve.bounds.catalogue import all_bounds, best_bound
from zbsolve.bounds.refutation import Refutation
from zbsolve.bounds.windows import windows
from zbsolve.budget import Budget, collector_paused
from zbsolve.model.instance import Instance, Placement, equal_stages
from zbsolve.plan.check import check_plan
from zbsolve.search.list_scheduler import ListScheduler
from zbsolve.search.policies import automatic
from zbsolve.solver.construct import construct
from zbsolve.solver.portfolio import SOLVERS, solve
from zbsolve.solver.state import Search


def ticking(step: float) -> Callable[[], float]:
    """A clock on which every look takes ``step`` seconds."""
    looks = count()
    return lambda: step * next(looks)


@given(st.lists(st.floats(0, 10), max_size=8), st.floats(0, 20), st.floats(0, 20))
def test_a_counted_budget_is_what_was_charged(charges: list[float], seconds: float, share: float) -> None:
    """Charges to a part are the whole's, too; a part never outlives it; nothing but charges uses it up."""
    whole = Budget.counted(seconds)
    part = whole.part(share)
    assert part.left == pytest.approx(min(share, seconds))
    for charge in charges:
        part.charge(charge)
    assert whole.spent == pytest.approx(sum(charges))
    assert part.left == pytest.approx(min(share, seconds) - sum(charges))
    assert whole.over() == (whole.left <= 0)
    assert not part.affords(part.left)
    before = whole.left
    whole.set_aside(1.0)
    assert whole.left == pytest.approx(before - 1.0)


def test_the_walls_clock_takes_no_charges() -> None:
    """A look takes 1 s; begun at 0 with 5 s, charged 100 s at no cost: the next looks leave 4, 3."""
    budget = Budget(5.0, ticking(1.0))
    budget.charge(100.0)
    assert [budget.left, budget.left] == [4.0, 3.0]


def test_the_collector_runs_again_afterwards() -> None:
    """Also after an error, also when pauses are nested; one that was off stays off."""
    assert gc.isenabled()
    with collector_paused(), collector_paused():
        assert not gc.isenabled()
    with pytest.raises(ZeroDivisionError), collector_paused():
        1 / 0  # noqa: B018
    assert gc.isenabled()


# --- phases --------------------------------------------------------------------------------------


def hard(placement: Placement = "linear") -> Instance:
    """Small, and closed by no heuristic: every phase of the portfolio has something to do."""
    instances = (random_instance(seed, placement) for seed in range(200))
    return next(
        instance
        for instance in instances
        if instance.num_stages * instance.num_microbatches <= 14
        and solve(instance, solver="heuristic").plan.gap > 0.01
    )


@pytest.fixture(scope="module")
def open_instances() -> list[Instance]:
    """One of each of two placements."""
    return [hard("linear"), hard("v")]


def looks_of(number: int, instance: Instance, seconds: float) -> int:
    """How often a phase of ``auto`` looks at a clock on which each look takes 10 ms."""
    search = Search(instance, "makespan", 100.0, 0, False, 0.0)
    search.prove(best_bound(instance, "makespan"))
    construct(search)
    assert not search.done
    before, looks, began = search.cost, 0, search.budget.spent

    def clock() -> float:
        nonlocal looks
        looks += 1
        return began + 0.01 * looks

    search.budget = Budget(seconds, clock)
    search.refutation = Refutation(instance, "makespan")
    SOLVERS["auto"][number](search)
    assert search.cost == before or seconds > 0
    return looks


@pytest.mark.parametrize("number", range(len(SOLVERS["auto"])))
def test_a_phase_without_time_ends_at_once(number: int) -> None:
    """With its budget overdrawn no phase changes the plan, nor gets far; with 2 s each would have.

    A phase asks for the time before each trial, step, round or model.
    """
    stages = [
        {"device": d, "t_f": 10.0 + 3.7 * (d % 3), "t_b": 11.0 + 2.9 * (d % 4), "t_w": 7.0 + 1.3 * (d % 2)}
        for d in range(4)
    ]
    capped = equal_stages(4, 9, memory_cap=2.0).with_changes(stages=stages, t_comm=0.7)
    without = looks_of(number, capped, -1.0)
    assert without < looks_of(number, capped, 2.0)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("looks", [0, 10, 60])
def test_a_limit_that_passes_anywhere_leaves_a_valid_plan(
    open_instances: list[Instance], monkeypatch: pytest.MonkeyPatch, looks: int, deterministic: bool
) -> None:
    """The time runs out after so many looks at the clock, in whatever phase that is: plan, bound and status.

    In deterministic mode, after so many hundredths of a second's worth of counts.
    """
    for instance in open_instances:
        if not deterministic:
            monkeypatch.setattr(
                state_module, "Budget", lambda seconds, stop: Budget(seconds, ticking(1.0), stop)
            )
        limit = 0.01 * (looks + 1) if deterministic else float(looks + 1)
        plan = solve(instance, time_limit=limit, deterministic=deterministic).plan
        assert check_plan(plan) == []
        assert plan.lower_bound <= plan.cost


@given(st.integers(0, 60), st.sampled_from(["makespan", "span"]))
def test_bounds_that_ran_out_of_time_hold(looks: int, objective: str) -> None:
    """Whenever the counting of forced work stops, heads and tails are at most those of all of it."""
    instance = equal_stages(3, 6, 1.0, 2.0, 1.5, 0.3, memory_cap=2.0)
    full = windows(instance)
    budget = Budget(looks, ticking(1.0))
    cut = windows(instance, enough=budget.over)
    assert (cut.heads <= full.heads).all()
    assert (cut.tails <= full.tails).all()
    some = Budget(looks, ticking(1.0))
    assert 0 < best_bound(instance, objective, some.over).value <= best_bound(instance, objective).value


def test_with_no_time_bounds_and_presets_are_the_cheap_ones() -> None:
    """No longest paths, and no policy at all."""
    instance = equal_stages(3, 6, 1.0, 2.0, 1.5, 0.3, memory_cap=2.0)
    assert {bound.method for bound in all_bounds(instance, "span", lambda: True)} <= {
        "two windows",
        "memory area",
    }
    scheduler = ListScheduler(instance)
    assert automatic(scheduler, "span", 8, lambda: True) == float("inf")
    assert scheduler.lengths.sum() == 0


def test_a_large_step_says_that_the_limit_left_time_for_little(
    open_instances: list[Instance], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no grace, a microsecond is the first plan's alone: a note says so, with the figures and the cure.

    A second of counts, far more than the heuristics of a small instance take, is worth no note.
    """
    instance = open_instances[0]
    monkeypatch.setattr(state_module, "GRACE_SECONDS", 0.0)
    short = solve(instance, time_limit=1e-6, deterministic=True)
    assert check_plan(short.plan) == []
    assert f"1e-06 s leaves {instance.num_tasks} tasks no time for more than a first plan" in short.note
    assert solve(instance, time_limit=1.0, deterministic=True).note == ""
