"""Periodic schedules: one micro-batch's tasks placed on a circle, repeated every period.

For large m the steady state decides. There, every ``period``, each device runs each of its tasks once, for
micro-batches of different age: micro-batch j does at time t + j * period what micro-batch 0 does at t. So a
pattern is one start a task (kind and stage), a device's tasks must not overlap modulo the period, and
the memory in use is a function of the same starts (modulo scheduling; Lam 1988, Hanen and Munier 1995).
CP-SAT places the tasks so that memory overruns the caps least; a pattern without overrun, unrolled for all m,
is a valid schedule whose warm-up and cool-down are those of the pattern, for a local search to tighten.

It does not prove anything: an optimal schedule need not be periodic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

from ortools.sat.python import cp_model

from zbsolve.bounds.waits import room
from zbsolve.formulations.common import never
from zbsolve.formulations.cpsat import WORKERS, solve_interruptibly
from zbsolve.model.graph import Task, duration
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import BW, B, F, TaskKind, W
from zbsolve.model.memory import effect
from zbsolve.model.tolerances import COUNT_ROUNDING
from zbsolve.search.canonical import Orders

# Units of time in a period. Lengths are rounded down (a period may be all work), but to no less than one,
# so that starts alone settle every order; times come from the orders, on the unrounded instance.
UNITS = 2_000
MEMORY_UNITS = 10_000
MOST_OVER = 1_000 * MEMORY_UNITS
# Amounts are rounded to the nearest unit; some that just fit together must not seem to overrun.
MEMORY_TOLERANCE = 3

Job = tuple[TaskKind, int]  # what every micro-batch runs once: a kind and a stage


@dataclass(frozen=True, slots=True)
class Pattern:
    """Starts of micro-batch 0 in units of 1 / ``UNITS`` of ``period`` (time unit)."""

    period: float
    starts: dict[Job, int]

    def orders(self, instance: Instance) -> Orders:
        """The pattern repeated for every micro-batch, as device orders."""
        m = instance.num_microbatches
        placed: list[list[tuple[int, Task]]] = [[] for _ in range(instance.num_devices)]
        for (kind, s), start in self.starts.items():
            program = placed[instance.stages[s].device]
            program += ((start + j * UNITS, Task(kind, s, j)) for j in range(m))
        return tuple(tuple(task for _, task in sorted(program)) for program in placed)


class _Circle:
    """Greedy starts: each task at the first moment from when it is ready at which its device is free."""

    def __init__(self, instance: Instance) -> None:
        self._busy: list[list[tuple[int, int]]] = [[] for _ in range(instance.num_devices)]

    def place(self, device: int, ready: int, length: int) -> int:
        """First start from ``ready`` on at which ``length`` fits; as good as none counts as ``ready``."""
        start = ready
        taken = self._busy[device]
        for _ in range(4 * len(taken) + 4):
            wait = 0
            for begin, busy in taken:
                since, until = (start - begin) % UNITS, (begin - start) % UNITS
                if since < busy:
                    wait = max(wait, busy - since)
                elif until < length:
                    wait = max(wait, until + busy)
            if wait == 0:
                break
            start += wait
        taken.append((start % UNITS, length))
        return start


class PeriodicModel:
    """One period as a CP-SAT model whose cost is the memory over the caps, summed over devices.

    Parameters
    ----------
    period : float
        Time between two micro-batches, at least every device's work.
    fused : tuple of bool
        Per stage, whether it runs BW.
    """

    def __init__(self, instance: Instance, period: float, fused: tuple[bool, ...]) -> None:
        self.instance = instance
        self.period = period
        self.backward: list[TaskKind] = [BW if fuse else B for fuse in fused]
        self.jobs: list[Job] = []
        for s, kind in enumerate(self.backward):
            self.jobs += [(F, s), (kind, s)] + ([] if kind is BW else [(W, s)])
        scale = UNITS / period
        self.length = {
            job: max(1, int(duration(instance, *job) * scale + COUNT_ROUNDING)) for job in self.jobs
        }
        self.hops = [int(instance.hop(q) * scale + COUNT_ROUNDING) for q in range(instance.num_stages - 1)]
        self.model = cp_model.CpModel()
        self.phase: dict[Job, cp_model.IntVar] = {}
        self.lap: dict[Job, cp_model.IntVar] = {}
        self.before: dict[tuple[Job, Job], cp_model.IntVar | cp_model.LinearExpr] = {}
        self.over: list[cp_model.IntVar] = []
        self._hint = self._greedy()
        for add in (self._add_starts, self._add_dependencies, self._add_machines, self._add_memory):
            add()
        self.model.minimize(cp_model.LinearExpr.sum(self.over))

    def _greedy(self) -> dict[Job, int]:
        """Starts for the hint, in the order in which a micro-batch runs its tasks."""
        circle = _Circle(self.instance)
        stages, starts, ready = self.instance.stages, {}, 0
        for s in range(len(stages)):
            starts[F, s] = circle.place(stages[s].device, ready, self.length[F, s])
            ready = starts[F, s] + self.length[F, s] + (self.hops[s] if s < len(stages) - 1 else 0)
        for s in reversed(range(len(stages))):
            job = self.backward[s], s
            starts[job] = circle.place(stages[s].device, ready, self.length[job])
            ready = starts[job] + self.length[job] + (self.hops[s - 1] if s else 0)
        for s, kind in enumerate(self.backward):
            if kind is B:
                ready = starts[B, s] + self.length[B, s]
                starts[W, s] = circle.place(stages[s].device, ready, self.length[W, s])
        return starts

    def _add_starts(self) -> None:
        laps = 2 + max(start // UNITS for start in self._hint.values())
        for job in self.jobs:
            self.phase[job] = self.model.new_int_var(0, UNITS - 1, f"phase{job}")
            self.lap[job] = self.model.new_int_var(0, laps, f"lap{job}")
            self.model.add_hint(self.phase[job], self._hint[job] % UNITS)
            self.model.add_hint(self.lap[job], self._hint[job] // UNITS)
        self.model.add(self.phase[F, 0] == 0)
        self.model.add(self.lap[F, 0] == 0)

    def _start(self, job: Job) -> cp_model.LinearExpr:
        return self.phase[job] + UNITS * self.lap[job]

    def _add_dependencies(self) -> None:
        last = self.instance.num_stages - 1
        for s, kind in enumerate(self.backward):
            job = kind, s
            after = [((F, s), job, 0)]
            if s > 0:
                after.append(((F, s - 1), (F, s), self.hops[s - 1]))
            if s < last:
                after.append(((self.backward[s + 1], s + 1), job, self.hops[s]))
            if kind is B:
                after.append((job, (W, s), 0))
            for first, then, wait in after:
                self.model.add(self._start(then) >= self._start(first) + self.length[first] + wait)

    def _add_machines(self) -> None:
        """A device's tasks, pairwise one before the other within the period, also around its end."""
        for device in range(self.instance.num_devices):
            stages = self.instance.stages_on(device)
            for a, b in combinations([job for job in self.jobs if job[1] in stages], 2):
                first = self.model.new_bool_var(f"{a}<{b}")
                self.model.add_hint(first, self._hint[a] % UNITS < self._hint[b] % UNITS)
                self.before[a, b], self.before[b, a] = first, 1 - first
                for x, y, chosen in ((a, b, first), (b, a, first.negated())):
                    at_x, at_y = self.phase[x], self.phase[y]
                    self.model.add(at_x + self.length[x] <= at_y).only_enforce_if(chosen)
                    self.model.add(at_y + self.length[y] <= at_x + UNITS).only_enforce_if(chosen)

    def _add_memory(self) -> None:
        """At the start of a task x: what all earlier starts took, less what all earlier ends freed.

        Up to a phase, a task of lap k has run -k times (plus a count common to all tasks) if its phase comes
        later and once more if it comes earlier: a device's tasks are disjoint, so started before x is ended
        before x.
        """
        for device in range(self.instance.num_devices):
            free = room(self.instance, device)
            if math.isinf(free):
                continue
            over = self.model.new_int_var(0, MOST_OVER, f"over{device}")
            self.over.append(over)
            net, running = self._memory_units(device, free)
            worst = 0
            for x in net:
                terms: list[cp_model.LinearExprT] = [running[x]]
                hinted = running[x]
                for job, change in net.items():
                    terms.append(-change * self.lap[job])
                    if job != x:
                        terms.append(change * self.before[job, x])
                    earlier = self._hint[job] % UNITS < self._hint[x] % UNITS
                    hinted += change * (int(earlier and job != x) - self._hint[job] // UNITS)
                level = cp_model.LinearExpr.sum(terms)
                self.model.add(level <= MEMORY_UNITS + MEMORY_TOLERANCE + over)
                worst = max(worst, hinted - MEMORY_UNITS - MEMORY_TOLERANCE)
            self.model.add_hint(over, worst)

    def _memory_units(self, device: int, free: float) -> tuple[dict[Job, int], dict[Job, int]]:
        """Of each task of a device: the change that it leaves, and the rise while it runs, in units.

        ``free`` are so many units; where nothing is, whatever is held overruns it by the most there is.
        The changes of a stage add up to nothing, also when rounded: a common lap must cancel.
        """
        net: dict[Job, int] = {}
        running: dict[Job, int] = {}

        def units(amount: float) -> int:
            if amount == 0:
                return 0
            share = amount / free if free > 0 else math.copysign(math.inf, amount)
            return round(max(-MOST_OVER, min(MOST_OVER, share * MEMORY_UNITS)))

        for s in self.instance.stages_on(device):
            jobs = [job for job in self.jobs if job[1] == s]
            for kind, _ in jobs:
                found = effect(self.instance.stages[s], kind)
                net[kind, s] = units(found.net)
                running[kind, s] = units(found.while_running)
            *others, last = jobs
            net[last] = -sum(net[job] for job in others)
        return net, running


def find_pattern(
    instance: Instance,
    period: float,
    fused: tuple[bool, ...],
    *,
    time_limit: float,
    seed: int = 0,
    deterministic: bool = False,
    workers: int = WORKERS,
    stopped: Callable[[], bool] = never,
) -> Pattern | None:
    """A pattern of this period within every cap, or None when none was found in time.

    ``stopped`` is asked ten times a second: whether to end early.
    """
    built = PeriodicModel(instance, period, fused)
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = seed
    if deterministic:
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = time_limit
    else:
        solver.parameters.num_workers = workers
        solver.parameters.max_time_in_seconds = time_limit
    native = solve_interruptibly(solver, built.model, stopped=stopped)
    if native not in (cp_model.OPTIMAL, cp_model.FEASIBLE) or solver.objective_value > 0:
        return None
    starts = {
        job: solver.value(built.phase[job]) + UNITS * solver.value(built.lap[job]) for job in built.jobs
    }
    return Pattern(period, starts)
