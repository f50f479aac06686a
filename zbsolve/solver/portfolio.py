"""The portfolio: baselines, heuristic, search and exact models under one time limit, with a certificate.

A solver's word is never taken: every schedule is re-timed on the unrounded instance and re-checked, and
the incumbent is the best that passed. Lower bounds come from :mod:`zbsolve.bounds.catalogue` and from
formulations that proved theirs for the unrounded instance; the highest is kept, with who proved it.

A solve is a row of phases over one :class:`zbsolve.solver.state.Search`. A further phase is a function there,
which keeps its budget, and a line in one of the tables here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from zbsolve import __version__
from zbsolve.baselines import BASELINES
from zbsolve.bounds.bound import Bound
from zbsolve.bounds.catalogue import best_bound
from zbsolve.budget import Stop, collector_paused
from zbsolve.errors import InfeasibleError, InputError
from zbsolve.formulations.backends import EXACT_SOLVERS, backends_for
from zbsolve.model.instance import Instance
from zbsolve.model.judge import check
from zbsolve.model.objective import Objective, column_of
from zbsolve.model.options import is_extended
from zbsolve.model.schedule import Schedule
from zbsolve.model.serial import require_feasible, shortage
from zbsolve.plan.certificate import Proof, ProvenLag, ShavedTime, SolverInfo
from zbsolve.plan.make import make_plan, peaks_of
from zbsolve.plan.plan import Plan
from zbsolve.search.canonical import Orders, canonical
from zbsolve.solver import exact, improve, options, prove
from zbsolve.solver.construct import construct, prove_bounds
from zbsolve.solver.state import LIMIT_KEPT_TASKS, Search
from zbsolve.solver.state import Progress as Progress
from zbsolve.solver.with_options import without_options

log = logging.getLogger(__name__)

Phase = Callable[[Search], None]


@dataclass(frozen=True, slots=True)
class SolveResult:
    """The plan, how it came about, whether Ctrl-C ended the search early, and what the limit cut short."""

    plan: Plan
    history: tuple[Progress, ...]
    interrupted: bool = False
    note: str = ""


# --- phases --------------------------------------------------------------------------------------

# What the ordinary solver gets of the time on an instance without its options, R folded into the backward: of
# one that recomputes, and of others.
PLAIN_SHARE, PLAIN_SHARE_BESIDE_PAIRS = 0.3, 0.1


def _exactly(solver: str) -> Phase:
    def solve_exactly(search: Search) -> None:
        exact.solve_exactly(search, solver)

    return solve_exactly


def _without_options(solver: str) -> Phase:
    """The ordinary solver's plan of the instance without these options."""

    def solve_without_options(search: Search) -> None:
        instance = search.instance
        beginning = options.BEGINNING_SECONDS_A_TASK * instance.num_tasks
        if instance.replicas > 1 or not search.budget.affords(beginning):
            return
        share = PLAIN_SHARE if instance.recomputes else PLAIN_SHARE_BESIDE_PAIRS
        limit = max(1e-3, share * search.left)
        plain = solve(
            without_options(instance),
            objective=search.objective,
            solver=solver,
            time_limit=limit,
            seed=search.seed,
            deterministic=search.deterministic,
            stop=search.stop,
        )
        search.budget.charge(limit)
        options.offer_unfolded(search, plain.plan.schedule().orders, plain.plan.solver.name)

    return solve_without_options


# By solver, what follows the first plans and bounds: on instances without options, and on those with
# recomputation, F&B pairs or replicas. Exact solvers' names are those of their backends.
SOLVERS: dict[str, tuple[Phase, ...]] = {
    "auto": (
        prove.prove_lags,
        improve.search_patterns,
        improve.search_policies,
        prove.refute,
        improve.anneal,
        prove.refute_by_trial,
        improve.anneal_again,
        exact.finish_exactly,
    ),
    "heuristic": (),
    **{solver: (_exactly(solver),) for solver in EXACT_SOLVERS},
}

SOLVERS_WITH_OPTIONS: dict[str, tuple[Phase, ...]] = {
    "auto": (
        options.solve_small_exactly,
        options.descend,
        _without_options("auto"),
        options.anneal,
        options.finish_exactly,
    ),
    "heuristic": (_without_options("heuristic"),),
    **{solver: (_exactly(solver),) for solver in EXACT_SOLVERS},
}


def phases_for(solver: str, instance: Instance) -> tuple[Phase, ...]:
    """What a solver does after the first plans.

    Raises
    ------
    InputError
        It is an exact solver that does not model an option of the instance.
    """
    if solver in EXACT_SOLVERS:
        backends_for(solver, instance)
    if not is_extended(instance):
        return SOLVERS[solver]
    return SOLVERS_WITH_OPTIONS[solver] if instance.num_tasks <= LIMIT_KEPT_TASKS else ()


# --- solving -------------------------------------------------------------------------------------


