"""Running a suite: every case solved under one limit, beside published figures and known bests.

Every row is a real solve; its plan is re-timed and re-checked by the solver front, and its cost and bound are
held against everything that known.json has. Costs and bounds do not depend on the machine where the proof
closes within the limit; elsewhere a faster machine may find and prove more. Nothing here prints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from zbsolve.baselines.comparison import one_f_one_b_cost
from zbsolve.benchmark.known import Claim, Known, contradictions
from zbsolve.benchmark.rows import PlainRun, Report, Row
from zbsolve.benchmark.suites import Case
from zbsolve.errors import EnvironmentFailedError
from zbsolve.formulations.backend import Question
from zbsolve.formulations.backends import BACKENDS
from zbsolve.formulations.common import FormulationResult
from zbsolve.model.instance import Instance
from zbsolve.model.judge import check
from zbsolve.model.objective import Objective
from zbsolve.model.simulator import simulate_for
from zbsolve.plan.certificate import relative_gap
from zbsolve.plan.plan import Plan
from zbsolve.solver.portfolio import Progress, solve

log = logging.getLogger(__name__)


def run_cases(
    cases: Sequence[Case],
    known: Known,
    *,
    time_limit: float,
    date: str,
    command: str = "zbsolve bench",
    seed: int = 0,
    solver: str = "auto",
    versus_plain: bool = False,
    on_start: Callable[[int, Case], None] | None = None,
    on_progress: Callable[[Case, Progress], None] | None = None,
    on_row: Callable[[Report, Row, Plan], None] | None = None,
) -> Report:
    """Solve every case; ``on_row`` hears each row with the report so far and the row's plan.

    ``command`` is what the report names as its origin.
    Ctrl-C ends the run with the rows so far (``interrupted``); the case it hit is dropped, for its figures
    are not those of the limit.
    """
    report = Report(command, time_limit, seed, date, len(cases))
    try:
        for number, case in enumerate(cases, start=1):
            if on_start is not None:
                on_start(number, case)

            def hear(line: Progress, case: Case = case) -> None:
                if on_progress is not None:
                    on_progress(case, line)

            began = time.monotonic()
            result = solve(
                case.instance,
                objective=case.objective,
                solver=solver,
                time_limit=time_limit,
                seed=seed,
                progress=hear,
            )
            seconds = time.monotonic() - began
            if result.interrupted:
                raise KeyboardInterrupt
            row = _make_row(case, known, result.plan, seconds, solver, time_limit, versus_plain, seed)
            report.rows.append(row)
            if on_row is not None:
                on_row(report, row, result.plan)
    except KeyboardInterrupt:
        report.interrupted = True
    return report


def _make_row(
    case: Case,
    known: Known,
    plan: Plan,
    seconds: float,
    solver: str,
    time_limit: float,
    versus_plain: bool,
    seed: int,
) -> Row:
    instance, objective = case.instance, case.objective
    published = known.published(instance, objective)
    reference, reason = one_f_one_b_cost(instance, objective)
    heuristic = plan.cost
    if solver != "heuristic":
        alone = solve(instance, objective=objective, solver="heuristic", seed=seed)
        if alone.interrupted:
            raise KeyboardInterrupt
        heuristic = alone.plan.cost
    plain = tuple(run_plain(instance, objective, time_limit, seed)) if versus_plain else ()
    extra = []
    for run in plain:
        name = f"plain {run.solver}"
        if run.cost is not None:
            extra.append((Claim(run.cost, name), Claim(plan.lower_bound, plan.bound_proof.statement)))
        if run.bound is not None:
            extra.append((Claim(plan.cost, f"found by {plan.solver.name}"), Claim(run.bound, name)))
    return Row(
        suite=case.suite,
        instance=instance.name,
        objective=objective,
        cost=plan.cost,
        bound=plan.lower_bound,
        gap=plan.gap,
        status=plan.status,
        found_by=plan.solver.name,
        proven_by=plan.bound_proof.method,
        statement=plan.bound_proof.statement,
        seconds=seconds,
        published=None if published is None else published.cost,
        published_rounding=None if published is None else published.rounding,
        published_schedule=None if published is None else published.schedule,
        one_f_one_b=reference,
        one_f_one_b_reason=reason,
        heuristic=heuristic,
        plain=plain,
        contradictions=tuple(contradictions(known, plan, tuple(extra))),
        time_limit=time_limit,
    )


def run_plain(instance: Instance, objective: Objective, time_limit: float, seed: int) -> Iterator[PlainRun]:
    """Every exact model that knows the instance's options, bare, each under the limit."""
    tasks = instance.num_tasks
    question = Question(instance=instance, objective=objective, time_limit=time_limit, seed=seed)
    for backend in BACKENDS:
        if not backend.models(instance):
            continue
        if tasks > backend.most_tasks_alone:
            yield PlainRun(backend.name, skipped=f"{tasks} tasks are over {backend.most_tasks_alone}")
            continue
        try:
            result = backend.solve(question)
        except (EnvironmentFailedError, ImportError) as error:
            yield PlainRun(backend.name, skipped=str(error))
            continue
        yield _judged(backend.name, instance, objective, result)


def _judged(name: str, instance: Instance, objective: Objective, result: FormulationResult) -> PlainRun:
    """A plain model's answer, re-timed and re-checked like every other."""
    cost = None
    if result.orders is not None:
        schedule = simulate_for(instance, result.orders, objective, result.pairs)
        violations = check(instance, schedule)
        if violations:
            log.warning("plain %s: the schedule breaks a rule (%s): dropped", name, violations[0])
        else:
            cost = schedule.cost(objective)
    bound = result.bound
    return PlainRun(
        solver=name,
        status=result.status.value,
        cost=cost,
        bound=bound,
        gap=None if cost is None or bound is None else relative_gap(cost, bound),
        seconds=result.seconds,
    )
