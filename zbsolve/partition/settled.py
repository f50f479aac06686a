"""The bound of a family from its settled devices together, each waiting for the others.

:mod:`zbsolve.partition.relaxation` looks at one device at a time. Under tight memory that is too little: a
device waits for a neighbour that itself waits for memory. Here the settled devices form an instance of
their own: their chunks, caps and hops as they are, and everything that is still free put in as hops around
stages of no length on devices of their own (:func:`settled_instance`). Free stages take at least that long,
whatever they are, and their devices' own limits are left out: any plan of any member of the family gives a
plan of this instance that costs no more. So every bound of this instance holds for the family.
"""

from __future__ import annotations

import math

from zbsolve.bounds.catalogue import best_bound
from zbsolve.model.instance import Instance, Stage
from zbsolve.partition.layers import Keep
from zbsolve.partition.relaxation import Option, Relaxation

Settled = tuple[tuple[Option, tuple[Keep, ...]], ...]


def settled_bound(relaxation: Relaxation, settled: Settled) -> float:
    """Lower bound for every decision that begins with these devices."""
    return best_bound(settled_instance(relaxation, settled), relaxation.problem.objective).value


def settled_instance(relaxation: Relaxation, settled: Settled) -> Instance:
    """The settled devices, with the rest of the model as the shortest ways between their chunks.

    One chunk a device: the way on from the last settled stage and back takes ``trip``; half of it on each
    side of a last stage of no length. Two chunks: between the last first chunk and the next second chunk, F
    and backward take at least the shorter of both ways; with loop, what follows the settled second chunks is
    a way on and back again.
    """
    problem = relaxation.problem
    number = len(settled)
    first = [_chunk(relaxation, settled, r, 0) for r in range(number)]
    hops = [relaxation.class_hop(settled[r][0], settled[r + 1][0], 0) for r in range(number - 1)]
    stages: list[Stage]
    option = settled[-1][0]
    if relaxation.chunks == 1:
        stages = [*first, _point(number)]
        hops.append(relaxation.trip(option.after) / 2)
    else:
        (between_f, between_b), after = relaxation.way(option)
        middle = min(between_f, between_b) / 2
        second = [_chunk(relaxation, settled, r, 1) for r in range(number)]
        back_hops = [relaxation.class_hop(settled[r][0], settled[r + 1][0], 1) for r in range(number - 1)]
        if relaxation.placement == "v":
            stages = [*first, _point(number), *reversed(second)]
            hops += [middle, middle, *reversed(back_hops)]
        else:
            middle = min(relaxation.way_round(option, number)) / 2
            stages = [*first, _point(number), *second, _point(number + 1)]
            hops += [middle, middle, *back_hops, after / 2]
    static = [
        sum(problem.static(*segment) for segment in settled[r][0].segments) if r < number else 0.0
        for r in range(number + 2)
    ]
    caps = [problem.classes[settled[r][0].cls].memory if r < number else math.inf for r in range(number + 2)]
    devices = max(stage.device for stage in stages) + 1
    return Instance.model_construct(
        name="settled devices",
        num_devices=devices,
        num_microbatches=problem.num_microbatches,
        stages=tuple(stages),
        t_comm=tuple(hops),
        memory_cap=tuple(caps[:devices]),
        static_mem=tuple(static[:devices]),
    )


def _chunk(relaxation: Relaxation, settled: Settled, r: int, chunk: int) -> Stage:
    option, keep = settled[r]
    stage = relaxation.problem.stage(*option.segments[chunk], option.cls, keep[chunk])
    return stage.model_copy(update={"device": r})


def _point(device: int) -> Stage:
    """A stage of no length that holds nothing."""
    return Stage.model_construct(device=device, t_f=0.0, t_b=0.0, t_w=0.0, mem_b=0.0, mem_w=0.0)
