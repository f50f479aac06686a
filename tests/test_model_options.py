"""Recomputation, F&B pairs, replicas and contended links: times, memory, plans, refusals, bounds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from tests.extended_strategies import Pair, earliest_ends, programs
from zbsolve.baselines import BASELINES
from zbsolve.baselines.dualpipe import bidirectional
from zbsolve.bounds.catalogue import best_bound
from zbsolve.errors import InfeasibleError, InputError
from zbsolve.formulations.cpsat import solve_cpsat
from zbsolve.formulations.ticks import make_ticks
from zbsolve.model.graph import Task, TaskGraph
from zbsolve.model.instance import Instance, equal_stages, parse_instance
from zbsolve.model.judge import _memory_by_definition, check
from zbsolve.model.kinds import BW, B, F, R, W
from zbsolve.model.memory import memory_curve, peak_memory
from zbsolve.model.recompute import fold, unfold
from zbsolve.model.schedule import Schedule, TimedTask
from zbsolve.model.serial import require_feasible
from zbsolve.model.simulator import CycleError, simulate, simulate_for, simulate_least_span
from zbsolve.plan.check import check_plan
from zbsolve.plan.lowering import dry_run, lower
from zbsolve.solver.portfolio import solve

Program = tuple[Instance, tuple[tuple[Task, ...], ...], frozenset[Pair]]


def with_stages(instance: Instance, **changes: Any) -> Instance:
    """The same changes to every stage."""
    return instance.with_changes(stages=[stage.model_copy(update=changes) for stage in instance.stages])


# --- properties against brute force and the judge --------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=250)
@given(programs())
def test_simulator_finds_the_least_fixpoint(program: Program) -> None:
    """Ends are those of the definition, the independent judge agrees, the lowered plan cannot deadlock."""
    instance, orders, pairs = program
    schedule = simulate(instance, orders, pairs)
    ends = earliest_ends(instance, orders, pairs)
    assert {t.task: t.end for t in schedule} == pytest.approx(ends)
    assert check(instance, schedule) == []
    visible = {pair for pair in pairs if ends[pair[0]] > schedule_start(schedule, pair[0])}
    assert schedule.pairs == visible
    assert dry_run(instance, lower(instance, schedule)) is None


def schedule_start(schedule: Schedule, task: Task) -> float:
    return next(t.start for t in schedule if t.task == task)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(programs())
def test_least_span_is_valid_and_no_more_than_that_of_earliest_starts(program: Program) -> None:
    """Later first starts keep every rule and never lengthen the longest window."""
    instance, orders, pairs = program
    schedule = simulate_least_span(instance, orders, pairs)
    assert check(instance, schedule) == []
    assert schedule.span <= simulate(instance, orders, pairs).span + 1e-9


@settings(derandomize=True, deadline=None, max_examples=150)
@given(programs())
def test_memory_curve_is_that_of_the_definition(program: Program) -> None:
    """Levels with R and pairs equal the judge's sums."""
    instance, orders, pairs = program
    for device, order in enumerate(orders):
        timed = [TimedTask(task, float(i), float(i + 1)) for i, task in enumerate(order)]
        expected = list(_memory_by_definition(instance, device, timed, pairs))
        found = [point.during for point in memory_curve(instance, device, order, pairs)]
        # The judge charges a pair's transients to both its places, the curve to the second: same peak.
        assert max(found, default=0.0) == pytest.approx(max(expected, default=0.0))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(programs())
def test_a_pair_is_needed_to_start_earlier(program: Program) -> None:
    """Moving any task a little earlier than simulated breaks a rule."""
    instance, orders, pairs = program
    schedule = simulate(instance, orders, pairs)
    for device, timed in enumerate(schedule.devices):
        for place, (task, start, end) in enumerate(timed):
            if start < 0.5 or end - start == 0 or any(task in pair for pair in pairs):
                continue
            moved = list(timed)
            moved[place] = TimedTask(task, start - 0.25, end - 0.25)
            devices = (*schedule.devices[:device], tuple(moved), *schedule.devices[device + 1 :])
            assert check(instance, Schedule(devices)) != []


