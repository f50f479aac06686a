"""Instances with recomputation, F&B pairs or several replicas: what to call them, and bounds that hold there.

The bounds of :mod:`zbsolve.bounds` and the exact models know none of these options, so none of them may be
applied there. Those here hold whatever order R takes and whatever is paired.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbsolve.errors import InputError
from zbsolve.instance import Instance


def is_extended(instance: Instance) -> bool:
    """Whether an instance uses an option that the exact models and their bounds do not know."""
    return bool(options_of(instance))


def options_of(instance: Instance) -> tuple[str, ...]:
    """The options in words, for errors."""
    named = (
        (instance.recomputes, "recomputation (t_r)"),
        (instance.has_pairs, "F&B pairs (t_fb)"),
        (instance.replicas > 1, "several replicas"),
    )
    return tuple(name for used, name in named if used)


def require_plain(instance: Instance, what: str) -> None:
    """Refuse an instance with such options, naming the first."""
    for option in options_of(instance):
        raise InputError(f"{what} does not model {option}: use --solver auto or heuristic, or leave it out")


def work_bounds(instance: Instance, objective: str) -> Iterator[tuple[float, str, int | None]]:
    """(value, statement, device) of each bound.

    *Span:* a device's window holds its work (:meth:`Instance.device_work`: each F in one pair at most, a pair
    saving no more than its F's stage can).

    *Makespan:* before a device's first task, an F, lies the way from the model's beginning to the nearest of
    its stages; a pair takes at least as long as either of its tasks, so ways count each task alone. All of
    the work follows. All but the W's run before its last backward ends, and after that one lies the way home
    from one of its stages. And each micro-batch goes there and back, on the last stage with its R between.
    """
    for device in range(instance.num_devices):
        held = instance.stages_on(device)
        work = instance.device_work(device)
        if objective == "span":
            yield work, f"device {device} has {work:g} of work", device
            continue
        head = min(least_way_out(instance, s) for s in held)
        to_backward = instance.num_microbatches * sum(
            stage.t_f + (stage.t_r or 0.0) + least_back(instance, s) - stage.pair_saving
            for s, stage in ((s, instance.stages[s]) for s in held)
        )
        value = head + max(work, to_backward + min(least_way_home(instance, s) for s in held))
        yield value, f"device {device} has {work:g} of work, and the way to it and home takes time", device
    if objective == "makespan":
        for last in range(instance.chain - 1, instance.num_stages, instance.chain):
            stage = instance.stages[last]
            value = least_way_out(instance, last) + stage.t_f + (stage.t_r or 0.0)
            value += least_back(instance, last) + least_way_home(instance, last)
            yield value, "one micro-batch needs this time there and back", None


def least_back(instance: Instance, s: int) -> float:
    """Least time from the start of a stage's backward to its input gradient."""
    stage = instance.stages[s]
    return stage.t_b if stage.t_bw is None else min(stage.t_b, stage.t_bw)


def least_way_out(instance: Instance, s: int) -> float:
    """Least time before any F of a stage."""
    first = s - s % instance.chain
    return sum(instance.stages[q].t_f + instance.hop(q) for q in range(first, s))


def least_way_home(instance: Instance, s: int) -> float:
    """Least time after any input gradient of a stage."""
    first = s - s % instance.chain
    way = sum(least_back(instance, q) + instance.hop(q) for q in range(first, s))
    stage = instance.stages[first]
    # The first stage's W or the rest of its fused backward comes last.
    return way + max(0.0, stage.min_backward - least_back(instance, first))
