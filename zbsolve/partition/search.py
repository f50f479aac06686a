"""Best first over families of decisions: split, device order, placement, activations and passes.

The search keeps families (:mod:`zbsolve.partition.relaxation`) in a queue, each with a lower bound for all
its members, and takes the one with the least first. A family with free devices is divided by what the next
device gets. A single decision is a scheduling instance: its bound is raised by the combinatorial bounds of
that instance, then by the solver, for longer each time its turn comes. While the solver is at the decision
with the least bound, part of the time goes to dividing on, and part to the decisions on which the heuristic
did best: a better plan closes more than any bound.

The joint certificate: every decision is a member of a family still in a queue, of one that was closed
because its bound reached the best cost known then, or it was solved to a proven optimum. So the least
bound in the queues, or the best cost where that is less, is a lower bound for the whole decision.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from zbsolve.bounds.catalogue import best_bound
from zbsolve.bounds.waits import back
from zbsolve.budget import Budget
from zbsolve.errors import InfeasibleError, UndecidedError, ZbsolveError
from zbsolve.model.recompute import fold, unfold
from zbsolve.model.serial import require_feasible
from zbsolve.model.simulator import simulate_for
from zbsolve.model.tolerances import OPTIMAL_GAP
from zbsolve.partition.decisions import count_decisions, decision_of, seeds
from zbsolve.partition.problem import Decision, DecisionProblem, Placement
from zbsolve.partition.relaxation import Relaxation, State
from zbsolve.partition.settled import Settled, settled_bound
from zbsolve.plan.certificate import relative_gap
from zbsolve.plan.plan import Plan
from zbsolve.search.canonical import canonical
from zbsolve.search.list_scheduler import ListScheduler
from zbsolve.search.policies import affordable_patiences, automatic
from zbsolve.solver.machine_code import COMPILE_FROM_SECONDS
from zbsolve.solver.portfolio import certify, solve

log = logging.getLogger(__name__)

# Seconds that the solver gets on one decision, each time its turn comes.
SLICES = (1.0, 4.0, 15.0, 60.0)

# Options that the dynamic programs look at in a second, about; they may take 0.3 of the time.
OPTIONS_PER_SECOND = 50_000.0
FIXED_EFFORT_SECONDS = 20.0

# How the time is shared while a single decision has the least bound.
SHARES = {"prove": 0.4, "explore": 0.35, "improve": 0.25}


@dataclass(frozen=True, slots=True)
class JointResult:
    """The best decision with its plan, and the certificate on the whole question.

    Attributes
    ----------
    plan : Plan
        The decision's plan, as it is written and run; its own ``lower_bound`` holds for this decision's
        instance alone.
    lower_bound : float
        No schedule that :func:`zbsolve.model.judge.check` accepts on :meth:`DecisionProblem.instance` of any
        decision that the problem allows costs less: any order of passes, backward fused or split where the
        layers allow both, each R anywhere between its F and its backward.
    statement : str
        The joint proof in a sentence.
    decisions : int
        How many decisions there are.
    examined : int
        How many of them were looked at one by one.
    interrupted : bool
        Whether Ctrl-C ended the search early.
    """

    problem: DecisionProblem
    decision: Decision
    plan: Plan
    lower_bound: float
    statement: str
    decisions: int
    examined: int
    seconds: float
    interrupted: bool = False

    @property
    def gap(self) -> float:
        """(cost - joint lower bound) / cost."""
        return relative_gap(self.plan.cost, self.lower_bound)

    @property
    def status(self) -> str:
        return "optimal" if self.gap <= OPTIMAL_GAP else "feasible"


@dataclass(order=True, slots=True)
class _Entry:
    """A family or a single decision in the queue, least bound first, then the most settled."""

    bound: float
    depth: int
    number: int
    placement: Placement = field(compare=False)
    state: State | None = field(compare=False, default=None)
    head: float = field(compare=False, default=0.0)
    tail: float = field(compare=False, default=0.0)
    settled: Settled = field(compare=False, default=())
    decision: Decision | None = field(compare=False, default=None)
    cost: float = field(compare=False, default=math.inf)
    plan: Plan | None = field(compare=False, default=None)
    fresh: bool = field(compare=False, default=True)
    taken: bool = field(compare=False, default=False)
    turns: int = field(compare=False, default=0)


class JointSearch:
    """One run of the search; :func:`decide` is its front door."""

    def __init__(
        self,
        problem: DecisionProblem,
        time_limit: float,
        gap: float,
        seed: int,
        progress: Callable[[str], None] | None,
        steps: int | None = None,
    ) -> None:
        self.problem, self.time_limit, self.target, self.seed = problem, time_limit, gap, seed
        self.progress, self.steps = progress, steps
        self.budget = Budget(time_limit)
        self.best: tuple[Decision, Plan] | None = None  # both at once, whenever Ctrl-C comes
        self.proven: float | None = None  # the bound when Ctrl-C came, amid changes to the queues
        self.examined = 0
        self.interrupted = False
        self.families: list[_Entry] = []
        self.deepest: list[tuple[int, float, int, _Entry]] = []
        self.dive = True
        self.divided = 0
        self.arrived = False  # whether a dive has come to a single decision yet
        self.singles: list[_Entry] = []
        self.spent = dict.fromkeys(SHARES, 0.0)
        self.stuck = math.inf  # least bound of a decision that the solver could not close
        self._numbers = count()
        self._seen: set[Decision] = set()
        self._refusal: InfeasibleError | None = None

    # --- clock and bookkeeping ------------------------------------------------------------------------

    @property
    def cost(self) -> float:
        return math.inf if self.best is None else self.best[1].cost

    def _over(self) -> bool:
        return self.budget.over()

    @property
    def bound(self) -> float:
        """The joint lower bound so far."""
        if self.proven is not None:
            return min(self.cost, self.proven)
        return min(self.cost, self.stuck, _least(self.families), _least(self.singles))

    def _closed(self, bound: float) -> bool:
        """Whether nothing above ``bound`` improves on the best plan (float64 rounding is no gain)."""
        return bound >= self.cost * (1 - OPTIMAL_GAP / 10)

    def _done(self) -> bool:
        closed = relative_gap(self.cost, self.bound) <= max(self.target, OPTIMAL_GAP)
        return self.best is not None and closed

    def _say(self) -> None:
        if self.progress is not None:
            unit = self.problem.profile.time_unit
            self.progress(
                f"{self.budget.spent:.1f} s: best {self.cost:.6g} {unit}, joint bound "
                f"{self.bound:.6g}, "
                f"{self.examined} decisions examined, {len(self.families)} families open"
            )

    # --- single decisions ------------------------------------------------------------------------------

    def _examine(self, decision: Decision, bound: float) -> None:
        """Bound one decision by itself, try the heuristic on it, and queue it unless that closed it."""
        if decision in self._seen:
            return
        self._seen.add(decision)
        instance = self.problem.instance(decision)
        try:
            require_feasible(instance)
        except InfeasibleError as error:
            self._refusal = error
            return
        self.examined += 1
        bound = max(bound, best_bound(instance, self.problem.objective, self._over).value)
        if self._closed(bound):
            return
        compiled = self.steps is not None or self.time_limit >= COMPILE_FROM_SECONDS
        # The heuristic knows no R of its own; with each right before its backward plans end no later.
        bare = fold(instance)
        scheduler = ListScheduler(bare, compiled=compiled)
        cost = automatic(scheduler, self.problem.objective, affordable_patiences(bare), self._over)
        if self.best is None and math.isinf(cost):
            limit = max(0.01, min(SLICES[-1], self.budget.left))
            quick = solve(instance, solver="heuristic", objective=self.problem.objective, time_limit=limit)
            self._keep(decision, quick.plan)
            if quick.interrupted:
                raise KeyboardInterrupt
        elif cost < self.cost or (instance.recomputes and math.isfinite(cost)):
            orders = unfold(instance, canonical(bare, scheduler.best_orders()))
            schedule = simulate_for(instance, orders, self.problem.objective)
            cost = schedule.cost(self.problem.objective)
            if cost < self.cost:
                self._keep(decision, certify(instance, schedule, self.problem.objective, "heuristic"))
        if not self._closed(bound):
            entry = _Entry(bound, 1, next(self._numbers), decision.placement, decision=decision, cost=cost)
            heapq.heappush(self.singles, entry)

    def _keep(self, decision: Decision, plan: Plan) -> None:
        if plan.cost < self.cost:
            self.best = decision, plan
            self._say()

    def _solve(self, entry: _Entry) -> None:
        """Give the solver its next slice of time on one decision."""
        assert entry.decision is not None
        limit = max(0.01, min(SLICES[entry.turns], self.budget.left))
        instance = self.problem.instance(entry.decision)
        mine = entry.plan
        if self.best is not None and self.best[0] == entry.decision:
            mine = self.best[1]
        result = solve(
            instance,
            objective=self.problem.objective,
            time_limit=limit,
            seed=self.seed,
            warm_start=None if mine is None else mine.schedule().orders,
        )
        if result.interrupted:
            raise KeyboardInterrupt
        self._keep(entry.decision, result.plan)
        entry.cost, entry.plan = min(entry.cost, result.plan.cost), result.plan
        entry.bound = max(entry.bound, result.plan.lower_bound)
        entry.turns += 1
        if result.plan.status == "optimal" or self._closed(entry.bound):
            return
        if entry.turns < len(SLICES):
            heapq.heappush(self.singles, entry)
        else:
            self.stuck = min(self.stuck, entry.bound)

    # --- families ---------------------------------------------------------------------------------------

    def _divide(self, relaxation: Relaxation, entry: _Entry) -> None:
        """Queue the families that differ in what the next device gets."""
        state = entry.state
        assert state is not None
        if entry.fresh and entry.settled:
            # Dearer than the other bounds: only now that this family has the least.
            bound = settled_bound(relaxation, entry.settled)
            if bound > entry.bound:
                if not self._closed(bound):
                    self._push(replace(entry, bound=bound, fresh=False, taken=False))
                return
        self.divided += 1
        makespan = self.problem.objective == "makespan"
        for option in relaxation.options(state):
            if self._over():
                self._push(replace(entry, taken=False))  # not all of its parts are queued
                return
            hop = relaxation.hop(state, option.cls)
            head = entry.head + hop if makespan else 0.0
            tail = entry.tail + hop
            for keep in relaxation.keeps():
                bound = max(entry.bound, head + relaxation.work(option, keep))
                if self._closed(bound):
                    continue
                bound = max(bound, relaxation.alone(option, keep, head, tail))
                bound = max(bound, relaxation.to_go(option.after))
                if self._closed(bound):
                    continue
                first = self.problem.stage(*option.segments[0], option.cls, keep[0])
                past = head + first.t_f
                if makespan and len(self.problem.classes) > 1:
                    bound = max(bound, past + relaxation.to_go_after(option.after))
                    if self._closed(bound):
                        continue
                settled = (*entry.settled, (option, keep))
                if sum(option.after.used) == self.problem.num_devices:
                    self._examine(decision_of(self.problem, entry.placement, settled), bound)
                    self.arrived = True
                    continue
                behind = tail + (back(first) if entry.settled else first.min_backward)
                number = next(self._numbers)
                family = _Entry(
                    bound, -len(settled), number, entry.placement, option.after, past, behind, settled
                )
                self._push(family)

    def run(self) -> JointResult:
        """Search until the gap or the time limit is reached."""
        try:
            for decision in seeds(self.problem):
                self._examine(decision, 0.0)
                if self._over():
                    break
        except KeyboardInterrupt:
            self._stop()
        try:
            relaxations = self._begin()
        except KeyboardInterrupt:
            self._stop()
            relaxations = self._begin()
        self._search(relaxations)
        if self.best is None:
            raise self._no_plan()
        decision, plan = self.best
        return JointResult(
            problem=self.problem,
            decision=decision,
            plan=plan,
            lower_bound=self.bound,
            statement=self._statement(),
            decisions=count_decisions(self.problem),
            examined=self.examined,
            seconds=self.budget.spent,
            interrupted=self.interrupted,
        )

    def _begin(self) -> dict[Placement, Relaxation]:
        """Queue the families of all decisions; with no time left their bounds are the simplest."""
        problem = self.problem
        self.families, self.deepest = [], []
        seconds = FIXED_EFFORT_SECONDS if self.steps is not None else self.time_limit
        effort = OPTIONS_PER_SECOND * 0.3 * seconds / len(problem.placements)
        relaxations = {
            placement: Relaxation(problem, placement, self.cost, effort, self._over)
            for placement in problem.placements
        }
        for placement, relaxation in relaxations.items():
            for state in relaxation.starts():
                bound = relaxation.to_go(state)
                if not self._closed(bound):
                    entry = _Entry(bound, 0, next(self._numbers), placement, state)
                    self._push(entry)
        return relaxations

    def _search(self, relaxations: dict[Placement, Relaxation]) -> None:
        """Step by step, until the gap is reached, the budget is used up, or Ctrl-C."""
        proven = self.bound
        said = self.budget.spent
        try:
            while not self._done() and not self._over() and (self.families or self.singles):
                if self.steps is not None and (self.divided >= self.steps or not self.families):
                    break
                proven = self.bound
                self._step(relaxations)
                if self.budget.spent - said > 1.0:
                    said = self.budget.spent
                    self._say()
        except KeyboardInterrupt:
            self.proven = proven
            self._stop()

    def _step(self, relaxations: dict[Placement, Relaxation]) -> None:
        """Divide the family with the least bound, or give the solver a decision, by shares of the time."""
        action = "explore"
        if self.steps is None and _least(self.singles) < _least(self.families):
            possible = [a for a in SHARES if a != "explore" or self.families]
            action = min(possible, key=lambda a: self.spent[a] / SHARES[a])
        if action == "improve":
            entry = min(self.singles, key=lambda single: (single.turns > 1, single.cost, single.number))
            self.singles.remove(entry)
            heapq.heapify(self.singles)
        elif action == "explore":
            entry = self._next_family()
        else:
            entry = heapq.heappop(self.singles)
        if self._closed(entry.bound):
            return
        began = self.budget.spent
        if entry.decision is None:
            self._divide(relaxations[entry.placement], entry)
        else:
            self._solve(entry)
        self.spent[action] += self.budget.spent - began

    def _push(self, family: _Entry) -> None:
        heapq.heappush(self.families, family)
        heapq.heappush(self.deepest, (family.depth, family.bound, family.number, family))

    def _next_family(self) -> _Entry:
        """By turns the most settled family, where plans are found, and the one with the least bound.

        Until a first single decision is reached it is the most settled one each time.

        Each is in two queues; whoever is taken from one is passed over in the other.
        """
        self.dive = not self.dive or not self.arrived
        entry = heapq.heappop(self.families)
        while self.dive and self.deepest:
            deep = heapq.heappop(self.deepest)[-1]
            if not deep.taken:
                if deep is not entry:
                    heapq.heappush(self.families, entry)
                entry = deep
                break
        entry.taken = True
        while self.families and self.families[0].taken:
            heapq.heappop(self.families)
        return entry

    def _stop(self) -> None:
        """Ctrl-C: keep what is known, or pass it on when nothing is."""
        if self.best is None:
            raise KeyboardInterrupt
        self.interrupted = True
        self.budget.set_aside(math.inf)  # nothing is left

    def _statement(self) -> str:
        if relative_gap(self.cost, self.bound) <= OPTIMAL_GAP:
            rest = "none of them all costs less than the plan"
        elif not self.families and not self.singles:
            rest = "those that the solver could not close have the joint bound"
        else:
            rest = (
                f"{len(self.families)} families and {len(self.singles)} single decisions are undecided, the "
                "least of their bounds is the joint bound"
            )
        return (
            f"{self.examined} decisions examined one by one, others bounded by families (work, round trip "
            f"and memory of each device, least over all ways to deal out the layers); {rest}"
        )

    def _no_plan(self) -> ZbsolveError:
        """None was found: because there is none, or because the search ended before it knew."""
        if self.families or self.singles:
            steps = self.steps is not None and self.divided >= self.steps
            within = f"{self.steps} steps" if steps else f"{self.time_limit:g} s"
            raise_what = "number of steps" if steps else "time limit"
            return UndecidedError(
                f"no plan found within {within}, and none proven impossible: raise the {raise_what}"
            )
        reason = f" (the last one tried: {self._refusal})" if self._refusal is not None else ""
        return InfeasibleError(
            "infeasible: no split of the layers fits the devices' memory"
            f"{reason}: use more devices, or allow checkpoint, recompute or offload"
        )


def _least(queue: list[_Entry]) -> float:
    return queue[0].bound if queue else math.inf


def decide(
    problem: DecisionProblem,
    *,
    time_limit: float = 60.0,
    gap: float = 0.0,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    steps: int | None = None,
) -> JointResult:
    """Choose split, devices, placement, activations and order together, with one bound for all of it.

    Parameters
    ----------
    time_limit : float
        Seconds for everything.
    gap : float
        Stop as soon as (cost - joint bound) / cost is this small.
    steps : int, optional
        Stop after dividing this many families, and leave single decisions to the heuristic: the same answer
        every time, whatever the machine (``time_limit`` then should be out of reach).

    Raises
    ------
    InfeasibleError
        No decision fits the devices' memory.
    UndecidedError
        None was found in the time or the steps given, and that none fits was not proven.
    """
    return JointSearch(problem, time_limit, gap, seed, progress, steps).run()
