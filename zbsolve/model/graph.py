"""Tasks and their dependencies, built from an Instance: pure data and queries.

Modelled here: which tasks a step consists of, how long each takes by itself, and which must end before which
may start, with the hop between different devices. What memory a task holds is in :mod:`zbsolve.model.memory`,
how long an F&B pair takes in :meth:`zbsolve.model.instance.Instance.pair_duration`, when links are free in
:class:`zbsolve.model.simulator.Links`.

Not everything reads these rules from here: the loops in machine code (:mod:`zbsolve.search.list_scheduler`
and the searches), the longest paths (:mod:`zbsolve.bounds.windows`, :mod:`zbsolve.bounds.refutation`) and
CP-SAT's models state them anew in their own terms, and the judge (:mod:`zbsolve.model.schedule`) does so on
purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from zbsolve.model.instance import Instance


class TaskKind(StrEnum):
    """F forward, R recomputation, B input-gradient backward, W weight-gradient backward, BW both fused."""

    F = "F"
    R = "R"
    B = "B"
    W = "W"
    BW = "BW"


F, R, B, W, BW = TaskKind.F, TaskKind.R, TaskKind.B, TaskKind.W, TaskKind.BW


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
    data = instance.stages[stage]
    if kind is F:
        return data.t_f
    if kind is R:
        if data.t_r is None:
            raise ValueError(f"stage {stage} has no t_r: it does not recompute")
        return data.t_r
    if kind is B:
        return data.t_b
    if kind is W:
        return data.t_w
    if data.t_bw is None:
        raise ValueError(f"stage {stage} has no t_bw: it cannot run a fused backward")
    return data.t_bw


class Need(NamedTuple):
    """What a (kind, stage) waits for, of the same micro-batch: the end of another, plus a lag."""

    kind: TaskKind
    stage: int
    lag: float


def needs(instance: Instance, kind: TaskKind, stage: int) -> tuple[Need, ...]:
    """Dependencies of a task, equal for every micro-batch.

    A backward may wait for B or for BW of the next stage, whichever exists.
    """
    if kind is F:
        return () if instance.is_first(stage) else (Need(F, stage - 1, instance.hop(stage - 1)),)
    if kind is W:
        return (Need(B, stage, 0.0),)
    if kind is R:
        return (Need(F, stage, 0.0),)
    own = Need(F if instance.stages[stage].t_r is None else R, stage, 0.0)
    if instance.is_last(stage):
        return (own,)
    hop = instance.hop(stage)
    return (own, *(Need(backward, stage + 1, hop) for backward in backward_kinds(instance, stage + 1)))


def predecessors(instance: Instance, task: Task) -> Iterator[Edge]:
    """Dependencies of one task."""
    for kind, stage, lag in needs(instance, task.kind, task.stage):
        yield Edge(Task(kind, stage, task.microbatch), task, lag)


def backward_kinds(instance: Instance, stage: int) -> tuple[TaskKind, ...]:
    """How a stage may compute its input gradient: B, and BW where ``t_bw`` is given."""
    return (B,) if instance.stages[stage].t_bw is None else (B, BW)


def kinds_of(instance: Instance, stage: int) -> tuple[TaskKind, ...]:
    """Task kinds that may appear on a stage."""
    recompute = () if instance.stages[stage].t_r is None else (R,)
    fused = () if instance.stages[stage].t_bw is None else (BW,)
    return (F, *recompute, B, W, *fused)


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
