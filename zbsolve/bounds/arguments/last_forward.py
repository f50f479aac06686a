"""Last forward: what a device must have run before its last F, and what follows that F elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator

from zbsolve.bounds.argument import Argument, Known
from zbsolve.bounds.bound import Bound
from zbsolve.bounds.memory_limits import forward_work, most_put_off
from zbsolve.bounds.waits import room, single_chain
from zbsolve.bounds.windows import observers
from zbsolve.model.instance import Instance
from zbsolve.model.recompute import instant_recomputation


class LastForward(Argument):
    """See :func:`last_forward_bounds`."""

    name = "last forward"
    reads_paths = True

    def applies(self, instance: Instance) -> bool:
        """One chain of stages, each device at one task at a time."""
        return single_chain(instance)

    def bounds(self, known: Known) -> Iterator[Bound]:
        """:func:`last_forward_bounds`."""
        return last_forward_bounds(known)


def last_forward_bounds(known: Known) -> Iterator[Bound]:
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
    spent t_b of it already. R's time is none of the work that
    memory lets a device put off: here they take none.
    """
    found, instance = known.windows(), instant_recomputation(known.instance)
    m = instance.num_microbatches
    for device in range(instance.num_devices):
        stages = instance.stages_on(device)
        put_off = most_put_off(instance, device)
        work = instance.device_work(device)
        first, last = stages[0], stages[-1]
        crowded = m * sum(instance.stages[s].mem_b for s in stages) > room(instance, device)
        before_backward = forward_work(instance, device)
        for observer, watched in observers(instance, device, known.objective).items():
            head = 0.0 if observer == device else float(found.heads[0, first, 0, observer])
            if crowded:
                head = max(head, float(found.heads[1, last, 0, observer]) - before_backward)
            value = head + work - put_off + float(found.tails[0, last, m - 1, observer])
            if math.isfinite(value):
                yield Bound(
                    value,
                    LastForward.name,
                    f"device {device}: memory lets {put_off:g} of its work wait until after its last F, "
                    f"whose micro-batch has {found.tails[0, last, m - 1, observer]:g} to go; in {watched}",
                    device,
                )
