"""The first plan: never worse than the catalogue or the published heuristic, whatever the time limit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings

from tests.strategies import small_instances
from tests.test_search import random_instance
from zbsolve.baselines import BASELINES
from zbsolve.baselines.base import orders_for
from zbsolve.baselines.greedy import greedy_candidates
from zbsolve.benchmark.known import load_known, shipped_path
from zbsolve.benchmark.suites import make_cases
from zbsolve.errors import InfeasibleError, InputError
from zbsolve.model.instance import Instance, equal_stages
from zbsolve.model.judge import check
from zbsolve.model.objective import OBJECTIVES
from zbsolve.model.schedule import Schedule
from zbsolve.model.serial import require_feasible, serial_orders
from zbsolve.model.simulator import simulate, simulate_for
from zbsolve.search.arrays import decode, encode
from zbsolve.search.backbones import GapFiller
from zbsolve.search.canonical import canonical
from zbsolve.search.list_scheduler import ListScheduler, preset
from zbsolve.search.policies import Refinement
from zbsolve.solver.portfolio import solve


def catalogue_schedules(instance: Instance, objective: str) -> Iterator[tuple[str, Schedule]]:
    """Every schedule of the catalogue that is one of this very instance and fits under its cap."""
    m = instance.num_microbatches
    for name in (*BASELINES, *(f"interleaved:{n}" for n in range(instance.num_devices, m + 1))):
        try:
            timed_on, orders = BASELINES[name].prepared(instance)
        except InputError:
            continue
        if timed_on.replicas > 1 or timed_on.recomputes:
            continue
        ours = orders_for(instance, timed_on, orders)
        if ours is None:
            continue
        schedule = simulate_for(instance, ours, objective)
        if not check(instance, schedule):
            yield name, schedule


def never_worse_than_the_catalogue(instance: Instance) -> None:
    """With hardly any time at all, by both costs."""
    for objective in OBJECTIVES:
        cost = solve(instance, objective=objective, time_limit=1e-3).plan.cost
        for name, schedule in catalogue_schedules(instance, objective):
            assert cost <= schedule.cost(objective) * (1 + 1e-9), (name, objective)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(small_instances(max_passes=12))
def test_a_plan_is_never_worse_than_the_catalogue(instance: Instance) -> None:
    """Any placement and cap: whatever schedule by name fits, the plan costs no more."""
    try:
        require_feasible(instance)
    except InfeasibleError:
        return
    never_worse_than_the_catalogue(instance)


def between_the_caps(placement: str, cap: str, seed: int) -> None:
    """Enough micro-batches that ZB-1p, ZB-2p and each interleaving differ."""
    base = random_instance(seed, placement, fuse=seed == 1)
    instance = base.with_changes(num_microbatches=12).with_memory_cap(cap)
    try:
        require_feasible(instance)
    except InfeasibleError:
        return
    never_worse_than_the_catalogue(instance)


@pytest.mark.parametrize(
    ("placement", "cap"), [("linear", "1p"), ("linear", "1.4p"), ("linear", "none"), ("loop", "1.4p")]
)
def test_larger_plans_are_never_worse_than_the_catalogue(placement: str, cap: str) -> None:
    """Under the caps of the automatic schedules and between them."""
    between_the_caps(placement, cap, 0)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["linear", "loop", "v"])
@pytest.mark.parametrize("cap", ["0.6p", "1p", "1.4p", "2p", "none"])
def test_many_plans_are_never_worse_than_the_catalogue(placement: str, cap: str) -> None:
    """The same on more seeds, placements and caps."""
    for seed in range(4):
        between_the_caps(placement, cap, seed)


def not_above_published(pattern: str) -> int:
    """How many published rows of these instances there are, the first plan at most their cost on each."""
    known = load_known(shipped_path())
    cases = make_cases("published", [pattern])
    for case in cases:
        published = known.published(case.instance, case.objective)
        assert published is not None
        plan = solve(case.instance, objective=case.objective, solver="heuristic", time_limit=1e-3).plan
        assert plan.cost <= published.cost + published.rounding, (case.instance.name, case.objective)
    return len(cases)


@pytest.mark.parametrize("pattern", ["zb-1.5B-m24-*", "zb-1.5B-m32-*", "zb-6.2B-m32-*"])
def test_the_first_plan_is_not_above_the_published_cost(pattern: str) -> None:
    """Two caps, two objectives: four rows an instance."""
    assert not_above_published(pattern) == 4


@pytest.mark.slow
def test_no_first_plan_is_above_the_published_cost() -> None:
    """24 cells, two objectives."""
    assert not_above_published("*") == 48


def test_w_apart_from_f_and_b_beats_the_published_span() -> None:
    """1.5B, m = 32, 2p: published 1,475.535; W's chosen apart reach the optimum, 1,472.235."""
    (case,) = make_cases("published", ["zb-1.5B-m32-2p"], ["span"])
    plan = solve(case.instance, objective="span", solver="heuristic").plan
    assert plan.cost == pytest.approx(1472.235, abs=1e-3)
    assert plan.solver.name == "heuristic"


@settings(max_examples=40, derandomize=True, deadline=None)
@given(small_instances(max_passes=16))
def test_filled_gaps_cost_what_their_orders_cost(instance: Instance) -> None:
    """Whatever patience fills them: the orders keep every rule, and cost what was said."""
    try:
        require_feasible(instance)
    except InfeasibleError:
        return
    filler = GapFiller(instance)
    backbones = [encode(serial_orders(instance))]
    scheduler = ListScheduler(instance)
    if math.isfinite(scheduler.run(preset(instance, patience_f=0.5, patience_w=1.0))[0]):
        backbones.append((scheduler.codes, scheduler.lengths))
    for backbone in backbones:
        filler.take(*backbone)
        for patience in (0.0, 0.6, 1.0):
            makespan, span = filler.run(patience)
            if math.isinf(makespan):
                continue
            schedule = simulate(instance, canonical(instance, decode(*filler.codes())))
            assert check(instance, schedule) == []
            assert (schedule.makespan, schedule.span) == pytest.approx((makespan, span))


def test_refinement_stops_at_the_bound_and_never_gets_worse() -> None:
    """Each policy can only lower the cost; none runs where the bound is reached."""
    instance = equal_stages(4, 12, 2.0, 2.0, 1.0, 0.1, memory_cap=6.0)
    refinement = Refinement(instance, "span")
    orders = serial_orders(instance)
    serial = simulate(instance, orders).span
    refinement.take(*encode(orders), serial)
    first = refinement.cost
    assert first <= serial
    scheduler = ListScheduler(instance)
    assert not refinement.run(scheduler, most=9, bound=first)
    assert refinement.run(scheduler, most=9, bound=0.0)
    assert refinement.cost < first
    found = canonical(instance, refinement.orders())
    assert simulate(instance, found).span == pytest.approx(refinement.cost)


def test_a_greedy_variant_says_what_it_costs() -> None:
    """Its own clocks are the simulator's."""
    for seed in range(6):
        instance = random_instance(seed, "linear")
        for greedy in greedy_candidates(instance):
            schedule = simulate(instance, greedy.orders)
            assert (schedule.makespan, schedule.span) == (greedy.makespan, greedy.span)
