"""Lower bounds: never above an optimum, hand-worked values, the published cells."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.brute_force import brute_force
from tests.strategies import small_instances
from zbsolve.bounds.argument import Known
from zbsolve.bounds.arguments.last_forward import last_forward_bounds
from zbsolve.bounds.arguments.memory_area import memory_area_bound
from zbsolve.bounds.arguments.one_machine import preemptive_one_machine
from zbsolve.bounds.arguments.two_windows import last_window_idle, two_windows_bound
from zbsolve.bounds.catalogue import all_bounds, best_bound
from zbsolve.bounds.waits import memory_waits
from zbsolve.errors import InfeasibleError
from zbsolve.model.instance import Instance, equal_stages, load_instance
from zbsolve.model.kinds import B, W
from zbsolve.model.serial import require_feasible
from zbsolve.model.simulator import simulate, simulate_least_span
from zbsolve.search.list_scheduler import ListScheduler
from zbsolve.search.policies import presets
from zbsolve.solver.portfolio import solve

SHIPPED = Path(__file__).resolve().parent.parent / "instances"


@settings(max_examples=60, derandomize=True, deadline=None)
@given(small_instances())
def test_no_bound_is_above_the_brute_force_optimum(instance: Instance) -> None:
    """Every bound holds for every schedule, so for the best one, under both objectives."""
    optimum = brute_force(instance)
    if math.isinf(optimum.makespan):
        return
    for objective, best in (("makespan", optimum.makespan), ("span", optimum.span)):
        for bound in all_bounds(instance, objective):
            assert bound.value <= best + 1e-6, (objective, bound)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(small_instances(max_passes=24))
def test_no_schedule_found_beats_a_bound(instance: Instance) -> None:
    """Beyond brute force: no policy of the list scheduler gets below any bound."""
    try:
        require_feasible(instance)
    except InfeasibleError:
        return
    scheduler = ListScheduler(instance)
    bounds = {objective: best_bound(instance, objective).value for objective in ("makespan", "span")}
    for policy in presets(instance, patiences=2):
        if math.isfinite(scheduler.run(policy)[0]):
            orders = scheduler.orders()
            assert simulate(instance, orders).makespan >= bounds["makespan"] - 1e-6
            assert simulate_least_span(instance, orders).span >= bounds["span"] - 1e-6


@pytest.mark.parametrize(
    ("options", "objective", "value"),
    [
        # Device 3 starts after 3 F, works 8 * 3, nothing after: 27. Span: 8 * 3 of work.
        ({"p": 4, "m": 8}, "makespan", 27.0),
        ({"p": 4, "m": 8}, "span", 24.0),
        # Cap 4: first backward of device 0 after 1 + 3 + 3 = 7, four F before it: 3 idle.
        ({"p": 4, "m": 8, "memory_cap": 4.0}, "span", 27.0),
        # One micro-batch at a time, each 2 F + 2 B on the way and its W at the end: 4 * 5.
        ({"p": 2, "m": 4, "memory_cap": 1.0}, "makespan", 20.0),
        # One micro-batch: 3 F and 3 B with 2 hops each way, then W: 3 + 3 + 4 + 1.
        ({"p": 3, "m": 1, "t_comm": 1.0}, "makespan", 11.0),
        # p = 1 and cap for one micro-batch: 3 * 3.
        ({"p": 1, "m": 3, "memory_cap": 1.0}, "span", 9.0),
    ],
)
def test_hand_worked_bounds(options: dict[str, float], objective: str, value: float) -> None:
    """Bounds with the arithmetic beside them; each equals the optimum of its instance."""
    assert best_bound(equal_stages(**options), objective).value == pytest.approx(value, rel=1e-6)  # type: ignore[arg-type]


def test_published_cell_is_proven_in_closed_form() -> None:
    """1.5B, m=24, cap p M_B: (p-1)(T_F+T_B-T_W+4 T_comm) of idle on top of m(T_F+T_B+T_W)."""
    instance = equal_stages(8, 24, 18.522, 18.086, 9.337, 0.601, mem_b=201216.0, mem_w=73728.0)
    capped = instance.with_memory_cap("1p")
    expected = 24 * (18.522 + 18.086 + 9.337) + 7 * (18.522 + 18.086 - 9.337 + 4 * 0.601)
    assert expected == pytest.approx(1310.405)
    assert best_bound(capped, "span").value == pytest.approx(expected, rel=1e-9)
    by_hand = max(two_windows_bound(capped, d, "span").value for d in range(capped.num_devices))
    assert by_hand == pytest.approx(expected, rel=1e-9)


def test_memory_waits_by_hand() -> None:
    """Cap 2 on two stages of M_B = 1: F(j + 2) waits for the B and the W of j, on each device."""
    waits = set(memory_waits(equal_stages(2, 5, memory_cap=2.0)))
    assert waits == {(s, kind, s, 2) for s in (0, 1) for kind in (B, W)}


def test_memory_waits_of_a_v_placement() -> None:
    """Device 0 of a V holds stages 0 and 3; cap 2: F(3) leaves no room for a second F(0) until B(3) ends."""
    waits = set(memory_waits(equal_stages(2, 5, memory_cap=2.0, placement="v")))
    assert (0, B, 3, 1) in waits
    # Alone, two of stage 0 fit.
    assert (0, B, 0, 2) in waits


def test_one_machine_against_hand_values() -> None:
    """Jackson's preemptive rule on three jobs (head, duration, tail)."""
    # 0-4 job a; at 1 job b (tail 7) preempts, ends 3; a ends 6 + 1; c 6-7, ends at 7 + 0:
    # max(3 + 7, 6 + 1, 7) = 10.
    assert preemptive_one_machine([(0, 4, 1), (1, 2, 7), (2, 1, 0)]) == 10
    assert preemptive_one_machine([]) == 0


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 6), (4, 8)])
@pytest.mark.parametrize("cap", [8.0, 800.0, 1e30])
def test_an_ample_cap_proves_nothing_beyond_the_work(p: int, m: int, cap: float) -> None:
    """Memory that the step never fills costs no time: 3 m of work (span), and p - 1 F's ahead (makespan)."""
    instance = equal_stages(p, m, memory_cap=cap)
    for objective, most in (("makespan", 3.0 * m + p - 1), ("span", 3.0 * m)):
        assert best_bound(instance, objective).value <= most + 1e-6