@settings(derandomize=True, deadline=None, max_examples=100)
@given(programs())
def test_folding_recomputation_keeps_memory_and_is_never_faster(program: Program) -> None:
    """R right before its backward: the folded instance's peaks, and ends no later than its."""
    instance, orders, pairs = program
    folded = fold(instance)
    bare = tuple(tuple(task for task in order if task.kind is not R) for order in orders)
    real = unfold(instance, bare)
    later = {t.task: t.end for t in simulate(folded, bare, pairs)}
    for task, _, end in simulate(instance, real, pairs):
        assert task.kind is R or end <= later[task] + 1e-9
    for d in range(instance.num_devices):
        assert peak_memory(folded, d, bare[d], pairs) == pytest.approx(
            peak_memory(instance, d, real[d], pairs)
        )


@settings(derandomize=True, deadline=None, max_examples=150)
@given(programs())
def test_bounds_hold_for_any_orders_and_pairs(program: Program) -> None:
    """No schedule is below the bound, whatever it recomputes, pairs or contends for."""
    instance, orders, pairs = program
    assert best_bound(instance, "makespan").value <= simulate(instance, orders, pairs).makespan + 1e-9
    assert best_bound(instance, "span").value <= simulate_least_span(instance, orders, pairs).span + 1e-9


# --- recomputation ----------------------------------------------------------------------------------


def test_recomputation_by_hand() -> None:
    """One device: F0 F1 R0 B0 R1 B1 W0 W1 with T_R = 1 keeps 0.25 from F to R, then 1."""
    instance = with_stages(equal_stages(1, 2), t_r=1.0, mem_r=0.25)
    order = [(F, 0), (F, 1), (R, 0), (B, 0), (R, 1), (B, 1), (W, 0), (W, 1)]
    tasks = tuple(Task(kind, 0, j) for kind, j in order)
    schedule = simulate(instance, [tasks])
    assert check(instance, schedule) == []
    assert schedule.makespan == 8
    levels = [point.during for point in memory_curve(instance, 0, tasks)]
    assert levels == [0.25, 0.5, 1.25, 1.25, 2.0, 2.0, 2.0, 1.0]
    assert TaskGraph(instance).kinds(0) == (F, R, B, W)


def test_a_missing_or_late_recomputation_is_reported() -> None:
    """R is required where t_r is given, and comes between F and its backward."""
    instance = with_stages(equal_stages(1, 1), t_r=1.0)
    names = [[(F, 0.0), (B, 1.0), (W, 2.0)], [(F, 0.0), (B, 1.0), (R, 2.0), (W, 3.0)]]
    found = [
        [
            v.rule
            for v in check(
                instance, Schedule((tuple(TimedTask(Task(k, 0, 0), t, t + 1) for k, t in program),))
            )
        ]
        for program in names
    ]
    assert found == [["tasks"], ["dependency"]]


def test_gpipe_with_recomputation() -> None:
    """t_b = 2 t_f grows to 3 t_f: a third more work; m boundaries and one M_B in memory."""
    p, m = 4, 8
    plain = equal_stages(p, m, 1.0, 1.0, 1.0)
    kept = with_stages(plain, mem_r=0.125, t_r=1.0)
    timed_on, schedule = BASELINES["gpipe-r"].schedule(kept)
    assert check(timed_on, schedule) == []
    # (m + p - 1) forwards, m backwards of 3, and (p - 1) of 2 on the way back: R does not wait for gradients.
    assert schedule.makespan == (m + p - 1) + 3 * m + 2 * (p - 1)
    assert timed_on.device_work(0) / plain.device_work(0) == pytest.approx(4 / 3)
    # While the first backward runs: one whole activation, and the boundaries of the other seven.
    assert peak_memory(timed_on, 0, schedule.orders[0]) == 1 + 7 * 0.125


def test_recomputing_gives_pairs_up() -> None:
    """A stage has t_r or t_fb, never both."""
    stages = pairs_instance().with_recomputation().stages
    assert {(stage.t_r, stage.t_fb) for stage in stages} == {(1.0, None)}


# --- F&B pairs --------------------------------------------------------------------------------------


def pairs_instance(p: int = 1, m: int = 2, t_fb: float = 2.0) -> Instance:
    """T_F = 1, T_BW = 2: a pair takes t_fb of their 3."""
    return with_stages(equal_stages(p, m), t_bw=2.0, t_fb=t_fb)