def solve(
    instance: Instance,
    *,
    objective: Objective = "makespan",
    solver: str = "auto",
    time_limit: float = 60.0,
    seed: int = 0,
    deterministic: bool = False,
    gap: float = 0.0,
    warm_start: Orders | None = None,
    progress: Callable[[Progress], None] | None = None,
    stop: Stop | None = None,
) -> SolveResult:
    """Find a schedule and prove how good it is.

    Parameters
    ----------
    solver : str
        ``auto`` (the portfolio), ``heuristic``, an exact one (``cpsat``, ``milp``: HiGHS, else CBC,
        ``milp-highs``, ``milp-cbc``), or a baseline's name.
    time_limit : float
        Seconds for everything, kept within 1 s or a fifth, whichever is more, up to
        ``LIMIT_KEPT_TASKS`` tasks. There always is a plan: its first heuristics run whatever the limit.
    deterministic : bool
        Budgets are counts that stand for seconds: same seed, same bytes.
    gap : float
        Stop as soon as (cost - bound) / cost is this small.
    warm_start : orders, optional
        Per device, the order of its tasks: the answer is never worse than these.
    stop : Stop, optional
        To end the search from elsewhere, another thread or a signal's handler; what it has found is the
        answer. Ctrl-C does the same where its handler is Python's own.

    Raises
    ------
    InfeasibleError
        Some device cannot hold one micro-batch, or the chosen baseline does not fit under the cap.
    InputError
        Unknown solver or objective, or a solver or baseline that does not apply to this instance.
    """
    if not 0 < time_limit < math.inf:
        raise InputError(f"time limit {time_limit:g}: give a positive number of seconds")
    column_of(objective)
    require_known(solver)
    if solver in BASELINES:
        return SolveResult(_baseline_plan(instance, solver, objective), ())
    require_feasible(instance)
    phases = phases_for(solver, instance)
    search = Search(
        instance, objective, time_limit, seed, deterministic, gap, progress, Stop() if stop is None else stop
    )
    try:
        with search.stop.leaving_at_once():
            _run(search, phases, warm_start)
    except KeyboardInterrupt:
        if search.schedule is None:
            raise
        search.stop.ask()  # also for a search that this one is within
    return result_of(search)


def _run(search: Search, phases: tuple[Phase, ...], warm_start: Orders | None) -> None:
    extended = is_extended(search.instance)
    if warm_start is not None:
        search.offer(warm_start if extended else canonical(search.instance, warm_start), "warm start")
    if extended:
        prove_bounds(search)
        options.first_plans(search)
    else:
        construct(search)
    for phase in phases:
        if search.done or search.budget.over():
            break
        log.debug("next phase, %s, with %.1f s left", phase.__qualname__, search.left)
        phase(search)
    improve.lighten(search)


def result_of(search: Search) -> SolveResult:
    """The plan of a search that has ended: from here on there is nothing left to interrupt."""
    info = SolverInfo(
        name=search.found_by,
        version=__version__,
        seconds=None if search.deterministic else round(search.seconds, 3),
        seed=search.seed,
    )
    with collector_paused():
        plan = _certified(
            search.instance, search.incumbent, search.objective, search.bound, info, judged=True
        )
    return SolveResult(plan, tuple(search.history), search.stop.asked, _note(search))


def _note(search: Search) -> str:
    """What the limit left out, where it left no time for more than a first plan."""
    if search.stop.asked or search.done or not search.cut_short:
        return ""
    tasks = search.instance.num_tasks
    kept = "" if tasks <= LIMIT_KEPT_TASKS else f" (it is not kept above {LIMIT_KEPT_TASKS:,})"
    return (
        f"a time limit of {search.time_limit:g} s{kept} leaves {tasks:,} tasks no time for more than a first "
        "plan: raise it for a better one"
    )


def require_known(solver: str) -> None:
    """Refuse the name of a solver that is none, nor a baseline's."""
    if solver not in SOLVERS and solver not in BASELINES:
        names = ", ".join((*SOLVERS, *BASELINES))
        raise InputError(f"solver {solver!r} is not known: use one of {names}")


def certify(instance: Instance, schedule: Schedule, objective: Objective, name: str) -> Plan:
    """A plan of a given schedule, with the combinatorial lower bound as its certificate."""
    info = SolverInfo(name=name, version=__version__)
    return _certified(instance, schedule, objective, best_bound(instance, objective), info)


def _certified(
    instance: Instance,
    schedule: Schedule,
    objective: Objective,
    bound: Bound,
    info: SolverInfo,
    *,
    judged: bool = False,
) -> Plan:
    proof = Proof(
        method=bound.method,
        statement=bound.statement,
        device=bound.device,
        value=bound.value,
        lags=tuple(ProvenLag(**lag._asdict()) for lag in bound.lags),
        shaved=tuple(ShavedTime(**time._asdict()) for time in bound.shaved),
    )
    return make_plan(
        instance,
        schedule,
        objective=objective,
        lower_bound=bound.value,
        proof=proof,
        solver=info,
        judged=judged,
    )


# --- baselines as solvers --------------------------------------------------------------------------


def _baseline_plan(instance: Instance, name: str, objective: Objective) -> Plan:
    timed_on, schedule = BASELINES[name].schedule(instance, objective)
    short = shortage(timed_on, peaks_of(timed_on, schedule))
    if short:
        raise InfeasibleError(f"{name} does not fit: {short}: raise memory_cap there or choose another")
    for violation in check(timed_on, schedule):
        raise InfeasibleError(f"{name} does not fit: {violation.message}")
    return certify(timed_on, schedule, objective, name)
