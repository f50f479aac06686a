"""Text tables of a sweep."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from zbsolve.sweep.run import Result
from zbsolve.words import percent, time_text


def front_table(rows: Sequence[Result], title: str, time_unit: str, memory_unit: str) -> Table:
    """Configurations of a Pareto front."""
    time_unit, memory_unit = escape(time_unit), escape(memory_unit)
    table = Table(
        "p",
        "d",
        "placement",
        "b",
        "m",
        "memory",
        "schedule",
        f"step ({time_unit})",
        "per sample",
        "gap",
        f"peak memory ({memory_unit})",
        "layers per stage",
        title=escape(title),
        title_justify="left",
    )
    for column in (*table.columns[:2], *table.columns[3:6], *table.columns[7:11]):
        column.justify = "right"
    for config, outcome, _ in rows:
        gap = max(0.0, 1 - outcome.lower_bound / outcome.step) if outcome.step else 0.0
        table.add_row(
            str(config.p),
            str(config.d),
            config.placement,
            str(config.microbatch_size),
            str(config.m),
            f"x{config.memory:g}",
            escape(config.schedule) + (" + recompute" if config.recompute else ""),
            time_text(outcome.step),
            time_text(outcome.per_sample),
            percent(gap),
            time_text(outcome.peak_memory),
            ",".join(map(str, outcome.layers_per_stage)),
        )
    return table
