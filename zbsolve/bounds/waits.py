"""Precedences that memory forces, and the longest paths that follow from them.

All statements hold for canonical schedules (micro-batches in order per stage: F's, backwards, W's), of
which one is always among the best: :mod:`zbsolve.bounds.catalogue` has the proof. Where a stage can fuse, its
backward stands for B or BW and its W is left out. "Before" and "after" on a device mean its order, which
also settles where tasks of no length lie; times follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from zbsolve.model.instance import Instance, Stage
from zbsolve.model.kinds import B, TaskKind, W
from zbsolve.model.tolerances import proof_room


def single_chain(instance: Instance) -> bool:
    """Whether there is one chain of stages, and no device runs two tasks at once: no replicas, no pairs."""
    return not instance.has_pairs and instance.replicas == 1


def back(stage: Stage) -> float:
    """Shortest time from the start of a stage's backward to its input gradient."""
    return stage.t_b if stage.t_bw is None else min(stage.t_b, stage.t_bw)


def pass_lengths(stage: Stage) -> tuple[float, float, float]:
    """Least time of a stage's F, backward and W; where it can fuse, the W is the rest of its backward."""
    return stage.t_f, back(stage), stage.min_backward - back(stage)


def room(instance: Instance, device: int) -> float:
    """Memory of a device for activations: what the checker accepts has room in it."""
    return proof_room(instance.cap(device), instance.static(device))


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


class LagAnswer(NamedTuple):
    """A proven lag, whether some schedule of the few micro-batches has no longer one, and what it took.

    ``work``: the seconds that its search stands for.
    """

    lag: Lag
    exact: bool
    work: float


class LeastTime(NamedTuple):
    """``kind`` of ``stage`` for ``microbatch`` has at least ``value`` before its start; or after its end.

    Where the stage can fuse, B ends :func:`back` after its start, and W is the rest of ``min_backward``.
    """

    kind: TaskKind
    stage: int
    microbatch: int
    value: float
    after: bool = False


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

    Where q = a, that F itself may need more: when it starts, its own micro-batch holds M_a + peak_f, and if
    the backward (s_a, j) has not ended, each of j to j + k - 1 holds M_a (their backwards at s_a come after
    j's, those of the stages before later still). With (k + 1) M_a + peak_f over the cap it waits, too. For
    q > a that is no news: the backward (s_q, j) ends before that at s_a starts.

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
                    stage = instance.stages[last]
                    most = max(backward_adds(stage), stage.peak_f if a == q else 0.0)
                    distance = _least_over(free - cumulative[q] - most, cumulative[a], m)
                    if distance < m:
                        yield MemoryWait(stages[a], B, last, distance)
        for s, held in zip(stages, cumulative, strict=True):
            stage = instance.stages[s]
            if stage.t_bw is not None or stage.mem_w == 0:
                continue
            most = max(backward_adds(stage), stage.peak_f)
            ended = m if held == 0 else _least_over(free - held - most, held, m)
            left = free - held - stage.peak_f
            for distance in range(1, m):
                left -= stage.mem_w if distance >= ended else min(stage.mem_w, held)
                if left < 0:
                    yield MemoryWait(s, W, s, distance)
                    break


def _least_over(free: float, each: float, most: int) -> int:
    """The least number from 1 on of ``each`` that is more than ``free``; at most ``most`` + 1."""
    return int(min(most, max(0.0, free) / each)) + 1


def backward_adds(stage: Stage) -> float:
    """Memory that a stage's backward adds while it runs, by its cheaper way."""
    split = stage.growth + stage.peak_b
    return split if stage.t_bw is None else min(split, stage.peak_fused)
