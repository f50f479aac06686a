"""Precedences that memory forces, and the longest paths that follow from them.

All statements hold for canonical schedules (micro-batches in order per stage: F's, backwards, W's), of
which one is always among the best: :mod:`zbsolve.bounds` has the proof. Where a stage can fuse, its
backward stands for B or BW and its W is left out. "Before" and "after" on a device mean its order, which
also settles where tasks of no length lie; times follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zbsolve.graph import B, F, TaskKind, W
from zbsolve.instance import MEMORY_RTOL, Instance, Stage


def back(stage: Stage) -> float:
    """Shortest time from the start of a stage's backward to its input gradient."""
    return stage.t_b if stage.t_bw is None else min(stage.t_b, stage.t_bw)


def room(instance: Instance, device: int) -> float:
    """Memory of a device for activations, with the tolerance that the checker grants.

    Twice that tolerance: the checker's own sums are rounded, and what it accepts must have room here.
    """
    cap = instance.cap(device)
    return cap - instance.static(device) + 2 * MEMORY_RTOL * max(1.0, cap) if cap < math.inf else math.inf


class MemoryWait(NamedTuple):
    """F(``waiting``, j + ``distance``) starts after ``kind`` of ``stage`` for micro-batch j has ended."""

    waiting: int
    kind: TaskKind
    stage: int
    distance: int


class Lag(NamedTuple):
    """F(``stage``, j + ``distance``) starts at least ``value`` after F(``stage``, j) starts, for every j.

    With ``to_end``: so long after the start of F(``stage``, m - ``distance``) the step ends, at the earliest.
    """

    stage: int
    distance: int
    value: float
    to_end: bool = False


def memory_waits(instance: Instance) -> Iterator[MemoryWait]:
    """Every precedence of this form that a device's cap forces.

    Let a device hold stages s_1 < ... < s_c, and let M_a = mem_b(s_1) + ... + mem_b(s_a).

    Backward: from the start of F(s_q, j) to the end of its backward, micro-batch j holds M_q on the device:
    the F's of the stages before were run, their backwards come later; its own backward adds its growth and
    peak (the lesser of split and fused). For a <= q, a later micro-batch i whose F(s_a, i) has started holds
    M_a until after j's backward at s_q, since its backwards there come after j's. Were F(s_a, j + k)
    started before the backward (s_q, j) ends, it would have run before that backward starts, and so would
    F(s_a, j + 1) to F(s_a, j + k - 1): k such micro-batches would be held beside j while the backward runs.
    So if k is the least number from 1 on with which M_q + what the backward adds + k M_a is over the cap,
    F(s_a, j + k) waits.

    W, where stage s = s_a cannot fuse: when F(s, i) starts, its micro-batch holds M_a + peak_f. Of the
    micro-batches before it whose W has not ended, number i - t holds mem_w of s if its backward has ended,
    which the rule above forces for t >= d, d being its distance for (s, s); else at least the lesser of
    mem_w and M_a (its backward not ended: its F's of s_1 to s_a ran before F(s, i), their backwards come
    later than this one). Were W(s, i - t) not ended, then neither were the W's of the t - 1 after it; if what
    these t hold is too much beside F(s, i), W(s, i - t) has ended before F(s, i) starts.
    """
    m = instance.num_microbatches
    for device in range(instance.num_devices):
        free = room(instance, device)
        if math.isinf(free):
            continue
        stages = instance.stages_on(device)
        cumulative = list(accumulate(instance.stages[s].mem_b for s in stages))
        for q, last in enumerate(stages):
            for a in range(q + 1):
                if cumulative[a] > 0:
                    left = free - cumulative[q] - _backward_adds(instance.stages[last])
                    distance = max(1, int(min(m, left / cumulative[a])) + 1)
                    if distance < m:
                        yield MemoryWait(stages[a], B, last, distance)
        for s, held in zip(stages, cumulative, strict=True):
            stage = instance.stages[s]
            if stage.t_bw is not None or stage.mem_w == 0:
                continue
            left = free - held - _backward_adds(stage)
            ended = m if held == 0 else max(1, int(min(m, left / held)) + 1)
            left = free - held - stage.peak_f
            for distance in range(1, m):
                left -= stage.mem_w if distance >= ended else min(stage.mem_w, held)
                if left < 0:
                    yield MemoryWait(s, W, s, distance)
                    break


def _backward_adds(stage: Stage) -> float:
    """Memory that a stage's backward adds while it runs, by its cheaper way."""
    split = stage.growth + stage.peak_b
    return split if stage.t_bw is None else min(split, stage.peak_fused)


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


def windows(instance: Instance, lags: Iterable[Lag] = ()) -> Windows:
    """Longest paths over dependencies, micro-batch order, :func:`memory_waits` and lags proven elsewhere."""
    S, m, p = instance.num_stages, instance.num_microbatches, instance.num_devices
    t_f = [stage.t_f for stage in instance.stages]
    t_b = [back(stage) for stage in instance.stages]
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
    for wait in memory_waits(instance):
        waits_of[wait.waiting].append(wait)
    code = {F: 0, B: 1, W: 2}
    length = (t_f, t_b, t_w)

    heads = np.full((3, S, m, p + 1), -np.inf)
    for s in range(S):
        if instance.stages_on(device[s])[0] == s:
            heads[0, s, 0, device[s]] = 0.0
    heads[0, 0, 0, p] = 0.0
    for j in range(m):
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
        for s in range(S - 1, -1, -1):
            head = heads[1, s, j]
            np.maximum(head, heads[0, s, j] + t_f[s], out=head)
            if s + 1 < S:
                np.maximum(head, heads[1, s + 1, j] + (t_b[s + 1] + hops[s]), out=head)
            if j > 0:
                np.maximum(head, heads[1, s, j - 1] + t_b[s], out=head)
            if splits[s]:
                np.maximum(heads[2, s, j], head + t_b[s], out=heads[2, s, j])
                if j > 0:
                    np.maximum(heads[2, s, j], heads[2, s, j - 1] + t_w[s], out=heads[2, s, j])

    waiters_of: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for s in range(S):
        for _, kind, q, distance in waits_of[s]:
            waiters_of.setdefault((code[kind], q), []).append((s, distance))
    tails = np.full((3, S, m, p + 1), -np.inf)
    for j in range(m - 1, -1, -1):
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
        for s in range(S - 1, -1, -1):
            tail = tails[0, s, j]
            np.maximum(tail, tails[1, s, j] + t_b[s], out=tail)
            if s + 1 < S:
                np.maximum(tail, tails[0, s + 1, j] + (t_f[s + 1] + hops[s]), out=tail)
            if j + 1 < m:
                np.maximum(tail, tails[0, s, j + 1] + t_f[s], out=tail)
            for _, distance, value, to_end in lags_of[s]:
                if to_end and j + distance == m:
                    tail[p] = max(tail[p], value - t_f[s])
                elif not to_end and j + distance < m:
                    np.maximum(tail, tails[0, s, j + distance] + value, out=tail)
    return Windows(heads, tails)
