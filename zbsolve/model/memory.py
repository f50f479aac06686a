"""What a device holds along its program, and what holds it.

What one task does to memory is in its kind's row (:mod:`zbsolve.model.kinds`). At one instant, what ends is
released before what starts acquires.

A device runs one task at a time, so its memory depends on the order of its tasks alone, not on times. Of an
F&B pair both run at once: both transients are held together.

Sums are exact (:class:`ExactMemory`) and rounded once, as the judge's own are: whatever the order in which
they were added up, what fits for one fits for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from zbsolve.model.graph import Task, kinds_of
from zbsolve.model.instance import Instance, Stage
from zbsolve.model.kinds import TABLE, B, MemoryEffect, TaskKind, W


def effect(stage: Stage, kind: TaskKind) -> MemoryEffect[float]:
    """The memory effect of one task of a stage, in the instance's unit."""
    return TABLE[kind].effect(stage, float)


class ExactMemory:
    """A device's memory in whole numbers of a unit that measures all its amounts: a power of two.

    Floats are such numbers, so their sums here have no rounding.

    Attributes
    ----------
    static : int
        What the device holds whatever the schedule.
    """

    def __init__(self, instance: Instance, device: int) -> None:
        self._stages = instance.stages
        amounts = [instance.static(device)]
        for stage in (instance.stages[s] for s in instance.stages_on(device)):
            amounts += (stage.mem_b, stage.mem_w, stage.kept_by_forward)
            amounts += (stage.peak_f, stage.peak_b, stage.peak_w, stage.peak_fused)
        self._parts = max(amount.as_integer_ratio()[1] for amount in amounts)
        self.static = self.whole(instance.static(device))

    def whole(self, amount: float) -> int:
        """An amount of the instance in whole numbers of the unit."""
        numerator, denominator = amount.as_integer_ratio()
        return numerator * (self._parts // denominator)

    def amount(self, whole: int) -> float:
        """A sum in the instance's unit, rounded once."""
        return whole / self._parts

    def effect(self, kind: TaskKind, stage: int) -> MemoryEffect[int]:
        """The memory effect of one task of a stage on the device."""
        return TABLE[kind].effect(self._stages[stage], self.whole)


class MemoryPoint(NamedTuple):
    """Memory of a device around one task: before it, highest while it runs, and after it."""

    before: float
    during: float
    after: float


Pairs = Set[tuple[Task, Task]]
NO_PAIRS: Pairs = frozenset()


def memory_curve(
    instance: Instance, device: int, order: Iterable[Task], pairs: Pairs = NO_PAIRS
) -> list[MemoryPoint]:
    """In-flight memory of a device, one point a task in program order, static memory included.

    ``pairs`` are the F&B pairs: (F, BW) each, one right after the other in ``order``.
    """
    exact = ExactMemory(instance, device)
    level, amount = exact.static, exact.amount
    curve: list[MemoryPoint] = []
    effects = {
        (kind, s): exact.effect(kind, s) for s in instance.stages_on(device) for kind in kinds_of(instance, s)
    }
    beside = 0  # transient of the task before, still held while the second of a pair runs
    previous: Task | None = None
    for task in order:
        change = effects[task.kind, task.stage]
        paired = previous is not None and (previous, task) in pairs
        during = level + change.while_running + (beside if paired else 0)
        curve.append(MemoryPoint(amount(level), amount(during), amount(level + change.net)))
        level += change.net
        beside, previous = change.transient, task
    return curve


def peak_memory(instance: Instance, device: int, order: Iterable[Task], pairs: Pairs = NO_PAIRS) -> float:
    """Highest memory of a device over its program (its static memory when it runs nothing)."""
    return max(
        (point.during for point in memory_curve(instance, device, order, pairs)),
        default=instance.static(device),
    )


class Breakdown(NamedTuple):
    """A device's memory at its peak, by what holds it; the four add up to :func:`peak_memory`.

    ``activations`` are held from F (or R) to the end of the backward, stage inputs kept for R among them;
    ``pending_w`` from B to the end of W; ``transient`` only while the task at the peak runs.
    """

    static: float
    activations: float
    pending_w: float
    transient: float


def peak_breakdown(
    instance: Instance, device: int, order: Sequence[Task], pairs: Pairs = NO_PAIRS
) -> Breakdown:
    """What a device holds when its memory is highest (at the first such task)."""
    curve = memory_curve(instance, device, order, pairs)
    if not curve:
        return Breakdown(instance.static(device), 0.0, 0.0, 0.0)
    place = max(range(len(curve)), key=lambda index: curve[index].during)
    pending = 0.0
    for kind, s, _ in order[:place]:
        pending += instance.stages[s].mem_w * ((kind is B) - (kind is W))
    kind, s, _ = order[place]
    if kind is B:
        pending += instance.stages[s].growth
    settled = curve[place].before + effect(instance.stages[s], kind).acquire
    static = instance.static(device)
    return Breakdown(static, settled - static - pending, pending, curve[place].during - settled)
