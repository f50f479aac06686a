"""The exact model for CP-SAT: intervals on an integer clock.

Models every rule of a step without options: hops, one task at a time, memory with growth and
transients, zero-length tasks, fused or split backward. Times are whole clock steps
(:class:`zbsolve.formulations.ticks.Ticks`). Memory is counted in whole units, exact where the amounts are
commensurable and else rounded down: a bound stays valid, and what rounding lets through by less than a
millionth of a cap is rejected when the orders are re-checked. It models neither recomputation nor F&B pairs
nor several replicas.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from importlib.metadata import version
from typing import Any, Literal

from ortools.sat.python import cp_model

from zbsolve.bounds.arcs import Arc, Reason, pass_arcs
from zbsolve.bounds.ways import round_trip
from zbsolve.bounds.windows import windows
from zbsolve.formulations.common import FormulationResult, common_unit, conclude, never
from zbsolve.formulations.ticks import Ticks, make_ticks
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import BW, B, F, W
from zbsolve.model.schedule import Schedule
from zbsolve.model.simulator import simulate_for
from zbsolve.model.tolerances import MEMORY_RTOL, OPTIMAL_GAP, TICK_ROUNDING
from zbsolve.search.canonical import Orders, canonical

log = logging.getLogger(__name__)

SOLVER = "cpsat"

# CP-SAT refuses cumulative constraints whose sizes times demands may leave 64 bits.
ENERGY_BITS = 61
MEMORY_BITS = 30

# Searches side by side, but one in deterministic mode: its work counts as that much less time.
WORKERS = 2

# Deterministic mode must not end by the clock on the wall; this many times the limit is the emergency stop.
DETERMINISTIC_WALL_FACTOR = 20.0


# Single steps of CP-SAT's probing, linear relaxation and propagation cannot be interrupted. From so many
# tasks on they overrun limits of less than so many seconds a task; from HOPELESS_TASKS on they prove nothing.
LARGE_TASKS, LARGE_SECONDS_A_TASK = 2_000, 0.006
HOPELESS_TASKS = 4_000

# When a micro-batch's memory on a stage changes.
Moment = Literal["F", "B", "B end", "released"]
Moments = dict[tuple[Moment, int, int], int]  # by stage and micro-batch, in clock steps


class OutOfTimeError(Exception):
    """The time limit passed while the model was still being built."""


@dataclass
class _Backward:
    """Variables of the whole backward of one stage and micro-batch, split or fused.

    ``start`` and ``end`` are those of B or BW, ``released`` is when all its memory is free; ``fused``
    and its negation ``split`` choose BW (None where the stage has no t_bw).
    """

    start: cp_model.IntVar
    end: cp_model.LinearExpr
    w_start: cp_model.IntVar
    released: cp_model.LinearExpr
    split: cp_model.LiteralT | None = None
    fused: cp_model.IntVar | None = None


@dataclass
class CpSatModel:
    """One instance as a CP-SAT model, one method per constraint family.

    Parameters
    ----------
    instance, objective
        What to solve; ``objective`` is ``makespan`` or ``span``.
    incumbent : orders, optional
        Canonical orders of a valid schedule: hint and upper bound.
    lower_bound : float
        Proven bound in the time unit.
    deadline : float
        ``time.monotonic()`` at which building gives up.
    """

    instance: Instance
    objective: str
    incumbent: Orders | None = None
    lower_bound: float = 0.0
    deadline: float = math.inf
    ticks: Ticks = field(init=False)
    model: cp_model.CpModel = field(init=False, default_factory=cp_model.CpModel)
    cost: cp_model.IntVar = field(init=False)
    forward: dict[tuple[int, int], cp_model.IntVar] = field(init=False, default_factory=dict)
    backward: dict[tuple[int, int], _Backward] = field(init=False, default_factory=dict)
    intervals: dict[Task, cp_model.IntervalVar] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.ticks = make_ticks(self.instance, self.objective)
        self._sizes: list[tuple[cp_model.IntVar, Moment, Moment, int, int]] = []
        self._w_reached: dict[int, list[cp_model.IntVar]] = {}
        self._arcs = tuple(pass_arcs(self.ticks.instance))
        stages = range(self.instance.num_stages)
        self._round_trip = [int(round_trip(self.ticks.instance, s, s)) for s in stages]
        self._clock = (
            None
            if self.incumbent is None
            else simulate_for(self.ticks.instance, self.incumbent, self.objective)
        )
        self.upper = self.ticks.horizon
        if self._clock is not None:
            self.upper = min(self.upper, self.ticks.cost_of(self._clock.cost(self.objective)))
        for add in (
            self.add_cost,
            self.add_start_variables,
            self.add_one_task_per_device,
            self.add_precedences,
            self.add_microbatch_order,
            self.add_memory,
            self.add_objective,
            self.add_redundant_bounds,
            self.add_windows,
            self.add_hint,
        ):
            add()
            self._check_time()

    # --- variables -----------------------------------------------------------------------------

    def add_cost(self) -> None:
        """The cost in ticks, between the proven bound and the incumbent."""
        lower = min(self.ticks.from_bound(self.lower_bound), self.upper)
        self.cost = self.model.new_int_var(lower, self.upper, "cost")

    def add_start_variables(self) -> None:
        """Starts on the clock, an interval a task, and which backwards are fused.

        The first F of stage 0 starts at 0: everything else waits for it. In the span every device's window
        meets device 0's (it holds what lies between an F and its B upstream), so twice the span holds all.
        """
        end = self._latest
        new = self.model.new_int_var
        for s, stage in enumerate(self.instance.stages):
            self._check_time()
            f, b, w = (self.ticks.steps(kind, s) for kind in (F, B, W))
            for j in range(self.instance.num_microbatches):
                start = new(*self._forward_domain(s, j), f"F{s}.{j}")
                self.forward[s, j] = start
                self.intervals[Task(F, s, j)] = self.model.new_fixed_size_interval_var(start, f, f"F{s}.{j}")
                b_start, w_start = new(0, end, f"B{s}.{j}"), new(0, end, f"W{s}.{j}")
                if stage.t_bw is None:
                    self.intervals[Task(B, s, j)] = self.model.new_fixed_size_interval_var(
                        b_start, b, f"B{s}.{j}"
                    )
                    self.intervals[Task(W, s, j)] = self.model.new_fixed_size_interval_var(
                        w_start, w, f"W{s}.{j}"
                    )
                    self.backward[s, j] = _Backward(b_start, b_start + b, w_start, w_start + w)
                else:
                    self._add_alternative(s, j, b_start, w_start, end)

    def _add_alternative(
        self, s: int, j: int, start: cp_model.IntVar, w_start: cp_model.IntVar, horizon: int
    ) -> None:
        """Either B and W, or BW. A void W ends with BW, so that "released" means the same for both."""
        b, w, bw = (self.ticks.steps(kind, s) for kind in (B, W, BW))
        model = self.model
        fused = model.new_bool_var(f"fused{s}.{j}")
        split = fused.negated()
        end = model.new_int_var(0, horizon, f"backward_end{s}.{j}")  # cumulatives want a variable
        model.add(end == start + b + (bw - b) * fused)
        released = model.new_int_var(0, horizon, f"released{s}.{j}")
        model.add(released == w_start + w).only_enforce_if(split)
        model.add(w_start == end).only_enforce_if(fused)
        model.add(released == end).only_enforce_if(fused)
        optional = model.new_optional_fixed_size_interval_var
        self.intervals[Task(B, s, j)] = optional(start, b, split, f"B{s}.{j}")
        self.intervals[Task(W, s, j)] = optional(w_start, w, split, f"W{s}.{j}")
        self.intervals[Task(BW, s, j)] = optional(start, bw, fused, f"BW{s}.{j}")
        self.backward[s, j] = _Backward(start, end, w_start, released, split, fused)

    # --- rules ---------------------------------------------------------------------------------

    def add_one_task_per_device(self) -> None:
        """No two tasks of a device at the same time."""
        for device in range(self.instance.num_devices):
            stages = self.instance.stages_on(device)
            self.model.add_no_overlap(v for task, v in self.intervals.items() if task.stage in stages)

    def add_precedences(self) -> None:
        """Dependencies with hops; a micro-batch's backward on a stage a round trip after its own F there."""
        for s in range(self.instance.num_stages):
            arcs = [arc for arc in self._arcs_into(s, Reason.DEPENDENCY) if arc.before != (F, s)]
            for j in range(self._m):
                end = self.forward[s, j] + self.ticks.steps(F, s)
                self.model.add(self.backward[s, j].start >= end + self._round_trip[s])
                self._follow(arcs, j)

    def add_microbatch_order(self) -> None:
        """Identical micro-batches come in order in each stage's F's, backwards, and W's."""
        for s, stage in enumerate(self.instance.stages):
            ordered = self._arcs_into(s, Reason.ORDER)
            for j in range(self._m):
                self._follow((arc for arc in ordered if arc.after.kind is not W), j)
            if stage.t_bw is None:
                for j in range(self._m):
                    self._follow((arc for arc in ordered if arc.after.kind is W), j)
            else:
                self._order_existing_weights(s)

    def _arcs_into(self, s: int, reason: Reason) -> list[Arc]:
        return [arc for arc in self._arcs if arc.after.stage == s and arc.reason is reason]

    def _follow(self, arcs: Iterable[Arc], j: int) -> None:
        """What arcs say of one micro-batch; of a backward without a W of its own, W ends with it."""
        for (kind, s), (waiting, q), distance, lag, _ in arcs:
            if j < distance:
                continue
            i = j - distance
            back, after = self.backward[s, i], self.backward[q, j]
            ends = {B: back.end, W: back.released}
            end = self.forward[s, i] + self.ticks.steps(F, s) if kind is F else ends[kind]
            starts = {F: self.forward[q, j], B: after.start, W: after.w_start}
            self.model.add(starts[waiting] >= end + int(lag))

    def _order_existing_weights(self, s: int) -> None:
        """Void W's take no part: a running maximum over the W's that exist orders them."""
        reached = self.model.new_constant(0)
        for j in range(self._m):
            back = self.backward[s, j]
            following = self.model.new_int_var(0, self._latest, f"w_reached{s}.{j}")
            self._w_reached.setdefault(s, []).append(following)
            self.model.add(following >= reached)
            if back.split is not None:
                self.model.add(back.w_start >= reached).only_enforce_if(back.split)
                self.model.add(following >= back.released).only_enforce_if(back.split)
            reached = following

    def add_memory(self) -> None:
        """Held memory and transients within each finite cap: one cumulative a device.

        Nested holdings instead of consecutive ones: with mem_w <= mem_b, mem_w is held from F to the release
        and the rest from F to B's end; with mem_w > mem_b, mem_b from F to the release and the growth from
        B's start to the release (split only).
        """
        for device in range(self.instance.num_devices):
            stages = self.instance.stages_on(device)
            if self.instance.cap(device) == math.inf or self._precedences_suffice(stages):
                continue
            self._check_time()
            units = memory_units(self.instance, device, self._demand_bits(len(stages)))
            intervals: list[cp_model.IntervalVar] = []
            demands: list[int] = []

            def hold(interval: cp_model.IntervalVar, amount: int, into: Any = (intervals, demands)) -> None:
                if amount > 0:
                    into[0].append(interval)
                    into[1].append(amount)

            for s in stages:
                mem_b, mem_w, *peaks = units.stages[s][:6]
                for j in range(self.instance.num_microbatches):
                    shortest = self.ticks.steps(F, s) + self._round_trip[s]
                    both, rest = min(mem_b, mem_w), abs(mem_b - mem_w)
                    if both:
                        hold(self._holding("F", "released", s, j, shortest), both)
                    if mem_b > mem_w:
                        hold(self._holding("F", "B end", s, j, shortest), rest)
                    elif mem_w > mem_b:
                        hold(self._holding("B", "released", s, j, 0, self.backward[s, j].split), rest)
                    for kind, peak in zip((F, B, W, BW), peaks, strict=True):
                        interval = self.intervals.get(Task(kind, s, j))
                        if interval is not None:
                            hold(interval, peak)
            self.model.add_cumulative(intervals, demands, units.capacity)
        self._add_memory_precedences()

    def _precedences_suffice(self, stages: tuple[int, ...]) -> bool:
        """Whether :func:`zbsolve.bounds.waits.memory_waits` already says all that the cap demands.

        It does for a single stage with one M from F to W: F j then waits for W j - k, so at most k are held.
        """
        stage = self.instance.stages[stages[0]]
        plain = stage.mem_w == stage.mem_b and stage.t_bw is None and stage.peak_b == stage.peak_w == 0
        newest = self.instance.static(stage.device) + stage.mem_b + stage.peak_f
        return len(stages) == 1 and plain and self.instance.fits(stage.device, newest)

    def _holding(
        self,
        begin: Moment,
        end: Moment,
        s: int,
        j: int,
        shortest: int,
        present: cp_model.LiteralT | None = None,
    ) -> cp_model.IntervalVar:
        """From one moment of a micro-batch on a stage to another."""
        name = f"{begin}-{end}{s}.{j}"
        size = self.model.new_int_var(shortest, self._latest, name)
        self._sizes.append((size, begin, end, s, j))
        back = self.backward[s, j]
        moments: dict[Moment, cp_model.LinearExpr] = {
            "F": self.forward[s, j],
            "B": back.start,
            "B end": back.end,
            "released": back.released,
        }
        if present is None:
            return self.model.new_interval_var(moments[begin], size, moments[end], name)
        return self.model.new_optional_interval_var(moments[begin], size, moments[end], present, name)

    def _add_memory_precedences(self) -> None:
        """What the caps imply for the order: part of the cumulatives, but as precedences on every path."""
        for arc in self._arcs:
            if arc.reason is Reason.MEMORY:
                for j in range(self._m):
                    self._follow((arc,), j)

    # --- objective and what helps to prove it --------------------------------------------------

    def add_objective(self) -> None:
        """Cost bounds every end (makespan) or every device's window (span)."""
        for device in range(self.instance.num_devices):
            stages = self.instance.stages_on(device)
            limit = self.cost * self.ticks.fine + self.ticks.zeros
            if self.objective == "span":
                # The first task is an F of micro-batch 0 of the first stage: all others there wait for it.
                limit = limit + self.forward[stages[0], 0]
            for s in stages:
                # Fused backwards are not released in order, so each one counts.
                fusible = self.instance.stages[s].t_bw is not None
                for j in range(0 if fusible else self._m - 1, self._m):
                    self.model.add(self.backward[s, j].released <= limit)
        self.model.minimize(self.cost)

    def add_redundant_bounds(self) -> None:
        """A device's work fits into the cost, for the makespan after the device's earliest start."""
        limit = self.cost * self.ticks.fine + self.ticks.zeros
        heads = [0]
        for s in range(self.instance.num_stages - 1):
            heads.append(heads[-1] + self.ticks.steps(F, s) + self.ticks.hop_steps(s))
        for device in range(self.instance.num_devices):
            stages = self.instance.stages_on(device)
            work = heads[stages[0]] if self.objective == "makespan" else 0
            saved = []
            for s in stages:
                f, b, w = (self.ticks.steps(kind, s) for kind in (F, B, W))
                work += self._m * (f + b + w)
                for j in range(self._m):
                    fused = self.backward[s, j].fused
                    if fused is not None:
                        saved.append((b + w - self.ticks.steps(BW, s)) * fused)
            self.model.add(cp_model.LinearExpr.sum(saved) >= work - limit)

    def add_windows(self) -> None:
        """Heads and tails of F's and backwards, which count what the propagation of single rules misses.

        They hold in every valid schedule that is timed on the clock. For the span they are those in the
        window of stage 0's device, which opens at 0.
        """
        found = windows(self.ticks.instance)
        whole = self.instance.num_devices if self.objective == "makespan" else self.instance.stages[0].device
        limit = self.cost * self.ticks.fine + self.ticks.zeros

        def steps(least: float) -> int:
            return max(0, math.floor(least + TICK_ROUNDING))

        for (s, j), back in self.backward.items():
            self.model.add(self.forward[s, j] >= steps(found.heads[0, s, j, whole]))
            end = self.forward[s, j] + self.ticks.steps(F, s)
            self.model.add(end + steps(found.tails[0, s, j, whole]) <= limit)
            self.model.add(back.start >= steps(found.heads[1, s, j, whole]))
            kinds = (B,) if back.fused is None else (B, BW)
            gradient = back.start + min(self.ticks.steps(kind, s) for kind in kinds)
            self.model.add(gradient + steps(found.tails[1, s, j, whole]) <= limit)

    def add_hint(self) -> None:
        """Start from the incumbent's clock times: a value for every variable, hence a solution at once."""
        if self._clock is None:
            return
        starts = {timed.task: round(timed.start) for timed in self._clock}
        origin = self._origin(starts)
        hint = self.model.add_hint
        moment: Moments = {}
        for (s, j), back in self.backward.items():
            fused = Task(BW, s, j) in starts
            forward = starts[Task(F, s, j)] - origin
            begin = starts[Task(BW if fused else B, s, j)] - origin
            end = begin + self.ticks.steps(BW if fused else B, s)
            w_start = end if fused else starts[Task(W, s, j)] - origin
            released = end if fused else w_start + self.ticks.steps(W, s)
            moment["F", s, j], moment["B", s, j] = forward, begin
            moment["B end", s, j], moment["released", s, j] = end, released
            hint(self.forward[s, j], forward)
            hint(back.start, begin)
            hint(back.w_start, w_start)
            if back.fused is not None:
                hint(back.fused, int(fused))
                for derived, value in ((back.end, end), (back.released, released)):
                    if isinstance(derived, cp_model.IntVar):
                        hint(derived, value)
        for size, begin_name, end_name, s, j in self._sizes:
            hint(size, moment[end_name, s, j] - moment[begin_name, s, j])
        for s, chain in self._w_reached.items():
            reached = 0
            for j, variable in enumerate(chain):
                if Task(W, s, j) in starts:
                    reached = moment["released", s, j]
                hint(variable, reached)
        self._hint_cost(moment)

    # --- answers -------------------------------------------------------------------------------

    def orders(self, value: Callable[[cp_model.LinearExprT], int]) -> Orders:
        """Per device, the tasks of a solution in execution order."""
        placed: list[list[tuple[int, Task]]] = [[] for _ in range(self.instance.num_devices)]
        for (s, j), back in self.backward.items():
            program = placed[self.instance.stages[s].device]
            program.append((value(self.forward[s, j]), Task(F, s, j)))
            if back.fused is not None and value(back.fused):
                program.append((value(back.start), Task(BW, s, j)))
            else:
                program.append((value(back.start), Task(B, s, j)))
                program.append((value(back.w_start), Task(W, s, j)))
        # Every task takes at least one step, so starts alone settle the order.
        return tuple(tuple(task for _, task in sorted(program)) for program in placed)

    def _forward_domain(self, s: int, j: int) -> tuple[int, int]:
        """Range of an F's start: everything waits for the first F of stage 0, which starts at 0."""
        return 0, 0 if s == j == 0 else self._latest

    def _origin(self, starts: dict[Task, int]) -> int:
        """The moment of the hint's schedule that is 0 on the model's clock."""
        return starts[Task(F, 0, 0)]

    def _hint_cost(self, moment: Moments) -> None:
        self.model.add_hint(self.cost, self.upper)

    @property
    def _m(self) -> int:
        return self.instance.num_microbatches

    @property
    def _latest(self) -> int:
        window = self.upper * self.ticks.fine + self.ticks.zeros
        return window if self.objective == "makespan" else 2 * window

    def _demand_bits(self, stages: int) -> int:
        """Bits left for one demand when all sizes times demands of a device are summed."""
        holdings = 6 * stages * self._m
        return min(MEMORY_BITS, ENERGY_BITS - self._latest.bit_length() - holdings.bit_length())

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTimeError


