"""The exact model for CP-SAT of instances with recomputation, F&B pairs and several replicas.

Beside the rules of :mod:`zbsolve.formulations.cpsat`: an R between F and backward where a stage recomputes;
backwards that may share their time with one F of the same device, both then as long as the pair; one chain of
dependencies a replica, all of them on the same devices. Contended links are taken as free, a relaxation.

Canonical order holds per stage: renaming micro-batches so that they run in order keeps a pair's place and
length, too. Of one replica, F of j pairs only with backwards of micro-batches before j: the backwards of j
and later ones need F of j first.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version

from ortools.sat.python import cp_model

from zbsolve.bounds.arcs import Arc, dependencies, order_arcs
from zbsolve.bounds.waits import back
from zbsolve.bounds.ways import least_way_home, least_way_out
from zbsolve.formulations.common import FormulationResult, Status, never
from zbsolve.formulations.cpsat import (
    DETERMINISTIC_WALL_FACTOR,
    ENERGY_BITS,
    MEMORY_BITS,
    SOLVER,
    WORKERS,
    OutOfTimeError,
    memory_units,
    solve_interruptibly,
)
from zbsolve.formulations.ticks import Ticks, make_ticks
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.judge import check
from zbsolve.model.kinds import BW, B, F, R, W
from zbsolve.model.memory import NO_PAIRS, Pairs
from zbsolve.model.schedule import Schedule
from zbsolve.model.simulator import CycleError, simulate_for
from zbsolve.model.tolerances import OPTIMAL_GAP, ROUNDING
from zbsolve.search.canonical import Orders

log = logging.getLogger(__name__)


@dataclass
class _Pass:
    """One task: its start, end (as variables or sums of them) and whether it runs at all (None: always)."""

    start: cp_model.IntVar
    end: cp_model.LinearExprT
    interval: cp_model.IntervalVar
    present: cp_model.LiteralT | None = None


@dataclass
class ExtendedModel:
    """One extended instance as a CP-SAT model, one method per constraint family.

    Parameters
    ----------
    incumbent : Schedule, optional
        A valid schedule in canonical order: hint and upper bound.
    lower_bound : float
        Proven bound in the time unit.
    deadline : float
        ``time.monotonic()`` at which building gives up.
    """

    instance: Instance
    objective: str
    incumbent: Schedule | None = None
    lower_bound: float = 0.0
    deadline: float = math.inf
    ticks: Ticks = field(init=False)
    model: cp_model.CpModel = field(init=False, default_factory=cp_model.CpModel)
    cost: cp_model.IntVar = field(init=False)
    passes: dict[Task, _Pass] = field(init=False, default_factory=dict)
    paired: dict[tuple[Task, Task], cp_model.IntVar] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.ticks = make_ticks(self.instance, self.objective)
        self._pairs_of: dict[Task, list[tuple[cp_model.IntVar, int]]] = {}
        self.upper = self.ticks.horizon
        if self.incumbent is not None:
            # Every duration is rounded down: on the model's clock it is no dearer.
            ceiling = math.ceil(self.incumbent.cost(self.objective) / float(self.ticks.tick) * (1 + ROUNDING))
            self.upper = min(self.upper, ceiling)
        lower = min(self.ticks.from_bound(self.lower_bound), self.upper)
        self.cost = self.model.new_int_var(lower, self.upper, "cost")
        window = self.upper * self.ticks.fine + self.ticks.zeros
        # In the span each device's window meets that of its replica's first: twice the span holds both, and
        # replicas need not begin together.
        self.latest = window if self.objective == "makespan" else (1 + 2 * self.instance.replicas) * window
        self._clock_incumbent()
        for add in (
            self.add_pairs,
            self.add_passes,
            self.add_one_task_per_device,
            self.add_dependencies,
            self.add_microbatch_order,
            self.add_memory,
            self.add_objective,
            self.add_redundant_bounds,
        ):
            add()
            if time.monotonic() > self.deadline:
                raise OutOfTimeError

    def _clock_incumbent(self) -> None:
        """Time the incumbent on the model's clock: the hint, a value for every variable."""
        self._clock: dict[Task, tuple[int, int]] = {}
        self._hinted_pairs: Pairs = NO_PAIRS
        if self.incumbent is None:
            return
        orders, self._hinted_pairs = self.incumbent.orders, self.incumbent.pairs
        timed = simulate_for(self.ticks.instance, orders, self.objective, self._hinted_pairs)
        origin = min(each.start for each in timed)
        self._clock = {e.task: (round(e.start - origin), round(e.end - origin)) for e in timed}
        self._hint(self.cost, min(self.ticks.cost_of(timed.cost(self.objective)), self.upper))

    def _hint(self, variable: cp_model.IntVar, value: int) -> None:
        if self.incumbent is not None:
            self.model.add_hint(variable, int(value))

    # --- variables -----------------------------------------------------------------------------

    def add_pairs(self) -> None:
        """A choice for every F and BW that may run as a pair and save time; each is in one at most."""
        m, chain = self.instance.num_microbatches, self.instance.chain
        for (s, q), steps in self.ticks.pair_steps.items():
            if steps >= self.ticks.steps(F, s) + self.ticks.steps(BW, q):
                continue
            for j in range(m):
                for i in range(j if s // chain == q // chain else m):
                    chosen = self.model.new_bool_var(f"F{s}.{j}&BW{q}.{i}")
                    forward, backward = Task(F, s, j), Task(BW, q, i)
                    self.paired[forward, backward] = chosen
                    for task in (forward, backward):
                        self._pairs_of.setdefault(task, []).append((chosen, steps))
        for choices in self._pairs_of.values():
            self.model.add_at_most_one(chosen for chosen, _ in choices)

    def add_passes(self) -> None:
        """An interval for every task; those of fused and split backwards are there or not."""
        for s, stage in enumerate(self.instance.stages):
            for j in range(self.instance.num_microbatches):
                fused = None if stage.t_bw is None else self.model.new_bool_var(f"fused{s}.{j}")
                split = None if fused is None else ~fused
                self._add_pass(Task(F, s, j), None)
                if stage.t_r is not None:
                    self._add_pass(Task(R, s, j), None)
                self._add_pass(Task(B, s, j), split)
                self._add_pass(Task(W, s, j), split)
                if fused is not None:
                    self._add_pass(Task(BW, s, j), fused)
                    bw = Task(BW, s, j)
                    self._hint(fused, bw in self._clock)
                    for chosen, _ in self._pairs_of.get(bw, ()):
                        self.model.add_implication(chosen, fused)
        for (forward, backward), chosen in self.paired.items():
            self._hint(chosen, (forward, backward) in self._hinted_pairs)
            same = self.passes[forward].start == self.passes[backward].start
            self.model.add(same).only_enforce_if(chosen)

    def _add_pass(self, task: Task, present: cp_model.LiteralT | None) -> None:
        model, alone = self.model, self.ticks.steps(task.kind, task.stage)
        start = model.new_int_var(0, self.latest, f"{task}")
        begin, finish = self._clock.get(task, (0, alone))
        self._hint(start, begin)
        choices = self._pairs_of.get(task)
        if not choices:
            if present is None:
                interval = model.new_fixed_size_interval_var(start, alone, f"{task}")
            else:
                interval = model.new_optional_fixed_size_interval_var(start, alone, present, f"{task}")
            self.passes[task] = _Pass(start, start + alone, interval, present)
            return
        longest = max(steps for _, steps in choices)
        size = model.new_int_var(min(alone, *(n for _, n in choices)), max(alone, longest), f"size {task}")
        end = model.new_int_var(0, self.latest, f"end {task}")
        model.add(size == alone + sum((steps - alone) * chosen for chosen, steps in choices))
        model.add(end == start + size)
        self._hint(size, finish - begin)
        self._hint(end, finish)
        if present is None:
            interval = model.new_interval_var(start, size, end, f"{task}")
        else:
            interval = model.new_optional_interval_var(start, size, end, present, f"{task}")
        self.passes[task] = _Pass(start, end, interval, present)

    # --- rules ---------------------------------------------------------------------------------

    def add_one_task_per_device(self) -> None:
        """No two tasks of a device at the same time; of a pair, its BW stands for both."""
        intervals: list[list[cp_model.IntervalVar]] = [[] for _ in range(self.instance.num_devices)]
        for task, each in self.passes.items():
            interval = each.interval
            choices = self._pairs_of.get(task)
            if task.kind is F and choices:
                alone = self.model.new_bool_var(f"{task} alone")
                self.model.add(sum(chosen for chosen, _ in choices) + alone == 1)
                self._hint(alone, all(task not in pair for pair in self._hinted_pairs))
                interval = self.model.new_optional_fixed_size_interval_var(
                    each.start, self.ticks.steps(F, task.stage), alone, f"{task} alone"
                )
            intervals[self.instance.stages[task.stage].device].append(interval)
        for held in intervals:
            self.model.add_no_overlap(held)

    def add_dependencies(self) -> None:
        """F and gradients along each replica's chain with hops; F, R, backward in turn; W after B."""
        for s in range(self.instance.num_stages):
            arcs = [arc for arc in dependencies(self.ticks.instance) if arc.after.stage == s]
            for j in range(self.instance.num_microbatches):
                self._follow(arcs, j)

    def add_microbatch_order(self) -> None:
        """Identical micro-batches come in order in each stage's F's, R's, backwards and W's."""
        for s, stage in enumerate(self.instance.stages):
            arcs = [arc for arc in order_arcs(self.instance) if arc.after.stage == s]
            if stage.t_bw is not None:
                # Where some are fused the others' W's may run in any order among themselves.
                arcs = [arc for arc in arcs if arc.after.kind is not W]
            for j in range(self.instance.num_microbatches):
                self._follow(arcs, j)

    def add_memory(self) -> None:
        """Held memory and transients within each finite cap: one cumulative a device."""
        for device in range(self.instance.num_devices):
            stages = self.instance.stages_on(device)
            if self.instance.cap(device) == math.inf:
                continue
            holdings = 9 * len(stages) * self.instance.num_microbatches
            bits = min(MEMORY_BITS, ENERGY_BITS - self.latest.bit_length() - holdings.bit_length())
            units = memory_units(self.instance, device, bits)
            intervals: list[cp_model.IntervalVar] = []
            demands: list[int] = []
            for s in stages:
                mem_b, mem_w, peak_f, peak_b, peak_w, peak_bw, mem_r = units.stages[s]
                kept = mem_b if self.instance.stages[s].t_r is None else mem_r
                for j in range(self.instance.num_microbatches):
                    f, r, b, w, bw = (Task(kind, s, j) for kind in (F, R, B, W, BW))
                    held = []
                    for backward in self._backwards(s, j):
                        held.append((self._span(f, backward), kept))
                        if r in self.passes:
                            held.append((self._span(r, backward), mem_b - kept))
                    held.append((self._span(b, w, from_end=True), mem_w))
                    held.append((self.passes[b].interval, max(0, mem_w - mem_b) + peak_b))
                    held.append((self.passes[f].interval, peak_f))
                    held.append((self.passes[w].interval, peak_w))
                    if bw in self.passes:
                        held.append((self.passes[bw].interval, peak_bw))
                    intervals += [interval for interval, amount in held if amount > 0]
                    demands += [amount for _, amount in held if amount > 0]
            self.model.add_cumulative(intervals, demands, units.capacity)

    def _span(self, first: Task, last: Task, *, from_end: bool = False) -> cp_model.IntervalVar:
        """From the start (or end) of one task to the end of another, there when the latter is."""
        a, b = self.passes[first], self.passes[last]
        name = f"{first}-{last}"
        size = self.model.new_int_var(0, self.latest, name)

        if first in self._clock and last in self._clock:
            self._hint(size, self._clock[last][1] - self._clock[first][1 if from_end else 0])
        else:
            self._hint(size, 0)
        begin = a.end if from_end else a.start
        if b.present is None:
            return self.model.new_interval_var(begin, size, b.end, name)
        return self.model.new_optional_interval_var(begin, size, b.end, b.present, name)

    # --- objective and what helps to prove it --------------------------------------------------

    def add_objective(self) -> None:
        """Cost bounds every end (makespan) or every device's window (span)."""
        limit = self.cost * self.ticks.fine + self.ticks.zeros
        opened: dict[int, cp_model.IntVar] = {}
        if self.objective == "span":
            for device in range(self.instance.num_devices):
                opened[device] = first = self.model.new_int_var(0, self.latest, f"opens{device}")
                heads = [Task(F, s, 0) for s in self.instance.stages_on(device)]
                for head in heads:
                    self.model.add(first <= self.passes[head].start)
                self._hint(first, min(self._clock.get(head, (0, 0))[0] for head in heads))
        for task, each in self.passes.items():
            if task.kind in (W, BW):
                device = self.instance.stages[task.stage].device
                ends = self.model.add(each.end <= limit + opened.get(device, 0))
                if each.present is not None:
                    ends.only_enforce_if(each.present)
        self.model.minimize(self.cost)

    def add_redundant_bounds(self) -> None:
        """Ways to and from each task; a device's work fits into the cost, for the makespan after its head."""
        clock, whole = self.ticks.instance, self.objective == "makespan"
        limit = self.cost * self.ticks.fine + self.ticks.zeros
        for s, j in self._each() if whole else ():
            self.model.add(self.passes[Task(F, s, j)].start >= int(least_way_out(clock, s)))
            home = int(least_way_home(clock, s))
            for backward in self._backwards(s, j):
                gradient = self.passes[backward].start + int(back(clock.stages[s])) + home
                ends = self.model.add(gradient <= limit)
                present = self.passes[backward].present
                if present is not None:
                    ends.only_enforce_if(present)
        for device in range(self.instance.num_devices):
            stages = self.instance.stages_on(device)
            head = min(int(least_way_out(clock, s)) for s in stages) if whole else 0
            work: list[cp_model.LinearExprT] = [head]
            for s in stages:
                for j in range(self.instance.num_microbatches):
                    work.append(sum(self.ticks.steps(k, s) for k in (F, B, W)))
                    if Task(R, s, j) in self.passes:
                        work.append(self.ticks.steps(R, s))
                    fused = self.passes[Task(BW, s, j)].present if Task(BW, s, j) in self.passes else None
                    if fused is not None:
                        shorter = self.ticks.steps(BW, s) - self.ticks.steps(B, s) - self.ticks.steps(W, s)
                        work.append(shorter * fused)
            for (forward, backward), chosen in self.paired.items():
                if self.instance.stages[forward.stage].device == device:
                    both = self.ticks.pair_steps[forward.stage, backward.stage]
                    saved = self.ticks.steps(F, forward.stage) + self.ticks.steps(BW, backward.stage) - both
                    work.append(-saved * chosen)
            self.model.add(cp_model.LinearExpr.sum(work) <= limit)

    # --- answers -------------------------------------------------------------------------------

    def orders(self, value: Callable[[cp_model.LinearExprT], int]) -> tuple[Orders, Pairs]:
        """Per device, the tasks of a solution in execution order, and its pairs."""
        pairs = frozenset(pair for pair, chosen in self.paired.items() if value(chosen))
        placed: list[list[tuple[int, int, Task]]] = [[] for _ in range(self.instance.num_devices)]
        for task, each in self.passes.items():
            if each.present is None or value(each.present):
                # Of a pair F stands first; all other tasks take a step at least and have starts of their own.
                program = placed[self.instance.stages[task.stage].device]
                program.append((value(each.start), int(task.kind is not F), task))
        return tuple(tuple(task for _, _, task in sorted(program)) for program in placed), pairs

    def _each(self) -> list[tuple[int, int]]:
        m = self.instance.num_microbatches
        return [(s, j) for s in range(self.instance.num_stages) for j in range(m)]

    def _backwards(self, s: int, j: int) -> list[Task]:
        return [task for task in (Task(B, s, j), Task(BW, s, j)) if task in self.passes]

    def _follow(self, arcs: Iterable[Arc], j: int) -> None:
        """What arcs say of one micro-batch, where both tasks are there."""
        for arc in arcs:
            if j < arc.distance:
                continue
            a, b = self.passes[Task(*arc.before, j - arc.distance)], self.passes[Task(*arc.after, j)]
            rule = self.model.add(b.start >= a.end + int(arc.lag))
            literals = [each.present for each in (a, b) if each.present is not None]
            if literals:
                rule.only_enforce_if(literals)


# --- solving -----------------------------------------------------------------------------------


def solve_extended(
    instance: Instance,
    objective: str,
    *,
    time_limit: float,
    hint: Schedule | None = None,
    lower_bound: float = 0.0,
    seed: int = 0,
    deterministic: bool = False,
    workers: int = WORKERS,
    stop_at_gap: float = 0.0,
    on_improvement: Callable[[Orders, Pairs], object] | None = None,
    stopped: Callable[[], bool] = never,
) -> FormulationResult:
    """Solve with CP-SAT; parameters as of :func:`zbsolve.formulations.cpsat.solve_cpsat`.

    ``hint`` must be in canonical order.
    """
    begun = time.monotonic()

    def answer(
        found: Schedule | None, bound: float | None, native: str, infeasible: bool, work: float | None = None
    ) -> FormulationResult:
        best = hint
        if found is not None and (best is None or found.cost(objective) < best.cost(objective)):
            best = found
        if lower_bound > 0:
            bound = max(lower_bound, bound or 0.0)
        status = Status.INFEASIBLE if infeasible else Status.UNKNOWN
        if best is not None:
            cost = best.cost(objective)
            closed = bound is not None and cost - bound <= OPTIMAL_GAP * cost
            status = Status.OPTIMAL if closed else Status.FEASIBLE
            bound = None if bound is None else min(bound, cost)
        return FormulationResult(
            status,
            None if best is None else best.orders,
            bound,
            native,
            SOLVER,
            version("ortools"),
            time.monotonic() - begun,
            NO_PAIRS if best is None else best.pairs,
            work,
        )

    try:
        deadline = math.inf if deterministic else begun + time_limit
        built = ExtendedModel(instance, objective, hint, lower_bound, deadline)
    except OutOfTimeError:
        return answer(None, None, "time limit while building the model", infeasible=False)
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.random_seed = seed
    parameters.relative_gap_limit = stop_at_gap
    if deterministic:
        parameters.num_workers = 1
        parameters.max_deterministic_time = time_limit
        parameters.max_time_in_seconds = DETERMINISTIC_WALL_FACTOR * time_limit
    else:
        parameters.num_workers = workers
        parameters.max_time_in_seconds = max(1e-3, begun + time_limit - time.monotonic())
        # The incumbent is good already when this begins: one worker on the bound, one on everything.
        parameters.subsolvers.extend(("objective_lb_search", "quick_restart"))
    callback = None if on_improvement is None else _Improvements(built, on_improvement)
    native = solve_interruptibly(solver, built.model, callback, stopped)
    name = str(solver.status_name(native))
    log.info("cpsat: %s, cost %s, bound %s ticks", name, solver.objective_value, solver.best_objective_bound)
    found = None
    if native in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        orders, pairs = built.orders(solver.value)
        try:
            timed = simulate_for(instance, orders, objective, pairs)
        except CycleError as error:
            log.warning("cpsat gave orders that cannot run: %s", error)
        else:
            found = None if check(instance, timed) else timed
    bound = None if native == cp_model.INFEASIBLE else built.ticks.to_bound(solver.best_objective_bound)
    return answer(found, bound, name, native == cp_model.INFEASIBLE, solver.deterministic_time / WORKERS)


class _Improvements(cp_model.CpSolverSolutionCallback):
    """Hands each better solution on as orders and pairs."""

    def __init__(self, built: ExtendedModel, report: Callable[[Orders, Pairs], object]) -> None:
        super().__init__()
        self._built = built
        self._report = report

    def on_solution_callback(self) -> None:
        self._report(*self._built.orders(self.value))
