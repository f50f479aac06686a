"""How far apart the F's of a stage must start: an exact question about few micro-batches.

Under a tight cap the rate of a pipeline is set by how few micro-batches together hold each other up, through
memory and machines at once, which no single-device argument sees. The least lag between F(s, 0) and
F(s, n) over all schedules of n + 1 micro-batches holds between F(s, j) and F(s, j + n) for every j of a
longer step (:mod:`zbsolve.bounds.arguments.proven_lags` says why) and is a small problem.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ortools.sat.python import cp_model

from zbsolve.bounds.waits import Lag, LagAnswer
from zbsolve.formulations.common import never
from zbsolve.formulations.cpsat import (
    DETERMINISTIC_WALL_FACTOR,
    WORKERS,
    CpSatModel,
    Moments,
    OutOfTimeError,
    solve_interruptibly,
)
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import F
from zbsolve.model.tolerances import TICK_ROUNDING
from zbsolve.search.canonical import Orders

log = logging.getLogger(__name__)


@dataclass
class LagModel(CpSatModel):
    """Every rule of the step for few micro-batches; the cost is the lag, in clock steps.

    The lag runs from the start of F(stage, 0) to that of F(stage, m - 1), with ``to_end`` to the last end.
    F(stage, 0) is nailed down in the middle of the clock. In some schedule of least lag no moment is without
    a task or a hop under way: closing such a gap keeps every order, hence memory, and every end + hop, and
    lengthens nothing. So a serial schedule's length on either side holds it.

    For fixed orders the least lag is a longest path from the nailed F to the other (or to any last end), and
    rounding durations down shortens every path: the least lag in ticks is none above the true one. At most
    ``ticks.zeros`` single steps of zero-length tasks lie on a path, so it is at least
    ``(steps - zeros) / fine`` ticks (:meth:`zbsolve.formulations.ticks.Ticks.cost_of`).
    """

    stage: int = 0
    to_end: bool = False

    def add_cost(self) -> None:
        """The lag."""
        self.cost = self.model.new_int_var(0, self._middle, "lag")

    def add_objective(self) -> None:
        """From the start of F(stage, 0), which is fixed."""
        if self.to_end:
            for back in self.backward.values():
                self.model.add(back.released - self._middle <= self.cost)
        else:
            self.model.add(self.cost == self.forward[self.stage, self._m - 1] - self._middle)
        self.model.minimize(self.cost)

    def add_redundant_bounds(self) -> None:
        """None: the lag need not hold any device's work."""

    def add_windows(self) -> None:
        """None: the clock does not start with the step."""

    def _forward_domain(self, s: int, j: int) -> tuple[int, int]:
        return (self._middle, self._middle) if (s, j) == (self.stage, 0) else (0, self._latest)

    def _origin(self, starts: dict[Task, int]) -> int:
        return starts[Task(F, self.stage, 0)] - self._middle

    def _hint_cost(self, moment: Moments) -> None:
        if self.to_end:
            end = max(at for (name, _, _), at in moment.items() if name == "released")
        else:
            end = moment["F", self.stage, self._m - 1]
        self.model.add_hint(self.cost, end - self._middle)

    @property
    def _middle(self) -> int:
        return self.ticks.horizon * self.ticks.fine + self.ticks.zeros

    @property
    def _latest(self) -> int:
        return 2 * self._middle


def first_microbatches(orders: Orders, number: int) -> Orders:
    """What the first micro-batches do in canonical orders: valid orders of these alone."""
    return tuple(tuple(task for task in order if task.microbatch < number) for order in orders)


def prove_lag(
    instance: Instance,
    stage: int,
    distance: int,
    incumbent: Orders,
    *,
    to_end: bool = False,
    time_limit: float,
    seed: int = 0,
    deterministic: bool = False,
    workers: int = WORKERS,
    stopped: Callable[[], bool] = never,
) -> LagAnswer | None:
    """The highest proven :class:`~zbsolve.bounds.waits.Lag` of a stage over ``distance``, if any.

    Parameters
    ----------
    incumbent : orders
        Canonical orders of a valid schedule of the instance: where the search starts.
    time_limit : float
        Seconds, deterministic ones in deterministic mode.
    stopped : callable
        Asked ten times a second: whether to end early.
    """
    until = time.monotonic() + time_limit
    number = distance if to_end else distance + 1
    few = instance.with_changes(num_microbatches=number)
    hint = first_microbatches(incumbent, number)
    deadline = math.inf if deterministic else until
    try:
        built = LagModel(few, "makespan", hint, deadline=deadline, stage=stage, to_end=to_end)
    except OutOfTimeError:
        return None
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.random_seed = seed
    if deterministic:
        parameters.num_workers = 1
        parameters.max_deterministic_time = time_limit
        parameters.max_time_in_seconds = DETERMINISTIC_WALL_FACTOR * time_limit
    else:
        parameters.num_workers = workers
        parameters.max_time_in_seconds = max(1e-3, until - time.monotonic())
    native = solve_interruptibly(solver, built.model, stopped=stopped)
    if native not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    value = _lag_value(built, solver.best_objective_bound)
    log.info("lag of stage %d over %d: %g (%s)", stage, distance, value, solver.status_name(native))
    return LagAnswer(
        Lag(stage, distance, value, to_end), native == cp_model.OPTIMAL, solver.deterministic_time / WORKERS
    )


def _lag_value(built: LagModel, steps: float) -> float:
    """A lag in the time unit from a bound in clock steps, rounded down."""
    return built.ticks.to_bound(built.ticks.cost_of(math.ceil(steps - TICK_ROUNDING)))
