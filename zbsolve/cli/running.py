"""``profile``, ``run`` and ``demo``: the commands that need torch."""

from __future__ import annotations

import math
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from zbsolve.cli.base import command, make_console, status
from zbsolve.cli.inputs import (
    Backend,
    CapOption,
    Placement,
    PlanArgument,
    SeedOption,
    Split,
    check_folder,
    check_writable,
    integers,
    load_valid_plan,
    require_positive,
)
from zbsolve.errors import EnvironmentFailedError, InfeasibleError, InputError

if TYPE_CHECKING:
    from zbsolve.model.instance import Instance
    from zbsolve.partition.layers import LayerProfile
    from zbsolve.plan.plan import Plan
    from zbsolve.runtime.measure.layer_profiler import LayerOptions
    from zbsolve.trace.trace import Trace


class Update(StrEnum):
    """When ranks agree on the optimizer's step."""

    barrier = "barrier"
    post_validation = "post-validation"


class Precision(StrEnum):
    """Autocast types."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def load_runtime() -> ModuleType:
    """The runtime's front door, or one line that says how to get torch."""
    try:
        return import_module("zbsolve.runtime.api")
    except ImportError as error:
        if (error.name or "").startswith("zbsolve"):
            raise  # a fault of this package, not of the environment
        missing = "is not installed" if isinstance(error, ModuleNotFoundError) else f"fails to load ({error})"
        raise EnvironmentFailedError(
            f'{error.name or "torch"} {missing}: pip install "zbsolve[runtime]"'
        ) from None


ModelOption = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        show_default=False,
        help="gpt, or pkg.module:factory (default: the plan's own, else gpt).",
    ),
]
LayersOption = Annotated[
    str | None, typer.Option(metavar="N,N,…", help="Layers of each stage (default: the plan's, else even).")
]
ThreadsOption = Annotated[int, typer.Option(min=1, help="Threads of each process.")]
TimeoutOption = Annotated[
    float, typer.Option(metavar="S", help="Give up when a process stays silent so long.")
]
GreenOption = Annotated[
    bool, typer.Option("--green-contexts", help="All devices on one GPU that is cut into as many parts.")
]
SplitOption = Annotated[Split, typer.Option(help="How backward is split into B and W.")]


@command("profile")
def profile_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="gpt, or pkg.module:factory.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="I.json", help="Write the instance here.")
    ],
    devices: Annotated[int, typer.Option("--devices", "-p", min=1, help="Devices (processes).")] = 2,
    microbatches: Annotated[int, typer.Option("--microbatches", "-m", min=1, help="Micro-batches.")] = 8,
    placement: Annotated[Placement, typer.Option(help="Which device holds which stage.")] = Placement.linear,
    chunks: Annotated[int | None, typer.Option(min=1, help="Stages per device.")] = None,
    layers_per_stage: LayersOption = None,
    memory_cap: CapOption = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements; the median counts.")] = 7,
    warmup: Annotated[int, typer.Option(min=0, help="Runs before the first measurement.")] = 3,
    threads: ThreadsOption = 1,
    split: SplitOption = Split.auto,
    seed: SeedOption = 0,
    timeout: TimeoutOption = 120.0,
    green_contexts: GreenOption = False,
    by_layer: Annotated[
        bool, typer.Option("--layers", help="Each layer by itself, on one device: a layer profile.")
    ] = False,
) -> None:
    """Measure a model's pass times, memory and hop latency here.

    T_F, T_B, T_W, T_BW, M_B and M_W of each stage, with all processes busy at once. With --layers, of each
    layer, one after the other on one device: for partition, sweep and advise.
    """
    from zbsolve.files.atomic import write_json_atomically
    from zbsolve.model.instance import equal_stages
    from zbsolve.report.text import device_table, instance_table

    check_writable(output)
    require_positive(timeout, "--timeout")
    layers = integers(layers_per_stage, "--layers-per-stage")
    if memory_cap is not None:
        equal_stages(1, 1).with_memory_cap(memory_cap)  # refuse a bad cap before the measurement, not after
    runtime = load_runtime()
    if by_layer:
        layer_options = runtime.LayerOptions(
            model=model,
            num_microbatches=microbatches,
            repeats=repeats,
            warmup=warmup,
            threads=threads,
            split=split.value,
            seed=seed,
            timeout=timeout,
        )
        _profile_layers(runtime, layer_options, output)
        return
    options = runtime.ProfileOptions(
        model=model,
        num_devices=devices,
        num_microbatches=microbatches,
        placement=placement.value,
        chunks=chunks,
        layers_per_stage=layers,
        repeats=repeats,
        warmup=warmup,
        threads=threads,
        split=split.value,
        seed=seed,
        timeout=timeout,
        green_contexts=green_contexts,
    )
    with status(f"profiling {model} …") as update:
        instance: Instance = runtime.profile_model(options, update)
    if memory_cap is not None:
        instance = instance.with_memory_cap(memory_cap)
    write_json_atomically(output, instance.to_json_dict())
    console = make_console()
    console.print(instance_table(instance))
    console.print(device_table(instance))
    typer.echo(f"instance: {output}")


def _profile_layers(runtime: ModuleType, options: LayerOptions, output: Path) -> None:
    from zbsolve.files.atomic import write_text_atomically
    from zbsolve.report.decision_text import layer_table

    with status(f"profiling the layers of {options.model} …") as update:
        profile: LayerProfile = runtime.profile_layers(options, update)
    write_text_atomically(output, profile.to_json())
    make_console().print(layer_table(profile))
    typer.echo(f"layer profile: {output}")


