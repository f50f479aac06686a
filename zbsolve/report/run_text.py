"""What a run measured beside what was predicted, for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from zbsolve.plan.plan import Plan
from zbsolve.trace.compare import Comparison
from zbsolve.trace.trace import Trace

if TYPE_CHECKING:
    pass

from zbsolve.report.text import _amounts
from zbsolve.words import time_text


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
