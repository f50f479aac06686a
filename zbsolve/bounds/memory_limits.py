"""How much work memory lets a device do before its first backward, or leave until after its last F."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from zbsolve.bounds.waits import room
from zbsolve.model.instance import Instance, Stage

FloatArray = NDArray[np.float64]

# Pairs of counts that are tried one by one; beyond, a fractional knapsack says nearly the same.
MOST_TRIED = 1_000_000


def most_in_flight(instance: Instance, device: int, s: int) -> int:
    """Most F's of a stage that can run before a backward of it starts (m when memory sets no limit)."""
    stage, free = instance.stages[s], room(instance, device)
    kept = stage.kept_by_forward
    if math.isinf(free) or kept == 0:
        return instance.num_microbatches
    left = free - added_before_backward(stage)
    return max(1, int(min(instance.num_microbatches, max(0.0, left) / kept)))


def added_before_backward(stage: Stage) -> float:
    """What a micro-batch holds beyond its F's when its backward starts: R's, and B's growth (not BW's)."""
    growth = stage.growth if stage.t_bw is None else 0.0
    return stage.mem_b - stage.kept_by_forward + growth


def forward_work(instance: Instance, device: int) -> float:
    """Most F and R work that a device can do before its first backward starts: all of it is held together.

    With one stage whole F's (and R's, each of an F that ran, the first backward's own among them); else the
    fractional knapsack that takes F's and R's of all stages by memory per time.
    """
    stages = instance.stages_on(device)
    m, last = instance.num_microbatches, instance.stages[stages[-1]]
    free = room(instance, device)
    if len(stages) == 1:
        forwards = most_in_flight(instance, device, stages[0])
        if last.t_r is None:
            return forwards * last.t_f
        grown = last.mem_b - last.kept_by_forward
        left = free - added_before_backward(last) - np.arange(1, forwards + 1) * last.kept_by_forward
        free_of_limit = grown == 0 or math.isinf(free)
        more = np.full(forwards, m) if free_of_limit else np.maximum(0.0, left) // grown
        recomputed = np.minimum(np.arange(1, forwards + 1), 1 + more)
        return float((np.arange(1, forwards + 1) * last.t_f + recomputed * last.t_r).max())
    free -= last.growth if last.t_bw is None else 0.0
    items: list[tuple[float, float]] = []
    for stage in (instance.stages[s] for s in stages):
        items.append((stage.kept_by_forward, stage.t_f))
        if stage.t_r is not None:
            items.append((stage.mem_b - stage.kept_by_forward, stage.t_r))
    return float(_fractional_knapsack(items, np.full(len(items), m), np.array(max(0.0, free))))


def most_put_off(instance: Instance, device: int) -> float:
    """Most backward work that a device can have left when its last F starts, within its cap.

    Of stage a let i_a micro-batches be in flight (F started, backward not ended) and w_a W's pending:
    ``sum(i_a mem_b + w_a mem_w)`` is within the cap, ``i_a + w_a <= m``, and what is in flight on a later
    stage is so on the earlier ones (its F's there ran before, its backwards come after). Put off are i_a
    backwards and w_a W's. With one stage or two all (i_1, i_2) are tried, with the fractional knapsack of the
    W's on top; with more stages, or too many pairs, everything is fractional.
    """
    free, m = room(instance, device), instance.num_microbatches
    stages = [instance.stages[s] for s in instance.stages_on(device)]
    backward = [stage.min_backward for stage in stages]
    weight = [max(0.0, stage.min_backward - stage.t_b) for stage in stages]
    if math.isinf(free):
        return m * sum(backward)
    reach = [m if stage.mem_b == 0 else int(min(m, max(0.0, free) / stage.mem_b)) for stage in stages]
    if len(stages) > 2 or math.prod(count + 1 for count in reach) > MOST_TRIED:
        items = [(stage.mem_b, value) for stage, value in zip(stages, backward, strict=True)]
        items += [(stage.mem_w, value) for stage, value in zip(stages, weight, strict=True)]
        return float(_fractional_knapsack(items, np.full(len(items), m), np.array(free)))
    flight = np.meshgrid(*(np.arange(count + 1) for count in reach), indexing="ij")
    held = sum(i * stage.mem_b for i, stage in zip(flight, stages, strict=True))
    possible = held <= free
    if len(stages) == 2:
        possible &= flight[0] >= flight[1]
    counts = [i[possible] for i in flight]
    left = free - np.asarray(held)[possible]
    value = sum(i * each for i, each in zip(counts, backward, strict=True))
    items = [(stage.mem_w, each) for stage, each in zip(stages, weight, strict=True)]
    pending = np.array([m - i for i in counts])
    # Nothing fits where the static memory alone is over the cap.
    return float((value + _fractional_knapsack(items, pending, left)).max(initial=0.0))


def _fractional_knapsack(
    items: list[tuple[float, float]], most: NDArray[np.int64], free: FloatArray
) -> FloatArray:
    """Highest value of items (memory, value), each up to ``most`` times and divisible, in ``free`` memory."""
    value = np.zeros_like(free)
    left = free.copy()
    by_density = sorted(
        range(len(items)), key=lambda a: items[a][0] / items[a][1] if items[a][1] else math.inf
    )
    for a in by_density:
        memory, each = items[a]
        with np.errstate(over="ignore"):  # next to no memory: as many as there are
            number = (
                np.minimum(most[a], left / memory) if memory > 0 else np.broadcast_to(most[a], left.shape)
            )
        value = value + number * each
        left = left - number * memory
    return value
