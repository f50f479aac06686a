"""The judge of schedules: every rule of the model, in words and code of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from itertools import pairwise
from typing import NamedTuple

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
from zbsolve.model.schedule import Schedule, TimedTask
from zbsolve.model.tolerances import MEMORY_RTOL, TIME_RTOL


class Violation(NamedTuple):
    """One broken rule: its name, and a sentence with the place and the numbers."""

    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


def check(instance: Instance, schedule: Schedule) -> list[Violation]:
    """Every rule of the model that ``schedule`` breaks on ``instance``; empty when it is valid."""
    violations = list(_check_tasks(instance, schedule))
    if violations:  # Later rules would only repeat a missing or doubled task in other words.
        return violations
    tolerance = TIME_RTOL * schedule.makespan
    violations += _check_durations(instance, schedule, tolerance)
    violations += _check_one_at_a_time(schedule, tolerance)
    dependencies = list(_dependencies(instance, schedule))
    violations += _check_dependencies(dependencies, tolerance)
    if not violations:  # An order that cannot run shows in the times, unless those tasks have no length.
        violations += _check_order(dependencies, schedule)
    violations += _check_memory(instance, schedule)
    return violations


def _check_tasks(instance: Instance, schedule: Schedule) -> Iterator[Violation]:
    """Each stage and micro-batch has one F, R if it recomputes, and either B and W, or BW, all at home."""
    if len(schedule.devices) != instance.num_devices:
        yield Violation("devices", f"{len(schedule.devices)} programs for {instance.num_devices} devices")
        return
    seen: Counter[Task] = Counter()
    for device, program in enumerate(schedule.devices):
        for task, _, _ in program:
            in_range = (
                0 <= task.stage < instance.num_stages and 0 <= task.microbatch < instance.num_microbatches
            )
            if not in_range:
                yield Violation("tasks", f"device {device}: {task} is not a task of this instance")
                continue
            home = instance.stages[task.stage].device
            if home != device:
                yield Violation("placement", f"{task} is on device {device}, its stage is on device {home}")
            seen[task] += 1
    for task, count in seen.items():
        if count > 1:
            yield Violation("tasks", f"{task} appears {count} times")
    for stage in range(instance.num_stages):
        may_fuse = instance.stages[stage].t_bw is not None
        first = {F} if instance.stages[stage].t_r is None else {F, R}
        for microbatch in range(instance.num_microbatches):
            present = {kind for kind in TaskKind if seen[Task(kind, stage, microbatch)]}
            if present == first | {B, W} or (may_fuse and present == first | {BW}):
                continue
            if BW in present and not may_fuse:
                yield Violation("tasks", f"{Task(BW, stage, microbatch)}: stage {stage} has no t_bw")
            else:
                have = ", ".join(kind for kind in TaskKind if kind in present) or "nothing"
                yield Violation(
                    "tasks",
                    f"stage {stage} micro-batch {microbatch} has {have}: needs {_listed(*first, B, W)}"
                    + (f" or {_listed(*first, BW)}" if may_fuse else ""),
                )


def _listed(*kinds: TaskKind) -> str:
    return ", ".join(kind for kind in TaskKind if kind in kinds)


def _check_durations(instance: Instance, schedule: Schedule, tolerance: float) -> Iterator[Violation]:
    """Each task takes its own time, those of an F&B pair the time of the pair."""
    together: dict[Task, float] = {}
    for forward, backward in schedule.pairs:
        a, b = instance.stages[forward.stage], instance.stages[backward.stage]
        if a.t_fb is None or b.t_fb is None or b.t_bw is None or a.t_bw is None:
            yield Violation("pairs", f"{forward} and {backward} run at once, but their stages have no t_fb")
            return
        saved = min(a.t_f + a.t_bw - a.t_fb, b.t_f + b.t_bw - b.t_fb)
        for task in (forward, backward):
            if task in together:
                yield Violation("pairs", f"{task} is in two pairs")
            together[task] = a.t_f + b.t_bw - saved
    for task, start, end in schedule:
        (kind, s, j), stage = task, instance.stages[task.stage]
        alone = {F: stage.t_f, R: stage.t_r, B: stage.t_b, W: stage.t_w, BW: stage.t_bw}[kind]
        expected = together.get(task, alone)
        assert expected is not None  # _check_tasks refuses BW without t_bw
        if not abs(end - start - expected) <= tolerance:
            yield Violation(
                "duration", f"{kind}{s}.{j} runs from {start:g} to {end:g}, should take {expected:g}"
            )


def _check_one_at_a_time(schedule: Schedule, tolerance: float) -> Iterator[Violation]:
    pairs = schedule.pairs
    for device, program in enumerate(schedule.devices):
        for earlier, later in pairwise(program):
            if (earlier.task, later.task) in pairs:
                continue
            if not later.start >= earlier.end - tolerance:
                yield Violation(
                    "one at a time",
                    f"device {device}: {later.task} starts at {later.start:g} before {earlier.task} "
                    f"ends at {earlier.end:g}",
                )


def _dependencies(instance: Instance, schedule: Schedule) -> Iterator[tuple[TimedTask, TimedTask, float]]:
    """F downstream, B and BW upstream with hops between devices; each backward after its own F, or its R,
    which is after F; W after B.

    Each as (before, after, lag).
    """
    times = {timed.task: timed for timed in schedule}
    waits = _link_waits(instance, schedule)

    def backward(stage: int, microbatch: int) -> TimedTask:
        fused = times.get(Task(BW, stage, microbatch))
        return times[Task(B, stage, microbatch)] if fused is None else fused

    def lag(sender: TimedTask, a: int, b: int) -> float:
        if instance.stages[a].device == instance.stages[b].device:
            return 0.0
        return _at(instance.t_comm, a) + _at(instance.t_transfer, a) + waits.get(sender.task, 0.0)

    chain = instance.num_stages // instance.replicas
    for s in range(instance.num_stages):
        for j in range(instance.num_microbatches):
            own = times[Task(F, s, j)]
            if s % chain > 0:
                before = times[Task(F, s - 1, j)]
                yield before, own, lag(before, s - 1, s)
            if instance.stages[s].t_r is not None:
                recomputed = times[Task(R, s, j)]
                yield own, recomputed, 0.0
                own = recomputed
            if s % chain < chain - 1:
                later = backward(s + 1, j)
                yield later, backward(s, j), lag(later, s, s + 1)
            yield own, backward(s, j), 0.0
            if Task(W, s, j) in times:
                yield times[Task(B, s, j)], times[Task(W, s, j)], 0.0


def _at(value: float | tuple[float, ...] | None, boundary: int) -> float:
    """One number for all boundaries, one a boundary, or none."""
    return value[boundary] if isinstance(value, tuple) else value or 0.0


def _link_waits(instance: Instance, schedule: Schedule) -> dict[Task, float]:
    """How long each result waits for its link: one transfer at a time per directed pair of devices.

    Results take the link in the order of their device's program.
    """
    waits: dict[Task, float] = {}
    if instance.t_transfer is None:
        return waits
    chain = instance.num_stages // instance.replicas
    for device, program in enumerate(schedule.devices):
        free: dict[int, float] = {}
        for task, _, end in program:
            step = {F: 1, B: -1, BW: -1}.get(task.kind)
            if step is None or not 0 <= task.stage % chain + step < chain:
                continue
            target = instance.stages[task.stage + step].device
            if target == device:
                continue
            leaves = max(end, free.get(target, end))
            waits[task] = leaves - end
            free[target] = leaves + _at(instance.t_transfer, min(task.stage, task.stage + step))
    return waits


def _check_dependencies(
    dependencies: Sequence[tuple[TimedTask, TimedTask, float]], tolerance: float
) -> Iterator[Violation]:
    for before, after, lag in dependencies:
        if not after.start >= before.end + lag - tolerance:
            yield Violation(
                "dependency",
                f"{after.task} starts at {after.start:g} before {before.task} ends at {before.end:g}"
                + (f" plus hop {lag:g}" if lag else ""),
            )


def _check_order(
    dependencies: Sequence[tuple[TimedTask, TimedTask, float]], schedule: Schedule
) -> Iterator[Violation]:
    """The device orders can be run. Times alone do not say so of tasks without length at one instant."""
    following: dict[Task, list[Task]] = {timed.task: [] for timed in schedule}
    missing = dict.fromkeys(following, 0)
    links = [(before.task, after.task) for before, after, _ in dependencies]
    for program in schedule.devices:
        links += [(earlier.task, later.task) for earlier, later in pairwise(program)]
    for before, after in links:
        following[before].append(after)
        missing[after] += 1
    ready = [task for task, number in missing.items() if number == 0]
    while ready:
        for after in following[ready.pop()]:
            missing[after] -= 1
            if missing[after] == 0:
                ready.append(after)
    for device, program in enumerate(schedule.devices):
        stuck = next((timed.task for timed in program if missing[timed.task] > 0), None)
        if stuck is not None:
            yield Violation("order", f"device {device}: {stuck} waits for a task that waits for it")
            return


def _check_memory(instance: Instance, schedule: Schedule) -> Iterator[Violation]:
    """Sum what every (stage, micro-batch) holds at each task of the device, from the definition."""
    for device, program in enumerate(schedule.devices):
        cap = instance.cap(device)
        if cap == float("inf"):
            continue
        for position, use in enumerate(_memory_by_definition(instance, device, program, schedule.pairs)):
            if not use <= cap + MEMORY_RTOL * cap:
                yield Violation(
                    "memory",
                    f"device {device}: {use:.10g} {instance.memory_unit} during {program[position].task} "
                    f"is over the cap of {cap:.10g}",
                )
                break  # One report a device: the rest follows from the first.


def _memory_by_definition(
    instance: Instance, device: int, program: Sequence[TimedTask], pairs: Set[tuple[Task, Task]]
) -> Iterator[float]:
    """Memory while each task of a program runs: intervals [F, B], [B, W], growth from B on, transients.

    Where a stage recomputes, [F, R] and [R, B] in place of the first.
    """
    # Whole multiples of one power of two: what is taken and given back a thousand times leaves no rounding.
    held = [instance.stages[s] for s in instance.stages_on(device)]
    amounts = [instance.static(device)]
    for each in held:
        amounts += [each.mem_b, each.mem_w, each.mem_r, each.peak_f, each.peak_b, each.peak_w]
        amounts.append(each.peak_bw or 0.0)
    finest = max(amount.as_integer_ratio()[1] for amount in amounts)

    def whole(amount: float) -> int:
        numerator, denominator = amount.as_integer_ratio()
        return numerator * (finest // denominator)

    # Position of each task stands for time: one task at a time makes both orders the same.
    holds = [0] * (len(program) + 1)  # difference array over positions

    def hold(first: int, last: int, amount: float) -> None:
        holds[first] += whole(amount)
        holds[last + 1] -= whole(amount)

    at = {timed.task: position for position, timed in enumerate(program)}
    # A pair runs as one: what either of its tasks needs while it runs is held over both places.
    beside = {task: at[other] for pair in pairs if pair[0] in at for task, other in (pair, pair[::-1])}

    def transient(task: Task, amount: float) -> None:
        places = (at[task], beside.get(task, at[task]))
        hold(min(places), max(places), amount)

    for task, position in at.items():
        stage = instance.stages[task.stage]
        if task.kind is F:
            transient(task, stage.peak_f)
        elif task.kind is R:
            f = at[Task(F, task.stage, task.microbatch)]
            if f + 1 <= position:
                hold(f, position - 1, stage.mem_r)
        elif task.kind is B:
            w = at[Task(W, task.stage, task.microbatch)]
            f = at[Task(F if stage.t_r is None else R, task.stage, task.microbatch)]
            hold(position, position, stage.peak_b)
            hold(f, position, stage.mem_b)
            if position + 1 <= w:
                hold(position + 1, w, stage.mem_w)
            if stage.mem_w > stage.mem_b:
                hold(position, position, stage.mem_w)
                hold(position, position, -stage.mem_b)
        elif task.kind is W:
            hold(position, position, stage.peak_w)
        else:
            f = at[Task(F if stage.t_r is None else R, task.stage, task.microbatch)]
            fused_peak = max(stage.peak_b, stage.peak_w) if stage.peak_bw is None else stage.peak_bw
            hold(f, position, stage.mem_b)
            transient(task, fused_peak)
    level = whole(instance.static(device))
    for change in holds[:-1]:
        level += change
        yield level / finest
