"""Local search over device orders: move tasks on the critical path, accept a little worse for a while.

A step takes a task of the critical path that starts right when its device's previous task ends, and
moves it ahead of a few tasks, or its predecessor behind a few, or it out of its block of tasks without idle
time, as in critical-block neighbourhoods of job-shop search (Nowicki and Smutnicki 1996).

Nearly all moves are refused, so they are judged before they are made: with the heads (starts) and tails
(longest paths to the end) of the present orders, the longest path through the tasks that change places is
found from these alone (:func:`path_through`; Balas and Vazacopoulos 1998 do so for the job shop). Only a move
that passes is timed in full, which also settles memory and deadlock anew.

The loops are written for numba and also run as plain Python. Codes are ``4 * stage + kind`` as in
:mod:`zbsolve.search.list_scheduler`; micro-batches of a stage run in order, so a code at a place names its
task.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from zbsolve.compiled import compile_loop, is_ready
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.objective import column_of
from zbsolve.search.arrays import decode, encode, to_arrays
from zbsolve.search.critical import critical_blocks, shift


class Timing(NamedTuple):
    """Timed orders. Per place of a device, shape (p, width); per stage and micro-batch, shape (S, m).

    ``start``, and ``tail``: longest way from the task's end to the cost (for the span less the device's
    first start). ``level``: memory before the task. ``number``: its micro-batch; of a W, which split backward
    of its stage it belongs to. ``place_f``, ``place_b``, ``place_split``: places of F's, backwards, split
    backwards. ``waited``, one a place: as for :func:`zbsolve.search.critical.critical_blocks`.
    ``sequence``, shape (tasks, 2): device and place of all tasks, each after what it waits for.
    """

    start: Any
    tail: Any
    level: Any
    number: Any
    waited: Any
    place_f: Any
    place_b: Any
    place_split: Any
    sequence: Any


def time_orders(arrays: Any, codes: Any, lengths: Any, timing: Any) -> tuple[float, float]:
    """(makespan, span) at earliest starts; infinite for orders that deadlock or overrun memory.

    Fills ``timing`` but for the tails.
    """
    S = arrays.device.shape[0]
    p = arrays.room.shape[0]
    width = codes.shape[1]
    device, time, hop = arrays.device, arrays.time, arrays.hop
    done_f = np.zeros(S, dtype=np.int64)
    done_b = np.zeros(S, dtype=np.int64)
    split = np.zeros(S, dtype=np.int64)
    done_w = np.zeros(S, dtype=np.int64)
    at = np.zeros(p, dtype=np.int64)
    free = np.zeros(p)
    level = np.zeros(p)
    first = np.zeros(p)
    stack = np.empty(p + 2 * S * arrays.m + 1, dtype=np.int64)
    top = p
    total = 0
    for d in range(p):
        stack[d] = d
        total += lengths[d]
    finished = 0
    while top > 0:
        top -= 1
        d = stack[top]
        while at[d] < lengths[d]:
            i = at[d]
            s, kind = codes[d, i] // 4, codes[d, i] % 4
            ready = 0.0
            q = k = 0
            if kind == 0:
                j = done_f[s]
                if s > 0:
                    if done_f[s - 1] <= j:
                        break
                    q = device[s - 1]
                    k = timing.place_f[s - 1, j]
                    ready = timing.start[q, k] + time[s - 1, 0] + hop[s - 1]
            elif kind == 2:
                j = done_w[s]
                if j >= split[s]:
                    return np.inf, np.inf
            else:
                j = done_b[s]
                if done_f[s] <= j:
                    # Its own F: on this device, behind it (never comes) or not yet there.
                    return np.inf, np.inf
                if s < S - 1:
                    if done_b[s + 1] <= j:
                        break
                    q = device[s + 1]
                    k = timing.place_b[s + 1, j]
                    ready = timing.start[q, k] + time[s + 1, codes[q, k] % 4] + hop[s]
            if level[d] + arrays.acquire[s, kind] + arrays.transient[s, kind] > arrays.room[d]:
                return np.inf, np.inf
            timing.level[d, i] = level[d]
            level[d] += arrays.acquire[s, kind] - arrays.release[s, kind]
            begin = max(free[d], ready)
            timing.waited[d * width + i] = q * width + k if ready > free[d] else -1
            timing.start[d, i] = begin
            timing.number[d, i] = j
            timing.sequence[finished, 0] = d
            timing.sequence[finished, 1] = i
            if i == 0:
                first[d] = begin
            free[d] = begin + time[s, kind]
            at[d] += 1
            finished += 1
            if kind == 0:
                timing.place_f[s, j] = i
                done_f[s] += 1
                if s + 1 < S and device[s + 1] != d:
                    stack[top] = device[s + 1]
                    top += 1
            elif kind == 2:
                done_w[s] += 1
            else:
                timing.place_b[s, j] = i
                done_b[s] += 1
                if kind == 1:
                    timing.place_split[s, split[s]] = i
                    split[s] += 1
                if s > 0 and device[s - 1] != d:
                    stack[top] = device[s - 1]
                    top += 1
    if finished < total:
        return np.inf, np.inf
    return free.max(), (free - first).max()


def before(arrays: Any, timing: Any, s: int, kind: int, j: int) -> tuple[int, int, float]:
    """Device and place of the task whose output a task waits for, and the hop; device -1: none."""
    if kind == 0:
        if s == 0:
            return -1, 0, 0.0
        return arrays.device[s - 1], timing.place_f[s - 1, j], arrays.hop[s - 1]
    if kind == 2:
        return arrays.device[s], timing.place_split[s, j], 0.0
    if s == arrays.device.shape[0] - 1:
        return arrays.device[s], timing.place_f[s, j], 0.0
    return arrays.device[s + 1], timing.place_b[s + 1, j], arrays.hop[s]


def after(arrays: Any, timing: Any, s: int, kind: int, j: int) -> tuple[int, int, float]:
    """Device and place of the task that waits for a task's output, and the hop; device -1: none.

    A W, which waits for its B on the same device, is left to the device's order.
    """
    if kind == 0:
        if s == arrays.device.shape[0] - 1:
            return arrays.device[s], timing.place_b[s, j], 0.0
        return arrays.device[s + 1], timing.place_f[s + 1, j], arrays.hop[s]
    if kind == 2 or s == 0:
        return -1, 0, 0.0
    return arrays.device[s - 1], timing.place_b[s - 1, j], arrays.hop[s - 1]


def add_tails(arrays: Any, codes: Any, lengths: Any, timing: Any, column: int) -> None:
    """Fill the tails of timed orders: to the last end, or (``column`` 1) to the largest window's."""
    for n in range(lengths.sum() - 1, -1, -1):
        d, i = timing.sequence[n, 0], timing.sequence[n, 1]
        s, kind = codes[d, i] // 4, codes[d, i] % 4
        tail = -timing.start[d, 0] if column == 1 else 0.0
        if i + 1 < lengths[d]:
            c = codes[d, i + 1]
            tail = max(tail, arrays.time[c // 4, c % 4] + timing.tail[d, i + 1])
        q, k, wait = after(arrays, timing, s, kind, timing.number[d, i])
        if q >= 0:
            c = codes[q, k]
            tail = max(tail, wait + arrays.time[c // 4, c % 4] + timing.tail[q, k])
        timing.tail[d, i] = tail


def moved_to(n: int, low: int, high: int, later: bool) -> int:
    """Whose task comes to place n when that of ``low`` goes to ``high`` (``later``; else the other way)."""
    if later:
        return n + 1 if n < high else low
    return n - 1 if n > low else high


def path_through(
    arrays: Any,
    codes: Any,
    lengths: Any,
    timing: Any,
    column: int,
    d: int,
    source: int,
    target: int,
    ends: Any,
) -> float:
    """The cost, as far as it runs through the tasks that a move of place ``source`` to ``target`` shifts.

    From the heads and tails of the present orders. Infinite where the move overruns memory or puts a
    task before one that it needs on this device. A deadlock through other devices is not seen, nor that for
    the span a window may begin later: both are left to :func:`time_orders`. ``ends`` is scratch, one a place.
    """
    low, high = min(source, target), max(source, target)
    room = arrays.room[d]
    level = timing.level[d, low]
    free = 0.0
    if low > 0:
        c = codes[d, low - 1]
        free = timing.start[d, low - 1] + arrays.time[c // 4, c % 4]
    later = target > source
    for n in range(low, high + 1):
        old = moved_to(n, low, high, later)
        s, kind = codes[d, old] // 4, codes[d, old] % 4
        j = timing.number[d, old]
        if level + arrays.acquire[s, kind] + arrays.transient[s, kind] > room:
            return np.inf
        level += arrays.acquire[s, kind] - arrays.release[s, kind]
        q, k, wait = before(arrays, timing, s, kind, j)
        ready = 0.0
        if q == d and low <= k <= high:
            if (later and k == source) or (not later and old == source):
                return np.inf
            ready = ends[k] + wait
        elif q >= 0:
            c = codes[q, k]
            ready = timing.start[q, k] + arrays.time[c // 4, c % 4] + wait
        if kind % 2 == 1 and low <= timing.place_f[s, j] <= high:
            own = timing.place_f[s, j]
            if (later and own == source) or (not later and old == source):
                return np.inf
        free = max(free, ready) + arrays.time[s, kind]
        ends[old] = free
    # Backwards: ``ends`` turns into end + tail, the tails in ``rest``.
    longest = 0.0
    rest = -timing.start[d, 0] if column == 1 else 0.0
    bottom = rest
    if high + 1 < lengths[d]:
        c = codes[d, high + 1]
        rest = max(rest, arrays.time[c // 4, c % 4] + timing.tail[d, high + 1])
    for n in range(high, low - 1, -1):
        old = moved_to(n, low, high, later)
        s, kind = codes[d, old] // 4, codes[d, old] % 4
        tail = max(bottom, rest)
        q, k, wait = after(arrays, timing, s, kind, timing.number[d, old])
        if q >= 0 and not (q == d and low <= k <= high):
            c = codes[q, k]
            tail = max(tail, wait + arrays.time[c // 4, c % 4] + timing.tail[q, k])
        longest = max(longest, ends[old] + tail)
        rest = arrays.time[s, kind] + tail
    return longest


def anneal(
    arrays: Any,
    codes: Any,
    lengths: Any,
    timing: Any,
    other: Any,
    column: int,
    steps: int,
    slack: float,
    target: float,
    seed: int,
) -> float:
    """Run ``steps`` moves from ``codes`` and leave the best found there; returns its cost.

    A move is kept when its cost is within ``slack`` (an amount that falls to zero over the steps) of the
    present one. Stops at ``target``. ``timing`` and ``other`` are scratch.
    """
    np.random.seed(seed)
    p = arrays.room.shape[0]
    time = arrays.time
    places = codes.ravel()  # the same memory
    width = codes.shape[1]
    # Device, place, first and last place of its block.
    critical = np.zeros((lengths.sum(), 4), dtype=np.int64)
    ends = np.zeros(codes.shape[1])
    best_codes = codes.copy()
    present = time_orders(arrays, codes, lengths, timing)[column]
    best = present
    if np.isinf(present):
        return np.inf  # orders that cannot run have no critical path to work on
    number = 0
    stale = True
    for step in range(steps):
        if best <= target:
            break
        if stale:
            add_tails(arrays, codes, lengths, timing, column)
            end = 0
            latest = -1.0
            for q in range(p):
                if lengths[q] == 0:
                    continue
                k = lengths[q] - 1
                ends_at = timing.start[q, k] + time[codes[q, k] // 4, codes[q, k] % 4]
                if column == 1:
                    ends_at -= timing.start[q, 0]
                if ends_at > latest:
                    latest, end = ends_at, q * width + k
            number = critical_blocks(timing.waited, places, width, end, False, critical)
            stale = False
        if number == 0:
            break
        pick = np.random.randint(number)
        d, i = critical[pick, 0], critical[pick, 1]
        reach = 1
        while np.random.random() < 0.4:
            reach += 1
        what = np.random.random()
        if what < 0.35:
            source, target_place = i, max(0, i - reach)  # the task goes ahead
        elif what < 0.7:
            source, target_place = i - 1, min(lengths[d] - 1, i - 1 + reach)  # its predecessor waits
        elif what < 0.85:
            source, target_place = i, max(0, critical[pick, 2] - reach + 1)  # out of its block
        else:
            source, target_place = i, min(lengths[d] - 1, critical[pick, 3] + reach - 1)
        moved = codes[d, source]
        # Tasks of one code keep their order: the move ends before the next of its own.
        direction = 1 if target_place > source else -1
        k = source
        while k != target_place and codes[d, k + direction] != moved:
            k += direction
        target_place = k
        if target_place == source:
            continue
        limit = present + slack * (1.0 - step / steps) * np.random.random()
        if path_through(arrays, codes, lengths, timing, column, d, source, target_place, ends) > limit:
            continue
        shift(places, d * width, source, target_place)
        value = time_orders(arrays, codes, lengths, other)[column]
        if value <= limit:
            present = value
            timing, other = other, timing
            stale = True
            if value < best:
                best = value
                best_codes[:] = codes
        else:
            shift(places, d * width, target_place, source)
    codes[:] = best_codes
    return float(best)


CALLED = (time_orders, before, after, add_tails, moved_to, path_through, critical_blocks, shift)


@cache
def _annealing(compiled: bool) -> Any:
    """The annealing loop; compiled once a process."""
    return compile_loop(anneal, *CALLED) if compiled else anneal


def _empty_timing(instance: Instance, codes: Any) -> Timing:
    per_task = (instance.num_stages, instance.num_microbatches)
    return Timing(
        start=np.zeros(codes.shape),
        tail=np.zeros(codes.shape),
        level=np.zeros(codes.shape),
        number=np.zeros(codes.shape, dtype=np.int64),
        waited=np.zeros(codes.size, dtype=np.int32),
        place_f=np.zeros(per_task, dtype=np.int64),
        place_b=np.zeros(per_task, dtype=np.int64),
        place_split=np.zeros(per_task, dtype=np.int64),
        sequence=np.zeros((codes.size, 2), dtype=np.int64),
    )


class OrderSearch:
    """Anneals device orders of one instance; ``orders`` must be in canonical micro-batch order."""

    def __init__(
        self,
        instance: Instance,
        orders: tuple[tuple[Task, ...], ...],
        objective: str,
        *,
        seed: int,
        compiled: bool,
    ) -> None:
        self.arrays = to_arrays(instance)
        self.column = column_of(objective)
        self.seed = seed
        self.cost = np.inf
        self.codes, self.lengths = encode(orders)
        self._timings = [_empty_timing(instance, self.codes) for _ in range(2)]
        self._anneal = _annealing(compiled)

    def run(self, steps: int, slack: float, target: float) -> float:
        """Anneal for ``steps`` moves with a falling ``slack`` (time units); cost of the best orders."""
        self.seed += 1
        self.cost = float(
            self._anneal(
                self.arrays, self.codes, self.lengths, *self._timings,
                self.column, steps, slack, target, self.seed % 2**31,
            )
        )  # fmt: skip
        return self.cost

    @staticmethod
    def is_ready() -> bool:
        """Whether its machine code is there, with nothing to be made first."""
        return is_ready(anneal, *CALLED)

    def orders(self) -> tuple[tuple[Task, ...], ...]:
        """The best orders found."""
        return decode(self.codes, self.lengths)
