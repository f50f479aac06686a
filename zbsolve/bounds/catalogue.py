"""Combinatorial lower bounds on makespan and span, each with the proof that it holds.

Every bound is a function of the instance alone and valid for every schedule that
:func:`zbsolve.model.judge.check` accepts, with unrounded durations and exactly kept times. (For rounding, the
checker lets each single time be off by 1e-9 of the makespan; a schedule that used this on every task of a
long chain could end that much a task below a bound. Orders that are timed anew never do.) A certificate
carries the bound's name, so that anyone can re-derive it.

Canonical order: the proofs assume that each stage takes the micro-batches in order: its F's, its R's, its
backwards (B or BW), its W's. Take any valid schedule and an order of all its tasks that keeps its times, its
devices' orders and its dependencies. On each stage hand the n-th F to micro-batch n, likewise the n-th R and
the n-th backward, and the n-th W to the micro-batch of the n-th B. If every micro-batch's a ends before its b
starts (by a lag), then so does the n-th a before the n-th b: the first n b's have n a's before them, the last
of which is no earlier than the n-th a. So each dependency is kept. Tasks of one kind and stage are equally
long and hold equally much: neither times nor memory change, and the relabelled schedule is valid at the same
cost.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from zbsolve.bounds.bound import Bound
from zbsolve.bounds.memory_limits import forward_work, most_in_flight, most_put_off
from zbsolve.bounds.waits import Lag, back, room
from zbsolve.bounds.ways import backward_tail, forward_head, round_trip
from zbsolve.bounds.windows import Windows, windows
from zbsolve.bounds.with_options import overlap_bounds, work_bounds
from zbsolve.model.instance import Instance
from zbsolve.model.recompute import instant_recomputation

FloatArray = NDArray[np.float64]


# --- memory ------------------------------------------------------------------------------------


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
        "two windows",
        f"device {device}: {work:g} of work, and memory and round trip force {value - work:g} around it",
        device,
    )


def window_bounds(
    instance: Instance, objective: str, lags: tuple[Lag, ...] = (), found: Windows | None = None
) -> Iterator[Bound]:
    """Longest paths through dependencies and memory waits, and one machine's work between them.

    :mod:`zbsolve.bounds.waits` gives every task a head (least time before its start) and a tail (least
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

    ``lags`` join the precedences. Each holds in every canonical schedule of the instance: what n + 1
    consecutive micro-batches do in it is a canonical schedule of these alone (all others only take time,
    memory and links away), so the least lag that an exact model finds for n + 1 micro-batches is one for any
    of them; likewise the least time from an F of the last n to the end of the step.

    ``found`` are the windows of the instance with these lags, where they were computed already.
    """
    found = windows(instance, lags) if found is None else found
    for device in range(instance.num_devices):
        for observer, watched in _observers(instance, device, objective).items():
            value = preemptive_one_machine(_observed_jobs(instance, found, device, observer))
            yield Bound(
                value,
                "one machine, proven lags" if lags else "one machine",
                f"device {device}: its tasks, with the least times before and after each in {watched}, "
                f"need {value:g}{''.join(map(_say_lag, lags))}",
                device,
                lags,
            )


def _observers(instance: Instance, device: int, objective: str) -> dict[int, str]:
    """In whose windows (:class:`zbsolve.bounds.windows.Windows`) a device is watched, and how to say it."""
    if objective == "makespan":
        return {instance.num_devices: "the whole step"}
    first = instance.stages[0].device
    return {device: "its own window", first: f"the window of device {first}"}


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


def last_forward_bounds(instance: Instance, objective: str, found: Windows | None = None) -> Iterator[Bound]:
    """What a device must have run before its last F, and what follows that F elsewhere.

    The last F of a device is that of its last stage for micro-batch m - 1: its others come before it.
    When it starts, the cap holds for what is in flight and pending then, so only so much backward work can
    have been put off until after it (:func:`zbsolve.bounds.memory_limits.most_put_off`); all the rest, and
    every F, takes its time on the device before that F ends. After it comes its micro-batch's way on and back
    (``tails``), in whose window soever the device is watched.

    Where not all F's fit into memory together, the last one comes after the first backward, which is
    that of the device's last stage for micro-batch 0 and has its own head; before it the device can only
    run F's that fit into memory at once (:func:`zbsolve.bounds.memory_limits.forward_work`), and only the
    others count after that head.

    Where a stage can fuse, a backward in flight takes at least ``min_backward``; that of a pending W has
    spent t_b of it already. ``found`` are the windows of the instance, where they were computed already.
    """
    found = windows(instance) if found is None else found
    m = instance.num_microbatches
    for device in range(instance.num_devices):
        stages = instance.stages_on(device)
        put_off = most_put_off(instance, device)
        work = instance.device_work(device)
        first, last = stages[0], stages[-1]
        crowded = m * sum(instance.stages[s].mem_b for s in stages) > room(instance, device)
        before_backward = forward_work(instance, device)
        for observer, watched in _observers(instance, device, objective).items():
            head = 0.0 if observer == device else float(found.heads[0, first, 0, observer])
            if crowded:
                head = max(head, float(found.heads[1, last, 0, observer]) - before_backward)
            value = head + work - put_off + float(found.tails[0, last, m - 1, observer])
            if math.isfinite(value):
                yield Bound(
                    value,
                    "last forward",
                    f"device {device}: memory lets {put_off:g} of its work wait until after its last F, "
                    f"whose micro-batch has {found.tails[0, last, m - 1, observer]:g} to go; in {watched}",
                    device,
                )


def memory_area_bound(instance: Instance, device: int, objective: str) -> Bound | None:
    """Memory times time: what all micro-batches hold on a device must fit under its cap.

    On stage s a micro-batch holds mem_b for at least ``t_f + RT + t_b`` (where it recomputes mem_r so long,
    the rest of mem_b for ``t_r + t_b``), then, split, mem_w for at least t_w (the W's own run), and the
    growth while B runs: an area A, the lesser of split and fused.
    All of it lies within the device's window, which has to offer m A. Between tasks no more is held than
    during the task before, so the memory in use is at most ``room`` at all times; and at time u after the
    first start at most floor(u / t) + 1 F's have started, t being the device's shortest t_f, so it is at most
    g (floor(u / t) + 1), g being the most that one (stage, micro-batch) holds. The second limit is used only
    where backwards add no transient. The window is at least the least T whose integral of the lesser of both
    limits reaches m A.
    """
    free = room(instance, device)
    if math.isinf(free) or free <= 0:
        return None
    area = 0.0
    stages = [instance.stages[s] for s in instance.stages_on(device)]
    for s in instance.stages_on(device):
        stage = instance.stages[s]
        kept, t_r = stage.kept_by_forward, stage.t_r or 0.0
        before = kept * (stage.t_f + round_trip(instance, s, s)) + (stage.mem_b - kept) * t_r
        split = (
            before
            + stage.mem_b * stage.t_b
            + stage.growth * stage.t_b
            + stage.mem_w * stage.t_w
            + stage.peak_b * stage.t_b
            + stage.peak_w * stage.t_w
        )
        if stage.t_bw is None:
            backward = split
        else:
            backward = min(split, before + (stage.mem_b + stage.peak_fused) * stage.t_bw)
        area += backward + stage.peak_f * stage.t_f
    gain = max(stage.mem_b + stage.growth + stage.peak_f for stage in stages)
    shortest = min(stage.t_f for stage in stages)
    transient = max(max(stage.peak_b, stage.peak_w, stage.peak_fused) for stage in stages)
    needed = instance.num_microbatches * area
    value = needed / free if transient > 0 else _time_to_offer(needed, free, gain, shortest)
    if objective == "makespan":
        value += forward_head(instance, instance.stages_on(device)[0])
    return Bound(
        value,
        "memory area",
        f"device {device}: activations held over time fill its {free:g} of memory for {value:g}",
        device,
    )


def _time_to_offer(area: float, free: float, gain: float, every: float) -> float:
    """Least T for which the integral of min(free, gain (floor(u / every) + 1)) over [0, T] is ``area``."""
    if gain == 0 or every == 0:
        return area / free
    # n whole steps offer gain every n (n + 1) / 2, until the area or the room is reached.
    steps = (math.sqrt(1 + 8 * area / gain / every) - 1) / 2
    n = math.floor(min(steps, free / gain))
    return n * every + (area - gain * every * n * (n + 1) / 2) / min(free, gain * (n + 1))


# Bounds of one device that read nothing of the others but how long the ways are: the sums of F's, backwards
# and hops before its first stage, between its stages, and on from its last one and back. Families of joint
# decisions stand on it (:mod:`zbsolve.partition.relaxation`): there the others are free, and each such way is
# put in as one stage. A bound that reads more of them (their work, their memory, how many there are) holds
# for an instance but not there: it has no place here. ``tests/test_one_device_bounds.py`` watches over that.
ONE_DEVICE_BOUNDS: tuple[Callable[[Instance, int, str], Bound | None], ...] = (
    two_windows_bound,
    memory_area_bound,
)


def all_bounds(
    instance: Instance, objective: str, enough: Callable[[], bool] = lambda: False
) -> Iterator[Bound]:
    """Every combinatorial bound that applies to an instance; once ``enough`` says yes, the cheap ones."""
    if instance.has_pairs or instance.replicas > 1:  # the proofs above know R, but neither of these
        for value, statement, device in work_bounds(instance, objective):
            yield Bound(value, "work and way", statement, device)
        for value, statement, device in overlap_bounds(instance, objective):
            yield Bound(value, "unpaired windows", statement, device)
        return
    for device in range(instance.num_devices):
        for of_device in ONE_DEVICE_BOUNDS:
            bound = of_device(instance, device, objective)
            if bound is not None:
                yield bound
    if enough():
        return
    found = windows(instance, enough=enough)
    yield from window_bounds(instance, objective, found=found)
    # It says what memory lets a device put off; R's time is none of that work.
    yield from last_forward_bounds(instant_recomputation(instance), objective, found)


def best_bound(instance: Instance, objective: str, enough: Callable[[], bool] = lambda: False) -> Bound:
    """The highest of :func:`all_bounds`."""
    return max(all_bounds(instance, objective, enough), key=lambda bound: bound.value)
