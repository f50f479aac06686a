"""Combinatorial lower bounds on makespan and span, each with the proof that it holds.

Every bound is a function of the instance alone and valid for every schedule that
:func:`zbsolve.schedule.check` accepts, with unrounded durations. A certificate carries the bound's name, so
that anyone can re-derive it.

Micro-batches are identical, so some best schedule takes them in order in each (stage, kind): sorting the
completion times of any schedule breaks no rule and changes no cost. Proofs may assume that order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zbsolve.graph import B, F, TaskKind, W
from zbsolve.instance import MEMORY_RTOL, Instance, Stage


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound: its value, the method that proves it, the device it looks at, and a sentence."""

    value: float
    method: str
    statement: str
    device: int | None = None


def back(stage: Stage) -> float:
    """Shortest time from the start of a stage's backward to its input gradient."""
    return stage.t_b if stage.t_bw is None else min(stage.t_b, stage.t_bw)


# --- chains ------------------------------------------------------------------------------------


def forward_head(instance: Instance, s: int) -> float:
    """Earliest start of any F of stage s: the F's and hops before it."""
    return sum(instance.stages[q].t_f + instance.hop(q) for q in range(s))


def backward_tail(instance: Instance, s: int) -> float:
    """Least time from the end of a backward of stage s to the end of the step: upstream backwards and hops.

    The last of them, at stage 0, counts with its W (or fused).
    """
    if s == 0:
        return 0.0
    tail = sum(back(instance.stages[q]) + instance.hop(q) for q in range(1, s)) + instance.hop(0)
    return tail + instance.stages[0].min_backward


def after_backward_starts(instance: Instance, s: int) -> float:
    """Least time from the start of a backward of stage s to the end of the step."""
    stage = instance.stages[s]
    return max(stage.min_backward, back(stage) + backward_tail(instance, s))


def round_trip(instance: Instance, a: int, b: int) -> float:
    """Least time from the end of F of stage a to the start of the backward of stage b, one micro-batch.

    The path runs on from a through the last stage and back to b.
    """
    last = instance.num_stages - 1
    out = sum(instance.hop(q - 1) + instance.stages[q].t_f for q in range(a + 1, last + 1))
    home = sum(instance.hop(q) + back(instance.stages[q + 1]) for q in range(b, last))
    return out + home


# --- bounds on one device's window ----------------------------------------------------------------


def path_bound(instance: Instance) -> Bound:
    """One micro-batch needs the whole path: all F, all backwards, all hops.

    Proof: its tasks form a chain by the dependencies; stage 0's W, if split, follows its B.
    """
    value = instance.stages[0].t_f + round_trip(instance, 0, 0) + instance.stages[0].min_backward
    return Bound(value, "path", f"one micro-batch's whole path takes {value:g}")


def machine_bound(instance: Instance, device: int) -> Bound:
    """Heads and tails on one device (the bottleneck bound, strengthened over all pairs of thresholds).

    Every task has a head r (least time before it can start, by its chain of predecessors) and a tail q
    (least time from its end to the end of the step). For any set of tasks of one device, the makespan is
    at least ``min r + sum of durations + min q``: the device starts the first of them no earlier than
    min r, works one at a time, and after the last of them min q must pass. All sets of the form
    {r >= a, q >= b} are tried; with identical micro-batches these are sets of whole (stage, kind) classes.

    Fusing: where t_bw is given, a set holding both B and W of a stage counts the shorter of the two
    ways; one holding only B counts ``back``. A set never holds W without its B's alternative unless the stage
    cannot fuse (then W is counted alone).
    """
    m = instance.num_microbatches
    stages = instance.stages_on(device)
    heads: dict[tuple[int, TaskKind], float] = {}
    tails: dict[tuple[int, TaskKind], float] = {}
    for s in stages:
        stage = instance.stages[s]
        heads[s, F] = forward_head(instance, s)
        heads[s, B] = heads[s, F] + stage.t_f + round_trip(instance, s, s)
        heads[s, W] = heads[s, B] + stage.t_b
        tails[s, F] = round_trip(instance, s, s) + after_backward_starts(instance, s)
        tails[s, B] = backward_tail(instance, s)
        tails[s, W] = 0.0
    best = Bound(-1.0, "", "")
    for a in set(heads.values()):
        for b in set(tails.values()):
            chosen = [{k for k in (F, B, W) if heads[s, k] >= a and tails[s, k] >= b} for s in stages]
            if not any(chosen):
                continue
            work = m * sum(
                _class_work(instance.stages[s], kinds) for s, kinds in zip(stages, chosen, strict=True)
            )
            if a + work + b > best.value:
                best = Bound(
                    a + work + b,
                    "bottleneck",
                    f"device {device}: {a:g} before its work can begin, {work:g} of work, {b:g} after it",
                    device,
                )
    return best


