"""The random suite: its recipe, and that a seed names the same instance for ever."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from zbsolve.benchmark.random_instances import SEEDS, random_instance
from zbsolve.model.instance import Instance, place
from zbsolve.model.serial import require_feasible

SUITE = [random_instance(seed) for seed in SEEDS]


def rounded(data: object) -> object:
    """JSON data with every number to 12 digits."""
    if isinstance(data, float):
        return float(f"{data:.12g}")
    if isinstance(data, list):
        return [rounded(value) for value in data]
    return {key: rounded(value) for key, value in data.items()} if isinstance(data, dict) else data


def test_a_seed_names_the_same_instance_for_ever() -> None:
    """The hash of all 60 instances, as drawn when results on them were first published.

    To 12 digits: the least memory that caps are made of is a sum, and sums without rounding differ from
    those of that day in the last place.
    """
    lines = "\n".join(json.dumps(rounded(instance.to_json_dict()), sort_keys=True) for instance in SUITE)
    expected = "0b4b047564ab2d6c10105f41ed0632ca711c28dc78332e7c137ac2716b7eb190"
    assert hashlib.sha256(lines.encode()).hexdigest() == expected


@pytest.mark.parametrize("instance", SUITE, ids=lambda instance: instance.name)
def test_every_instance_keeps_the_recipe(instance: Instance) -> None:
    """Ranges of p, m, times, memory and hop; times of three decimals; one micro-batch always fits."""
    p, stages = instance.num_devices, instance.stages
    assert 2 <= p <= 16
    assert 2 <= instance.num_microbatches <= 64
    assert [stage.device for stage in stages] in [place(p, shape) for shape in ("linear", "loop", "v")]
    for stage in stages:
        for value in (stage.t_f, stage.t_b, stage.t_w):
            assert 1 <= value <= 3
            assert value == round(value, 3)
        assert 1 <= stage.mem_b <= 2
        # mem_w is rounded to 3 decimals and mem_b is at least 1: the ratio is off by at most 0.0005.
        assert 0.4 - 5e-4 <= stage.mem_w / stage.mem_b <= 1.7 + 5e-4
    ratios = [stage.mem_w / stage.mem_b for stage in stages]
    assert max(ratios) - min(ratios) <= 1e-3
    # Half of the mean T_F of 2.
    assert 0 <= instance.hop(0) <= 1
    require_feasible(instance)
    for device in range(p):
        cap = instance.cap(device)
        most = 2 * p * np.mean([stage.mem_b for stage in stages]) * len(instance.stages_on(device))
        # One micro-batch may need more than the share of p M_B: two stages of mem_b, mem_w at most 2 * 1.7.
        assert cap == np.inf or cap <= max(most, 2 * 2 * 2 * 1.7)


def test_the_suite_is_varied() -> None:
    """Every placement, capped and uncapped, small and large: a suite of one kind would prove little."""
    assert {instance.num_stages // instance.num_devices for instance in SUITE} == {1, 2}
    assert any(instance.stages[-1].device == 0 for instance in SUITE)  # V: the last stage is on device 0
    assert any(
        instance.num_stages > instance.num_devices == instance.stages[-1].device + 1 for instance in SUITE
    )
    assert 1 <= sum(instance.memory_cap is None for instance in SUITE) <= 30
    assert min(instance.num_microbatches for instance in SUITE) < 10
    assert max(instance.num_stages for instance in SUITE) >= 28
