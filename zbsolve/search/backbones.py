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
from zbsolve.model.kinds import W
from zbsolve.model.objective import column_of
from zbsolve.search.arrays import IntArray, decode, encode, to_arrays
from zbsolve.search.critical import critical_blocks, shift
from zbsolve.search.list_scheduler import flat, listed


class Timing(NamedTuple):
    """What :func:`time_backbone` finds, and what it writes to while it runs.

    ``place_f`` and ``place_b``, shape (S * m,): places of F and backward. Per place of a device, shape
    (p * width,): its start, and ``waited`` as for :func:`zbsolve.search.critical.critical_blocks`. ``out``,
    shape (2 * p * width,), and ``out_length``: the full orders, W's included.
    """

    place_f: Any
    place_b: Any
    start: Any
    waited: Any
    out: Any
    out_length: Any
    end_f: Any
    end_b: Any
    done_f: Any
    done_b: Any
    at: Any
    free: Any
    level: Any
    first: Any
    pending: Any
    oldest: Any
    newest: Any
    stack: Any


def timing_arrays(S: int, m: int, p: int, width: int) -> Timing:
    """Room for S stages, m micro-batches and p devices of at most ``width`` F's and backwards."""
    passes, places = S * m, p * width
    counts, clocks = np.zeros(S, dtype=np.int64), np.zeros(p)
    places_of, per_device = np.zeros(passes, dtype=np.int64), np.zeros(p, dtype=np.int64)
    return Timing(
        places_of,
        places_of.copy(),
        np.zeros(places),
        np.zeros(places, dtype=np.int32),
        np.zeros(2 * places, dtype=np.int64),
        per_device,
        np.zeros(passes),
        np.zeros(passes),
        counts,
        counts.copy(),
        per_device.copy(),
        clocks,
        clocks.copy(),
        clocks.copy(),
        np.zeros(places, dtype=np.int64),
        per_device.copy(),
        per_device.copy(),
        np.zeros(p + 2 * passes + 1, dtype=np.int64),
    )


