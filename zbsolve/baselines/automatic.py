"""ZB-1p and ZB-2p: the automatic heuristic at the published caps. Qi et al., arXiv 2401.10241, section 3.

The orders come from :mod:`zbsolve.heuristics`, with the cap of 1 p or 2 p times each device's own mem_b in
place of the instance's; where ZB-H1 or ZB-H2 fits under that cap and is shorter, it is that one.
"""

from __future__ import annotations

import math
from functools import partial

from zbsolve.baselines.base import Baseline, DeviceOrders
from zbsolve.baselines.zero_bubble import orders_h1, orders_h2
from zbsolve.errors import InputError
from zbsolve.heuristics import affordable_patiences, automatic
from zbsolve.instance import Instance
from zbsolve.list_scheduler import ListScheduler
from zbsolve.memory import peak_memory
from zbsolve.simulator import simulate


def orders_at(cap: str, instance: Instance) -> DeviceOrders:
    """The best preset of the automatic heuristic under ``cap``, by makespan."""
    if instance.replicas > 1:
        raise InputError(f"zb-{cap} plans one replica: the instance has {instance.replicas}")
    capped = instance.with_memory_cap(cap)
    scheduler = ListScheduler(capped)
    if not math.isfinite(automatic(scheduler, "makespan", affordable_patiences(instance))):
        raise InputError(
            f"zb-{cap} needs memory of {cap} times mem_b to hold one micro-batch: it does not here"
        )
    found = [scheduler.best_orders()]
    if all(stage.device == s for s, stage in enumerate(instance.stages)):
        found += [
            orders
            for orders in (orders_h1(instance), orders_h2(instance))
            if all(capped.fits(d, peak_memory(capped, d, order)) for d, order in enumerate(orders))
        ]
    return min(found, key=lambda orders: simulate(instance, orders).makespan)


ZB_1P = Baseline(
    "zb-1p",
    "automatic heuristic under p M_B per device",
    "arXiv 2401.10241, section 3",
    partial(orders_at, "1p"),
    automatic=True,
)
ZB_2P = Baseline(
    "zb-2p",
    "automatic heuristic under 2p M_B per device",
    "arXiv 2401.10241, section 3",
    partial(orders_at, "2p"),
    automatic=True,
)
