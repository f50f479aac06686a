"""Enumerating decisions: the one that settled devices make, first guesses, and how many there are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from zbsolve.partition.problem import CHUNKS, Decision, DecisionProblem, Placement
from zbsolve.partition.settled import Settled
from zbsolve.partition.splits import balanced_split, even_split


def decision_of(problem: DecisionProblem, placement: Placement, settled: Settled) -> Decision:
    """The decision in which every device is settled."""
    free = [list(members.members) for members in problem.classes]
    devices = tuple(free[option.cls].pop(0) for option, _ in settled)
    chunks = CHUNKS[placement]
    order = [(chunk, r) for chunk in range(chunks) for r in range(len(settled))]
    if placement == "v":
        order = [(chunk, r if chunk == 0 else len(settled) - 1 - r) for chunk, r in order]
    segments = [settled[r][0].segments[chunk] for chunk, r in order]
    keep = tuple(settled[r][1][chunk] for chunk, r in order)
    return Decision(placement, devices, tuple(end - first for first, end in segments), keep)


def seeds(problem: DecisionProblem) -> Iterator[Decision]:
    """First guesses: even and balanced splits on the first devices, plain, and with everything recomputed."""
    costs = [layer.cost for layer in problem.profile.layers]
    devices = tuple(range(problem.num_devices))
    for placement, keep in product(problem.placements, problem.keeps):
        stages = CHUNKS[placement] * problem.num_devices
        splits = [problem.split] if problem.split is not None else []
        if not splits:
            splits = [balanced_split(costs, stages), even_split(len(costs), stages)]
        for split in dict.fromkeys(splits):
            assert split is not None
            yield Decision(placement, devices, split, (keep,) * stages)


def count_decisions(problem: DecisionProblem) -> int:
    """How many decisions a problem allows, devices that can change places counted once."""
    n, p = len(problem.profile.layers), problem.num_devices
    orders = _orders(tuple(len(cls.members) for cls in problem.classes), p) if not problem.fixed_order else 1
    total = 0
    for placement in problem.placements:
        stages = CHUNKS[placement] * p
        splits = 1 if problem.split is not None else math.comb(n - 1, stages - 1)
        total += splits * orders * len(problem.keeps) ** stages
    return total


def _orders(sizes: tuple[int, ...], places: int) -> int:
    """Words of a length over an alphabet whose letters may be used up to ``sizes`` times each."""
    ways = [1.0] + [0.0] * places
    # Exponential generating functions: the product of sum x^k / k!, times places!.
    for size in sizes:
        ways = [
            sum(ways[k - used] / math.factorial(used) for used in range(min(size, k) + 1))
            for k in range(places + 1)
        ]
    return round(ways[places] * math.factorial(places))
