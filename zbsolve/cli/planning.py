"""``solve``, ``compare`` and ``check``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zbsolve.cli.base import command, echo_json, make_console, say_interrupted, status
from zbsolve.cli.inputs import (
    CapOption,
    GapOption,
    InstanceArgument,
    JsonOption,
    LimitOption,
    Objective,
    ObjectiveOption,
    PlanArgument,
    PlanOutput,
    SeedOption,
    SolverOption,
    check_picture,
    check_writable,
    load_any,
    load_instance,
    require_valid,
)
from zbsolve.cli.names import shipped, solver_named
from zbsolve.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from zbsolve.baselines.comparison import ComparisonTable
    from zbsolve.model.instance import Instance
    from zbsolve.plan.plan import Plan
    from zbsolve.solver.portfolio import Progress, SolveResult


def solve_with_progress(instance: Instance, **options: Any) -> SolveResult:
    """Solve under a spinner that tells how it goes; says so when Ctrl-C ended it."""
    from zbsolve.solver.interrupts import one_stops_the_search
    from zbsolve.solver.portfolio import solve

    options["solver"] = solver_named(options["solver"])
    unit, objective = instance.time_unit, options["objective"]
    with status(f"solving {instance.name} …") as update:

        def show(progress: Progress) -> None:
            update(
                f"solving {instance.name}: {progress.seconds:.1f} s, {objective} {progress.cost:.6g} {unit}, "
                f"bound {progress.bound:.6g}, gap {progress.gap:.2%} ({progress.who})"
            )

        with one_stops_the_search() as stop:
            result = solve(instance, progress=show, stop=stop, **options)
    if result.interrupted:
        say_interrupted()
    if result.note:
        typer.echo(f"zbsolve: {result.note}", err=True)
    return result


@command("solve")
def solve_command(
    instance: InstanceArgument,
    objective: ObjectiveOption = Objective.makespan,
    memory_cap: CapOption = None,
    solver: SolverOption = "auto",
    time_limit: LimitOption = 60.0,
    seed: SeedOption = 0,
    gap: GapOption = 0.0,
    deterministic: Annotated[bool, typer.Option(help="Same seed, same bytes; no wall-clock limits.")] = False,
    output: PlanOutput = None,
    curve: Annotated[
        Path | None, typer.Option(metavar="x.png|svg|pdf", help="Draw cost and bound over the search.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the best plan for an instance, and prove how good it is."""
    check_writable(output)
    check_picture(curve)
    result = solve_with_progress(
        load_instance(instance, memory_cap),
        objective=objective.value,
        solver=solver,
        time_limit=time_limit,
        seed=seed,
        deterministic=deterministic,
        gap=gap,
    )
    if output is not None:
        result.plan.save(output)
    if curve is not None:
        from zbsolve.report.curves import save_search_figure

        save_search_figure(curve, result)
    if as_json:
        typer.echo(result.plan.to_json(), nl=False)
    else:
        print_plan(result.plan)
        if output is not None:
            typer.echo(f"plan: {output}")
        if curve is not None:
            typer.echo(f"wrote {curve}")


def print_plan(plan: Plan) -> None:
    from zbsolve.baselines.comparison import best_baseline, gain_text, reference_cost
    from zbsolve.report.text import certificate_table, memory_table

    console = make_console()
    console.print(certificate_table(plan))

    def say_gain(over: str, reference: float) -> None:
        gain = (reference - plan.cost) / reference if reference else 0.0
        typer.echo(
            f"gain over {over}: {gain_text(gain)} ({plan.objective} {plan.cost:.6g} against {reference:.6g} "
            f"{plan.instance.time_unit})"
        )

    reference, note = reference_cost(plan.instance, plan.objective)
    if reference is None:
        typer.echo(f"gain over 1F1B: none to state: {note}")
    else:
        say_gain("1F1B" + note.removeprefix("gains are over 1F1B"), reference)
    best = best_baseline(plan.instance, plan.objective)
    if best is not None and best[0] != "1f1b":
        say_gain(f"the best baseline of this model that fits, {best[0]}", best[1])
    console.print(memory_table(plan))


