"""``partition``: layers into stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from zbsolve.cli.base import command, make_console
from zbsolve.cli.inputs import check_writable


@command("partition")
def partition_command(
    layers: Annotated[Path, typer.Argument(metavar="LAYERS.json", help="Layer profile.")],
    devices: Annotated[int, typer.Option("--devices", "-p", min=1, help="Stages, one per device.")],
    microbatches: Annotated[int, typer.Option("--microbatches", "-m", min=1, help="Micro-batches.")] = 8,
    hop: Annotated[float, typer.Option("--hop", min=0.0, help="Latency between neighbours.")] = 0.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="I.json", help="Write the instance here.")
    ] = None,
) -> None:
    """Split layers into stages so that the busiest stage is least busy.

    Exact for one stage per device; beside it the split into equal numbers of layers, and how unbalanced
    each is.
    """

    from zbsolve import partition
    from zbsolve.files import write_text_atomically
    from zbsolve.report import text

    check_writable(output)
    profile = partition.load_layers(layers)
    costs = [layer.cost for layer in profile.layers]
    splits = {
        "even": partition.even_split(len(costs), devices),
        "balanced": partition.balanced_split(costs, devices),
    }
    make_console().print(text.partition_table(costs, splits, profile.time_unit))
    if output is not None:
        instance = partition.instance_of_split(profile, splits["balanced"], microbatches, hop)
        write_text_atomically(output, json.dumps(instance.to_json_dict(), indent=1) + "\n")
        typer.echo(f"wrote {output}")
