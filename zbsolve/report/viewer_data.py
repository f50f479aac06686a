"""What the page shows, as JSON data: lanes of boxes, memory, slack, causes, bubbles and figures.

Everything that needs thought is computed here; the page only draws. Tasks are columns of numbers in the
order of their devices' programs, and refer to each other by their place in those columns. Times are in the
instance's unit, to ten significant digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from zbsolve import __version__
from zbsolve.errors import InputError
from zbsolve.model.bubble import bubble_rate, busy_times
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import TABLE, TaskKind
from zbsolve.model.memory import memory_curve
from zbsolve.model.schedule import Schedule
from zbsolve.plan.plan import Plan
from zbsolve.report.explain import REASONS, Explanation, Reason, explain
from zbsolve.report.timeline import measured_schedule, measured_waits, memory_peak
from zbsolve.trace.trace import Trace

KINDS = tuple(TaskKind)


def page_data(lanes: Sequence[dict[str, Any]], title: str) -> dict[str, Any]:
    """Everything that a page needs: lanes that share one axis, and the words and colours of the legend.

    Raises
    ------
    InputError
        Lanes in different time units have no common axis.
    """
    units = {lane["timeUnit"] for lane in lanes}
    if len(units) > 1:
        raise InputError(f"time units {' and '.join(sorted(units))} have no common axis: use one for both")
    return {
        "version": __version__,
        "title": title,
        "kinds": [{"name": k.value, "colour": TABLE[k].colour, "meaning": TABLE[k].meaning} for k in KINDS],
        "reasons": [{"name": r.value, "meaning": REASONS[r]} for r in Reason],
        "lanes": list(lanes),
    }


def plan_lane(plan: Plan, name: str) -> dict[str, Any]:
    """The lane of a plan, with its certificate."""
    lane = schedule_lane(plan.instance, plan.schedule(), name, plan.objective)
    lane["figures"] |= {
        "status": plan.status,
        "lowerBound": _short(plan.lower_bound),
        "gap": plan.gap,
        "provedBy": plan.bound_proof.method,
        "proof": plan.bound_proof.statement,
        "foundBy": plan.solver.name,
    }
    return lane


def schedule_lane(instance: Instance, schedule: Schedule, name: str, objective: str) -> dict[str, Any]:
    """The lane of any valid schedule: boxes, memory, and what :func:`explain` says about them."""
    explanation = explain(instance, schedule, objective)
    lane = _boxes(instance, schedule, name)
    place = {task: k for k, task in enumerate(t.task for t in schedule)}
    lane["tasks"]["slack"] = [_short(explanation.slack[task]) for task in place]
    lane["tasks"]["cause"] = [_place(place, explanation.cause[task].task) for task in place]
    lane["critical"] = [place[task] for task in explanation.critical_path]
    lane["bubbles"] = _bubbles(explanation, place)
    lane["memory"] = _memory(instance, schedule)
    lane["devices"] = _devices(instance, schedule, explanation)
    lane["figures"] = {
        "objective": objective,
        "makespan": _short(schedule.makespan),
        "span": _short(schedule.span),
        "bubbleRateMakespan": bubble_rate(schedule, schedule.makespan),
        "bubbleRateSpan": bubble_rate(schedule, schedule.span),
    }
    return lane


def measured_lane(instance: Instance, trace: Trace) -> dict[str, Any]:
    """The lane of a trace's median step: boxes and waits in receives. What was measured is not explained."""
    step = trace.median_step
    lane = _boxes(instance, measured_schedule(instance, step), "measured")
    if trace.mode == "emulated":
        lane["name"] = "measured (emulated)"
    lane["measured"] = True
    lane["waits"] = [
        [wait.device, _short(wait.start), _short(wait.end)]
        for wait in measured_waits(step)
        if wait.end > wait.start
    ]
    lane["figures"] = {"makespan": _short(trace.makespan), "steps": len(trace.steps), "mode": trace.mode}
    return lane


def _boxes(instance: Instance, schedule: Schedule, name: str) -> dict[str, Any]:
    timed = list(schedule)
    offsets = [0]
    for program in schedule.devices:
        offsets.append(offsets[-1] + len(program))
    return {
        "name": name,
        "instance": instance.name,
        "timeUnit": instance.time_unit,
        "memoryUnit": instance.memory_unit,
        "microbatches": instance.num_microbatches,
        "stages": [{"device": stage.device, "name": stage.name or ""} for stage in instance.stages],
        "chain": instance.chain,
        "offsets": offsets,
        "tasks": {
            "kind": [KINDS.index(t.task.kind) for t in timed],
            "stage": [t.task.stage for t in timed],
            "microbatch": [t.task.microbatch for t in timed],
            "start": [_short(t.start) for t in timed],
            "end": [_short(t.end) for t in timed],
        },
    }


def _bubbles(explanation: Explanation, place: dict[Task, int]) -> list[list[Any]]:
    """Per bubble: device, start, end, reason, the task that ends it, the task it waits for, sentence."""
    reasons = list(Reason)
    return [
        [
            bubble.device,
            _short(bubble.start),
            _short(bubble.end),
            reasons.index(bubble.reason),
            _place(place, bubble.following),
            _place(place, bubble.waits_for),
            bubble.sentence,
        ]
        for bubble in explanation.bubbles
    ]


def _memory(instance: Instance, schedule: Schedule) -> dict[str, Any]:
    """Per task the memory while it runs and after it; per device the level at the beginning and the cap.

    Both halves of an F&B pair have what the pair holds.
    """
    curves = [memory_curve(instance, d, order, schedule.pairs) for d, order in enumerate(schedule.orders)]
    during = {
        task: point.during
        for order, curve in zip(schedule.orders, curves, strict=True)
        for task, point in zip(order, curve, strict=True)
    }
    during |= {forward: max(during[forward], during[backward]) for forward, backward in schedule.pairs}
    caps = [instance.cap(d) for d in range(instance.num_devices)]
    return {
        "during": [_short(during[timed.task]) for timed in schedule],
        "after": [_short(point.after) for curve in curves for point in curve],
        "static": [_short(instance.static(d)) for d in range(instance.num_devices)],
        "cap": [cap if math.isfinite(cap) else None for cap in caps],
        "peak": [_short(memory_peak(instance, schedule, d)) for d in range(instance.num_devices)],
    }


def _devices(instance: Instance, schedule: Schedule, explanation: Explanation) -> list[dict[str, Any]]:
    """Busy time and idle time by reason of each device, over the makespan."""
    return [
        {
            "busy": _short(busy),
            "idle": {r.value: _short(t) for r, t in explanation.idle_by_reason(device).items()},
        }
        for device, busy in enumerate(busy_times(schedule))
    ]


def _place(place: dict[Task, int], task: Task | None) -> int:
    return -1 if task is None else place[task]


def _short(value: float) -> float:
    """Ten significant digits: below what any chart shows, and half the size of the file."""
    return float(f"{value:.10g}")
