"""GPipe (AFAB): all forwards, then all backwards. Huang et al., arXiv 1811.06965.

With recomputation (``gpipe-r``) a stage keeps only its input (``mem_r``) and runs F again before its
backward: at t_b = 2 t_f the backward grows from 2 t_f to 3 t_f, a third more work.
"""

from __future__ import annotations

from zbsolve.baselines.base import Baseline, DeviceOrders, fused
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import BW, F


def orders(instance: Instance) -> DeviceOrders:
    """All F of every micro-batch, chunk by chunk, then all backwards in the mirrored order."""
    result = []
    for device in range(instance.num_devices):
        stages = instance.stages_on(device)
        forwards = [Task(F, s, j) for s in stages for j in range(instance.num_microbatches)]
        backwards = [Task(BW, s, j) for s in reversed(stages) for j in range(instance.num_microbatches)]
        result.append((*forwards, *backwards))
    return tuple(result)


GPIPE = Baseline("gpipe", "all forwards, then all backwards (AFAB)", "arXiv 1811.06965", orders, adapt=fused)
GPIPE_R = Baseline(
    "gpipe-r",
    "GPipe with recomputation: F again before each backward, boundary-only memory",
    "arXiv 1811.06965, section 2.3",
    orders,
    adapt=lambda instance: instance.with_fused_backward().with_recomputation(),
)
