"""One machine, proven lags: how far apart F's of a stage start, as few micro-batches show, joins the paths.

Each lag holds in every canonical schedule of the instance: what n + 1 consecutive micro-batches do in it is a
canonical schedule of these alone (all others only take time, memory and links away), so the least lag that an
exact model finds for n + 1 micro-batches is one for any of them; likewise the least time from an F of the
last n to the end of the step. The exact model (:mod:`zbsolve.formulations.cpsat_lags`) knows neither
recomputation nor pairs nor replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from zbsolve.bounds.argument import Argument, Evidence, Known, Replay, reach
from zbsolve.bounds.arguments.one_machine import window_bounds
from zbsolve.bounds.bound import Bound
from zbsolve.bounds.waits import Lag, LagAnswer, single_chain
from zbsolve.model.instance import Instance

# Proves the least lag of a stage over a distance anew, within so many seconds.
LagProver = Callable[[Instance, Lag, float], LagAnswer | None]


class RefutedLagError(Exception):
    """A lag that the instance does not have, in words."""


class ProvenLags(Argument):
    """See :func:`zbsolve.bounds.arguments.one_machine.window_bounds`, with the lags that are known."""

    name = "one machine, proven lags"
    reads_paths = True
    rests_on_lags = True

    def applies(self, instance: Instance) -> bool:
        """What the exact model of few micro-batches knows."""
        return single_chain(instance) and not instance.recomputes

    def bounds(self, known: Known) -> Iterator[Bound]:
        """Nothing where no lag is known."""
        if known.lags:
            yield from window_bounds(known, self.name, known.lags)

    def replay(self, known: Known, evidence: Evidence) -> Replay:
        """Of the lags that were proven anew."""
        gone_through = bool(evidence.lags) and evidence.lags_proven
        return Replay(tuple(self.bounds(known)), gone_through)


def prove_again(
    instance: Instance, stated: tuple[Lag, ...], prover: LagProver, seconds: float
) -> tuple[Lag, ...]:
    """The lags that a proof names as far as they are proven anew.

    Raises
    ------
    RefutedLagError
        A lag names no such tasks, or some schedule of these micro-batches has a shorter one.
    """
    until = time.monotonic() + seconds
    confirmed: list[Lag] = []
    for lag in stated:
        where = f"bound_proof: lag of stage {lag.stage} over {lag.distance}"
        number = lag.distance + (0 if lag.to_end else 1)
        if lag.stage >= instance.num_stages or number > instance.num_microbatches:
            raise RefutedLagError(f"{where}: the instance has no such tasks")
        answer = prover(instance, lag, max(0.1, until - time.monotonic()))
        if answer is None:
            continue
        if lag.value <= reach(answer.lag.value):
            confirmed.append(answer.lag._replace(value=min(lag.value, answer.lag.value)))
        elif answer.exact:
            raise RefutedLagError(
                f"{where}: is stated as {lag.value:.9g}, the least is {answer.lag.value:.9g}"
            )
    return tuple(confirmed)
