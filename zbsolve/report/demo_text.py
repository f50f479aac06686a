"""The demo's table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from zbsolve.plan.plan import Plan
from zbsolve.trace.compare import Comparison
from zbsolve.trace.trace import Trace

if TYPE_CHECKING:
    pass


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


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One schedule: what its plan predicted and what its run measured."""

    name: str
    plan: Plan
    trace: Trace
    comparison: Comparison
