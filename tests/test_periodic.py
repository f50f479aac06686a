"""Periodic schedules: a pattern within every cap repeats to a valid schedule at its period."""

from __future__ import annotations

import pytest

from zbsolve.benchmark.random_instances import random_instance
from zbsolve.formulations.cpsat_periodic import find_pattern
from zbsolve.model.instance import Instance, equal_stages
from zbsolve.model.judge import check
from zbsolve.model.kinds import BW
from zbsolve.model.simulator import simulate


def split(instance: Instance) -> tuple[bool, ...]:
    """No stage fuses its backward."""
    return (False,) * instance.num_stages


def test_a_pattern_repeats_at_its_period() -> None:
    """p=2, unit times, cap 2: the work of 3 is a possible period, so every micro-batch adds 3."""
    instance = equal_stages(2, 12, memory_cap=2)
    pattern = find_pattern(instance, 3.0, split(instance), time_limit=20, workers=1)
    assert pattern is not None
    longer = simulate(instance, pattern.orders(instance))
    assert check(instance, longer) == []
    fewer = instance.with_changes(num_microbatches=11)
    assert longer.makespan - simulate(fewer, pattern.orders(fewer)).makespan == pytest.approx(3.0)


def test_no_pattern_is_shorter_than_the_work_or_than_memory_allows() -> None:
    """Three units of work do not fit in 2.9; with cap 1 device 0 needs 5 (F F B B W), not 4.9."""
    ample = equal_stages(2, 12)
    assert find_pattern(ample, 2.9, split(ample), time_limit=20, workers=1) is None
    tight = equal_stages(2, 12, memory_cap=1)
    assert find_pattern(tight, 4.9, split(tight), time_limit=20, workers=1) is None
    assert find_pattern(tight, 5.0, split(tight), time_limit=20, workers=1) is not None


def test_fused_stages_run_bw() -> None:
    """With both stages fused (F 1, BW 2) a period of 3 needs no W."""
    instance = equal_stages(2, 6).with_fused_backward()
    pattern = find_pattern(instance, 3.0, (True, True), time_limit=20, workers=1)
    assert pattern is not None
    orders = pattern.orders(instance)
    assert {task.kind for order in orders for task in order if task.kind.name.startswith("B")} == {BW}
    assert check(instance, simulate(instance, orders)) == []


@pytest.mark.parametrize(("seed", "period"), [(41, 50.0), (11, 40.0)])
def test_unequal_v_placements_unroll_to_valid_schedules(seed: int, period: float) -> None:
    """Uneven times, memory and caps: what CP-SAT places within the caps stays within them when repeated."""
    instance = random_instance(seed)
    pattern = find_pattern(instance, period, split(instance), time_limit=30, workers=1)
    assert pattern is not None
    assert check(instance, simulate(instance, pattern.orders(instance))) == []
