"""Least times of the ways through the stages, there and back."""

from __future__ import annotations

from zbsolve.bounds.waits import back
from zbsolve.model.instance import Instance

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


def round_trip(instance: Instance, a: int, b: int) -> float:
    """Least time from the end of F of stage a to the start of the backward of stage b, one micro-batch.

    The path runs on from a through the last stage and back to b; or turns at a stage on the way whose R, if
    it is longer than the way from there and back, its backward waits for.
    """
    last = instance.num_stages - 1
    out = sum(instance.hop(q - 1) + instance.stages[q].t_f for q in range(a + 1, b + 1))
    ways, home = [], 0.0
    for q in range(b, last + 1):
        ways.append(out + (instance.stages[q].t_r or 0.0) + home)
        if q < last:
            hop, following = instance.hop(q), instance.stages[q + 1]
            out += hop + following.t_f
            home += hop + back(following)
    return max(ways)


# --- with several replicas, each a chain -------------------------------------------------------


def least_way_out(instance: Instance, s: int) -> float:
    """Least time before any F of a stage."""
    first = s - s % instance.chain
    return sum(instance.stages[q].t_f + instance.hop(q) for q in range(first, s))


def least_way_home(instance: Instance, s: int) -> float:
    """Least time after any input gradient of a stage."""
    first = s - s % instance.chain
    way = sum(back(instance.stages[q]) + instance.hop(q) for q in range(first, s))
    stage = instance.stages[first]
    # The first stage's W or the rest of its fused backward comes last.
    return way + max(0.0, stage.min_backward - back(stage))
