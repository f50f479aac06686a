"""What every exact formulation returns, and how real durations become whole ticks.

Shared by the formulations and the solver front; imports no solver library. Rounding is always down:
an optimum over durations that are rounded down is never above the true optimum, so a bound proven in
ticks holds for the unrounded instance. Schedules found are re-timed on the unrounded instance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property

from zbsolve.graph import BW, B, F, Task, TaskKind, W, duration
from zbsolve.instance import Instance
from zbsolve.plan import OPTIMAL_GAP
from zbsolve.simulator import simulate_for

Orders = tuple[tuple[Task, ...], ...]


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
        The solver's own word.
    solver, version : str
        Which solver answered.
    seconds : float
        Wall time, model building included.
    """

    status: Status
    orders: Orders | None
    bound: float | None
    native_status: str
    solver: str
    version: str
    seconds: float
