"""The portfolio: baselines, heuristic, search and exact models under one time limit, with a certificate.

A solver's word is never taken: every schedule is re-timed on the unrounded instance and re-checked, and
the incumbent is the best that passed. Lower bounds come from :mod:`zbsolve.bounds` and from
formulations that proved theirs for the unrounded instance; the highest is kept, with who proved it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from zbsolve import __version__
from zbsolve.backbone_search import BackboneSearch
from zbsolve.baselines import BASELINES
from zbsolve.baselines.base import is_linear
from zbsolve.baselines.greedy import greedy_candidates
from zbsolve.bounds import Bound, best_bound, window_bounds
from zbsolve.errors import EnvironmentFailedError, InfeasibleError, InputError
from zbsolve.extended import LocalMoves, candidates, neighbours, without_options
from zbsolve.formulation import FormulationResult, Orders, Status, canonical
from zbsolve.graph import BW, B, Task, W
from zbsolve.heuristics import PATIENCES, PolicyRace, Refinement, affordable_patiences, automatic
from zbsolve.instance import Instance
from zbsolve.list_scheduler import ListScheduler, encode, serial_orders
from zbsolve.local_search import OrderSearch
from zbsolve.memory import NO_PAIRS, Pairs, peak_memory, require_feasible, shortage
from zbsolve.plan import (
    OPTIMAL_GAP,
    Plan,
    Proof,
    ProvenLag,
    ShavedTime,
    SolverInfo,
    make_plan,
    peaks_of,
    relative_gap,
)
from zbsolve.precedence import Lag, room
from zbsolve.recompute import fold, unfold
from zbsolve.refutation import Refutation, refuted_bounds, shaved_bounds
from zbsolve.schedule import Schedule, check
from zbsolve.simulator import simulate_for
from zbsolve.work_bounds import is_extended, require_plain

log = logging.getLogger(__name__)

Objective = Literal["makespan", "span"]

# Above these sizes a formulation spends the limit on building its model (measured with 2 cores).
CPSAT_MOST_TASKS = 8_000
MILP_MOST_TASKS = 400
# Tasks that the first plan's refinement runs through policies: about a second of plain Python.
REFINEMENT_TASKS = 120_000
# Lags over more micro-batches than this are problems that CP-SAT does not close in seconds.
LAGS_MOST_HELD = 3
LAGS_SHARE = 0.2
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
# Machine code pays for its compilation only on long searches; below, the search runs as plain Python.
COMPILE_FROM_SECONDS = 15.0


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
    """The plan, how it came about, and whether Ctrl-C ended the search early."""

    plan: Plan
    history: tuple[Progress, ...]
    interrupted: bool = False


@dataclass
class _Search:
    """The state of one solve: best schedule, best bound, clock."""

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
    annealing_from: float | None = None
    history: list[Progress] = field(default_factory=list)

    @property
    def cost(self) -> float:
        return math.inf if self.schedule is None else self.schedule.cost(self.objective)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        return self.time_limit - self.seconds

    @property
    def done(self) -> bool:
        """Whether the target gap is reached (float64 rounding counts as closed)."""
        closed = relative_gap(self.cost, self.bound.value) <= max(self.target_gap, OPTIMAL_GAP)
        return self.schedule is not None and closed

    def offer(self, orders: Orders, who: str, pairs: Pairs = NO_PAIRS) -> bool:
        """Re-time and re-check orders; keep them when they are better."""
        peaks = enumerate(peak_memory(self.instance, d, order, pairs) for d, order in enumerate(orders))
        if not all(self.instance.fits(d, peak) for d, peak in peaks):
            log.debug("%s: over the memory cap, dropped", who)
            return False
        schedule = simulate_for(self.instance, orders, self.objective, pairs)
        if not schedule.cost(self.objective) < self.cost * (1 - 1e-12):
            return False
        violations = check(self.instance, schedule)
        if violations:
            log.warning("%s: the schedule breaks a rule (%s): dropped", who, violations[0])
            return False
        self.schedule, self.found_by = schedule, who
        self.report(who)
        return True

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
        Seconds for everything. The constructive heuristics always run, so there always is a plan.
    deterministic : bool
        Budgets are counts instead of seconds: same seed, same bytes.
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
            search.prove(best_bound(instance, objective))
            _solve_extended(search, solver)
        else:
            _construct(search)
        for phase in () if is_extended(instance) else SOLVERS[solver]:
            if search.done or (search.left <= 0 and not deterministic):
                break
            phase(search)
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
    plan = _certified(search.instance, search.schedule, search.objective, search.bound, info)
    return SolveResult(plan, tuple(search.history), interrupted)


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
    instance: Instance, schedule: Schedule, objective: Objective, bound: Bound, info: SolverInfo
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
        instance, schedule, objective=objective, lower_bound=bound.value, proof=proof, solver=info
    )


# --- phases --------------------------------------------------------------------------------------


def _construct(search: _Search) -> None:
    """The catalogue, our heuristics, else the serial order: always run, and always the same.

    The first two come before the bounds: those of a large instance take longer.
    """
    bounded = False
    for number, (name, orders) in enumerate(_constructions(search), start=1):
        search.offer(orders, name)
        if search.schedule is not None and number > 1 and not bounded:
            search.prove(best_bound(search.instance, search.objective))
            bounded = True
        if search.done:
            return
    if not bounded:
        search.prove(best_bound(search.instance, search.objective))


def _constructions(search: _Search) -> Iterator[tuple[str, Orders]]:
    """Orders by name, the likely best first: what comes after often need not be checked."""
    instance, objective = search.instance, search.objective
    refinement = Refinement(instance, objective)
    if is_linear(instance):
        greedy = min(greedy_candidates(instance), key=lambda found: found.costs(objective), default=None)
        if greedy is not None:
            yield "greedy", greedy.orders
            refinement.take(*encode(greedy.orders), greedy.costs(objective)[0])
        yield from _heuristics(search, refinement)
        yield from _fitting_baselines(instance)
    else:
        yield from _fitting_baselines(instance)
        yield from _heuristics(search, refinement)
    yield "serial", serial_orders(instance)


def _heuristics(search: _Search, refinement: Refinement) -> Iterator[tuple[str, Orders]]:
    """The automatic heuristic's best, and that of its refinement."""
    instance, objective = search.instance, search.objective
    scheduler = ListScheduler(instance)
    cost = automatic(scheduler, objective, affordable_patiences(instance))
    if cost < math.inf:
        refinement.take(*scheduler.best_codes, cost)
        if objective == "span" or refinement.cost == cost:
            # Least span may fall more than that of earliest starts: other W's do not always stay ahead.
            yield "heuristic", canonical(instance, scheduler.best_orders())
    if refinement.cost < search.cost:
        yield "heuristic", canonical(instance, refinement.orders())
    most = REFINEMENT_TASKS // instance.num_tasks
    late = search.left <= 0 and not search.deterministic
    if not search.done and not late and refinement.run(scheduler, most, search.bound.value):
        yield "heuristic", canonical(instance, refinement.orders())


