"""Memory area: what all micro-batches hold on a device, for how long, has to fit into its memory and time."""

from __future__ import annotations

import math

from zbsolve.bounds.argument import OneDeviceArgument
from zbsolve.bounds.bound import Bound
from zbsolve.bounds.waits import room, single_chain
from zbsolve.bounds.ways import forward_head, round_trip
from zbsolve.model.instance import Instance


class MemoryArea(OneDeviceArgument):
    """See :func:`memory_area_bound`."""

    name = "memory area"

    def applies(self, instance: Instance) -> bool:
        """One chain of stages, each device at one task at a time."""
        return single_chain(instance)

    def of_device(self, instance: Instance, device: int, objective: str) -> Bound | None:
        """:func:`memory_area_bound`."""
        return memory_area_bound(instance, device, objective)


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
        MemoryArea.name,
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
