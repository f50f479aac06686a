"""``measure``: what the runtime itself costs and keeps, as commands that anybody can repeat."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from zbsolve.cli.base import command, make_console, status
from zbsolve.cli.running import load_runtime

if TYPE_CHECKING:
    from rich.table import Table

    from zbsolve.runtime.overhead import OverheadRow


class Subject(StrEnum):
    """What can be measured."""

    overhead = "overhead"


@command("measure")
def measure_command(
    subject: Annotated[
        Subject, typer.Argument(help="overhead: host time per action, beside torch's own schedule runtime.")
    ],
    microbatches: Annotated[int, typer.Option("--microbatches", "-m", min=1, help="Micro-batches.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Steps; the median counts.")] = 30,
) -> None:
    """Measure the runtime itself on this machine."""
    load_runtime()
    from zbsolve.runtime.overhead import measure_overhead

    with status("measuring …"):
        rows = measure_overhead(microbatches, repeats)
    make_console().print(_overhead_table(rows))


def _overhead_table(rows: list[OverheadRow]) -> Table:
    """Host time per action of each executor, and its share of what torch's executor adds."""
    from rich.table import Table

    table = Table(title="host time per compute action (us)")
    table.add_column("schedule")
    table.add_column("layers")
    table.add_column("executor")
    for name in ("actions", "total", "bare passes", "executor adds", "of torch's"):
        table.add_column(name, justify="right")
    torch_adds = {(row.schedule, row.layers): row.above for row in rows if row.executor == "torch"}
    for row in rows:
        share = row.above / torch_adds[row.schedule, row.layers]
        table.add_row(
            row.schedule,
            row.layers,
            row.executor,
            str(row.actions),
            f"{row.total:.1f}",
            f"{row.bare:.1f}",
            f"{row.above:.1f}",
            f"{share:.2f}",
        )
    return table
