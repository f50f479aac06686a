"""Whole-numbered time: the unit in which an exact model counts, and what is lost by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from zbsolve.formulations.common import _pair_lengths, common_unit, serial_length
from zbsolve.model.graph import duration, kinds_of
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import (
    BW,
    B,
    F,
    R,
    TaskKind,
    W,
)
from zbsolve.model.tolerances import BOUND_ROUNDING, TICK_ROUNDING

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
