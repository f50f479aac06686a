"""One machine: a device's tasks, one at a time, between the least times before and after each."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from zbsolve.bounds.argument import Argument, Known
from zbsolve.bounds.bound import Bound
from zbsolve.bounds.waits import Lag, back, single_chain
from zbsolve.bounds.windows import Windows, observers
from zbsolve.model.instance import Instance

FloatArray = NDArray[np.float64]


class OneMachine(Argument):
    """See :func:`window_bounds`."""

    name = "one machine"
    reads_paths = True

    def applies(self, instance: Instance) -> bool:
        """One chain of stages, each device at one task at a time."""
        return single_chain(instance)

    def bounds(self, known: Known) -> Iterator[Bound]:
        """:func:`window_bounds`, from the instance alone."""
        return window_bounds(known)


def window_bounds(known: Known, name: str = OneMachine.name, lags: tuple[Lag, ...] = ()) -> Iterator[Bound]:
    """Longest paths through dependencies and memory waits, and one machine's work between them.

    :mod:`zbsolve.bounds.windows` gives every task a head (least time before its start) and a tail (least
    time after its end). A device runs one task at a time, so its tasks form a one-machine
    schedule with these heads and tails; the preemptive relaxation, solved exactly by always running the
    available task with the longest tail (Jackson; Carlier 1982), is a lower bound on the makespan.

    For the span some device's window is watched instead: heads count from that device's first F, tails to
    the end of its last task, and only tasks with both lie in the window by force. A device is watched in
    its own window and in that of stage 0's device, which begins and ends every micro-batch's path: there the
    last stage's F's and B's, for example, cannot start before the way to it nor end after the way back.

    An R, wherever it is, runs after its own F and before its own backward, and holds nothing up elsewhere.

    Where a stage can fuse, its backward is two preemptible jobs: ``back`` long with the tail of what waits
    for the gradient, and the rest of ``min_backward`` with none. Split or fused, the device spends at least
    that, the first part before the gradient leaves.

    ``lags`` join the precedences (:mod:`zbsolve.bounds.arguments.proven_lags`).
    """
    instance, found = known.instance, known.windows(lags)
    for device in range(instance.num_devices):
        for observer, watched in observers(instance, device, known.objective).items():
            value = preemptive_one_machine(_observed_jobs(instance, found, device, observer))
            yield Bound(
                value,
                name,
                f"device {device}: its tasks, with the least times before and after each in {watched}, "
                f"need {value:g}{''.join(map(_say_lag, lags))}",
                device,
                lags,
            )


def _say_lag(lag: Lag) -> str:
    if lag.to_end:
        return f"; the end is at least {lag.value:g} after F(stage {lag.stage}, m-{lag.distance})"
    return f"; F(stage {lag.stage}, j+{lag.distance}) is at least {lag.value:g} after F(stage {lag.stage}, j)"


def _observed_jobs(
    instance: Instance, found: Windows, device: int, observer: int
) -> list[tuple[float, float, float]]:
    """The device's tasks as (head, duration, tail) in an observer's window; those outside it left out."""
    jobs: list[tuple[float, float, float]] = []
    for s in instance.stages_on(device):
        stage = instance.stages[s]
        heads = found.heads[:, s, :, observer]
        tails = found.tails[:, s, :, observer]
        if observer == device:
            heads = np.maximum(heads, 0.0)  # nothing on a device starts before its first task
        jobs += _jobs(heads[0], stage.t_f, tails[0])
        jobs += _jobs(heads[1], back(stage), tails[1])
        if stage.t_r is not None:
            jobs += _jobs(heads[0] + stage.t_f, stage.t_r, tails[1] + back(stage))
        if stage.t_bw is None:
            jobs += _jobs(heads[2], stage.t_w, tails[2])
        elif observer in (device, instance.num_devices):
            jobs += _jobs(heads[1], stage.min_backward - back(stage), np.zeros(len(heads[1])))
    return [job for job in jobs if math.isfinite(job[0]) and math.isfinite(job[2])]


def _jobs(heads: FloatArray, length: float, tails: FloatArray) -> list[tuple[float, float, float]]:
    return [(head, length, tail) for head, tail in zip(heads.tolist(), tails.tolist(), strict=True)]


def preemptive_one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """Least max(end + tail) of jobs (head, duration, tail) on one machine that may preempt (Carlier 1982)."""
    jobs = sorted(jobs)
    available: list[tuple[float, float]] = []  # (-tail, time left)
    now, best, following = 0.0, 0.0, 0
    while following < len(jobs) or available:
        if not available:
            now = max(now, jobs[following][0])
        while following < len(jobs) and jobs[following][0] <= now:
            _, length, tail = jobs[following]
            heapq.heappush(available, (-tail, length))
            following += 1
        negative_tail, left = heapq.heappop(available)
        until = jobs[following][0] if following < len(jobs) else math.inf
        if now + left <= until:
            now += left
            best = max(best, now - negative_tail)
        else:
            heapq.heappush(available, (negative_tail, left - (until - now)))
            now = until
    return best
