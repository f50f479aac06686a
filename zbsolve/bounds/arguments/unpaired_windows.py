"""Unpaired windows: what runs before a device's first backward and after its last F is in no F&B pair."""

from __future__ import annotations

from collections.abc import Iterator

from zbsolve.bounds.argument import Argument, Known
from zbsolve.bounds.bound import Bound
from zbsolve.bounds.waits import back, room, single_chain
from zbsolve.bounds.ways import least_way_out
from zbsolve.model.instance import Instance, Stage


class UnpairedWindows(Argument):
    """See :func:`overlap_bounds`."""

    name = "unpaired windows"

    def applies(self, instance: Instance) -> bool:
        """Elsewhere others say more."""
        return not single_chain(instance)

    def bounds(self, known: Known) -> Iterator[Bound]:
        """:func:`overlap_bounds`."""
        return overlap_bounds(known.instance, known.objective)


def overlap_bounds(instance: Instance, objective: str) -> Iterator[Bound]:
    """What runs before a device's first backward and after its last F runs alone.

    *Savings.* F of s beside BW of q saves at most ``u(s)``, the lesser of s's own saving and the best of the
    device over its backwards' least times; likewise at most ``u(q)``. So the device's work is at least
    ``base = m * sum(t_f + t_r + min_backward - u)``, and by u(s) more for each F of s, or each backward of s,
    that is in no pair: whichever of both sums is higher, or any mean of the two.

    *First window.* The device's first backward is one of its last stage of some replica (those of its earlier
    stages wait for it), hence starts D after the device's first task or later: its micro-batch's way from the
    first of these stages to the end of the chain and back, R of the last stage included. Until then only F's
    and R's run, these F's in no pair. What runs there takes time away from the rest: an F of s
    ``t_f - u(s)``, an R ``t_r``; the whole of the window is at least D. So all is at least ``base + D - K``,
    where K is the most that such tasks of total length D take away. (None takes away more than its length:
    to run more than D never helps.)

    *Last window.* The device's last F is one of its last stage of some replica, and E after its end, or
    later, that micro-batch is home: on the device in the span, at the model's first stage in the makespan.
    After that F only R's and backwards run, these in no pair: a whole backward takes ``min_backward - u``
    away from the rest, a W whose B ran before ``min_backward - u - t_b``.

    Where the first backward starts before the last F ends, no time lies in both windows, and both count, with
    the savings lost in the first counted ``a`` and in the last ``1 - a`` times; else nothing runs in a pair.
    What takes time away in the windows is held in memory then (F's and R's until the first backward; at
    the last F, what is in flight or pending), so the cap limits K, too.
    """
    m = instance.num_microbatches
    for device in range(instance.num_devices):
        held = instance.stages_on(device)
        stages = [instance.stages[s] for s in held]
        chains = [
            [s for s in held if s // instance.chain == replica]
            for replica in sorted({s // instance.chain for s in held})
        ]
        free = room(instance, device)
        most = max(_fused_saving(stage) for stage in stages)
        saved = [min(stage.pair_saving, most) for stage in stages]
        base = m * sum(
            stage.t_f + (stage.t_r or 0.0) + stage.min_backward - u
            for stage, u in zip(stages, saved, strict=True)
        )
        out = min(_way_from_first(instance, chain) for chain in chains)
        home = min(_way_after_last(instance, chain, objective) for chain in chains)
        head = min(least_way_out(instance, s) for s in held) if objective == "makespan" else 0.0
        unpaired = base + m * sum(saved)

        first = {a: out - _taken_first(stages, saved, out, free, m, a) for a in (0.0, 0.5, 1.0)}
        last = {a: home - _taken_last(stages, saved, home, free, m, a) for a in (0.0, 0.5, 1.0)}
        apart = max(first[share] + last[1.0 - share] for share in first)
        idle = max(first[1.0], last[1.0], min(apart, unpaired - base))
        yield Bound(
            head + base + idle,
            UnpairedWindows.name,
            f"device {device}: {base:g} of work where all is paired that may be, and {idle:g} more: nothing "
            "pairs before its first backward and after its last F",
            device,
        )


def _fused_saving(stage: Stage) -> float:
    """What a pair saves of F and the stage's shortest whole backward."""
    fused = stage.min_backward if stage.t_bw is None else stage.t_bw
    return max(0.0, stage.pair_saving - (fused - stage.min_backward))


def _way_from_first(instance: Instance, chain: list[int]) -> float:
    """From the start of a micro-batch's F on the first of a device's stages to its backward on the last."""
    end = chain[-1] - chain[-1] % instance.chain + instance.chain - 1
    way = least_way_out(instance, end) - least_way_out(instance, chain[0])
    way += instance.stages[end].t_f + (instance.stages[end].t_r or 0.0)
    return way + sum(back(instance.stages[q]) + instance.hop(q - 1) for q in range(chain[-1] + 1, end + 1))


def _way_after_last(instance: Instance, chain: list[int], objective: str) -> float:
    """From the end of a micro-batch's F on the last of a device's stages to its end there, or at home."""
    end = chain[-1] - chain[-1] % instance.chain + instance.chain - 1
    home = chain[0] if objective == "span" else chain[0] - chain[0] % instance.chain
    way = sum(instance.hop(q - 1) + instance.stages[q].t_f for q in range(chain[-1] + 1, end + 1))
    way += instance.stages[end].t_r or 0.0
    way += sum(back(instance.stages[q]) for q in range(home, end + 1))
    way += sum(instance.hop(q) for q in range(home, end))
    return way + max(0.0, instance.stages[home].min_backward - back(instance.stages[home]))


def _taken_first(
    stages: list[Stage], saved: list[float], length: float, free: float, m: int, share: float
) -> float:
    """What F's and R's of a total length take away from the rest, ``share`` of the savings lost."""
    items = [
        (stage.t_f, stage.t_f - share * u, stage.kept_by_forward)
        for stage, u in zip(stages, saved, strict=True)
    ]
    items += [(st.t_r or 0.0, st.t_r or 0.0, st.mem_b - st.kept_by_forward) for st in stages]
    return _most_taken(items, length, free, m)


def _taken_last(
    stages: list[Stage], saved: list[float], length: float, free: float, m: int, share: float
) -> float:
    """What R's, backwards and W's of a total length take away from the rest, likewise."""
    items = [(stage.t_r or 0.0, stage.t_r or 0.0, 0.0) for stage in stages]
    for stage, u in zip(stages, saved, strict=True):
        whole = stage.min_backward - share * u
        items.append((stage.min_backward, whole, stage.kept_by_forward))
        items.append((stage.t_w, max(0.0, whole - stage.t_b), stage.mem_w))
    return _most_taken(items, length, free, m)


def _most_taken(items: list[tuple[float, float, float]], length: float, free: float, m: int) -> float:
    """The most that tasks of a total length, m of each kind at most, take away; each (length, taken, memory).

    Parts of tasks count, and length and memory are each looked at alone: no less than the truth.
    """
    found = []
    for limit, column in ((length, 0), (free, 2)):
        left, taken = limit, 0.0
        sizes = [(item[1], item[column]) for item in items if item[1] > 0]
        for worth, size in sorted(sizes, key=lambda item: item[1] / item[0]):
            share = m if size * m <= left else left / size
            left -= share * size
            taken += share * worth
        found.append(taken)
    return min(found)
