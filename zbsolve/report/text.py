"""Reports for the terminal: the Gantt chart to scale, and tables. Builds rich objects; prints nothing.

The chart needs no colour to be read: each box begins with its label, is filled with its own letter, and
idle time is a dot. A box narrower than its label shows its kind alone. A column holds the task that fills
most of it; where many short tasks share a column, the small letter of the kind that takes most of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from zbsolve.graph import BW, B, F, R, Task, TaskKind, W
from zbsolve.instance import Instance
from zbsolve.partition.splits import imbalance, stage_loads
from zbsolve.plan import Plan
from zbsolve.report.comparison import ComparisonTable, cap_text
from zbsolve.report.timeline import COLOURS, MEANINGS, drawn, label, time_range
from zbsolve.schedule import Schedule, TimedTask
from zbsolve.trace import Comparison, Trace

if TYPE_CHECKING:
    from zbsolve.catalogue import Entry
    from zbsolve.demo import DemoRow
    from zbsolve.estimate import Estimate

FILL: dict[TaskKind, str] = {F: "f", R: "r", B: "b", W: "w", BW: "#"}
IDLE = "."


def time_text(value: float) -> str:
    """A time or memory amount with digits enough to compare: three decimals, of small ones six digits."""
    if abs(value) >= 1e6:
        return f"{value:,.0f}"
    if abs(value) < 1:
        return f"{value:.6g}"
    return f"{value:,.3f}".rstrip("0").rstrip(".")


def percent(share: float) -> str:
    """A share in per cent to two decimals, to more where these would show a zero that it is not.

    What float64 rounding leaves counts as zero.
    """
    value = 100 * share
    if abs(value) < 1e-7:
        return "0.00%"
    decimals = 2 if abs(value) >= 0.005 else -math.floor(math.log10(abs(value)))
    return f"{value:.{decimals}f}%"


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
        legend.append(f" {kind}{FILL[kind]} ", style=f"black on {COLOURS[kind]}")
        legend.append(f" {MEANINGS[kind]}   ")
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
            row.append(FILL[owner] * length, style=f"black on {COLOURS[owner]}")
        else:
            kind, text = owner.kind, label(instance, owner)
            shown = text if len(text) <= length else (FILL[BW] if kind is BW else str(kind))
            row.append(shown.ljust(length, FILL[kind]), style=f"black on {COLOURS[kind]}")
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


def memory_table(plan: Plan) -> Table:
    """Peak memory of each device beside its cap."""
    instance = plan.instance
    table = Table(
        "device", "peak memory", "cap", "of the cap", title=f"memory ({escape(instance.memory_unit)})"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for device, peak in enumerate(plan.peak_memory):
        cap = instance.cap(device)
        used = f"{peak / cap:.1%}" if 0 < cap < float("inf") else "-"
        table.add_row(str(device), time_text(peak), cap_text(instance, device), used)
    return table


def certificate_table(plan: Plan) -> Table:
    """Costs, bound, gap, status, and who proved it."""
    unit = escape(plan.instance.time_unit)
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = [
        ("makespan", f"{time_text(plan.makespan)} {unit}" + _objective_mark(plan, "makespan")),
        ("span", f"{time_text(plan.span)} {unit}" + _objective_mark(plan, "span")),
        ("lower bound", f"{time_text(plan.lower_bound)} {unit} (on the {plan.objective})"),
        ("gap", f"{plan.gap:.3%}"),
        ("status", plan.status),
        ("proof", f"{escape(plan.bound_proof.method)}: {escape(plan.bound_proof.statement)}"),
        ("found by", _solver_text(plan)),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def _objective_mark(plan: Plan, name: str) -> str:
    return "  <- objective" if plan.objective == name else ""


def _solver_text(plan: Plan) -> str:
    solver = plan.solver
    seconds = "" if solver.seconds is None else f" in {solver.seconds:.1f} s"
    return escape(f"{solver.name} {solver.version}{seconds}, seed {solver.seed}")


def comparison_table(table: ComparisonTable, plan: Plan) -> Table:
    """The baselines beside the plan."""
    unit, memory = escape(plan.instance.time_unit), escape(plan.instance.memory_unit)
    shown = Table(
        "schedule",
        f"makespan ({unit})",
        f"span ({unit})",
        "bubble rate by makespan",
        "bubble rate by span",
        f"peak memory ({memory})",
        "fits cap",
        f"gain over 1F1B ({plan.objective})",
    )
    for column in shown.columns[1:]:
        column.justify = "right"
    for row in table.rows:
        shown.add_row(
            escape(row.label),
            time_text(row.makespan),
            time_text(row.span),
            f"{row.bubble_rate_makespan:.2%}",
            f"{row.bubble_rate_span:.2%}",
            time_text(row.peak_memory),
            "yes" if row.fits_cap else "no",
            row.gain_text,
        )
    return shown


def comparison_memory_table(table: ComparisonTable, plan: Plan) -> Table:
    """What the fullest device of each schedule holds at its peak, and what else a schedule costs."""
    shown = Table(
        "schedule",
        "fullest device",
        f"static ({escape(plan.instance.memory_unit)})",
        "activations",
        "pending W",
        "transient",
        "parameters",
        "hops",
        "t_bubble / t_ideal by makespan",
        "by span",
    )
    for column in shown.columns[1:]:
        column.justify = "right"
    for row in table.rows:
        device, peak = row.fullest
        shown.add_row(
            escape(row.label),
            str(device),
            *map(time_text, peak),
            f"{row.parameters}x",
            str(row.hops),
            *("-" if r is None else f"{r:.2%}" for r in (row.r_bubble_makespan, row.r_bubble_span)),
        )
    return shown


def catalogue_table(rows: Sequence[Entry]) -> Table:
    """The verified catalogue."""
    shown = Table("schedule", "bubble; peak", "formula = simulation", "example", "plan", "solver")
    for row in rows:
        bubble, peak, hops = row.example
        shown.add_row(
            row.name,
            f"{row.formula} ({row.cost_name}; {row.where})",
            f"{row.agreeing} of {row.cells}",
            f"bubble {bubble:g}, peak {peak:g}, {hops} hops",
            "valid" if row.violations == 0 else f"{row.violations} violations",
            f"{time_text(row.solved)} against {time_text(row.cost)} ({row.status})",
        )
    return shown


def estimate_table(result: Estimate) -> Table:
    """Stages of an estimated instance, and what each device holds whatever the schedule."""
    instance = result.instance
    shown = Table(
        "stage", "device", "holds", "T_F (ms)", "T_B", "T_W", "M_B (MiB)", "M_W", "static of device"
    )
    for index, stage in enumerate(instance.stages):
        shown.add_row(
            str(index),
            str(stage.device),
            escape(stage.name or ""),
            *map(time_text, (stage.t_f, stage.t_b, stage.t_w, stage.mem_b, stage.mem_w)),
            time_text(instance.static(stage.device)),
        )
    return shown


def steps_table(rows: Sequence[tuple[str, float, float]], steps: int, unit: str) -> Table:
    """(way of ending a step, time of ``steps`` steps, steady time of one)."""
    shown = Table("between steps", f"{steps} steps ({escape(unit)})", "one step in the long run", "saved")
    for column in shown.columns[1:]:
        column.justify = "right"
    reference = rows[0][2]
    for name, total, period in rows:
        saved = 1 - period / reference if reference else 0.0
        shown.add_row(name, time_text(total), time_text(period), f"{saved:.1%}")
    return shown


def instance_table(instance: Instance) -> Table:
    """What the profile says of each stage."""
    unit, memory = escape(instance.time_unit), escape(instance.memory_unit)
    shown = Table(
        "stage",
        "device",
        "name",
        f"T_F ({unit})",
        "T_B",
        "T_W",
        "T_BW",
        f"M_B ({memory})",
        "M_W",
        f"hop to next ({unit})",
        title=f"{escape(instance.name)}: {instance.num_devices} devices, {instance.num_stages} stages, "
        f"{instance.num_microbatches} micro-batches",
    )
    for index, stage in enumerate(instance.stages):
        is_last = index + 1 == instance.num_stages
        shown.add_row(
            str(index),
            str(stage.device),
            escape(stage.name or "-"),
            time_text(stage.t_f),
            time_text(stage.t_b),
            time_text(stage.t_w),
            "-" if stage.t_bw is None else time_text(stage.t_bw),
            time_text(stage.mem_b),
            time_text(stage.mem_w),
            "-" if is_last else time_text(instance.hop(index)),
        )
    return shown


def device_table(instance: Instance) -> Table:
    """Work, static memory and cap of each device; the share shows how unequal they are."""
    unit, memory = escape(instance.time_unit), escape(instance.memory_unit)
    shown = Table(
        "device", f"work per step ({unit})", "of the busiest", f"static ({memory})", f"cap ({memory})"
    )
    work = [instance.device_work(device) for device in range(instance.num_devices)]
    most = max(work) or 1.0
    for device, amount in enumerate(work):
        shown.add_row(
            str(device),
            time_text(amount),
            f"{amount / most:.1%}",
            time_text(instance.static(device)),
            cap_text(instance, device),
        )
    return shown


def partition_table(costs: Sequence[float], splits: Mapping[str, Sequence[int]], unit: str) -> Table:
    """Splits of layers side by side: layers and load per stage, the busiest, and how unbalanced."""
    table = Table(box=None, pad_edge=False)
    for heading in ("split", "layers per stage", f"load per stage ({unit})", "busiest", "imbalance"):
        table.add_column(heading)
    for name, split in splits.items():
        loads = stage_loads(costs, split)
        table.add_row(
            name,
            ",".join(map(str, split)),
            ", ".join(time_text(load) for load in loads),
            time_text(max(loads)),
            f"{imbalance(costs, split):.1%}",
        )
    return table


def prediction_table(comparison: Comparison, unit: str) -> Table:
    """Predicted and measured durations, op by op."""
    shown = Table(
        "op",
        "stage",
        "device",
        f"predicted ({escape(unit)})",
        "measured (median)",
        "fastest",
        "slowest",
        "ratio",
        title="op by op",
    )
    for row in comparison.ops:
        shown.add_row(
            row.op,
            row.stages,
            str(row.device),
            time_text(row.predicted),
            time_text(row.measured),
            time_text(row.fastest),
            time_text(row.slowest),
            f"{row.ratio:.3f}",
        )
    return shown


def lost_time_table(comparison: Comparison, unit: str) -> Table:
    """Where each device's step went: slow ops, waits in receives, and the rest of the bubble."""
    shown = Table(
        "device",
        f"busy predicted ({escape(unit)})",
        "busy measured",
        "slow ops",
        "bubble predicted",
        "bubble measured",
        "of it in receives",
        "receives beyond plan",
        title="where the time went",
    )
    for row in comparison.devices:
        shown.add_row(
            str(row.device),
            time_text(row.busy_predicted),
            time_text(row.busy),
            f"{row.slow:+.3f}",
            time_text(row.bubble_predicted),
            time_text(row.bubble),
            time_text(row.wait),
            time_text(row.excess_wait),
        )
    return shown


