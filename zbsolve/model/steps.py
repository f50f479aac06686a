"""Several training steps in a row: with the barrier of a synchronous optimizer, and without.

A step ends with the optimizer, which needs the global gradient norm and whether any gradient is NaN or Inf.
Three ways:

* *barrier*: every device waits for all; a step takes the makespan and the optimizer's time.
* *post-validation* (arXiv 2401.10241, section 4): the state is reduced along the pipeline, device by device,
  and each device takes its optimizer step on what has arrived by then. The full state comes back during the
  next step's warm-up; a device that finds its step wrong drops what it has done since, rolls back, redoes it.
* *free*: devices go on at once. No optimizer allows it in general; it is the limit, one least span a step.

Within a step a device ends at the longest of the paths that begin at any device's first task, so a step maps
starts to ends by a (max, +) matrix, and steps are iterated exactly, however many. Nothing else is assumed
between two steps: that the period without a barrier is the span comes out, it is not put in.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from zbsolve.errors import InputError
from zbsolve.model.instance import Instance
from zbsolve.model.memory import NO_PAIRS, Pairs
from zbsolve.model.simulator import Orders, device_paths

Mode = Literal["barrier", "post-validation", "free"]
MODES: tuple[Mode, ...] = ("barrier", "post-validation", "free")
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Starts and ends (optimizer included) of each step on each device. Shapes (steps, p)."""

    starts: FloatArray
    ends: FloatArray

    @property
    def total(self) -> float:
        """From the first start to the last end of all steps."""
        return float(self.ends.max() - self.starts.min())

    def period(self, over: int) -> float:
        """Mean time of the last ``over`` steps: how much later everything ends."""
        if not 0 < over < len(self.ends):
            raise InputError(
                f"the period over {over} of {len(self.ends)} steps: give 1 to {len(self.ends) - 1}"
            )
        return float((self.ends[-1] - self.ends[-1 - over]).max() / over)


def run_steps(
    instance: Instance,
    orders: Orders,
    steps: int,
    mode: Mode,
    *,
    pairs: Pairs = NO_PAIRS,
    optimizer: float | Sequence[float] = 0.0,
    failed: Set[int] = frozenset(),
) -> StepTimes:
    """Run the same orders for several steps.

    Parameters
    ----------
    optimizer : float or one per device
        Time of the optimizer step, in the instance's unit.
    failed : set of int
        Steps (from 0) whose state turns out bad. With a barrier that is known in time and costs nothing; with
        post-validation the device rolls back and redoes the optimizer step once the full state has come.

    The state travels over the latency of the longest hop between neighbouring devices, both ways.
    """
    if steps < 1:
        raise InputError(f"steps is {steps}: give at least 1")
    p = instance.num_devices
    takes = np.broadcast_to(np.asarray(optimizer, dtype=float), (p,))
    if (takes < 0).any():
        raise InputError(f"optimizer is {takes.min():g}: give a time of 0 or more")
    longest = device_paths(instance, orders, pairs)
    hop = max((instance.hop(b) for b in range(instance.num_stages - 1)), default=0.0)
    starts, ends = np.zeros((steps, p)), np.zeros((steps, p))
    ready = np.zeros(p)
    for step in range(steps):
        computed = (ready[:, None] + longest).max(axis=0)
        # A device whose first task waits for another's starts with it.
        starts[step] = ready
        if mode == "barrier":
            agreed = np.full(p, computed.max())
        elif mode == "free":
            agreed = computed
        else:
            agreed = np.maximum.accumulate(computed - hop * np.arange(p)) + hop * np.arange(p)
        ready = agreed + takes
        if mode == "post-validation" and step in failed:
            # The full state is known at the last device first, and travels back.
            known = agreed[-1] + hop * (p - 1 - np.arange(p))
            ready = np.maximum(ready, known) + 2 * takes
        ends[step] = ready
    return StepTimes(starts, ends)


def steady_period(
    instance: Instance,
    orders: Orders,
    mode: Mode,
    *,
    pairs: Pairs = NO_PAIRS,
    optimizer: float | Sequence[float] = 0.0,
) -> float:
    """Time of one step in the long run.

    Steps settle into a pattern that repeats every so many steps as there are devices on the critical circle:
    the mean is taken over a common multiple of 1 to p steps where that is small, and over many where not.
    """
    over = int(np.lcm.reduce(np.arange(1, instance.num_devices + 1)))
    over = over if over <= 840 else 5040
    times = run_steps(instance, orders, 2 * over + 1, mode, pairs=pairs, optimizer=optimizer)
    return times.period(over)
