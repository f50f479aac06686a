"""Work and way: a device's work, the way to it and home.

It holds whatever order R takes, whatever is paired, and for several replicas.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbsolve.bounds.argument import Argument, Known
from zbsolve.bounds.bound import Bound
from zbsolve.bounds.waits import back, single_chain
from zbsolve.bounds.ways import least_way_home, least_way_out
from zbsolve.model.instance import Instance


class WorkAndWay(Argument):
    """See :func:`work_bounds`."""

    name = "work and way"

    def applies(self, instance: Instance) -> bool:
        """Elsewhere others say more."""
        return not single_chain(instance)

    def bounds(self, known: Known) -> Iterator[Bound]:
        """:func:`work_bounds`."""
        return work_bounds(known.instance, known.objective)


def work_bounds(instance: Instance, objective: str) -> Iterator[Bound]:
    """One of every device, and one of the way of a micro-batch.

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
            yield Bound(work, WorkAndWay.name, f"device {device} has {work:g} of work", device)
            continue
        head = min(least_way_out(instance, s) for s in held)
        to_backward = instance.num_microbatches * sum(
            stage.t_f + (stage.t_r or 0.0) + back(instance.stages[s]) - stage.pair_saving
            for s, stage in ((s, instance.stages[s]) for s in held)
        )
        value = head + max(work, to_backward + min(least_way_home(instance, s) for s in held))
        statement = f"device {device} has {work:g} of work, and the way to it and home takes time"
        yield Bound(value, WorkAndWay.name, statement, device)
    if objective == "makespan":
        for last in range(instance.chain - 1, instance.num_stages, instance.chain):
            stage = instance.stages[last]
            value = least_way_out(instance, last) + stage.t_f + (stage.t_r or 0.0)
            value += back(stage) + least_way_home(instance, last)
            yield Bound(value, WorkAndWay.name, "one micro-batch needs this time there and back")