def test_a_pair_by_hand() -> None:
    """F0, then F1 beside BW0 for 2, then BW1: 1 + 2 + 2 = 5 instead of 6."""
    instance = pairs_instance()
    order = (Task(F, 0, 0), Task(F, 0, 1), Task(BW, 0, 0), Task(BW, 0, 1))
    pair = (order[1], order[2])
    schedule = simulate(instance, [order], frozenset([pair]))
    assert schedule.makespan == 5
    assert schedule.pairs == {pair}
    assert check(instance, schedule) == []
    assert instance.device_work(0) == 4  # at best both F's are in pairs


def test_a_pair_needs_t_fb_on_one_device_and_not_itself() -> None:
    """What cannot run as a pair is refused, and a pair that waits for itself deadlocks."""
    instance = pairs_instance(m=1)
    with pytest.raises(CycleError):
        simulate(instance, [(Task(F, 0, 0), Task(BW, 0, 0))], {(Task(F, 0, 0), Task(BW, 0, 0))})
    bare = with_stages(pairs_instance(), t_fb=None)
    order = (Task(F, 0, 0), Task(F, 0, 1), Task(BW, 0, 0), Task(BW, 0, 1))
    with pytest.raises(InputError, match="t_fb"):
        simulate(bare, [order], {(order[1], order[2])})
    overlapped = simulate(pairs_instance(), [order], {(order[1], order[2])})
    assert [v.rule for v in check(bare, overlapped)] == ["pairs"]


def test_both_transients_of_a_pair_count_together() -> None:
    """mem_b 1 each, peak_f 0.5, peak_bw 0.25: while F1 and BW0 run, 2 + 0.75."""
    instance = with_stages(pairs_instance(), peak_f=0.5, peak_bw=0.25)
    order = (Task(F, 0, 0), Task(F, 0, 1), Task(BW, 0, 0), Task(BW, 0, 1))
    assert peak_memory(instance, 0, order, {(order[1], order[2])}) == 2.75
    assert peak_memory(instance, 0, order) == 2.5


def test_solver_uses_pairs_where_they_pay() -> None:
    """p = 1, m = 4: F0, three pairs of 2, BW3: 1 + 6 + 2 = 9, where one at a time takes 12."""
    plan = solve(pairs_instance(m=4), time_limit=2.0).plan
    assert plan.makespan == 9
    assert check_plan(plan) == []
    assert len(plan.schedule().pairs) == 3


def test_solver_finds_overlapped_1f1b() -> None:
    """p = 2, m = 6, pairs of 2.25 instead of 3: 17.25 where the split schedules take 19."""
    # F on device 0 until 1, F on device 1 until 2, 5 pairs until 13.25, its last BW until 15.25, that of
    # device 0 until 17.25.
    plan = solve(pairs_instance(2, 6, 2.25), time_limit=1.0).plan
    assert plan.makespan <= 17.25
    assert plan.schedule().pairs
    assert check_plan(plan) == []


# --- replicas ---------------------------------------------------------------------------------------


def test_two_replicas_are_two_chains() -> None:
    """DualPipe's placement: no hop between the replicas, both ends of the model on both end devices."""
    instance = bidirectional(equal_stages(4, 8, t_comm=0.5))
    assert [stage.device for stage in instance.stages] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert (instance.chain, instance.num_microbatches, instance.total_microbatches) == (4, 4, 8)
    assert [instance.is_last(s) for s in range(8)] == [False, False, False, True] * 2
    assert [instance.hop(b) for b in range(7)] == [0.5, 0.5, 0.5, 0.0, 0.5, 0.5, 0.5]


def test_bidirectional_counts_parameters_twice() -> None:
    """Device r holds the static memory of stages r and p - 1 - r."""
    instance = equal_stages(4, 8).with_changes(static_mem=[1.0, 2.0, 4.0, 8.0])
    assert bidirectional(instance).static_mem == (9.0, 6.0, 6.0, 9.0)


def test_a_solved_bidirectional_plan_is_valid() -> None:
    """The solver is never worse than DualPipe on its own instance, and its plan passes every rule."""
    instance = bidirectional(with_stages(equal_stages(2, 8), t_bw=2.0, t_fb=2.5))
    _, dualpipe = BASELINES["dualpipe"].schedule(instance)
    plan = solve(instance, time_limit=1.0).plan
    assert plan.makespan <= dualpipe.makespan
    assert check_plan(plan) == []


# --- contended links --------------------------------------------------------------------------------


