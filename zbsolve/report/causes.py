"""What fixes each task's start in a given schedule, how far each may slip, and the critical path.

Orders are taken as given. Causes are read off the times: a start is fixed by whatever ends (plus a hop)
right when it starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from zbsolve.model.graph import Task, predecessors
from zbsolve.model.instance import Instance
from zbsolve.model.schedule import Schedule, TimedTask
from zbsolve.model.simulator import Links, topological_order
from zbsolve.plan.lowering import Message, order_messages


class Cause(NamedTuple):
    """What fixed a task's start: the end of another task, the wait of its result for a link, and a hop.

    ``task`` is None where nothing did.
    """

    task: Task | None
    hop: float
    queue: float


NOTHING = Cause(None, 0.0, 0.0)


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


def sent_times(instance: Instance, schedule: Schedule) -> dict[Task, float]:
    """When each task's result leaves its device: at its end, or once its link has sent what came before."""
    links = Links(instance)
    return {
        timed.task: links.leaves(timed.task, timed.end) for program in schedule.devices for timed in program
    }


def _limits(
    instance: Instance,
    task: Task,
    times: Mapping[Task, TimedTask],
    previous: Mapping[Task, Sequence[TimedTask]],
    sent: Mapping[Task, float],
) -> Iterator[tuple[float, Cause]]:
    """Earliest start by each constraint of a task, with its cause."""
    for before in previous[task]:
        yield before.end, Cause(before.task, 0.0, 0.0)
    for edge in predecessors(instance, task):
        needed = times.get(edge.before)
        if needed is not None:
            # What stays on its stage never waits for a link.
            leaves = needed.end if needed.task.stage == task.stage else sent[needed.task]
            yield leaves + edge.lag, Cause(needed.task, edge.lag, leaves - needed.end)


def causes_of(
    instance: Instance,
    schedule: Schedule,
    times: Mapping[Task, TimedTask],
    groups: Sequence[Sequence[TimedTask]],
    tolerance: float,
) -> dict[Task, Cause]:
    """What fixed each start: the latest of its limits that it met. Tasks that overlap share theirs."""
    previous, sent = previous_on_device(schedule, groups), sent_times(instance, schedule)
    causes: dict[Task, Cause] = {}
    for group in groups:
        limits = [limit for timed in group for limit in _limits(instance, timed.task, times, previous, sent)]
        latest, cause = max(limits, key=lambda item: item[0], default=(-math.inf, NOTHING))
        if latest < group[0].start - tolerance:
            cause = NOTHING
        causes.update((timed.task, cause) for timed in group)
    return causes


def slack_of(
    instance: Instance,
    schedule: Schedule,
    times: Mapping[Task, TimedTask],
    groups: Sequence[Sequence[TimedTask]],
    objective: str,
    tolerance: float,
) -> dict[Task, float]:
    """Latest ends, backwards over dependencies, links and device orders; tasks that overlap slip together."""
    last = window(schedule)[1]
    latest: dict[Task, float] = {}
    for program in schedule.devices:
        deadline = last if objective == "makespan" or not program else program[0].start + schedule.span
        latest.update((timed.task, deadline) for timed in program)
    previous, following = previous_on_device(schedule, groups), _next_on_link(instance, schedule)
    together = [[timed.task for timed in group] for group in groups if len(group) > 1]
    order = [task for _, task in topological_order(instance, schedule.orders, schedule.pairs)]
    settled = False
    while not settled:
        leave_by: dict[Task, float] = {}  # when a result must leave its device
        for task in reversed(order):
            must_leave = leave_by.get(task, math.inf)
            if task in following:
                after, occupied = following[task]
                must_leave = min(must_leave, leave_by[after] - occupied)
            leave_by[task] = must_leave
            latest[task] = min(latest[task], must_leave)
            latest_start = latest[task] - (times[task].end - times[task].start)
            for before in previous[task]:
                latest[before.task] = min(latest[before.task], latest_start)
            for edge in predecessors(instance, task):
                if edge.before in times:
                    bound = latest_start - edge.lag
                    if edge.before.stage == task.stage:
                        latest[edge.before] = min(latest[edge.before], bound)
                        continue
                    leave_by[edge.before] = min(leave_by.get(edge.before, math.inf), bound)
        settled = True
        for group in together:
            slack = min(latest[task] - times[task].end for task in group)
            for task in group:
                if latest[task] > times[task].end + slack + tolerance:
                    latest[task] = times[task].end + slack
                    settled = False
    return {task: max(0.0, end - times[task].end) for task, end in latest.items()}


def _next_on_link(instance: Instance, schedule: Schedule) -> dict[Task, tuple[Task, float]]:
    """Per result that occupies a link: the next one on that link, and for how long this one occupies it."""
    following: dict[Task, tuple[Task, float]] = {}
    if instance.t_transfer is None:
        return following
    for message, after in _pairs_on_links(instance, schedule):
        boundary = min(message.producer.stage, message.consumer.stage)
        following[message.producer] = (after.producer, instance.transfer(boundary))
    return following


def _pairs_on_links(instance: Instance, schedule: Schedule) -> Iterator[tuple[Message, Message]]:
    """Consecutive messages of each directed link, in the order in which they leave."""
    place = {timed.task: k for k, timed in enumerate(schedule)}
    by_link: dict[tuple[int, int], list[Message]] = {}
    for message in order_messages(instance, schedule):
        by_link.setdefault((message.source, message.target), []).append(message)
    for messages in by_link.values():
        messages.sort(key=lambda message: place[message.producer])
        yield from pairwise(messages)


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
