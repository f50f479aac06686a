"""Lags between few micro-batches: hand-worked, never above a schedule, and bounds that rest on them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings

from tests.strategies import small_instances
from zbsolve.benchmark.random_instances import random_instance
from zbsolve.bounds.argument import Known
from zbsolve.bounds.catalogue import best_bound, bounds_from_lags
from zbsolve.bounds.waits import Lag
from zbsolve.errors import InfeasibleError
from zbsolve.formulations.cpsat import solve_cpsat
from zbsolve.formulations.cpsat_lags import prove_lag
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance, equal_stages, make_instance
from zbsolve.model.kinds import F
from zbsolve.model.serial import require_feasible, serial_orders
from zbsolve.model.simulator import simulate
from zbsolve.plan.certificate import ProvenLag
from zbsolve.plan.plan import Plan
from zbsolve.search.canonical import canonical
from zbsolve.search.list_scheduler import ListScheduler
from zbsolve.search.policies import presets
from zbsolve.solver.portfolio import solve
from zbsolve.solver.verify import reverify

SERIAL = equal_stages(2, 4, memory_cap=1)


def lag(instance: Instance, stage: int, distance: int, *, to_end: bool = False, seconds: float = 30.0) -> Lag:
    """A lag, proven as far as the time allows."""
    orders = serial_orders(instance)
    found = prove_lag(instance, stage, distance, orders, to_end=to_end, time_limit=seconds, workers=1)
    assert found is not None
    return found.lag


@pytest.mark.parametrize(
    ("stage", "distance", "to_end", "value"),
    [
        # Device 0 holds one micro-batch from F to W: F0 0-1, F1 1-2, B1 2-3, B0 3-4, W0 4-5, next F0 5.
        (0, 1, False, 5.0),
        (0, 2, False, 10.0),
        # Device 1 gets the next one from there: its own F's are 5 apart as well.
        (1, 1, False, 5.0),
        # From the last F0 to the end: all five units; from the last F1 one less; of two micro-batches 10.
        (0, 1, True, 5.0),
        (1, 1, True, 4.0),
        (0, 2, True, 10.0),
    ],
)
def test_lags_by_hand(stage: int, distance: int, to_end: bool, value: float) -> None:
    """One micro-batch at a time, unit times: every lag can be read off the serial schedule."""
    assert lag(SERIAL, stage, distance, to_end=to_end).value == pytest.approx(value)


def test_without_a_cap_only_the_stage_itself_spaces_its_forwards() -> None:
    """Nothing but F0 F0 F0: two F's later is 2 units later."""
    assert lag(equal_stages(2, 4), 0, 2).value == pytest.approx(2.0)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(small_instances(max_passes=8))
def test_no_schedule_has_a_shorter_lag(instance: Instance) -> None:
    """In every schedule found, each F is at least the lag after the F so many micro-batches before it."""
    try:
        require_feasible(instance)
    except InfeasibleError:
        return
    m, last = instance.num_microbatches, instance.num_stages - 1
    scheduler = ListScheduler(instance)
    schedules = [simulate(instance, serial_orders(instance))]
    for policy in presets(instance, patiences=1):
        if scheduler.run(policy)[0] < float("inf"):
            schedules.append(simulate(instance, canonical(instance, scheduler.orders())))
    lags = [lag(instance, last, 1, to_end=True, seconds=1)]
    if m > 1:
        lags.append(lag(instance, 0, 1, seconds=1))
    for schedule in schedules:
        start = {timed.task: timed.start for timed in schedule}
        for proven in lags:
            if proven.to_end:
                apart = [schedule.makespan - start[Task(F, proven.stage, m - proven.distance)]]
            else:
                forwards = [start[Task(F, proven.stage, j)] for j in range(m)]
                apart = [after - before for before, after in pairwise(forwards)]
            assert min(apart) >= proven.value - 1e-9
        for objective in ("makespan", "span"):
            for bound in bounds_from_lags(Known(instance, objective, tuple(lags))):
                assert bound.value <= schedule.cost(objective) + 1e-9