# What decides a solve: nothing to say about a plan, which is solved already.
SOLVE_OPTIONS = ("objective", "memory_cap", "solver", "time_limit", "seed")


@command("compare")
def compare_command(
    ctx: typer.Context,
    instance: Annotated[
        str,
        typer.Argument(
            metavar="I.json",
            help="Instance file or shipped name, or a plan file.",
            autocompletion=shipped("instance"),
        ),
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
    options about solving are refused then.
    """
    from zbsolve.baselines.comparison import compare_with_baselines
    from zbsolve.plan.plan import Plan

    plan = load_any(instance)
    if isinstance(plan, Plan):
        _refuse_solve_options(ctx, instance)
        require_valid(plan, instance)
    else:
        problem = plan if memory_cap is None else plan.with_memory_cap(memory_cap)
        plan = solve_with_progress(
            problem, objective=objective.value, solver=solver, time_limit=time_limit, seed=seed
        ).plan
    table = compare_with_baselines(plan)
    if as_json:
        echo_json({**table.to_json_dict(), **certificate_of(plan)})
    else:
        _print_comparison(table, plan)


def _refuse_solve_options(ctx: typer.Context, where: str) -> None:
    """A plan cannot be solved another way: say so where an option asks for it."""
    sources = {name: ctx.get_parameter_source(name) for name in SOLVE_OPTIONS}
    given = [
        "--" + name.replace("_", "-")
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    ]
    if given:
        raise InputError(
            f"{where}: is a plan, solved already: leave out {' and '.join(given)}, or give its instance"
        )


def certificate_of(plan: Plan) -> dict[str, Any]:
    data = plan.to_json_dict()
    return {key: data[key] for key in ("objective", "status", "lower_bound", "gap", "bound_proof")}


def _print_comparison(table: ComparisonTable, plan: Plan) -> None:
    from zbsolve.baselines.comparison import SHORT, gain_text
    from zbsolve.report.text import comparison_memory_table, comparison_table

    console = make_console()
    console.print(comparison_table(table, plan))
    console.print(comparison_memory_table(table, plan))
    for change in dict.fromkeys(row.runs_on for row in table.rows if row.runs_on):
        typer.echo(f"({SHORT[change]}) the same model with {change}")
    typer.echo(
        f"{plan.objective} {plan.cost:.6g} {plan.instance.time_unit}: {plan.status}, gap {plan.gap:.3%} "
        f"({plan.bound_proof.method})"
    )
    if table.one_f_one_b:
        typer.echo(table.one_f_one_b)
    solved = table.rows[-1]
    fitting = [row for row in table.rows[:-1] if row.fits_cap and not row.runs_on]
    elsewhere = [row for row in table.rows[:-1] if row.fits_cap and row.runs_on]
    if fitting:
        best = min(fitting, key=lambda row: getattr(row, plan.objective))
        gain = 1 - plan.cost / getattr(best, plan.objective) if plan.cost else 0.0
        typer.echo(f"{solved.name} over the best baseline that fits ({best.name}): {gain_text(gain)}")
    else:
        typer.echo("no baseline fits the cap")
    if elsewhere:
        best = min(elsewhere, key=lambda row: getattr(row, plan.objective))
        cost = getattr(best, plan.objective)
        if cost < plan.cost:
            typer.echo(
                f"with {best.runs_on}, {best.name} takes {cost:.6g} {plan.instance.time_unit}, "
                f"{1 - cost / plan.cost:.1%} less than this plan"
            )
    for name, rule in table.not_applicable:
        typer.echo(f"not applicable: {name}: {rule}")


@command("check")
def check_command(plan: PlanArgument) -> None:
    """Re-check every rule of a plan and re-derive its bound.

    Exit 0, or 1 with violations. A bound that an exact model proved is not re-derived, and that is said.
    """
    from zbsolve.plan.check import check_plan
    from zbsolve.plan.plan import load_plan
    from zbsolve.solver.verify import reverify

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
