"""Seeded random instances: unequal stages, any placement, caps from one micro-batch up to none.

They stand for what nobody tuned a schedule for. The recipe of :func:`random_instance` is fixed: a seed names
the same instance for ever, so that results on it can be compared. Not drawn here: fused backward, transient
peaks, static memory, and hops that differ from boundary to boundary.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from zbsolve.model.instance import Instance, make_instance, place
from zbsolve.model.serial import serial_program

# The random suite of `zbsolve bench`.
SEEDS = range(60)

_PLACEMENTS: tuple[Literal["linear", "loop", "v"], ...] = ("linear", "loop", "v")
_MEAN_T_F = 2.0  # of times uniform in 1 to 3
_SHARE_WITH_CAP = 0.85


def random_instance(seed: int) -> Instance:
    """The instance of a seed.

    p is 2 to 16, m 2 to 64, the placement linear, loop or V (two stages a device). Of each stage T_F, T_B
    and T_W are uniform in 1 to 3 and mem_b in 1 to 2; mem_w is one ratio of 0.4 to 1.7 times mem_b on
    all stages. The hop is 0 to half the mean T_F. 15 % have no cap; the others have caps of 0 to 2 times
    p M_B a stage, many of them tight, and never below what one micro-batch needs.
    """
    draw = np.random.default_rng(seed)

    def uniform(low: float, high: float) -> float:
        return float(np.round(draw.uniform(low, high), 3))

    # The order of the draws is the recipe: keep it.
    p = int(draw.integers(2, 17))
    m = int(draw.integers(2, 65))
    devices = place(p, _PLACEMENTS[int(draw.integers(0, 3))])
    ratio = float(draw.uniform(0.4, 1.7))
    stages = []
    for device in devices:
        mem_b = uniform(1, 2)
        times = {name: uniform(1, 3) for name in ("t_f", "t_b", "t_w")}
        mem_w = float(np.round(mem_b * ratio, 3))
        stages.append({"device": device, **times, "mem_b": mem_b, "mem_w": mem_w})
    hop = float(np.round(draw.uniform(0, 0.5) * _MEAN_T_F, 3))
    instance = make_instance(
        name=f"random-{seed}", num_devices=p, num_microbatches=m, stages=stages, t_comm=hop
    )
    if draw.uniform(0, 1) > _SHARE_WITH_CAP:
        return instance
    tightness = float(draw.uniform(0, 2)) ** 2 / 2  # 0 to 2 times p M_B, small ones most often
    mean_mem_b = float(np.mean([stage.mem_b for stage in instance.stages]))
    caps = [
        max(
            serial_program(instance, device)[0],
            tightness * p * mean_mem_b * len(instance.stages_on(device)),
        )
        for device in range(p)
    ]
    return instance.with_changes(memory_cap=caps)
