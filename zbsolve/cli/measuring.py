"""``measure``: what the runtime itself costs and keeps, as commands that anybody can repeat."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from zbsolve.cli.base import command, make_console, status
from zbsolve.cli.running import load_runtime

if TYPE_CHECKING:
    from rich.table import Table

    from zbsolve.endtoend.predictions import Prediction
    from zbsolve.runtime.measure.overhead import OverheadRow


class Subject(StrEnum):
    """What can be measured."""

    overhead = "overhead"
    predictions = "predictions"


@command("measure")
def measure_command(
    subject: Annotated[
        Subject,
        typer.Argument(
            help="overhead: host time per action, beside torch's own schedule runtime. "
            "predictions: measured over predicted makespan of many schedules, and their ranking."
        ),
    ],
    microbatches: Annotated[
        int, typer.Option("--microbatches", "-m", min=1, help="Micro-batches (overhead).")
    ] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Steps; the median counts (overhead).")] = 30,
    devices: Annotated[
        list[int] | None,
        typer.Option("--devices", "-p", help="Emulated devices (predictions); repeatable, default 4 and 8."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps (predictions).")] = 10,
    op_ms: Annotated[float, typer.Option(min=1.0, help="Length of an emulated F, B and W.")] = 20.0,
    real: Annotated[bool, typer.Option(help="Also the small GPT on two processes (predictions).")] = True,
) -> None:
    """Measure the runtime itself on this machine. For figures to publish, let nothing else run beside it."""
    load_runtime()
    console = make_console()
    if subject is Subject.overhead:
        from zbsolve.runtime.measure.overhead import measure_overhead

        with status("measuring …"):
            overhead = measure_overhead(microbatches, repeats)
        console.print(_overhead_table(overhead))
        return
    from zbsolve.endtoend import predictions

    counts = devices or [4, 8]
    predictions.require_devices(counts)
    rows: list[Prediction] = []
    with status("measuring …") as update:
        if real:
            rows += predictions.real(steps=steps, progress=update)
        for p in counts:
            rows += predictions.emulated(p, steps=steps, op=op_ms, progress=update)
    console.print(_predictions_table(rows))
    wrong = predictions.misordered(rows)
    for a, b in wrong:
        typer.echo(
            f"{a.part}, p={a.devices}: {a.schedule} was predicted faster than {b.schedule}, and is not"
        )
    if not wrong:
        typer.echo("measured ranking: as predicted (predictions within 1 % of each other count as equal)")


def _predictions_table(rows: list[Prediction]) -> Table:
    """Predicted and measured makespans, in the order predicted."""
    from rich.table import Table

    table = Table(title="makespan (ms), median of the measured steps")
    for name in ("part", "devices", "placement", "schedule"):
        table.add_column(name)
    for name in ("predicted", "measured", "measured / predicted"):
        table.add_column(name, justify="right")
    for row in sorted(rows, key=lambda r: (r.part, r.devices, r.predicted)):
        table.add_row(
            row.part,
            str(row.devices),
            row.placement,
            row.schedule,
            f"{row.predicted:.1f}",
            f"{row.measured:.1f}",
            f"{row.ratio:.4f}",
        )
    return table


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
