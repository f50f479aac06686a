"""The portfolio: baselines, heuristic, search and exact models under one time limit, with a certificate.

A solver's word is never taken: every schedule is re-timed on the unrounded instance and re-checked, and
the incumbent is the best that passed. Lower bounds come from :mod:`zbsolve.bounds.catalogue` and from
formulations that proved theirs for the unrounded instance; the highest is kept, with who proved it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from zbsolve import __version__
from zbsolve.baselines import BASELINES
from zbsolve.baselines.base import is_linear, orders_for
from zbsolve.baselines.greedy import greedy_candidates
from zbsolve.bounds.bound import Bound
from zbsolve.bounds.catalogue import best_bound, window_bounds
from zbsolve.bounds.refutation import Refutation, refuted_bounds, shaved_bounds
from zbsolve.bounds.waits import Lag, room
from zbsolve.budget import Budget, collector_paused
from zbsolve.errors import EnvironmentFailedError, InfeasibleError, InputError
from zbsolve.formulations.common import FormulationResult, Status
from zbsolve.model.instance import Instance
from zbsolve.model.judge import check
from zbsolve.model.kinds import BW
from zbsolve.model.memory import NO_PAIRS, Pairs, peak_memory
from zbsolve.model.objective import Objective
from zbsolve.model.options import is_extended, require_plain
from zbsolve.model.recompute import unfold
from zbsolve.model.schedule import Schedule
from zbsolve.model.serial import require_feasible, serial_orders, shortage
from zbsolve.model.simulator import simulate_for
from zbsolve.model.tolerances import MEMORY_RTOL, OPTIMAL_GAP, ROUNDING
from zbsolve.plan.certificate import Proof, ProvenLag, ShavedTime, SolverInfo, relative_gap
from zbsolve.plan.make import make_plan, peaks_of
from zbsolve.plan.plan import Plan
from zbsolve.search.arrays import encode
from zbsolve.search.backbones import BackboneSearch
from zbsolve.search.canonical import Orders, canonical
from zbsolve.search.extended_arrays import decode as decode_extended
from zbsolve.search.extended_arrays import encode as encode_extended
from zbsolve.search.extended_orders import ExtendedOrderSearch
from zbsolve.search.extended_policies import ExtendedPolicySearch
from zbsolve.search.list_scheduler import ListScheduler, machine_code_is_ready, plain_seconds
from zbsolve.search.orders import OrderSearch
from zbsolve.search.policies import PATIENCES, PolicyRace, Refinement, affordable_patiences, automatic
from zbsolve.solver.less_memory import most_messages_in_flight, under_tighter_caps, with_later_forwards
from zbsolve.solver.with_options import candidates, neighbours, without_options

log = logging.getLogger(__name__)


# The time limit is kept up to so many tasks; the first plan of more takes what it takes.
LIMIT_KEPT_TASKS = 65_536
# The combinatorial bounds' share of the limit; what a small limit may be exceeded by, so that the quick
# heuristics always run.
BOUNDS_SHARE = 0.3
GRACE_SECONDS = 0.5
# About what all variants of the greedy construction take in plain Python (measured).
GREEDY_SECONDS_A_TASK = 3.3e-5
# What it takes to time and judge orders, a task (makespan, span; measured); and to make the plan of a
# schedule, as a multiple of judging it. Offers of a running search are this many times their own cost apart.
OFFER_SECONDS_A_TASK = {"makespan": 1.5e-5, "span": 3e-5}
FINISHING_JUDGEMENTS = 2.5
OFFERS_APART = 4.0
# Above these sizes a formulation spends the limit on building its model (measured with 2 cores).
CPSAT_MOST_TASKS = 8_000
MILP_MOST_TASKS = 400
# Tasks that the first plan's refinement runs through policies: about a second of plain Python.
REFINEMENT_TASKS = 120_000
# Lags over more micro-batches than this are problems that CP-SAT does not close in seconds.
LAGS_MOST_HELD = 3
LAGS_SHARE = 0.2
LAGS_COUNTED = 3  # proofs that the share is for in deterministic mode
# Periodic schedules: for which sizes, the share of the time, the tries in it, when the period is settled.
PATTERNS_FROM_MICROBATCHES = 8
PATTERNS_MOST_TASKS = 20_000  # beyond, timing and checking a single unrolled pattern takes seconds
PATTERNS_SHARE = 0.1
PATTERNS_ATTEMPTS = 8
PATTERNS_CLOSE = 1.002
# Policies' share of the time before annealing: they find the last per cent of nearly even pipelines.
POLICIES_SHARE = 0.15
POLICIES_CLOSE_GAP, POLICIES_CLOSE_SHARE = 0.02, 0.4
# The refutation's share of the time before annealing, which it seldom needs, and that of its trials amid it.
# In deterministic mode a second stands for so many states.
REFUTATION_SHARE, TRIALS_SHARE = 0.2, 0.35
STATES_A_SECOND = 20_000_000
# The exact model's share of the time once policies have run: most where it has little left to prove, none
# where it would spend it on propagating its model (measured with 2 cores).
EXACT_CLOSE_GAP, EXACT_CLOSE_SHARE, EXACT_CLOSE_MOST_TASKS = 0.01, 0.65, 4_000
EXACT_SHARE, EXACT_MOST_TASKS = 0.3, 3_000
# Of the annealing time: backbones, orders; then both again, once trials have had their share.
FIRST_ANNEALING, SECOND_ANNEALING = (0.57, 0.43), (0.5, 0.5)
FIRST_ANNEALING_SHARE = 0.6
# Annealing rounds: short enough to stop on time, and how many moves tell the pace.
ROUND_SECONDS = 0.5
ROUND_TRIAL_STEPS = 200
# Machine code is loaded where plain Python takes longer than that, and made only on long searches.
LOADING_SECONDS = 0.4
# Instances with recomputation, F&B pairs or replicas: seconds that plain Python takes to time a task; the
# exact model at once, or last with its share of the time; the
# share of the ordinary solver on the instance without these options, that of policies, and twice that of
# first plans; and what must be left for machine code to be compiled.
SECONDS_A_TASK = 5e-6
EXACT_AT_ONCE_TASKS = 150
EXTENDED_EXACT_MOST_TASKS, EXTENDED_EXACT_SHARE = 1_500, 0.4
PLAIN_SHARE, EXTENDED_POLICIES_SHARE, FIRST_PLANS_SHARE = 0.3, 0.2, 0.15
EXTENDED_COMPILE_SECONDS = 8.0
# Lowering the plan's memory in the end: its share of the time limit, and that where none is left.
LIGHTEN_SHARE, LIGHTEN_LEAST_SHARE, LIGHTEN_MOST_STEPS = 0.1, 0.02, 1_000
COMPILE_FROM_SECONDS = 15.0
# At most, to make one of the annealings' (measured); how much faster it is than plain Python.
COMPILE_SECONDS = 8.0
MACHINE_CODE_GAIN = 40.0


@dataclass(frozen=True, slots=True)
class Progress:
    """One line of the solve's history: when, the best cost and bound so far, and who brought the news."""

    seconds: float
    cost: float
    bound: float
    who: str

    @property
    def gap(self) -> float:
        """(cost - bound) / cost."""
        return relative_gap(self.cost, self.bound)


