"""The benchmark's rows as a table that grows in the terminal, and as Markdown. Prints nothing.

A Markdown file keeps one section a suite between two marks; writing a suite replaces its own section and
leaves every other line of the file alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from zbsolve import __version__
from zbsolve.benchmark.rows import PlainRun, Report, Row, Summary, summarise
from zbsolve.errors import InputError
from zbsolve.files.atomic import write_text_atomically
from zbsolve.words import time_text


class _Column(NamedTuple):
    title: str
    width: int
    right: bool = True


# 160 columns with one space between: what the command line gives to a file or pipe.
COLUMNS = (
    _Column("instance", 19, right=False),
    _Column("objective", 9, right=False),
    _Column("cost", 10),
    _Column("bound", 10),
    _Column("gap", 8),
    _Column("status", 8, right=False),
    _Column("found by", 13, right=False),
    _Column("proven by", 12, right=False),
    _Column("seconds", 7),
    _Column("published", 10),
    _Column("gain", 8),
    _Column("1F1B", 14),
    _Column("gain", 7),
    _Column("heuristic", 10),
)


def table_header() -> Table:
    """The head of the growing table; :func:`table_row` continues it."""
    table = _grid()
    table.add_row(*(column.title for column in COLUMNS), style="bold")
    table.add_row(*("─" * column.width for column in COLUMNS))
    return table


def table_row(row: Row) -> Table:
    """One row, in the columns of :func:`table_header`."""
    table = _grid()
    table.add_row(*(escape(cell) for cell in cells(row)))
    return table


def _grid() -> Table:
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in COLUMNS:
        table.add_column(width=column.width, justify="right" if column.right else "left", overflow="fold")
    return table


def cells(row: Row) -> tuple[str, ...]:
    """The texts of a row, one for each of :data:`COLUMNS`."""
    reason = row.one_f_one_b_reason.partition(":")[0].removeprefix("1F1B ").removesuffix(" the cap")
    return (
        row.instance,
        row.objective,
        time_text(row.cost),
        time_text(row.bound),
        _percent(row.gap, 3),
        row.status,
        row.found_by,
        row.proven_by,
        f"{row.seconds:.1f}",
        "-" if row.published is None else time_text(row.published),
        _percent(row.published_gain, 3),
        reason if row.one_f_one_b is None else time_text(row.one_f_one_b),
        _percent(row.one_f_one_b_gain, 2),
        time_text(row.heuristic),
    )


def plain_line(run: PlainRun) -> str:
    """A plain model's outcome in one line."""
    if run.skipped is not None:
        return f"  plain {run.solver}: skipped: {run.skipped}"
    cost = "no schedule" if run.cost is None else f"cost {time_text(run.cost)}"
    bound = "no bound" if run.bound is None else f"bound {time_text(run.bound)}"
    gap = "" if run.gap is None else f", gap {_percent(run.gap, 3)}"
    return f"  plain {run.solver}: {cost}, {bound}{gap}, {run.status}, {run.seconds or 0:.1f} s"


def summary_lines(summary: Summary) -> list[str]:
    """A suite's summary in a few sentences."""
    lines = [
        f"{summary.suite}: {summary.optimal} of {summary.rows} proven optimal, "
        f"{summary.within_01_percent} within 0.1 %, {summary.within_05_percent} within 0.5 %",
        f"gap: median {_percent(summary.median_gap, 3)}, 90th percentile {_percent(summary.p90_gap, 3)}, "
        f"worst {_percent(summary.max_gap, 3)} ({summary.worst})",
    ]
    lines.append(
        f"time limit kept within 1 s or 20 %: {summary.limits_kept} of {summary.rows}; "
        f"at most {summary.most_of_limit:.2f} of it taken"
    )
    if summary.published:
        lines.append(
            f"against the published cost: worse on {summary.worse_than_published} of {summary.published}, "
            f"better on {summary.better_than_published}"
        )
    if summary.median_one_f_one_b_gain is not None:
        lines.append(
            f"median gain over 1F1B where it fits: {_percent(summary.median_one_f_one_b_gain, 2)} of its step"
        )
    return lines


def _percent(share: float | None, digits: int) -> str:
    if share is None:
        return "-"
    text = f"{share:.{digits}%}"
    return text.removeprefix("-") if float(text.rstrip("%")) == 0 else text


# --- Markdown ------------------------------------------------------------------------------------


def markdown_section(report: Report, suite: str) -> str:
    """A suite's section: how it was made, the summary, the table, and the plain models where they ran."""
    rows = [row for row in report.rows if row.suite == suite]
    summary = next(s for s in summarise(rows) if s.suite == suite)
    partial = f" Interrupted after {len(report.rows)} of {report.planned} rows." if report.interrupted else ""
    lines = [
        f"## {suite}",
        "",
        f"`{report.command}`, zbsolve {__version__}, {report.date}, {os.cpu_count()} CPU cores.{partial}",
        "",
        *(f"- {line}" for line in summary_lines(summary)),
        "",
        _markdown_line([column.title for column in COLUMNS]),
        _markdown_line(["---:" if column.right else "---" for column in COLUMNS]),
        *(_markdown_line(cells(row)) for row in rows),
    ]
    plain = [(row, run) for row in rows for run in row.plain]
    if plain:
        lines += ["", "Plain models: no hint, no lower bound, no search around them.", ""]
        lines += [f"- {row.instance}, {row.objective}: {plain_line(run).strip()}" for row, run in plain]
    return "\n".join(lines)


def _markdown_line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def write_markdown(path: Path, report: Report) -> None:
    """Write the section of each suite in the report, replacing the one that the file has."""
    text = path.read_text(encoding="utf-8") if path.exists() else "# Benchmarks\n"
    for suite in dict.fromkeys(row.suite for row in report.rows):
        begin, end = f"<!-- bench {suite}: begin -->", f"<!-- bench {suite}: end -->"
        section = f"{begin}\n{markdown_section(report, suite)}\n{end}"
        if begin not in text and end not in text:
            text = f"{text.rstrip()}\n\n{section}\n"
            continue
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise InputError(
                f"{path}: one of the marks {begin} and {end} is missing: put it back or remove both"
            )
        text = before + section + after
    write_text_atomically(path, text)
