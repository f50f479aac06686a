"""How much work memory lets a device do before its first backward, or leave until after its last F."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from zbsolve.instance import Instance
from zbsolve.precedence import room

FloatArray = NDArray[np.float64]

# Pairs of counts that are tried one by one; beyond, a fractional knapsack says nearly the same.
MOST_TRIED = 1_000_000


def most_in_flight(instance: Instance, device: int, s: int) -> int:
    """Most F's of a stage that can run before a backward of it starts (m when memory sets no limit)."""
    stage, free = instance.stages[s], room(instance, device)
    if math.isinf(free) or stage.mem_b == 0:
        return instance.num_microbatches
    growth = stage.growth if stage.t_bw is None else 0.0
    return max(1, int(min(instance.num_microbatches, max(0.0, free - growth) / stage.mem_b)))


def forward_work(instance: Instance, device: int) -> float:
    """Most F work that a device can do before its first backward starts: all of it is held together.

    With one stage whole F's; else the fractional knapsack that takes stages by memory per time.
    """
    stages = instance.stages_on(device)
    m, last = instance.num_microbatches, instance.stages[stages[-1]]
    if len(stages) == 1:
        return most_in_flight(instance, device, stages[0]) * last.t_f
    free = room(instance, device) - (last.growth if last.t_bw is None else 0.0)
    filled = 0.0
    by_value = sorted(
        (instance.stages[s] for s in stages),
        key=lambda stage: stage.mem_b / stage.t_f if stage.t_f else math.inf,
    )
    for stage in by_value:
        number = m if stage.mem_b == 0 else min(m, max(0.0, free) / stage.mem_b)
        filled += number * stage.t_f
        free -= number * stage.mem_b if stage.mem_b else 0.0
    return filled


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
