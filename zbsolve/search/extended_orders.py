"""Annealing of orders with recomputation, F&B pairs and replicas.

A move takes one task, or a pair as one, to another place of its device, near or far; or makes a pair of an F
and the BW behind it, or takes one apart; or splits a BW into B and W, or joins them. The result is timed in
full, which also settles memory and deadlock. Orders are compared by cost, and a little by how early all
devices end, so that the search moves on plateaus of a bottleneck's cost.

The loop is written for numba and also runs as plain Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zbsolve.compiled import compile_loop
from zbsolve.model.instance import Instance
from zbsolve.model.memory import Pairs
from zbsolve.model.objective import column_of
from zbsolve.search.extended_arrays import Orders, decode, encode, time_codes, to_extended_arrays

# How much of the cost the mean end of the devices stands for.
WEIGHT_OF_MEAN_END = 0.02


def move_task(codes: Any, lengths: Any, d: int, source: int, target: int) -> bool:
    """Take the task at ``source``, a pair as one, out and put it before the one now at ``target``.

    Never between the tasks of a pair. False when nothing changes.
    """
    size = 2 if codes[d, source] % 8 == 5 else 1
    if codes[d, source] % 8 == 3 and source > 0 and codes[d, source - 1] % 8 == 5:
        source -= 1
        size = 2
    if target > 0 and target < lengths[d] and codes[d, target - 1] % 8 == 5:
        target += 1
    if source <= target <= source + size:
        return False
    one, two = codes[d, source], codes[d, source + size - 1]
    if target < source:
        for k in range(source - 1, target - 1, -1):
            codes[d, k + size] = codes[d, k]
        place = target
    else:
        for k in range(source + size, target):
            codes[d, k - size] = codes[d, k]
        place = target - size
    codes[d, place] = one
    codes[d, place + size - 1] = two
    return True


def change_kind(a: Any, codes: Any, lengths: Any, d: int, i: int) -> bool:
    """Pair the F at a place or take its pair apart; split the BW there, or join the B and its W."""
    s, kind = codes[d, i] // 8, codes[d, i] % 8
    if kind == 0:
        if (
            i + 1 >= lengths[d]
            or codes[d, i + 1] % 8 != 3
            or not a.pair_time[s, codes[d, i + 1] // 8] < np.inf
        ):
            return False
        codes[d, i] = 8 * s + 5
        return True
    if kind == 5:
        codes[d, i] = 8 * s
        return True
    if kind == 3:
        if i > 0 and codes[d, i - 1] % 8 == 5:
            codes[d, i - 1] -= 5
        for k in range(lengths[d] - 1, i, -1):
            codes[d, k + 1] = codes[d, k]
        codes[d, i] = 8 * s + 1
        codes[d, i + 1] = 8 * s + 2
        lengths[d] += 1
        return True
    if kind == 1 and a.can_fuse[s]:
        k = i + 1
        while codes[d, k] != 8 * s + 2:
            k += 1
        codes[d, i] = 8 * s + 3
        lengths[d] -= 1
        for n in range(k, lengths[d]):
            codes[d, n] = codes[d, n + 1]
        return True
    return False


def anneal(
    a: Any, codes: Any, lengths: Any, column: int, steps: int, slack: float, target: float, seed: int
) -> float:
    """Run ``steps`` moves from ``codes`` and leave the best found there; returns its cost.

    A move is kept when it is within ``slack`` of the present cost, which falls to zero over the steps.
    """
    np.random.seed(seed)
    p = a.room.shape[0]
    found = time_codes(a, codes, lengths)
    best = found[column]
    present = best + WEIGHT_OF_MEAN_END * found[2] / p
    least = present
    best_codes, best_lengths = codes.copy(), lengths.copy()
    row = codes[0].copy()
    options = a.can_fuse.any()
    for step in range(steps):
        if best <= target:
            break
        d = np.random.randint(p)
        if lengths[d] < 2:
            continue
        row[:] = codes[d]
        length = lengths[d]
        i = np.random.randint(length)
        what = np.random.random()
        if options and what < 0.25:
            changed = change_kind(a, codes, lengths, d, i)
        else:
            reach = 1 + int(length ** (np.random.random() ** 2) - 1.0)
            place = i + 1 + reach if np.random.random() < 0.5 else i - reach
            changed = move_task(codes, lengths, d, i, min(max(place, 0), length))
            if changed and options and what < 0.6:
                # Where the task came to lie, it may pair at once.
                near = min(max(place - 1, 0), length - 1)
                for k in range(max(0, near - 1), min(length, near + 2)):
                    free = k == 0 or codes[d, k - 1] % 8 != 5
                    if free and codes[d, k] % 8 == 0 and change_kind(a, codes, lengths, d, k):
                        break
        if not changed:
            continue
        found = time_codes(a, codes, lengths)
        value = found[column] + WEIGHT_OF_MEAN_END * found[2] / p
        if value <= present + slack * (1.0 - step / steps) * np.random.random():
            present = value
            if found[column] < best or (found[column] == best and value < least):
                least = value
                best = found[column]
                best_codes[:] = codes
                best_lengths[:] = lengths
        else:
            codes[d] = row
            lengths[d] = length
    codes[:] = best_codes
    lengths[:] = best_lengths
    return float(best)


class ExtendedOrderSearch:
    """Anneals the orders and pairs of one instance."""

    def __init__(
        self,
        instance: Instance,
        orders: Orders,
        pairs: Pairs,
        objective: str,
        seed: int,
        *,
        compiled: bool,
    ) -> None:
        self.arrays = to_extended_arrays(instance)
        self.codes, self.lengths = encode(instance, orders, pairs)
        self._column = column_of(objective)
        self._seed = seed
        self._anneal = compile_loop(anneal, time_codes, move_task, change_kind) if compiled else anneal

    def run(self, steps: int, slack: float, target: float) -> float:
        """Anneal for ``steps`` moves with a falling ``slack`` (time units); cost of the best orders."""
        self._seed += 1
        return self._anneal(
            self.arrays,
            self.codes,
            self.lengths,
            self._column,
            steps,
            slack,
            target,
            self._seed % 2**31,
        )

    def orders(self) -> tuple[Orders, Pairs]:
        """The best orders found, and their pairs."""
        return decode(self.codes, self.lengths)