def _solve_extended(search: _Search, solver: str) -> None:
    """The catalogue, the plan without the options, and local moves (see :mod:`zbsolve.extended`)."""
    instance = search.instance
    if solver not in ("auto", "heuristic"):
        require_plain(instance, solver)
    search.offer(unfold(instance, serial_orders(fold(instance))), "serial")
    for name, orders, pairs in candidates(instance):
        search.offer(orders, name, pairs)
    if instance.replicas == 1 and not search.done:
        plain = solve(
            without_options(instance),
            objective=search.objective,
            solver=solver,
            time_limit=max(1e-3, 0.5 * search.left),
            seed=search.seed,
            deterministic=search.deterministic,
        )
        orders = unfold(instance, plain.plan.schedule().orders)
        search.offer(orders, plain.plan.solver.name)
        if instance.has_pairs:
            search.offer(orders, f"{plain.plan.solver.name}, paired", neighbours(instance, orders))
        if plain.interrupted:
            raise KeyboardInterrupt  # it was meant for the whole search
    if solver == "heuristic":
        return
    assert search.schedule is not None  # the serial orders fit wherever require_feasible passed
    moves = LocalMoves(instance, search.schedule.orders, search.schedule.pairs, search.objective, search.seed)
    # A step costs about 5 microseconds a task: in deterministic mode the count stands for the time limit.
    left = max(1, round(0.3 * search.time_limit / (5e-6 * instance.num_tasks)))
    while not search.done and (left > 0 if search.deterministic else search.left > 0):
        left -= 1
        if moves.step() and moves.cost < search.cost:
            search.offer(moves.orders, "local moves", moves.pairs)
    search.offer(moves.orders, "local moves", moves.pairs)


