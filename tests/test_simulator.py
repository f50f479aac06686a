"""Earliest starts, least span, and the circle that an impossible order waits in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.brute_force import all_orders, least_span
from tests.strategies import small_instances
from zbsolve.model.graph import Task, predecessors
from zbsolve.model.instance import Instance, equal_stages, make_instance
from zbsolve.model.judge import check
from zbsolve.model.kinds import B, F, TaskKind, W
from zbsolve.model.simulator import (
    CycleError,
    max_cycle_mean,
    simulate,
    simulate_for,
    simulate_least_span,
    topological_order,
)

Names = tuple[tuple[tuple[str, int, int], ...], ...]


def tasks_of(names: Names) -> list[list[Task]]:
    return [[Task(TaskKind(kind), s, j) for kind, s, j in order] for order in names]


@st.composite
def random_orders(draw: st.DrawFn, max_passes: int = 4) -> tuple[Instance, Names]:
    """A random instance and one of its first few hundred order vectors."""
    instance = draw(small_instances(max_passes=max_passes, capped=False))
    every = all_orders(instance)
    names, _ = next(every)
    for _ in range(draw(st.integers(0, 300))):
        names, _ = next(every, (names, None))
    return instance, names


def one_f_one_b(instance: Instance) -> list[list[Task]]:
    """1F1B with W right behind B on a linear placement: p - d F's first on device d."""
    p, m = instance.num_devices, instance.num_microbatches
    orders = []
    for d in range(p):
        warm = min(m, p - d)
        order = [Task(F, d, j) for j in range(warm)]
        for j in range(m):
            order += [Task(B, d, j), Task(W, d, j)]
            if warm + j < m:
                order.append(Task(F, d, warm + j))
        orders.append(order)
    return orders


def test_1f1b_by_hand() -> None:
    """p = 4, m = 8, unit times, W behind B: 3 F down, device 3's work of 24, 3 B back up: 30.

    m (T_F + T_B + T_W) + (p - 1) (T_F + T_B) = 24 + 6.
    """
    instance = equal_stages(4, 8)
    schedule = simulate(instance, one_f_one_b(instance))
    assert check(instance, schedule) == []
    assert schedule.makespan == 8 * 3 + 3 * 2
    assert [program[0].start for program in schedule.devices] == [0, 1, 2, 3]


def test_a_later_first_start_shortens_the_span_by_hand() -> None:
    """Device 0 is slow to feed device 1, which starts its first F too early for its own window.

    Device 0: F 0-3 3-6. Device 1: F 3-4 6-7, B 7-8 8-9, W (5 each) 9-19: a window of 16. With its first F
    at 5-6 it is 14 and nothing else moves. Device 0's window is B 8-9 9-10, W 10-12: 12. Makespan 19.
    """
    stages = [
        {"device": 0, "t_f": 3.0, "t_b": 1.0, "t_w": 1.0},
        {"device": 1, "t_f": 1.0, "t_b": 1.0, "t_w": 5.0},
    ]
    instance = make_instance(num_devices=2, num_microbatches=2, stages=stages)
    orders = [[Task(kind, d, j) for kind in (F, B, W) for j in range(2)] for d in range(2)]
    early, late = simulate(instance, orders), simulate_least_span(instance, orders)
    assert (early.makespan, early.span) == (19.0, 16.0)
    assert late.span == pytest.approx(14.0, rel=1e-9)
    assert late.makespan == pytest.approx(19.0, rel=1e-9)
    assert late.devices[1][0].start == pytest.approx(5.0, rel=1e-9)


@settings(derandomize=True, deadline=None, max_examples=120)
@given(random_orders())
def test_least_span_equals_difference_constraints(pair: tuple[Instance, Names]) -> None:
    """The cycle-mean method equals Bellman-Ford bisection, the times are valid, and reach that span."""
    instance, names = pair
    schedule = simulate_least_span(instance, tasks_of(names))
    assert check(instance, schedule) == []
    assert schedule.span == pytest.approx(least_span(instance, names), rel=1e-7, abs=1e-7)
    assert schedule.orders == tuple(map(tuple, tasks_of(names)))