def run_lines(comparison: Comparison, trace: Trace, plan: Plan) -> list[str]:
    """The run in a few plain sentences: makespan, worst op, gradients, memory."""
    unit = plan.instance.time_unit
    emulated = " (emulated: stages sleep for their time)" if trace.mode == "emulated" else ""
    lines = [
        f"makespan: predicted {time_text(comparison.predicted_makespan)} {unit}, measured "
        f"{time_text(comparison.measured_makespan)} {unit} (median of {comparison.steps} steps), "
        f"ratio {comparison.ratio:.3f}{emulated}",
        f"worst op: {comparison.worst.where}: ratio {comparison.worst.ratio:.3f}",
        f"gradients: {gradients_text(trace)}",
    ]
    if trace.peak_memory is not None:
        lines.append(
            f"peak memory ({plan.instance.memory_unit}): predicted {_amounts(plan.peak_memory)}; "
            f"measured {_amounts(trace.peak_memory)}"
        )
    return lines


def gradients_text(trace: Trace) -> str:
    """The outcome of the gradient check in words."""
    check = trace.gradients
    if check is None or not check.checked:
        return "not checked"
    if check.bit_equal:
        return "bit-equal to the unpipelined model"
    verdict = "equal to the unpipelined model" if check.equal else "DIFFER from the unpipelined model"
    return (
        f"{verdict}: worst relative difference {check.worst_relative_difference:.3g} in {check.where} "
        f"(tolerance {check.tolerance:.3g})"
    )


