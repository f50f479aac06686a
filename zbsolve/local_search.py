"""Local search over device orders: move tasks on the critical path, accept a little worse for a while.

A step takes a task of the critical path that starts right when its device's previous task ends, and
moves it ahead of a few tasks (or its predecessor behind a few), as in critical-block neighbourhoods of
job-shop search (Nowicki and Smutnicki 1996). Memory and deadlock are checked by the same pass that times the
orders.

The loops are written for numba and also run as plain Python. Codes are ``4 * stage + kind`` as in
:mod:`zbsolve.list_scheduler`; micro-batches of a stage run in order, so a code at a place names its task.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from zbsolve.compiled import compile_loop
from zbsolve.graph import Task
from zbsolve.instance import Instance
from zbsolve.list_scheduler import decode, encode, to_arrays


def time_orders(
    m: int,
    device: Any,
    time: Any,
    hop: Any,
    acquire: Any,
    transient: Any,
    release: Any,
    room: Any,
    codes: Any,
    lengths: Any,
    end_f: Any,
    end_b: Any,
    place_f: Any,
    place_b: Any,
    start: Any,
    bound_by_device: Any,
) -> tuple[float, float]:
    """(makespan, span) at earliest starts; infinite for orders that deadlock or overrun memory.

    Fills ends and places of F and backward, shape (S, m), and per place of a device, shape (p, width), its
    start and whether the device's previous task (else a dependency) set it.
    """
    S = device.shape[0]
    p = room.shape[0]
    done_f = np.zeros(S, dtype=np.int64)
    done_b = np.zeros(S, dtype=np.int64)
    split = np.zeros(S, dtype=np.int64)
    done_w = np.zeros(S, dtype=np.int64)
    at = np.zeros(p, dtype=np.int64)
    free = np.zeros(p)
    level = np.zeros(p)
    first = np.zeros(p)
    stack = np.empty(p + 2 * S * m + 1, dtype=np.int64)
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
            if kind == 0:
                j = done_f[s]
                if s > 0:
                    if done_f[s - 1] <= j:
                        break
                    ready = end_f[s - 1, j] + hop[s - 1]
            elif kind == 2:
                if done_w[s] >= split[s]:
                    return np.inf, np.inf
            else:
                j = done_b[s]
                if done_f[s] <= j:
                    # Its own F: on this device, behind it (never comes) or not yet there.
                    return np.inf, np.inf
                if s < S - 1:
                    if done_b[s + 1] <= j:
                        break
                    ready = end_b[s + 1, j] + hop[s]
            if level[d] + acquire[s, kind] + transient[s, kind] > room[d]:
                return np.inf, np.inf
            level[d] += acquire[s, kind] - release[s, kind]
            begin = max(free[d], ready)
            bound_by_device[d, i] = free[d] >= ready
            start[d, i] = begin
            end = begin + time[s, kind]
            if i == 0:
                first[d] = begin
            free[d] = end
            at[d] += 1
            finished += 1
            if kind == 0:
                end_f[s, j] = end
                place_f[s, j] = i
                done_f[s] += 1
                if s + 1 < S and device[s + 1] != d:
                    stack[top] = device[s + 1]
                    top += 1
            elif kind == 2:
                done_w[s] += 1
            else:
                end_b[s, j] = end
                place_b[s, j] = i
                done_b[s] += 1
                if kind == 1:
                    split[s] += 1
                if s > 0 and device[s - 1] != d:
                    stack[top] = device[s - 1]
                    top += 1
    if finished < total:
        return np.inf, np.inf
    return free.max(), (free - first).max()


def anneal(
    m: int,
    device: Any,
    time: Any,
    hop: Any,
    acquire: Any,
    transient: Any,
    release: Any,
    room: Any,
    codes: Any,
    lengths: Any,
    column: int,
    steps: int,
    slack: float,
    target: float,
    seed: int,
) -> float:
    """Run ``steps`` moves from ``codes`` and leave the best found there; returns its cost.

    A move is kept when its cost is within ``slack`` (an amount that falls to zero over the steps) of the
    present one. Stops at ``target``.
    """
    np.random.seed(seed)
    S, p, width = device.shape[0], room.shape[0], codes.shape[1]
    end_f = np.zeros((S, m))
    end_b = np.zeros((S, m))
    place_f = np.zeros((S, m), dtype=np.int64)
    place_b = np.zeros((S, m), dtype=np.int64)
    start = np.zeros((p, width))
    by_device = np.zeros((p, width), dtype=np.bool_)
    critical = np.zeros((3 * S * m, 2), dtype=np.int64)
    best_codes = codes.copy()
    both = time_orders(
        m, device, time, hop, acquire, transient, release, room, codes, lengths,
        end_f, end_b, place_f, place_b, start, by_device,
    )  # fmt: skip
    present = both[column]
    best = present
    if np.isinf(present):
        return np.inf  # orders that cannot run have no critical path to work on
    number = 0
    stale = True
    for step in range(steps):
        if best <= target:
            break
        if stale:
            # --- trace the critical path back from the task that ends last ----------------------
            number = 0
            d, i = 0, 0
            latest = -1.0
            for q in range(p):
                if lengths[q] == 0:
                    continue
                k = lengths[q] - 1
                end = start[q, k] + time[codes[q, k] // 4, codes[q, k] % 4]
                if column == 1:
                    end -= start[q, 0]
                if end > latest:
                    latest, d, i = end, q, k
            while i >= 0:
                s, kind = codes[d, i] // 4, codes[d, i] % 4
                if by_device[d, i]:
                    if i > 0 and codes[d, i - 1] != codes[d, i]:
                        critical[number, 0] = d
                        critical[number, 1] = i
                        number += 1
                    i -= 1
                    continue
                # Which micro-batch: the one whose task of this kind has place i.
                if kind == 0:
                    j = 0
                    while place_f[s, j] != i:
                        j += 1
                    d, i = device[s - 1], place_f[s - 1, j]
                else:
                    j = 0
                    while place_b[s, j] != i:
                        j += 1
                    d, i = device[s + 1], place_b[s + 1, j]
            stale = False
        if number == 0:
            break
        pick = np.random.randint(number)
        d, i = critical[pick, 0], critical[pick, 1]
        reach = 1
        while np.random.random() < 0.4:
            reach += 1
        if np.random.random() < 0.5:
            source, target_place = i, max(0, i - reach)  # the task goes ahead
        else:
            source, target_place = i - 1, min(lengths[d] - 1, i - 1 + reach)  # its predecessor waits
        moved = codes[d, source]
        direction = 1 if target_place > source else -1
        k = source
        while k != target_place:
            codes[d, k] = codes[d, k + direction]
            k += direction
        codes[d, target_place] = moved
        both = time_orders(
            m, device, time, hop, acquire, transient, release, room, codes, lengths,
            end_f, end_b, place_f, place_b, start, by_device,
        )  # fmt: skip
        value = both[column]
        if value <= present + slack * (1.0 - step / steps) * np.random.random():
            present = value
            stale = True
            if value < best:
                best = value
                best_codes[:] = codes
        else:
            k = target_place
            while k != source:
                codes[d, k] = codes[d, k - direction]
                k -= direction
            codes[d, source] = moved
            # Places and starts belong to the refused orders until the next accepted move: the
            # critical list is still that of the present ones.
    codes[:] = best_codes
    return float(best)


@cache
def _annealing(compiled: bool) -> Any:
    """The annealing loop; compiled once a process."""
    return compile_loop(anneal, time_orders) if compiled else anneal


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
        self.column = 1 if objective == "span" else 0
        self.seed = seed
        self.codes, self.lengths = encode(orders)
        self._anneal = _annealing(compiled)

    def run(self, steps: int, slack: float, target: float) -> float:
        """Anneal for ``steps`` moves with a falling ``slack`` (time units); cost of the best orders."""
        a = self.arrays
        self.seed += 1
        return float(
            self._anneal(
                a.m, a.device, a.time, a.hop, a.acquire, a.transient, a.release, a.room,
                self.codes, self.lengths, self.column, steps, slack, target, self.seed % 2**31,
            )
        )  # fmt: skip

    def orders(self) -> tuple[tuple[Task, ...], ...]:
        """The best orders found."""
        return decode(self.codes, self.lengths)
