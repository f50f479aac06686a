"""Refuting costs by the orders of every device: never a cost that some schedule has; worked by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.brute_force import brute_force
from tests.strategies import small_instances
from tests.test_windows import KIND, some_schedules
from zbsolve.benchmark.random_instances import random_instance
from zbsolve.bounds import device_states, refutation
from zbsolve.bounds.argument import Known
from zbsolve.bounds.arguments.one_machine import window_bounds
from zbsolve.bounds.bound import Bound
from zbsolve.bounds.catalogue import best_bound
from zbsolve.bounds.device_states import DeviceStates
from zbsolve.bounds.refutation import Refutation, refuted_bounds, shaved_bounds
from zbsolve.bounds.waits import Lag, LeastTime, back, backward_adds
from zbsolve.bounds.windows import windows
from zbsolve.errors import InfeasibleError
from zbsolve.model.instance import Instance, equal_stages, make_instance
from zbsolve.model.kinds import F, W
from zbsolve.model.serial import require_feasible, serial_orders
from zbsolve.model.simulator import simulate
from zbsolve.plan.certificate import SolverInfo
from zbsolve.plan.check import check_plan
from zbsolve.plan.plan import Plan, parse_plan
from zbsolve.solver import portfolio as solver
from zbsolve.solver.portfolio import solve
from zbsolve.solver.prove import refute
from zbsolve.solver.verify import reverify

FloatArray = NDArray[np.float64]


def turn_with_little_memory() -> Instance:
    """Two devices, V, two micro-batches, caps of 3; only the F's of device 1 take 3, all else 1."""
    stages = [
        {"device": device, "t_f": t_f, "t_b": 1.0, "t_w": 1.0, "mem_b": mem_b, "mem_w": 1.0}
        for device, t_f, mem_b in ((0, 1.0, 1.0), (1, 3.0, 1.0), (1, 3.0, 1.0), (0, 1.0, 2.0))
    ]
    return make_instance(num_devices=2, num_microbatches=2, memory_cap=3.0, stages=stages)


def test_what_is_put_off_comes_back() -> None:
    """No single state of a device is cheap both before and after: 24, where heads and tails alone say 23.

    F0.1 does not fit beside F0.0 and F3.0, so it waits for B3.0, which ends at 9 at the earliest, and F1.1
    starts from 10. Before F2.1, device 1 must make room for it: either B1.0 and one W run first, so B2.0,
    B1.0, W and F1.1 take it from 9 to 15; or B1.0 is put off and W2.0 runs, to 14. From the end of F2.1 the
    step takes at least F3.1, B3.1, B2.1, B1.1, B0.1, W0.1: 6, so 15 + 3 + 6 = 24, or 23. But if put off,
    B1.0 runs after F2.1, from 17 on, and F3.1 has no room before B0.0 and W0.0: 20 + 6 = 26.
    """
    instance = turn_with_little_memory()
    assert best_bound(instance, "makespan").value == 23.0
    assert Refutation(instance, "makespan").refutes(23.999) is True
    assert Refutation(instance, "makespan").refutes(24.0) is False
    assert Refutation(instance, "makespan").refutes(24.0 * (1 - 5e-10)) is False  # rounding is spared
    assert solve(instance, solver="cpsat", time_limit=20).plan.cost == 24.0


def orders_of(instance: Instance, device: int) -> Iterator[list[tuple[int, int]]]:
    """Every canonical order of a device as (row, micro-batch), by the definition of memory."""
    held, m = instance.stages_on(device), instance.num_microbatches
    chain = len(held)
    cap = instance.cap(device) - instance.static(device) + 1e-6
    stages = [instance.stages[s] for s in held]

    def go_on(order: list[tuple[int, int]], done: set[tuple[int, int]], memory: float) -> Iterator[None]:
        if len(order) == 3 * chain * m:
            yield None
        for r in range(3 * chain):
            j = sum(row == r for row, _ in order)
            stage = stages[r if r < chain else 2 * chain - 1 - r if r < 2 * chain else r - 2 * chain]
            split = stage.t_bw is None
            waits = r - 1 if r < 2 * chain else 2 * chain - 1 - (r - 2 * chain)
            if j == m or (waits >= 0 and (waits, j) not in done):
                continue
            pending = stage.mem_w if split else 0.0
            if r < chain:
                while_running, left = memory + stage.mem_b + stage.peak_f, memory + stage.mem_b
            elif r < 2 * chain:
                while_running, left = memory + backward_adds(stage), memory - stage.mem_b + pending
            else:
                while_running, left = memory + (stage.peak_w if split else 0.0), memory - pending
            if max(while_running, left) > cap:
                continue
            order.append((r, j))
            yield from go_on(order, done | {(r, j)}, left)
            order.pop()

    order: list[tuple[int, int]] = []
    for _ in go_on(order, set(), 0.0):
        yield list(order)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(small_instances(max_passes=4, capped=True), st.integers(0, 10_000))
