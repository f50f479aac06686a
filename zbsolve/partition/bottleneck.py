"""The least bottleneck: how little the busiest device can work, whichever legal way the layers are dealt out.

No device splits a layer, so the busiest one often works more than an even share of all work: 63 equal layers
on 16 devices leave one with 4. Memory counts as far as one chunk by itself goes: where a chunk fits a device
only with its activations recomputed or put away, it works as long as that takes. Hops, round trips and the
order of passes are left out; both makespan and span are at least the busiest device's work.

One chunk a device: a dynamic program over (devices used of each class, layers dealt out), exact. Two chunks:
for a given limit the same program says how far the second chunks can reach for each reach of the first, and
the least limit is searched; more second layers dealt out are never worse, because a part of a chunk works no
longer than the chunk (:func:`_within`) and a device may be left without a second chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from zbsolve.model.instance import Instance
from zbsolve.model.serial import serial_program
from zbsolve.partition.problem import DecisionProblem, Placement

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Used = tuple[int, ...]

# What the tables may take, in elementary steps; beyond, all devices count as the best of each chunk.
MOST_STEPS = 2e8
# Least number of limits that are tried for two chunks; a rounding that makes a limit a little easier to keep.
LEAST_TRIALS, MOST_TRIALS = 6, 40
ROUNDING = 1e-12


class Dealing:
    """Classes of devices, how many there are of each, and what each chunk costs on them.

    ``costs[c][first, end]`` is the least device time of the whole step that layers ``first`` to ``end - 1``
    take on a device of class c, infinite where they do not fit or are none.
    """

    def __init__(self, problem: DecisionProblem) -> None:
        self.p, self.n = problem.num_devices, len(problem.profile.layers)
        self.fixed_order = problem.fixed_order
        self.sizes = tuple(len(members.members) for members in problem.classes)
        self.costs = [_chunk_costs(problem, cls) for cls in range(len(self.sizes))]
        states = self.p + 1 if self.fixed_order else math.prod(size + 1 for size in self.sizes)
        self.merged = states * len(self.sizes) * (self.n + 1) ** 2 > MOST_STEPS
        if self.merged:
            self.sizes, self.fixed_order = (self.p,), False
            self.costs = [np.minimum.reduce(self.costs)]

    def next_classes(self, used: Used) -> Iterator[tuple[int, Used]]:
        """Classes of which a device may come next, and what is used then."""
        r = sum(used)
        for cls, size in enumerate(self.sizes):
            if used[cls] < size and (not self.fixed_order or cls == r):
                yield cls, (*used[:cls], used[cls] + 1, *used[cls + 1 :])

    def rounds(self) -> list[list[Used]]:
        """What can be used after 0, 1, … p devices."""
        found: list[list[Used]] = [[(0,) * len(self.sizes)]]
        for _ in range(self.p):
            following = (after for used in found[-1] for _, after in self.next_classes(used))
            found.append(list(dict.fromkeys(following)))
        return found


def bottlenecks_to_go(dealing: Dealing) -> dict[Used, FloatArray]:
    """One chunk a device: by what is used and the first layer not dealt out, the rest's least bottleneck."""
    rounds = dealing.rounds()
    nothing_left = np.full(dealing.n + 1, np.inf)
    nothing_left[dealing.n] = 0.0
    rest = dict.fromkeys(rounds[-1], nothing_left)
    for states in reversed(rounds[:-1]):
        for used in states:
            ways = [
                np.maximum(dealing.costs[cls], rest[after]).min(axis=1)
                for cls, after in dealing.next_classes(used)
            ]
            rest[used] = np.minimum.reduce(ways) if ways else np.full(dealing.n + 1, np.inf)
    return rest


def least_of_two_chunks(dealing: Dealing, placement: Placement, least: float, steps: float) -> float:
    """Two chunks a device: the least bottleneck, or a little less where ``steps`` do not suffice to tell.

    Parameters
    ----------
    least : float
        A known lower bound of it.
    steps : float
        About how many elementary steps the search may take (at least those of ``LEAST_TRIALS`` trials).
    """
    n, v = dealing.n, placement == "v"
    inner = [_within(cost) for cost in dealing.costs]
    # Second chunks: with V from the last layer down, so the layers are counted from there.
    second = [cost[::-1, ::-1].T if v else cost for cost in inner]
    reach = [_Reach(cost) for cost in second]
    rounds = dealing.rounds()

    def keeps(limit: float) -> bool:
        return _deals_within(dealing, rounds, inner, reach, limit * (1 + ROUNDING), v)

    if least <= 0 or keeps(least):
        return least
    most = max(_highest(a) + _highest(b) for a, b in zip(inner, second, strict=True))
    low, high, growth = least, min(least * 1.02, most), 0.02
    trials = 1
    while not keeps(high):
        trials += 1
        if high >= most:
            return math.inf  # no device works longer: what does not fit does so for its memory
        low, growth = high, 2 * growth
        high = min(high * (1 + growth), most)
    each = sum(map(len, rounds)) * len(inner) * (1 if v else n + 1) * (n + 1) * max(2.0, 2 * n / dealing.p)
    allowed = min(MOST_TRIALS, max(LEAST_TRIALS, steps / each))
    while trials < allowed and high - low > 1e-9 * high:
        trials += 1
        middle = (low + high) / 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    # The bottleneck is what one device works on its chunks: the least such sum above a limit that is too low.
    candidates = [_least_sum_above(low, *both) for both in zip(inner, second, strict=True)]
    return max(low, min(candidates) * (1 - ROUNDING))