@settings(derandomize=True, deadline=None, max_examples=80)
@given(random_orders())
def test_every_start_is_earliest(pair: tuple[Instance, Names]) -> None:
    """Each task starts at 0, at the end of the one before it, or when a dependency allows."""
    instance, names = pair
    schedule = simulate(instance, tasks_of(names))
    assert check(instance, schedule) == []
    ends = {timed.task: timed.end for timed in schedule}
    for program in schedule.devices:
        free = 0.0
        for task, start, end in program:
            waits = [ends[e.before] + e.lag for e in predecessors(instance, task) if e.before in ends]
            assert start == max([free, *waits])
            free = end
    assert simulate_for(instance, tasks_of(names), "makespan") == schedule


def test_a_circle_is_shown() -> None:
    """Device 0 wants B0 before F0, device 1 is innocent: F0.0 and B0.0 wait for each other."""
    instance = equal_stages(2, 1)
    orders = [
        [Task(B, 0, 0), Task(F, 0, 0), Task(W, 0, 0)],
        [Task(F, 1, 0), Task(B, 1, 0), Task(W, 1, 0)],
    ]
    with pytest.raises(CycleError) as caught:
        simulate(instance, orders)
    cycle = caught.value.cycle
    assert Task(B, 0, 0) in cycle
    assert str(caught.value).startswith("the orders deadlock: ")
    assert str(caught.value).count(" waits for ") == len(cycle)
    assert caught.value.exit_code == 1


def test_a_circle_over_two_devices_is_a_circle() -> None:
    """V placement: device 0 runs F3 of micro-batch 0 before F0 of 1; device 1 F1 of 1 before F2 of 0.

    Each member waits for the next: by a dependency, or by its place on its device.
    """
    instance = equal_stages(2, 2, placement="v")
    rest0 = [Task(kind, s, j) for j in (0, 1) for s in (3, 0) for kind in (B, W)]
    rest1 = [Task(kind, s, j) for j in (0, 1) for s in (2, 1) for kind in (B, W)]
    orders = [
        [Task(F, 0, 0), Task(F, 3, 0), Task(F, 0, 1), Task(F, 3, 1), *rest0],
        [Task(F, 1, 0), Task(F, 1, 1), Task(F, 2, 0), Task(F, 2, 1), *rest1],
    ]
    with pytest.raises(CycleError) as caught:
        topological_order(instance, orders)
    cycle = caught.value.cycle
    place = {task: (d, i) for d, order in enumerate(orders) for i, task in enumerate(order)}
    for task, waited in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
        depends = any(edge.before == waited for edge in predecessors(instance, task))
        behind = place[task][0] == place[waited][0] and place[waited][1] < place[task][1]
        assert depends or behind, (str(task), str(waited))
    assert len({place[task][0] for task in cycle}) == 2


def test_largest_cycle_mean_by_hand() -> None:
    """Loops 1 and 2, and the two-circle (5 + 0) / 2 = 2.5; without the way back only the loops count."""
    none = -np.inf
    assert max_cycle_mean(np.array([[1.0, 5.0], [0.0, 2.0]])) == 2.5
    assert max_cycle_mean(np.array([[1.0, 5.0], [none, 2.0]])) == 2.0
    assert max_cycle_mean(np.array([[none, 3.0, none], [none, none, 4.0], [5.0, none, none]])) == 4.0


def test_an_empty_device_is_allowed() -> None:
    """Partial orders can be timed: device 1 runs nothing yet."""
    instance = equal_stages(2, 1)
    schedule = simulate(instance, [[Task(F, 0, 0)], []])
    assert (schedule.makespan, schedule.span) == (1.0, 1.0)
