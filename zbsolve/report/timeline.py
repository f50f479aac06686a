"""What every picture of a schedule shares: colours, labels, and a measured step as a schedule.

A measured step is drawn by the same code as a predicted one: :func:`measured_schedule` gives it the same
shape. Its waits in receives are kept apart (:func:`measured_waits`).
"""

from __future__ import annotations

from typing import NamedTuple

from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance, make_instance
from zbsolve.model.memory import memory_curve
from zbsolve.model.schedule import Schedule, TimedTask
from zbsolve.trace.compare import recalibrate
from zbsolve.trace.trace import Step, Trace


class Wait(NamedTuple):
    """Time that a device was blocked in a receive."""

    device: int
    start: float
    end: float


def measured_schedule(instance: Instance, step: Step) -> Schedule:
    """The ops of a measured step as a schedule that starts at 0."""
    zero = _first_start(step)
    devices: list[list[TimedTask]] = [[] for _ in range(instance.num_devices)]
    for event in sorted(step.events, key=lambda event: (event.start, event.end)):
        devices[event.device].append(TimedTask(event.task, event.start - zero, event.end - zero))
    return Schedule(tuple(map(tuple, devices)))


def measured_waits(step: Step) -> tuple[Wait, ...]:
    """The receive waits of a measured step, on the clock of :func:`measured_schedule`."""
    zero = _first_start(step)
    return tuple(
        Wait(event.device, max(0.0, event.start - event.wait - zero), event.start - zero)
        for event in step.events
        if event.wait > 0 and event.start > zero
    )


def instance_of_trace(trace: Trace) -> Instance:
    """What a trace alone tells of its instance: placement, and the median times. Memory is unknown (0)."""
    events = trace.steps[0].events
    home = {event.stage: event.device for event in events}
    zero = {"t_f": 0.0, "t_b": 0.0, "t_w": 0.0, "mem_b": 0.0, "mem_w": 0.0}
    bare = make_instance(
        name=trace.model,
        time_unit=trace.time_unit,
        memory_unit=trace.memory_unit,
        num_devices=max(home.values(), default=0) + 1,
        num_microbatches=max((event.microbatch for event in events), default=0) + 1,
        stages=[{"device": home.get(s, 0), **zero} for s in range(max(home, default=0) + 1)],
    )
    return recalibrate(bare, trace)


def _first_start(step: Step) -> float:
    return min((event.start for event in step.events), default=0.0)


def time_range(*schedules: Schedule) -> tuple[float, float]:
    """First start and last end over all given schedules; (0, 1) when nothing runs."""
    timed = [timed for schedule in schedules for timed in schedule]
    if not timed:
        return 0.0, 1.0
    first, last = min(t.start for t in timed), max(t.end for t in timed)
    return first, last if last > first else first + 1.0


def label(instance: Instance, task: Task) -> str:
    """``F3``: kind and micro-batch; with the stage before it (``F2.3``) where a device holds several."""
    if instance.num_stages == instance.num_devices:
        return f"{task.kind}{task.microbatch}"
    return str(task)


def drawn(instance: Instance, schedule: Schedule) -> Schedule:
    """The schedule with F&B pairs side by side: F first, each in proportion to its own length.

    The two of a pair share one interval, and one box would hide the other.
    """
    if not schedule.pairs:
        return schedule
    share: dict[Task, tuple[float, float]] = {}
    for forward, backward in schedule.pairs:
        stage = instance.stages[forward.stage]
        length = stage.t_f + (instance.stages[backward.stage].t_bw or 0.0)
        part = stage.t_f / length if length else 0.5
        share[forward], share[backward] = (0.0, part), (part, 1.0)

    def placed(timed: TimedTask) -> TimedTask:
        if timed.task not in share:
            return timed
        begin, end = (timed.start + at * (timed.end - timed.start) for at in share[timed.task])
        return TimedTask(timed.task, begin, end)

    return Schedule(tuple(tuple(map(placed, program)) for program in schedule.devices))


class MemoryBox(NamedTuple):
    """A stretch in which a device's memory is level, and what it is before and after."""

    start: float
    end: float
    before: float
    during: float
    after: float


def memory_boxes(instance: Instance, schedule: Schedule, device: int) -> list[MemoryBox]:
    """In-flight memory of a device: one entry a task, and one an F&B pair, which holds what both need."""
    boxes: list[MemoryBox] = []
    program = schedule.devices[device]
    curve = memory_curve(instance, device, schedule.orders[device], schedule.pairs)
    for place, ((task, start, end), point) in enumerate(zip(program, curve, strict=True)):
        if place and (program[place - 1].task, task) in schedule.pairs:
            first = boxes.pop()
            boxes.append(first._replace(during=max(first.during, point.during), after=point.after))
        else:
            boxes.append(MemoryBox(start, end, *point))
    return boxes


def memory_peak(instance: Instance, schedule: Schedule, device: int) -> float:
    """Highest memory of a device; its static memory where it runs nothing."""
    boxes = memory_boxes(instance, schedule, device)
    return max((box.during for box in boxes), default=instance.static(device))


def memory_corners(instance: Instance, schedule: Schedule, device: int) -> tuple[list[float], list[float]]:
    """Times and levels of a device's memory curve, from the step's first start to its last end."""
    first, last = time_range(schedule)
    times, levels = [first], [instance.static(device)]
    for box in memory_boxes(instance, schedule, device):
        times += [box.start, box.start, box.end, box.end]
        levels += [box.before, box.during, box.during, box.after]
    return [*times, last], [*levels, levels[-1]]
