"""What every exact formulation returns, and how real durations become whole ticks.

Shared by the formulations and the solver front; imports no solver library. Rounding is always down:
an optimum over durations that are rounded down is never above the true optimum, so a bound proven in
ticks holds for the unrounded instance. Schedules found are re-timed on the unrounded instance.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property

from zbsolve.graph import BW, B, F, R, Task, TaskKind, W, duration, kinds_of
from zbsolve.instance import Instance, Stage
from zbsolve.memory import NO_PAIRS, Pairs
from zbsolve.schedule import check
from zbsolve.simulator import CycleError, simulate_for
from zbsolve.tolerances import BOUND_ROUNDING, OPTIMAL_GAP, TICK_ROUNDING

log = logging.getLogger(__name__)

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
        The solver's own word for how its search ended; says nothing of the bound.
    solver, version : str
        Which solver answered.
    seconds : float
        Wall time, model building included.
    pairs : set of (Task, Task)
        Which neighbours in the orders run as F&B pairs.
    """

    status: Status
    orders: Orders | None
    bound: float | None
    native_status: str
    solver: str
    version: str
    seconds: float
    pairs: Pairs = NO_PAIRS


# --- common steps of every formulation ---------------------------------------------------------


def canonical(instance: Instance, orders: Sequence[Sequence[Task]]) -> Orders:
    """The same orders with the micro-batches of every stage renamed so that they come in order.

    Micro-batches are identical, so renaming changes neither memory nor any end time for the worse: the
    k-th F, the k-th backward (B or BW) and the W of the k-th B of a stage go to its k-th micro-batch.
    """
    renamed: list[tuple[Task, ...]] = []
    for order in orders:
        forwards = [0] * instance.num_stages
        backwards = [0] * instance.num_stages
        split: list[list[int]] = [[] for _ in range(instance.num_stages)]
        weights = [0] * instance.num_stages
        device_order = []
        for kind, s, _ in order:
            if kind is F:
                j = forwards[s]
                forwards[s] += 1
            elif kind is W:
                j = split[s][weights[s]]
                weights[s] += 1
            else:
                j = backwards[s]
                backwards[s] += 1
                if kind is B:
                    split[s].append(j)
            device_order.append(Task(kind, s, j))
        renamed.append(tuple(device_order))
    return tuple(renamed)


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
    return FormulationResult(status, best, bound, native_status, solver, version, seconds)


# --- ticks -------------------------------------------------------------------------------------

# Whole ticks up to these horizons: exact where durations are commensurable, else fine enough that a path
# of a thousand tasks loses less than OPTIMAL_GAP. CP-SAT multiplies ticks by memory in 64 bits.
EXACT_HORIZON = 2**40
ROUNDED_HORIZON = 2**32


