"""Pictures: the Gantt chart with each device's in-flight memory against its cap, and a profile's stages.

Everything is to scale. Under each device's lane a band shows its memory over the same time axis; the
dashed line is the cap. With a trace, the measured lane lies under the predicted one, on one axis. Boxes
carry stage and micro-batch where they are wide enough. Devices are drawn by hand-placed rectangles, not one
artist a box, so that tens of thousands of tasks take seconds.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from zbsolve.errors import InputError
from zbsolve.files.atomic import write_atomically
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import TABLE, TaskKind
from zbsolve.model.schedule import Schedule
from zbsolve.plan.plan import Plan
from zbsolve.report.timeline import (
    Wait,
    drawn,
    label,
    measured_schedule,
    measured_waits,
    memory_corners,
    memory_peak,
    time_range,
)
from zbsolve.trace.trace import Trace

logger = logging.getLogger(__name__)

FORMATS = (".png", ".svg", ".pdf")

MEMORY_COLOUR = "#7A8BA6"
CAP_COLOUR = "#B22222"
WAIT_COLOUR = "#D9D9D9"

_POINTS_PER_INCH = 72
_GLYPH_WIDTH = 0.72  # of the font size: between the digits and the W of the default font


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of boxes a device: a name, its schedule, and its waits in receives."""

    name: str
    schedule: Schedule
    waits: tuple[Wait, ...] = ()


def save_plan_figure(path: str | Path, plan: Plan, trace: Trace | None = None) -> None:
    """Gantt chart and memory of a plan, with the median measured step when a trace is given."""
    predicted = plan.schedule()
    lanes = [Lane("predicted", drawn(plan.instance, predicted))]
    if trace is not None:
        lanes.append(_measured_lane(plan.instance, trace))
    unit = plan.instance.time_unit
    title = (
        f"{plan.instance.name}: makespan {plan.makespan:.6g} {unit}, span {plan.span:.6g} {unit}, "
        f"{plan.status}, gap {plan.gap:.2%} ({plan.objective})"
    )
    if trace is not None:
        title += f"\nmeasured makespan {trace.makespan:.6g} {unit}, median of {len(trace.steps)} steps"
        title += " (emulated)" if trace.mode == "emulated" else ""
        title += "; upper lanes predicted, lower lanes measured"
    save_figure(path, _gantt_figure(plan.instance, lanes, predicted, title))


def plan_picture(plan: Plan, suffix: str) -> bytes:
    """The picture of :func:`save_plan_figure` as bytes, for pages and notebooks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"plan{suffix}"
        save_plan_figure(path, plan)
        return path.read_bytes()


def save_trace_figure(path: str | Path, instance: Instance, trace: Trace) -> None:
    """Gantt chart of the median measured step alone."""
    title = f"{trace.model}: measured makespan {trace.makespan:.6g} {trace.time_unit} ({trace.mode})"
    save_figure(path, _gantt_figure(instance, [_measured_lane(instance, trace)], None, title))


def save_instance_figure(path: str | Path, instance: Instance) -> None:
    """Stacked bars of T_F, T_B and T_W per stage, and of T_R where any recomputes."""
    figure = Figure(figsize=(8, 1.2 + 0.35 * instance.num_stages), layout="constrained")
    axes = figure.subplots()
    rows = np.arange(instance.num_stages)
    left = np.zeros(instance.num_stages)
    recomputed = [stage.t_r or 0.0 for stage in instance.stages]
    for kind, times in (
        (TaskKind.F, [stage.t_f for stage in instance.stages]),
        *(((TaskKind.R, recomputed),) if instance.recomputes else ()),
        (TaskKind.B, [stage.t_b for stage in instance.stages]),
        (TaskKind.W, [stage.t_w for stage in instance.stages]),
    ):
        axes.barh(rows, times, left=left, color=TABLE[kind].colour, label=f"T_{kind}", height=0.7)
        left += np.array(times)
    axes.set_yticks(rows, [f"stage {s} (device {data.device})" for s, data in enumerate(instance.stages)])
    axes.invert_yaxis()
    axes.set_xlabel(f"time per micro-batch ({instance.time_unit})")
    axes.set_title(instance.name)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    save_figure(path, figure)


def _measured_lane(instance: Instance, trace: Trace) -> Lane:
    step = trace.median_step
    return Lane("measured", drawn(instance, measured_schedule(instance, step)), measured_waits(step))


def save_figure(path: str | Path, figure: Figure) -> None:
    """Write a figure in the format that its suffix names, whole or not at all; equal figures, equal bytes."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path}: unknown picture format: use {', '.join(FORMATS)}")
    # No date, and fixed element ids.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower(), {})
    with mpl.rc_context({"svg.hashsalt": "zbsolve", "svg.fonttype": "none"}):
        write_atomically(
            path,
            lambda temporary: figure.savefig(
                temporary, format=path.suffix.lower()[1:], dpi=150, metadata=metadata
            ),
        )
    logger.info("wrote %s", path)


