"""Every order that one device may run its tasks in, folded into states, with the least times around each.

When a device starts a task it has run some number of each of its stages' F's, backwards and W's: its state.
An order of its tasks is a path through states, each step running one task; the cap excludes the states
that hold too much. Given the least times before and after every task on all other devices (heads and tails)
and a cost that is not to be exceeded, the earliest time of each state and the least time from it to the end
follow by dynamic programming, forward and back. A step between states that would exceed the cost is in no
schedule that costs no more: what is left gives heads and tails that hold in all of these, or nothing, and
then there is none.

All statements hold for canonical schedules (:mod:`zbsolve.bounds.catalogue`): the n-th F of a stage is that
of micro-batch n. Where a stage can fuse, a backward is :func:`zbsolve.bounds.waits.back` long, and its W the
rest of ``min_backward``, which begins no earlier than the backward's end and holds nothing: both fit, one
after the other, into BW as into B and W. A fused rest follows at once while another W is put off, so here,
too, the n-th rest is handed to the n-th backward.

Why no schedule within the cost is lost: its device runs one task after the other, so its order is a path
from the empty state to the complete one. A micro-batch's tasks on one device stand in its order as the rows
do, those without length included, for a valid order contradicts no dependency: no row has run more often than
the one before it. What is held when a task starts is the sum over rows of what their tasks left held, by the
checker's own definition, or less where a stage can fuse (memory that BW frees at its end is freed earlier
here, a W put off holds nothing). Going along this path, each task starts no earlier than its head and than
the state before it was reached, so no state is reached before its earliest time; going back, likewise for
what is left to do. So each of its steps fits into the cost, is kept, and bounds the heads and tails found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zbsolve.bounds.waits import backward_adds, pass_lengths, room
from zbsolve.compiled import compile_loop
from zbsolve.model.instance import Instance

FloatArray = NDArray[np.float64]


def narrow(
    counts: Any,
    previous: Any,
    lengths: Any,
    heads: Any,
    tails: Any,
    at_end: float,
    cost: float,
    before: Any,
    after: Any,
    new_heads: Any,
    new_tails: Any,
) -> None:
    """Earliest and latest passage of every state within ``cost``, and what they say about every task.

    Parameters
    ----------
    counts, previous : array, shape (states, rows)
        Tasks of every row run so far; the state before the last of them, -1 if there is none. In an order in
        which every state comes after those before it; the first is empty, the last complete.
    lengths : array, shape (rows,)
    heads, tails : array, shape (rows, m)
        Least time before a task's start and after its end; minus infinity where nothing is known.
    at_end : float
        Time that counts after the device's last task: 0, or minus infinity if its end is not watched.
    before, after : array, shape (states,), written
    new_heads, new_tails : array, shape (rows, m), written
        Infinite where no schedule within the cost has the task.
    """
    number, rows = counts.shape
    new_heads[:] = np.inf
    new_tails[:] = np.inf
    before[0] = 0.0
    for state in range(1, number):
        best = np.inf
        for r in range(rows):
            origin = previous[state, r]
            if origin >= 0 and before[origin] < np.inf:
                j = counts[state, r] - 1
                end = max(before[origin], heads[r, j]) + lengths[r]
                if end < best and end + tails[r, j] <= cost:
                    best = end
        before[state] = best
    after[:] = np.inf
    after[number - 1] = at_end
    for state in range(number - 1, 0, -1):
        if before[state] == np.inf or after[state] == np.inf:
            continue
        for r in range(rows):
            origin = previous[state, r]
            if origin >= 0 and before[origin] < np.inf:
                j = counts[state, r] - 1
                start = max(before[origin], heads[r, j])
                rest = max(after[state], tails[r, j])
                if start + lengths[r] + rest <= cost:
                    new_heads[r, j] = min(new_heads[r, j], start)
                    new_tails[r, j] = min(new_tails[r, j], rest)
                    after[origin] = min(after[origin], rest + lengths[r])


@cache
def _compiled() -> Any:
    return compile_loop(narrow)


class DeviceStates:
    """The states of one device that its cap allows and that a cost leaves time for.

    Rows: F's by stage, then backwards from the last stage to the first, as one micro-batch runs them,
    then W's by stage.
    """

    def __init__(self, instance: Instance, device: int) -> None:
        held = instance.stages_on(device)
        chain, self._m, self._room = len(held), instance.num_microbatches, room(instance, device)
        rows = 3 * chain
        self.lengths = np.zeros(rows)
        self._holds = np.zeros(rows)  # what a task leaves held, beyond its end
        self._adds = np.zeros(rows)  # what it holds while it runs, beyond what was held at its start
        # (kind, stage) of every row, for arrays of shape (kinds, stages, m).
        kinds, stages = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
        for k, s in enumerate(held):
            stage = instance.stages[s]
            splits = stage.t_bw is None
            pending = stage.mem_w if splits else 0.0
            forward, backward, weight = k, 2 * chain - 1 - k, 2 * chain + k
            for kind, r in enumerate((forward, backward, weight)):
                kinds[r], stages[r] = kind, s
            own = [forward, backward, weight]
            self.lengths[own] = pass_lengths(stage)
            self._holds[own] = stage.mem_b, pending - stage.mem_b, -pending
            self._adds[own] = (
                stage.mem_b + stage.peak_f,
                backward_adds(stage),
                stage.peak_w if splits else 0.0,
            )
        self.rows = kinds, stages
        self.within = -math.inf  # the cost that the states were found for: they say nothing of higher ones
        self.too_many, self.num_states = False, 0
        # Row r runs at most as often as this one has; the first row at most m times.
        self._leader = np.array([*range(-1, 2 * chain - 1), *range(2 * chain - 1, chain - 1, -1)])

    def enumerate(
        self, heads: FloatArray, tails: FloatArray, cost: float, most: int, enough: Callable[[], bool]
    ) -> None:
        """Find the states; ``too_many`` where there are more than ``most``, or the time is up.

        ``heads`` and ``tails``, shape (rows, m), and ``cost`` as in :func:`narrow`: states that take longer
        are left out, so costs to come must not be higher, nor heads and tails lower.
        """
        m, rows = self._m, len(self.lengths)
        self.within = cost
        if float(m + 1) ** rows > 2.0**62:
            self.too_many = True  # a state's counts are one integer here
            return
        radix = (m + 1) ** np.arange(rows - 1, -1, -1, dtype=np.int64)
        counts = np.zeros((1, rows), dtype=np.int64)
        times = np.zeros(1)
        layers = [counts.astype(np.int32)]
        origins = [np.full((1, rows), -1, dtype=np.int32)]
        total, first = 1, 0
        for _ in range(rows * m):
            allowed = counts < np.where(self._leader < 0, m, counts[:, self._leader])
            held = counts @ self._holds
            allowed &= held[:, None] + np.maximum(self._adds, self._holds) <= self._room
            state, row = np.nonzero(allowed)
            j = counts[state, row]
            ends = np.maximum(times[state], heads[row, j]) + self.lengths[row]
            kept = ends + tails[row, j] <= cost
            state, row, ends = state[kept], row[kept], ends[kept]
            keys, number = np.unique((counts @ radix)[state] + radix[row], return_inverse=True)
            total += len(keys)
            if total > most or enough():
                self.too_many, self.num_states = True, total
                return
            previous = np.full((len(keys), rows), -1, dtype=np.int32)
            previous[number, row] = first + state
            first += len(counts)
            times = np.full(len(keys), np.inf)
            np.minimum.at(times, number, ends)
            counts = keys[:, None] // radix % (m + 1)
            layers.append(counts.astype(np.int32))
            origins.append(previous)
        self._counts, self._previous = np.concatenate(layers), np.concatenate(origins)
        self._before, self._after = np.empty(total), np.empty(total)
        self.num_states = total

    def narrow(
        self, heads: FloatArray, tails: FloatArray, at_end: float, cost: float
    ) -> tuple[FloatArray, FloatArray] | None:
        """Heads and tails, shape (rows, m), of all schedules within the cost; None if there are none."""
        new_heads, new_tails = np.empty_like(heads), np.empty_like(tails)
        if self._counts[-1].min() < self._m:
            return None  # no order of all tasks
        _compiled()(
            self._counts, self._previous, self.lengths, heads, tails, at_end, cost,
            self._before, self._after, new_heads, new_tails,
        )  # fmt: skip
        return (new_heads, new_tails) if np.isfinite(new_heads).all() else None