def test_transfers_wait_for_their_link() -> None:
    """Two F's of no length and a transfer of 3 over one link, latency 1: they arrive at 4 and 7."""
    instance = equal_stages(2, 2, 0.0, 1.0, 0.0, t_comm=1.0)
    orders = BASELINES["gpipe"].orders(instance.with_fused_backward())
    fused = instance.with_fused_backward().with_changes(t_transfer=3.0)
    schedule = simulate(fused, orders)
    assert [schedule_start(schedule, Task(F, 1, j)) for j in (0, 1)] == [4.0, 7.0]
    assert check(fused, schedule) == []
    free = fused.with_changes(t_comm=4.0, t_transfer=None)
    assert {v.rule for v in check(fused, simulate(free, orders))} == {"dependency"}
    arrivals = [(a.start, a.end) for a in lower(fused, schedule)[1].actions if a.op == "RECV_F"]
    assert arrivals == [(0.0, 4.0), (0.0, 7.0)]


def test_solver_plans_contended_links() -> None:
    """Its plan passes every rule; the bound (links taken as free) holds."""
    instance = equal_stages(3, 4, t_comm=0.25).with_changes(t_transfer=1.5)
    plan = solve(instance, time_limit=2.0).plan
    assert check_plan(plan) == []
    assert plan.lower_bound <= plan.makespan


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_exact_models_bound_contended_steps_from_below(objective: str) -> None:
    """Their bound is the optimum over free links, whose hops take latency and transfer together."""
    contended = equal_stages(2, 3, t_comm=0.25).with_changes(t_transfer=1.5)
    free = contended.with_changes(t_comm=1.75, t_transfer=None)
    ticks = make_ticks(contended, objective)
    assert float(ticks.tick * ticks.hop_steps(0) / ticks.fine) == 1.75
    optimum = solve_cpsat(free, objective, time_limit=20)
    found = solve_cpsat(contended, objective, time_limit=20)
    assert optimum.bound is not None
    assert found.bound == pytest.approx(optimum.bound)
    assert found.orders is not None
    assert simulate_for(contended, found.orders, objective).cost(objective) >= found.bound - 1e-9


# --- input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mem_r": 0.5}, "mem_r is given without t_r"),
        ({"t_r": 1.0, "mem_r": 2.0}, "mem_r is 2, above mem_b 1"),
        ({"t_fb": 2.0}, "t_fb is given without t_bw"),
        ({"t_fb": 4.0, "t_bw": 2.0}, "t_fb is 4: give 2"),
        ({"t_fb": 1.0, "t_bw": 2.0}, "t_fb is 1: give 2"),
        ({"t_fb": 2.0, "t_bw": 2.0, "t_r": 1.0}, "t_fb is given beside t_r"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes: dict[str, float], words: str) -> None:
    """One line that says what to give."""
    data = equal_stages(1, 1).to_json_dict()
    data["stages"][0].update(changes)
    with pytest.raises(InputError, match=words):
        parse_instance(data, "i.json")


def test_replicas_need_as_many_stages_each() -> None:
    """3 stages in 2 replicas, and a hop between replicas, are refused."""
    data = equal_stages(1, 1).to_json_dict()
    with pytest.raises(InputError, match="replicas is 2 and stages has 1"):
        parse_instance(data | {"replicas": 2}, "i.json")
    pair = {**data, "replicas": 2, "stages": data["stages"] * 2, "t_comm": [1.0]}
    with pytest.raises(InputError, match="between two replicas"):
        parse_instance(pair, "i.json")


def test_instances_without_options_are_written_as_before() -> None:
    """No new field appears in a file that does not use it."""
    data = equal_stages(2, 2).to_json_dict()
    assert not {"replicas", "t_transfer"} & data.keys()
    assert not {"t_r", "mem_r", "t_fb"} & data["stages"][0].keys()


@pytest.mark.parametrize("solver", ["milp-highs", "milp"])
def test_exact_models_refuse_what_they_do_not_model(solver: str) -> None:
    """One line names the option."""
    with pytest.raises(InputError, match="F&B pairs"):
        solve(pairs_instance(), solver=solver)


def test_least_memory_of_two_replicas_is_that_of_one_at_a_time() -> None:
    """A device of two replicas needs to hold one micro-batch of either, not of both."""
    instance = bidirectional(equal_stages(2, 4))
    require_feasible(instance.with_changes(memory_cap=1.0))
    with pytest.raises(InfeasibleError, match=r"devices 0-1 need 1 MiB each, have 0\.5"):
        require_feasible(instance.with_changes(memory_cap=0.5))
