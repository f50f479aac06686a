"""Tasks and their dependencies, built from an Instance: pure data and queries.

What each kind of task is stands in :mod:`zbsolve.model.kinds`; here it meets an instance's stages: which
tasks a step consists of, how long each takes by itself, and which must end before which may start, with the
hop between different devices. How long an F&B pair takes is in
:meth:`zbsolve.model.instance.Instance.pair_duration`, when links are free in
:class:`zbsolve.model.simulator.Links`.

What holds beyond that in every schedule worth looking at (micro-batches in order, what memory forces) joins
these dependencies in :mod:`zbsolve.bounds.arcs`. Two places state them anew: the loops in machine code
(:mod:`zbsolve.search.list_scheduler` and the searches) in their own terms, and the judge
(:mod:`zbsolve.model.judge`) on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from zbsolve.model.instance import Instance
from zbsolve.model.kinds import TABLE, Direction, TaskKind, step_of


class Task(NamedTuple):
    """One pass of one micro-batch through one stage. Written ``F3.1``: kind, stage, micro-batch."""

    kind: TaskKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


class Edge(NamedTuple):
    """``after`` may start ``lag`` after ``before`` ends. Void when either task is not in the schedule."""

    before: Task
    after: Task
    lag: float


def duration(instance: Instance, kind: TaskKind, stage: int) -> float:
    """Duration of a task that runs by itself, in the instance's time unit."""
    time = TABLE[kind].time(instance.stages[stage])
    if time is None:
        raise ValueError(f"stage {stage} has no {TABLE[kind].field}: it runs no {kind}")
    return time


class Need(NamedTuple):
    """What a (kind, stage) waits for, of the same micro-batch: the end of another, plus a lag."""

    kind: TaskKind
    stage: int
    lag: float


def alternatives(instance: Instance, kind: TaskKind, stage: int) -> tuple[tuple[Need, ...], ...]:
    """Everything that a task waits for, equal for every micro-batch; of each, the ways a schedule may give
    it.

    A gradient comes from B or from BW of the next stage: a schedule has one of them.
    """
    found: list[tuple[Need, ...]] = []
    for given in TABLE[kind].inputs:
        if given.step and not instance.has_neighbour(stage, given.step):
            continue
        source = stage + given.step
        lag = instance.hop(min(stage, source)) if given.step else 0.0
        found.append(tuple(Need(k, source, lag) for k in _candidates(instance, given.kinds, source)))
    return tuple(found)


def needs(instance: Instance, kind: TaskKind, stage: int) -> tuple[Need, ...]:
    """All :func:`alternatives` in one row: those that a schedule does not have are void."""
    return tuple(chain.from_iterable(alternatives(instance, kind, stage)))


def _candidates(instance: Instance, kinds: tuple[TaskKind, ...], stage: int) -> Iterator[TaskKind]:
    """Which of these kinds a stage may have, up to the first that it has in any case."""
    for kind in kinds:
        row = TABLE[kind]
        if row.on(instance.stages[stage]):
            yield kind
            if not row.optional:
                return


def predecessors(instance: Instance, task: Task) -> Iterator[Edge]:
    """Dependencies of one task."""
    for kind, stage, lag in needs(instance, task.kind, task.stage):
        yield Edge(Task(kind, stage, task.microbatch), task, lag)


def receiver(instance: Instance, stage: int, direction: Direction) -> int | None:
    """The stage that a result of ``stage`` travels to; None at the end of the model."""
    step = step_of(direction)
    return stage + step if instance.has_neighbour(stage, step) else None


def kinds_of(instance: Instance, stage: int) -> tuple[TaskKind, ...]:
    """Task kinds that may appear on a stage."""
    return tuple(kind for kind, row in TABLE.items() if row.on(instance.stages[stage]))


@dataclass(frozen=True)
class TaskGraph:
    """All tasks of a step and their edges. Where a stage has ``t_bw``, BW stands beside B and W:
    a schedule runs either BW or both others, per stage and micro-batch."""

    instance: Instance

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """Every task that may appear, by stage, then micro-batch."""
        return tuple(
            Task(kind, stage, microbatch)
            for stage in range(self.instance.num_stages)
            for microbatch in range(self.instance.num_microbatches)
            for kind in self.kinds(stage)
        )

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Every dependency between tasks that may appear."""
        return tuple(edge for task in self.tasks for edge in predecessors(self.instance, task))

    def kinds(self, stage: int) -> tuple[TaskKind, ...]:
        """Task kinds that may appear on a stage."""
        return kinds_of(self.instance, stage)

    def duration(self, task: Task) -> float:
        """Duration of a task in the instance's time unit."""
        return duration(self.instance, task.kind, task.stage)

    def device(self, task: Task) -> int:
        """Device that runs a task."""
        return self.instance.stages[task.stage].device
