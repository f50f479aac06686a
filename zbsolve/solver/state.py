"""What a solve knows and may still spend: its best schedule and bound, its history, its budget.

Every schedule that a phase offers is re-timed on the unrounded instance and re-checked; the best that passed
stays. Of bounds the highest does.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from zbsolve.bounds.argument import Known
from zbsolve.bounds.bound import Bound
from zbsolve.bounds.refutation import Refutation
from zbsolve.budget import Budget, Stop, collector_paused
from zbsolve.model.instance import Instance
from zbsolve.model.judge import check
from zbsolve.model.memory import NO_PAIRS, Pairs, peak_memory
from zbsolve.model.objective import Objective
from zbsolve.model.schedule import Schedule
from zbsolve.model.simulator import simulate_for
from zbsolve.model.tolerances import MEMORY_RTOL, OPTIMAL_GAP, ROUNDING
from zbsolve.plan.certificate import relative_gap
from zbsolve.plan.make import peaks_of
from zbsolve.search.canonical import Orders
from zbsolve.search.extended_policies import ExtendedPolicySearch
from zbsolve.solver.less_memory import most_messages_in_flight

log = logging.getLogger(__name__)

# The time limit is kept up to so many tasks; the first plan of more takes what it takes.
LIMIT_KEPT_TASKS = 65_536
# What a small limit may be exceeded by, so that the quick heuristics always run.
GRACE_SECONDS = 0.5
# What it takes to time and judge orders, a task (makespan, span; measured); and to make the plan of a
# schedule, as a multiple of judging it. Offers of a running search are this many times their own cost apart.
OFFER_SECONDS_A_TASK: dict[Objective, float] = {"makespan": 1.5e-5, "span": 3e-5}
FINISHING_JUDGEMENTS = 2.5
OFFERS_APART = 4.0


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


@dataclass
class Search:
    """The state of one solve: best schedule, best bound, what is left to spend, and what phases leave behind.

    ``budget`` is what phases may still spend, and ends when ``stop`` is asked; the time to make the plan of
    the best schedule is set aside.
    """

    instance: Instance
    objective: Objective
    time_limit: float
    seed: int
    deterministic: bool
    target_gap: float
    progress: Callable[[Progress], None] | None = None
    stop: Stop = field(default_factory=Stop)
    began: float = field(default_factory=time.monotonic)
    schedule: Schedule | None = None
    found_by: str = ""
    bound: Bound = field(default_factory=lambda: Bound(0.0, "none", "nothing proven"))
    refutation: Refutation | None = None
    policies: ExtendedPolicySearch | None = None  # of instances with options
    annealing_given: float | None = None  # what annealing and the exact model have together
    history: list[Progress] = field(default_factory=list)
    untried: Iterator[tuple[str, Orders]] = field(
        default_factory=lambda: iter(())
    )  # quick heuristics that the cost did not need
    cut_short: bool = False  # the limit left no time for all of the quick heuristics

    def __post_init__(self) -> None:
        limit, stop = self.time_limit, self.stop
        self.budget = Budget.counted(limit, stop) if self.deterministic else Budget(limit, stop=stop)
        self.known = Known(self.instance, self.objective)
        self._offer_estimate = OFFER_SECONDS_A_TASK[self.objective] * self.instance.num_tasks
        self.offer_seconds = self._offer_estimate
        self._offered = self.budget.part(0.0)  # over when the next offer of a running search is due

    @property
    def cost(self) -> float:
        return math.inf if self.schedule is None else self.schedule.cost(self.objective)

    @property
    def seconds(self) -> float:
        """On the wall since it began, for people to read: what is spent says the budget."""
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        return self.budget.left

    @property
    def incumbent(self) -> Schedule:
        """The best schedule: there is one once the first plans are made."""
        assert self.schedule is not None
        return self.schedule

    @property
    def done(self) -> bool:
        """Whether the target gap is reached (float64 rounding counts as closed)."""
        closed = relative_gap(self.cost, self.bound.value) <= max(self.target_gap, OPTIMAL_GAP)
        return self.schedule is not None and closed

    def quick(self, seconds: float) -> bool:
        """Whether one of the quick heuristics that takes so long may run: there always is a plan."""
        slower = max(1.0, self.offer_seconds / self._offer_estimate)  # than where ``seconds`` was measured
        needed = seconds * slower + self.offer_seconds
        may = self.schedule is None or self.affords_with_grace(needed)
        self.cut_short |= not may
        return may

    def affords_with_grace(self, seconds: float) -> bool:
        """Whether so long exceeds the limit by little enough for the quick heuristics."""
        return self.budget.affords(seconds - GRACE_SECONDS)

    def may_offer(self, budget: Budget) -> bool:
        """Whether a running search is to offer what it has: not so often that it does little else."""
        return self._offered.over() and budget.affords(self.offer_seconds)

    def offer(self, orders: Orders, who: str, pairs: Pairs = NO_PAIRS) -> bool:
        """Re-time and re-check orders; keep them when they are better.

        Among equal costs less peak memory is better, then fewer messages in flight.
        """
        began = self.budget.spent
        with collector_paused():
            better = self._judge(orders, who, pairs)
        if better:
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
        held, incumbent = max(peaks), max(peaks_of(self.instance, self.incumbent))
        if abs(held - incumbent) > MEMORY_RTOL * max(held, incumbent):
            return held < incumbent
        instance = self.instance
        return most_messages_in_flight(instance, schedule) < most_messages_in_flight(instance, self.incumbent)

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