@dataclass(frozen=True, slots=True)
class SolveResult:
    """The plan, how it came about, whether Ctrl-C ended the search early, and what the limit cut short."""

    plan: Plan
    history: tuple[Progress, ...]
    interrupted: bool = False
    note: str = ""


@dataclass
class _Search:
    """The state of one solve: best schedule, best bound, clock.

    ``budget`` is what phases may still spend; the time to make the plan of the best schedule is set aside.
    """

    instance: Instance
    objective: Objective
    time_limit: float
    seed: int
    deterministic: bool
    target_gap: float
    progress: Callable[[Progress], None] | None
    began: float = field(default_factory=time.monotonic)
    schedule: Schedule | None = None
    found_by: str = ""
    bound: Bound = field(default_factory=lambda: Bound(0.0, "none", "nothing proven"))
    lags: tuple[Lag, ...] = ()  # proven of the instance
    refutation: Refutation | None = None
    annealing_given: float | None = None  # what annealing and the exact model have together
    history: list[Progress] = field(default_factory=list)
    cut_short: bool = False  # the limit left no time for all of the quick heuristics

    def __post_init__(self) -> None:
        make = Budget.counted if self.deterministic else Budget
        self.budget = make(self.time_limit)
        self._offer_estimate = OFFER_SECONDS_A_TASK[self.objective] * self.instance.num_tasks
        self.offer_seconds = self._offer_estimate
        self._offered = self.budget.part(0.0)  # over when the next offer of a running search is due

    @property
    def cost(self) -> float:
        return math.inf if self.schedule is None else self.schedule.cost(self.objective)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        return self.budget.left

    @property
    def done(self) -> bool:
        """Whether the target gap is reached (float64 rounding counts as closed)."""
        closed = relative_gap(self.cost, self.bound.value) <= max(self.target_gap, OPTIMAL_GAP)
        return self.schedule is not None and closed

    def quick(self, seconds: float) -> bool:
        """Whether one of the quick heuristics that takes so long may run: there always is a plan."""
        slower = max(1.0, self.offer_seconds / self._offer_estimate)  # than where ``seconds`` was measured
        needed = seconds * slower + self.offer_seconds
        may = self.schedule is None or self.budget.affords(needed - GRACE_SECONDS)
        self.cut_short |= not may
        return may

    def may_offer(self, budget: Budget) -> bool:
        """Whether a running search is to offer what it has: not so often that it does little else."""
        return self._offered.over() and budget.affords(self.offer_seconds)

    def ends_within(self, seconds: float) -> bool:
        """Whether less than this is left of the time limit; never in deterministic mode."""
        return not self.deterministic and not self.budget.affords(seconds)

    def offer(self, orders: Orders, who: str, pairs: Pairs = NO_PAIRS) -> bool:
        """Re-time and re-check orders; keep them when they are better.

        Among equal costs less peak memory is better, then fewer messages in flight.
        """
        began = self.budget.spent
        with collector_paused():
            better = self._judge(orders, who, pairs)
        if better and not self.deterministic:
            self.offer_seconds = self.budget.spent - began
        self._offered = self.budget.part(OFFERS_APART * self.offer_seconds)
        return better

    def _judge(self, orders: Orders, who: str, pairs: Pairs) -> bool:
        peaks = [peak_memory(self.instance, d, order, pairs) for d, order in enumerate(orders)]
        if not all(self.instance.fits(d, peak) for d, peak in enumerate(peaks)):
            log.debug("%s: over the memory cap, dropped", who)
            return False
        self.budget.charge(self.offer_seconds)
        schedule = simulate_for(self.instance, orders, self.objective, pairs)
        cost = schedule.cost(self.objective)
        better = cost < self.cost * (1 - ROUNDING)
        if not (better or (cost <= self.cost and self._is_lighter(schedule, peaks))):
            return False
        began = self.budget.spent
        violations = check(self.instance, schedule)
        if violations:
            log.warning("%s: the schedule breaks a rule (%s): dropped", who, violations[0])
            return False
        if self.schedule is None:
            self.budget.set_aside(FINISHING_JUDGEMENTS * (self.budget.spent - began))
        self.schedule, self.found_by = schedule, who
        self.report(who)
        return True

    def _is_lighter(self, schedule: Schedule, peaks: list[float]) -> bool:
        """Whether a schedule of equal cost has less peak memory, or else fewer messages in flight."""
        assert self.schedule is not None  # a cost that equals the incumbent's
        held, incumbent = max(peaks), max(peaks_of(self.instance, self.schedule))
        if abs(held - incumbent) > MEMORY_RTOL * max(held, incumbent):
            return held < incumbent
        instance = self.instance
        return most_messages_in_flight(instance, schedule) < most_messages_in_flight(instance, self.schedule)

    def prove(self, bound: Bound) -> None:
        """Keep a bound when it is higher."""
        if bound.value > self.bound.value:
            self.bound = bound
            if self.schedule is not None:
                self.report(bound.method)

    def prove_until_done(self, bounds: Iterator[Bound]) -> None:
        """Keep ever higher bounds until the target gap is reached: what comes after is not computed."""
        for bound in bounds:
            self.prove(bound)
            if self.done:
                return

    def report(self, who: str) -> None:
        line = Progress(self.seconds, self.cost, self.bound.value, who)
        self.history.append(line)
        if self.progress is not None:
            self.progress(line)


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
) -> SolveResult:
    """Find a schedule and prove how good it is.

    Parameters
    ----------
    solver : str
        ``auto`` (the portfolio), ``heuristic``, ``cpsat``, ``milp`` (HiGHS, else CBC), ``milp-highs``,
        ``milp-cbc``, or a baseline's name.
    time_limit : float
        Seconds for everything, kept within 1 s or a fifth, whichever is more, up to
        ``LIMIT_KEPT_TASKS`` tasks. There always is a plan: its first heuristics run whatever the limit.
    deterministic : bool
        Budgets are counts that stand for seconds: same seed, same bytes.
    gap : float
        Stop as soon as (cost - bound) / cost is this small.
    warm_start : orders, optional
        Per device, the order of its tasks: the answer is never worse than these.

    Raises
    ------
    InfeasibleError
        Some device cannot hold one micro-batch, or the chosen baseline does not fit under the cap.
    InputError
        Unknown solver, or a baseline that does not apply to this placement.
    """
    if not 0 < time_limit < math.inf:
        raise InputError(f"time limit {time_limit:g}: give a positive number of seconds")
    require_known(solver)
    if solver in BASELINES:
        return SolveResult(_baseline_plan(instance, solver, objective), ())
    require_feasible(instance)
    search = _Search(instance, objective, time_limit, seed, deterministic, gap, progress)
    interrupted = False
    try:
        if warm_start is not None:
            renamed = warm_start if is_extended(instance) else canonical(instance, warm_start)
            search.offer(renamed, "warm start")
        if is_extended(instance):
            _bound(search)
            _solve_extended(search, solver)
        else:
            _construct(search)
        for phase in () if is_extended(instance) else SOLVERS[solver]:
            if search.done or search.budget.over():
                break
            log.debug("next phase, with %.1f s left", search.left)
            phase(search)
        _lighten(search)
    except KeyboardInterrupt:
        if search.schedule is None:
            raise
        interrupted = True
    return result_of(search, interrupted)


