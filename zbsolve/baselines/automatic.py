"""ZB-1p and ZB-2p: the automatic heuristic at the published caps. Qi et al., arXiv 2401.10241, section 3.

On a linear placement the published greedy construction (:mod:`zbsolve.baselines.greedy`), under 1 p or 2 p
times each device's own mem_b in place of the instance's cap; elsewhere zbsolve's list scheduler under that
cap. The shortest by span, the paper's cost, is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from zbsolve.baselines.base import Baseline, DeviceOrders, is_linear
from zbsolve.baselines.greedy import Greedy, greedy_candidates
from zbsolve.errors import InputError
from zbsolve.model.instance import Instance
from zbsolve.search.list_scheduler import ListScheduler
from zbsolve.search.policies import affordable_patiences, automatic


def orders_at(cap: str, instance: Instance) -> DeviceOrders:
    """The best of what fits under ``cap``, by span, then by makespan."""
    if instance.replicas > 1:
        raise InputError(f"zb-{cap} plans one replica: the instance has {instance.replicas}")
    capped = instance.with_memory_cap(cap)
    best = min(_candidates(capped), key=lambda found: found.costs("span"), default=None)
    if best is None:
        raise InputError(
            f"zb-{cap} needs memory of {cap} times mem_b to hold one micro-batch: it does not here"
        )
    return best.orders


def _candidates(capped: Instance) -> Iterator[Greedy]:
    """The greedy construction's, or the list scheduler's one where there is none."""
    found = False
    if is_linear(capped):
        for greedy in greedy_candidates(capped):
            found = True
            yield greedy
    scheduler = ListScheduler(capped)
    if not found and math.isfinite(automatic(scheduler, "span", affordable_patiences(capped))):
        yield Greedy(scheduler.best_orders(), *scheduler.best_costs)


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
