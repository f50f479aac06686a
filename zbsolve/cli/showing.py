"""``show``: pictures and tables of a plan, an instance or a measured run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zbsolve.cli.base import command, make_console, status
from zbsolve.cli.inputs import PICTURES, check_writable, is_picture, load_any
from zbsolve.cli.names import shipped
from zbsolve.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from zbsolve.model.instance import Instance
    from zbsolve.plan.plan import Plan
    from zbsolve.trace.trace import Trace


class Figure(StrEnum):
    """What a picture of a plan shows."""

    gantt = "gantt"
    memory = "memory"


@command("show")
def show_command(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Plan, instance (or shipped name) or trace; - reads stdin.",
            autocompletion=shipped("instance"),
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="x.html|png|svg|pdf|trace.json",
            help="Write a page, a picture or a trace.",
        ),
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="T.json", help="Show this measured run over the plan.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="P2.json", help="Page only: this plan beside the first, on one axis."),
    ] = None,
    figure: Annotated[Figure, typer.Option(help="What a picture of a plan shows.")] = Figure.gantt,
    width: Annotated[int | None, typer.Option(min=40, help="Columns of the text chart.")] = None,
) -> None:
    """Draw a plan, an instance or a measured run.

    A plan: Gantt chart to scale and in-flight memory against the cap. An instance: its stages. As .html: one
    file that needs no network, to zoom into, with why each device waits.
    """
    from zbsolve.model.instance import Instance
    from zbsolve.plan.plan import Plan

    check_writable(output)
    page = output is not None and output.suffix == ".html"
    known = page or output is None or is_picture(output) or output.name.endswith(".trace.json")
    if not known:
        raise InputError(f"{output}: unknown format: use .html, {', '.join(PICTURES)} or .trace.json")
    shown = load_any(file, traces=True)
    if trace is not None and not isinstance(shown, Plan):
        raise InputError(f"{file}: is no plan: --trace shows a run over the plan that was run")
    if against is not None and not (page and isinstance(shown, Plan)):
        raise InputError(
            f"--against {against}: two plans are set side by side on a page: give a plan and -o x.html"
        )
    if figure is Figure.memory:
        if not isinstance(shown, Plan) or output is None or not is_picture(output):
            raise InputError(f"--figure {figure}: give a plan and -o with one of {', '.join(PICTURES)}")
        _show_memory(shown, file, output)
    elif isinstance(shown, Plan):
        _show_plan(shown, file, output, trace, against, width)
    elif isinstance(shown, Instance):
        _show_instance(shown, file, output)
    else:
        _show_trace(shown, output, width)
    if output is not None:
        typer.echo(f"wrote {output}")


def _require_drawable(plan: Plan, file: str) -> None:
    from zbsolve.model.judge import check

    violations = check(plan.instance, plan.schedule())
    if violations:
        raise InfeasibleError(
            f"{file}: cannot be drawn: {violations[0]} (zbsolve check lists every violation)"
        )


def _load_other(against: str, plan: Plan, file: str) -> Plan:
    """The plan to set beside the first: of the same job."""
    from zbsolve.plan.plan import load_plan

    other = load_plan(against)
    _require_drawable(other, against)
    sizes = [(p.instance.num_devices, p.instance.num_microbatches) for p in (plan, other)]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"--against {against}: has {sizes[1][0]} devices and {sizes[1][1]} micro-batches, {file} has "
            f"{sizes[0][0]} and {sizes[0][1]}: compare plans of the same job"
        )
    return other


def _show_plan(
    plan: Plan,
    file: str,
    output: Path | None,
    trace_file: str | None,
    against: str | None,
    width: int | None,
) -> None:
    from zbsolve.trace.compare import compare
    from zbsolve.trace.trace import load_trace

    _require_drawable(plan, file)
    other = None if against is None else _load_other(against, plan, file)
    trace = None if trace_file is None else load_trace(trace_file)
    if trace is not None:
        try:
            compare(plan, trace)
        except InputError as error:  # a trace of another plan
            raise InputError(f"{trace_file}: {error}") from None
    if output is None:
        _print_gantt(plan, trace, width)
    elif is_picture(output):
        from zbsolve.report.figures import save_plan_figure

        with status(f"drawing {output} …"):
            save_plan_figure(output, plan, trace)
    elif output.suffix == ".html":
        from zbsolve.report.html import save_plan_page

        save_plan_page(output, plan, trace, other)
    else:
        from zbsolve.report.chrome_trace import chrome_trace, save_chrome_trace

        save_chrome_trace(output, chrome_trace(plan, trace))


def _show_memory(plan: Plan, file: str, output: Path) -> None:
    from zbsolve.report.curves import save_memory_figure

    _require_drawable(plan, file)
    save_memory_figure(output, plan)


def _print_gantt(plan: Plan, trace: Trace | None, width: int | None) -> None:
    from zbsolve.report.gantt_text import gantt
    from zbsolve.report.text import certificate_table, memory_table
    from zbsolve.report.timeline import measured_schedule

    console = make_console()
    lanes = [("predicted", plan.schedule())]
    if trace is not None:
        lanes.append(("measured", measured_schedule(plan.instance, trace.median_step)))
    for line in gantt(plan.instance, lanes, width or console.width):
        console.print(line, soft_wrap=True)
    console.print(certificate_table(plan))
    console.print(memory_table(plan))


def _show_instance(instance: Instance, file: str, output: Path | None) -> None:
    if output is None:
        from zbsolve.report.text import device_table, instance_table

        console = make_console()
        console.print(instance_table(instance))
        console.print(device_table(instance))
    elif is_picture(output):
        from zbsolve.report.figures import save_instance_figure

        save_instance_figure(output, instance)
    else:
        raise InputError(f"{file}: an instance has no timeline for {output}: solve it first")


def _show_trace(trace: Trace, output: Path | None, width: int | None) -> None:
    from zbsolve.report.timeline import instance_of_trace, measured_schedule

    instance = instance_of_trace(trace)
    if output is None:
        from zbsolve.report.gantt_text import gantt
        from zbsolve.report.run_text import gradients_text

        console = make_console()
        lanes = [("measured", measured_schedule(instance, trace.median_step))]
        for line in gantt(instance, lanes, width or console.width):
            console.print(line, soft_wrap=True)
        typer.echo(
            f"measured makespan {trace.makespan:.6g} {trace.time_unit}, median of {len(trace.steps)} steps "
            f"({trace.mode}, {trace.hardware}); gradients: {gradients_text(trace)}"
        )
    elif is_picture(output):
        from zbsolve.report.figures import save_trace_figure

        save_trace_figure(output, instance, trace)
    elif output.suffix == ".html":
        from zbsolve.report.html import save_trace_page

        save_trace_page(output, instance, trace)
    else:
        from zbsolve.report.chrome_trace import chrome_trace_of_measurement, save_chrome_trace

        save_chrome_trace(output, chrome_trace_of_measurement(instance, trace))
