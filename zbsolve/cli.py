"""The command line: the only place that prints and sets exit codes.

Exit codes: 0 done; 1 the answer is no (infeasible, a violated rule, gradients that differ); 2 bad usage
or input; 3 the environment failed; 130 interrupted with nothing to keep. Results go to stdout, everything
else to stderr. Imports are lazy: a command loads only what it uses.
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from zbsolve.errors import EnvironmentFailedError, InfeasibleError, InputError, ZbsolveError

if TYPE_CHECKING:
    from rich.console import Console

    from zbsolve.bench import Case
    from zbsolve.instance import Instance
    from zbsolve.plan import Plan
    from zbsolve.report.comparison import ComparisonTable
    from zbsolve.solver import Progress, SolveResult
    from zbsolve.trace import Trace

logger = logging.getLogger(__name__)

EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="zbsolve",
    help="Pipeline-parallel schedules: solved exactly, certified, run on torch, predicted against measured.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

P = ParamSpec("P")


class Objective(StrEnum):
    """What a solver minimises."""

    makespan = "makespan"
    span = "span"


class Placement(StrEnum):
    """Which device holds which stage."""

    linear = "linear"
    loop = "loop"
    v = "v"


class Split(StrEnum):
    """How a stage's backward is split into B and W."""

    auto = "auto"
    deferred = "deferred"
    generic = "generic"


class Backend(StrEnum):
    """Transport between the processes."""

    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


class ExportFormat(StrEnum):
    """Formats of other stacks."""

    torch_csv = "torch-csv"


# --- errors, verbosity, consoles -----------------------------------------------------------------


def _set_verbose(value: bool) -> bool:
    if value:
        logging.basicConfig(stream=sys.stderr, level=logging.DEBUG, format="%(name)s: %(message)s")
        logging.getLogger("matplotlib").setLevel(logging.WARNING)
    return value


