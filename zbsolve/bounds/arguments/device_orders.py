"""Device orders: a cost within which some device has no order of its tasks left
(:mod:`zbsolve.bounds.refutation`)."""

from __future__ import annotations

import time
from collections.abc import Iterator

from zbsolve.bounds.argument import Argument, Evidence, Known, Replay
from zbsolve.bounds.bound import Bound
from zbsolve.bounds.refutation import DEVICE_ORDERS, LEAST_MOVE, Refutation, refuted_bounds
from zbsolve.bounds.waits import LeastTime, single_chain
from zbsolve.model.instance import Instance
from zbsolve.model.tolerances import OPTIMAL_GAP


class DeviceOrders(Argument):
    """See :class:`zbsolve.bounds.refutation.Refutation`; may rest on lags, and on times narrowed by trial."""

    name = DEVICE_ORDERS
    reads_paths = True
    rests_on_lags = True

    def applies(self, instance: Instance) -> bool:
        """States of devices know no recomputation, no pairs, no replicas."""
        return single_chain(instance) and not instance.recomputes

    def bounds(self, known: Known) -> Iterator[Bound]:
        """Ever higher ones below the cost of a schedule; nothing where none is known. Takes its time."""
        if known.cost is not None:
            yield from refuted_bounds(Refutation.of(known), 0.0, known.cost)

    def replay(self, known: Known, evidence: Evidence) -> Replay:
        """The stated bound if it is refuted anew as a cost."""
        if evidence.method != self.name or not evidence.lags_proven:
            return Replay((), False)
        S, m = known.instance.num_stages, known.instance.num_microbatches
        if any(step.stage >= S or step.microbatch >= m for step in evidence.shaved):
            return Replay((), True)
        until = time.monotonic() + evidence.seconds
        refutation = Refutation.of(known)
        refutation.enough = lambda: time.monotonic() > until
        cost = evidence.value - 0.5 * OPTIMAL_GAP * abs(evidence.value)  # well within reach
        # The solver came to it from other costs and followed other moves: all, before a plan is accused.
        outcome = None
        for least_move in (LEAST_MOVE, 0.0):
            outcome = _replay(refutation, evidence.shaved, cost, least_move)
            if outcome is not False:
                break
        if outcome:
            return Replay((refutation.bound(cost),), False)
        return Replay((), outcome is False and refutation.complete)


def _replay(
    refutation: Refutation, steps: tuple[LeastTime, ...], cost: float, least_move: float
) -> bool | None:
    """Whether the cost is refuted, each step shown anew before it counts; None when time is up.

    False as soon as a step is not shown. What was learnt until then is dropped.
    """
    start = refutation.known()
    outcome = refutation.refutes(cost, least_move)
    for step in steps:
        if outcome is not False:
            break
        shown = refutation.shows(step, cost, least_move=least_move)
        if not shown:
            outcome = shown
            break
        outcome = refutation.take(step, cost, least_move)
    if outcome is False:
        refutation.restore(start)
    return outcome
