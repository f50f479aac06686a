"""GPipe (AFAB): all forwards, then all backwards. Huang et al., arXiv 1811.06965."""

from __future__ import annotations

from zbsolve.baselines.base import Baseline, DeviceOrders
from zbsolve.graph import BW, F, Task
from zbsolve.instance import Instance


def orders(instance: Instance) -> DeviceOrders:
    """All F of every micro-batch, chunk by chunk, then all backwards in the mirrored order."""
    result = []
    for device in range(instance.num_devices):
        stages = instance.stages_on(device)
        forwards = [Task(F, s, j) for s in stages for j in range(instance.num_microbatches)]
        backwards = [Task(BW, s, j) for s in reversed(stages) for j in range(instance.num_microbatches)]
        result.append((*forwards, *backwards))
    return tuple(result)


GPIPE = Baseline("gpipe", "all forwards, then all backwards (AFAB)", "arXiv 1811.06965", orders, fused=True)