@dataclass(frozen=True)
class Ticks:
    """Durations in whole ticks, rounded down, and the way back.

    A zero-length task has no place of its own on an integer clock, although its place among the tasks of
    its instant decides what memory it frees first. So the model's clock is finer than the tick:
    ``fine`` clock steps make one tick and a zero-length task takes one step. At most ``zeros`` such tasks
    lie on a path, fewer than ``fine``: a cost of T ticks is exactly a window of at most
    ``T * fine + zeros`` steps. (For the span a cycle of up to p windows counts, hence ``fine > p * zeros``.)

    Attributes
    ----------
    tick : Fraction
        Length of one tick in the instance's time unit.
    exact : bool
        No duration lost anything to rounding.
    integral : bool
        The optimum of the rounded durations is a whole number of ticks. A least span is a cycle mean over
        at most p devices, so the tick is divided by lcm(1..p) where that leaves the clock short enough.
    fine, zeros : int
        Steps a tick, and how many tasks may take a single step.
    instance : Instance
        The instance with every duration and hop counted in clock steps (for re-timing on that clock).
    pair_steps : mapping
        Clock steps of F of one stage beside BW of another, where they may pair; each rounded down by itself.
    """

    tick: Fraction
    exact: bool
    integral: bool
    fine: int
    zeros: int
    instance: Instance
    pair_steps: Mapping[tuple[int, int], int]

    def steps(self, kind: TaskKind, stage: int) -> int:
        """Duration of a task in clock steps."""
        return int(duration(self.instance, kind, stage))

    def hop_steps(self, boundary: int) -> int:
        """Hop latency in clock steps."""
        return int(self.instance.hop(boundary))

    @cached_property
    def horizon(self) -> int:
        """Ticks of the serial schedule, rounded up: no optimum is above it."""
        return math.ceil(serial_length(self.instance) / self.fine)

    def cost_of(self, window_steps: float) -> int:
        """Whole ticks of a window given in clock steps (the least cost that allows it)."""
        return max(0, -((self.zeros - round(window_steps)) // self.fine))

    def to_bound(self, ticks: float) -> float:
        """Lower bound in the time unit from a solver's bound on the whole number of ticks."""
        whole = math.ceil(ticks - TICK_ROUNDING)
        return max(0.0, float(self.tick * (whole if self.integral else whole - 1)))

    def from_bound(self, bound: float) -> int:
        """Whole ticks that a lower bound given in the time unit allows the model to start from."""
        value = Fraction(max(0.0, bound)) / self.tick
        if self.exact and self.integral:  # the optimum is whole: round up, but for float noise
            return math.ceil(value * (1 - Fraction(BOUND_ROUNDING)))
        return math.floor(value)


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


def make_ticks(instance: Instance, objective: str) -> Ticks:
    """Choose the tick (see :class:`Ticks`): exact where durations are commensurable, else rounding down."""
    p, m = instance.num_devices, instance.num_microbatches
    lengths = {
        (kind, s): duration(instance, kind, s)
        for s, stage in enumerate(instance.stages)
        for kind in kinds_of(instance, s)
    }
    hops = [instance.hop(s) for s in range(instance.num_stages - 1)]
    paired = [stage.t_fb for stage in instance.stages if stage.t_fb is not None]
    common = common_unit((*lengths.values(), *hops, *paired))
    serial = Fraction(serial_length(instance)) or Fraction(1)
    means = math.lcm(*range(1, p + 1)) if objective == "span" else 1

    zeros = sum(m for value in lengths.values() if value == 0)
    while True:
        fine = 1 if zeros == 0 else (p if objective == "span" else 1) * zeros + 1
        exact = common is not None and serial / common[0] * fine <= EXACT_HORIZON
        if common is not None and exact:
            divisor = common[0]
            integral = serial / divisor * means * fine <= EXACT_HORIZON
            # Without whole means one unit of the last place is lost: make that place small.
            places = means if integral else 2 ** int(math.log2(EXACT_HORIZON / (serial / divisor * fine)))
            tick = divisor / places
        else:
            integral = objective != "span"
            tick = serial * fine / ROUNDED_HORIZON
        counted = sum(m for value in lengths.values() if value < tick)
        if counted <= zeros:
            break
        zeros = counted  # the tick is so coarse that short tasks vanish: they need a step as well

    def read(value: float) -> Fraction:
        if common is not None and exact:
            return common[0] * common[1].get(value, 0)
        return Fraction(value)

    def steps(value: Fraction) -> float:
        return float(math.floor(value / tick) * fine)

    together = _pair_lengths(instance, read)

    stages = []
    for s, stage in enumerate(instance.stages):
        changes = {
            field: steps(read(lengths[kind, s])) or 1.0
            for kind, field in ((F, "t_f"), (B, "t_b"), (W, "t_w"), (BW, "t_bw"), (R, "t_r"))
            if (kind, s) in lengths
        }
        if (s, s) in together:
            changes["t_fb"] = steps(together[s, s]) or 1.0
        stages.append(stage.model_copy(update=changes))
    clock = instance.model_copy(
        update={
            "stages": tuple(stages),
            # Hops with their transfers; that links are free is a relaxation, so bounds hold with contention.
            "t_comm": tuple(steps(read(value)) for value in hops) if hops else 0.0,
            "t_transfer": None,
        }
    )
    pair_steps = {key: int(steps(value) or 1.0) for key, value in together.items()}
    return Ticks(tick, exact, integral, fine, zeros, clock, pair_steps)


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
