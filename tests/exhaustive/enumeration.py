"""Every order of the tiniest instances, micro-batches in any order: to judge the search by.

Slower and plainer than ``search.py``: orders are permutations, times a fixpoint over the definitions, memory
is summed up from what every micro-batch holds at a place, the least span is found by halving.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import permutations, product

from tests.exhaustive.problem import Data, Problem, read

Task = tuple[str, int, int]
Step = tuple[Task, ...]
Orders = tuple[tuple[Step, ...], ...]
Times = dict[Task, int]


def least(data: Data, objective: str) -> Fraction | None:
    """Least makespan or span over every order; None when none fits the caps."""
    problem = read(data)
    means = math.lcm(*range(1, problem.devices + 1))
    best: int | None = None
    for orders in every_order(problem):
        if objective == "makespan":
            times = timed(problem, orders)
            cost = None if times is None else means * max(times[1].values())
        elif best is not None and not within(problem, orders, best - 1, means):
            continue
        else:
            cost = least_span(problem, orders, means)
        if cost is not None and (best is None or cost < best):
            best = cost
    return None if best is None else Fraction(best, means) * problem.time_unit


def every_order(problem: Problem) -> Iterator[Orders]:
    """One order a device, with every choice of fusing and pairing, that memory allows; some may deadlock."""
    S, m = len(problem.stages), problem.microbatches
    backwards = [
        [("B", "W"), ("BW",)] if problem.stages[s].fused is not None else [("B", "W")]
        for s in range(S)
        for _ in range(m)
    ]
    for choice in product(*backwards):
        tasks: list[list[Task]] = [[] for _ in range(problem.devices)]
        for number, kinds in enumerate(choice):
            s, j = divmod(number, m)
            first = ("F",) if problem.stages[s].recompute is None else ("F", "R")
            tasks[problem.stages[s].device] += [(kind, s, j) for kind in (*first, *kinds)]
        programs = [
            [
                steps
                for order in _in_sequence(tasks[d])
                for steps in _with_pairs(problem, order)
                if _fits(problem, d, steps)
            ]
            for d in range(problem.devices)
        ]
        yield from product(*programs)


def _in_sequence(tasks: list[Task]) -> Iterator[tuple[Task, ...]]:
    """Permutations in which a micro-batch's tasks on its stage come in their sequence."""
    rank = {"F": 0, "R": 1, "B": 2, "BW": 2, "W": 3}
    for order in permutations(tasks):
        done: dict[tuple[int, int], int] = {}
        for kind, s, j in order:
            if rank[kind] < done.get((s, j), -1):
                break
            done[s, j] = rank[kind]
        else:
            yield order


def _with_pairs(problem: Problem, order: tuple[Task, ...]) -> Iterator[tuple[Step, ...]]:
    if not order:
        yield ()
        return
    for rest in _with_pairs(problem, order[1:]):
        yield ((order[0],), *rest)
    kinds = [kind for kind, _, _ in order[:2]]
    if kinds == ["F", "BW"] and problem.pair_length(order[0][1], order[1][1]) is not None:
        for rest in _with_pairs(problem, order[2:]):
            yield (order[:2], *rest)


def _fits(problem: Problem, device: int, steps: tuple[Step, ...]) -> bool:
    cap = problem.caps[device]
    return cap is None or all(use <= cap for use in memory(problem, steps))


def memory(problem: Problem, steps: tuple[Step, ...]) -> Iterator[int]:
    """What is held while each step runs: [F, R] mem_r, [R or F, B] mem_b, (B, W] mem_w, and transients."""
    at = {task: place for place, step in enumerate(steps) for task in step}
    for place, step in enumerate(steps):
        use = 0
        for (kind, s, j), f in at.items():
            if kind != "F":
                continue
            stage = problem.stages[s]
            taken = at.get(("R", s, j), f)
            back = at[("BW", s, j)] if ("BW", s, j) in at else at["B", s, j]
            if f <= place < taken:
                use += stage.mem_r
            if taken <= place <= back:
                use += stage.mem_b
            if ("B", s, j) in at:
                if back == place:
                    use += max(0, stage.mem_w - stage.mem_b)
                if back < place <= at["W", s, j]:
                    use += stage.mem_w
        for kind, s, _ in step:
            stage = problem.stages[s]
            use += {"F": stage.peak_f, "R": 0, "B": stage.peak_b, "W": stage.peak_w, "BW": stage.peak_fused}[
                kind
            ]
        yield use


