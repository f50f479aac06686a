"""Reports for the terminal: the Gantt chart to scale, and tables. Builds rich objects; prints nothing.

The chart needs no colour to be read: each box begins with its label, is filled with its own letter, and
idle time is a dot. A box narrower than its label shows its kind alone. A column holds the task that fills
most of it; where many short tasks share a column, the small letter of the kind that takes most of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from zbsolve.baselines.comparison import ComparisonTable, cap_text
from zbsolve.model.instance import Instance
from zbsolve.partition.splits import imbalance, stage_loads
from zbsolve.plan.plan import Plan

if TYPE_CHECKING:
    from zbsolve.benchmark.catalogue import Entry
    from zbsolve.partition.estimate import Estimate

from zbsolve.words import time_text


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


def _amounts(values: Sequence[float]) -> str:
    return ", ".join(time_text(value) for value in values)
