"""The same exact model as a mixed integer linear program, written with PuLP, solved by HiGHS or CBC.

A binary variable per pair of tasks of a device says which comes first, except where precedences, the order of
identical micro-batches or a memory cap settle it. The device's memory at each task is a sum over those
variables, so it needs no times. Times are real numbers. A fused backward is a backward of another
length whose W is void: of no length and no memory. It does not model F&B pairs.

What a solver says is mapped by explicit tables: a limit never becomes "optimal" or "infeasible".

The only module that imports pulp (and highspy, which PuLP drives).
"""

from __future__ import annotations

import logging
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple

import highspy
import pulp
from pulp.apis.core import PulpSolverError

from zbsolve.bounds.arcs import pass_arcs
from zbsolve.bounds.waits import room
from zbsolve.errors import EnvironmentFailedError
from zbsolve.formulations.common import FormulationResult, conclude, never, serial_length
from zbsolve.formulations.ticks import make_ticks
from zbsolve.model.graph import Task, TaskGraph, duration
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import BW, B, F, W
from zbsolve.model.memory import effect
from zbsolve.model.schedule import Schedule
from zbsolve.model.simulator import simulate_for, topological_order
from zbsolve.model.tolerances import DUAL_BOUND_RTOL, ROW_FEASIBILITY, TIME_RTOL, UPPER_SLACK
from zbsolve.search.canonical import Orders, canonical

log = logging.getLogger(__name__)

Backend = Literal["highs", "cbc"]

# The horizon in model units: the absolute tolerances of solvers, 1e-7, are then 1e-9 of the cost.
HORIZON_UNITS = 100.0
# A limit is kept by the solvers themselves; CBC is killed when it is this much over (seconds, share).
GRACE_SECONDS, GRACE_SHARE = 1.0, 0.1

# Native status -> has the solver finished with an optimum or with a proof that there is none?
HIGHS_OPTIMAL = frozenset({highspy.HighsModelStatus.kOptimal})
# The cost is bounded from below, so "unbounded or infeasible" is infeasible.
HIGHS_INFEASIBLE = frozenset(
    {highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible}
)
CBC_OPTIMAL = frozenset({"Optimal solution found"})
# A model without binaries has no "Result" line; presolve may also end it before one is written.
CBC_EARLY_INFEASIBLE = (
    r"^(Problem is infeasible|Primal infeasible|Presolve determined .* infeasible"
    r"|Pre-processing says infeasible)"
)
# The log rounds "Lower bound" to three decimals (model units).
CBC_LOG_PRECISION = 1e-3
CBC_INFEASIBLE = frozenset({"Problem proven infeasible", "Linear relaxation infeasible"})


class _OutOfTimeError(Exception):
    """The time limit passed while the model was still being built."""


class _Native(NamedTuple):
    """What a backend left: its word, what it proved (bounds in model units), whether it has values."""

    word: str
    infeasible: bool
    bound: float | None
    has_values: bool
    version: str