def result_of(search: _Search, interrupted: bool) -> SolveResult:
    """The plan of a search that has ended: from here on there is nothing left to interrupt."""
    assert search.schedule is not None  # serial_orders is valid wherever require_feasible passed
    info = SolverInfo(
        name=search.found_by,
        version=__version__,
        seconds=None if search.deterministic else round(search.seconds, 3),
        seed=search.seed,
    )
    with collector_paused():
        plan = _certified(search.instance, search.schedule, search.objective, search.bound, info, judged=True)
    return SolveResult(plan, tuple(search.history), interrupted, _note(search, interrupted))


def _note(search: _Search, interrupted: bool) -> str:
    """What the limit left out, where it left no time for more than a first plan."""
    if interrupted or search.done or not search.cut_short:
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


# --- phases --------------------------------------------------------------------------------------


def _lighten(search: _Search) -> None:
    """The plan with less memory at its cost, where that is quickly found."""
    schedule = search.schedule
    if schedule is None:
        return
    share = LIGHTEN_SHARE * search.time_limit
    # What was solved at once is not held up for long.
    seconds = min(max(LIGHTEN_LEAST_SHARE * search.time_limit, min(search.left, share)), 0.5 + search.seconds)
    until = search.seconds + seconds
    left = min(LIGHTEN_MOST_STEPS, _steps_for(search, LIGHTEN_SHARE, 4 * SECONDS_A_TASK))

    def enough() -> bool:
        nonlocal left
        left -= 1
        return left < 0 if search.deterministic else search.seconds > until

    if not search.deterministic and seconds < 4 * SECONDS_A_TASK * search.instance.num_tasks:
        return  # a single timing would take longer
    cost = schedule.cost(search.objective)
    peak = max(peaks_of(search.instance, schedule))
    found = under_tighter_caps(search.instance, search.objective, cost, peak, enough)
    if found is not None:
        search.offer(found[0], search.found_by, found[1])
        schedule = search.schedule or schedule
    orders = with_later_forwards(
        search.instance, schedule.orders, schedule.pairs, search.objective, cost, enough
    )
    search.offer(orders, search.found_by, schedule.pairs)