def length(problem: Problem, step: Step) -> int:
    """How long one step runs."""
    if len(step) == 2:
        together = problem.pair_length(step[0][1], step[1][1])
        assert together is not None
        return together
    kind, s, _ = step[0]
    stage = problem.stages[s]
    alone = {"F": stage.f, "R": stage.recompute, "B": stage.b, "W": stage.w, "BW": stage.fused}[kind]
    assert alone is not None
    return alone


def inputs(problem: Problem, task: Task, present: Iterable[Task]) -> Iterator[Task]:
    """What a task waits for."""
    kind, s, j = task
    if kind == "F":
        wanted = [] if problem.first(s) else [("F", s - 1, j)]
    elif kind == "R":
        wanted = [("F", s, j)]
    elif kind == "W":
        wanted = [("B", s, j)]
    else:
        wanted = [("F" if problem.stages[s].recompute is None else "R", s, j)]
        if not problem.last(s):
            wanted += [("B", s + 1, j), ("BW", s + 1, j)]
    yield from (each for each in wanted if each in present)


def target(problem: Problem, task: Task) -> int | None:
    """The stage on another device that a task's result travels to."""
    kind, s, _ = task
    if kind == "F" and not problem.last(s) and problem.remote(s, s + 1):
        return s + 1
    if kind in ("B", "BW") and not problem.first(s) and problem.remote(s, s - 1):
        return s - 1
    return None


def arrivals(problem: Problem, orders: Orders, ends: Times) -> Times:
    """When each result that travels is there: a link serves one at a time, in its sender's order."""
    there: Times = {}
    for order in orders:
        free: dict[int, int] = {}
        for step in order:
            for task in step:
                receiver = target(problem, task)
                if receiver is None:
                    continue
                boundary, device = min(task[1], receiver), problem.stages[receiver].device
                leaves = ends[task]
                if problem.contended:
                    leaves = max(leaves, free.get(device, 0)) + problem.transfer[boundary]
                    free[device] = leaves
                there[task] = leaves + problem.hop[boundary]
    return there


def timed(
    problem: Problem, orders: Orders, not_before: dict[int, int] | None = None, scale: int = 1
) -> tuple[Times, Times] | None:
    """Earliest starts and ends by repetition; None when the orders wait for each other in a circle.

    ``not_before`` holds first starts of devices, in ``scale``-ths of the problem's time unit.
    """
    steps = [step for order in orders for step in order]
    if not can_run(problem, orders):
        return None
    scaled = replace(
        problem,
        hop=tuple(scale * hop for hop in problem.hop),
        transfer=tuple(scale * transfer for transfer in problem.transfer),
    )
    starts = {task: 0 for step in steps for task in step}
    while True:
        ends = {task: starts[task] + scale * length(problem, step) for step in steps for task in step}
        there = arrivals(scaled, orders, ends)
        new: Times = {}
        for device, order in enumerate(orders):
            free = (not_before or {}).get(device, 0)
            for step in order:
                start = free
                for task in step:
                    for before in inputs(problem, task, starts):
                        away = problem.remote(before[1], task[1])
                        start = max(start, there[before] if away else ends[before])
                new.update(dict.fromkeys(step, start))
                free = start + scale * length(problem, step)
        if new == starts:
            return starts, ends
        starts = new


def can_run(problem: Problem, orders: Orders) -> bool:
    """Whether the programs come to their ends, one step after the other."""
    present = {task for order in orders for step in order for task in step}
    done: set[Task] = set()
    places = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            while places[device] < len(order) and all(
                done.issuperset(inputs(problem, task, present)) for task in order[places[device]]
            ):
                done.update(order[places[device]])
                places[device] += 1
                moved = True
    return done == present


def within(problem: Problem, orders: Orders, span: int, means: int) -> bool:
    """Whether every device's window can be at most ``span`` (in ``means``-ths): late devices begin later."""
    first = {device: 0 for device, order in enumerate(orders) if order}
    for _ in range(len(first) + 1):  # longest paths over the devices; one round more if there is no circle
        times = timed(problem, orders, first, means)
        if times is None:
            return False
        starts, ends = times
        needed = {
            device: max(starts[orders[device][0][0]], ends[orders[device][-1][0]] - span) for device in first
        }
        if needed == first:
            return True
        first = needed
    return False


def least_span(problem: Problem, orders: Orders, means: int) -> int | None:
    """Least span of given orders in ``means``-ths of the time unit; None when they deadlock."""
    times = timed(problem, orders)
    if times is None:
        return None
    low, high = -1, means * max(times[1].values())
    while high - low > 1:
        middle = (low + high) // 2
        if within(problem, orders, middle, means):
            high = middle
        else:
            low = middle
    return high