def _gantt_figure(
    instance: Instance, lanes: Sequence[Lane], memory_of: Schedule | None, title: str
) -> Figure:
    p = instance.num_devices
    longest = max(len(order) for lane in lanes for order in lane.schedule.devices)
    lane_height, space = (0.42, 0.10) if p <= 8 else (0.28, 0.10) if p <= 32 else (0.14, 0.04)
    band = 0.0 if memory_of is None else 0.6 * lane_height
    row = len(lanes) * lane_height + band + space
    font = min(9.0, 0.62 * lane_height * _POINTS_PER_INCH)
    names = [_device_label(instance, d, memory_of) for d in range(p)]
    handles = _legend(instance, lanes, memory_of)

    # Laid out by hand, in inches: automatic layouts would let a long legend squeeze the chart.
    chart_width = float(np.clip(2 + 0.3 * longest, 7, 18))
    left = 0.2 + 0.085 * max(len(line) for name in names for line in name.split("\n"))
    legend_columns = max(1, min(len(handles), int((left + chart_width) / 2.2)))
    legend_rows = -(-len(handles) // legend_columns)
    below, above = 0.75 + 0.22 * legend_rows, 0.15 + 0.2 * len(title.split("\n"))
    size = (left + chart_width + 0.2, below + row * p + above)
    figure = Figure(figsize=size)
    axes = figure.add_axes((left / size[0], below / size[1], chart_width / size[0], row * p / size[1]))
    first, last = time_range(*(lane.schedule for lane in lanes))
    inches_per_time = chart_width / (last - first)

    for device in range(p):
        top = device * row
        for lane in lanes:
            _draw_lane(axes, instance, lane, device, (top, lane_height), font, inches_per_time)
            top += lane_height
    if memory_of is not None:
        _draw_memory(axes, instance, memory_of, [d * row + len(lanes) * lane_height for d in range(p)], band)
    axes.set_xlim(first, last)
    axes.set_ylim(row * p, 0)
    axes.set_yticks([d * row + (row - space) / 2 for d in range(p)], names, fontsize=max(7.0, font))
    axes.tick_params(axis="y", length=0)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel(f"time ({instance.time_unit})")
    axes.set_title(title, fontsize=10, loc="left")
    figure.legend(
        handles=handles, loc="lower center", ncols=legend_columns, frameon=False, fontsize=8, handlelength=1.6
    )
    return figure


def _device_label(instance: Instance, device: int, memory_of: Schedule | None) -> str:
    if memory_of is None:
        return f"device {device}"
    peak = memory_peak(instance, memory_of, device)
    cap = instance.cap(device)
    of_cap = f" of {cap:.4g}" if cap < float("inf") else ""
    text = f"peak {peak:.4g}{of_cap} {instance.memory_unit}"
    return f"device {device}\n{text}" if instance.num_devices <= 8 else f"{device}: {text}"


def _draw_lane(
    axes: Axes,
    instance: Instance,
    lane: Lane,
    device: int,
    place: tuple[float, float],
    font: float,
    inches_per_time: float,
) -> None:
    top, height = place
    bottom = top + height * 0.96
    waits = [_box(wait.start, wait.end, top, bottom) for wait in lane.waits if wait.device == device]
    if waits:
        axes.add_collection(
            PolyCollection(waits, facecolors=WAIT_COLOUR, edgecolors="#888888", linewidths=0.2, hatch="////")
        )
    for kind in TaskKind:
        boxes = [
            _box(start, end, top, bottom)
            for task, start, end in lane.schedule.devices[device]
            if task.kind is kind
        ]
        if boxes:
            # Borders would wash out boxes of a pixel or two.
            narrow = min(box[1][0] - box[0][0] for box in boxes) * inches_per_time < 0.05
            axes.add_collection(
                PolyCollection(
                    boxes,
                    facecolors=TABLE[kind].colour,
                    edgecolors="white",
                    linewidths=0.0 if narrow else 0.4,
                )
            )
    _write_labels(axes, instance, lane, device, (top, height), font, inches_per_time)


def _write_labels(
    axes: Axes,
    instance: Instance,
    lane: Lane,
    device: int,
    place: tuple[float, float],
    font: float,
    inches_per_time: float,
) -> None:
    """Full labels where the longest fits its kind's boxes, else micro-batches, else none: never a mixture."""
    chunk = {stage: index for index, stage in enumerate(instance.stages_on(device))}
    timed = lane.schedule.devices[device]
    for kind in TaskKind:
        boxes = [box for box in timed if box.task.kind is kind]
        if not boxes:
            continue
        room = float(np.median([box.end - box.start for box in boxes])) * inches_per_time
        candidates = (
            [label(instance, box.task) for box in boxes],
            [str(box.task.microbatch) for box in boxes],
        )
        texts = next((texts for texts in candidates if _width(texts, font) <= room), None)
        if texts is None:
            continue
        for (task, start, end), text in zip(boxes, texts, strict=True):
            if (end - start) * inches_per_time < _width([text], font):
                continue  # measured boxes of one kind differ in width
            axes.text(
                (start + end) / 2,
                place[0] + place[1] * 0.48,
                text,
                ha="center",
                va="center",
                fontsize=font,
                # Later chunks of a device are set apart by their writing: colour already says the kind.
                fontweight="bold" if chunk[task.stage] % 2 else "normal",
                clip_on=True,
            )


def _width(texts: Sequence[str], font: float) -> float:
    """Inches that the longest text and its margin take."""
    return (max(map(len, texts)) * _GLYPH_WIDTH + 0.3) * font / _POINTS_PER_INCH


def _box(start: float, end: float, top: float, bottom: float) -> list[tuple[float, float]]:
    return [(start, top), (end, top), (end, bottom), (start, bottom)]


def _draw_memory(
    axes: Axes, instance: Instance, schedule: Schedule, tops: Sequence[float], height: float
) -> None:
    """In-flight memory of each device, all to one scale; the cap is a dashed line."""
    curves = [memory_corners(instance, schedule, d) for d in range(instance.num_devices)]
    caps = [instance.cap(d) for d in range(instance.num_devices)]
    most = max(*(max(levels) for _, levels in curves), *(c for c in caps if c < float("inf")), 0.0) or 1.0
    first, last = time_range(schedule)
    for device, (times, heights) in enumerate(curves):
        floor = tops[device] + height * 0.95
        y = floor - 0.9 * height * np.array(heights) / most
        axes.fill_between(times, y, floor, color=MEMORY_COLOUR, linewidth=0, alpha=0.8)
        if caps[device] < float("inf"):
            level = floor - 0.9 * height * caps[device] / most
            axes.plot([first, last], [level, level], color=CAP_COLOUR, linestyle="--", linewidth=0.8)


def _legend(instance: Instance, lanes: Sequence[Lane], memory_of: Schedule | None) -> list[Patch | Line2D]:
    present = {timed.task.kind for lane in lanes for timed in lane.schedule}
    handles: list[Patch | Line2D] = [
        Patch(facecolor=TABLE[kind].colour, label=f"{kind} {TABLE[kind].meaning}")
        for kind in TaskKind
        if kind in present
    ]
    if any(lane.waits for lane in lanes):
        handles.append(Patch(facecolor=WAIT_COLOUR, hatch="////", label="waiting in a receive"))
    if memory_of is not None:
        handles.append(Patch(facecolor=MEMORY_COLOUR, label=f"in-flight memory ({instance.memory_unit})"))
        if instance.memory_cap is not None:
            handles.append(
                Line2D([], [], color=CAP_COLOUR, linestyle="--", linewidth=0.8, label="memory cap")
            )
    return handles