def test_states_stand_for_all_orders_of_a_device(instance: Instance, seed: int) -> None:
    """Least start and least rest of every task over all orders, one by one.

    Both exactly where nothing limits them from the other side; never more than in any order within a cost.
    """
    draw = np.random.default_rng(seed)
    device = int(draw.integers(instance.num_devices))
    if len(instance.stages_on(device)) * instance.num_microbatches > 3:
        return
    m = instance.num_microbatches
    probe = DeviceStates(instance, device)
    lengths, rows = probe.lengths, len(probe.lengths)
    heads = np.sort(draw.integers(0, 8, (rows, m)).astype(float), axis=1)
    tails = -np.sort(-draw.integers(0, 8, (rows, m)).astype(float), axis=1)
    orders = list(orders_of(instance, device))

    def timed(order: list[tuple[int, int]]) -> tuple[FloatArray, FloatArray]:
        starts, rests, now, rest = np.zeros((rows, m)), np.zeros((rows, m)), 0.0, 0.0
        for task in order:
            starts[task] = max(now, heads[task])
            now = starts[task] + lengths[task[0]]
        for task in reversed(order):
            rests[task] = max(rest, tails[task])
            rest = rests[task] + lengths[task[0]]
        return starts, rests

    def narrowed(heads: FloatArray, tails: FloatArray, cost: float) -> tuple[FloatArray, FloatArray] | None:
        states = DeviceStates(instance, device)
        states.enumerate(heads, tails, cost, 1_000_000, lambda: False)
        return states.narrow(heads, tails, 0.0, cost)

    both = [timed(order) for order in orders]
    if not both:
        assert narrowed(heads, tails, 1e9) is None
        return
    nothing = np.full((rows, m), -np.inf)
    free = narrowed(heads, nothing, 1e9), narrowed(nothing, tails, 1e9)
    assert free[0] is not None
    assert free[1] is not None
    np.testing.assert_array_equal(free[0][0], np.min([starts for starts, _ in both], axis=0))
    np.testing.assert_array_equal(free[1][1], np.min([rests for _, rests in both], axis=0))
    costs = [float((starts + lengths[:, None] + rests).max()) for starts, rests in both]
    cost = sorted(costs)[len(costs) // 2]
    within = narrowed(heads, tails, cost)
    assert within is not None
    kept = [each for each, total in zip(both, costs, strict=True) if total <= cost]
    assert (within[0] <= np.min([starts for starts, _ in kept], axis=0)).all()
    assert (within[1] <= np.min([rests for _, rests in kept], axis=0)).all()


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
        refutation = Refutation(instance, objective)
        # From the longest to the shortest, as a search goes: each starts from what the one before left.
        for schedule in sorted(schedules, key=lambda s: -s.cost(objective)):
            cost = schedule.cost(objective)
            assert refutation.refutes(cost, least_move=0.0) is False
            assert refutation.shaves(cost, np.random.default_rng(0), 20) is False
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
        known = Refutation(instance, objective)
        found = list(refuted_bounds(known, 0.0, best))
        found += shaved_bounds(known, max((bound.value for bound in found), default=0.0), best)
        assert all(bound.value <= best + 1e-9 for bound in found)
        for cost in (best, 1.1 * best):
            assert Refutation(instance, objective).refutes(cost) is False


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_machine_code_refutes_the_same(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops in plain Python and compiled: equal heads and tails, to the last bit."""
    instance = random_instance(25).with_changes(num_microbatches=4)
    cost = 1.02 * best_bound(instance, objective).value
    compiled, plain = (Refutation(instance, objective) for _ in range(2))
    outcome = compiled.refutes(cost)
    monkeypatch.setattr(device_states, "_compiled", lambda: device_states.narrow)
    monkeypatch.setattr(refutation, "_compiled", lambda: refutation.follow)
    assert plain.refutes(cost) is outcome
    np.testing.assert_array_equal(compiled.heads, plain.heads)
    np.testing.assert_array_equal(compiled.tails, plain.tails)


def test_devices_with_too_many_states_prove_nothing_and_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """No states, no refutation; and what has no time left says so."""
    instance = turn_with_little_memory()
    assert Refutation(instance, "makespan", enough=lambda: True).refutes(23.5) is None
    monkeypatch.setattr(refutation, "MOST_STATES_OF_ONE", 10)
    assert Refutation(instance, "makespan").refutes(23.5) is False
    monkeypatch.setattr(refutation, "MOST_STATES_OF_ONE", 30)  # device 0 has 23 within 24, device 1 has 36
    known = Refutation(instance, "makespan")
    assert known.refutes(24.0) is False
    assert not known.complete


@settings(max_examples=60, derandomize=True, deadline=None)
@given(small_instances(max_passes=12, fusible=False, capped=True), st.data())
def test_paths_alone_give_the_windows(instance: Instance, data: st.DataObject) -> None:
    """Followed from the first F's start, from the last tasks' ends: what windows say that count no work.

    Nothing of what is followed is in the heads and tails here, lags included.
    """
    try:
        require_feasible(instance)
    except InfeasibleError:
        return
    S, m, p = instance.num_stages, instance.num_microbatches, instance.num_devices
    stages, distances = st.integers(0, S - 1), st.integers(1, max(1, m - 1))
    lags = tuple(
        Lag(data.draw(stages), data.draw(distances), float(data.draw(st.integers(0, 30)))) for _ in range(2)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zbsolve.bounds.windows.MOST_COUNTING_STEPS", -1)
        found = windows(instance, lags)
    heads, tails = np.full((3, S, m), -np.inf), np.full((3, S, m), -np.inf)
    heads[0, 0, 0], tails[2] = 0.0, 0.0
    arcs, values = refutation._arcs(instance, lags)
    lengths = np.repeat(refutation._lengths(instance), m, axis=1)
    refutation.follow(arcs, values, lengths.ravel(), heads.reshape(-1), tails.reshape(-1))
    np.testing.assert_allclose(heads, found.heads[..., p], atol=1e-9)
    np.testing.assert_allclose(tails, found.tails[..., p], atol=1e-9)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(small_instances(max_passes=10), st.sampled_from(["makespan", "span"]))
def test_orders_prove_no_less_than_one_machine(instance: Instance, objective: str) -> None:
    """An order is one way to run a machine's tasks: never shorter than the best that may preempt."""
    try:
        require_feasible(instance)
    except InfeasibleError:
        return
    watched = f"in the window of device {instance.stages[0].device},"
    for bound in window_bounds(Known(instance, objective)):
        if objective == "span" and watched not in bound.statement:
            continue  # in its own window
        if bound.value > 0:
            assert Refutation(instance, objective).refutes(bound.value * (1 - 1e-6)) is True


def test_costs_may_rise_to_the_least_that_was_not_refuted() -> None:
    """States found within a low cost, refuted, are not those of a higher one; none go beyond the known."""
    known = Refutation(turn_with_little_memory(), "makespan")
    before = known.heads.sum() + known.tails.sum()
    assert [known.refutes(cost) for cost in (20.0, 23.9, 24.5)] == [True, True, False]
    assert known.heads.sum() + known.tails.sum() > before  # what holds within 24.5 is kept
    assert [known.refutes(cost) for cost in (23.9, 23.99, 24.0)] == [True, True, False]
    with pytest.raises(ValueError, match=r"24\.5 is above 24"):
        known.refutes(24.5)


def test_trials_end_where_no_task_has_room() -> None:
    """0.1 + 0.2 is 4e-17 above 0.3: within 0.6 the three tasks have less than nothing left, and no trial."""
    stage = {"device": 0, "t_f": 0.1, "t_b": 0.2, "t_w": 0.3}
    known = Refutation(make_instance(num_devices=1, num_microbatches=1, stages=[stage]), "makespan")
    assert known.refutes(0.6) is False
    assert known.shaves(0.6, np.random.default_rng(0), 20) is False
    assert known.shaved == []


def test_trials_are_refused_before_all_states_are_known() -> None:
    """An assumption leaves out states that others need: trials only within the last cost not refuted."""
    fresh, known = (Refutation(turn_with_little_memory(), "makespan") for _ in range(2))
    assert known.refutes(24.5) is False
    time = LeastTime(F, 0, 1, 1.0)
    for each in (fresh, known):
        for attempt in (each.shows, each.take):
            with pytest.raises(ValueError, match="not the last that was not refuted"):
                attempt(time, 24.0)
        with pytest.raises(ValueError, match="not the last that was not refuted"):
            each.shaves(24.0, np.random.default_rng(0), 1)


def test_a_cap_leaves_few_states() -> None:
    """One stage, two micro-batches: 10 states with 2 >= F >= B >= W; F B W F B W alone has 7."""
    instance = equal_stages(1, 2)
    for each, number in ((instance, 10), (instance.with_changes(memory_cap=1.0), 7)):
        known = Refutation(each, "makespan")
        assert known.refutes(6.0) is False
        assert known.work == refutation.OF_ITSELF + number
        assert known.complete


def test_halving_ends_close_to_the_highest_that_is_refuted() -> None:
    """The optimum, 24, at once; from a plan of 30, ever higher bounds up to 24, less 2e-4 of it."""
    instance = turn_with_little_memory()
    lags = (Lag(0, 1, 1.0),)
    (at_once,) = refuted_bounds(Refutation(instance, "makespan", lags=lags), 23.0, 24.0)
    assert at_once.value == 24.0 * (1 - 1e-6)
    assert at_once.lags == lags
    values = [bound.value for bound in refuted_bounds(Refutation(instance, "makespan"), 0.0, 30.0)]
    assert values == sorted(values)
    assert 24.0 * (1 - 3e-4) <= values[-1] < 24.0


def test_a_step_that_its_task_leaves_no_time_for_is_none() -> None:
    """F takes 1, B 2, W 1; the second F starts from 2 and must end by 20 - 17 = 3: B0 runs after it, to 5.

    B0 before it, from 1 to 3, would let both be done by 4 and W0 start then. And within 5.9, of the 10 states
    those with both B's, F F B B = 6, and after, are left out: 7.
    """
    stage = {"device": 0, "t_f": 1.0, "t_b": 2.0, "t_w": 1.0}
    instance = make_instance(num_devices=1, num_microbatches=2, stages=[stage])
    heads, tails = np.zeros((3, 2)), np.zeros((3, 2))
    states = DeviceStates(instance, 0)
    states.enumerate(heads, tails, 5.9, 100, lambda: False)
    assert states.num_states == 7
    states.enumerate(heads, tails, 100.0, 100, lambda: False)
    assert states.num_states == 10
    heads[0, 1], tails[0, 1] = 2.0, 17.0
    found = states.narrow(heads, tails, 0.0, 20.0)
    assert found is not None
    assert found[0].tolist() == [[0.0, 2.0], [3.0, 5.0], [5.0, 8.0]]
    states.enumerate(heads, tails, 100.0, 100, lambda: True)
    assert states.too_many  # no time is as good as no room


def test_the_rest_of_a_fused_backward_counts_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """F of 1 and BW of 2, twice, on one device: 6, the last rest of 1 included, which nothing waits for.

    Forced work would know by itself.
    """
    monkeypatch.setattr("zbsolve.bounds.windows.MOST_COUNTING_STEPS", -1)
    stage = {"device": 0, "t_f": 1.0, "t_b": 1.0, "t_w": 1.0, "t_bw": 2.0}
    instance = make_instance(num_devices=1, num_microbatches=2, stages=[stage])
    for objective in ("makespan", "span"):
        assert Refutation(instance, objective).refutes(5.99) is True
        assert Refutation(instance, objective).refutes(6.0) is False


def test_a_state_is_one_integer_or_the_device_is_left_out() -> None:
    """Four stages, 40 micro-batches, one at a time: 41 ** 12 numbers are more than 2 ** 62."""
    stages = [{"device": 0, "t_f": 1.0, "t_b": 1.0, "t_w": 1.0} for _ in range(4)]
    instance = make_instance(num_devices=1, num_microbatches=40, stages=stages, memory_cap=4.0)
    known = Refutation(instance, "makespan")
    assert known.refutes(40 * 12.0) is False
    assert not known.complete
    fewer = Refutation(instance.with_changes(num_microbatches=34), "makespan")  # 35 ** 12 < 2 ** 62
    assert fewer.refutes(34 * 12.0) is False
    assert fewer.complete


def test_moves_are_followed_from_device_to_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one device's orders move is followed back to those gone through before it."""
    instance = random_instance(42).with_changes(num_microbatches=4)
    cost = 1.035 * best_bound(instance, "makespan").value
    assert Refutation(instance, "makespan").refutes(cost, least_move=np.inf) is False
    assert Refutation(instance, "makespan").refutes(cost) is True
    # A plan that says so is confirmed, however few moves are followed at first.
    monkeypatch.setattr("zbsolve.bounds.arguments.device_orders.LEAST_MOVE", np.inf)
    assert reverify(serial_plan(instance, Bound(cost, refutation.DEVICE_ORDERS, "as stated", 0))).confirmed


def serial_plan(instance: Instance, bound: Bound) -> Plan:
    """The serial schedule, with a bound as its certificate."""
    schedule = simulate(instance, serial_orders(instance))
    return solver._certified(instance, schedule, "makespan", bound, SolverInfo(name="serial", version="1"))


def test_a_plan_proven_by_orders_is_proven_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a wide V names the method; a bound that it does not give is found out."""
    monkeypatch.setitem(solver.SOLVERS, "auto", (refute,))
    instance = random_instance(25).with_changes(num_microbatches=5)
    plan = solve(instance, time_limit=20).plan
    assert plan.bound_proof.method == "device orders"
    assert not check_plan(plan)
    again = reverify(plan)
    assert again.confirmed, again.sentence
    assert "bound re-verified" in again.sentence
    value = plan.lower_bound + 0.5 * (plan.cost - plan.lower_bound)
    proof = plan.bound_proof.model_copy(update={"value": value})
    false = plan.model_copy(update={"lower_bound": value, "bound_proof": proof})
    assert reverify(false).violation is not None


def test_refuting_ends_at_the_target_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halving would go on: of the bounds that are within the target, the first is the last."""
    instance = random_instance(25).with_changes(num_microbatches=6)
    monkeypatch.setitem(solver.SOLVERS, "auto", (refute,))
    target = 0.98 * solve(instance, solver="heuristic").plan.gap
    found = solve(instance, time_limit=20, gap=target)
    assert found.history[-1].who == "device orders"
    assert [line.gap <= target for line in found.history].count(True) == 1
    assert found.plan.gap > 1.01 * solve(instance, time_limit=20).plan.gap


def test_trials_prove_more_and_each_is_shown_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that start neither early nor late narrow a gap; the plan file names them, for anyone to show."""
    monkeypatch.setattr(refutation, "TRIALS", (200,))
    instance = random_instance(38)
    cost = solve(instance, solver="heuristic").plan.cost
    known = Refutation(instance, "makespan")
    without = max(refuted_bounds(known, 0.0, cost), key=lambda bound: bound.value)
    proven = max(shaved_bounds(known, without.value, cost), key=lambda bound: bound.value)
    assert proven.value > without.value * 1.005
    assert proven.shaved
    plan = serial_plan(instance, proven)
    read = parse_plan(json.loads(json.dumps(plan.to_json_dict())), "plan")
    assert read.bound_proof == plan.bound_proof
    assert reverify(read).confirmed
    # Without them the bound is more than the orders alone give; and a time that is not shown is no proof.
    alone = plan.bound_proof.model_copy(update={"shaved": ()})
    assert reverify(plan.model_copy(update={"bound_proof": alone})).violation is not None
    first = plan.bound_proof.shaved[0]
    impossible = (
        {"value": first.value + proven.value / 2},
        {"stage": instance.num_stages},
        {"microbatch": 10**6},
    )
    for change in impossible:
        wrong = plan.bound_proof.model_copy(update={"shaved": (first.model_copy(update=change),)})
        assert reverify(plan.model_copy(update={"bound_proof": wrong})).violation is not None


def test_what_could_not_be_gone_through_is_no_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound of 23.9 of 24: re-derived with all states, doubted but not refuted with too few, or no time."""
    instance = turn_with_little_memory()
    plan = serial_plan(instance, Bound(23.9, refutation.DEVICE_ORDERS, "as stated", 1))
    assert reverify(plan).confirmed
    assert reverify(serial_plan(instance, Bound(24.0, refutation.DEVICE_ORDERS, "rounded up", 1))).confirmed
    above = serial_plan(instance, Bound(24.1, refutation.DEVICE_ORDERS, "as stated", 1))
    assert reverify(above).violation is not None
    for place, limit in (
        ("zbsolve.bounds.refutation.MOST_STATES_OF_ONE", 10),
        ("zbsolve.solver.verify.SECONDS_FOR_REFUTATION", -1.0),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, limit)
            doubted = reverify(plan)
        assert not doubted.confirmed
        assert doubted.violation is None


@pytest.mark.parametrize("lags", [(), (Lag(0, 1, 1.0),)])
def test_orders_prove_nothing_of_pairs(lags: tuple[Lag, ...]) -> None:
    """5 micro-batches of 3 take 15 one after the other, but F beside BW saves 1: a bound of 15 is false.

    F, four pairs of 2, BW of 2 take 11.
    """
    stage = {"device": 0, "t_f": 1.0, "t_b": 1.0, "t_w": 1.0, "t_bw": 2.0, "t_fb": 2.0}
    instance = make_instance(num_devices=1, num_microbatches=5, stages=[stage])
    method = "one machine, proven lags" if lags else refutation.DEVICE_ORDERS
    outcome = reverify(serial_plan(instance, Bound(14.9, method, "as stated", 0, lags)))
    assert not outcome.confirmed
    assert outcome.violation is not None
