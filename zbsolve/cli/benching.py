"""``bench``: every instance of a suite, against known results and other solvers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zbsolve.cli.base import command, make_console, status
from zbsolve.cli.inputs import LimitOption, Objective, SeedOption, check_writable, require_positive
from zbsolve.cli.names import Kind, listed, one_of, solvers
from zbsolve.errors import InfeasibleError
from zbsolve.words import pick

if TYPE_CHECKING:
    from zbsolve.benchmark.suites import Case
    from zbsolve.plan.plan import Plan
    from zbsolve.solver.portfolio import Progress


@command("bench")
def bench_command(
    suite: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="published, published-v, v-memory, unequal, random, large or all.",
            autocompletion=one_of(lambda: (*listed(Kind.suites), "all")),
        ),
    ] = "published",
    time_limit: LimitOption = 60.0,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this instance, or pattern; repeatable.")
    ] = None,
    objective: Annotated[Objective | None, typer.Option(help="Only this objective (default: both).")] = None,
    solver: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="auto, or another solver: heuristic for the first plan alone.",
            autocompletion=one_of(solvers),
        ),
    ] = "auto",
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

    from zbsolve.benchmark.known import improved, load_known, save_known, shipped_path
    from zbsolve.benchmark.rows import Report, Row, summarise
    from zbsolve.benchmark.run import run_cases
    from zbsolve.benchmark.suites import make_cases
    from zbsolve.files.atomic import write_json_atomically
    from zbsolve.model.objective import OBJECTIVES
    from zbsolve.report.bench_tables import (
        plain_line,
        summary_lines,
        table_header,
        table_row,
        write_markdown,
    )
    from zbsolve.solver.portfolio import SOLVERS

    for path in (output, markdown):
        check_writable(path)
    require_positive(time_limit, "--time-limit")
    solver = pick(solver, SOLVERS, "--solver")
    cases = make_cases(suite, only or (), OBJECTIVES if objective is None else (objective.value,))
    # What decides the results, for whoever wants them again.
    chosen = [f"--suite {suite}", *(f"--only {name}" for name in only or ()), f"--time-limit {time_limit:g}"]
    if objective is not None:
        chosen.append(f"--objective {objective.value}")
    if solver != "auto":
        chosen.append(f"--solver {solver}")
    if seed:
        chosen.append(f"--seed {seed}")
    if versus_plain:
        chosen.append("--versus-plain")
    command_line = " ".join(("zbsolve bench", *chosen))
    known_path = shipped_path() if known is None else known
    if update_known:
        check_writable(known_path)
    figures = load_known(known_path)
    today = date.today().isoformat()
    console, errors = make_console(), make_console(stderr=True)
    console.print(table_header())

    def show_row(report: Report, row: Row, plan: Plan) -> None:
        console.print(table_row(row))
        for run in row.plain:
            typer.echo(plain_line(run))
        for sentence in row.contradictions:
            typer.echo(f"CONTRADICTION: {sentence}")
        sys.stdout.flush()
        if output is not None:
            write_json_atomically(output, report.to_json_dict())
        if update_known and not row.contradictions:
            # Read again: another run may have written meanwhile.
            before = load_known(known_path)
            after = improved(before, plan, today)
            if after is not before:
                save_known(known_path, after)

    with status("bench …") as update:

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
            solver=solver,
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
        write_json_atomically(output, report.to_json_dict())
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
