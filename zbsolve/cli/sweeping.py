"""``sweep``: many configurations of a model on a cluster, and which of them nobody beats."""

from __future__ import annotations

from collections import ChainMap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zbsolve.cli.base import EXIT_INTERRUPTED, command, echo_json, make_console, status
from zbsolve.cli.inputs import (
    Placement,
    check_picture,
    check_writable,
    integers,
    load_profiles,
    placement_names,
)
from zbsolve.cli.names import Kind, listed, one_of, shipped
from zbsolve.errors import InputError
from zbsolve.words import pick

if TYPE_CHECKING:
    from zbsolve.sweep.grid import Config, Grid, Inputs
    from zbsolve.sweep.run import Swept


@command("sweep")
def sweep_command(
    layers: Annotated[
        list[str],
        typer.Argument(
            metavar="LAYERS.json…",
            help="Layer profile, one per micro-batch size, or a model's name.",
            autocompletion=shipped("model"),
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(
            metavar="C.json",
            help="Cluster file, or a shipped cluster's name.",
            autocompletion=shipped("cluster"),
        ),
    ],
    store: Annotated[
        Path, typer.Option("--store", "-o", metavar="S.db", help="Results; a sweep goes on where it ended.")
    ],
    devices: Annotated[
        str | None,
        typer.Option("--devices", "-p", metavar="N,N,…", help="Pipeline devices (default: 1, 2, 4 …)."),
    ] = None,
    replicas: Annotated[
        str, typer.Option("--replicas", "-d", metavar="N,N,…", help="Data-parallel replicas.")
    ] = "1",
    placement: Annotated[
        list[Placement] | None, typer.Option(help="Placement; repeatable (default: linear).")
    ] = None,
    microbatch_size: Annotated[
        str, typer.Option("--microbatch-size", "-b", metavar="N,N,…", help="Samples per micro-batch.")
    ] = "1",
    microbatches: Annotated[
        str | None, typer.Option("--microbatches", "-m", metavar="N,N,…", help="Micro-batches per replica.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Global batch; then m = batch / (b d) where whole.")
    ] = None,
    memory: Annotated[
        str, typer.Option(metavar="X,X,…", help="Shares of the devices' memory to allow.")
    ] = "1",
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="solved, or a baseline's name; repeatable.",
            autocompletion=one_of(lambda: ("solved", *listed(Kind.schedules))),
        ),
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Solve each also with checkpointing.")
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes on this machine.")] = 1,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on a Ray cluster (local: start one here).")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(metavar="x.png|svg|pdf", help="Draw the Pareto picture.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every result as JSON on stdout.")] = False,
) -> None:
    """Cross p, d, placement, b, m, memory and schedule on a cluster.

    Results go to a store, each as soon as it is known: a sweep that was stopped, or killed, goes on where it
    was and ends with the same results. Shows the Pareto fronts of step time per sample against peak memory
    and against devices.
    """
    from zbsolve.sweep.run import run_sweep
    from zbsolve.sweep.store import Store

    check_writable(store)
    check_picture(figure)
    inputs = load_profiles(layers, cluster)
    grid = _grid(
        inputs,
        devices,
        replicas,
        placement,
        microbatch_size,
        microbatches,
        batch,
        memory,
        schedule,
        recompute,
    )
    configs = grid.configs(inputs.cluster)
    with Store(store) as opened, status("sweeping …") as update:

        def progress(done: int, of: int, config: Config) -> None:
            update(f"sweeping: {done} of {of}, last {config}")

        try:
            swept = run_sweep(inputs, configs, opened, jobs=jobs, ray=ray, progress=progress)
        except KeyboardInterrupt:
            typer.echo(f"zbsolve: interrupted: {store} has the results so far: repeat to go on", err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None
    if figure is not None:
        from zbsolve.report.pareto_figure import save_pareto_figure

        profile = inputs.profiles[0]
        title = f"{profile.name} on {inputs.cluster.name}: {len(swept.rows)} configurations"
        save_pareto_figure(figure, swept.rows, profile.time_unit, profile.memory_unit, title)
    if as_json:
        from dataclasses import asdict

        rows = [{**asdict(config), **asdict(outcome)} for config, outcome, _ in swept.rows]
        echo_json(rows)
    else:
        _print_sweep(inputs, swept, store)
        if figure is not None:
            typer.echo(f"wrote {figure}")


def _grid(
    inputs: Inputs,
    devices: str | None,
    replicas: str,
    placements: list[Placement] | None,
    sizes: str,
    microbatches: str | None,
    batch: int | None,
    memory: str,
    schedules: list[str] | None,
    recompute: bool,
) -> Grid:
    from zbsolve.baselines import BASELINES
    from zbsolve.sweep.grid import Grid

    known = ChainMap[str, Any](BASELINES, {"solved": None})  # the last one's names come first
    chosen = [pick(name, known, "--schedule") for name in schedules or ("solved",)]
    most = inputs.cluster.num_devices
    powers = tuple(2**k for k in range(most.bit_length()) if 2**k <= most)
    return Grid(
        p=integers(devices, "--devices") or powers,
        d=integers(replicas, "--replicas") or (1,),
        placements=placement_names(placements, "linear"),
        microbatch_sizes=integers(sizes, "--microbatch-size") or (1,),
        m=integers(microbatches, "--microbatches") or (),
        global_batch=batch,
        memory=_shares(memory),
        schedules=tuple(dict.fromkeys(chosen)),
        recompute=(False, True) if recompute else (False,),
    )


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(0 < share < float("inf") for share in shares):
        raise InputError(f"--memory {text}: give positive numbers separated by commas, such as 0.5,1")
    return shares


def _print_sweep(inputs: Inputs, swept: Swept, store: Path) -> None:
    from zbsolve.report.sweep_text import front_table
    from zbsolve.sweep.pareto import num_devices, pareto_front, peak_memory, time_per_sample

    profile, console = inputs.profiles[0], make_console()
    for cost, title in (
        (peak_memory, "step time against peak memory"),
        (num_devices, "step time against devices"),
    ):
        front = pareto_front(swept.rows, time_per_sample, cost)
        console.print(front_table(front, title, profile.time_unit, profile.memory_unit))
    counts: dict[str, int] = {}
    for _, outcome, _ in swept.rows:
        counts[outcome.status] = counts.get(outcome.status, 0) + 1
    listed = ", ".join(f"{number} {name}" for name, number in counts.items())
    seconds = sum(row[2] for row in swept.rows)
    typer.echo(
        f"{len(swept.rows)} configurations: {listed}; {swept.found_before} found in the store, "
        f"{swept.computed} computed; {seconds / max(1, len(swept.rows)):.2f} s of one core each"
    )
    typer.echo(f"store: {store}")
