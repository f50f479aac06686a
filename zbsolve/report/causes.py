"""What fixes each task's start in a given schedule, how far each may slip, and the critical path.

Orders are taken as given. Causes are read off the times: a start is fixed by whatever ends (plus a hop)
right when it starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zbsolve.graph import Task, predecessors
from zbsolve.instance import Instance
from zbsolve.schedule import Schedule, TimedTask
from zbsolve.simulator import topological_order


class Cause(NamedTuple):
    """What fixed a task's start: the end of another task, plus a hop. ``task`` is None where nothing did."""

    task: Task | None
    hop: float


NOTHING = Cause(None, 0.0)


def window(schedule: Schedule) -> tuple[float, float]:
    """First start and last end; a drawing's axis (``time_range``) is never empty, this is what it is."""
    first = min((timed.start for timed in schedule), default=0.0)
    return first, first + schedule.makespan


def groups_of(schedule: Schedule, tolerance: float) -> Iterator[list[TimedTask]]:
    """Each device's program, cut where nothing overlaps: mostly one task a group, F&B pairs in one."""
    for program in schedule.devices:
        group: list[TimedTask] = []
        for timed in program:
            if group and timed.start < max(t.end for t in group) - tolerance:
                group.append(timed)
                continue
            if group:
                yield group
            group = [timed]
        if group:
            yield group


def previous_on_device(
    schedule: Schedule, groups: Sequence[Sequence[TimedTask]]
) -> dict[Task, Sequence[TimedTask]]:
    """The tasks that had to end before each: those that its device ran right before."""
    firsts = {program[0].task for program in schedule.devices if program}
    previous: dict[Task, Sequence[TimedTask]] = {}
    before: Sequence[TimedTask] = ()
    for group in groups:
        if group[0].task in firsts:
            before = ()
        previous.update((timed.task, before) for timed in group)
        before = group
    return previous


def _limits(
    instance: Instance,
    task: Task,
    times: Mapping[Task, TimedTask],
    previous: Mapping[Task, Sequence[TimedTask]],
) -> Iterator[tuple[float, Cause]]:
    """Earliest start by each constraint of a task, with its cause."""
    for before in previous[task]:
        yield before.end, Cause(before.task, 0.0)
    for edge in predecessors(instance, task):
        needed = times.get(edge.before)
        if needed is not None:
            yield needed.end + edge.lag, Cause(needed.task, edge.lag)


def causes_of(
    instance: Instance,
    times: Mapping[Task, TimedTask],
    previous: Mapping[Task, Sequence[TimedTask]],
    groups: Sequence[Sequence[TimedTask]],
    tolerance: float,
) -> dict[Task, Cause]:
    """What fixed each start: the latest of its limits that it met. Tasks that overlap share theirs."""
    causes: dict[Task, Cause] = {}
    for group in groups:
        limits = [limit for timed in group for limit in _limits(instance, timed.task, times, previous)]
        latest, cause = max(limits, key=lambda item: item[0], default=(-math.inf, NOTHING))
        if latest < group[0].start - tolerance:
            cause = NOTHING
        causes.update((timed.task, cause) for timed in group)
    return causes


def slack_of(
    instance: Instance,
    schedule: Schedule,
    times: Mapping[Task, TimedTask],
    previous: Mapping[Task, Sequence[TimedTask]],
    groups: Sequence[Sequence[TimedTask]],
    objective: str,
    tolerance: float,
) -> dict[Task, float]:
    """Latest ends, backwards over dependencies and device orders; tasks that overlap slip together."""
    last = window(schedule)[1]
    latest: dict[Task, float] = {}
    for program in schedule.devices:
        deadline = last if objective == "makespan" or not program else program[0].start + schedule.span
        latest.update((timed.task, deadline) for timed in program)
    together = [[timed.task for timed in group] for group in groups if len(group) > 1]
    order = [task for _, task in topological_order(instance, schedule.orders)]
    settled = False
    while not settled:
        for task in reversed(order):
            latest_start = latest[task] - (times[task].end - times[task].start)
            for limit, cause in _limits(instance, task, times, previous):
                assert cause.task is not None  # every limit names the task that sets it
                hop = limit - times[cause.task].end
                latest[cause.task] = min(latest[cause.task], latest_start - hop)
        settled = True
        for group in together:
            slack = min(latest[task] - times[task].end for task in group)
            for task in group:
                if latest[task] > times[task].end + slack + tolerance:
                    latest[task] = times[task].end + slack
                    settled = False
    return {task: max(0.0, end - times[task].end) for task, end in latest.items()}


def critical_path(schedule: Schedule, cause: Mapping[Task, Cause], objective: str) -> tuple[Task, ...]:
    """From the task whose end fixes the cost, back along causes."""
    programs = [program for program in schedule.devices if program]
    if not programs:
        return ()
    if objective == "span":
        program = max(programs, key=lambda program: program[-1].end - program[0].start)
    else:
        program = max(programs, key=lambda program: program[-1].end)
    task: Task | None = program[-1].task
    path: list[Task] = []
    seen: set[Task] = set()
    while task is not None and task not in seen:
        path.append(task)
        seen.add(task)
        task = cause[task].task
    return tuple(reversed(path))
