"""What every exact formulation returns, and how real durations become whole ticks.

Shared by the formulations and the solver front; imports no solver library. Rounding is always down:
an optimum over durations that are rounded down is never above the true optimum, so a bound proven in
ticks holds for the unrounded instance. Schedules found are re-timed on the unrounded instance.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from zbsolve.model.graph import (
    Task,
)
from zbsolve.model.instance import Instance, Stage
from zbsolve.model.judge import check
from zbsolve.model.memory import NO_PAIRS, Pairs
from zbsolve.model.simulator import CycleError, simulate_for
from zbsolve.model.tolerances import OPTIMAL_GAP
from zbsolve.search.canonical import Orders

log = logging.getLogger(__name__)


def never() -> bool:
    """The answer of a question that is asked again and again, where nobody else answers it."""
    return False


class Status(StrEnum):
    """What a formulation has shown, never more than the solver truly proved."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class FormulationResult:
    """Answer of one formulation.

    Attributes
    ----------
    status : Status
        OPTIMAL only where the orders, re-timed on the unrounded instance, meet the proven bound.
    orders : tuple of tuple of Task, optional
        Per device, tasks in execution order, zero-length ones included.
    bound : float, optional
        Lower bound proven for the unrounded instance, in its time unit; None where there is none.
    native_status : str
        The solver's own word for how its search ended; says nothing of the bound.
    solver, version : str
        Which solver answered.
    seconds : float
        Wall time, model building included.
    pairs : set of (Task, Task)
        Which neighbours in the orders run as F&B pairs.
    work : float, optional
        Seconds that its search stands for, where the solver counts its work.
    """

    status: Status
    orders: Orders | None
    bound: float | None
    native_status: str
    solver: str
    version: str
    seconds: float
    pairs: Pairs = NO_PAIRS
    work: float | None = None


def serial_length(instance: Instance) -> float:
    """Cost of running one micro-batch after the other, every task and every hop: above any optimum."""
    once = 2 * sum(instance.hop(s) for s in range(instance.num_stages - 1))
    for stage in instance.stages:
        once += stage.t_f + (stage.t_r or 0.0) + max(stage.t_b + stage.t_w, stage.t_bw or 0.0)
    return instance.num_microbatches * once


def conclude(
    instance: Instance,
    objective: str,
    *,
    found: Sequence[Sequence[Sequence[Task]]],
    bound: float | None,
    infeasible: bool,
    native_status: str,
    solver: str,
    version: str,
    seconds: float,
    work: float | None = None,
) -> FormulationResult:
    """Judge what a solver left: keep the best valid orders by their true cost, and say what is proven.

    ``found`` holds candidate orders, the warm start among them. Each is re-timed on the unrounded
    instance and re-checked, so a solver that lies costs an answer, never a wrong one.
    """
    best: Orders | None = None
    best_cost = math.inf
    for orders in found:
        try:
            schedule = simulate_for(instance, orders, objective)
        except CycleError as error:
            log.warning("%s gave orders that cannot run: %s", solver, error)
            continue
        cost = schedule.cost(objective)
        if cost < best_cost and not check(instance, schedule):
            best, best_cost = schedule.orders, cost
    if best is not None:
        proven = bound is not None and best_cost - bound <= OPTIMAL_GAP * best_cost
        status = Status.OPTIMAL if proven else Status.FEASIBLE
        bound = None if bound is None else min(bound, best_cost)
    else:
        status = Status.INFEASIBLE if infeasible else Status.UNKNOWN
    return FormulationResult(status, best, bound, native_status, solver, version, seconds, work=work)


# A ratio of durations, or of amounts of memory, is a fraction of at most this denominator to within the
# rounding of the two floats, or it is none.
MOST_DENOMINATOR = 2**24
RATIO_ROUNDING = Fraction(1, 2**50)


def common_unit(values: Iterable[float]) -> tuple[Fraction, dict[float, int]] | None:
    """The largest unit that measures every positive value, and how many each is; None where there is none.

    Read from their ratios, which depend on no choice of unit: decimal figures (27.7) and byte counts in MiB
    (x / 2**20) are commensurable, and so they are in seconds or GiB, where none is a round float.
    """
    positive = {value for value in values if value > 0}
    if not positive:
        return Fraction(1), {}
    largest = Fraction(max(positive))
    ratios = {}
    for value in positive:
        ratio = Fraction(value) / largest
        ratios[value] = ratio.limit_denominator(MOST_DENOMINATOR)
        if abs(ratios[value] - ratio) > RATIO_ROUNDING * ratio:
            return None
    parts = math.lcm(*(ratio.denominator for ratio in ratios.values()))
    return Fraction(repr(max(positive))) / parts, {value: int(r * parts) for value, r in ratios.items()}


def _pair_lengths(instance: Instance, read: Callable[[float], Fraction]) -> dict[tuple[int, int], Fraction]:
    """:meth:`Instance.pair_duration` of each two stages that may pair, added up without rounding."""

    def saving(stage: Stage) -> Fraction:
        return read(stage.t_f) + read(stage.t_bw or 0.0) - read(stage.t_fb or 0.0)

    found = {}
    for device in range(instance.num_devices):
        for s in instance.stages_on(device):
            for q in instance.stages_on(device):
                if instance.pair_duration(s, q) is not None:
                    a, b = instance.stages[s], instance.stages[q]
                    found[s, q] = read(a.t_f) + read(b.t_bw or 0.0) - min(saving(a), saving(b))
    return found
