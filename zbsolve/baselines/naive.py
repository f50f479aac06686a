"""Naive model parallelism: one micro-batch at a time, every other device waits.

With m micro-batches one after the other it takes what one batch of their size takes: p times its own work, so
the bubble is (p - 1)(t_f + t_b) per micro-batch, r = t_bubble / t_ideal = p - 1 at equal stages.
"""

from __future__ import annotations

from zbsolve.baselines.base import Baseline, DeviceOrders, fused
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import BW, F


def orders(instance: Instance) -> DeviceOrders:
    """F through the whole model and BW back, micro-batch by micro-batch (and replica by replica)."""
    result: list[list[Task]] = [[] for _ in range(instance.num_devices)]
    for j in range(instance.num_microbatches):
        for first in range(0, instance.num_stages, instance.chain):
            stages = range(first, first + instance.chain)
            for s in stages:
                result[instance.stages[s].device].append(Task(F, s, j))
            for s in reversed(stages):
                result[instance.stages[s].device].append(Task(BW, s, j))
    return tuple(map(tuple, result))


NAIVE = Baseline(
    "naive", "one micro-batch at a time", "model parallelism without a pipeline", orders, adapt=fused
)
