"""Text of an advice: the recommendation, its reasons, and what would change it."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from zbsolve.model.tolerances import OPTIMAL_GAP
from zbsolve.report.sweep_text import front_table
from zbsolve.sweep.advise import Advice
from zbsolve.sweep.ways import Candidate
from zbsolve.words import percent


def _way(candidate: Candidate) -> str:
    """How the devices are used, in words."""
    config = candidate.config
    chunks = {"linear": "", "loop": ", two chunks a device (loop)", "v": ", two chunks a device (V)"}
    pipeline = f"{config.p} pipeline stages{chunks[config.placement]}" if config.p > 1 else "no pipeline"
    replicas = f"{config.d} replicas" if config.d > 1 else "one replica"
    recompute = ", recomputing where memory asks for it" if config.recompute else ""
    return f"{pipeline}, {replicas}, {config.m} micro-batches of {config.microbatch_size} in each{recompute}"


def summary_lines(advice: Advice, time_unit: str, memory_unit: str) -> list[str]:
    """The recommendation and the next best."""
    best = advice.best.outcome
    gap = max(0.0, 1 - best.lower_bound / best.step) if best.step else 0.0
    split = ",".join(map(str, best.layers_per_stage))
    proven = "the best" if gap <= OPTIMAL_GAP else f"within {percent(gap)} of the best"
    lines = [
        f"recommended  {_way(advice.best)}",
        f"step         {best.step:.6g} {time_unit} ({best.per_sample:.5g} a sample), proven {proven} for "
        "these choices",
        f"layers       {split} per stage; at most {best.peak_memory:,.6g} {memory_unit} on a device",
    ]
    if advice.next_best is None:
        lines.append("next best    nothing else fits")
    else:
        slower = advice.next_best.outcome.per_sample / best.per_sample - 1
        word = "slower" if slower >= 0 else "faster, and less simple"
        lines.append(f"next best    {_way(advice.next_best)}: {percent(abs(slower))} {word}")
    return lines


def reason_table(advice: Advice) -> Table:
    """Each rule of thumb beside this model's figures."""
    table = Table("", "rule", "here")
    for reason in advice.reasons:
        table.add_row("+" if reason.speaks_for else "-", escape(reason.rule), escape(reason.figures))
    return table


def change_lines(advice: Advice) -> list[str]:
    """Circumstances and what would be best in them."""
    lines = []
    for change in advice.changes:
        if change.then is None:
            lines.append(change.circumstance)
        else:
            gain = f" ({percent(change.gain)} faster then)" if change.gain else ""
            lines.append(f"{change.circumstance}: {_way(change.then)}{gain}")
    return lines


def candidate_table(advice: Advice, time_unit: str, memory_unit: str) -> Table:
    """Every way that fits."""
    rows = [(c.config, c.outcome, 0.0) for c in advice.candidates]
    return front_table(rows, "ways that fit, the recommended first", time_unit, memory_unit)
