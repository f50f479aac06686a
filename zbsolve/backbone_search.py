"""Local search over backbones: device orders of F and backward alone, the W's filled in by rule.

Where a W may go, and how late, depends on memory and on gaps that every change of the F's and backwards
shifts: a search that moves W's one by one stands on wide plateaus. So a W is no part of what is searched
here. It waits until its device would idle, or lacks memory for what comes next (the automatic heuristic's
rule; Qi et al., arXiv 2401.10241, section 3), and the search moves F's and backwards, or fuses one.

A step takes a task of the critical path that starts right when its device's previous task ends, and
moves it ahead of a few tasks (or its predecessor behind a few), or out of its block of tasks without idle
time, as in critical-block neighbourhoods of job-shop search (Nowicki and Smutnicki 1996). Equal costs are
told apart by the mean end of the backwards.

The loops are written for numba and also run as plain Python. Codes are ``4 * stage + kind`` as in
:mod:`zbsolve.list_scheduler`; micro-batches of a stage run in order, so a code at a place names its task.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from zbsolve.compiled import compile_loop, is_ready
from zbsolve.graph import Task, W
from zbsolve.instance import Instance
from zbsolve.list_scheduler import decode, encode, to_arrays


def time_backbone(
    arrays: Any,
    codes: Any,
    lengths: Any,
    patience: Any,
    place_f: Any,
    place_b: Any,
    start: Any,
    bound_by_device: Any,
    out: Any,
    out_length: Any,
) -> tuple[float, float, float]:
    """(makespan, span, mean end of the backwards) at earliest starts; infinite where the orders cannot run.

    ``patience``: the share of a W by which it may delay the task after a gap, per device. Fills the places
    of F and backward, shape (S, m); per place of a device, shape (p, width), its start and whether the
    device's previous task (else a dependency) set it; and the full orders, W's included, ``out``.
    """
    m, device, time, hop = arrays.m, arrays.device, arrays.time, arrays.hop
    acquire, transient, release, room = arrays.acquire, arrays.transient, arrays.release, arrays.room
    S = device.shape[0]
    p = room.shape[0]
    end_f = np.zeros((S, m))
    end_b = np.zeros((S, m))
    done_f = np.zeros(S, dtype=np.int64)
    done_b = np.zeros(S, dtype=np.int64)
    at = np.zeros(p, dtype=np.int64)
    free = np.zeros(p)
    level = np.zeros(p)
    first = np.zeros(p)
    pending = np.zeros((p, codes.shape[1]), dtype=np.int64)  # stages whose W waits, oldest first
    oldest = np.zeros(p, dtype=np.int64)
    newest = np.zeros(p, dtype=np.int64)
    stack = np.empty(p + 2 * S * m + 1, dtype=np.int64)
    top = p
    total = 0
    for d in range(p):
        stack[d] = d
        out_length[d] = 0
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
            else:
                j = done_b[s]
                if done_f[s] <= j:
                    # Its own F: on this device, behind it (never comes) or not yet there.
                    return np.inf, np.inf, np.inf
                if s < S - 1:
                    if done_b[s + 1] <= j:
                        break
                    ready = end_b[s + 1, j] + hop[s]
            need = acquire[s, kind] + transient[s, kind]
            while oldest[d] < newest[d]:
                q = pending[d, oldest[d]]
                fits_gap = free[d] + (1.0 - patience[d]) * time[q, 2] <= ready
                if not fits_gap and level[d] + need <= room[d]:
                    break
                if level[d] + transient[q, 2] > room[d]:
                    return np.inf, np.inf, np.inf
                level[d] -= release[q, 2]
                free[d] += time[q, 2]
                out[d, out_length[d]] = 4 * q + 2
                out_length[d] += 1
                oldest[d] += 1
            if level[d] + need > room[d]:
                return np.inf, np.inf, np.inf
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
            out[d, out_length[d]] = codes[d, i]
            out_length[d] += 1
            if kind == 0:
                end_f[s, j] = end
                place_f[s, j] = i
                done_f[s] += 1
                if s + 1 < S and device[s + 1] != d:
                    stack[top] = device[s + 1]
                    top += 1
            else:
                end_b[s, j] = end
                place_b[s, j] = i
                done_b[s] += 1
                if kind == 1:
                    pending[d, newest[d]] = s
                    newest[d] += 1
                if s > 0 and device[s - 1] != d:
                    stack[top] = device[s - 1]
                    top += 1
    if finished < total:
        return np.inf, np.inf, np.inf
    for d in range(p):
        while oldest[d] < newest[d]:
            q = pending[d, oldest[d]]
            free[d] += time[q, 2]
            out[d, out_length[d]] = 4 * q + 2
            out_length[d] += 1
            oldest[d] += 1
    return free.max(), (free - first).max(), end_b.mean()


def anneal(
    arrays: Any,
    codes: Any,
    lengths: Any,
    patience: Any,
    best_codes: Any,
    best_patience: Any,
    best_out: Any,
    best_length: Any,
    column: int,
    steps: int,
    slack: float,
    smoothing: float,
    target: float,
    best: float,
    seed: int,
) -> float:
    """Run ``steps`` moves from ``codes``; what is below ``best`` goes to ``best_*``; the best cost.

    A move is kept when its value (cost and ``smoothing`` times the mean end of the backwards) is within
    ``slack`` (an amount that falls to zero over the steps) of the present one. Stops at ``target``.
    """
    np.random.seed(seed)
    m, device, time = arrays.m, arrays.device, arrays.time
    S, p, width = device.shape[0], arrays.room.shape[0], codes.shape[1]
    place_f = np.zeros((S, m), dtype=np.int64)
    place_b = np.zeros((S, m), dtype=np.int64)
    start = np.zeros((p, width))
    by_device = np.zeros((p, width), dtype=np.bool_)
    out = np.zeros(best_out.shape, dtype=np.int64)
    out_length = np.zeros(p, dtype=np.int64)
    critical = np.zeros((2 * S * m, 4), dtype=np.int64)  # device, place, first and last place of its block
    found = time_backbone(
        arrays, codes, lengths, patience,
        place_f, place_b, start, by_device, out, out_length,
    )  # fmt: skip
    if np.isinf(found[0]):
        return best  # orders that cannot run have no critical path to work on
    present = found[column] + smoothing * found[2]
    if found[column] < best:
        best = found[column]
        best_codes[:], best_patience[:] = codes, patience
        best_out[:], best_length[:] = out, out_length
    number = 0
    stale = True
    for step in range(steps):
        if best <= target:
            break
        if stale:
            # --- trace a critical path back from a task that ends last --------------------------
            number = 0
            d, i = 0, 0
            latest = -1.0
            for q in range(p):
                if lengths[q] == 0:
                    continue
                k = lengths[q] - 1
                end = start[q, k] + time[codes[q, k] // 4, codes[q, k] % 4]
                # Trailing W's: what is left of this device's work comes after its last backward.
                trailing = out_length[q] - 1
                while out[q, trailing] % 4 == 2:
                    end += time[out[q, trailing] // 4, 2]
                    trailing -= 1
                if column == 1:
                    end -= start[q, 0]
                if end > latest:
                    latest, d, i = end, q, k
            block, last = 0, i
            while i >= 0:
                s, kind = codes[d, i] // 4, codes[d, i] % 4
                if by_device[d, i]:
                    if i > 0:
                        critical[number, 0] = d
                        critical[number, 1] = i
                        critical[number, 3] = last
                        number += 1
                    i -= 1
                    continue
                while block < number:
                    critical[block, 2] = i
                    block += 1
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
                last = i
            while block < number:
                critical[block, 2] = 0
                block += 1
            stale = False
        what = np.random.random()
        if what < 0.03:
            # --- another patience of some device ---------------------------------------------------
            d = np.random.randint(p)
            before = patience[d]
            patience[d] = np.random.random()
            source, target_place, moved = -1, -1, 0
        elif number == 0 or what < 0.1:
            # --- fuse or split a backward, else move any task ---------------------------------------
            d = np.random.randint(p)
            source = np.random.randint(lengths[d])
            moved = codes[d, source]
            if moved % 4 != 0 and arrays.can_fuse[moved // 4]:
                target_place = source
                codes[d, source] = moved + 2 if moved % 4 == 1 else moved - 2
            else:
                reach = np.random.randint(1, 12)
                target_place = min(lengths[d] - 1, source + reach)
                if np.random.random() < 0.5:
                    target_place = max(0, source - reach)
        else:
            pick = np.random.randint(number)
            d, i = critical[pick, 0], critical[pick, 1]
            reach = 1
            while np.random.random() < 0.5:
                reach += 1
            if what < 0.4:
                # Out of the block: only what leaves it makes it shorter.
                source = i
                if np.random.random() < 0.5:
                    target_place = max(0, critical[pick, 2] - reach + 1)
                else:
                    target_place = min(lengths[d] - 1, critical[pick, 3] + reach - 1)
            elif np.random.random() < 0.5:
                source, target_place = i, max(0, i - reach)  # the task goes ahead
            else:
                source, target_place = i - 1, min(lengths[d] - 1, i - 1 + reach)  # its predecessor waits
            moved = codes[d, source]
        if source != target_place:
            direction = 1 if target_place > source else -1
            k = source
            while k != target_place:
                codes[d, k] = codes[d, k + direction]
                k += direction
            codes[d, target_place] = moved
        found = time_backbone(
            arrays, codes, lengths, patience,
            place_f, place_b, start, by_device, out, out_length,
        )  # fmt: skip
        value = found[column] + smoothing * found[2]
        if value <= present + slack * (1.0 - step / steps) * np.random.random():
            present = value
            stale = True
            if found[column] < best:
                best = found[column]
                best_codes[:], best_patience[:] = codes, patience
                best_out[:], best_length[:] = out, out_length
        elif source < 0:
            patience[d] = before
        elif source == target_place:
            codes[d, source] = moved
        else:
            direction = 1 if target_place > source else -1
            k = target_place
            while k != source:
                codes[d, k] = codes[d, k - direction]
                k -= direction
            codes[d, source] = moved
            # Places and starts belong to the refused orders until the next accepted move: the
            # critical list is still that of the present ones.
    return float(best)


@cache
def _annealing(compiled: bool) -> Any:
    """The annealing loop; compiled once a process."""
    return compile_loop(anneal, time_backbone) if compiled else anneal


class BackboneSearch:
    """Anneals the F's and backwards of one instance; ``orders`` must be in canonical micro-batch order."""

    def __init__(
        self,
        instance: Instance,
        orders: tuple[tuple[Task, ...], ...],
        objective: str,
        *,
        seed: int,
        compiled: bool,
        patience: float = 0.5,
    ) -> None:
        self.arrays = to_arrays(instance)
        self.column = 1 if objective == "span" else 0
        self.seed = seed
        backbones = tuple(tuple(task for task in order if task.kind is not W) for order in orders)
        self.codes, self.lengths = encode(backbones)
        p, width = self.codes.shape
        self.patience = np.full(p, patience)
        self.cost = np.inf
        self.smoothing = 0.05
        self._best_codes = self.codes.copy()
        self._best_patience = self.patience.copy()
        self._best_out = np.zeros((p, 2 * width), dtype=np.int64)
        self._best_length = np.zeros(p, dtype=np.int64)
        self._anneal = _annealing(compiled)

    @staticmethod
    def is_ready() -> bool:
        """Whether its machine code is there, with nothing to be made first."""
        return is_ready(anneal, time_backbone)

    def run(self, steps: int, slack: float, target: float) -> float:
        """Anneal for ``steps`` moves with a falling ``slack`` (time units); cost of the best orders."""
        self.seed += 1
        self.cost = float(
            self._anneal(
                self.arrays, self.codes, self.lengths, self.patience,
                self._best_codes, self._best_patience, self._best_out, self._best_length,
                self.column, steps, slack, self.smoothing, target, self.cost, self.seed % 2**31,
            )
        )  # fmt: skip
        return self.cost

    def orders(self) -> tuple[tuple[Task, ...], ...]:
        """The best orders found, W's included."""
        return decode(self._best_out, self._best_length)
