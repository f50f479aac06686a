"""``profile``, ``run`` and ``demo``: the commands that need torch."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from zbsolve.cli.base import command, make_console, status
from zbsolve.cli.declared import with_options
from zbsolve.cli.inputs import (
    CapOption,
    PlanArgument,
    check_folder,
    check_writable,
    load_valid_plan,
)
from zbsolve.errors import EnvironmentFailedError, InfeasibleError, InputError
from zbsolve.run_options import ProfileOptions, RunOptions

if TYPE_CHECKING:
    from zbsolve.model.instance import Instance
    from zbsolve.partition.layers import LayerProfile
    from zbsolve.plan.plan import Plan
    from zbsolve.run_options import LayerOptions
    from zbsolve.trace.trace import Trace


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


@command("profile")
@with_options(ProfileOptions)
def profile_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="gpt, or pkg.module:factory.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="I.json", help="Write the instance here.")
    ],
    options: ProfileOptions,
    memory_cap: CapOption = None,
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
    options = replace(options, model=model)
    if memory_cap is not None:
        equal_stages(1, 1).with_memory_cap(memory_cap)  # refuse a bad cap before the measurement, not after
    runtime = load_runtime()
    if by_layer:
        _profile_layers(runtime, options.of_layers(), output)
        return
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
@with_options(RunOptions)
def run_command(
    plan: PlanArgument,
    options: RunOptions,
    trace_out: Annotated[
        Path | None, typer.Option("--trace-out", metavar="T.json", help="Write the measured trace here.")
    ] = None,
) -> None:
    """Execute a plan on torch: predicted against measured.

    One process per device. Under torchrun use: torchrun … -m zbsolve.runtime.worker P.json
    """
    check_writable(trace_out)
    check_folder(None if options.save is None else Path(options.save))
    loaded = load_valid_plan(plan)
    runtime = load_runtime()
    if options.emulate:
        options = replace(options, check_gradients=False)
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