def _class_work(stage: Stage, kinds: set[TaskKind]) -> float:
    """Least device time of one micro-batch's tasks of the given kinds on a stage."""
    work = stage.t_f if F in kinds else 0.0
    if B in kinds:
        return work + (stage.min_backward if W in kinds else back(stage))
    return work + (stage.t_w if W in kinds and stage.t_bw is None else 0.0)


def work_bound(instance: Instance, device: int) -> Bound:
    """Span: a device's window holds all its work."""
    work = instance.device_work(device)
    return Bound(work, "work", f"device {device} works {work:g}", device)


# --- memory ------------------------------------------------------------------------------------


def _room(instance: Instance, device: int) -> float:
    """Memory for activations, with the tolerance that the checker grants."""
    cap = instance.cap(device)
    return cap - instance.static(device) + MEMORY_RTOL * max(1.0, cap) if cap < math.inf else math.inf


def _most_in_flight(instance: Instance, device: int, s: int) -> int:
    """Most F's of a stage that can run before a backward of it starts (m when memory sets no limit)."""
    stage, room = instance.stages[s], _room(instance, device)
    if math.isinf(room) or stage.mem_b == 0:
        return instance.num_microbatches
    growth = stage.growth if stage.t_bw is None else 0.0
    return max(1, min(instance.num_microbatches, int((room - growth) / stage.mem_b)))


def first_window_idle(instance: Instance, device: int) -> float:
    """Idle forced on a device between its first F and its first backward.

    The first backward on the device belongs to its last stage; it starts no earlier than the path from the
    end of the first F through the rest of the model allows (:func:`round_trip`). Nothing was freed before, so
    only F's ran, and when it starts all of them are held together with its growth. The
    most time that F's can fill under that memory is at most the fractional knapsack's optimum.
    """
    stages = instance.stages_on(device)
    m = instance.num_microbatches
    length = instance.stages[stages[0]].t_f + round_trip(instance, stages[0], stages[-1])
    last = instance.stages[stages[-1]]
    if len(stages) == 1:  # whole F's only
        return max(0.0, length - _most_in_flight(instance, device, stages[0]) * last.t_f)
    room = _room(instance, device) - (last.growth if last.t_bw is None else 0.0)
    filled = 0.0
    by_value = sorted(
        (instance.stages[s] for s in stages),
        key=lambda stage: stage.mem_b / stage.t_f if stage.t_f else math.inf,
    )
    for stage in by_value:
        number = m if stage.mem_b == 0 else min(m, max(0.0, room) / stage.mem_b)
        filled += number * stage.t_f
        room -= number * stage.mem_b if stage.mem_b else 0.0
    return max(0.0, length - filled)


def last_window_idle(instance: Instance, device: int) -> list[float]:
    """Idle forced between a one-stage device's last F and its last micro-batch's backward.

    Entry x - 1 holds when x of the device's W's run after the last backward (its own is one). Let i be
    the micro-batches in flight at the start of the last F (itself included) and w the pending W's:
    ``i mem_b + w mem_w`` is within the cap. The last backward starts no earlier than a round trip RT after the
    end of the last F. In between only the other i - 1 backwards can run, and those of the w + i - 1
    pending W's that are not left for later: idle >= RT - (i - 1) t_b - (w + i - 1 - (x - 1)) t_w,
    minimised over all (i, w) that fit; more pending W's only mean more possible work, so w is the largest.
    Where the stage can fuse, each of the i - 1 may take max(t_b + t_w, t_bw).

    Empty when the cap does not force the last F behind the first backward (m F's fit before it): then
    this window may overlap the first one.
    """
    (s,) = instance.stages_on(device)
    stage, m = instance.stages[s], instance.num_microbatches
    room = _room(instance, device)
    if _most_in_flight(instance, device, s) >= m:
        return []
    i = np.arange(1, m + 1)
    i = i[i * stage.mem_b <= room]
    pending = m - i
    if stage.mem_w > 0:
        pending = np.minimum(pending, np.floor((room - i * stage.mem_b) / stage.mem_w).astype(np.int64))
    fused_extra = 0.0 if stage.t_bw is None else max(0.0, stage.t_bw - stage.t_b - stage.t_w)
    trip = round_trip(instance, s, s)
    result = []
    for x in range(1, m + 1):
        runnable = np.maximum(0, pending + i - x)
        work = (i - 1) * (stage.t_b + fused_extra) + runnable * stage.t_w
        result.append(max(0.0, trip - float(work.max())))
    return result


