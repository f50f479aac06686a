"""What a task does to its device's memory, and the least memory with which a step can run at all.

Model (design: "What a schedule means"): per stage and micro-batch, ``mem_b`` is held from the start of F
to the end of B, ``mem_w`` from the end of B to the end of W; where ``mem_w`` exceeds ``mem_b`` the growth
is charged from the start of B. ``peak_*`` is held only while that task runs. A fused BW never holds
``mem_w``. At one instant, what ends is released before what starts acquires.

A device runs one task at a time, so its memory depends on the order of its tasks alone, not on times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import NamedTuple

from zbsolve.errors import InfeasibleError
from zbsolve.graph import BW, B, F, Task, TaskKind, W
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
        return MemoryEffect(stage.mem_b, stage.peak_f, 0.0)
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


def memory_curve(instance: Instance, device: int, order: Iterable[Task]) -> list[MemoryPoint]:
    """In-flight memory of a device, one point a task in program order, static memory included."""
    level = instance.static(device)
    curve = []
    effects = {
        (kind, s): effect(instance.stages[s], kind) for s in instance.stages_on(device) for kind in TaskKind
    }
    for kind, stage, _ in order:
        change = effects[kind, stage]
        curve.append(MemoryPoint(level, level + change.while_running, level + change.net))
        level += change.net
    return curve


def peak_memory(instance: Instance, device: int, order: Iterable[Task]) -> float:
    """Highest memory of a device over its program (its static memory when it runs nothing)."""
    return max(
        (point.during for point in memory_curve(instance, device, order)), default=instance.static(device)
    )


def serial_program(instance: Instance, device: int) -> tuple[float, tuple[tuple[TaskKind, int], ...]]:
    """Least peak with which a device can take one micro-batch through its stages, and an order reaching it.

    Every F of one micro-batch on the device precedes its first B there (the last stage's B needs every F),
    and the B's go back in reverse stage order; free are only the places of the W's and the choice of
    BW. The least peak is a bottleneck shortest path over (stages still to go back, W's pending).
    No schedule needs less: it must carry its first micro-batch through the same steps, holding as much.

    Returns
    -------
    (float, tuple of (kind, stage))
        Peak in memory units, static memory included; the order of the device's tasks.
    """
    stages = instance.stages_on(device)
    level = instance.static(device)
    peak = level
    head: list[tuple[TaskKind, int]] = []
    for s in stages:
        change = effect(instance.stages[s], F)
        peak = max(peak, level + change.while_running)
        level += change.net
        head.append((F, s))

    State = tuple[int, tuple[int, ...]]
    start: State = (len(stages), ())
    best: dict[State, float] = {start: peak}
    came_from: dict[State, tuple[State, tuple[TaskKind, int]]] = {}
    queue: list[tuple[float, State]] = [(peak, start)]
    while queue:
        reached, state = heapq.heappop(queue)
        if reached > best[state]:
            continue
        remaining, pending = state
        if remaining == 0 and not pending:
            tail: list[tuple[TaskKind, int]] = []
            while state in came_from:
                state, step = came_from[state]
                tail.append(step)
            return reached, (*head, *reversed(tail))
        held = (
            instance.static(device)
            + sum(instance.stages[s].mem_b for s in stages[:remaining])
            + sum(instance.stages[s].mem_w for s in pending)
        )
        moves: list[tuple[State, TaskKind, int]] = [
            ((remaining, tuple(q for q in pending if q != s)), W, s) for s in pending
        ]
        if remaining:
            s = stages[remaining - 1]
            moves.append(((remaining - 1, (s, *pending)), B, s))
            if instance.stages[s].t_bw is not None:
                moves.append(((remaining - 1, pending), BW, s))
        for following, kind, s in moves:
            through = max(reached, held + effect(instance.stages[s], kind).while_running)
            if through < best.get(following, math.inf):
                best[following] = through
                came_from[following] = (state, (kind, s))
                heapq.heappush(queue, (through, following))
    raise AssertionError("every state has a move until nothing is left")


def require_feasible(instance: Instance) -> None:
    """Raise ``InfeasibleError`` naming the first device that cannot hold one micro-batch, and its need."""
    for device in range(instance.num_devices):
        need, _ = serial_program(instance, device)
        if not instance.fits(device, need):
            raise InfeasibleError(
                f"infeasible: device {device} needs {need:g} {instance.memory_unit} to hold one micro-batch, "
                f"has {instance.cap(device):g}: raise memory_cap there to at least {need:g}"
            )
