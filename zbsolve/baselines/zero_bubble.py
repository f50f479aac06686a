"""The hand-made zero-bubble schedules ZB-H1 and ZB-H2. Qi et al., arXiv 2401.10241, section 2."""

from __future__ import annotations

from zbsolve.baselines.base import (
    Baseline,
    DeviceOrders,
    forwards_of,
    one_forward_one_backward,
    require_linear,
)
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import B, W


def _orders(instance: Instance, warmups: list[int], delays: list[int]) -> DeviceOrders:
    """1F1B over B with the given warm-up per device; W of micro-batch j - delay follows B of j."""
    m = instance.num_microbatches
    result = []
    for r, (warmup, delay) in enumerate(zip(warmups, delays, strict=True)):
        backwards: list[list[Task]] = []
        for j in range(m):
            backwards.append([Task(B, r, j)] + ([Task(W, r, j - delay)] if j >= delay else []))
        rest = [Task(W, r, j) for j in range(max(0, m - delay), m)]
        result.append((*one_forward_one_backward(forwards_of(instance, r), backwards, warmup), *rest))
    return tuple(result)


def orders_h1(instance: Instance) -> DeviceOrders:
    """1F1B's warm-up of p - r forwards; device r keeps r weight gradients back and so holds p in flight."""
    require_linear(instance, "zb-h1")
    p = instance.num_devices
    return _orders(instance, [p - r for r in range(p)], list(range(p)))


def orders_h2(instance: Instance) -> DeviceOrders:
    """Warm-up of 2 (p - r) - 1 forwards, 2 r weight gradients kept back: 2 p - 1 in flight everywhere."""
    require_linear(instance, "zb-h2")
    p = instance.num_devices
    return _orders(instance, [2 * (p - r) - 1 for r in range(p)], [2 * r for r in range(p)])


ZB_H1 = Baseline(
    "zb-h1",
    "W fills the cool-down, 1F1B's memory",
    "arXiv 2401.10241, section 2.1",
    orders_h1,
    placement="linear",
)
ZB_H2 = Baseline(
    "zb-h2",
    "more warm-up: zero bubble in span, 2p - 1 in flight",
    "arXiv 2401.10241, section 2.2",
    orders_h2,
    placement="linear",
)