def demo_table(rows: Sequence[DemoRow]) -> Table:
    """One row a run: prediction, measurement, and what was checked."""
    shown = Table(
        "schedule",
        "predicted makespan",
        "measured makespan",
        "ratio",
        "worst op",
        "gradients equal",
        "peak memory predicted",
        "peak memory measured",
        "gap",
    )
    for column in shown.columns[1:]:
        column.justify = "right"
    for row in rows:
        instance, comparison, trace = row.plan.instance, row.comparison, row.trace
        check = trace.gradients
        shown.add_row(
            escape(row.name),
            f"{comparison.predicted_makespan:.1f} {escape(instance.time_unit)}",
            f"{comparison.measured_makespan:.1f} {escape(instance.time_unit)}",
            f"{comparison.ratio:.3f}",
            f"{comparison.worst.op}{comparison.worst.stages}: {comparison.worst.ratio:.3f}",
            "-" if check is None else ("yes" if check.equal else "NO"),
            f"{max(row.plan.peak_memory):.4g} {escape(instance.memory_unit)}",
            "-" if trace.peak_memory is None else f"{max(trace.peak_memory):.4g}",
            f"{row.plan.gap:.2%}",
        )
    return shown


def _amounts(values: Sequence[float]) -> str:
    return ", ".join(time_text(value) for value in values)