def _construct(search: _Search) -> None:
    """The catalogue, our heuristics, else the serial order: as many as the time allows, one at least.

    The first two come before the bounds: those of a large instance take longer.
    """
    bounded = False
    for number, (name, orders) in enumerate(_constructions(search), start=1):
        search.offer(orders, name)
        if search.schedule is not None and number > 1 and not bounded:
            _bound(search)
            bounded = True
        if search.done:
            return
    if not bounded:
        _bound(search)


def _bound(search: _Search) -> None:
    """The combinatorial bounds, the cheap ones alone where time is short."""
    enough = search.budget.part(BOUNDS_SHARE * search.time_limit).over
    search.prove(best_bound(search.instance, search.objective, enough))


def _constructions(search: _Search) -> Iterator[tuple[str, Orders]]:
    """Orders by name, the likely best first: what comes after often need not be checked.

    Those that the search has no time for are left out, but for the first.
    """
    instance, objective = search.instance, search.objective
    refinement = Refinement(instance, objective)
    if is_linear(instance):
        yield from _greedy(search, refinement)
        yield from _heuristics(search, refinement)
        yield from _fitting_baselines(instance, search)
    else:
        yield from _fitting_baselines(instance, search)
        yield from _heuristics(search, refinement)
    if search.quick(0.0):
        yield "serial", serial_orders(instance)


def _greedy(search: _Search, refinement: Refinement) -> Iterator[tuple[str, Orders]]:
    """The greedy construction under the instance's own cap, and then with other W's."""
    instance = search.instance
    seconds = GREEDY_SECONDS_A_TASK * instance.num_tasks
    if not search.quick(seconds):
        return
    with collector_paused():
        greedy = min(
            greedy_candidates(instance), key=lambda found: found.costs(search.objective), default=None
        )
    search.budget.charge(seconds)
    if greedy is not None:
        yield "greedy", greedy.orders
        refinement.take(*encode(greedy.orders), greedy.costs(search.objective)[0])


def _heuristics(search: _Search, refinement: Refinement) -> Iterator[tuple[str, Orders]]:
    """The automatic heuristic's best, and that of its refinement."""
    instance, objective = search.instance, search.objective
    patiences = affordable_patiences(instance)
    compiled = _in_machine_code(search, patiences)
    scheduler = ListScheduler(instance, compiled=compiled)
    seconds = _policy_seconds(instance, compiled)

    def enough() -> bool:
        search.budget.charge(seconds)
        return not search.quick(seconds)

    cost = math.inf
    if search.budget.affords(seconds - GRACE_SECONDS):
        cost = automatic(scheduler, objective, patiences, enough)
    if cost < math.inf:
        refinement.take(*scheduler.best_codes, cost)
        if objective == "span" or refinement.cost == cost:
            # Least span may fall more than that of earliest starts: other W's do not always stay ahead.
            yield "heuristic", canonical(instance, scheduler.best_orders())
    if refinement.cost < search.cost:
        yield "heuristic", canonical(instance, refinement.orders())
    most = REFINEMENT_TASKS // instance.num_tasks
    if not search.done and refinement.run(scheduler, most, search.bound.value, enough):
        yield "heuristic", canonical(instance, refinement.orders())


def _policy_seconds(instance: Instance, compiled: bool) -> float:
    """About what one run of a policy takes."""
    return plain_seconds(instance) / (MACHINE_CODE_GAIN if compiled else 1.0)


def _in_machine_code(search: _Search, runs: int) -> bool:
    """Whether so many runs of policies are worth machine code; their outcome is the same either way."""
    if runs * plain_seconds(search.instance) <= LOADING_SECONDS:
        return False
    return search.deterministic or search.left >= COMPILE_FROM_SECONDS or machine_code_is_ready()


def _solve_extended(search: _Search, solver: str) -> None:
    """The phases for instances with recomputation, F&B pairs or replicas
    (:mod:`zbsolve.solver.with_options`)."""
    instance = search.instance
    if solver not in ("auto", "heuristic", "cpsat"):
        require_plain(instance, solver)
    search.offer(serial_orders(instance), "serial")
    if instance.num_tasks > LIMIT_KEPT_TASKS:
        log.warning(
            "%d tasks are over %d: with recomputation, F&B pairs or replicas only a first plan is made",
            instance.num_tasks,
            LIMIT_KEPT_TASKS,
        )
        return
    policies = ExtendedPolicySearch(instance, search.objective, search.seed)
    tasks_seconds = instance.num_tasks * SECONDS_A_TASK
    until = search.seconds + FIRST_PLANS_SHARE * search.left

    def enough(seconds: float) -> bool:
        return search.done or (search.seconds + seconds > until and not search.deterministic)

    # A policy first: no schedule of the catalogue is found as fast as one that suits the instance.
    if not search.ends_within(20 * tasks_seconds) and policies.try_preset():
        _offer_policy(search, policies)
    for name, orders, pairs in candidates(instance, lambda: enough(4 * tasks_seconds)):
        search.offer(orders, name, pairs)
    if _compiles(search):
        policies.compile()
    until = search.seconds + FIRST_PLANS_SHARE * search.left
    while not enough(2 * policies.seconds_a_run) and policies.try_preset():
        pass
    _offer_policy(search, policies)
    if solver == "cpsat" or (solver == "auto" and instance.num_tasks <= EXACT_AT_ONCE_TASKS):
        _run_cpsat_extended(search, 1.0 if solver == "cpsat" else 0.5)
    if solver == "cpsat":
        return
    if solver == "heuristic":
        _take_without_options(search, solver)
        return
    _descend_policies(search, policies)
    _take_without_options(search, solver)
    _anneal_extended(search)
    _run_cpsat_extended(search, 1.0)


