"""Why a schedule looks as it does: slack, what each task waited for, the critical path, and every bubble.

All of it follows from the times of the schedule, the dependencies and the order of each device. Orders are
taken as given: the slack of a task is what it may slip with every order kept, and a bubble's reason says
what was ready in it and why that did not run there. Whether another order would be better as a whole is
the certificate's question, not this module's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from zbsolve.model.graph import Task, predecessors
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import TaskKind
from zbsolve.model.memory import MemoryPoint, effect, memory_curve
from zbsolve.model.schedule import Schedule, TimedTask
from zbsolve.model.tolerances import time_tolerance
from zbsolve.report.causes import (
    Cause,
    causes_of,
    critical_path,
    groups_of,
    sent_times,
    slack_of,
    window,
)


class Reason(StrEnum):
    """Why a device is idle. Each bubble has exactly one."""

    FILL = "fill"
    INPUT = "input"
    MEMORY = "memory"
    LENGTH = "length"
    ORDER = "order"
    LATE = "late"
    DRAIN = "drain"


REASONS: dict[Reason, str] = {
    Reason.FILL: "nothing has reached the device yet",
    Reason.INPUT: "nothing was ready: the next task's input was still on its way",
    Reason.MEMORY: "a task that fits into the gap was ready, but not under the memory cap",
    Reason.LENGTH: "what was ready takes longer than the gap and would delay the next task",
    Reason.ORDER: "a ready task fits; the order runs it later",
    Reason.LATE: "held back on purpose: no input is missing",
    Reason.DRAIN: "the device has done all its tasks",
}


@dataclass(frozen=True, slots=True)
class Bubble:
    """One idle stretch of a device, in the instance's time unit.

    ``following`` is the task that ends it and ``waits_for`` the task whose result that one needs (None for a
    drain, and for a start that nothing holds). ``sentence`` says it all in words.
    """

    device: int
    start: float
    end: float
    reason: Reason
    following: Task | None
    waits_for: Task | None
    sentence: str

    @property
    def length(self) -> float:
        """Idle time."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Explanation:
    """Slack and cause of every task, the critical path in time order, and every bubble.

    ``slack``: how much later a task may end, all orders and all other first starts kept, without raising
    the cost. The critical path leads from a start that nothing holds to the end that fixes the cost.
    """

    slack: Mapping[Task, float]
    cause: Mapping[Task, Cause]
    critical_path: tuple[Task, ...]
    bubbles: tuple[Bubble, ...]

    def idle_by_reason(self, device: int) -> dict[Reason, float]:
        """Idle time of a device per reason, over the whole makespan; reasons without any are left out."""
        totals = dict.fromkeys(Reason, 0.0)
        for bubble in self.bubbles:
            if bubble.device == device:
                totals[bubble.reason] += bubble.length
        return {reason: total for reason, total in totals.items() if total > 0}


def explain(instance: Instance, schedule: Schedule, objective: str = "makespan") -> Explanation:
    """Explain a valid schedule.

    Parameters
    ----------
    objective : str
        ``makespan``: no task may end after the last end. ``span``: no device's window may become longer than
        the longest, first starts kept.
    """
    times = {timed.task: timed for timed in schedule}
    device_of = {timed.task: d for d, program in enumerate(schedule.devices) for timed in program}
    tolerance = time_tolerance(schedule.makespan)
    groups = list(groups_of(schedule, tolerance))
    cause = causes_of(instance, schedule, times, groups, tolerance)
    slack = slack_of(instance, schedule, times, groups, objective, tolerance)
    return Explanation(
        slack=slack,
        cause=cause,
        critical_path=critical_path(schedule, cause, objective),
        bubbles=tuple(_Bubbles(instance, schedule, times, cause, device_of, tolerance)),
    )


