"""Longest paths through a step: the least times before and after every task.

Paths run over dependencies, micro-batch order, what memory forces and lags proven elsewhere
(:mod:`zbsolve.bounds.arcs`), and through a device's work (:mod:`zbsolve.bounds.forced_work`). All statements
hold for canonical schedules, as in :mod:`zbsolve.bounds.waits`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zbsolve.bounds.arcs import Job, pass_arcs, pass_order
from zbsolve.bounds.forced_work import ForcedWork, counting_steps
from zbsolve.bounds.waits import Lag, back
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import B, F, W
from zbsolve.model.recompute import instant_recomputation

# Beyond, counting a device's work takes ten seconds and more, for steps whose bounds are tight without it.
MOST_COUNTING_STEPS = 150_000_000

# The passes as they stand in arrays of heads and tails.
KINDS = (F, B, W)
CODE = {kind: code for code, kind in enumerate(KINDS)}
# The heads (tails) at the other end of an arc, shape (m, p + 1), the arc's distance and its length.
_Link = tuple[NDArray[np.float64], int, float]


@dataclass(frozen=True, slots=True)
class Windows:
    """Least times around every task, per observer.

    Observer d < p watches device d: ``heads`` count from the start of its first F, ``tails`` to the end of
    its last task. Observer p watches the whole step. Shape (kinds F B W, S, m, p + 1); minus infinity where
    nothing is implied. ``heads`` are to the start of a task, ``tails`` from its end; where the stage can
    fuse, a backward's tail counts from :func:`back` after its start, the earliest end of its gradient.
    ``in_full``: all of a device's forced work was counted, as far as it is ever.
    """

    heads: NDArray[np.float64]
    tails: NDArray[np.float64]
    in_full: bool = True


def windows(
    instance: Instance, lags: Iterable[Lag] = (), enough: Callable[[], bool] = lambda: False
) -> Windows:
    """Longest paths over :func:`zbsolve.bounds.arcs.pass_arcs` and to the step's end over proven lags.

    For the whole step, and for the window of stage 0's device, which begins with it, paths also run through
    the work that a device is forced to do on the way (:class:`zbsolve.bounds.forced_work.ForcedWork`).
    Once ``enough`` says yes no more of that work is counted: what is said then holds all the same.
    """
    S, m, p = instance.num_stages, instance.num_microbatches, instance.num_devices
    lags = tuple(lags)
    splits = [stage.t_bw is None for stage in instance.stages]
    # The rest of a fused backward occupies the device but hands nothing on: it counts in the tail.
    rest = [0.0 if stage.t_bw is None else stage.min_backward - back(stage) for stage in instance.stages]
    device = [stage.device for stage in instance.stages]
    # Where the R's are is open: they count between a micro-batch's own F and backward, and in no memory.
    plain = instant_recomputation(instance)

    # What begins with the step, resp. ends with it: the step itself and the window of stage 0's device.
    whole = (p, device[0])
    counted = counting_steps(instance) <= MOST_COUNTING_STEPS
    work_before = ForcedWork(plain) if counted else None
    work_after = {o: ForcedWork(plain, mirrored=True) for o in whole} if counted else {}

    in_full = True
    heads = np.full((3, S, m, p + 1), -np.inf)
    tails = np.full((3, S, m, p + 1), -np.inf)
    leading: dict[Job, list[_Link]] = {job: [] for job in pass_order(instance)}
    following: dict[Job, list[_Link]] = {job: [] for job in leading}
    for arc in pass_arcs(instance, lags):
        (kind, s), (later, q) = arc.before, arc.after
        if (kind is W and not splits[s]) or (later is W and not splits[q]):
            continue
        first, second = CODE[kind], CODE[later]
        lengths = _length(instance, arc.before), _length(instance, arc.after)
        leading[arc.after].append((heads[first, s], arc.distance, arc.between_starts(lengths[0])))
        following[arc.before].append((tails[second, q], arc.distance, arc.between_ends(*lengths)))

    for s in range(S):
        if instance.stages_on(device[s])[0] == s:
            heads[0, s, 0, device[s]] = 0.0
    heads[0, 0, 0, p] = 0.0
    for j in range(m):
        if work_before is not None and enough():
            work_before, in_full = None, False
        for (kind, s), links in leading.items():
            head = heads[CODE[kind], s, j]
            for before, distance, length in links:
                if j >= distance:
                    np.maximum(head, before[j - distance] + length, out=head)
            if work_before is not None:
                if kind is W:
                    work_before.record(W, s, j, heads[2 if splits[s] else 1, s, j, p])
                else:
                    head[list(whole)] = work_before.settle(kind, s, j, head[p])

    ends: dict[tuple[Job, int], float] = {}
    for lag in lags:
        if lag.to_end:
            key = Job(F, lag.stage), m - lag.distance
            ends[key] = max(ends.get(key, -math.inf), lag.value - instance.stages[lag.stage].t_f)
    for j in range(m - 1, -1, -1):
        if work_after and enough():
            work_after, in_full = {}, False
        for job, links in reversed(following.items()):
            kind, s = job
            own = device[s]
            tail = tails[CODE[kind], s, j]
            if kind is B or (kind is W and splits[s]):
                tail[own] = tail[p] = rest[s]
            for after, distance, length in links:
                if j + distance < m:
                    np.maximum(tail, after[j + distance] + length, out=tail)
            if ends and (job, j) in ends:
                tail[p] = max(tail[p], ends[job, j])
            for o, work in work_after.items():
                if kind is W:
                    # The rest of a fused backward has nothing after it by force; its device's windows
                    # hold it.
                    unforced = 0.0 if o in (p, own) else -math.inf
                    work.record(W, s, j, tail[o] if splits[s] else unforced)
                else:
                    tail[o] = work.settle(kind, s, j, tail[o])
    return Windows(heads, tails, in_full)


def _length(instance: Instance, job: Job) -> float:
    """Of an F, of a backward up to its gradient, of a W."""
    stage = instance.stages[job.stage]
    return {F: stage.t_f, B: back(stage), W: stage.t_w}[job.kind]


def observers(instance: Instance, device: int, objective: str) -> dict[int, str]:
    """In whose windows (:class:`Windows`) a device is watched, and how to say it."""
    if objective == "makespan":
        return {instance.num_devices: "the whole step"}
    first = instance.stages[0].device
    return {device: "its own window", first: f"the window of device {first}"}
