"""Heads and tails: hand-worked, never contradicted by a schedule, the same compiled or not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from tests.strategies import small_instances
from zbsolve import forced_work
from zbsolve.errors import InfeasibleError
from zbsolve.formulation import canonical
from zbsolve.graph import BW, B, F, W
from zbsolve.heuristics import presets
from zbsolve.instance import Instance, equal_stages, make_instance
from zbsolve.list_scheduler import ListScheduler, serial_orders
from zbsolve.memory import require_feasible
from zbsolve.precedence import back
from zbsolve.random_instances import random_instance
from zbsolve.schedule import Schedule
from zbsolve.simulator import simulate
from zbsolve.windows import windows

KIND = {F: 0, B: 1, BW: 1, W: 2}


def two_stages_on_one_device() -> Instance:
    """Unit times, M_B = M_W = 1, room for the two stages of one micro-batch."""
    stages = [{"device": 0, "t_f": 1, "t_b": 1, "t_w": 1, "mem_b": 1, "mem_w": 1} for _ in range(2)]
    instance = make_instance(name="turn", num_devices=1, num_microbatches=2, stages=stages)
    return instance.with_changes(memory_cap=2.0)


def test_heads_count_the_work_that_frees_memory() -> None:
    """F0 F1 B1 W1 have run before the next F0 (4), all six tasks and that F0 before the next F1 (7).

    Two F0's leave no room for an F1, so B1 comes first, and beside its pending W there is no room either.
    Paths alone see F0 wait for B1: 3. Nothing but all other eleven tasks can follow the first F0.
    """
    found = windows(two_stages_on_one_device())
    whole = 1
    assert found.heads[0, 0, 1, whole] == 4.0
    assert found.heads[0, 1, 1, whole] == 7.0
    assert found.tails[0, 0, 0, whole] == 11.0


def test_waits_add_up_from_device_to_device() -> None:
    """One micro-batch at a time on 2 devices: F0 F1 B1 B0 W0 take 5, so micro-batch j starts at 5 j."""
    found = windows(equal_stages(2, 4, memory_cap=1))
    assert found.heads[0, 0, :, 2].tolist() == [0.0, 5.0, 10.0, 15.0]
    # After the last F0: F1 B1 B0 W0. After each one before it, 5 more.
    assert found.tails[0, 0, :, 2].tolist() == [19.0, 14.0, 9.0, 4.0]


def some_schedules(instance: Instance) -> list[Schedule]:
    """The serial schedule and those of several list-scheduling policies."""
    scheduler = ListScheduler(instance)
    schedules = [simulate(instance, serial_orders(instance))]
    for policy in presets(instance, patiences=2):
        if np.isfinite(scheduler.run(policy)[0]):
            schedules.append(simulate(instance, canonical(instance, scheduler.orders())))
    return schedules


@settings(max_examples=150, derandomize=True, deadline=None)
@given(small_instances(max_passes=10, capped=True))
def test_no_schedule_contradicts_heads_and_tails(instance: Instance) -> None:
    """In every schedule each task starts no earlier than its head and has at least its tail to go."""
    try:
        require_feasible(instance)
    except InfeasibleError:
        return
    found = windows(instance)
    p, first = instance.num_devices, instance.stages[0].device
    for schedule in some_schedules(instance):
        end = {d: max(t.end for t in schedule if instance.stages[t.task.stage].device == d) for d in range(p)}
        for timed in schedule:
            kind, s, j = timed.task
            stage = instance.stages[s]
            fusible = stage.t_bw is not None
            if kind is W and fusible:
                continue  # stands in for the rest of its backward
            # Of a stage that can fuse, a tail counts from the earliest end of the gradient.
            left_at = timed.start + back(stage) if KIND[kind] == 1 and fusible else timed.end
            for observer, last in ((p, schedule.makespan), (first, end[first])):
                assert timed.start >= found.heads[KIND[kind], s, j, observer] - 1e-9
                assert last - left_at >= found.tails[KIND[kind], s, j, observer] - 1e-9


@pytest.mark.parametrize("seed", [25, 38, 58])
def test_machine_code_finds_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain Python and machine code give equal windows: V, linear and loop placements under tight caps."""
    instance = random_instance(seed).with_changes(num_microbatches=5)
    found = []
    for worth in (np.inf, 0):
        monkeypatch.setattr(forced_work, "STEPS_WORTH_COMPILING", worth)
        found.append(windows(instance))
    np.testing.assert_array_equal(found[0].heads, found[1].heads)
    np.testing.assert_array_equal(found[0].tails, found[1].tails)