@dataclass(frozen=True)
class _MemoryUnits:
    """Memory of a device in whole units; per stage mem_b, mem_w, peak_f, peak_b, peak_w, peak_bw, mem_r."""

    capacity: int
    stages: dict[int, tuple[int, ...]]


def memory_units(instance: Instance, device: int, bits: int) -> _MemoryUnits:
    """Whole units: exact where some unit measures all amounts, else all rounded down (a relaxation)."""
    # As zbsolve.model.tolerances.proof_room, exactly.
    room = Fraction(instance.cap(device)) * (1 + 2 * Fraction(MEMORY_RTOL)) - Fraction(
        instance.static(device)
    )
    amounts = {
        s: (data.mem_b, data.mem_w, data.peak_f, data.peak_b, data.peak_w, data.peak_fused, data.mem_r)
        for s in instance.stages_on(device)
        for data in (instance.stages[s],)
    }
    positive = [value for row in amounts.values() for value in row if value > 0]
    unit = max(room, Fraction(max(positive, default=0.0))) / 2**bits or Fraction(1)
    common = common_unit(positive)
    if common is not None and common[0] >= unit:
        unit, counts = common
    else:
        counts = {value: math.floor(Fraction(value) / unit) for value in positive}
    return _MemoryUnits(
        math.floor(room / unit),
        {s: tuple(counts.get(value, 0) for value in row) for s, row in amounts.items()},
    )


