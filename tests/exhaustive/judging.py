"""Whether a timed schedule keeps every rule: the oracle's own word, to compare the product's checker with."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from random import Random
from typing import NamedTuple

from tests.exhaustive.enumeration import Orders, Step, Task, arrivals, can_run, inputs, length, memory, timed
from tests.exhaustive.problem import Problem


class Placed(NamedTuple):
    """A task and when it runs, in the problem's time unit."""

    task: Task
    start: Fraction
    end: Fraction


Programs = tuple[tuple[Placed, ...], ...]


def placed(problem: Problem, orders: Orders) -> Programs | None:
    """Orders at their earliest starts; None when they deadlock."""
    times = timed(problem, orders)
    if times is None:
        return None
    starts, ends = times
    return tuple(
        tuple(Placed(t, Fraction(starts[t]), Fraction(ends[t])) for step in order for t in step)
        for order in orders
    )


def valid(problem: Problem, programs: Programs) -> bool:
    """Tasks complete and at home, lengths, one at a time, inputs there in time, memory."""
    if not _complete(problem, programs):
        return False
    orders = tuple(_steps(program) for program in programs)
    starts = {each.task: each.start for program in programs for each in program}
    ends = {each.task: each.end for program in programs for each in program}
    for device, order in enumerate(orders):
        for step in order:
            if len(step) == 2 and problem.pair_length(step[0][1], step[1][1]) is None:
                return False
            if any(ends[task] - starts[task] != length(problem, step) for task in step):
                return False
        if any(starts[later[0]] < ends[earlier[0]] for earlier, later in pairwise(order)):
            return False
        cap = problem.caps[device]
        if cap is not None and any(use > cap for use in memory(problem, order)):
            return False
    there = arrivals(problem, orders, ends)
    for task, start in starts.items():
        for before in inputs(problem, task, starts):
            if start < (there[before] if problem.remote(before[1], task[1]) else ends[before]):
                return False
    return can_run(problem, orders)


def _complete(problem: Problem, programs: Programs) -> bool:
    found = sorted((device, each.task) for device, program in enumerate(programs) for each in program)
    wanted = []
    present = {task for _, task in found}
    for s, stage in enumerate(problem.stages):
        for j in range(problem.microbatches):
            kinds = ["F", "BW"] if ("BW", s, j) in present and stage.fused is not None else ["F", "B", "W"]
            kinds += [] if stage.recompute is None else ["R"]
            wanted += [(stage.device, (kind, s, j)) for kind in kinds]
    if found != sorted(wanted):
        return False
    # In their sequence on the device: what memory they hold is said only of these.
    rank = {"F": 0, "R": 1, "B": 2, "BW": 2, "W": 3}
    done: dict[tuple[int, int], int] = {}
    for program in programs:
        for (kind, s, j), _, _ in program:
            if rank[kind] < done.get((s, j), -1):
                return False
            done[s, j] = rank[kind]
    return True


def _steps(program: tuple[Placed, ...]) -> tuple[Step, ...]:
    """An F and the BW next to it that share one interval are a pair."""
    steps: list[Step] = []
    taken = False
    for place, each in enumerate(program):
        if taken:
            taken = False
            continue
        following = program[place + 1] if place + 1 < len(program) else None
        if (
            following is not None
            and (each.task[0], following.task[0]) == ("F", "BW")
            and each[1:] == following[1:]
            and each.end > each.start
        ):
            steps.append((each.task, following.task))
            taken = True
        else:
            steps.append((each.task,))
    return tuple(steps)


def drawn(problem: Problem, draw: Random) -> Orders:
    """Random orders that can run, whatever memory they need."""
    tasks: set[Task] = set()
    for s, stage in enumerate(problem.stages):
        for j in range(problem.microbatches):
            fuse = stage.fused is not None and draw.random() < 0.6
            kinds = ["F"] + ([] if stage.recompute is None else ["R"]) + (["BW"] if fuse else ["B", "W"])
            tasks |= {(kind, s, j) for kind in kinds}
    orders: list[list[Step]] = [[] for _ in range(problem.devices)]
    done: set[Task] = set()
    eager = draw.random()  # F's first: many results are under way at once
    while done < tasks:
        ready = sorted(t for t in tasks - done if done.issuperset(inputs(problem, t, tasks)))
        first = [t for t in ready if t[0] == "F"]
        step: Step = (draw.choice(first if first and draw.random() < eager else ready),)
        if step[0][0] == "F" and draw.random() < 0.7:
            s = step[0][1]
            beside = [t for t in ready if t[0] == "BW" and problem.pair_length(s, t[1]) is not None]
            step = (*step, draw.choice(beside)) if beside else step
        orders[problem.stages[step[0][1]].device].append(step)
        done.update(step)
    return tuple(map(tuple, orders))


def mutated(problem: Problem, programs: Programs, draw: Random) -> Programs:
    """The schedule with one thing changed: it may be valid all the same."""
    lists = [list(program) for program in programs]
    device = draw.choice([d for d, program in enumerate(lists) if program])
    program = lists[device]
    place = draw.randrange(len(program))
    task, start, end = program[place]
    lengths = [each.end - each.start for each in program if each.end > each.start]
    by = draw.choice([-1, 1]) * draw.choice(lengths or [Fraction(1)]) / draw.choice([1, 2])
    match draw.choice(
        ["move", "move", "stretch", "drop", "double", "swap", "rename", "exchange", "all later"]
    ):
        case "move":
            program[place] = Placed(task, start + by, end + by)
        case "stretch":
            program[place] = Placed(task, start, end + by)
        case "drop":
            del program[place]
        case "double":
            program.insert(place, program[place])
        case "swap" if place:  # places in the program, and times so that one runs after the other
            before = program[place - 1]
            moved = Placed(task, before.start, before.start + (end - start))
            program[place - 1 : place + 1] = [
                moved,
                Placed(before.task, moved.end, moved.end + (before.end - before.start)),
            ]
        case "rename":
            program[place] = Placed((task[0], task[1], draw.randrange(problem.microbatches)), start, end)
        case "exchange":  # two tasks' places in the program and in time
            other = draw.randrange(len(program))
            one, two = program[place], program[other]
            program[place] = Placed(two.task, one.start, one.start + (two.end - two.start))
            program[other] = Placed(one.task, two.start, two.start + (one.end - one.start))
        case _:  # from here on
            program[place:] = [Placed(t, s + abs(by), e + abs(by)) for t, s, e in program[place:]]
    return tuple(map(tuple, lists))