class _Bubbles:
    """Iterates over the bubbles of a schedule; holds what the sentences need."""

    def __init__(
        self,
        instance: Instance,
        schedule: Schedule,
        times: Mapping[Task, TimedTask],
        cause: Mapping[Task, Cause],
        device_of: Mapping[Task, int],
        tolerance: float,
    ) -> None:
        self.instance, self.schedule = instance, schedule
        self.times, self.cause, self.device_of = times, cause, device_of
        self.sent, self.tolerance = sent_times(instance, schedule), tolerance

    def __iter__(self) -> Iterator[Bubble]:
        first, last = window(self.schedule)
        for device, program in enumerate(self.schedule.devices):
            curve = memory_curve(self.instance, device, self.schedule.orders[device], self.schedule.pairs)
            upcoming = _Upcoming(program)
            free = first
            for position, timed in enumerate(program):
                if timed.start > free + self.tolerance:
                    yield self._before(device, program, curve, upcoming, position, free)
                free = max(free, timed.end)
                upcoming.advance(timed.task)
            if last > free + self.tolerance:
                yield self._drain(device, program, free, last)

    def _drain(self, device: int, program: Sequence[TimedTask], start: float, end: float) -> Bubble:
        done = f"device {device} has done all its tasks" if program else f"device {device} has no task"
        ending = max(self.schedule, key=lambda timed: timed.end)
        sentence = (
            f"{done}; the step ends {self._amount(end - start)} later with {ending.task} on device "
            f"{self.device_of[ending.task]}"
        )
        return Bubble(device, start, end, Reason.DRAIN, None, None, sentence)

    def _before(
        self,
        device: int,
        program: Sequence[TimedTask],
        curve: Sequence[MemoryPoint],
        upcoming: _Upcoming,
        position: int,
        start: float,
    ) -> Bubble:
        following = program[position]
        cause = self.cause[following.task]
        if cause.task is None:
            sentence = f"{following.task} could start earlier: nothing that it needs is missing"
            return Bubble(device, start, following.start, Reason.LATE, following.task, None, sentence)
        waiting = self._waiting(device, program, position, cause)
        if position == 0:
            sentence = f"nothing has reached device {device} yet: {waiting}"
            return Bubble(device, start, following.start, Reason.FILL, following.task, cause.task, sentence)
        reason, detail = self._alternatives(device, program, curve, upcoming, position, start)
        return Bubble(
            device, start, following.start, reason, following.task, cause.task, f"{waiting}; {detail}"
        )

    def _waiting(self, device: int, program: Sequence[TimedTask], position: int, cause: Cause) -> str:
        assert cause.task is not None  # a start that nothing holds is no wait
        first = program[position]
        mates = [t.task for t in program[position + 1 :][:1] if t.start < first.end - self.tolerance]
        who = f"{first.task} beside {mates[0]}" if mates else str(first.task)
        source = self.device_of[cause.task]
        end = self.times[cause.task].end
        place = "" if source == device else f" on device {source}"
        queue = f", then {self._amount(cause.queue)} for its link" if cause.queue > self.tolerance else ""
        hop = f", then the hop of {self._amount(cause.hop)}" if cause.hop > 0 else ""
        return f"{who} waits for {cause.task}{place}, which ends at {end:.6g}{queue}{hop}"

    def _alternatives(
        self,
        device: int,
        program: Sequence[TimedTask],
        curve: Sequence[MemoryPoint],
        upcoming: _Upcoming,
        position: int,
        start: float,
    ) -> tuple[Reason, str]:
        """What else was ready in the gap, and what kept it from running there.

        Of each kind and stage the next task stands for all later ones: those are ready no earlier.
        """
        end = program[position].start
        found: dict[Reason, str] = {}
        for place in upcoming.places():
            timed = program[place]
            if place <= position:
                continue
            ready = max(start, *self._arrivals(timed.task))
            if ready >= end - self.tolerance:
                continue
            length = timed.end - timed.start
            if ready + length > end + self.tolerance:
                found.setdefault(
                    Reason.LENGTH,
                    f"{timed.task} was ready at {ready:.6g} but takes {self._amount(length)}: it would "
                    f"delay {program[position].task} by {self._amount(ready + length - end)}",
                )
                continue
            need = self._peak_if_moved(device, program, curve, position, place)
            if self.instance.fits(device, need):
                found.setdefault(
                    Reason.ORDER, f"{timed.task} was ready at {ready:.6g} and fits; the order runs it later"
                )
            else:
                found.setdefault(
                    Reason.MEMORY,
                    f"{timed.task} was ready at {ready:.6g} and fits, but device {device} would hold "
                    f"{need:.6g} {self.instance.memory_unit} of {self.instance.cap(device):.6g}",
                )
        for reason in (Reason.ORDER, Reason.MEMORY, Reason.LENGTH):
            if reason in found:
                return reason, found[reason]
        return Reason.INPUT, f"device {device} has nothing else that is ready"

    def _arrivals(self, task: Task) -> Iterator[float]:
        """When each input of a task is there; the step's own beginning for one that needs none."""
        yield -math.inf
        for edge in predecessors(self.instance, task):
            needed = self.times.get(edge.before)
            if needed is not None:
                stays = needed.task.stage == task.stage
                yield (needed.end if stays else self.sent[needed.task]) + edge.lag

    def _peak_if_moved(
        self,
        device: int,
        program: Sequence[TimedTask],
        curve: Sequence[MemoryPoint],
        position: int,
        place: int,
    ) -> float:
        """Highest memory from the gap to the task's old place if it ran in the gap before ``position``."""
        task = program[place].task
        change = effect(self.instance.stages[task.stage], task.kind)
        peak = curve[position].before + change.while_running
        for point in curve[position:place]:
            peak = max(peak, point.during + change.net)
        return peak

    def _amount(self, time: float) -> str:
        return f"{time:.6g} {self.instance.time_unit}"


class _Upcoming:
    """For one device: where the next task of each kind and stage stands in its program."""

    def __init__(self, program: Sequence[TimedTask]) -> None:
        self._places: dict[tuple[TaskKind, int], list[int]] = {}
        for place in range(len(program) - 1, -1, -1):
            task = program[place].task
            self._places.setdefault((task.kind, task.stage), []).append(place)

    def advance(self, task: Task) -> None:
        """The task has run."""
        self._places[task.kind, task.stage].pop()

    def places(self) -> list[int]:
        """Places of the next tasks, earliest first."""
        return sorted(places[-1] for places in self._places.values() if places)