# --- solving -----------------------------------------------------------------------------------


def solve_cpsat(
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
    on_improvement: Callable[[Orders, float], None] | None = None,
    stopped: Callable[[], bool] = never,
) -> FormulationResult:
    """Solve with CP-SAT.

    Parameters
    ----------
    objective : str
        ``makespan`` or ``span``.
    time_limit : float
        Seconds, model building included. In deterministic mode: CP-SAT's deterministic seconds.
    hint : Schedule, optional
        A valid schedule; the answer is never worse.
    lower_bound : float
        A proven lower bound in the time unit.
    deterministic : bool
        One worker and a deterministic limit: the same answer on every run.
    stop_at_gap : float
        Stop once (cost - bound) / cost is within this.
    on_improvement : callable, optional
        Called from the solver's thread with each better solution's orders and the bound so far.
    stopped : callable
        Asked ten times a second: whether to end early.

    Returns
    -------
    FormulationResult
        ``INFEASIBLE`` only when CP-SAT finished and proved it.
    """
    begun = time.monotonic()
    warm = None if hint is None else canonical(instance, hint.orders)
    candidates: list[Orders] = [] if warm is None else [warm]

    def answer(
        bound: float | None, infeasible: bool, native: str, work: float | None = None
    ) -> FormulationResult:
        if lower_bound > 0:
            bound = max(lower_bound, bound or 0.0)
        return conclude(
            instance,
            objective,
            found=candidates,
            bound=bound,
            infeasible=infeasible,
            native_status=native,
            solver=SOLVER,
            version=version("ortools"),
            seconds=time.monotonic() - begun,
            work=work,
        )

    if hint is not None and hint.cost(objective) <= lower_bound * (1 + OPTIMAL_GAP / 2):
        return answer(lower_bound, False, "the warm start meets the bound")
    try:
        built = CpSatModel(
            instance, objective, warm, lower_bound, math.inf if deterministic else begun + time_limit
        )
    except OutOfTimeError:
        return answer(None, False, "time limit while building the model")

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

    tasks = instance.num_tasks
    short = deterministic or time_limit < tasks * LARGE_SECONDS_A_TASK
    if tasks >= HOPELESS_TASKS or (tasks >= LARGE_TASKS and short):
        parameters.cp_model_probing_level = 0
        parameters.linearization_level = 0
        parameters.symmetry_level = 0
        parameters.use_lns_only = hint is not None
    elif not deterministic:
        # The incumbent is good already when this begins: one worker on the bound, one on everything.
        parameters.subsolvers.extend(("objective_lb_search", "quick_restart"))

    callback = _Improvements(built, on_improvement) if on_improvement is not None else None
    native = solve_interruptibly(solver, built.model, callback, stopped)
    name = str(solver.status_name(native))
    log.info("cpsat: %s, cost %s, bound %s ticks", name, solver.objective_value, solver.best_objective_bound)
    if native in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        candidates.append(built.orders(solver.value))
    bound = None if native == cp_model.INFEASIBLE else built.ticks.to_bound(solver.best_objective_bound)
    return answer(bound, native == cp_model.INFEASIBLE, name, solver.deterministic_time / WORKERS)


