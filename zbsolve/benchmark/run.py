"""The benchmark: suites of instances solved under one limit, beside published figures and known bests.

Every row is a real solve; its plan is re-timed and re-checked by the solver front, and its cost and bound are
held against everything that known.json has. Costs and bounds do not depend on the machine where the proof
closes within the limit; elsewhere a faster machine may find and prove more. Nothing here prints.
"""

from __future__ import annotations

import fnmatch
import logging
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import as_file, files
from typing import Any

from zbsolve import __version__
from zbsolve.baselines import BASELINES
from zbsolve.baselines.comparison import one_f_one_b_cost
from zbsolve.benchmark.known import Claim, Known, contradictions
from zbsolve.benchmark.random_instances import SEEDS, random_instance
from zbsolve.errors import EnvironmentFailedError, InputError
from zbsolve.formulations.backend import Question
from zbsolve.formulations.backends import BACKENDS
from zbsolve.formulations.common import FormulationResult
from zbsolve.model.instance import Instance, equal_stages, load_instance
from zbsolve.model.judge import check
from zbsolve.model.memory import peak_memory
from zbsolve.model.objective import OBJECTIVES, Objective
from zbsolve.model.simulator import simulate_for
from zbsolve.model.tolerances import OPTIMAL_GAP
from zbsolve.plan.certificate import relative_gap
from zbsolve.plan.plan import Plan
from zbsolve.solver.portfolio import Progress, solve

log = logging.getLogger(__name__)


# --- suites --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One instance and objective of a suite."""

    suite: str
    instance: Instance
    objective: Objective


def _shipped(prefix: str) -> Iterator[Instance]:
    """Instances that ship with the package, by the beginning of their names, numbers in numeric order."""
    found = [entry for entry in files("zbsolve.instances").iterdir() if entry.name.startswith(prefix)]
    for entry in sorted(found, key=lambda entry: _natural(entry.name)):
        with as_file(entry) as path:
            yield load_instance(path)


def _natural(name: str) -> list[float | str]:
    return [float(part) if part[:1].isdigit() else part for part in re.split(r"(\d+(?:\.\d+)?)", name)]


def _v_memory() -> Iterator[Instance]:
    """The ZB-V cells under less memory: shares of 1F1B's p M_B, and what V-Half and V-Min themselves hold.

    V-Half's and V-Min's own peaks differ by device: the cap is the highest.
    """
    for instance in _shipped("zbv-"):
        caps = {f"{share:g}p": share * instance.cap(0) for share in (0.5, 0.75)}
        for name in ("v-half", "v-min"):
            orders = BASELINES[name].orders(instance.with_memory_cap(None))
            caps[name] = max(peak_memory(instance, d, order) for d, order in enumerate(orders))
        for suffix, cap in caps.items():
            yield instance.with_changes(name=f"{instance.name}-{suffix}", memory_cap=cap)


def _large() -> Iterator[Instance]:
    """Steps of up to 60,000 tasks, where a time limit is hardest to keep: linear, loop and V."""
    yield equal_stages(4, 5_000, 1.0, 1.1, 0.9, 0.1, memory_cap=6.0, name="large-linear-p4-m5000")
    loop = equal_stages(32, 512, 1.0, 1.1, 0.9, 0.1)
    stages = [stage.model_copy(update={"device": s % 8}) for s, stage in enumerate(loop.stages)]
    loop = loop.with_changes(stages=stages, num_devices=8)
    for cap in (40.0, 9.0):
        yield loop.with_changes(name=f"large-loop-p8-m512-{cap:g}", memory_cap=cap)
    for name in ("zbv-p32-m256", "zb-28.3B-m256-2p", "unequal-8-m64-1p"):
        (instance,) = _shipped(f"{name}.json")
        yield instance


SUITES: dict[str, Callable[[], Iterator[Instance]]] = {
    "published": lambda: _shipped("zb-"),
    "published-v": lambda: _shipped("zbv-"),
    "v-memory": _v_memory,
    "unequal": lambda: _shipped("unequal-"),
    "random": lambda: map(random_instance, SEEDS),
    "large": _large,
}


def make_cases(
    suite: str, only: Sequence[str] = (), objectives: Sequence[Objective] = OBJECTIVES
) -> list[Case]:
    """The cases of a suite ("all" for every one), restricted to names or patterns such as ``zb-1.5B-*``.

    Raises
    ------
    InputError
        Unknown suite, or a name that is not in it.
    """
    if suite != "all" and suite not in SUITES:
        raise InputError(f"suite {suite!r} is not known: use one of {', '.join((*SUITES, 'all'))}")
    names = list(SUITES) if suite == "all" else [suite]
    instances = [(name, instance) for name in names for instance in SUITES[name]()]
    for pattern in only:
        if not any(fnmatch.fnmatchcase(instance.name, pattern) for _, instance in instances):
            raise InputError(
                f"--only {pattern}: the suite {suite!r} has no such instance: "
                f"it has {', '.join(instance.name for _, instance in instances[:3])}, …"
            )
    return [
        Case(name, instance, objective)
        for name, instance in instances
        if not only or any(fnmatch.fnmatchcase(instance.name, pattern) for pattern in only)
        for objective in objectives
    ]


