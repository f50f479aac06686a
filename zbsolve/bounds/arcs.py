"""Which task of a step starts how long after which: every arc that holds in every canonical schedule.

The one place that says so, for longest paths (:mod:`zbsolve.bounds.windows`,
:mod:`zbsolve.bounds.refutation`) and the exact models: dependencies as the graph has them
(:func:`zbsolve.model.graph.alternatives`), micro-batches in order, what memory forces, lags proven elsewhere.

Micro-batches are alike, so an arc is a template: it stands for one pair of tasks for every micro-batch j and
the one ``distance`` before it. Each reader takes it in its own terms (longest paths, clock steps, model
units), and may take fewer: arcs only ever exclude.

Canonical order is proven in :mod:`zbsolve.bounds.catalogue`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from zbsolve.bounds.waits import Lag, memory_waits, single_chain
from zbsolve.model.graph import Task, needs
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import BACKWARDS, BW, TABLE, B, F, R, TaskKind, W
from zbsolve.model.recompute import instant_recomputation


class Reason(Enum):
    """Why an arc holds."""

    DEPENDENCY = "dependency"
    ORDER = "micro-batch order"
    MEMORY = "memory"
    LAG = "proven lag"


class Job(NamedTuple):
    """What every micro-batch runs once: a kind of task on a stage."""

    kind: TaskKind
    stage: int


class Arc(NamedTuple):
    """``after`` of micro-batch j starts no earlier than ``lag`` after ``before`` of j - ``distance`` ends.

    Of :attr:`Reason.LAG`: after it starts. Void for micro-batches that do not exist, and where a schedule
    has no such task.
    """

    before: Job
    after: Job
    distance: int
    lag: float
    reason: Reason

    def between_starts(self, length_before: float) -> float:
        """Least time from the start of ``before`` to that of ``after``, given the length of the former."""
        return self.lag if self.reason is Reason.LAG else length_before + self.lag

    def between_ends(self, length_before: float, length_after: float) -> float:
        """The same from end to end."""
        less = length_before if self.reason is Reason.LAG else 0.0
        return self.lag + (length_after - less)

    def tasks(self, num_microbatches: int) -> Iterator[tuple[Task, Task]]:
        """Every two tasks that it stands for."""
        for j in range(self.distance, num_microbatches):
            yield Task(*self.before, j - self.distance), Task(*self.after, j)


# A stage takes the micro-batches in order in each of these; a micro-batch has one task of a row at most.
_ROWS = ((F,), (R,), BACKWARDS, (W,))


def arcs(instance: Instance, lags: Iterable[Lag] = ()) -> Iterator[Arc]:
    """Every arc between the tasks that may be, stage by stage within each reason."""
    yield from dependencies(instance)
    yield from order_arcs(instance)
    yield from memory_arcs(instance)
    for lag in lags:
        if not lag.to_end:
            job = Job(F, lag.stage)
            yield Arc(job, job, lag.distance, lag.value, Reason.LAG)


def dependencies(instance: Instance) -> Iterator[Arc]:
    """What a task needs of its own micro-batch, with the hop between different devices."""
    for s in range(instance.num_stages):
        for row in _ROWS:
            for kind in _present(instance, s, row):
                for need in needs(instance, kind, s):
                    yield Arc(Job(need.kind, need.stage), Job(kind, s), 0, need.lag, Reason.DEPENDENCY)


def order_arcs(instance: Instance) -> Iterator[Arc]:
    """A stage's micro-batches in order: its F's, its R's, its backwards (B or BW), its W's."""
    for s in range(instance.num_stages):
        for row in _ROWS:
            present = _present(instance, s, row)
            for earlier in present:
                for later in present:
                    yield Arc(Job(earlier, s), Job(later, s), 1, 0.0, Reason.ORDER)


def memory_arcs(instance: Instance) -> Iterator[Arc]:
    """What the caps force (:func:`zbsolve.bounds.waits.memory_waits`).

    Its proof takes a device's tasks one after the other and its stages in one chain: nothing is said where
    there are pairs or several replicas. Where the R's are is open, and they count in no memory.
    """
    if not single_chain(instance):
        return
    for waiting, kind, stage, distance in memory_waits(instant_recomputation(instance)):
        for each in BACKWARDS if kind is B else (kind,):
            if TABLE[each].on(instance.stages[stage]):
                yield Arc(Job(each, stage), Job(F, waiting), distance, 0.0, Reason.MEMORY)


def pass_arcs(instance: Instance, lags: Iterable[Lag] = ()) -> Iterator[Arc]:
    """The same where each stage has three passes for every micro-batch: F, B for its backward, and W.

    B is B or BW, whichever the schedule has. W is what follows B: where the backward is fused, its rest or
    nothing at all, in any case after its B, and in order. An R is no pass of its own: it lies between its F
    and its backward, as a lag.
    """
    for arc in dict.fromkeys(_folded(instance, arc) for arc in arcs(instance, lags)):
        if arc is not None:
            yield arc


def _folded(instance: Instance, arc: Arc) -> Arc | None:
    """An arc between passes; None where it ends in an R, which none of them is."""
    before, after = (Job(B, job.stage) if job.kind is BW else job for job in (arc.before, arc.after))
    if after.kind is R:
        return None
    lag = arc.lag
    if before.kind is R:
        before, lag = Job(F, before.stage), lag + (TABLE[R].time(instance.stages[before.stage]) or 0.0)
    return Arc(before, after, arc.distance, lag, arc.reason)


def pass_order(instance: Instance) -> tuple[Job, ...]:
    """Every pass of one micro-batch, each behind all that it depends on: out to the last stage, and back."""
    stages = range(instance.num_stages)
    home = (Job(kind, s) for s in reversed(stages) for kind in (B, W))
    return (*(Job(F, s) for s in stages), *home)


def _present(instance: Instance, stage: int, row: tuple[TaskKind, ...]) -> list[TaskKind]:
    return [kind for kind in row if TABLE[kind].on(instance.stages[stage])]