def _fitting_baselines(instance: Instance) -> Iterator[tuple[str, Orders]]:
    """Baselines that apply, as orders of this very instance (BW taken apart where it has no t_bw)."""
    m = instance.num_microbatches
    groups = [f"interleaved:{n}" for n in range(instance.num_devices + 1, m) if m % n == 0]
    # The automatic ones last: on other placements than the linear one they take longest.
    for name in sorted((*reversed(BASELINES), *groups), key=lambda name: BASELINES[name].automatic):
        baseline = BASELINES[name]
        if baseline.automatic and is_linear(instance) and _same_caps(instance, name.removeprefix("zb-")):
            continue  # the greedy construction has run under the instance's own cap
        try:
            timed_on, orders = baseline.prepared(instance)
        except InputError:
            continue
        if (timed_on.replicas, timed_on.recomputes) != (instance.replicas, instance.recomputes):
            continue  # another model than the one to solve
        ours = tuple(tuple(split_where_needed(instance, order)) for order in orders)
        yield (name if ours == orders else f"{name}, backward split"), ours


def _same_caps(instance: Instance, cap: str) -> bool:
    """Whether a named cap is the instance's own."""
    named = instance.with_memory_cap(cap)
    return all(named.cap(d) == instance.cap(d) for d in range(instance.num_devices))


def split_where_needed(instance: Instance, order: tuple[Task, ...]) -> Iterator[Task]:
    """The tasks of an order, each BW of a stage that cannot fuse as B followed by W."""
    for task in order:
        if task.kind is BW and instance.stages[task.stage].t_bw is None:
            yield task._replace(kind=B)
            yield task._replace(kind=W)
        else:
            yield task


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
    until = search.seconds + LAGS_SHARE * search.left
    incumbent = canonical(instance, search.schedule.orders)
    last = instance.num_stages - 1
    # What the last stage's F's wait for is most; the end of the step completes the sum.
    for distance, to_end in ((held, False), (1, True), (2, True), (held + 1, False), (held + 2, False)):
        left = LAGS_SHARE * search.time_limit / 3 if search.deterministic else until - search.seconds
        if search.done or left <= 0 or distance + (0 if to_end else 1) > instance.num_microbatches:
            return
        answer = prove_lag(
            instance,
            last,
            distance,
            incumbent,
            to_end=to_end,
            time_limit=left,
            seed=search.seed,
            deterministic=search.deterministic,
        )
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
    share = PATTERNS_SHARE * (search.time_limit if search.deterministic else search.left)
    until = search.seconds + share
    for attempt in range(PATTERNS_ATTEMPTS):
        left = share / PATTERNS_ATTEMPTS if search.deterministic else until - search.seconds
        if search.done or left <= 0 or longest <= shortest * PATTERNS_CLOSE:
            return
        # The first attempts settle where the answer lies, and are easier: they get less.
        limit = left if search.deterministic else left / max(1, (PATTERNS_ATTEMPTS - attempt) / 2)
        period = math.sqrt(shortest * longest)
        pattern = find_pattern(
            instance,
            period,
            fused,
            time_limit=limit,
            seed=search.seed,
            deterministic=search.deterministic,
        )
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
    budget = max(1e-3, search.left * share)  # the limit may pass right here
    compiled = not search.deterministic and search.left >= COMPILE_FROM_SECONDS
    scheduler = ListScheduler(instance, compiled=compiled)
    patiences = len(PATIENCES) if compiled else affordable_patiences(instance)
    began = search.seconds
    trial_until = began + 0.3 * budget

    def enough() -> bool:
        return not search.deterministic and search.seconds > trial_until

    race = PolicyRace(scheduler, search.objective, search.seed, patiences, enough)
    # A step costs about 5 microseconds a task in plain Python: the count stands for the same budget.
    most_steps = max(1, round(0.3 * search.time_limit / (5e-6 * search.instance.num_tasks)))
    steps = 0
    while not search.done:
        used = steps / most_steps if search.deterministic else (search.seconds - began) / budget
        descent = race.next(used)
        if descent is None or used >= 1.0:
            break
        steps += 1
        if (descent.step() or steps == 1) and descent.cost < search.cost:
            search.offer(canonical(instance, descent.orders()), "policy search")
    if not search.done:
        # Least span may be below that of earliest starts.
        for descent in race.running:
            search.offer(canonical(instance, descent.orders()), "policy search")


def _refute(search: _Search) -> None:
    """The highest cost that the devices' orders refute (:mod:`zbsolve.refutation`)."""
    if search.time_limit < COMPILE_FROM_SECONDS:
        return
    search.refutation = Refutation(search.instance, search.objective, lags=search.lags)
    _limit_refutation(search, REFUTATION_SHARE * (search.time_limit if search.deterministic else search.left))
    search.prove_until_done(refuted_bounds(search.refutation, search.bound.value, search.cost))