def solve_interruptibly(
    solver: cp_model.CpSolver,
    model: cp_model.CpModel,
    callback: cp_model.CpSolverSolutionCallback | None = None,
    stopped: Callable[[], bool] = never,
) -> cp_model.CpSolverStatus:
    """``solver.solve``, but ``stopped`` ends it, and Ctrl-C does at once and is a ``KeyboardInterrupt`` here.

    CP-SAT's own handler would end this one search and hide the interrupt from whoever called it. A model that
    CP-SAT rejects is an ``AssertionError``: a fault of ours.
    """
    solver.parameters.catch_sigint_signal = False
    outcome: list[cp_model.CpSolverStatus | BaseException] = []
    over = threading.Event()  # not the thread's own state: a join that is interrupted takes it for ended

    def run() -> None:
        try:
            outcome.append(solver.solve(model, callback))
        except BaseException as error:  # noqa: BLE001  handed to the caller's thread
            outcome.append(error)
        over.set()

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
        while not over.wait(0.1):  # with a time limit: only then do signals get through
            if stopped():
                solver.stop_search()  # lost when the search has not begun yet: asked again
    except KeyboardInterrupt:
        while thread.ident is not None and not over.wait(0.1):
            solver.stop_search()  # lost when the search has not begun yet: asked again
        raise
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    if outcome[0] == cp_model.MODEL_INVALID:
        raise AssertionError(f"CP-SAT rejects the model: {model.validate()}")
    return outcome[0]


class _Improvements(cp_model.CpSolverSolutionCallback):
    """Hands each better solution on as orders, with the bound in the time unit."""

    def __init__(self, built: CpSatModel, report: Callable[[Orders, float], None]) -> None:
        super().__init__()
        self._built = built
        self._report = report

    def on_solution_callback(self) -> None:
        bound = self._built.ticks.to_bound(self.best_objective_bound)
        self._report(self._built.orders(self.value), max(bound, self._built.lower_bound))
