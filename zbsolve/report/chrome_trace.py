"""Traces for Chrome's and Perfetto's viewers: predicted lanes, measured lanes, messages and memory.

One process for the prediction and one for the measurement, one thread a device; predicted messages are flow
arrows and predicted memory is a counter. The viewers count in microseconds: an unknown time unit is
written as if it were milliseconds, and the file says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zbsolve.files.atomic import write_text_atomically
from zbsolve.model.instance import Instance
from zbsolve.model.schedule import Schedule
from zbsolve.plan.lowering import order_messages
from zbsolve.plan.plan import Plan
from zbsolve.report.timeline import Wait, drawn, measured_schedule, measured_waits, memory_boxes
from zbsolve.trace.trace import Trace

MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0, "µs": 1.0, "ns": 1e-3}

PREDICTED, MEASURED = 0, 1

# Names from the viewers' own fixed palette.
_COLOUR_NAMES = {"F": "thread_state_running", "B": "thread_state_iowait", "W": "thread_state_runnable"}


def chrome_trace(plan: Plan, trace: Trace | None = None) -> dict[str, Any]:
    """The trace file's JSON data; with ``trace``, its median step beside the prediction."""
    instance = plan.instance
    scale = MICROSECONDS.get(instance.time_unit, 1e3)
    schedule = plan.schedule()
    events = _lane_events(instance, PREDICTED, "predicted", schedule, scale)
    events += _flow_events(instance, schedule, scale)
    events += _memory_events(instance, schedule, scale)
    if trace is not None:
        events += measured_events(instance, trace, scale)
    return _file(events, instance, scale, plan_digest=plan.digest())


def chrome_trace_of_measurement(instance: Instance, trace: Trace) -> dict[str, Any]:
    """The trace file's JSON data for the median measured step alone."""
    scale = MICROSECONDS.get(instance.time_unit, 1e3)
    return _file(measured_events(instance, trace, scale), instance, scale, plan_digest=trace.plan_digest)


def save_chrome_trace(path: str | Path, data: dict[str, Any]) -> None:
    """Write the file, whole or not at all."""
    write_text_atomically(path, json.dumps(data) + "\n")


def _file(events: list[dict[str, Any]], instance: Instance, scale: float, **extra: Any) -> dict[str, Any]:
    other = {
        "instance": instance.name,
        "time_unit": instance.time_unit,
        "microseconds_per_unit": scale,
        **extra,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def measured_events(instance: Instance, trace: Trace, scale: float) -> list[dict[str, Any]]:
    """Boxes of the median measured step, and its waits in receives."""
    step = trace.median_step
    name = "measured (emulated)" if trace.mode == "emulated" else "measured"
    events = _lane_events(instance, MEASURED, name, measured_schedule(instance, step), scale)
    return events + [_wait_event(wait, scale) for wait in measured_waits(step)]


def _wait_event(wait: Wait, scale: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": "wait in receive",
        "cat": "wait",
        "pid": MEASURED,
        "tid": wait.device,
        "ts": wait.start * scale,
        "dur": (wait.end - wait.start) * scale,
        "cname": "grey",
    }


def _lane_events(
    instance: Instance, pid: int, name: str, schedule: Schedule, scale: float
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
    ]
    for device, program in enumerate(drawn(instance, schedule).devices):
        arguments = {"pid": pid, "tid": device}
        events.append({"ph": "M", "name": "thread_name", **arguments, "args": {"name": f"device {device}"}})
        events.append({"ph": "M", "name": "thread_sort_index", **arguments, "args": {"sort_index": device}})
        for task, start, end in program:
            event = {
                "ph": "X",
                "name": str(task),
                "cat": str(task.kind),
                **arguments,
                "ts": start * scale,
                "dur": (end - start) * scale,
                "args": {
                    "stage": task.stage,
                    "microbatch": task.microbatch,
                    "stage name": instance.stages[task.stage].name or "",
                },
            }
            if task.kind in _COLOUR_NAMES:
                event["cname"] = _COLOUR_NAMES[task.kind]
            events.append(event)
    return events


def _flow_events(instance: Instance, schedule: Schedule, scale: float) -> list[dict[str, Any]]:
    """An arrow a message, from the middle of one box to that of another: the viewers bind arrows by time."""
    times = {timed.task: timed for timed in drawn(instance, schedule)}
    events: list[dict[str, Any]] = []
    for number, message in enumerate(order_messages(instance, schedule)):
        common = {"name": "message", "cat": "message", "pid": PREDICTED, "id": number}
        sent, used = times[message.producer], times[message.consumer]
        middle = (sent.start + sent.end) / 2
        events.append({"ph": "s", **common, "tid": message.source, "ts": middle * scale})
        begin = (used.start + used.end) / 2
        events.append({"ph": "f", "bp": "e", **common, "tid": message.target, "ts": begin * scale})
    return events


def _memory_events(instance: Instance, schedule: Schedule, scale: float) -> list[dict[str, Any]]:
    events = []
    for device in range(instance.num_devices):
        for box in memory_boxes(instance, schedule, device):
            for time, level in ((box.start, box.during), (box.end, box.after)):
                events.append(
                    {
                        "ph": "C",
                        "name": f"memory of device {device}",
                        "pid": PREDICTED,
                        "ts": time * scale,
                        "args": {instance.memory_unit: level},
                    }
                )
    return events