@dataclass
class MilpModel:
    """One instance as a PuLP model, one method per constraint family.

    Parameters
    ----------
    instance, objective
        What to solve; ``objective`` is ``makespan`` or ``span``.
    incumbent : orders, optional
        Canonical orders of a valid schedule: warm start and upper bound.
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
    problem: pulp.LpProblem = field(init=False)
    unit: float = field(init=False)
    binaries: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.problem = pulp.LpProblem("zbsolve", pulp.LpMinimize)
        self._m = self.instance.num_microbatches
        self._warm = (
            None if self.incumbent is None else simulate_for(self.instance, self.incumbent, self.objective)
        )
        upper = serial_length(self.instance) if self._warm is None else self._warm.cost(self.objective)
        self.unit = upper / HORIZON_UNITS or 1.0
        # All windows meet device 0's, so in the span twice the cost holds every task (F of (0, 0) at 0).
        self._latest = (HORIZON_UNITS if self.objective == "makespan" else 2 * HORIZON_UNITS) * (
            1 + UPPER_SLACK
        )
        # A backward is one task, named B, that may be of BW's length.
        self.tasks = [t for t in TaskGraph(self.instance).tasks if t.kind is not BW]
        for build in (
            self.add_start_variables,
            self.add_fixed_orders,
            self.add_pair_orders,
            self.add_precedences,
            self.order_zero_length_tasks,
            self.add_memory,
            self.add_objective,
            self.add_warm_start,
        ):
            build()
            self._check_time()

    # --- variables -----------------------------------------------------------------------------

    def add_start_variables(self) -> None:
        """A start per task, and per stage with t_bw whether a micro-batch's backward is fused."""
        self.start = {t: pulp.LpVariable(f"S_{_name(t)}", 0, self._latest) for t in self.tasks}
        self.start[Task(F, 0, 0)].upBound = 0
        self.fused = {
            (s, j): pulp.LpVariable(f"X_{s}_{j}", cat=pulp.LpBinary)
            for s, stage in enumerate(self.instance.stages)
            if stage.t_bw is not None
            for j in range(self._m)
        }
        self.binaries += len(self.fused)

    def length(self, task: Task) -> Any:
        """Duration in model units: a number, or an expression where the backward may be fused."""
        own = duration(self.instance, task.kind, task.stage) / self.unit
        fused = self.fused.get((task.stage, task.microbatch))
        if task.kind is F or fused is None:
            return own
        other = duration(self.instance, BW, task.stage) / self.unit if task.kind is B else 0.0
        return own + (other - own) * fused

    def _extreme(self, task: Task, choose: Callable[..., float]) -> float:
        """Shortest (min) or longest (max) duration in model units."""
        kind, s, _ = task
        lengths = [duration(self.instance, kind, s)]
        if kind is not F and self.instance.stages[s].t_bw is not None:
            lengths.append(duration(self.instance, BW, s) if kind is B else 0.0)
        return choose(lengths) / self.unit

    # --- orders --------------------------------------------------------------------------------

    def add_fixed_orders(self) -> None:
        """Collect what always comes before what, close it, and find each task's earliest start.

        Direct orders: :func:`zbsolve.bounds.arcs.pass_arcs`. A void W stands anywhere behind its backward,
        so it keeps the micro-batches' order too.
        """
        lags: dict[Task, dict[Task, float]] = {t: {} for t in self.tasks}
        for arc in pass_arcs(self.instance):
            for before, after in arc.tasks(self._m):
                lags[before][after] = arc.lag / self.unit
        self._direct = [(a, b, lag) for a, row in lags.items() for b, lag in row.items()]

        missing = dict.fromkeys(self.tasks, 0)
        for _, after, _ in self._direct:
            missing[after] += 1
        ready = [t for t in self.tasks if not missing[t]]
        sequence: list[Task] = []
        self._earliest = dict.fromkeys(self.tasks, 0.0)
        for task in ready:  # grows while it is walked
            sequence.append(task)
            end = self._earliest[task] + self._extreme(task, min)
            for after, lag in lags[task].items():
                self._earliest[after] = max(self._earliest[after], end + lag)
                missing[after] -= 1
                if not missing[after]:
                    ready.append(after)
        assert len(sequence) == len(self.tasks)  # every order here holds in some serial schedule
        number = {task: i for i, task in enumerate(sequence)}
        later = [0] * len(sequence)  # bit sets of all that comes behind
        for task in reversed(sequence):
            for after in lags[task]:
                later[number[task]] |= later[number[after]] | 1 << number[after]
        self._number, self._later = number, later

    def _always(self, a: Task, b: Task) -> bool:
        return bool(self._later[self._number[a]] >> self._number[b] & 1)

    def add_pair_orders(self) -> None:
        """One task at a time: a binary for every pair of a device whose order is open."""
        self.first: dict[tuple[Task, Task], pulp.LpVariable] = {}
        on_device: list[list[Task]] = [[] for _ in range(self.instance.num_devices)]
        for task in self.tasks:
            on_device[self.instance.stages[task.stage].device].append(task)
        for tasks in on_device:
            self._check_time()
            for a, b in combinations(tasks, 2):
                if self._always(a, b) or self._always(b, a):
                    continue
                y = pulp.LpVariable(f"Y_{_name(a)}_{_name(b)}", cat=pulp.LpBinary)
                self.first[a, b] = y
                self._separate(a, b, 1 - y)
                self._separate(b, a, y)
        self.binaries += len(self.first)
        self.on_device = on_device

    def _separate(self, a: Task, b: Task, void: Any) -> None:
        """``a`` ends before ``b`` starts, unless ``void`` is 1."""
        big = self._latest + self._extreme(a, max) - self._earliest[b]
        self.problem += self.start[b] >= self.start[a] + self.length(a) - big * void

    def before(self, a: Task, b: Task) -> Any:
        """1 where ``a`` comes before ``b`` on their device, else 0: a number or an expression."""
        if (a, b) in self.first:
            return self.first[a, b]
        if (b, a) in self.first:
            return 1 - self.first[b, a]
        return 1.0 if self._always(a, b) else 0.0

    def add_precedences(self) -> None:
        """Dependencies with hops, and consecutive tasks whose order is fixed on one device."""
        for a, b, lag in self._direct:
            self.problem += self.start[b] >= self.start[a] + self.length(a) + lag
        for task, earliest in self._earliest.items():
            if task != Task(F, 0, 0):
                self.start[task].lowBound = earliest * (1 - TIME_RTOL)  # sums of floats in another order

    def order_zero_length_tasks(self) -> None:
        """Ranks for tasks that may have no length: times alone do not keep those from a circle.

        Any circle of "before" has length 0 and so consists of such tasks; each needs a rank above the
        one that it follows.
        """
        short = [t for t in self.tasks if self._extreme(t, min) == 0]
        self.rank = {t: pulp.LpVariable(f"Q_{_name(t)}", 0, len(self.tasks)) for t in short}
        for a, b, _ in self._direct:
            if a in self.rank and b in self.rank:
                self.problem += self.rank[b] >= self.rank[a] + 1
        big = len(self.tasks) + 1
        for (a, b), y in self.first.items():
            if a in self.rank and b in self.rank:
                self.problem += self.rank[b] >= self.rank[a] + 1 - big * (1 - y)
                self.problem += self.rank[a] >= self.rank[b] + 1 - big * y

    # --- memory --------------------------------------------------------------------------------

    def add_memory(self) -> None:
        """While a task runs: static memory, what earlier tasks left and its own rise are within the cap."""
        self.freed: dict[tuple[int, int, Task], pulp.LpVariable] = {}
        for device, tasks in enumerate(self.on_device):
            cap = self.instance.cap(device)
            if cap == math.inf:
                continue
            scale = max(cap, *(max(s.mem_b, s.mem_w) for s in self.instance.stages)) or 1.0
            free = room(self.instance, device) / scale
            for task in tasks:
                self._check_time()
                rise = self._rise(task)
                if rise is None:
                    continue
                left = [
                    self._left(s, j, task) for s in self.instance.stages_on(device) for j in range(self._m)
                ]
                level = (pulp.lpSum(left) + rise) * (1 / scale)
                if level.items():
                    self.problem += level <= free
                elif level.constant > free:
                    self._refuse()

    def _rise(self, task: Task) -> Any:
        """How far memory rises while a task runs; None where it never does."""
        stage = self.instance.stages[task.stage]
        own = effect(stage, task.kind).while_running
        fused = self.fused.get((task.stage, task.microbatch))
        if task.kind is F or fused is None:
            return own if own > 0 else None
        other = effect(stage, BW).while_running if task.kind is B else 0.0
        return own + (other - own) * fused if max(own, other) > 0 else None

    def _left(self, s: int, j: int, task: Task) -> Any:
        """Memory that one micro-batch of a stage holds when ``task`` starts."""
        stage = self.instance.stages[s]
        f, b, w = (self.before(Task(kind, s, j), task) for kind in (F, B, W))
        change = stage.mem_w - stage.mem_b
        fused = self.fused.get((s, j))
        if fused is None or stage.mem_w == 0:
            return stage.mem_b * f + change * b - stage.mem_w * w
        # mem_w is gone behind W, or behind the backward where that is fused: freed <= that condition.
        freed = pulp.LpVariable(f"R_{s}_{j}_{_name(task)}", 0, 1)
        self.freed[s, j, task] = freed
        self.problem += freed <= b
        self.problem += freed <= w + fused
        return stage.mem_b * f + change * b - stage.mem_w * freed

    def _refuse(self) -> None:
        """A rule that no order can keep: make the model infeasible."""
        self.problem += self.start[Task(F, 0, 0)] >= 1

    # --- objective -----------------------------------------------------------------------------

    def add_objective(self) -> None:
        """Cost bounds every end (makespan) or every device's window (span), and each device's work."""
        lower = min(self.lower_bound / self.unit, HORIZON_UNITS) * (1 - TIME_RTOL)
        self.cost = pulp.LpVariable("cost", lower, HORIZON_UNITS * (1 + UPPER_SLACK))
        self.problem.setObjective(1 * self.cost)
        for device, tasks in enumerate(self.on_device):
            # The device's first task is an F of micro-batch 0 of its first stage: all others wait for it.
            first = Task(F, self.instance.stages_on(device)[0], 0)
            head = self._earliest[first] if self.objective == "makespan" else 0.0
            origin = self.start[first] if self.objective == "span" else 0.0
            self.problem += self.cost >= pulp.lpSum(self.length(t) for t in tasks) + head
            for task in tasks:
                if not any(self._always(task, other) for other in tasks):
                    self.problem += self.cost >= self.start[task] + self.length(task) - origin

    # --- warm start and answer -----------------------------------------------------------------

    def add_warm_start(self) -> None:
        """Values of every variable from the incumbent."""
        if self._warm is None:
            return
        times = {timed.task: timed for timed in self._warm}
        origin = times[Task(F, 0, 0)].start
        sequence = [task for _, task in topological_order(self.instance, self._warm.orders)]
        start: dict[Task, float] = {}
        end: dict[Task, float] = {}
        for task, begin, finish in self._warm:
            own = task._replace(kind=B) if task.kind is BW else task
            start[own], end[own] = (begin - origin) / self.unit, (finish - origin) / self.unit
        sequence = [task._replace(kind=B) if task.kind is BW else task for task in sequence]
        for (s, j), variable in self.fused.items():
            fused = Task(BW, s, j) in times
            _preset(variable, int(fused))
            if fused:  # a void W stands right behind its backward and the W before it
                void, after = Task(W, s, j), [Task(B, s, j)]
                if j > 0:
                    after.append(Task(W, s, j - 1))
                position = max(sequence.index(task) for task in after)
                sequence.insert(position + 1, void)
                start[void] = end[void] = end[sequence[position]]
        place = {task: i for i, task in enumerate(sequence)}
        for task, variable in self.start.items():
            _preset(variable, start[task])
        for (a, b), variable in self.first.items():
            _preset(variable, int(place[a] < place[b]))
        for task, variable in self.rank.items():
            _preset(variable, place[task])
        for (s, j, task), variable in self.freed.items():
            released = Task(B if Task(BW, s, j) in times else W, s, j)
            _preset(variable, int(place[released] < place[task]))
        _preset(self.cost, HORIZON_UNITS)

    def orders(self) -> Orders:
        """Per device, the tasks in the order that the values of the pair variables state."""

        def holds(a: Task, b: Task) -> bool:
            value = self.before(a, b)
            return bool((value if isinstance(value, float) else value.value()) > 0.5)

        chosen = {key: (v.value() or 0.0) > 0.5 for key, v in self.fused.items()}  # None: in no constraint
        programs = []
        for tasks in self.on_device:
            ahead = {t: sum(holds(other, t) for other in tasks if other != t) for t in tasks}
            program = []
            for task in sorted(tasks, key=lambda t: ahead[t]):
                fused = chosen.get((task.stage, task.microbatch), False)
                if task.kind is F or not fused:
                    program.append(task)
                elif task.kind is B:
                    program.append(task._replace(kind=BW))
            programs.append(tuple(program))
        return tuple(programs)

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise _OutOfTimeError