# --- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlainRun:
    """A plain model, without hint, lower bound or search around it. ``skipped`` says why it was not run."""

    solver: str
    skipped: str | None = None
    status: str | None = None
    cost: float | None = None
    bound: float | None = None
    gap: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Outcome of one case.

    Attributes
    ----------
    published, published_rounding, published_schedule
        The published cost, what its printed digits leave open, and the schedule it belongs to.
    one_f_one_b, one_f_one_b_reason
        Cost of 1F1B on the instance; None with the reason where it does not apply or fit the cap.
    heuristic : float
        Cost of the first plan: baselines that fit, and the heuristics, without search or exact model.
    time_limit : float
        Seconds that the solve was given; ``seconds`` is what it took.
    contradictions : tuple of str
        Sentences about pairs of cost and bound that cannot both be right.
    """

    suite: str
    instance: str
    objective: Objective
    cost: float
    bound: float
    gap: float
    status: str
    found_by: str
    proven_by: str
    statement: str
    seconds: float
    published: float | None
    published_rounding: float | None
    published_schedule: str | None
    one_f_one_b: float | None
    one_f_one_b_reason: str
    heuristic: float
    plain: tuple[PlainRun, ...] = ()
    contradictions: tuple[str, ...] = ()
    time_limit: float = math.inf

    @property
    def limit_kept(self) -> bool:
        """Whether the solve took no more than 1 s or a fifth above its limit, whichever is more."""
        return self.seconds <= max(self.time_limit + 1.0, 1.2 * self.time_limit)

    @property
    def optimal(self) -> bool:
        return self.status == "optimal"

    @property
    def published_gain(self) -> float | None:
        """Share of the published cost that is saved."""
        return None if not self.published else (self.published - self.cost) / self.published

    @property
    def one_f_one_b_gain(self) -> float | None:
        """Share of 1F1B's step that is saved."""
        return None if not self.one_f_one_b else (self.one_f_one_b - self.cost) / self.one_f_one_b

    @property
    def worse_than_published(self) -> bool:
        """Whether the cost is above the published one by more than its printed digits leave open."""
        if self.published is None or self.published_rounding is None:
            return False
        return self.cost > (self.published + self.published_rounding) * (1 + OPTIMAL_GAP)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a suite's rows come to. Gaps are shares of the cost; ``p90`` is the nearest-rank percentile.

    ``most_of_limit``: seconds over time limit of the row in which that is most.
    """

    suite: str
    rows: int
    optimal: int
    within_01_percent: int
    within_05_percent: int
    median_gap: float
    p90_gap: float
    max_gap: float
    worst: str
    published: int
    worse_than_published: int
    better_than_published: int
    median_one_f_one_b_gain: float | None
    limits_kept: int
    most_of_limit: float


def summarise(rows: Iterable[Row]) -> list[Summary]:
    """One summary a suite, in the order of the rows."""
    by_suite: dict[str, list[Row]] = {}
    for row in rows:
        by_suite.setdefault(row.suite, []).append(row)
    return [_summary(suite, members) for suite, members in by_suite.items()]


def _summary(suite: str, rows: list[Row]) -> Summary:
    gaps = sorted(row.gap for row in rows)
    worst = max(rows, key=lambda row: row.gap)
    published = [row for row in rows if row.published is not None]
    gains = [row.one_f_one_b_gain for row in rows if row.one_f_one_b_gain is not None]
    return Summary(
        suite=suite,
        rows=len(rows),
        optimal=sum(row.optimal for row in rows),
        within_01_percent=sum(gap <= 1e-3 for gap in gaps),
        within_05_percent=sum(gap <= 5e-3 for gap in gaps),
        median_gap=statistics.median(gaps),
        p90_gap=gaps[math.ceil(0.9 * len(gaps)) - 1],
        max_gap=gaps[-1],
        worst=f"{worst.instance}, {worst.objective}",
        published=len(published),
        worse_than_published=sum(row.worse_than_published for row in published),
        better_than_published=sum(
            row.cost < (row.published - (row.published_rounding or 0.0)) * (1 - OPTIMAL_GAP)
            for row in published
            if row.published is not None
        ),
        median_one_f_one_b_gain=statistics.median(gains) if gains else None,
        limits_kept=sum(row.limit_kept for row in rows),
        most_of_limit=max(row.seconds / row.time_limit for row in rows),
    )


@dataclass
class Report:
    """Rows so far, and how they were made."""

    command: str
    time_limit: float
    seed: int
    date: str
    planned: int
    rows: list[Row] = field(default_factory=list)
    interrupted: bool = False

    @property
    def contradictions(self) -> list[str]:
        return [sentence for row in self.rows for sentence in row.contradictions]

    def to_json_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "schema": "zbsolve.bench/1",
            "command": self.command,
            "version": __version__,
            "date": self.date,
            "time_limit": self.time_limit,
            "seed": self.seed,
            "cpu_count": os.cpu_count(),
            "planned": self.planned,
            "interrupted": self.interrupted,
            "summaries": [asdict(summary) for summary in summarise(self.rows)],
            "rows": [asdict(row) for row in self.rows],
        }


# --- running -------------------------------------------------------------------------------------


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