def _deals_within(
    dealing: Dealing,
    rounds: list[list[Used]],
    first: list[FloatArray],
    reach: list[_Reach],
    limit: float,
    v: bool,
) -> bool:
    """Whether all layers can be dealt out with no device working longer than a limit.

    ``far[a, low]``: how far second chunks reach at most when first ones reach up to ``low`` (-1: not at all).
    With loop, a is the layer where second chunks begin.
    """
    n = dealing.n
    begin = np.full((1 if v else n + 1, n + 1), -1, dtype=np.int64)
    begin[:, 0] = 0 if v else np.arange(n + 1)
    far = {rounds[0][0]: begin}
    for states in rounds[:-1]:
        following: dict[Used, IntArray] = {}
        for used in states:
            for cls, after in dealing.next_classes(used):
                found = following.setdefault(after, np.full_like(begin, -1))
                for size in range(1, n + 1):
                    left = limit - np.diagonal(first[cls], size)  # by the first chunk's first layer
                    if not (left >= 0).any():
                        break  # longer chunks work longer
                    now = far[used][:, : n + 1 - size]
                    reached = reach[cls].furthest(now, np.broadcast_to(left, now.shape))
                    reached = np.where((now >= 0) & (left >= 0), reached, -1)
                    np.maximum(found[:, size:], reached, out=found[:, size:])
        far = following
    for reached in far.values():
        whole = reached[0] >= n - np.arange(n + 1) if v else np.diagonal(reached) >= n
        if whole.any():
            return True
    return False


class _Reach:
    """How far a chunk that begins at a layer reaches within a limit: one sorted list for all first layers."""

    def __init__(self, cost: FloatArray) -> None:
        self._width, self._row = len(cost), 4.0 * (_highest(cost) or 1.0)
        rows = np.where(np.isfinite(cost), cost, 0.5 * self._row)  # out of reach of any limit
        rows[np.tril_indices(self._width)] = 0.0  # no chunk at all
        self._sorted = (rows + self._row * np.arange(self._width)[:, None]).ravel()

    def furthest(self, first: IntArray, limit: FloatArray) -> IntArray:
        """Last end whose chunk from ``first`` costs at most ``limit``."""
        row = np.maximum(first, 0)
        slack = ROUNDING * self._row * (row + 1)
        sought = self._row * row + np.clip(limit, 0.0, 0.375 * self._row) + slack
        last: IntArray = np.searchsorted(self._sorted, sought, side="right") - 1 - self._width * row
        return last


def _chunk_costs(problem: DecisionProblem, cls: int) -> FloatArray:
    n, m = len(problem.profile.layers), problem.num_microbatches
    cap = problem.classes[cls].memory
    costs = np.full((n + 1, n + 1), np.inf)
    # No chunk leaves another device without a layer.
    for first in range(n):
        for end in range(first + 1, min(n, first + n - problem.num_devices + 1) + 1):
            for keep in problem.keeps:
                stage = problem.stage(first, end, cls, keep)
                cost = m * (stage.t_f + (stage.t_r or 0.0) + stage.min_backward)
                if cost >= costs[first, end]:
                    continue
                alone = Instance.model_construct(
                    num_devices=1,
                    num_microbatches=1,
                    stages=(stage,),
                    memory_cap=None if math.isinf(cap) else cap,
                    static_mem=(problem.static(first, end),),
                )
                if math.isinf(cap) or alone.fits(0, serial_program(alone, 0)[0]):
                    costs[first, end] = cost
    return costs


def _within(cost: FloatArray) -> FloatArray:
    """The least cost of any chunk that contains these layers: never more for fewer of them, at least one."""
    least = np.minimum.accumulate(cost, axis=0)  # chunks that begin earlier
    least = np.minimum.accumulate(least[:, ::-1], axis=1)[:, ::-1]  # and end later
    return np.where(np.tri(len(cost), dtype=bool), np.inf, least)


def _highest(cost: FloatArray) -> float:
    return float(cost[np.isfinite(cost)].max(initial=0.0))


def _least_sum_above(limit: float, first: FloatArray, second: FloatArray) -> float:
    """Least sum above a limit of a first chunk's cost and a second's, which may be none."""
    ones = np.unique(first[np.isfinite(first)])
    others = np.unique(np.append(second[np.isfinite(second)], 0.0))
    place = np.searchsorted(others, limit - ones, side="right")
    sums = ones + np.append(others, np.inf)[place]
    return float(sums[sums > limit].min(initial=np.inf))
