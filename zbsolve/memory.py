"""What a task does to its device's memory, and the least memory with which a step can run at all.

Model: per stage and micro-batch, ``mem_b`` is held from the start of F
to the end of B, ``mem_w`` from the end of B to the end of W; where ``mem_w`` exceeds ``mem_b`` the growth
is charged from the start of B. ``peak_*`` is held only while that task runs. A fused BW never holds
``mem_w``. Where a stage recomputes, its F acquires ``mem_r`` only and its R the rest of ``mem_b``. At one
instant, what ends is released before what starts acquires.

A device runs one task at a time, so its memory depends on the order of its tasks alone, not on times. Of an
F&B pair both run at once: both transients are held together.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence, Set
from itertools import chain
from typing import NamedTuple

from zbsolve.errors import InfeasibleError
from zbsolve.graph import BW, B, F, R, Task, TaskKind, W, kinds_of
from zbsolve.instance import Instance, Stage


class MemoryEffect(NamedTuple):
    """Memory a task acquires at its start, holds extra while it runs, and releases at its end."""

    acquire: float
    transient: float
    release: float

    @property
    def while_running(self) -> float:
        """Rise above the level before the task, while it runs."""
        return self.acquire + self.transient

    @property
    def net(self) -> float:
        """Change of the level once the task has ended."""
        return self.acquire - self.release


def effect(stage: Stage, kind: TaskKind) -> MemoryEffect:
    """The memory effect of one task of a stage."""
    if kind is F:
        return MemoryEffect(stage.kept_by_forward, stage.peak_f, 0.0)
    if kind is R:
        return MemoryEffect(stage.mem_b - stage.kept_by_forward, 0.0, 0.0)
    if kind is B:
        return MemoryEffect(stage.growth, stage.peak_b, max(0.0, stage.mem_b - stage.mem_w))
    if kind is W:
        return MemoryEffect(0.0, stage.peak_w, stage.mem_w)
    return MemoryEffect(0.0, stage.peak_fused, stage.mem_b)


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
    level = instance.static(device)
    curve: list[MemoryPoint] = []
    effects = {
        (kind, s): effect(instance.stages[s], kind)
        for s in instance.stages_on(device)
        for kind in kinds_of(instance, s)
    }
    beside = 0.0  # transient of the task before, still held while the second of a pair runs
    previous: Task | None = None
    for task in order:
        change = effects[task.kind, task.stage]
        paired = previous is not None and (previous, task) in pairs
        curve.append(
            MemoryPoint(level, level + change.while_running + (beside if paired else 0.0), level + change.net)
        )
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


def serial_program(instance: Instance, device: int) -> tuple[float, tuple[tuple[TaskKind, int], ...]]:
    """Least peak with which a device can take one micro-batch through its stages, and an order reaching it.

    Every F of one micro-batch on the device precedes its first B there (the last stage's B needs every F),
    and the B's go back in reverse stage order; free are only the places of the W's and the choice of
    BW. The least peak is a bottleneck shortest path over (stages still to go back, W's pending).
    No schedule needs less: it must carry its first micro-batch through the same steps, holding as much. (A
    recomputation right before its backward holds least.) With several replicas each has a first micro-batch
    of its own, which need not be there at once.

    Returns
    -------
    (float, tuple of (kind, stage))
        Peak in memory units, static memory included; the order of the device's tasks.
    """
    peak = instance.static(device)
    program: list[tuple[TaskKind, int]] = []
    for replica in range(instance.replicas):
        stages = tuple(s for s in instance.stages_on(device) if s // instance.chain == replica)
        need, part = _serial_chain(instance, device, stages)
        peak = max(peak, need)
        program += part
    return peak, tuple(program)


def _serial_chain(
    instance: Instance, device: int, stages: tuple[int, ...]
) -> tuple[float, list[tuple[TaskKind, int]]]:
    """:func:`serial_program` for a device's stages of one replica."""
    level = instance.static(device)
    peak = level
    head: list[tuple[TaskKind, int]] = []
    for s in stages:
        change = effect(instance.stages[s], F)
        peak = max(peak, level + change.while_running)
        level += change.net
        head.append((F, s))

    State = tuple[int, tuple[int, ...]]
    Steps = tuple[tuple[TaskKind, int], ...]
    start: State = (len(stages), ())
    best: dict[State, float] = {start: peak}
    came_from: dict[State, tuple[State, Steps]] = {}
    queue: list[tuple[float, State]] = [(peak, start)]
    while queue:
        reached, state = heapq.heappop(queue)
        if reached > best[state]:
            continue
        remaining, pending = state
        if remaining == 0 and not pending:
            tail: list[Steps] = []
            while state in came_from:
                state, steps = came_from[state]
                tail.append(steps)
            return reached, [*head, *chain.from_iterable(reversed(tail))]
        held = (
            instance.static(device)
            + sum(instance.stages[s].kept_by_forward for s in stages[:remaining])
            + sum(instance.stages[s].mem_w for s in pending)
        )
        moves: list[tuple[State, Steps]] = [
            ((remaining, tuple(q for q in pending if q != s)), ((W, s),)) for s in pending
        ]
        if remaining:
            s = stages[remaining - 1]
            first: Steps = () if instance.stages[s].t_r is None else ((R, s),)
            moves.append(((remaining - 1, (s, *pending)), (*first, (B, s))))
            if instance.stages[s].t_bw is not None:
                moves.append(((remaining - 1, pending), (*first, (BW, s))))
        for following, steps in moves:
            through, now = reached, held
            for kind, s in steps:
                change = effect(instance.stages[s], kind)
                through = max(through, now + change.while_running)
                now += change.net
            if through < best.get(following, math.inf):
                best[following] = through
                came_from[following] = (state, steps)
                heapq.heappush(queue, (through, following))
    raise AssertionError("every state has a move until nothing is left")


def require_feasible(instance: Instance) -> None:
    """Raise ``InfeasibleError`` naming every device that cannot hold one micro-batch, its need and cap."""
    short = shortage(instance, [serial_program(instance, d)[0] for d in range(instance.num_devices)])
    if short:
        raise InfeasibleError(
            f"infeasible: no room for one micro-batch: {short}: raise memory_cap there to what is needed"
        )


def shortage(instance: Instance, needs: Sequence[float]) -> str:
    """Devices that need more memory than their cap, with both figures; empty where all fit."""
    # Digits enough that what is asked for also fits (Instance.fits grants 1e-9).
    short: dict[tuple[str, str], list[int]] = {}
    for device, need in enumerate(needs):
        if not instance.fits(device, need):
            short.setdefault((f"{need:.10g}", f"{instance.cap(device):.10g}"), []).append(device)
    unit = instance.memory_unit
    return "; ".join(
        f"device {devices[0]} needs {need} {unit}, has {cap}"
        if len(devices) == 1
        else f"devices {_ranges(devices)} need {need} {unit} each, have {cap}"
        for (need, cap), devices in short.items()
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: 0-3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
