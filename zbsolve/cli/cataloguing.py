"""``catalogue``, ``estimate``, ``steps``: known schedules, a model's shape, several steps in a row."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from zbsolve.cli.base import command, echo_json, make_console
from zbsolve.cli.inputs import Placement, PlanArgument, check_writable, load_valid_plan
from zbsolve.cli.names import Kind, listed, one_of
from zbsolve.errors import InfeasibleError, InputError
from zbsolve.words import pick


@command("catalogue")
def catalogue_command(
    schedules: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Schedules; all if none is named.",
            autocompletion=one_of(lambda: listed(Kind.schedules)),
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", min=0.1, help="Seconds of the solver for each schedule.")
    ] = 2.0,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table as Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")] = False,
) -> None:
    """Verify the known schedules: formula against simulation, plan against every rule, solver beside it.

    Exit 0, or 1 if anything is not as it should be.
    """
    from zbsolve.baselines.formulas import FORMULAS
    from zbsolve.benchmark import catalogue
    from zbsolve.report.text import catalogue_table

    names = [pick(name, FORMULAS, "schedule") for name in schedules or FORMULAS]
    rows = [catalogue.entry(name, time_limit) for name in names]
    if as_json:
        echo_json([row.to_json_dict() for row in rows])
    elif markdown:
        typer.echo(catalogue.markdown(rows), nl=False)
    else:
        make_console().print(catalogue_table(rows))
    wrong = [row.name for row in rows if not row.holds]
    if wrong:
        raise InfeasibleError(f"not as published, or not valid: {', '.join(wrong)}")


@command("estimate")
def estimate_command(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="I.json", help="Write the instance here.")
    ] = None,
    devices: Annotated[int, typer.Option("--devices", "-p", min=1, help="Pipeline devices.")] = 8,
    microbatches: Annotated[int, typer.Option("--microbatches", "-m", min=1, help="Micro-batches.")] = 32,
    placement: Annotated[Placement, typer.Option("--placement", help="Which device holds which stage.")] = (
        Placement.linear
    ),
    chunks: Annotated[
        int | None, typer.Option("--chunks", "-v", min=1, help="Stages per device (2 in a loop or V).")
    ] = None,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Transformer layers.")] = 32,
    hidden: Annotated[int, typer.Option("--hidden", min=1, help="Hidden size h.")] = 4096,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Attention heads a.")] = 32,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", min=1, help="Heads of keys and values (grouped queries).")
    ] = None,
    ffn: Annotated[int | None, typer.Option("--ffn", min=1, help="Hidden size of the MLP (4 h).")] = None,
    gated: Annotated[bool, typer.Option("--gated", help="Gated MLP (SwiGLU): three matrices.")] = False,
    experts: Annotated[int, typer.Option("--experts", min=1, help="Experts of each MLP.")] = 1,
    experts_per_token: Annotated[int, typer.Option("--experts-per-token", min=1, help="Of these.")] = 1,
    vocabulary: Annotated[int, typer.Option("--vocabulary", min=1, help="Size of the vocabulary.")] = 32000,
    tied: Annotated[bool, typer.Option("--tied", help="Embedding and head share parameters.")] = False,
    sequence: Annotated[int, typer.Option("--sequence", "-s", min=1, help="Tokens a sequence.")] = 4096,
    microbatch: Annotated[int, typer.Option("--microbatch", "-b", min=1, help="Sequences of one.")] = 1,
    flash: Annotated[bool, typer.Option("--flash/--no-flash", help="Scores recomputed, not kept.")] = True,
    recompute: Annotated[bool, typer.Option("--recompute", help="Layers recompute (R).")] = False,
    tensor_parallel: Annotated[int, typer.Option("--tensor-parallel", min=1, help="Devices a matrix.")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel/--no-sequence-parallel", help="Share the rest, too.")
    ] = True,
    zero: Annotated[int, typer.Option("--zero", min=0, max=3, help="ZeRO stage.")] = 0,
    data_parallel: Annotated[int, typer.Option("--data-parallel", min=1, help="Copies of the pipeline.")] = 1,
    machine: Annotated[
        str, typer.Option("--machine", help="a100-80g, h100-80g or h200-141g: where figures are not given.")
    ] = "h100-80g",
    tflops: Annotated[float | None, typer.Option("--tflops", help="Peak of one device.")] = None,
    efficiency: Annotated[float, typer.Option("--efficiency", help="Share of the peak reached.")] = 0.5,
    memory_gb: Annotated[float | None, typer.Option("--memory-gb", help="GB (1e9 bytes) a device.")] = None,
    bandwidth_gbs: Annotated[float | None, typer.Option("--bandwidth-gbs", help="GB/s of a hop.")] = None,
    latency_us: Annotated[float, typer.Option("--latency-us", min=0.0, help="Latency of a hop.")] = 10.0,
    contended: Annotated[bool, typer.Option("--contended", help="Transfers occupy their link.")] = False,
) -> None:
    """Estimate an instance from a model's shape and a device's figures.

    FLOPs, activations, states, bytes sent and pass times, with what each leaves out. Measure instead
    (zbsolve profile) wherever the model runs.
    """
    from dataclasses import replace

    from zbsolve.files.atomic import write_json_atomically
    from zbsolve.partition import estimate
    from zbsolve.report.text import estimate_table

    check_writable(output)
    figures = replace(
        estimate.MACHINES[pick(machine, estimate.MACHINES, "machine")],
        efficiency=efficiency,
        latency=latency_us * 1e-6,
    )
    for name, option, value, unit in (
        ("peak", "--tflops", tflops, 1e12),
        ("memory", "--memory-gb", memory_gb, 1e9),
        ("bandwidth", "--bandwidth-gbs", bandwidth_gbs, 1e9),
    ):
        if value is not None:
            if not 0 < value < math.inf:
                raise InputError(f"{option} {value:g}: give a positive number")
            figures = replace(figures, **{name: value * unit})
    shape = estimate.Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=vocabulary,
        sequence=sequence,
        microbatch=microbatch,
        kv_heads=kv_heads,
        ffn=ffn,
        gated=gated,
        experts=experts,
        experts_per_token=experts_per_token,
        tied=tied,
        flash=flash,
        tensor_parallel=tensor_parallel,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )
    result = estimate.estimate(
        shape,
        figures,
        devices=devices,
        microbatches=microbatches,
        placement=placement.value,
        chunks=chunks,
        zero=zero,
        data_parallel=data_parallel,
        contended=contended,
    )
    make_console().print(estimate_table(result))
    typer.echo(f"parameters: {result.parameters / 1e9:.3f} B")
    states = estimate.state_bytes(result.parameters)
    typer.echo(f"states of mixed-precision Adam, unshared: {states / 1e12:.3f} TB")
    typer.echo(f"M_W / M_B of a layer: {shape.layer_mem_w / shape.layer_mem_b:.3f}")
    sent = 2 * shape.boundary_bytes
    typer.echo(f"bytes over a boundary and micro-batch, both ways: {sent / 1e6:.2f} MB")
    typer.echo(f"t_comm / t_comp of a stage at the data-sheet peak: {result.communication_share:.2%}")
    for line in estimate.LEFT_OUT:
        typer.echo(f"left out: {line}")
    if output is not None:
        write_json_atomically(output, result.instance.to_json_dict())
        typer.echo(f"wrote {output}")


@command("steps")
def steps_command(
    plan: PlanArgument,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps in a row.")] = 8,
    optimizer: Annotated[float, typer.Option("--optimizer", min=0.0, help="Time of the optimizer.")] = 0.0,
    failed: Annotated[
        list[int] | None, typer.Option("--failed", min=0, help="A step (from 0) whose state is bad.")
    ] = None,
) -> None:
    """Run a plan for several steps: with a barrier, with post-validation, and without any wait.

    The period of a step comes out of the simulation: the makespan with a barrier, the span without.
    """
    from zbsolve.model.instance import MOST_TOTAL
    from zbsolve.model.steps import MODES, run_steps, steady_period
    from zbsolve.report.text import steps_table

    for step in failed or ():
        if step >= steps:
            raise InputError(f"--failed {step}: there are steps 0 to {steps - 1}: raise --steps or name one")
    if optimizer > MOST_TOTAL:
        raise InputError(f"--optimizer {optimizer:g}: give a time up to {MOST_TOTAL:g}")
    loaded = load_valid_plan(plan)
    schedule = loaded.schedule()
    rows = []
    for mode in MODES:
        times = run_steps(
            loaded.instance,
            schedule.orders,
            steps,
            mode,
            pairs=schedule.pairs,
            optimizer=optimizer,
            failed=frozenset(failed or ()),
        )
        period = steady_period(
            loaded.instance, schedule.orders, mode, pairs=schedule.pairs, optimizer=optimizer
        )
        rows.append((mode, times.total, period))
    make_console().print(steps_table(rows, steps, loaded.instance.time_unit))