def test_memory_area_with_its_ramp_by_hand() -> None:
    """Cap 2.5 on one device: the second F starts after 1 at the earliest, the third one after 2."""
    # 4 micro-batches hold 1 for t_f + t_b = 2 and mem_w = 1 for t_w = 1: 12 in all. In use: 1 until 1, 2
    # until 2, then at most 2.5: 12 = 1 + 2 + 2.5 (T - 2), T = 5.6.
    capped = memory_area_bound(equal_stages(1, 4, memory_cap=2.5), 0, "span")
    assert capped is not None
    assert capped.value == pytest.approx(5.6)
    # Cap 100 is never reached: 12 = 1 + 2 + 3 + 4 + 5 (T - 4), T = 4.4.
    ample = memory_area_bound(equal_stages(1, 4, memory_cap=100.0), 0, "span")
    assert ample is not None
    assert ample.value == pytest.approx(4.4)


def test_next_to_no_memory_after_b_leaves_all_pending_w_to_fill_the_last_window() -> None:
    """A mem_w so small that cap / mem_w is beyond 64 bits limits the pending W's no more than 0 does."""
    # RT = 2 F + 2 B = 4, cap 2. With i = 2 in flight, w = 2 pending: 1 other B, 3 other W's, 4 - 1 - 3 = 0.
    for mem_w in (0.0, 1e-20, 1e-320):
        instance = equal_stages(3, 4, mem_w=mem_w, memory_cap=2.0)
        assert last_window_idle(instance, 0)[0] == 0.0


def test_bounds_of_memory_next_to_nothing_and_of_too_much() -> None:
    """Neither a vanishing mem_b nor an instance that fits nowhere stops the bounds."""
    assert best_bound(equal_stages(2, 3, mem_b=1e-320, mem_w=1e-320, memory_cap=2.0), "span").value >= 9.0
    assert best_bound(equal_stages(2, 3, memory_cap=0.5), "span").value >= 9.0


def test_room_is_beyond_what_rounded_sums_may_pass_the_checker_with() -> None:
    """Three micro-batches that exceed the cap by all of the tolerance still count as fitting."""
    cap = 1e9
    mem_b = (cap + 1.0) / 3  # the checker grants 1e-9 of the cap: 1
    waits = memory_waits(equal_stages(1, 6, mem_b=mem_b, mem_w=0.0, memory_cap=cap))
    assert {wait.distance for wait in waits} == {3}


def test_bounds_survive_zero_work() -> None:
    """A step in which nothing takes time has bound 0."""
    instance = equal_stages(2, 2, t_f=0.0, t_b=0.0, t_w=0.0, memory_cap=1.0)
    assert best_bound(instance, "makespan").value == 0.0


def test_published_span_cell_is_optimal_by_hand() -> None:
    """1.5B, m=24, 2 p M_B: device 0's window holds device 7's F and B, the way there and back, and a W."""
    instance = equal_stages(8, 24, 18.522, 18.086, 9.337, 0.601, mem_b=201216.0, mem_w=73728.0)
    there, back = 7 * (18.522 + 0.601), 7 * (18.086 + 0.601)
    expected = there + 24 * (18.522 + 18.086) + back + 9.337
    assert expected == pytest.approx(1152.599)
    assert best_bound(instance.with_memory_cap("2p"), "span").value == pytest.approx(expected, rel=1e-9)


def test_published_zb_v_spans_are_optimal() -> None:
    """ZB-V at p=16, m=48 meets the bound on the last forward, by hand on device 15 (stages 15 and 16).

    Times in ms: F 14.407, B 14.38, W 9.676, hop 1.61. The window opens with F(0, 0). F(15, 0) starts after
    15 F's and hops (240.255), B(16, 0) starts 15 more F's, B's and 30 hops after F(16, 0) ends (another
    508.72); the 32 chunks that fit before it fill 461.024. When the last F starts at most 32 chunks are in
    flight: of all the work (48 x 2 x 38.463) their 32 x (B + W) may wait. From there F's, B's and hops back.
    """
    instance = load_instance(SHIPPED / "zbv-p16-m48.json")
    f, b, w, hop = 14.407, 14.38, 9.676, 1.61
    head = 15 * (f + hop) + 2 * f + 15 * (f + hop) + 15 * (b + hop)
    before = 32 * f
    to_go = 15 * (f + hop) + 15 * (b + hop) + 2 * b + 15 * (b + hop) + w
    value = head - before + 48 * 2 * (f + b + w) - 32 * (b + w) + to_go
    bounds = [bound for bound in last_forward_bounds(Known(instance, "span")) if bound.device == 15]
    assert max(bound.value for bound in bounds) == pytest.approx(value)
    plan = solve(instance, objective="span", solver="zb-v").plan
    assert plan.status == "optimal"
    assert plan.span == pytest.approx(value)
