"""``export`` and ``import``: other stacks' formats."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from zbsolve.cli.base import command
from zbsolve.cli.inputs import (
    CapOption,
    ExportFormat,
    JsonOption,
    Objective,
    ObjectiveOption,
    PlanArgument,
    PlanOutput,
    check_writable,
    load_instance,
    load_valid_plan,
)
from zbsolve.cli.names import shipped
from zbsolve.cli.planning import print_plan
from zbsolve.errors import InfeasibleError

logger = logging.getLogger(__name__)


@command("export")
def export_command(
    plan: PlanArgument,
    format_: Annotated[
        ExportFormat, typer.Option("--format", help="Format of the other stack.")
    ] = ExportFormat.torch_csv,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="x.csv", help="Write here, not to stdout.")
    ] = None,
    without_pairs: Annotated[
        bool,
        typer.Option("--without-pairs", help="F&B pairs one half after the other, for torch before 2.9."),
    ] = False,
) -> None:
    """Write a plan's orders for another stack.

    torch-csv is what torch loads as "compute_only", torch-csv-comms what it loads as "compute_comms": with
    the plan's own order of messages. There, stage 0 has no split backward unless the model brings its own:
    its I does nothing and its W runs the whole backward.
    """
    from zbsolve.files.atomic import write_text_atomically
    from zbsolve.plan.torch_csv import export_torch_csv

    check_writable(output)
    loaded = load_valid_plan(plan)
    logger.debug("format %s", format_.value)
    exported = export_torch_csv(
        loaded.instance,
        loaded.schedule(),
        grammar="compute_comms" if format_ is ExportFormat.torch_csv_comms else "compute_only",
        with_pairs=not without_pairs,
    )
    if output is None:
        typer.echo(exported.text, nl=False)
    else:
        write_text_atomically(output, exported.text)
        typer.echo(f"wrote {output}")
    for note in exported.notes:
        typer.echo(f"zbsolve: {note}", err=True)


@command("import")
def import_command(
    file: Annotated[str, typer.Argument(metavar="x.csv", help="torch schedule CSV, lowered or not.")],
    instance: Annotated[
        str,
        typer.Option(
            "--instance",
            "-i",
            metavar="I.json",
            help="Instance that it is for.",
            autocompletion=shipped("instance"),
        ),
    ],
    objective: ObjectiveOption = Objective.makespan,
    memory_cap: CapOption = None,
    output: PlanOutput = None,
    as_json: JsonOption = False,
) -> None:
    """Make another stack's schedule a plan: checked and timed.

    What a plan has no place for (messages, once checked, and sharding) is left out and counted.
    """
    from zbsolve.files.documents import read_text
    from zbsolve.model.simulator import simulate_for
    from zbsolve.plan.torch_csv_reading import import_torch_csv
    from zbsolve.solver.portfolio import certify

    check_writable(output)
    problem = load_instance(instance, memory_cap)
    imported = import_torch_csv(read_text(file, "a CSV"), problem, file)
    for note in imported.notes:
        typer.echo(f"zbsolve: {file}: {note}", err=True)
    try:
        schedule = simulate_for(problem, imported.orders, objective.value, imported.pairs)
        plan = certify(problem, schedule, objective.value, f"imported from {Path(file).name}")
    except InfeasibleError as error:
        raise InfeasibleError(f"{file}: {error}") from None
    if output is not None:
        plan.save(output)
    if as_json:
        typer.echo(plan.to_json(), nl=False)
    else:
        print_plan(plan)
        if output is not None:
            typer.echo(f"plan: {output}")