def _refute_by_trial(search: _Search) -> None:
    """The same with trials, once the plan is good: how far they have to reach."""
    if search.refutation is None:
        return
    left = search.time_limit if search.deterministic else _annealing_ends(search) - search.seconds
    _limit_refutation(search, TRIALS_SHARE * left)
    bounds = shaved_bounds(search.refutation, search.bound.value, search.cost, search.seed)
    search.prove_until_done(bounds)


def _limit_refutation(search: _Search, seconds: float) -> None:
    """Let it work for so long from now, or for as many states in deterministic mode."""
    refutation, until = search.refutation, search.seconds + seconds
    assert refutation is not None
    most_work = refutation.work + seconds * STATES_A_SECOND

    def enough() -> bool:
        return refutation.work > most_work if search.deterministic else search.seconds > until

    refutation.enough = enough


def _search_orders(search: _Search, shares: tuple[float, ...], of_time: float) -> None:
    """Annealing of the incumbent, in machine code on two threads; the exact model has the rest of the time.

    F's and backwards with W's filled in by rule, then all orders as they are, from where the first came to.
    """
    if search.deterministic or search.time_limit < COMPILE_FROM_SECONDS:
        return
    until = search.seconds
    budget = of_time * max(0.0, _annealing_ends(search) - until)
    for number, share in enumerate(shares):
        until += share * budget
        if search.done or search.seconds >= until:
            return
        if number % 2 == 0:
            _anneal(search, BackboneSearch, "backbone search", until, most_slack=25.0)
        else:
            _anneal(search, OrderSearch, "order search", until, most_slack=4.0)


def _anneal(
    search: _Search, kind: type[BackboneSearch | OrderSearch], who: str, until: float, *, most_slack: float
) -> None:
    """One cooling of two annealings side by side, the second at half the slack."""
    assert search.schedule is not None  # _construct always leaves one
    instance, objective = search.instance, search.objective
    start = canonical(instance, search.schedule.orders)
    annealings = [
        kind(instance, start, objective, seed=search.seed + 1_000 * number, compiled=True)
        for number in range(2)
    ]
    mean_task = sum(timed.end - timed.start for timed in search.schedule) / instance.num_tasks
    annealings[0].run(1, 0.0, search.bound.value)  # compiles
    began = search.seconds
    annealings[0].run(ROUND_TRIAL_STEPS, 0.0, search.bound.value)
    pace = max(1e-7, (search.seconds - began) / ROUND_TRIAL_STEPS)
    # High slack pays only where there are moves enough to come down from it.
    moves_a_task = (until - search.seconds) / pace / instance.num_tasks
    most_slack = min(most_slack, max(0.5, moves_a_task / 15)) * mean_task
    began, steps = search.seconds, ROUND_TRIAL_STEPS
    with ThreadPoolExecutor(len(annealings)) as pool:
        while not search.done and search.seconds < until:
            warmth = (1.0 - (search.seconds - began) / (until - began)) ** 2
            seconds = min(ROUND_SECONDS, until - search.seconds)
            steps = min(max(20, round(seconds / pace)), 2 * steps)
            round_began = search.seconds
            rounds = [
                pool.submit(annealing.run, steps, most_slack * warmth / (1 + number), search.bound.value)
                for number, annealing in enumerate(annealings)
            ]
            for annealing, done in zip(annealings, rounds, strict=True):
                if done.result() < search.cost:
                    search.offer(canonical(instance, annealing.orders()), who)
            # Refused moves cost far less than kept ones, and the slack decides how many are kept: the pace of
            # one round says only roughly what the next one needs.
            pace = max(1e-7, (search.seconds - round_began) / steps)


def _annealing_ends(search: _Search) -> float:
    """When, in seconds, the time of the exact model begins: its share counts from where annealing began."""
    if search.annealing_from is None:
        search.annealing_from = search.seconds
    all_left = search.time_limit - search.annealing_from
    return search.annealing_from + all_left * min(0.97, 1.0 - _exact_share(search))


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

    limit = search.time_limit if search.deterministic else search.left
    result = solve_cpsat(
        search.instance,
        search.objective,
        time_limit=limit,
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
                time_limit=search.time_limit if search.deterministic else search.left,
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
        search.offer(result.orders, result.solver)
    # A model was given the bound so far; the same again, rounded otherwise, is not its own proof.
    if result.bound is not None and result.bound > search.bound.value * (1 + OPTIMAL_GAP):
        statement = f"{result.solver} {result.version} proved it on the exact model ({result.native_status})"
        search.prove(Bound(result.bound, f"{result.solver} model", statement))


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