def _compiles(search: _Search) -> bool:
    """Whether machine code of the extended loops pays: it takes seconds to compile, once a machine."""
    long = search.time_limit >= COMPILE_FROM_SECONDS and search.left >= EXTENDED_COMPILE_SECONDS
    return long and not search.deterministic


def _offer_policy(search: _Search, policies: ExtendedPolicySearch) -> None:
    if policies.best_orders is not None:
        search.offer(policies.best_orders[0], "policy search", policies.best_orders[1])


def _take_without_options(search: _Search, solver: str) -> None:
    """The ordinary solver's plan of the instance without these options: R right before its backward."""
    instance = search.instance
    if instance.replicas > 1 or search.done or search.ends_within(20 * instance.num_tasks * SECONDS_A_TASK):
        return
    share = PLAIN_SHARE if instance.recomputes else PLAIN_SHARE / 3
    plain = solve(
        without_options(instance),
        objective=search.objective,
        solver=solver,
        time_limit=max(1e-3, share * (search.time_limit if search.deterministic else search.left)),
        seed=search.seed,
        deterministic=search.deterministic,
    )
    orders = unfold(instance, plain.plan.schedule().orders)
    search.offer(orders, plain.plan.solver.name)
    if instance.has_pairs:
        search.offer(orders, f"{plain.plan.solver.name}, paired", neighbours(instance, orders))
    if plain.interrupted:
        raise KeyboardInterrupt  # it was meant for the whole search


def _descend_policies(search: _Search, policies: ExtendedPolicySearch) -> None:
    """Descent over policies for its share of the time; counted in steps in deterministic mode."""
    began, seconds = search.seconds, EXTENDED_POLICIES_SHARE * search.left
    most_steps = _steps_for(search, EXTENDED_POLICIES_SHARE, 5 * SECONDS_A_TASK)
    steps = 0
    while not search.done:
        used = steps / most_steps if search.deterministic else (search.seconds - began) / max(1e-9, seconds)
        if used >= 1.0 or (not search.deterministic and search.ends_within(2 * policies.seconds_a_run)):
            break
        steps += 1
        policies.step(used)
        if policies.best[0] < search.cost * (1 - OPTIMAL_GAP):
            _offer_policy(search, policies)
    _offer_policy(search, policies)


