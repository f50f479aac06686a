"""Two windows: the idle that memory and the round trip force before a device's first backward and after its
last F."""

from __future__ import annotations

import numpy as np

from zbsolve.bounds.argument import OneDeviceArgument
from zbsolve.bounds.bound import Bound
from zbsolve.bounds.memory_limits import forward_work, most_in_flight
from zbsolve.bounds.waits import back, room, single_chain
from zbsolve.bounds.ways import backward_tail, forward_head, round_trip
from zbsolve.model.instance import Instance


class TwoWindows(OneDeviceArgument):
    """See :func:`two_windows_bound`."""

    name = "two windows"

    def applies(self, instance: Instance) -> bool:
        """One chain of stages, each device at one task at a time."""
        return single_chain(instance)

    def of_device(self, instance: Instance, device: int, objective: str) -> Bound:
        """:func:`two_windows_bound`."""
        return two_windows_bound(instance, device, objective)


def first_window_idle(instance: Instance, device: int) -> float:
    """Idle forced on a device between its first F and its first backward.

    The first F on the device is that of its first stage, the first backward that of its last stage, both for
    micro-batch 0: each other one has them before it. That backward starts no earlier than the path from the
    end of that F through the rest of the model and back allows (:func:`round_trip`; the part of this
    path that runs on the device itself is F's, too). Before it no backward and so no W ran on the device:
    only F's and R's did, nothing was freed, and when it starts all of them are held together with its growth
    (none if it may be fused). The time of whole F's and R's under that memory, at most m a stage, is at most
    the optimum of the fractional knapsack, which takes stages by memory per time.
    """
    stages = instance.stages_on(device)
    length = instance.stages[stages[0]].t_f + round_trip(instance, stages[0], stages[-1])
    return max(0.0, length - forward_work(instance, device))


def last_window_idle(instance: Instance, device: int) -> list[float]:
    """Idle forced between a one-stage device's last F and its last micro-batch's backward.

    Entry x - 1 holds when x of the device's W's run after the last backward (its own is one). Let i be the
    number in flight (F started, backward not ended) at the start of the last F, itself included, and w the
    pending W's (B ended, W not): ``i mem_b + w mem_w`` is within the cap and i + w <= m. The last backward
    starts no earlier than a round trip RT after the end of the last F. In between only the other i - 1
    backwards can run, and those of the w + i W's to come that are not left for later: idle >=
    RT - (i - 1) t_b - (w + i - x) t_w, minimised over all (i, w) that fit; more pending W's only mean more
    possible work, so w is the largest.

    Where the stage can fuse, each of the i - 1 takes at most max(t_b + t_w, t_bw) in between, and the w
    pending W's come on top: the first entry holds (the others count a W of every micro-batch: not for use).
    Where the stage recomputes, i F's in flight hold at least ``mem_r`` each, and up to i R's run in between.
    Entries never fall with x, so the first one is the least.

    Empty when the cap does not force the last F behind the first backward (m F's fit before it): then
    this window may overlap the first one. Empty, too, when not even one micro-batch fits.
    """
    (s,) = instance.stages_on(device)
    stage, m = instance.stages[s], instance.num_microbatches
    free = room(instance, device)
    kept, t_r = stage.kept_by_forward, stage.t_r or 0.0
    if most_in_flight(instance, device, s) >= m or kept > free:
        return []
    i = np.arange(1, m + 1)
    i = i[i * kept <= free]
    pending = m - i
    if stage.mem_w > 0:
        with np.errstate(over="ignore"):  # a mem_w of next to nothing: as many as there are
            fitting = (free - i * kept) / stage.mem_w
        pending = np.floor(np.minimum(pending, fitting)).astype(np.int64)
    fused_extra = 0.0 if stage.t_bw is None else max(0.0, stage.t_bw - stage.t_b - stage.t_w)
    trip = round_trip(instance, s, s)
    result = []
    for x in range(1, m + 1):
        runnable = np.maximum(0, pending + i - x)
        work = (i - 1) * (stage.t_b + fused_extra) + i * t_r + runnable * stage.t_w
        result.append(max(0.0, trip - float(work.max())))
    return result


def two_windows_bound(instance: Instance, device: int, objective: str) -> Bound:
    """A device's work plus the idle that memory and the round trip force at both ends of its window.

    The windows of :func:`first_window_idle` (up to the start of the first backward) and
    :func:`last_window_idle` (from the end of the last F) are disjoint, the last F starting after the first
    backward, so both add to the work. Devices with several stages use the first window only.

    For the makespan the head comes before the first F. Without fusing, all but the x W's left for later
    (``1 <= x <= m``: at least the last backward's own) run before the last B ends, with both windows' idle
    between; after it come those x W's on this device and the chain of upstream backwards on others, so the
    longer of the two; minimised over x. Otherwise two simpler statements: work and windows; and all F's, R's
    and backwards of the device with the first window before, the chain after the end of its last backward,
    which is that of its first stage.
    """
    stages = instance.stages_on(device)
    first = first_window_idle(instance, device)
    last = last_window_idle(instance, device) if len(stages) == 1 else []
    work = instance.device_work(device)
    value = work + first + min(last, default=0.0)
    if objective == "makespan":
        s = stages[0]
        stage, head, tail = instance.stages[s], forward_head(instance, s), backward_tail(instance, s)
        if last and stage.t_bw is None:
            value = head + min(
                work - x * stage.t_w + first + idle + max(x * stage.t_w, tail)
                for x, idle in enumerate(last, start=1)
            )
        else:
            m = instance.num_microbatches
            to_last_backward = m * sum(
                instance.stages[q].t_f + (instance.stages[q].t_r or 0.0) + back(instance.stages[q])
                for q in stages
            )
            value = head + max(value, first + to_last_backward + tail)
    return Bound(
        value,
        TwoWindows.name,
        f"device {device}: {work:g} of work, and memory and round trip force {value - work:g} around it",
        device,
    )