@command("run")
def run_command(
    plan: PlanArgument,
    model: ModelOption = "",
    steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before the first measured one.")] = 2,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Stages sleep for their time and move real tensors.")
    ] = False,
    payload_mib: Annotated[float, typer.Option(min=0.0, help="Message size when emulating.")] = 1.0,
    check_gradients: Annotated[
        bool, typer.Option(help="Compare every gradient with the unpipelined model.")
    ] = True,
    split: SplitOption = Split.auto,
    layers_per_stage: LayersOption = None,
    threads: ThreadsOption = 1,
    timeout: TimeoutOption = 120.0,
    green_contexts: GreenOption = False,
    seed: SeedOption = 0,
    backend: Annotated[Backend, typer.Option(help="Transport.")] = Backend.auto,
    update: Annotated[
        Update, typer.Option(help="Optimizer's step: agreed on before, or verified afterwards.")
    ] = Update.barrier,
    clip: Annotated[float | None, typer.Option(metavar="NORM", help="Largest norm of all gradients.")] = None,
    precision: Annotated[Precision, typer.Option(help="Autocast type of every F.")] = Precision.float32,
    accumulate: Annotated[int, typer.Option(min=1, help="Steps per optimizer step.")] = 1,
    async_weights: Annotated[
        bool, typer.Option("--async-weights", help="On CUDA: W's on a stream of their own.")
    ] = False,
    data_parallel: Annotated[int, typer.Option(min=1, help="Pipelines side by side.")] = 1,
    load: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Begin from this checkpoint, of any split.")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a checkpoint at the end.")] = None,
    trace_out: Annotated[
        Path | None, typer.Option("--trace-out", metavar="T.json", help="Write the measured trace here.")
    ] = None,
) -> None:
    """Execute a plan on torch: predicted against measured.

    One process per device. Under torchrun use: torchrun … -m zbsolve.runtime.worker P.json
    """
    check_writable(trace_out)
    check_folder(save)
    require_positive(timeout, "--timeout")
    if not payload_mib < math.inf:
        raise InputError(f"--payload-mib {payload_mib:g}: give a number of MiB")
    loaded = load_valid_plan(plan)
    layers = integers(layers_per_stage, "--layers-per-stage")
    runtime = load_runtime()
    options = runtime.RunOptions(
        model=model,
        steps=steps,
        warmup=warmup,
        emulate=emulate,
        payload_mib=payload_mib,
        check_gradients=check_gradients and not emulate,
        split=split.value,
        layers_per_stage=layers,
        threads=threads,
        timeout=timeout,
        seed=seed,
        backend=backend.value,
        update=update.value,
        clip=clip,
        precision=precision.value,
        accumulate=accumulate,
        async_weights=async_weights,
        green_contexts=green_contexts,
        data_parallel=data_parallel,
        load=None if load is None else str(load),
        save=None if save is None else str(save),
    )
    options, notes = options.for_instance(loaded.instance)
    for note in notes:
        typer.echo(f"zbsolve: {plan}: {note}", err=True)
    with status(f"running {plan} …") as say:
        trace: Trace = runtime.run_plan(loaded, options, say)
    if trace_out is not None:
        trace.save(trace_out)
    _print_run(loaded, trace)
    if trace_out is not None:
        typer.echo(f"trace: {trace_out}")
    if trace.gradients is not None and not trace.gradients.equal:
        raise InfeasibleError(f"{plan}: gradients differ from the unpipelined model: see above")


def _print_run(plan: Plan, trace: Trace) -> None:
    from zbsolve.report.run_text import lost_time_table, prediction_table, run_lines
    from zbsolve.trace.compare import compare
    from zbsolve.trace.memory_check import compare_memory

    comparison = compare(plan, trace)
    console = make_console()
    console.print(prediction_table(comparison, plan.instance.time_unit))
    console.print(lost_time_table(comparison, plan.instance.time_unit))
    for line in run_lines(comparison, trace, plan):
        typer.echo(line)
    unit = plan.instance.memory_unit
    for row in compare_memory(plan, trace):
        line = (
            f"memory of device {row.device}: farthest from plan after {row.worst}: {row.excess:+.4g} {unit}"
        )
        typer.echo(line)
        if row.alarm:
            typer.echo(f"ALARM: device {row.device} held {row.over_cap:.4g} {unit} more than its cap allows")


@command("demo")
def demo_command(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for every file that it makes.")] = Path(
        "demo_out"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer measurements and shorter limits.")] = False,
) -> None:
    """Do the main job end to end: profile, solve, run, compare.

    Profiles a small GPT on 2 processes, solves, runs the plan with gradients checked, and runs 4 emulated
    devices; then sets what was predicted beside what was measured.
    """
    load_runtime()
    from zbsolve.endtoend.demo import run_demo
    from zbsolve.report.demo_text import demo_table

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be made a folder ({error.strerror}): choose another place") from None
    with status("demo …") as update:
        result = run_demo(out, quick=quick, progress=update)
    make_console().print(demo_table(result.rows))
    for note in result.notes:
        typer.echo(note)
    typer.echo("files:")
    for path, meaning in result.files:
        typer.echo(f"  {path}  {meaning}")
    if not result.gradients_equal:
        raise InfeasibleError("gradients differ from the unpipelined model: see the table")