def _preset(variable: pulp.LpVariable, value: float) -> None:
    """Initial value, within the bounds (which sums of floats may miss by their last digit)."""
    variable.setInitialValue(min(max(value, variable.lowBound), variable.upBound))


def _name(task: Task) -> str:
    return f"{task.kind}_{task.stage}_{task.microbatch}"


# --- solving -----------------------------------------------------------------------------------


def solve_milp(
    instance: Instance,
    objective: str,
    *,
    backend: Backend,
    time_limit: float,
    hint: Schedule | None = None,
    lower_bound: float = 0.0,
    seed: int = 0,
    stopped: Callable[[], bool] = never,
) -> FormulationResult:
    """Solve with PuLP.

    Parameters
    ----------
    objective : str
        ``makespan`` or ``span``.
    backend : str
        ``highs`` or ``cbc``.
    time_limit : float
        Seconds, model building included.
    hint : Schedule, optional
        A valid schedule; the answer is never worse.
    lower_bound : float
        A proven lower bound in the time unit.
    stopped : callable
        Asked again and again: whether to end early.

    Returns
    -------
    FormulationResult
        ``INFEASIBLE`` only when the backend finished within its limit and proved it.

    Raises
    ------
    EnvironmentFailedError
        The backend is missing or cannot be executed.
    """
    begun = time.monotonic()
    warm = None if hint is None else canonical(instance, hint.orders)
    candidates: list[Orders] = [] if warm is None else [warm]
    solve = {"highs": _solve_highs, "cbc": _solve_cbc}[backend]
    deadline = begun + time_limit

    def answer(bound: float | None, native: _Native) -> FormulationResult:
        if lower_bound > 0:
            bound = max(lower_bound, bound or 0.0)
        return conclude(
            instance,
            objective,
            found=candidates,
            bound=bound,
            infeasible=native.infeasible,
            native_status=native.word,
            solver=f"milp-{backend}",
            version=native.version,
            seconds=time.monotonic() - begun,
        )

    try:
        built = MilpModel(instance, objective, warm, lower_bound, deadline)
    except _OutOfTimeError:
        return answer(None, _Native("time limit while building the model", False, None, False, ""))
    native = solve(built, deadline, seed, stopped)
    log.info("milp-%s: %s, bound %s", backend, native.word, native.bound)
    if native.has_values:
        candidates.append(built.orders())
    return answer(_bound(built, native), native)


