"""Longest paths through a step: the least times before and after every task.

Paths run over dependencies, micro-batch order, what memory forces
(:func:`zbsolve.bounds.waits.memory_waits`), lags proven elsewhere, and through a device's work
(:mod:`zbsolve.bounds.forced_work`). All statements hold for canonical schedules, as in
:mod:`zbsolve.bounds.waits`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zbsolve.bounds.forced_work import ForcedWork, counting_steps
from zbsolve.bounds.waits import Lag, MemoryWait, back, memory_waits
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import B, F, W
from zbsolve.model.recompute import instant_recomputation

# Beyond, counting a device's work takes ten seconds and more, for steps whose bounds are tight without it.
MOST_COUNTING_STEPS = 150_000_000


@dataclass(frozen=True, slots=True)
class Windows:
    """Least times around every task, per observer.

    Observer d < p watches device d: ``heads`` count from the start of its first F, ``tails`` to the end of
    its last task. Observer p watches the whole step. Shape (kinds F B W, S, m, p + 1); minus infinity where
    nothing is implied. ``heads`` are to the start of a task, ``tails`` from its end; where the stage can
    fuse, a backward's tail counts from :func:`back` after its start, the earliest end of its gradient.
    """

    heads: NDArray[np.float64]
    tails: NDArray[np.float64]


def windows(
    instance: Instance, lags: Iterable[Lag] = (), enough: Callable[[], bool] = lambda: False
) -> Windows:
    """Longest paths over dependencies, micro-batch order, :func:`memory_waits` and lags proven elsewhere.

    For the whole step, and for the window of stage 0's device, which begins with it, paths also run through
    the work that a device is forced to do on the way (:class:`zbsolve.bounds.forced_work.ForcedWork`).
    Once ``enough`` says yes no more of that work is counted: what is said then holds all the same.
    """
    S, m, p = instance.num_stages, instance.num_microbatches, instance.num_devices
    t_f = [stage.t_f for stage in instance.stages]
    t_b = [back(stage) for stage in instance.stages]
    t_r = [stage.t_r or 0.0 for stage in instance.stages]
    splits = [stage.t_bw is None for stage in instance.stages]
    t_w = [stage.t_w if split else 0.0 for stage, split in zip(instance.stages, splits, strict=True)]
    # The rest of a fused backward occupies the device but hands nothing on: it counts in the tail.
    rest = [
        0.0 if split else stage.min_backward - back(stage)
        for stage, split in zip(instance.stages, splits, strict=True)
    ]
    hops = [instance.hop(b) for b in range(S - 1)]
    device = [stage.device for stage in instance.stages]
    lags_of: list[list[Lag]] = [[] for _ in range(S)]
    for lag in lags:
        lags_of[lag.stage].append(lag)
    waits_of: list[list[MemoryWait]] = [[] for _ in range(S)]
    # Where the R's are is open: they count between a micro-batch's own F and backward, and in no memory.
    plain = instant_recomputation(instance)
    for wait in memory_waits(plain):
        waits_of[wait.waiting].append(wait)
    code = {F: 0, B: 1, W: 2}
    length = (t_f, t_b, t_w)

    # What begins with the step, resp. ends with it: the step itself and the window of stage 0's device.
    whole = (p, device[0])
    counted = counting_steps(instance) <= MOST_COUNTING_STEPS
    work_before = ForcedWork(plain) if counted else None
    work_after = {o: ForcedWork(plain, mirrored=True) for o in whole} if counted else {}

    heads = np.full((3, S, m, p + 1), -np.inf)
    for s in range(S):
        if instance.stages_on(device[s])[0] == s:
            heads[0, s, 0, device[s]] = 0.0
    heads[0, 0, 0, p] = 0.0
    for j in range(m):
        if work_before is not None and enough():
            work_before = None
        for s in range(S):
            head = heads[0, s, j]
            if s > 0:
                np.maximum(head, heads[0, s - 1, j] + (t_f[s - 1] + hops[s - 1]), out=head)
            if j > 0:
                np.maximum(head, heads[0, s, j - 1] + t_f[s], out=head)
            for _, kind, q, distance in waits_of[s]:
                if j >= distance:
                    c = code[kind]
                    np.maximum(head, heads[c, q, j - distance] + length[c][q], out=head)
            for _, distance, value, to_end in lags_of[s]:
                if j >= distance and not to_end:
                    np.maximum(head, heads[0, s, j - distance] + value, out=head)
            if work_before is not None:
                head[list(whole)] = work_before.settle(F, s, j, head[p])
        for s in range(S - 1, -1, -1):
            head = heads[1, s, j]
            np.maximum(head, heads[0, s, j] + (t_f[s] + t_r[s]), out=head)
            if s + 1 < S:
                np.maximum(head, heads[1, s + 1, j] + (t_b[s + 1] + hops[s]), out=head)
            if j > 0:
                np.maximum(head, heads[1, s, j - 1] + t_b[s], out=head)
            if work_before is not None:
                head[list(whole)] = work_before.settle(B, s, j, head[p])
            if splits[s]:
                np.maximum(heads[2, s, j], head + t_b[s], out=heads[2, s, j])
                if j > 0:
                    np.maximum(heads[2, s, j], heads[2, s, j - 1] + t_w[s], out=heads[2, s, j])
            if work_before is not None:
                work_before.record(W, s, j, heads[2 if splits[s] else 1, s, j, p])

    waiters_of: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for s in range(S):
        for _, kind, q, distance in waits_of[s]:
            waiters_of.setdefault((code[kind], q), []).append((s, distance))
    tails = np.full((3, S, m, p + 1), -np.inf)
    for j in range(m - 1, -1, -1):
        if work_after and enough():
            work_after = {}
        for s in range(S):
            own = device[s]
            if splits[s]:
                tail = tails[2, s, j]
                tail[own] = tail[p] = 0.0
                if j + 1 < m:
                    np.maximum(tail, tails[2, s, j + 1] + t_w[s], out=tail)
                for q, distance in waiters_of.get((2, s), ()):
                    if j + distance < m:
                        np.maximum(tail, tails[0, q, j + distance] + t_f[q], out=tail)
            for o, work in work_after.items():
                # The rest of a fused backward has nothing after it by force, and is in its device's windows.
                unforced = 0.0 if o in (p, own) else -math.inf
                work.record(W, s, j, tails[2, s, j, o] if splits[s] else unforced)
            tail = tails[1, s, j]
            tail[own] = tail[p] = rest[s]
            if splits[s]:
                np.maximum(tail, tails[2, s, j] + t_w[s], out=tail)
            if s > 0:
                np.maximum(tail, tails[1, s - 1, j] + (t_b[s - 1] + hops[s - 1]), out=tail)
            if j + 1 < m:
                np.maximum(tail, tails[1, s, j + 1] + t_b[s], out=tail)
            for q, distance in waiters_of.get((1, s), ()):
                if j + distance < m:
                    np.maximum(tail, tails[0, q, j + distance] + t_f[q], out=tail)
            for o, work in work_after.items():
                tail[o] = work.settle(B, s, j, tail[o])
        for s in range(S - 1, -1, -1):
            tail = tails[0, s, j]
            np.maximum(tail, tails[1, s, j] + (t_b[s] + t_r[s]), out=tail)
            if s + 1 < S:
                np.maximum(tail, tails[0, s + 1, j] + (t_f[s + 1] + hops[s]), out=tail)
            if j + 1 < m:
                np.maximum(tail, tails[0, s, j + 1] + t_f[s], out=tail)
            for _, distance, value, to_end in lags_of[s]:
                if to_end and j + distance == m:
                    tail[p] = max(tail[p], value - t_f[s])
                elif not to_end and j + distance < m:
                    np.maximum(tail, tails[0, s, j + distance] + value, out=tail)
            for o, work in work_after.items():
                tail[o] = work.settle(F, s, j, tail[o])
    return Windows(heads, tails)