def command(name: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Register a command: errors become one line and an exit code, ``--verbose`` adds the traceback."""

    def register(function: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            verbose = bool(kwargs.pop("verbose", False))
            try:
                function(*args, **kwargs)
                sys.stdout.flush()
            except ZbsolveError as error:
                if verbose:
                    logger.exception("where it happened")
                typer.echo(f"zbsolve: {' '.join(str(error).split())}", err=True)
                raise typer.Exit(error.exit_code) from None
            except KeyboardInterrupt:
                typer.echo("zbsolve: interrupted", err=True)
                raise typer.Exit(EXIT_INTERRUPTED) from None
            except BrokenPipeError:
                # The reader (head, less) has what it wanted; keep the interpreter's last flush quiet too.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            except MemoryError:
                if verbose:
                    logger.exception("where it happened")
                typer.echo("zbsolve: not enough memory: use fewer micro-batches or stages", err=True)
                raise typer.Exit(EnvironmentFailedError.exit_code) from None
            except OSError as error:
                if verbose:
                    logger.exception("where it happened")
                place = f"{error.filename}: " if error.filename else ""
                typer.echo(f"zbsolve: {place}{error.strerror or error}: nothing was overwritten", err=True)
                raise typer.Exit(EnvironmentFailedError.exit_code) from None

        signature = inspect.signature(function, eval_str=True)
        option = inspect.Parameter(
            "verbose",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[
                bool,
                typer.Option("--verbose", callback=_set_verbose, help="Log details and show tracebacks."),
            ],
        )
        parameters = [*signature.parameters.values(), option]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name)(run)
        return function

    return register


def _print_version(value: bool) -> None:
    if value:
        from zbsolve import __version__

        typer.echo(f"zbsolve {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def _console(*, stderr: bool = False) -> Console:
    """A console that wraps tables at the terminal's width, and at 160 columns in files and pipes."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else 160
    return Console(stderr=stderr, width=width, highlight=False)


@contextmanager
def _status(message: str) -> Iterator[Callable[[str], None]]:
    """A spinner with a changing line on stderr; silent where stderr is no terminal."""
    console = _console(stderr=True)
    if not console.is_terminal:
        yield logger.info
        return
    from rich.markup import escape

    with console.status(escape(message)) as status:
        yield lambda text: status.update(escape(text))


def _solve_with_progress(instance: Instance, **options: Any) -> SolveResult:
    from zbsolve.solver import solve

    unit, objective = instance.time_unit, options["objective"]
    with _status(f"solving {instance.name} …") as update:

        def show(progress: Progress) -> None:
            update(
                f"solving {instance.name}: {progress.seconds:.1f} s, {objective} {progress.cost:.6g} {unit}, "
                f"bound {progress.bound:.6g}, gap {progress.gap:.2%} ({progress.who})"
            )

        return solve(instance, progress=show, **options)


# --- files ---------------------------------------------------------------------------------------


def _shipped_instances() -> dict[str, Any]:
    from importlib.resources import files

    found = {}
    for entry in files("zbsolve.instances").iterdir():
        if entry.name.endswith(".json") and entry.name != "known.json":
            found[entry.name.removesuffix(".json")] = entry
    return dict(sorted(found.items()))


def _load_instance(name: str) -> Instance:
    """An instance file, or one that ships with the package, by its name."""
    from importlib.resources import as_file

    from zbsolve.instance import load_instance

    if not name or (not Path(name).exists() and "/" not in name and not name.endswith(".json")):
        shipped = _shipped_instances()
        if name not in shipped:
            from difflib import get_close_matches

            close = get_close_matches(name, shipped, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else f"one of: {', '.join(shipped)}"
            raise InputError(f"{name!r}: no such file and no shipped instance: give a file, or {hint}")
        with as_file(shipped[name]) as path:
            return load_instance(path)
    return load_instance(name)


def _schema_of(path: str) -> str:
    from zbsolve.instance import read_json

    data = read_json(path)
    schema = data.get("schema") if isinstance(data, dict) else None
    kinds = {"zbsolve.instance/1": "instance", "zbsolve.plan/1": "plan", "zbsolve.trace/1": "trace"}
    if schema not in kinds:
        raise InputError(f"{path}: schema: is {schema!r}: give one of {', '.join(kinds)}")
    return kinds[schema]


def _check_writable(path: Path | None) -> None:
    """Refuse an output that cannot be written before the work is done, not after."""
    from zbsolve.files import is_special

    if path is None:
        return
    if is_special(path):
        if not os.access(path, os.W_OK):
            raise InputError(f"{path}: cannot be written: choose another place")
        return
    if path.is_dir():
        raise InputError(f"{path}: is a folder: give a file name")
    folder = path.resolve().parent if path.is_symlink() else path.parent
    if not folder.is_dir():
        raise InputError(f"{path}: there is no folder {folder}: create it or choose another place")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{path}: the folder {folder} cannot be written: choose another place")


def _require_positive(value: float, option: str) -> None:
    if not 0 < value < math.inf:
        raise InputError(f"{option} {value:g}: give a positive number of seconds")


def _integers(text: str | None, option: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise InputError(f"{option} {text}: give whole numbers from 1, separated by commas, such as 3,3,2")
    return values


# --- solve, compare, check -----------------------------------------------------------------------

InstanceArgument = Annotated[str, typer.Argument(metavar="I.json", help="Instance file or shipped name.")]
PlanArgument = Annotated[str, typer.Argument(metavar="P.json", help="Plan file.")]
ObjectiveOption = Annotated[Objective, typer.Option(help="Cost to minimise.")]
CapOption = Annotated[
    str | None,
    typer.Option(metavar="X|1p|2p|none", help="Replace the instance's memory cap on every device."),
]
SolverOption = Annotated[
    str, typer.Option(metavar="NAME", help="auto, cpsat, milp, heuristic, or a baseline's name such as 1f1b.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Random seed.")]
PlanOutput = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="P.json", help="Write the plan here.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]
LimitOption = Annotated[float, typer.Option(metavar="S", help="Seconds to search.")]


@command("solve")
def solve_command(
    instance: InstanceArgument,
    objective: ObjectiveOption = Objective.makespan,
    memory_cap: CapOption = None,
    solver: SolverOption = "auto",
    time_limit: LimitOption = 60.0,
    seed: SeedOption = 0,
    gap: Annotated[float, typer.Option(min=0.0, help="Stop when (cost - bound) / cost is this small.")] = 0.0,
    deterministic: Annotated[bool, typer.Option(help="Same seed, same bytes; no wall-clock limits.")] = False,
    output: PlanOutput = None,
    as_json: JsonOption = False,
) -> None:
    """Find the best plan for an instance, and prove how good it is."""
    _check_writable(output)
    problem = _load_instance(instance)
    if memory_cap is not None:
        problem = problem.with_memory_cap(memory_cap)
    result = _solve_with_progress(
        problem,
        objective=objective.value,
        solver=solver,
        time_limit=time_limit,
        seed=seed,
        deterministic=deterministic,
        gap=gap,
    )
    if output is not None:
        result.plan.save(output)
    if result.interrupted:
        typer.echo("zbsolve: interrupted: this is the best plan found until then", err=True)
    if as_json:
        typer.echo(result.plan.to_json(), nl=False)
    else:
        _print_plan(result.plan)
        if output is not None:
            typer.echo(f"plan: {output}")


def _print_plan(plan: Plan) -> None:
    from zbsolve.report.comparison import gain_text, one_f_one_b_cost
    from zbsolve.report.text import certificate_table, memory_table

    console = _console()
    console.print(certificate_table(plan))
    reference, reason = one_f_one_b_cost(plan.instance, plan.objective)
    if reference is None:
        typer.echo(f"gain over 1F1B: none to state: {reason}")
    else:
        gain = (reference - plan.cost) / reference if reference else 0.0
        typer.echo(
            f"gain over 1F1B: {gain_text(gain)} ({plan.objective} {plan.cost:.6g} against {reference:.6g} "
            f"{plan.instance.time_unit})"
        )
    console.print(memory_table(plan))


@command("compare")
def compare_command(
    instance: Annotated[
        str, typer.Argument(metavar="I.json", help="Instance file or shipped name, or a plan file.")
    ],
    objective: ObjectiveOption = Objective.makespan,
    memory_cap: CapOption = None,
    solver: SolverOption = "auto",
    time_limit: LimitOption = 30.0,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Set every applicable baseline beside the solved plan.

    All on the same instance, with what the solved plan gains over 1F1B. A plan file is compared as it is:
    what else is said about solving does not count then.
    """
    from zbsolve.plan import load_plan
    from zbsolve.report.comparison import compare_with_baselines

    if Path(instance).is_file() and _schema_of(instance) == "plan":
        if memory_cap is not None:
            raise InputError(f"{instance}: is a plan, made under its own cap: leave out --memory-cap")
        plan = load_plan(instance)
        _require_valid(plan, instance)
    else:
        problem = _load_instance(instance)
        if memory_cap is not None:
            problem = problem.with_memory_cap(memory_cap)
        plan = _solve_with_progress(
            problem, objective=objective.value, solver=solver, time_limit=time_limit, seed=seed
        ).plan
    table = compare_with_baselines(plan)
    if as_json:
        typer.echo(json.dumps({**table.to_json_dict(), **_certificate(plan)}, indent=1))
    else:
        _print_comparison(table, plan)


def _certificate(plan: Plan) -> dict[str, Any]:
    data = plan.to_json_dict()
    return {key: data[key] for key in ("objective", "status", "lower_bound", "gap", "bound_proof")}


def _print_comparison(table: ComparisonTable, plan: Plan) -> None:
    from zbsolve.report.text import comparison_table

    _console().print(comparison_table(table, plan))
    typer.echo(
        f"{plan.objective} {plan.cost:.6g} {plan.instance.time_unit}: {plan.status}, gap {plan.gap:.3%} "
        f"({plan.bound_proof.method})"
    )
    if table.one_f_one_b:
        typer.echo(table.one_f_one_b)
    solved = table.rows[-1]
    fitting = [row for row in table.rows[:-1] if row.fits_cap]
    if fitting:
        best = min(fitting, key=lambda row: getattr(row, plan.objective))
        gain = 1 - plan.cost / getattr(best, plan.objective) if plan.cost else 0.0
        from zbsolve.report.comparison import gain_text

        typer.echo(f"{solved.name} over the best baseline that fits ({best.name}): {gain_text(gain)}")
    else:
        typer.echo("no baseline fits the cap")
    for name, rule in table.not_applicable:
        typer.echo(f"not applicable: {name}: {rule}")


@command("check")
def check_command(plan: PlanArgument) -> None:
    """Re-check every rule of a plan and re-derive its bound.

    Exit 0, or 1 with violations. A bound that an exact model proved is not re-derived, and that is said.
    """
    from zbsolve.plan import check_plan, load_plan
    from zbsolve.verify import reverify

    loaded = load_plan(plan)
    violations = check_plan(loaded)
    # Bounds speak of schedules that keep the rules; a wrong figure is no reason not to re-derive them.
    bound = None if any(v.rule != "figures" for v in violations) else reverify(loaded)
    if bound is not None and bound.violation is not None:
        violations.append(bound.violation)
    for violation in violations:
        typer.echo(str(violation))
    if violations:
        count = f"{len(violations)} violations" if len(violations) > 1 else "1 violation"
        raise InfeasibleError(f"{plan}: not valid: {count}")
    assert bound is not None
    actions = sum(len(program.actions) for program in loaded.programs)
    tasks = sum(1 for _ in loaded.schedule())
    typer.echo(
        f"{plan}: valid: {tasks} tasks and {(actions - tasks) // 2} messages on "
        f"{len(loaded.programs)} devices break no rule and cannot deadlock"
    )
    typer.echo(bound.sentence)


def _require_valid(plan: Plan, where: str) -> None:
    from zbsolve.plan import check_plan

    violations = check_plan(plan)
    if violations:
        raise InfeasibleError(f"{where}: not valid: {violations[0]} (zbsolve check lists every violation)")


# --- bench ---------------------------------------------------------------------------------------


@command("bench")
def bench_command(
    suite: Annotated[
        str, typer.Option(metavar="NAME", help="published, published-v, unequal, random or all.")
    ] = "published",
    time_limit: LimitOption = 60.0,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this instance, or pattern; repeatable.")
    ] = None,
    objective: Annotated[Objective | None, typer.Option(help="Only this objective (default: both).")] = None,
    versus_plain: Annotated[
        bool, typer.Option("--versus-plain", help="Also plain CP-SAT, HiGHS and CBC, same limit each.")
    ] = False,
    seed: SeedOption = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="R.json", help="Write the results here.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="F.md", help="Write the suite's section of this file.")
    ] = None,
    known: Annotated[
        Path | None, typer.Option(metavar="K.json", help="Known figures (default: those that ship).")
    ] = None,
    update_known: Annotated[
        bool, typer.Option("--update-known", help="Write better costs and bounds into the known figures.")
    ] = False,
) -> None:
    """Solve a suite: costs, bounds, published figures, 1F1B.

    Exit 1 where a cost and a bound, found now or known before, cannot both be right. Ctrl-C keeps the rows
    so far.
    """
    from datetime import date

    from zbsolve.bench import OBJECTIVES, Report, Row, make_cases, run_cases, summarise
    from zbsolve.files import write_text_atomically
    from zbsolve.known import improved, load_known, save_known, shipped_path
    from zbsolve.report.bench_tables import (
        plain_line,
        summary_lines,
        table_header,
        table_row,
        write_markdown,
    )

    for path in (output, markdown):
        _check_writable(path)
    _require_positive(time_limit, "--time-limit")
    cases = make_cases(suite, only or (), OBJECTIVES if objective is None else (objective.value,))
    # What decides the results, for whoever wants them again.
    chosen = [f"--suite {suite}", *(f"--only {name}" for name in only or ()), f"--time-limit {time_limit:g}"]
    if objective is not None:
        chosen.append(f"--objective {objective.value}")
    if seed:
        chosen.append(f"--seed {seed}")
    if versus_plain:
        chosen.append("--versus-plain")
    command_line = " ".join(("zbsolve bench", *chosen))
    known_path = shipped_path() if known is None else known
    if update_known:
        _check_writable(known_path)
    figures = load_known(known_path)
    today = date.today().isoformat()
    console, errors = _console(), _console(stderr=True)
    console.print(table_header())

    def show_row(report: Report, row: Row, plan: Plan) -> None:
        console.print(table_row(row))
        for run in row.plain:
            typer.echo(plain_line(run))
        for sentence in row.contradictions:
            typer.echo(f"CONTRADICTION: {sentence}")
        sys.stdout.flush()
        if output is not None:
            write_text_atomically(output, json.dumps(report.to_json_dict(), indent=1) + "\n")
        if update_known and not row.contradictions:
            # Read again: another run may have written meanwhile.
            before = load_known(known_path)
            after = improved(before, plan, today)
            if after is not before:
                save_known(known_path, after)

    with _status("bench …") as update:

        def start(number: int, case: Case) -> None:
            line = f"[{number}/{len(cases)}] {case.instance.name}, {case.objective}"
            if errors.is_terminal:
                update(line)
            else:
                typer.echo(line, err=True)

        def progress(case: Case, line: Progress) -> None:
            update(
                f"{case.instance.name}, {case.objective}: {line.seconds:.1f} s, {line.cost:.6g}, "
                f"bound {line.bound:.6g}, gap {line.gap:.2%} ({line.who})"
            )

        report = run_cases(
            cases,
            figures,
            time_limit=time_limit,
            date=today,
            command=command_line,
            seed=seed,
            versus_plain=versus_plain,
            on_start=start,
            on_progress=progress,
            on_row=show_row,
        )
    if not report.rows:
        raise KeyboardInterrupt
    for summary in summarise(report.rows):
        for text in summary_lines(summary):
            typer.echo(text)
    if output is not None:
        write_text_atomically(output, json.dumps(report.to_json_dict(), indent=1) + "\n")
        typer.echo(f"results: {output}")
    if markdown is not None:
        write_markdown(markdown, report)
        typer.echo(f"wrote {markdown}")
    if report.interrupted:
        typer.echo(f"zbsolve: interrupted: {len(report.rows)} of {len(cases)} rows are done", err=True)
    if report.contradictions:
        count = len(report.contradictions)
        pairs = (
            "1 pair of cost and bound contradicts"
            if count == 1
            else f"{count} pairs of cost and bound contradict"
        )
        raise InfeasibleError(f"{pairs} each other: see above")


# --- show ----------------------------------------------------------------------------------------

PICTURES = (".png", ".svg", ".pdf")


@command("show")
def show_command(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Plan, instance (or shipped name), or trace file.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="x.png|svg|pdf|trace.json", help="Write a picture or a trace."
        ),
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="T.json", help="Show this measured run over the plan.")
    ] = None,
    width: Annotated[int | None, typer.Option(min=40, help="Columns of the text chart.")] = None,
) -> None:
    """Draw a plan, an instance or a measured run.

    A plan: Gantt chart to scale and in-flight memory against the cap. An instance: its stages.
    """
    _check_writable(output)
    if output is not None and output.suffix not in PICTURES and not output.name.endswith(".trace.json"):
        raise InputError(f"{output}: unknown format: use {', '.join(PICTURES)} or .trace.json")
    kind = _schema_of(file) if Path(file).exists() or file.endswith(".json") else "instance"
    if trace is not None and kind != "plan":
        raise InputError(f"{file}: is no plan: --trace shows a run over the plan that was run")
    show = {"plan": _show_plan, "instance": _show_instance, "trace": _show_trace}[kind]
    show(file, output, trace, width)
    if output is not None:
        typer.echo(f"wrote {output}")


def _show_plan(file: str, output: Path | None, trace_file: str | None, width: int | None) -> None:
    from zbsolve.plan import load_plan
    from zbsolve.schedule import check
    from zbsolve.trace import compare, load_trace

    plan = load_plan(file)
    violations = check(plan.instance, plan.schedule())
    if violations:
        raise InfeasibleError(
            f"{file}: cannot be drawn: {violations[0]} (zbsolve check lists every violation)"
        )
    trace = None if trace_file is None else load_trace(trace_file)
    if trace is not None:
        try:
            compare(plan, trace)
        except InputError as error:  # a trace of another plan
            raise InputError(f"{trace_file}: {error}") from None
    if output is None:
        _print_gantt(plan, trace, width)
    elif output.suffix in PICTURES:
        from zbsolve.report.figures import save_plan_figure

        with _status(f"drawing {output} …"):
            save_plan_figure(output, plan, trace)
    else:
        from zbsolve.report.chrome_trace import chrome_trace, save_chrome_trace

        save_chrome_trace(output, chrome_trace(plan, trace))


def _print_gantt(plan: Plan, trace: Trace | None, width: int | None) -> None:
    from zbsolve.report.text import certificate_table, gantt, memory_table
    from zbsolve.report.timeline import measured_schedule

    console = _console()
    lanes = [("predicted", plan.schedule())]
    if trace is not None:
        lanes.append(("measured", measured_schedule(plan.instance, trace.median_step)))
    for line in gantt(plan.instance, lanes, width or console.width):
        console.print(line, soft_wrap=True)
    console.print(certificate_table(plan))
    console.print(memory_table(plan))


def _show_instance(file: str, output: Path | None, _trace: str | None, _width: int | None) -> None:
    instance = _load_instance(file)
    if output is None:
        from zbsolve.report.text import device_table, instance_table

        console = _console()
        console.print(instance_table(instance))
        console.print(device_table(instance))
    elif output.suffix in PICTURES:
        from zbsolve.report.figures import save_instance_figure

        save_instance_figure(output, instance)
    else:
        raise InputError(f"{file}: an instance has no timeline for {output}: solve it first")


def _show_trace(file: str, output: Path | None, _trace: str | None, width: int | None) -> None:
    from zbsolve.report.timeline import instance_of_trace, measured_schedule
    from zbsolve.trace import load_trace

    trace = load_trace(file)
    instance = instance_of_trace(trace)
    if output is None:
        from zbsolve.report.text import gantt, gradients_text

        console = _console()
        lanes = [("measured", measured_schedule(instance, trace.median_step))]
        for line in gantt(instance, lanes, width or console.width):
            console.print(line, soft_wrap=True)
        typer.echo(
            f"measured makespan {trace.makespan:.6g} {trace.time_unit}, median of {len(trace.steps)} steps "
            f"({trace.mode}, {trace.hardware}); gradients: {gradients_text(trace)}"
        )
    elif output.suffix in PICTURES:
        from zbsolve.report.figures import save_trace_figure

        save_trace_figure(output, instance, trace)
    else:
        from zbsolve.report.chrome_trace import chrome_trace_of_measurement, save_chrome_trace

        save_chrome_trace(output, chrome_trace_of_measurement(instance, trace))


# --- export, import ------------------------------------------------------------------------------


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
    import json

    from zbsolve import partition
    from zbsolve.files import write_text_atomically
    from zbsolve.report import text

    _check_writable(output)
    profile = partition.load_layers(layers)
    costs = [layer.cost for layer in profile.layers]
    splits = {
        "even": partition.even_split(len(costs), devices),
        "balanced": partition.balanced_split(costs, devices),
    }
    _console().print(text.partition_table(costs, splits, profile.time_unit))
    if output is not None:
        instance = partition.instance_of_split(profile, splits["balanced"], microbatches, hop)
        write_text_atomically(output, json.dumps(instance.to_json_dict(), indent=1) + "\n")
        typer.echo(f"wrote {output}")


@command("export")
def export_command(
    plan: PlanArgument,
    format_: Annotated[
        ExportFormat, typer.Option("--format", help="Format of the other stack.")
    ] = ExportFormat.torch_csv,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="x.csv", help="Write here, not to stdout.")
    ] = None,
) -> None:
    """Write a plan's orders for another stack.

    torch-csv is what torch 2.6 and later load as "compute_only". There, stage 0 has no split backward unless
    the model brings its own: its I does nothing and its W runs the whole backward.
    """
    from zbsolve.files import write_text_atomically
    from zbsolve.plan import load_plan
    from zbsolve.torch_csv import export_torch_csv

    _check_writable(output)
    loaded = load_plan(plan)
    _require_valid(loaded, plan)
    logger.debug("format %s", format_.value)
    text = export_torch_csv(loaded.instance, loaded.schedule().orders)
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_text_atomically(output, text)
        typer.echo(f"wrote {output}")


@command("import")
def import_command(
    file: Annotated[str, typer.Argument(metavar="x.csv", help="torch compute-only schedule CSV.")],
    instance: Annotated[
        str, typer.Option("--instance", "-i", metavar="I.json", help="Instance that it is for.")
    ],
    objective: ObjectiveOption = Objective.makespan,
    memory_cap: CapOption = None,
    output: PlanOutput = None,
    as_json: JsonOption = False,
) -> None:
    """Make another stack's schedule a plan: checked and timed."""
    from zbsolve.simulator import simulate_for
    from zbsolve.solver import certify
    from zbsolve.torch_csv import import_torch_csv

    _check_writable(output)
    problem = _load_instance(instance)
    if memory_cap is not None:
        problem = problem.with_memory_cap(memory_cap)
    try:
        text = Path(file).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"{file}: cannot be read ({reason}): give a CSV file") from None
    orders = import_torch_csv(text, problem, file)
    try:
        schedule = simulate_for(problem, orders, objective.value)
        plan = certify(problem, schedule, objective.value, f"imported from {Path(file).name}")
    except InfeasibleError as error:
        raise InfeasibleError(f"{file}: {error}") from None
    if output is not None:
        plan.save(output)
    if as_json:
        typer.echo(plan.to_json(), nl=False)
    else:
        _print_plan(plan)
        if output is not None:
            typer.echo(f"plan: {output}")


# --- profile, run, demo --------------------------------------------------------------------------


def _runtime() -> ModuleType:
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


ModelOption = Annotated[str, typer.Option(metavar="MODEL", help="gpt, or pkg.module:factory.")]
LayersOption = Annotated[
    str | None, typer.Option(metavar="N,N,…", help="Layers of each stage (default: even split).")
]
ThreadsOption = Annotated[int, typer.Option(min=1, help="Threads of each process.")]
TimeoutOption = Annotated[
    float, typer.Option(metavar="S", help="Give up when a process stays silent so long.")
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
) -> None:
    """Measure a model's pass times, memory and hop latency here.

    T_F, T_B, T_W, T_BW, M_B and M_W of each stage, with all processes busy at once.
    """
    from zbsolve.files import write_text_atomically
    from zbsolve.instance import equal_stages
    from zbsolve.report.text import device_table, instance_table

    _check_writable(output)
    _require_positive(timeout, "--timeout")
    layers = _integers(layers_per_stage, "--layers-per-stage")
    if memory_cap is not None:
        equal_stages(1, 1).with_memory_cap(memory_cap)  # refuse a bad cap before the measurement, not after
    runtime = _runtime()
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
    )
    with _status(f"profiling {model} …") as update:
        instance: Instance = runtime.profile_model(options, update)
    if memory_cap is not None:
        instance = instance.with_memory_cap(memory_cap)
    write_text_atomically(output, json.dumps(instance.to_json_dict(), indent=1) + "\n")
    console = _console()
    console.print(instance_table(instance))
    console.print(device_table(instance))
    typer.echo(f"instance: {output}")


@command("run")
def run_command(
    plan: PlanArgument,
    model: ModelOption = "gpt",
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
    seed: SeedOption = 0,
    backend: Annotated[Backend, typer.Option(help="Transport.")] = Backend.auto,
    trace_out: Annotated[
        Path | None, typer.Option("--trace-out", metavar="T.json", help="Write the measured trace here.")
    ] = None,
) -> None:
    """Execute a plan on torch: predicted against measured.

    One process per device. Under torchrun use: torchrun … -m zbsolve.runtime.worker P.json
    """
    from zbsolve.plan import load_plan

    _check_writable(trace_out)
    _require_positive(timeout, "--timeout")
    if not payload_mib < math.inf:
        raise InputError(f"--payload-mib {payload_mib:g}: give a number of MiB")
    loaded = load_plan(plan)
    _require_valid(loaded, plan)
    layers = _integers(layers_per_stage, "--layers-per-stage")
    runtime = _runtime()
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
    )
    with _status(f"running {plan} …") as update:
        trace: Trace = runtime.run_plan(loaded, options, update)
    if trace_out is not None:
        trace.save(trace_out)
    _print_run(loaded, trace)
    if trace_out is not None:
        typer.echo(f"trace: {trace_out}")
    if trace.gradients is not None and not trace.gradients.equal:
        raise InfeasibleError(f"{plan}: gradients differ from the unpipelined model: see above")


def _print_run(plan: Plan, trace: Trace) -> None:
    from zbsolve.report.text import lost_time_table, prediction_table, run_lines
    from zbsolve.trace import compare

    comparison = compare(plan, trace)
    console = _console()
    console.print(prediction_table(comparison, plan.instance.time_unit))
    console.print(lost_time_table(comparison, plan.instance.time_unit))
    for line in run_lines(comparison, trace, plan):
        typer.echo(line)


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
    _runtime()
    from zbsolve.demo import run_demo
    from zbsolve.report.text import demo_table

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be made a folder ({error.strerror}): choose another place") from None
    with _status("demo …") as update:
        result = run_demo(out, quick=quick, progress=update)
    _console().print(demo_table(result.rows))
    for note in result.notes:
        typer.echo(note)
    typer.echo("files:")
    for path, meaning in result.files:
        typer.echo(f"  {path}  {meaning}")
    if not result.gradients_equal:
        raise InfeasibleError("gradients differ from the unpipelined model: see the table")


def main() -> None:
    """Entry point of the ``zbsolve`` command."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without µ is no reason to fail
    # A big plan is millions of small objects that all stay: collecting young ones often finds nothing and
    # costs a fifth of the time.
    gc.set_threshold(200_000, 20, 20)
    app()
