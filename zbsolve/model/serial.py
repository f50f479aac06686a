"""One micro-batch at a time: the least memory that a step needs, and the orders that need no more."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import chain

from zbsolve.errors import InfeasibleError
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import (
    BW,
    B,
    F,
    R,
    TaskKind,
    W,
)
from zbsolve.model.memory import ExactMemory


def serial_orders(instance: Instance) -> tuple[tuple[Task, ...], ...]:
    """One micro-batch at a time through the whole pipeline: the least memory, the longest step."""
    programs = [serial_program(instance, d)[1] for d in range(instance.num_devices)]
    return tuple(
        tuple(Task(kind, s, j) for j in range(instance.num_microbatches) for kind, s in program)
        for program in programs
    )


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
    exact = ExactMemory(instance, device)
    peak = exact.static
    program: list[tuple[TaskKind, int]] = []
    for replica in range(instance.replicas):
        stages = tuple(s for s in instance.stages_on(device) if s // instance.chain == replica)
        need, part = _serial_chain(instance, exact, stages)
        peak = max(peak, need)
        program += part
    return exact.amount(peak), tuple(program)


def _serial_chain(
    instance: Instance, exact: ExactMemory, stages: tuple[int, ...]
) -> tuple[int, list[tuple[TaskKind, int]]]:
    """:func:`serial_program` for a device's stages of one replica."""
    level = peak = exact.static
    head: list[tuple[TaskKind, int]] = []
    for s in stages:
        change = exact.effect(F, s)
        peak = max(peak, level + change.while_running)
        level += change.net
        head.append((F, s))

    State = tuple[int, tuple[int, ...]]
    Steps = tuple[tuple[TaskKind, int], ...]
    start: State = (len(stages), ())
    best: dict[State, int] = {start: peak}
    came_from: dict[State, tuple[State, Steps]] = {}
    queue: list[tuple[int, State]] = [(peak, start)]
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
            exact.static
            + sum(exact.whole(instance.stages[s].kept_by_forward) for s in stages[:remaining])
            + sum(exact.whole(instance.stages[s].mem_w) for s in pending)
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
                change = exact.effect(kind, s)
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
    # Digits enough that what is asked for also fits.
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
