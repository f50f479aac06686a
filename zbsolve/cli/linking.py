"""``links``: a plan's makespan on each queue model, and the plan re-timed for one of them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from zbsolve.cli.base import command, make_console
from zbsolve.cli.inputs import PlanArgument, check_writable, load_valid_plan
from zbsolve.errors import InputError


class QueueName(StrEnum):
    """The queue models of :mod:`zbsolve.plan.queues`."""

    unlimited = "unlimited"
    direction = "direction"
    pair = "pair"
    shared = "shared"


@command("links")
def links_command(
    plan: PlanArgument,
    assume: Annotated[
        QueueName | None, typer.Option(help="Time the plan with the waits of this queue model.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="P.json", help="Write the plan so timed.")
    ] = None,
) -> None:
    """What the plan's messages cost where transfers queue up.

    unlimited: no queues (gloo); direction: one queue per pair of devices and direction; pair: one per pair
    (NCCL, torch 2.12 and later); shared: one per device for all its transfers.
    """
    from rich.table import Table

    from zbsolve.plan.make import assume_queue
    from zbsolve.plan.queues import QUEUES

    check_writable(output)
    if (assume is None) != (output is None):
        raise InputError("--assume and --output belong together: give both, or none for the table alone")
    loaded = load_valid_plan(plan)
    unit = loaded.instance.time_unit
    table = Table("queues", title=f"{plan} (its own times assume: {loaded.queue})")
    for name in (f"makespan ({unit})", f"span ({unit})", "of unlimited"):
        table.add_column(name, justify="right")
    ideal = assume_queue(loaded, "unlimited")
    for queue in QUEUES:
        timed = assume_queue(loaded, queue)
        ratio = timed.makespan / ideal.makespan if ideal.makespan else 1.0
        table.add_row(queue, f"{timed.makespan:,.6g}", f"{timed.span:,.6g}", f"{ratio:.4f}")
    make_console().print(table)
    if assume is not None and output is not None:
        assume_queue(loaded, assume.value).save(output)
        typer.echo(f"plan: {output}")
