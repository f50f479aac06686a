"""The same model on the same devices under another placement: to set every schedule beside every other.

A schedule of another placement needs another cut: two chunks per device where the instance has one, or one
where it has several. Without the layers' own figures the cut can only be guessed: a stage is cut into two
equal halves, or neighbours are joined; model order is kept, and pieces go to the placement's devices.
At equal stages this is exact. For unequal ones it is a first guess, and what uses it says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbsolve.errors import InputError
from zbsolve.model.instance import Instance, Placement, Stage, place

_TIMES = ("t_f", "t_b", "t_w", "t_bw", "t_r", "t_fb")
_HELD = ("mem_b", "mem_w", "mem_r")
_TRANSIENT = ("peak_f", "peak_b", "peak_w", "peak_bw")


def recut(instance: Instance, placement: Placement) -> Instance:
    """The instance with one chunk per device (linear) or two (loop, V), in that placement.

    Static memory is shared out evenly over the stages of a device first. A hop inside of a halved stage
    counts like the longer of the hops at its ends.
    """
    p, v = instance.num_devices, 1 if placement == "linear" else 2
    instance = one_replica(instance)
    if instance.num_stages % p:
        raise InputError(
            f"{instance.num_stages} stages on {p} devices cannot be cut anew: give a multiple of {p}"
        )
    per_device = instance.num_stages // p
    static = [
        instance.static(stage.device) / len(instance.stages_on(stage.device)) for stage in instance.stages
    ]
    hops = _boundaries(instance, instance.t_comm)
    transfers = None if instance.t_transfer is None else _boundaries(instance, instance.t_transfer)
    pieces = list(instance.stages)
    if per_device < v:
        pieces = [half for stage in pieces for half in (_scaled(stage, 0.5),) * 2]
        static = [share / 2 for share in static for _ in range(2)]
        hops = _halved(hops)
        transfers = None if transfers is None else _halved(transfers)
    elif per_device > v:
        size = instance.num_stages // (v * p)
        if size * v * p != instance.num_stages:
            raise InputError(f"{per_device} chunks per device cannot be joined into {v}")
        pieces = [_joined(pieces[first : first + size]) for first in range(0, len(pieces), size)]
        static = [sum(static[first : first + size]) for first in range(0, len(static), size)]
        hops = hops[size - 1 :: size]
        transfers = None if transfers is None else transfers[size - 1 :: size]
    devices = place(p, placement, v)
    return instance.with_changes(
        stages=[piece.model_copy(update={"device": d}) for piece, d in zip(pieces, devices, strict=True)],
        # The layers of what was halved or joined are not known.
        model=instance.model if len(pieces) == instance.num_stages else None,
        t_comm=hops if isinstance(instance.t_comm, tuple) else instance.t_comm,
        t_transfer=transfers if isinstance(instance.t_transfer, tuple) else instance.t_transfer,
        static_mem=None
        if instance.static_mem is None
        else [sum(s for s, d in zip(static, devices, strict=True) if d == device) for device in range(p)],
    )


def one_replica(instance: Instance) -> Instance:
    """The first replica alone with the micro-batches of all; itself where there is one.

    Every device must hold a stage of it. What static memory the others take is not known: it stays.
    """
    if instance.replicas == 1:
        return instance
    stages = instance.stages[: instance.chain]
    if {stage.device for stage in stages} != set(range(instance.num_devices)):
        raise InputError("its first replica is not on all devices: it cannot be cut anew")

    def first(value: float | tuple[float, ...] | None) -> float | tuple[float, ...] | None:
        return value[: instance.chain - 1] if isinstance(value, tuple) else value

    return instance.with_changes(
        replicas=1,
        num_microbatches=instance.total_microbatches,
        stages=stages,
        t_comm=first(instance.t_comm),
        t_transfer=first(instance.t_transfer),
    )


def _boundaries(instance: Instance, value: float | tuple[float, ...]) -> list[float]:
    return list(value) if isinstance(value, tuple) else [value] * (instance.num_stages - 1)


def _halved(hops: Sequence[float]) -> list[float]:
    """Hops of halved stages: between two halves the longer of the hops at their stage's ends."""
    ends = [0.0, *hops, 0.0]
    inner = [max(ends[s], ends[s + 1]) for s in range(len(hops) + 1)]
    return [hop for s, own in enumerate(inner) for hop in ((own,) if s == len(hops) else (own, hops[s]))]


def _scaled(stage: Stage, factor: float) -> Stage:
    values = {name: getattr(stage, name) for name in (*_TIMES, *_HELD)}
    return stage.model_copy(update={name: v * factor for name, v in values.items() if v is not None})


def _joined(stages: Sequence[Stage]) -> Stage:
    """One stage of several: times and held memory add up, of the transients the highest counts."""
    changes: dict[str, float | str | None] = {"name": None}
    for name in (*_TIMES, *_HELD, *_TRANSIENT):
        values = [getattr(stage, name) for stage in stages]
        if any(stage.t_r is not None for stage in stages):  # the others keep all of theirs, and take no time
            if name == "t_r":
                values = [stage.t_r or 0.0 for stage in stages]
            elif name == "mem_r":
                values = [stage.kept_by_forward for stage in stages]
        if any(value is None for value in values):
            changes[name] = None
        else:
            changes[name] = max(values) if name in _TRANSIENT else sum(values)
    return stages[0].model_copy(update=changes)
