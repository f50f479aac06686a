"""1F1B (PipeDream-Flush) and its interleaved form.

1F1B: Narayanan et al., arXiv 2006.09503. Interleaved 1F1B: Narayanan et al., arXiv 2104.04473, section 2.2,
with the number N of consecutive micro-batches per chunk tunable from p (depth-first) to m (breadth-first;
Lamy-Poirier, arXiv 2211.05953).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zbsolve.baselines.base import (
    Baseline,
    DeviceOrders,
    chunks_in_loop,
    forwards_of,
    fused,
    one_forward_one_backward,
    require_linear,
)
from zbsolve.errors import InputError
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import BW, F


def orders_1f1b(instance: Instance) -> DeviceOrders:
    """Device r runs p - r forwards, then one backward and one forward in turn: p - r in flight."""
    require_linear(instance, "1f1b")
    p, m = instance.num_devices, instance.num_microbatches
    return tuple(
        one_forward_one_backward(forwards_of(instance, r), [[Task(BW, r, j)] for j in range(m)], p - r)
        for r in range(p)
    )


def orders_interleaved(instance: Instance, group: int | None = None) -> DeviceOrders:
    """Interleaved 1F1B on a loop placement of v chunks, ``group`` = N (default p).

    Device r takes its forwards group by group: N micro-batches through its first chunk, the same through
    the next, and so on; backwards likewise from the last chunk. Warm-up is
    ``2 (p - r - 1) + (v - 1) N + 1`` forwards, which gives the peak of ``p + (p - 1) / v`` stage-activations
    at device 0 for N = p.
    """
    v = chunks_in_loop(instance, "interleaved")
    p, m = instance.num_devices, instance.num_microbatches
    if v < 2:
        raise InputError("interleaved needs at least two chunks per device: use 1f1b for one")
    n = p if group is None else group
    if m < p:
        raise InputError(f"interleaved needs at least as many micro-batches as devices: m is {m}, p is {p}")
    if not p <= n <= m or m % n:
        possible = [k for k in range(p, m + 1) if m % k == 0]
        raise InputError(
            f"interleaved takes N micro-batches in a row through each chunk (N = p if none is named): N must "
            f"divide m and lie from p to m: p is {p}, m is {m}, N is {n}: use interleaved:N with N = "
            f"{_alternatives(possible)}"
        )
    result = []
    for r in range(p):
        slots = [(c, j) for first in range(0, m, n) for c in range(v) for j in range(first, first + n)]
        forwards = [Task(F, c * p + r, j) for c, j in slots]
        backwards = [[Task(BW, (v - 1 - c) * p + r, j)] for c, j in slots]
        warmup = 2 * (p - r - 1) + (v - 1) * n + 1
        result.append(one_forward_one_backward(forwards, backwards, warmup))
    return tuple(result)


def _alternatives(numbers: Sequence[int]) -> str:
    """At most four of the numbers, the last always among them: 4, 8 or 16."""
    few = [*numbers[:3], numbers[-1]] if len(numbers) > 4 else numbers
    return " or ".join(filter(None, (", ".join(map(str, few[:-1])), str(few[-1]))))


ONE_F_ONE_B = Baseline(
    "1f1b",
    "one forward, one backward: stage r holds p - r in flight",
    "arXiv 2006.09503",
    orders_1f1b,
    adapt=fused,
    placement="linear",
)
INTERLEAVED = Baseline(
    "interleaved",
    "1F1B over v chunks per device in a loop, depth-first: N = p",
    "arXiv 2104.04473, section 2.2",
    orders_interleaved,
    adapt=fused,
    placement="loop",
)
BREADTH_FIRST = Baseline(
    "breadth-first",
    "the same with N = m: every micro-batch through a chunk before the next chunk",
    "arXiv 2211.05953",
    lambda instance: orders_interleaved(instance, instance.num_microbatches),
    adapt=fused,
    placement="loop",
)


def interleaved(group: int) -> Baseline:
    """Interleaved 1F1B with N = ``group`` consecutive micro-batches per chunk."""
    return Baseline(
        f"interleaved:{group}",
        f"1F1B over v chunks per device in a loop, N = {group}",
        "arXiv 2104.04473, section 2.2, and arXiv 2211.05953",
        partial(orders_interleaved, group=group),
        adapt=fused,
        placement="loop",
    )
