"""A Gantt chart to scale for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import (
    BW,
    TABLE,
    TaskKind,
)
from zbsolve.model.schedule import Schedule, TimedTask
from zbsolve.report.timeline import drawn, label, time_range

if TYPE_CHECKING:
    pass


IDLE = "."


def gantt(instance: Instance, lanes: Sequence[tuple[str, Schedule]], width: int) -> list[Text]:
    """The chart's lines: per device one row for each of ``lanes`` (name, schedule), all on one axis.

    Parameters
    ----------
    width : int
        Columns of the terminal, names included.
    """
    lanes = [(name, drawn(instance, schedule)) for name, schedule in lanes]
    names = [
        [f"{d}" if len(lanes) == 1 else f"{d} {name}" for name, _ in lanes]
        for d in range(instance.num_devices)
    ]
    margin = max(len(name) for row in names for name in row) + 1
    columns = max(20, width - margin - 2)
    first, last = time_range(*(schedule for _, schedule in lanes))
    scale = (last - first) / columns
    lines = []
    for device in range(instance.num_devices):
        for name, (_, schedule) in zip(names[device], lanes, strict=True):
            line = Text(name.rjust(margin - 1) + " |")
            line.append_text(_row(instance, schedule, device, first, scale, columns))
            line.append("|")
            lines.append(line)
    unit = instance.time_unit
    legend = Text(" " * (margin + 1))
    for kind in _kinds(schedule for _, schedule in lanes):
        legend.append(f" {kind}{TABLE[kind].fill} ", style=f"black on {TABLE[kind].colour}")
        legend.append(f" {TABLE[kind].meaning}   ")
    legend.append(f"{IDLE} idle   one column = {scale:.4g} {unit}, whole axis = {last - first:.6g} {unit}")
    return [*lines, legend]


def _kinds(schedules: Iterable[Schedule]) -> list[TaskKind]:
    present = {timed.task.kind for schedule in schedules for timed in schedule}
    return [kind for kind in TaskKind if kind in present]


def _row(
    instance: Instance, schedule: Schedule, device: int, first: float, scale: float, columns: int
) -> Text:
    owners = _owners(schedule.devices[device], first, scale, columns)
    row = Text()
    column = 0
    while column < columns:
        owner = owners[column]
        stop = column
        while stop < columns and owners[stop] == owner:
            stop += 1
        length = stop - column
        if owner is None:
            row.append(IDLE * length, style="dim")
        elif isinstance(owner, TaskKind):
            row.append(TABLE[owner].fill * length, style=f"black on {TABLE[owner].colour}")
        else:
            kind, text = owner.kind, label(instance, owner)
            shown = text if len(text) <= length else (TABLE[BW].fill if kind is BW else str(kind))
            row.append(shown.ljust(length, TABLE[kind].fill), style=f"black on {TABLE[kind].colour}")
        column = stop
    return row


def _owners(
    program: Sequence[TimedTask], first: float, scale: float, columns: int
) -> list[Task | TaskKind | None]:
    """What each column shows: the task that fills most of it, else the kind that most of it is busy with."""
    owners: list[Task | TaskKind | None] = [None] * columns
    largest = [0.0] * columns
    busy: list[dict[TaskKind, float]] = [{} for _ in range(columns)]
    for task, start, end in program:
        begin = max(0, int((start - first) / scale))
        for column in range(begin, min(columns, int((end - first) / scale) + 1)):
            left = first + column * scale
            overlap = min(end, left + scale) - max(start, left)
            if overlap <= 0:
                continue
            shares = busy[column]
            shares[task.kind] = shares.get(task.kind, 0.0) + overlap
            if overlap > largest[column]:
                owners[column], largest[column] = task, overlap
    for column, shares in enumerate(busy):
        if sum(shares.values()) < 0.5 * scale:
            owners[column] = None
        elif largest[column] < 0.5 * scale:
            owners[column] = max(shares, key=lambda kind: shares[kind])
    return owners
