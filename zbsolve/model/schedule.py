"""A schedule with its times, and the independent judge of every rule.

:func:`check` shares no code with the simulator, the heuristics or the formulations: it re-derives
each rule of the model from the instance, in time-interval form, and reports every violation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from zbsolve.model.graph import Task
from zbsolve.model.kinds import BW, F
from zbsolve.model.objective import is_span


class TimedTask(NamedTuple):
    """A task with its start and end, in the instance's time unit."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """Per device, its tasks in execution order with start and end times.

    The order is part of the schedule: it settles where a zero-length task lies among tasks that
    share its instant, and with that what memory it frees before which other task.
    """

    devices: tuple[tuple[TimedTask, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """First start to last end over all devices: the synchronous step."""
        timed = [program for program in self.devices if program]
        if not timed:
            return 0.0
        return max(max(t.end for t in d) for d in timed) - min(min(t.start for t in d) for d in timed)

    @cached_property
    def span(self) -> float:
        """Longest single device's window, first start to last end."""
        return max((max(t.end for t in d) - min(t.start for t in d) for d in self.devices if d), default=0.0)

    def cost(self, objective: str) -> float:
        """``makespan`` or ``span``, by name."""
        return self.span if is_span(objective) else self.makespan

    @cached_property
    def pairs(self) -> frozenset[tuple[Task, Task]]:
        """F&B pairs: an F and, next on the same device, a BW that share one interval."""
        return frozenset(
            (a.task, b.task)
            for program in self.devices
            for a, b in pairwise(program)
            if a.task.kind is F and b.task.kind is BW and a[1:] == b[1:] and a.end > a.start
        )

    @property
    def orders(self) -> tuple[tuple[Task, ...], ...]:
        """The tasks of each device in execution order, without times."""
        return tuple(tuple(timed.task for timed in device) for device in self.devices)

    def __iter__(self) -> Iterator[TimedTask]:
        for device in self.devices:
            yield from device