def _bound(built: MilpModel, native: _Native) -> float | None:
    """The dual bound in the time unit, lowered by what floating point may have added.

    Where the optimum is a whole number of ticks, and a tick is far coarser than that, it is rounded up.
    """
    if native.bound is None or not math.isfinite(native.bound):
        return None
    bound = native.bound * built.unit
    margin = DUAL_BOUND_RTOL * max(bound, 0.0)
    ticks = make_ticks(built.instance, built.objective)
    if ticks.exact and ticks.integral and float(ticks.tick) > 4 * margin:
        return ticks.to_bound(math.ceil((bound - margin) / float(ticks.tick)))
    return max(0.0, bound - margin)


def _solve_highs(built: MilpModel, deadline: float, seed: int, stopped: Callable[[], bool]) -> _Native:
    solver = pulp.HiGHS(
        msg=False,
        timeLimit=max(0.01, deadline - time.monotonic()),
        gapRel=1e-7,
        random_seed=seed,
        mip_feasibility_tolerance=ROW_FEASIBILITY,
        primal_feasibility_tolerance=ROW_FEASIBILITY,
    )
    problem = built.problem
    with _stdout_closed():
        solver.createAndConfigureSolver(problem)
    solver.buildSolverModel(problem)
    model = problem.solverModel
    variables = problem.variables()

    def interrupt(_kind: int, _text: str, _output: Any, given: Any, _data: Any) -> None:
        if stopped() or time.monotonic() > deadline + GRACE_SECONDS:
            given.user_interrupt = True

    model.setCallback(interrupt, None)
    model.startCallback(highspy.cb.HighsCallbackType.kCallbackMipInterrupt)
    if built.incumbent is not None:
        start = highspy.HighsSolution()
        start.col_value = [v.value() for v in variables]
        model.setSolution(start)
    model.run()
    status = model.getModelStatus()
    info = model.getInfo()
    has_values = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    bound = float(info.mip_dual_bound) if built.binaries else None
    if status in HIGHS_OPTIMAL and not built.binaries:
        bound = float(info.objective_function_value)
    if has_values:
        for variable, value in zip(variables, model.getSolution().col_value, strict=True):
            variable.varValue = value
    return _Native(
        str(model.modelStatusToString(status)),
        status in HIGHS_INFEASIBLE,
        bound,
        has_values,
        version("highspy"),
    )