def _anneal_extended(search: _Search) -> None:
    """One cooling of the incumbent's orders and pairs."""
    assert search.schedule is not None  # the serial orders fit wherever require_feasible passed
    instance, schedule = search.instance, search.schedule
    if search.done or search.ends_within(20 * instance.num_tasks * SECONDS_A_TASK):
        return
    search_orders = ExtendedOrderSearch(
        instance,
        schedule.orders,
        schedule.pairs,
        search.objective,
        search.seed,
        compiled=_compiles(search),
    )
    search_orders.run(1, 0.0, search.bound.value)  # compiles
    mean_task = sum(timed.end - timed.start for timed in schedule) / instance.num_tasks
    share = 1.0 - EXTENDED_EXACT_SHARE if instance.num_tasks <= EXTENDED_EXACT_MOST_TASKS else 1.0
    began, seconds = search.seconds, share * search.left
    most_steps = _steps_for(search, share, SECONDS_A_TASK)
    pace, taken = instance.num_tasks * SECONDS_A_TASK, 0
    while not search.done:
        used = taken / most_steps if search.deterministic else (search.seconds - began) / max(1e-9, seconds)
        if used >= 1.0:
            break
        if search.deterministic:
            steps = max(1, min(most_steps - taken, most_steps // 20))
        else:
            steps = max(1, round(min(ROUND_SECONDS, seconds - (search.seconds - began)) / pace))
        round_began = search.seconds
        # The search keeps the best, so a round begins where the last one's best was.
        if search_orders.run(steps, mean_task * (1.0 - used) ** 2, search.bound.value) < search.cost:
            orders, pairs = search_orders.orders()
            search.offer(orders, "order search", pairs)
        taken += steps
        pace = max(1e-8, (search.seconds - round_began) / steps)


def _steps_for(search: _Search, share: float, seconds_a_task: float) -> int:
    """How many runs over all tasks a share of the time limit stands for in deterministic mode."""
    return max(1, round(share * search.time_limit / (seconds_a_task * search.instance.num_tasks)))


def _run_cpsat_extended(search: _Search, share: float) -> None:
    """The exact model of these options with the incumbent as its hint."""
    if search.done or search.instance.num_tasks > EXTENDED_EXACT_MOST_TASKS:
        return
    try:
        from zbsolve.formulations.cpsat_extended import solve_extended
    except ImportError as error:
        log.warning("CP-SAT is not installed (%s): install ortools; going on without it", error)
        return
    limit = share * (search.time_limit if search.deterministic else search.left)
    if limit <= 0:
        return
    assert search.schedule is not None  # the serial orders fit wherever require_feasible passed
    in_order = decode_extended(
        *encode_extended(search.instance, search.schedule.orders, search.schedule.pairs)
    )
    result = solve_extended(
        search.instance,
        search.objective,
        time_limit=limit,
        hint=simulate_for(search.instance, in_order[0], search.objective, in_order[1]),
        lower_bound=search.bound.value,
        seed=search.seed,
        deterministic=search.deterministic,
        stop_at_gap=search.target_gap,
        on_improvement=None
        if search.deterministic
        else lambda orders, pairs: search.offer(orders, "cpsat", pairs),
    )
    _take(search, result)


def _fitting_baselines(instance: Instance, search: _Search) -> Iterator[tuple[str, Orders]]:
    """Baselines that apply, as orders of this very instance (BW taken apart where it has no t_bw).

    The likely best first: what comes after need not be checked when it is no better. Those that the search
    has no time for are left out.
    """
    m = instance.num_microbatches
    groups = [f"interleaved:{n}" for n in range(instance.num_devices + 1, m) if m % n == 0]
    # The automatic ones last: on other placements than the linear one they take longest.
    for name in sorted((*reversed(BASELINES), *groups), key=lambda name: BASELINES[name].automatic):
        baseline = BASELINES[name]
        if baseline.automatic and is_linear(instance) and _same_caps(instance, name.removeprefix("zb-")):
            continue  # the greedy construction has run under the instance's own cap
        seconds = baseline.seconds_a_task * instance.num_tasks
        if not search.quick(seconds):
            continue
        try:
            with collector_paused():
                timed_on, orders = baseline.prepared(instance)
        except InputError:
            continue
        search.budget.charge(seconds)
        ours = orders_for(instance, timed_on, orders)
        if ours is None or (timed_on.recomputes and not instance.recomputes):
            continue  # another model than the one to solve
        yield (name if ours == orders else f"{name}, backward split"), ours


def _same_caps(instance: Instance, cap: str) -> bool:
    """Whether a named cap is the instance's own."""
    named = instance.with_memory_cap(cap)
    return all(named.cap(d) == instance.cap(d) for d in range(instance.num_devices))


def _prove_lags(search: _Search) -> None:
    """Where a cap holds hardly more than one micro-batch: what few of them prove about all of them."""
    instance = search.instance
    held = _least_held(instance)
    if held > LAGS_MOST_HELD or instance.num_microbatches == 1:
        return
    try:
        from zbsolve.formulations.cpsat_lags import prove_lag
    except ImportError as error:
        log.warning("lags are left out (%s): install ortools", error)
        return
    assert search.schedule is not None  # _construct always leaves one
    share = search.budget.part(LAGS_SHARE * search.left)
    one_of_few = share.left / LAGS_COUNTED
    incumbent = canonical(instance, search.schedule.orders)
    last = instance.num_stages - 1
    # What the last stage's F's wait for is most; the end of the step completes the sum.
    for distance, to_end in ((held, False), (1, True), (2, True), (held + 1, False), (held + 2, False)):
        if search.done or share.over() or distance + (0 if to_end else 1) > instance.num_microbatches:
            return
        limit = min(share.left, one_of_few) if search.deterministic else share.left
        answer = prove_lag(
            instance,
            last,
            distance,
            incumbent,
            to_end=to_end,
            time_limit=limit,
            seed=search.seed,
            deterministic=search.deterministic,
        )
        share.charge(limit)
        if answer is not None:
            search.lags += (answer.lag,)
            for bound in window_bounds(instance, search.objective, search.lags):
                search.prove(bound)


def _least_held(instance: Instance) -> int:
    """Whole micro-batches that the fullest device can hold on all its stages; at least 1."""
    held = instance.num_microbatches
    for device in range(instance.num_devices):
        whole = sum(instance.stages[s].mem_b for s in instance.stages_on(device))
        if whole > 0:
            held = int(min(held, room(instance, device) / whole))
    return max(1, held)


def _search_patterns(search: _Search) -> None:
    """Periodic schedules of ever shorter period, where a cap and many micro-batches make the rate decide."""
    instance = search.instance
    m = instance.num_microbatches
    capped = not math.isinf(min(map(instance.cap, range(instance.num_devices))))
    if not capped or m < PATTERNS_FROM_MICROBATCHES or instance.num_tasks > PATTERNS_MOST_TASKS:
        return
    try:
        from zbsolve.formulations.cpsat_periodic import find_pattern
    except ImportError as error:
        log.warning("periodic schedules are left out (%s): install ortools", error)
        return
    assert search.schedule is not None  # _construct always leaves one
    kinds = {(timed.task.kind, timed.task.stage) for timed in search.schedule}
    fused = tuple((BW, s) in kinds for s in range(instance.num_stages))
    # What one micro-batch takes is spent once; the rest of the cost comes from the period.
    once = best_bound(instance.with_changes(num_microbatches=1), search.objective).value
    work = max(
        sum(_job_time(instance, s, fused[s]) for s in instance.stages_on(d))
        for d in range(instance.num_devices)
    )
    shortest = max(work, (search.bound.value - once) / (m - 1))
    longest = (search.cost - once) / (m - 1)
    share = search.budget.part(PATTERNS_SHARE * search.left)
    for attempt in range(PATTERNS_ATTEMPTS):
        if search.done or share.over() or longest <= shortest * PATTERNS_CLOSE:
            return
        # The first attempts settle where the answer lies, and are easier: they get less.
        limit = share.left / max(1, (PATTERNS_ATTEMPTS - attempt) / 2)
        period = math.sqrt(shortest * longest)
        pattern = find_pattern(
            instance,
            period,
            fused,
            time_limit=limit,
            seed=search.seed,
            deterministic=search.deterministic,
        )
        share.charge(limit)
        if pattern is None:
            shortest = period
        else:
            longest = period
            search.offer(pattern.orders(instance), "periodic")


def _job_time(instance: Instance, s: int, fused: bool) -> float:
    """What a stage takes of its device for one micro-batch."""
    stage = instance.stages[s]
    return stage.t_f + (stage.t_bw if fused and stage.t_bw is not None else stage.t_b + stage.t_w)


def _search_policies(search: _Search) -> None:
    """Descent over policies, for a share of the time (most of it where no other search follows)."""
    instance = search.instance
    share = 0.3 if _exact_share(search) > 0 else 0.9
    if search.time_limit >= COMPILE_FROM_SECONDS:  # annealing follows
        share = POLICIES_SHARE
        if relative_gap(search.cost, search.bound.value) <= POLICIES_CLOSE_GAP:
            share = POLICIES_CLOSE_SHARE
    part = search.budget.part(share * search.left)
    given = part.left
    patiences = len(PATIENCES)
    compiled = _in_machine_code(search, 2 * patiences)
    if not compiled:
        patiences = affordable_patiences(instance)
    seconds = _policy_seconds(instance, compiled)
    entrants = min(8, int(0.25 * given / seconds)) if seconds > 0 else 8
    if entrants == 0:
        return
    scheduler = ListScheduler(instance, compiled=compiled)
    trial = part.part(0.3 * given)

    def enough() -> bool:
        part.charge(seconds)
        return not trial.affords(seconds)

    race = PolicyRace(scheduler, search.objective, search.seed, patiences, enough, entrants)
    part.charge(entrants * seconds)
    while not search.done:
        used = 1.0 - part.left / given
        descent = race.next(used)
        if descent is None or not part.affords(seconds):
            break
        descent.step()
        part.charge(seconds)
        if descent.cost < search.cost and search.may_offer(part):
            search.offer(canonical(instance, descent.orders()), "policy search")
    # The best first; least span may be below that of earliest starts.
    for descent in sorted(race.running, key=lambda descent: descent.value):
        worth = search.objective == "span" or descent.cost < search.cost
        if worth and not search.done and search.budget.affords(search.offer_seconds):
            search.offer(canonical(instance, descent.orders()), "policy search")


def _refute(search: _Search) -> None:
    """The highest cost that the devices' orders refute (:mod:`zbsolve.bounds.refutation`)."""
    if search.time_limit < COMPILE_FROM_SECONDS:
        return
    search.refutation = Refutation(search.instance, search.objective, lags=search.lags)
    _limit_refutation(search, REFUTATION_SHARE * search.left)
    search.prove_until_done(refuted_bounds(search.refutation, search.bound.value, search.cost))


def _refute_by_trial(search: _Search) -> None:
    """The same with trials, once the plan is good: how far they have to reach."""
    if search.refutation is None:
        return
    _limit_refutation(search, TRIALS_SHARE * _annealing_left(search))
    bounds = shaved_bounds(search.refutation, search.bound.value, search.cost, search.seed)
    search.prove_until_done(bounds)


def _limit_refutation(search: _Search, seconds: float) -> None:
    """Let it work for so long from now, or for as many states in deterministic mode."""
    refutation, part = search.refutation, search.budget.part(seconds)
    assert refutation is not None
    charged = refutation.work

    def enough() -> bool:
        nonlocal charged
        part.charge((refutation.work - charged) / STATES_A_SECOND)
        charged = refutation.work
        return part.over()

    refutation.enough = enough


def _search_orders(search: _Search, shares: tuple[float, ...], of_time: float) -> None:
    """Annealing of the incumbent, in machine code on two threads; the exact model has the rest of the time.

    F's and backwards with W's filled in by rule, then all orders as they are, from where the first came to.
    """
    if search.deterministic or search.time_limit < COMPILE_FROM_SECONDS:
        return
    given = of_time * max(0.0, _annealing_left(search))
    annealing = search.budget.part(given)
    behind = 0.0
    for number, share in enumerate(shares):
        behind += share
        # What one of them leaves over is the next one's.
        part = annealing.part(annealing.left - (1.0 - behind) * given)
        if search.done or part.over():
            return
        if number % 2 == 0:
            _anneal(search, BackboneSearch, "backbone search", part, most_slack=25.0)
        else:
            _anneal(search, OrderSearch, "order search", part, most_slack=4.0)


def _anneal(
    search: _Search, kind: type[BackboneSearch | OrderSearch], who: str, part: Budget, *, most_slack: float
) -> None:
    """One cooling of two annealings side by side, the second at half the slack."""
    assert search.schedule is not None  # _construct always leaves one
    instance, objective = search.instance, search.objective
    part.set_aside(search.offer_seconds)  # for the last offer
    if not (kind.is_ready() or part.affords(COMPILE_SECONDS)):
        return
    start = canonical(instance, search.schedule.orders)
    annealings = [
        kind(instance, start, objective, seed=search.seed + 1_000 * number, compiled=True)
        for number in range(2)
    ]
    mean_task = sum(timed.end - timed.start for timed in search.schedule) / instance.num_tasks
    annealings[0].run(1, 0.0, search.bound.value)  # compiles
    began = part.spent
    annealings[0].run(ROUND_TRIAL_STEPS, 0.0, search.bound.value)
    pace = max(1e-7, (part.spent - began) / ROUND_TRIAL_STEPS)
    # High slack pays only where there are moves enough to come down from it.
    given = part.left
    most_slack = min(most_slack, max(0.5, given / pace / instance.num_tasks / 15)) * mean_task
    steps = ROUND_TRIAL_STEPS
    with ThreadPoolExecutor(len(annealings)) as pool:
        while not search.done and not part.over():
            warmth = (part.left / given) ** 2
            steps = min(max(20, round(min(ROUND_SECONDS, part.left) / pace)), 2 * steps)
            round_began = part.spent
            rounds = [
                pool.submit(annealing.run, steps, most_slack * warmth / (1 + number), search.bound.value)
                for number, annealing in enumerate(annealings)
            ]
            costs = [done.result() for done in rounds]
            # Refused moves cost far less than kept ones, and the slack decides how many are kept: the pace of
            # one round says only roughly what the next one needs.
            pace = max(1e-7, (part.spent - round_began) / steps)
            if min(costs) < search.cost and (min(costs) <= search.bound.value or search.may_offer(part)):
                _offer_best(search, annealings, who)
    _offer_best(search, annealings, who)


def _offer_best(search: _Search, annealings: Sequence[BackboneSearch | OrderSearch], who: str) -> None:
    """The better one of two annealings, where it is better than what is known."""
    best = min(annealings, key=lambda annealing: annealing.cost)
    if best.cost < search.cost:
        search.offer(canonical(search.instance, best.orders()), who)


def _annealing_left(search: _Search) -> float:
    """Seconds until the time of the exact model begins: its share counts from where annealing began."""
    if search.annealing_given is None:
        search.annealing_given = search.left
    return search.left - search.annealing_given * max(0.03, _exact_share(search))


def _exact_share(search: _Search) -> float:
    """Share of the time that is left which the portfolio keeps for the exact model."""
    gap, tasks = relative_gap(search.cost, search.bound.value), search.instance.num_tasks
    if gap <= EXACT_CLOSE_GAP and tasks <= EXACT_CLOSE_MOST_TASKS:
        return EXACT_CLOSE_SHARE
    return EXACT_SHARE if tasks <= EXACT_MOST_TASKS else 0.0


def _finish_exactly(search: _Search) -> None:
    """The exact model last, where it has a chance."""
    if _exact_share(search) > 0:
        _run_cpsat(search)


def _run_cpsat(search: _Search) -> None:
    """The exact model with the incumbent as its hint."""
    if search.instance.num_tasks > CPSAT_MOST_TASKS:
        log.info("CP-SAT is left out: %d tasks are over %d", search.instance.num_tasks, CPSAT_MOST_TASKS)
        return
    try:
        from zbsolve.formulations.cpsat import solve_cpsat
    except ImportError as error:
        log.warning("CP-SAT is not installed (%s): install ortools; going on without it", error)
        return

    def hear(orders: Orders, _cost: float) -> None:
        search.offer(orders, "cpsat")

    result = solve_cpsat(
        search.instance,
        search.objective,
        time_limit=search.left,
        hint=search.schedule,
        lower_bound=search.bound.value,
        seed=search.seed,
        deterministic=search.deterministic,
        stop_at_gap=search.target_gap,
        on_improvement=None if search.deterministic else hear,
    )
    _take(search, result)


def _run_milp(search: _Search, backends: tuple[Literal["highs", "cbc"], ...]) -> None:
    """The MILP; the next backend takes over when one is missing or dies."""
    from zbsolve.formulations.milp import solve_milp

    if search.instance.num_tasks > MILP_MOST_TASKS:
        log.warning("the MILP is left out: %d tasks are over %d", search.instance.num_tasks, MILP_MOST_TASKS)
        return
    for backend in backends:
        try:
            result = solve_milp(
                search.instance,
                search.objective,
                backend=backend,
                time_limit=search.left,
                hint=search.schedule,
                lower_bound=search.bound.value,
                seed=search.seed,
            )
        except EnvironmentFailedError as error:
            log.warning("%s; another solver takes over", error)
            continue
        _take(search, result)
        return
    _run_cpsat(search)


def _take(search: _Search, result: FormulationResult) -> None:
    """Keep what a formulation found and proved. "Infeasible" is refuted by the incumbent we hold."""
    if result.status is Status.INFEASIBLE:
        log.warning(
            "%s says infeasible (%s), but a valid plan exists: ignored", result.solver, result.native_status
        )
        return
    if result.orders is not None:
        search.offer(result.orders, result.solver, result.pairs)
    # A model was given the bound so far; the same again, rounded otherwise, is not its own proof.
    if result.bound is not None and result.bound > search.bound.value * (1 + OPTIMAL_GAP):
        search.prove(Bound(result.bound, f"{result.solver} model", _proven_by(result, search)))


def _proven_by(result: FormulationResult, search: _Search) -> str:
    """What a formulation has shown of the exact model, in words."""
    who = f"{result.solver} {result.version}"
    none_less = f"no schedule costs less than {result.bound:.9g} {search.instance.time_unit}"
    if result.status is Status.OPTIMAL:
        return f"{none_less}: {who} proved it optimal on the exact model"
    return f"{none_less}: the lower bound on the exact model that {who} had when its search ended"


Phase = Callable[[_Search], None]

SOLVERS: dict[str, tuple[Phase, ...]] = {
    "auto": (
        _prove_lags,
        _search_patterns,
        _search_policies,
        _refute,
        lambda search: _search_orders(search, FIRST_ANNEALING, FIRST_ANNEALING_SHARE),
        _refute_by_trial,
        lambda search: _search_orders(search, SECOND_ANNEALING, 1.0),
        _finish_exactly,
    ),
    "heuristic": (),
    "cpsat": (_run_cpsat,),
    "milp": (lambda search: _run_milp(search, ("highs", "cbc")),),
    "milp-highs": (lambda search: _run_milp(search, ("highs",)),),
    "milp-cbc": (lambda search: _run_milp(search, ("cbc",)),),
}


# --- baselines as solvers --------------------------------------------------------------------------


def _baseline_plan(instance: Instance, name: str, objective: Objective) -> Plan:
    timed_on, schedule = BASELINES[name].schedule(instance, objective)
    short = shortage(timed_on, peaks_of(timed_on, schedule))
    if short:
        raise InfeasibleError(f"{name} does not fit: {short}: raise memory_cap there or choose another")
    for violation in check(timed_on, schedule):
        raise InfeasibleError(f"{name} does not fit: {violation.message}")
    return certify(timed_on, schedule, objective, name)
