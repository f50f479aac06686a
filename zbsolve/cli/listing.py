"""``list``: the names that other commands take."""

from __future__ import annotations

from typing import Annotated

import typer

from zbsolve.cli.base import command, echo_json
from zbsolve.cli.inputs import JsonOption
from zbsolve.cli.names import Kind, listed


@command("list")
def list_command(
    kind: Annotated[
        Kind | None, typer.Argument(help="Of which to list the names; all if none is given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List names that ship: schedules, instances, models, clusters, suites.

    Each can be given where a file is, schedules as --solver, suites as --suite; in any case.
    """
    found = {each.value: listed(each) for each in (Kind if kind is None else (kind,))}
    if as_json:
        echo_json(found)
        return
    for each, names in found.items():
        if kind is None:
            typer.echo(f"{each}:")
        width = max(map(len, names))
        for name, about in names.items():
            typer.echo(f"{'  ' if kind is None else ''}{name:<{width}}  {about}")