@contextmanager
def _stdout_closed() -> Iterator[None]:
    """Keep HiGHS' banner, printed by C code once a process before any option is set, out of our output."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # there is no stdout to keep clean
        yield
        return
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(sink)


def _solve_cbc(built: MilpModel, deadline: float, seed: int, stopped: Callable[[], bool]) -> _Native:
    """Run the CBC binary that PuLP bundles; PuLP writes and reads its files, the log says what is proven."""
    try:
        solver = pulp.PULP_CBC_CMD(msg=False, keepFiles=True)
    except PulpSolverError as error:
        raise EnvironmentFailedError(f"cbc: {error}: reinstall pulp, or choose cpsat or milp-highs") from None
    binary = os.path.normpath(solver.path)
    with tempfile.TemporaryDirectory(prefix="zbsolve-cbc-") as folder:
        model, start, solution, output = (
            Path(folder, f"model.{end}") for end in ("mps", "mst", "sol", "log")
        )
        variables, names, rows, _ = built.problem.writeMPS(str(model), rename=True)
        command = [binary, str(model)]
        if built.incumbent is not None:
            solver.writesol(str(start), built.problem, variables, names, rows)
            command += ["-mips", str(start)]
        seconds = max(0.01, deadline - time.monotonic())
        command += ["-sec", f"{seconds:.2f}", "-timeMode", "elapsed", "-ratio", "0", "-allow", "1e-7"]
        command += ["-integerTolerance", str(ROW_FEASIBILITY), "-randomCbcSeed", str(seed + 1)]
        command += ["-solve", "-printingOptions", "all", "-solution", str(solution)]
        begun = time.monotonic()
        _run(command, output, begun + seconds * (1 + GRACE_SHARE) + GRACE_SECONDS, stopped)
        in_time = time.monotonic() - begun < seconds and not stopped()
        text = output.read_text(encoding="utf-8", errors="replace")
        native = _read_cbc_log(text, in_time)
        if native.has_values and solution.exists():
            values = solver.readsol_MPS(str(solution), built.problem, variables, names, rows)[1]
            built.problem.assignVarsVals(values)
            return native
        return native._replace(has_values=False)


def _run(command: Sequence[str], output: Path, kill_at: float, stopped: Callable[[], bool]) -> None:
    """Run a solver binary; kill it when it overruns its own limit, or is to end early."""
    try:
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
    except OSError as error:
        raise EnvironmentFailedError(
            f"cbc: {command[0]} cannot be executed ({error.strerror}): reinstall pulp, or choose cpsat or "
            "milp-highs"
        ) from None
    try:
        while process.poll() is None and time.monotonic() < kill_at and not stopped():
            try:
                process.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                continue
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _read_cbc_log(text: str, in_time: bool) -> _Native:
    """What CBC truly says: its status line and bound, not the first word of its solution file.

    A claim of infeasibility or of an optimum counts only from a run that ended before its limit.
    """

    def number(label: str) -> float | None:
        found = re.findall(rf"^{label}\s+(\S+)", text, re.MULTILINE)
        try:
            return float(found[-1]) if found else None
        except ValueError:
            return None

    results = re.findall(r"^Result - (.+?)\s*$", text, re.MULTILINE)
    objective, lower = number("Objective value:"), number("Lower bound:")
    if results:
        word = str(results[-1])
    elif re.search(CBC_EARLY_INFEASIBLE, text, re.MULTILINE):
        word = "Problem proven infeasible"
    elif (objective := number("Optimal objective")) is not None:
        word = "Optimal solution found"  # a model without binaries is solved as an LP, which has no "Result"
    else:
        word = "no result before its limit"
    release = re.search(r"^Version: (\S+)", text, re.MULTILINE)
    stopped = "Stopped on" in text or "Exiting on maximum" in text
    finished = in_time and not stopped
    optimal = finished and word in CBC_OPTIMAL
    return _Native(
        word,
        infeasible=finished and word in CBC_INFEASIBLE,
        bound=objective if optimal else None if lower is None else lower - CBC_LOG_PRECISION,
        has_values=objective is not None,
        version=release.group(1) if release else "",
    )