def two_windows_bound(instance: Instance, device: int, objective: str) -> Bound:
    """A device's work plus the idle that memory and the round trip force at both ends of its window.

    :func:`first_window_idle` and :func:`last_window_idle` lie in disjoint intervals (the last F starts after
    the first backward), so both add to the work. For the makespan the head comes before, and after the last
    backward's B either the x W's left for then or the chain of upstream backwards, whichever is
    longer, minimised over x. Devices with several stages use the first window only.
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
            to_last_backward = m * sum(instance.stages[q].t_f + back(instance.stages[q]) for q in stages)
            value = head + max(value, first + to_last_backward + tail)
    return Bound(
        value,
        "two windows",
        f"device {device}: {work:g} of work, and memory and round trip force {value - work:g} around it",
        device,
    )


def memory_cycle_bound(instance: Instance, device: int, objective: str) -> Bound | None:
    """With at most k micro-batches of a stage in flight, every k-th F waits for a whole round trip.

    At the start of F(j + k) the k + 1 micro-batches j to j + k cannot all be held, and they are taken in
    order, so the backward of j has ended: ``start F(j+k) >= start F(j) + t_f + RT + back``. From F(0)
    there are q = ceil(m / k) - 1 such steps; then the remaining m - q k F's run one after another, and the
    last of them makes its own round trip.
    """
    best: Bound | None = None
    m, room = instance.num_microbatches, _room(instance, device)
    for s in instance.stages_on(device):
        stage = instance.stages[s]
        if math.isinf(room) or stage.mem_b == 0:
            continue
        k = max(1, int(room / stage.mem_b))
        if k >= m:
            continue
        trip = round_trip(instance, s, s)
        cycle = stage.t_f + trip + back(stage)
        steps = -(-m // k) - 1
        value = steps * cycle + (m - steps * k) * stage.t_f + trip
        if objective == "makespan":
            value += forward_head(instance, s) + after_backward_starts(instance, s)
        else:
            value += stage.min_backward
        if best is None or value > best.value:
            best = Bound(
                value,
                "memory cycle",
                f"device {device}: at most {k} micro-batches of stage {s} in flight, "
                f"each round trip takes {cycle:g}",
                device,
            )
    return best


def memory_area_bound(instance: Instance, device: int, objective: str) -> Bound | None:
    """Memory times time: what all micro-batches hold on a device must fit under its cap.

    On stage s a micro-batch holds mem_b for at least ``t_f + RT + t_b``, then, split, mem_w for at least
    t_w (the W's own run), and the growth while B runs: an area A, the lesser of split and fused. The device's window T offers at most ``room * T``, less the ramp at its beginning: before its n-th F
    starts, (n - 1) times the shortest F have passed, so until the cap is reached not all of it is in use.
    With g the largest mem_b and t the shortest t_f of the device the memory in use at time u after
    the first start is at most g (floor(u / t) + 1). Hence T >= (m A + lost) / room with
    lost = sum over n >= 1 of max(0, room - n g) t.
    """
    room = _room(instance, device)
    if math.isinf(room) or room <= 0:
        return None
    area = 0.0
    stages = [instance.stages[s] for s in instance.stages_on(device)]
    for s in instance.stages_on(device):
        stage = instance.stages[s]
        way = stage.t_f + round_trip(instance, s, s)
        split = (
            stage.mem_b * (way + stage.t_b)
            + stage.growth * stage.t_b
            + stage.mem_w * stage.t_w
            + stage.peak_b * stage.t_b
            + stage.peak_w * stage.t_w
        )
        if stage.t_bw is None:
            backward = split
        else:
            backward = min(split, stage.mem_b * (way + stage.t_bw) + stage.peak_fused * stage.t_bw)
        area += backward + stage.peak_f * stage.t_f
    gain = max(stage.mem_b + stage.growth + stage.peak_f for stage in stages)
    shortest = min(stage.t_f for stage in stages)
    transient = max(max(stage.peak_b, stage.peak_w, stage.peak_fused) for stage in stages)
    lost = 0.0
    if gain > 0 and transient == 0:
        full = int(room / gain)
        lost = shortest * (full * room - gain * full * (full + 1) / 2)
    value = (instance.num_microbatches * area + lost) / room
    if objective == "makespan":
        value += forward_head(instance, instance.stages_on(device)[0])
    return Bound(
        value,
        "memory area",
        f"device {device}: activations held over time fill its {room:g} of memory for {value:g}",
        device,
    )


def all_bounds(instance: Instance, objective: str) -> Iterator[Bound]:
    """Every combinatorial bound that applies to an instance.

    The path bound serves both objectives: its chain begins and ends on the device of stage 0.
    """
    yield path_bound(instance)
    for device in range(instance.num_devices):
        yield machine_bound(instance, device) if objective == "makespan" else work_bound(instance, device)
        yield two_windows_bound(instance, device, objective)
        for bound in (
            memory_cycle_bound(instance, device, objective),
            memory_area_bound(instance, device, objective),
        ):
            if bound is not None:
                yield bound


def best_bound(instance: Instance, objective: str) -> Bound:
    """The highest of :func:`all_bounds`."""
    return max(all_bounds(instance, objective), key=lambda bound: bound.value)
