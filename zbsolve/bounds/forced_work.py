"""What a device must have run before a task can start, and what it must still run after a task ends.

Paths say how long one micro-batch is under way; they do not see that a device with little memory has to
finish other micro-batches, one task at a time, before it has room for the next F. Here that work is
counted: the least time, over all states that the device may be in when a task starts, in which it can
have run what that state says it has run. These times are heads and tails like those of paths, and
:mod:`zbsolve.bounds.windows` carries both on from device to device.

The state is exact for devices with one stage or two. With more, only the order of F's and backwards counts,
not the memory.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zbsolve.bounds.memory_limits import forward_work, most_put_off
from zbsolve.bounds.waits import backward_adds, memory_waits, pass_lengths, room
from zbsolve.compiled import compile_loop
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import B, F, TaskKind, W
from zbsolve.model.tolerances import COUNT_ROUNDING

FloatArray = NDArray[np.float64]

# Below this many steps of the loops plain Python is done before machine code is loaded.
STEPS_WORTH_COMPILING = 100_000


def earliest_end(heads: Any, lengths: Any, counts: Any, enough: float) -> float:
    """When one machine, which may preempt, can have run the first ``counts[r]`` jobs of every row r.

    ``heads``, shape (rows, m), rise along a row; jobs of head minus infinity are left out. Minus
    infinity for no jobs at all. Running whatever is available leaves no machine idle longer than any other
    way does, and within a row the first jobs are available first. Stops short where it is ``enough`` already.
    """
    rows = heads.shape[0]
    at = np.zeros(rows, dtype=np.int64)
    now = -np.inf
    while now < enough:
        first, row = np.inf, -1
        for r in range(rows):
            while at[r] < counts[r] and heads[r, at[r]] == -np.inf:
                at[r] += 1
            if at[r] < counts[r] and heads[r, at[r]] < first:
                first, row = heads[r, at[r]], r
        if row < 0:
            return now
        now = max(now, first)
        # All of this row that is available by now, at once.
        while at[row] < counts[row] and heads[row, at[row]] <= now:
            now += lengths[row]
            at[row] += 1
    return now


def end_after_opening(heads: Any, lengths: Any, counts: Any, opening: float, rest_first: bool) -> float:
    """When the device can have run ``counts``, if it can do no more than ``opening`` before a certain task.

    That task is its first backward (mirrored: last F), the first of row ``chain``: before it only F's run
    (mirrored: only backwards and W's are left after it), as many as memory holds at once. All else in the
    counts comes after its head. Minus infinity where the counts do not include it.
    """
    chain = counts.shape[0] // 3
    if counts[chain] == 0:
        return -np.inf
    total, early = 0.0, 0.0
    for r in range(3 * chain):
        work = counts[r] * lengths[r]
        total += work
        if r < chain or (rest_first and r >= 2 * chain):
            early += work
    return float(heads[chain, 0] + total - min(early, opening))


def least_end(
    heads: Any, lengths: Any, counts: Any, opening: float, rest_first: bool, enough: float
) -> float:
    """When the device can have run ``counts`` at the earliest; may be less from ``enough`` on."""
    end = end_after_opening(heads, lengths, counts, opening, rest_first)
    return end if end >= enough else max(end, earliest_end(heads, lengths, counts, enough))


def least_time_before(
    heads: Any,
    lengths: Any,
    memory: Any,
    room: float,
    opening: float,
    chain: int,
    place: int,
    j: int,
    need: float,
    least_last: int,
    least_closed: int,
    known: float,
    rest_first: bool,
) -> float:
    """Least time of the start of a task over all states of its device; infinite where none has room.

    Where a state allows ``known`` or less this stops: then it says nothing new.

    A micro-batch runs ``2 * chain`` tasks on a device of ``chain`` stages, one after the other: rows 0 to
    ``2 * chain - 1``. The task in question is that of row ``place`` of micro-batch ``j``. Rows from
    ``2 * chain`` on are the W's, by stage. When it starts, row ``place`` has run exactly j times, those
    before it at least j + 1 times, and each row at most as often as the row before it.

    ``memory`` is (held of the first stage, of the second, pending of the first, of the second): a micro-batch
    holds the first from when row r has run until row ``2 * chain - 1 - r`` has, then the pending until its W
    has run; these and ``need`` of the task itself have to be within ``room``. Other rules say that the last
    row has run ``least_last`` times at least, and row ``chain`` ``least_closed`` times.

    ``rest_first`` is the mirror image, where time runs backwards: rows are backwards, then F's, and a W
    has to run before its backward, with nothing pending that need be.
    """
    last = 2 * chain - 1
    counts = np.zeros(3 * chain, dtype=np.int64)
    if chain > 2 or room == np.inf:
        for r in range(last + 1):
            counts[r] = j + 1 if r < place else (j if r == place else 0)
        if rest_first:
            for r in range(chain):
                counts[2 * chain + r] = counts[r] + (1 if r == place else 0)
        return least_end(heads, lengths, counts, opening, rest_first, np.inf)
    best = np.inf
    two = chain == 2
    held_a, held_b, pending_a, pending_b = memory[0], memory[1], memory[2], memory[3]
    for done in range(j if place == last else least_last, j + 1):  # by the last row
        # By the row before it, where there are two stages.
        ended_from, ended_to = 0, 0
        if two:
            ended_from = max(done, least_closed if place < 2 else (j if place == 2 else j + 1))
            ended_to = j + 1 if place == 3 else j
        enough = False
        for ended in range(ended_from, ended_to + 1):
            if two:
                second = max(ended, 0 if place == 0 else (j if place == 1 else j + 1))
                first = max(second, j if place == 0 else j + 1)
            else:
                second = 0
                first = j if place == 0 else j + 1
            held = (first - done) * held_a + (second - ended) * held_b + need
            if held > room:
                continue
            counts[0] = first
            if two:
                counts[1], counts[2], counts[3] = second, ended, done
            else:
                counts[1] = done
            rest = 2 * chain
            if rest_first:
                counts[rest] = first + (1 if place == 0 else 0)
                if two:
                    counts[rest + 1] = second + (1 if place == 1 else 0)
                best = min(best, least_end(heads, lengths, counts, opening, rest_first, best))
                if best <= known:
                    return best
                enough = True
                break
            over = held + done * pending_a + ended * pending_b - room
            for rest_a in range(done + 1):
                left = over - rest_a * pending_a
                rest_b = 0
                if left > 0:
                    # Not even all W's of the second stage would free enough; nor is the ratio below too much
                    # for an integer, though pending_b may be next to nothing.
                    if left > (ended + COUNT_ROUNDING) * pending_b:
                        continue
                    rest_b = min(ended, int(np.ceil(left / pending_b - COUNT_ROUNDING)))
                counts[rest] = rest_a
                if two:
                    counts[rest + 1] = rest_b
                best = min(best, least_end(heads, lengths, counts, opening, rest_first, best))
                if best <= known:
                    return best
                if left <= 0:
                    enough = rest_a == 0
                    break
            if enough:
                break  # more backwards would only be more work
        if enough and ended == ended_from:
            break
    return best


@cache
def _compiled() -> Any:
    """:func:`least_time_before` in machine code; compiled once a process."""
    return compile_loop(least_time_before, earliest_end, end_after_opening, least_end)


def counting_steps(instance: Instance) -> float:
    """About how many steps of the loops the heads of all tasks take."""
    m, chunks = instance.num_microbatches, instance.num_stages / instance.num_devices
    return instance.num_tasks * m * (3 * chunks) ** 2


class ForcedWork:
    """One direction of time: heads (mirrored: tails) are recorded as they become known, and asked for.

    In the order of :func:`zbsolve.bounds.windows.windows`: what is asked for one task rests on those recorded
    of micro-batches before it and, of its own, of tasks before it (mirrored: after).

    Parameters
    ----------
    mirrored : bool
        Time runs backwards, from the end of the step.
    """

    def __init__(self, instance: Instance, *, mirrored: bool = False) -> None:
        m = instance.num_microbatches
        self._m, self._mirrored = m, mirrored
        compiled = counting_steps(instance) > STEPS_WORTH_COMPILING
        self._least_time_before = _compiled() if compiled else least_time_before
        self._device = [stage.device for stage in instance.stages]
        self._place: dict[tuple[TaskKind, int], int] = {}
        self._need: dict[tuple[TaskKind, int], float] = {}
        # By the task that waits: how many micro-batches later its device's first and second stage let it run.
        self._distance: dict[tuple[TaskKind, int], list[int]] = {}
        self._heads: list[FloatArray] = []
        self._lengths: list[FloatArray] = []
        self._memory: list[FloatArray] = []
        self._room: list[float] = []
        self._opening: list[float] = []
        for d in range(instance.num_devices):
            held = instance.stages_on(d)
            chain = len(held)
            lengths = np.zeros(3 * chain)
            memory = np.zeros((2, max(2, chain)))
            for k, s in enumerate(held):
                stage = instance.stages[s]
                begin, end = (B, F) if mirrored else (F, B)
                self._place[begin, s], self._place[end, s], self._place[W, s] = (
                    k,
                    2 * chain - 1 - k,
                    2 * chain + k,
                )
                lengths[[self._place[kind, s] for kind in (F, B, W)]] = pass_lengths(stage)
                memory[:, k] = stage.mem_b, stage.mem_w
                # Up to its first row a micro-batch of its own is not counted as held.
                self._need[F, s] = stage.peak_f + (0.0 if mirrored else stage.mem_b)
                self._need[B, s] = backward_adds(stage) + (stage.mem_b if mirrored else 0.0)
                self._distance[F, s] = [m, m]
                self._distance[B, s] = [m, m]
            self._heads.append(np.full((3 * chain, m), np.inf))
            self._lengths.append(lengths)
            self._memory.append(memory[:, :2].ravel())
            self._room.append(room(instance, d))
            self._opening.append((most_put_off if mirrored else forward_work)(instance, d))

        for wait in memory_waits(instance):
            if wait.kind is B:
                # Mirrored, the backward waits for the F, which is of an earlier micro-batch there.
                task = (B, wait.stage) if mirrored else (F, wait.waiting)
                closing = wait.waiting if mirrored else wait.stage
                second = closing != instance.stages_on(self._device[closing])[0]
                self._distance[task][second] = wait.distance

    def record(self, kind: TaskKind, s: int, j: int, value: float) -> None:
        """The head (tail) of a task; the W of a stage that can fuse is the rest of its backward."""
        self._heads[self._device[s]][self._place[kind, s], self._microbatch(j)] = value

    def settle(self, kind: TaskKind, s: int, j: int, known: float) -> float:
        """The head (tail) of an F or backward: what the device must run, or ``known`` if more; recorded."""
        d, number = self._device[s], self._microbatch(j)
        least_last, least_closed = (max(0, number + 1 - k) for k in self._distance[kind, s])
        time = self._least_time_before(
            self._heads[d], self._lengths[d], self._memory[d], self._room[d], self._opening[d],
            len(self._lengths[d]) // 3, self._place[kind, s], number, self._need[kind, s],
            least_last, least_closed, known, self._mirrored,
        )  # fmt: skip
        # No state has room where the caps allow no schedule at all: not for this to tell.
        value = max(known, float(time)) if time < math.inf else known
        self.record(kind, s, j, value)
        return value

    def _microbatch(self, j: int) -> int:
        return self._m - 1 - j if self._mirrored else j