def time_backbone(
    arrays: Any, codes: Any, lengths: Any, patience: Any, timing: Any
) -> tuple[float, float, float]:
    """(makespan, span, mean end of the backwards) at earliest starts; infinite where the orders cannot run.

    ``codes[d * width + i]`` is task i of device d; ``patience``: the share of a W by which it may delay the
    task after a gap, per device. ``arrays`` are :func:`zbsolve.search.list_scheduler.flat` ones. All may be
    arrays or, several times faster in plain Python, lists.
    """
    m, device, time, hop = arrays.m, arrays.device, arrays.time, arrays.hop
    acquire, transient, release, room = arrays.acquire, arrays.transient, arrays.release, arrays.room
    place_f, place_b, start, waited = timing.place_f, timing.place_b, timing.start, timing.waited
    out, out_length, end_f, end_b = timing.out, timing.out_length, timing.end_f, timing.end_b
    done_f, done_b, at, free = timing.done_f, timing.done_b, timing.at, timing.free
    level, first, stack = timing.level, timing.first, timing.stack
    # Stages whose W waits, oldest first.
    pending, oldest, newest = timing.pending, timing.oldest, timing.newest
    S, p = len(device), len(room)
    width = len(codes) // p
    inf = np.inf
    for s in range(S):
        done_f[s] = done_b[s] = 0
    top = p
    total = 0
    for d in range(p):
        stack[d] = d
        at[d] = out_length[d] = oldest[d] = newest[d] = 0
        free[d] = level[d] = first[d] = 0.0
        total += lengths[d]
    finished = 0
    sum_of_ends = 0.0
    while top > 0:
        top -= 1
        d = stack[top]
        row = d * width
        while at[d] < lengths[d]:
            i = at[d]
            code = codes[row + i]
            s, kind = code // 4, code % 4
            ready = 0.0
            source = -1
            if kind == 0:
                j = done_f[s]
                if s > 0:
                    if done_f[s - 1] <= j:
                        break
                    ready = end_f[(s - 1) * m + j] + hop[s - 1]
                    source = place_f[(s - 1) * m + j]
            else:
                j = done_b[s]
                if done_f[s] <= j:
                    # Its own F: on this device, behind it (never comes) or not yet there.
                    return inf, inf, inf
                if s < S - 1:
                    if done_b[s + 1] <= j:
                        break
                    ready = end_b[(s + 1) * m + j] + hop[s]
                    source = place_b[(s + 1) * m + j]
            need = acquire[code] + transient[code]
            while oldest[d] < newest[d]:
                w = 4 * pending[row + oldest[d]] + 2
                fits_gap = free[d] + (1.0 - patience[d]) * time[w] <= ready
                if not fits_gap and level[d] + need <= room[d]:
                    break
                if level[d] + transient[w] > room[d]:
                    return inf, inf, inf
                level[d] -= release[w]
                free[d] += time[w]
                out[2 * row + out_length[d]] = w
                out_length[d] += 1
                oldest[d] += 1
            if level[d] + need > room[d]:
                return inf, inf, inf
            level[d] += acquire[code] - release[code]
            begin = max(free[d], ready)
            waited[row + i] = source if ready > free[d] else -1
            start[row + i] = begin
            end = begin + time[code]
            if i == 0:
                first[d] = begin
            free[d] = end
            at[d] += 1
            finished += 1
            out[2 * row + out_length[d]] = code
            out_length[d] += 1
            if kind == 0:
                end_f[s * m + j] = end
                place_f[s * m + j] = row + i
                done_f[s] += 1
                if s + 1 < S and device[s + 1] != d:
                    stack[top] = device[s + 1]
                    top += 1
            else:
                end_b[s * m + j] = end
                place_b[s * m + j] = row + i
                done_b[s] += 1
                sum_of_ends += end
                if kind == 1:
                    pending[row + newest[d]] = s
                    newest[d] += 1
                if s > 0 and device[s - 1] != d:
                    stack[top] = device[s - 1]
                    top += 1
    if finished < total:
        return inf, inf, inf
    makespan, span = 0.0, 0.0
    for d in range(p):
        while oldest[d] < newest[d]:
            w = 4 * pending[d * width + oldest[d]] + 2
            free[d] += time[w]
            out[2 * d * width + out_length[d]] = w
            out_length[d] += 1
            oldest[d] += 1
        makespan = max(makespan, free[d])
        span = max(span, free[d] - first[d])
    return makespan, span, sum_of_ends / (S * m)


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
    timing: Any,
) -> float:
    """Run ``steps`` moves from ``codes``; what is below ``best`` goes to ``best_*``; the best cost.

    A move is kept when its value (cost and ``smoothing`` times the mean end of the backwards) is within
    ``slack`` (an amount that falls to zero over the steps) of the present one. Stops at ``target``.
    """
    np.random.seed(seed)
    m, time = arrays.m, arrays.time
    S, p = len(arrays.device), len(arrays.room)
    width = len(codes) // p
    start, waited = timing.start, timing.waited
    out, out_length = timing.out, timing.out_length
    critical = np.zeros((2 * S * m, 4), dtype=np.int64)  # device, place, first and last place of its block
    found = time_backbone(arrays, codes, lengths, patience, timing)
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
            last = 0
            latest = -1.0
            for q in range(p):
                if lengths[q] == 0:
                    continue
                k = q * width + lengths[q] - 1
                end = start[k] + time[codes[k]]
                # Trailing W's: what is left of this device's work comes after its last backward.
                trailing = out_length[q] - 1
                while out[2 * q * width + trailing] % 4 == 2:
                    end += time[out[2 * q * width + trailing]]
                    trailing -= 1
                if column == 1:
                    end -= start[q * width]
                if end > latest:
                    latest, last = end, k
            number = critical_blocks(waited, codes, width, last, True, critical)
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
            moved = codes[d * width + source]
            if moved % 4 != 0 and arrays.can_fuse[moved // 4]:
                target_place = source
                codes[d * width + source] = moved + 2 if moved % 4 == 1 else moved - 2
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
            moved = codes[d * width + source]
        if source != target_place:
            shift(codes, d * width, source, target_place)
        found = time_backbone(arrays, codes, lengths, patience, timing)
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
            codes[d * width + source] = moved
        else:
            shift(codes, d * width, target_place, source)
            # Places and starts belong to the refused orders until the next accepted move: the
            # critical list is still that of the present ones.
    return float(best)


CALLED = (time_backbone, critical_blocks, shift)


@cache
def _annealing(compiled: bool) -> Any:
    """The annealing loop; compiled once a process."""
    return compile_loop(anneal, *CALLED) if compiled else anneal


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
        self._arrays = flat(to_arrays(instance))
        self.column = column_of(objective)
        self.seed = seed
        codes, self._lengths = encode(
            tuple(tuple(task for task in order if task.kind is not W) for order in orders)
        )
        p, width = codes.shape
        self._codes = codes.ravel()
        self._patience = np.full(p, patience)
        self.cost = np.inf
        self.smoothing = 0.05
        self._timing = timing_arrays(instance.num_stages, instance.num_microbatches, p, width)
        self._best_codes = self._codes.copy()
        self._best_patience = self._patience.copy()
        self._best_out = self._timing.out.copy()
        self._best_length = self._timing.out_length.copy()
        self._anneal = _annealing(compiled)

    @staticmethod
    def is_ready() -> bool:
        """Whether its machine code is there, with nothing to be made first."""
        return is_ready(anneal, *CALLED)

    def run(self, steps: int, slack: float, target: float) -> float:
        """Anneal for ``steps`` moves with a falling ``slack`` (time units); cost of the best orders."""
        self.seed += 1
        self.cost = float(
            self._anneal(
                self._arrays, self._codes, self._lengths, self._patience,
                self._best_codes, self._best_patience, self._best_out, self._best_length,
                self.column, steps, slack, self.smoothing, target, self.cost, self.seed % 2**31, self._timing,
            )
        )  # fmt: skip
        return self.cost

    def orders(self) -> tuple[tuple[Task, ...], ...]:
        """The best orders found, W's included."""
        return decode(self._best_out.reshape(len(self._best_length), -1), self._best_length)


class GapFiller:
    """The W's of given backbones filled in by rule, in plain Python: for backbones by the dozen."""

    def __init__(self, instance: Instance) -> None:
        p, m = instance.num_devices, instance.num_microbatches
        arrays = to_arrays(instance)
        self._arrays = listed(arrays)
        width = 2 * m * int(arrays.held.max())
        timing = timing_arrays(instance.num_stages, m, p, width)
        self._timing = Timing._make(array.tolist() for array in timing)
        self._codes, self._lengths = np.zeros((p, width), dtype=np.int64), np.zeros(p, dtype=np.int64)

    def take(self, codes: IntArray, lengths: IntArray) -> None:
        """Go on with the backbones of these orders, coded as :func:`zbsolve.search.arrays.encode` does."""
        for d, length in enumerate(lengths):
            row = codes[d, :length]
            backbone = row[row % 4 != 2]
            self._codes[d, : len(backbone)] = backbone
            self._lengths[d] = len(backbone)

    def run(self, patience: float) -> tuple[float, float]:
        """(makespan, span) at earliest starts with W's that wait so patiently on all devices.

        Infinite where the backbones do not fit in memory so.
        """
        codes, lengths = self._codes.ravel().tolist(), self._lengths.tolist()
        makespan, span, _ = time_backbone(
            self._arrays, codes, lengths, [patience] * len(lengths), self._timing
        )
        return makespan, span

    def codes(self) -> tuple[IntArray, IntArray]:
        """Codes and lengths of the last run's orders, W's included."""
        lengths = np.array(self._timing.out_length)
        return np.array(self._timing.out).reshape(len(lengths), -1), lengths