def test_a_tight_v_placement_is_closed() -> None:
    """random-30: caps of one micro-batch, V on 3 devices: what a device is forced to run proves it."""
    plan = solve(random_instance(30), time_limit=10).plan
    # 34.28 for one micro-batch, the other 15 follow 23.602 apart: 388.31.
    assert plan.makespan == pytest.approx(34.28 + 15 * 23.602)
    assert plan.status == "optimal"
    assert plan.bound_proof.method == "one machine"


def three_stages_a_device() -> Instance:
    """Stages 0 to 5 in turn on 2 devices, unit times, M_B = M_W = 1, room for three of them."""
    stages = [{"device": s % 2, "t_f": 1, "t_b": 1, "t_w": 1, "mem_b": 1, "mem_w": 1} for s in range(6)]
    return make_instance(name="turns", num_devices=2, num_microbatches=12, stages=stages, memory_cap=3.0)


def test_a_tight_loop_placement_is_closed_by_lags() -> None:
    """Three stages a device, whose states are not counted: only lags prove the optimum."""
    instance = three_stages_a_device()
    plan = solve(instance, time_limit=10).plan
    assert best_bound(instance, "makespan").value < 0.9 * plan.makespan
    # 6 F, 6 B and a W for one micro-batch; the other 11 follow 11 apart.
    assert plan.makespan == pytest.approx(13 + 11 * 11)
    assert plan.status == "optimal"
    assert plan.bound_proof.method == "one machine, proven lags"


def test_check_proves_the_lags_of_a_plan_anew() -> None:
    """A plan's lags are confirmed by solving them again; a false one is refuted."""
    plan = solve(three_stages_a_device(), time_limit=10).plan
    plan = Plan.model_validate_json(plan.to_json())
    assert reverify(plan).confirmed
    assert "proven lags" in reverify(plan).sentence
    false = tuple(
        ProvenLag(stage=known.stage, distance=known.distance, value=known.value * 1.5, to_end=known.to_end)
        for known in plan.bound_proof.lags
    )
    doubted = plan.model_copy(update={"bound_proof": plan.bound_proof.model_copy(update={"lags": false})})
    assert "the least is" in reverify(doubted).sentence
    assert reverify(doubted).violation is not None
    nowhere = ProvenLag(stage=99, distance=1, value=1.0)
    broken = plan.model_copy(update={"bound_proof": plan.bound_proof.model_copy(update={"lags": (nowhere,)})})
    assert reverify(broken).violation is not None


def test_a_bound_says_which_lags_it_rests_on() -> None:
    """SERIAL with its lag: 3 x 5 before the last F0, then 5: 20, the right value for p=2, m=4, cap 1."""
    proven = (lag(SERIAL, 0, 1), lag(SERIAL, 0, 1, to_end=True))
    best = max(bounds_from_lags(Known(SERIAL, "makespan", proven)), key=lambda bound: bound.value)
    assert best.value == pytest.approx(20.0)
    assert best.lags == proven
    assert "F(stage 0, j+1) is at least 5 after F(stage 0, j)" in best.statement


def test_what_the_checker_accepts_fits_the_exact_models() -> None:
    """Three F's of 0.01 under a cap of 0.029999999973 are within its tolerance: no bound may differ.

    On device 0 F F F B W B W B W, on device 1 three F B and the W's: 11 units.
    """
    instance = equal_stages(2, 3, t_comm=1.0, mem_b=0.01, mem_w=0.005, memory_cap=0.029999999973)
    plan = solve(instance, time_limit=10).plan
    assert plan.makespan == pytest.approx(11.0)
    result = solve_cpsat(instance, "makespan", time_limit=10, hint=plan.schedule())
    assert result.bound is not None
    assert result.bound <= 11.0
    near = equal_stages(2, 3, mem_b=0.01, mem_w=0.005, memory_cap=0.029999999973)
    assert lag(near, 0, 2).value == pytest.approx(2.0)
