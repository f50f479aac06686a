"""Layers to stages by their times alone: equal numbers, and the least bottleneck.

Exact for one stage per device (linear placement). Memory, hops and the order of passes are for the joint
search (:mod:`zbsolve.partition.search`), which these splits start.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from zbsolve.errors import InputError
from zbsolve.model.tolerances import ROUNDING


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, sizes at most one apart. The last stages get fewer: they often hold the head."""
    require_enough(layers, stages)
    return tuple(layers // stages + (1 if s < layers % stages else 0) for s in range(stages))


def balanced_split(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Layers per stage with the least possible bottleneck; among those, the least sum of squared loads.

    Dynamic program over (layers placed, stages used), first for the bottleneck, then for the
    squares of the loads that stay within it. O(n^2 p) for n layers and p stages. Every layer lands in
    exactly one stage and no stage is empty.
    """
    n = len(costs)
    require_enough(n, stages)
    total = [0.0, *accumulate(costs)]

    def load(first: int, last: int) -> float:
        return total[last] - total[first]

    bottleneck = [load(0, k) for k in range(n + 1)]
    for used in range(2, stages + 1):
        bottleneck = [
            min((max(bottleneck[i], load(i, k)) for i in range(used - 1, k)), default=float("inf"))
            for k in range(n + 1)
        ]
    # Rounding of prefix sums must not rule out the split that reaches the bottleneck.
    limit = bottleneck[n] * (1 + ROUNDING)
    squares = [load(0, k) ** 2 if k > 0 and load(0, k) <= limit else float("inf") for k in range(n + 1)]
    cuts: list[list[int]] = []
    for used in range(2, stages + 1):
        following, cut = [float("inf")] * (n + 1), [0] * (n + 1)
        for k in range(used, n + 1):
            options = [(squares[i] + load(i, k) ** 2, i) for i in range(used - 1, k) if load(i, k) <= limit]
            if options:
                following[k], cut[k] = min(options)
        squares = following
        cuts.append(cut)
    ends = [n]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    return tuple(b - a for a, b in pairwise([0, *reversed(ends)]))


def stage_loads(costs: Sequence[float], split: Sequence[int]) -> list[float]:
    """Sum of costs per stage."""
    ends = list(accumulate(split))
    return [sum(costs[end - size : end]) for end, size in zip(ends, split, strict=True)]


def imbalance(costs: Sequence[float], split: Sequence[int]) -> float:
    """How far the busiest stage is above the mean: 0 is perfect, 0.25 wastes a quarter of the mean."""
    loads = stage_loads(costs, split)
    mean = sum(loads) / len(loads)
    return max(loads) / mean - 1 if mean > 0 else 0.0


def require_enough(layers: int, stages: int) -> None:
    if stages < 1:
        raise InputError(f"{stages} stages: give at least 1")
    if layers < stages:
        raise InputError(f"{layers} layers cannot fill {stages} stages: use fewer stages or more layers")
