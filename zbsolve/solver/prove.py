"""Bounds beyond those of the instance alone: lags that CP-SAT proves, costs that devices' orders refute."""

from __future__ import annotations

import logging

from zbsolve.bounds.catalogue import bounds_from_lags
from zbsolve.bounds.refutation import Refutation, refuted_bounds, shaved_bounds
from zbsolve.bounds.waits import room
from zbsolve.model.instance import Instance
from zbsolve.search.canonical import canonical
from zbsolve.solver.exact import annealing_left
from zbsolve.solver.machine_code import COMPILE_FROM_SECONDS
from zbsolve.solver.state import Search

log = logging.getLogger(__name__)

# Lags over more micro-batches than this are problems that CP-SAT does not close in seconds.
LAGS_MOST_HELD = 3
LAGS_SHARE = 0.2
# The refutation's share of the time before annealing, which it seldom needs, and that of its trials amid it.
# When counted a second stands for so many states.
REFUTATION_SHARE, TRIALS_SHARE = 0.2, 0.35
STATES_A_SECOND = 20_000_000


def prove_lags(search: Search) -> None:
    """Where a cap holds hardly more than one micro-batch: what few of them prove about all of them."""
    instance = search.instance
    held = _least_held(instance)
    if held > LAGS_MOST_HELD or instance.num_microbatches == 1:
        return
    try:
        from zbsolve.formulations.cpsat_lags import prove_lag
    except ImportError as error:
        log.warning("lags are left out (%s): install ortools", error)
        return
    share = search.budget.part(LAGS_SHARE * search.left)
    incumbent = canonical(instance, search.incumbent.orders)
    last = instance.num_stages - 1
    # What the last stage's F's wait for is most; the end of the step completes the sum.
    for distance, to_end in ((held, False), (1, True), (2, True), (held + 1, False), (held + 2, False)):
        if search.done or share.over() or distance + (0 if to_end else 1) > instance.num_microbatches:
            return
        limit = share.left
        answer = prove_lag(
            instance,
            last,
            distance,
            incumbent,
            to_end=to_end,
            time_limit=limit,
            seed=search.seed,
            deterministic=search.deterministic,
            stopped=search.stop.is_asked,
        )
        share.charge(limit if answer is None else answer.work)
        if answer is not None:
            search.known = search.known.with_lags((*search.known.lags, answer.lag))
            for bound in bounds_from_lags(search.known):
                search.prove(bound)


def _least_held(instance: Instance) -> int:
    """Whole micro-batches that the fullest device can hold on all its stages; at least 1."""
    held = instance.num_microbatches
    for device in range(instance.num_devices):
        whole = sum(instance.stages[s].mem_b for s in instance.stages_on(device))
        if whole > 0:
            held = int(min(held, room(instance, device) / whole))
    return max(1, held)


def refute(search: Search) -> None:
    """The highest cost that the devices' orders refute (:mod:`zbsolve.bounds.refutation`)."""
    if search.time_limit < COMPILE_FROM_SECONDS:
        return
    search.refutation = Refutation.of(search.known)
    _limit_refutation(search, REFUTATION_SHARE * search.left)
    search.prove_until_done(refuted_bounds(search.refutation, search.bound.value, search.cost))


def refute_by_trial(search: Search) -> None:
    """The same with trials, once the plan is good: how far they have to reach."""
    if search.refutation is None:
        return
    _limit_refutation(search, TRIALS_SHARE * annealing_left(search))
    bounds = shaved_bounds(search.refutation, search.bound.value, search.cost, search.seed)
    search.prove_until_done(bounds)


def _limit_refutation(search: Search, seconds: float) -> None:
    """Let it work for so long from now, or for as many states when counted."""
    refutation, part = search.refutation, search.budget.part(seconds)
    assert refutation is not None
    charged = refutation.work

    def enough() -> bool:
        nonlocal charged
        part.charge((refutation.work - charged) / STATES_A_SECOND)
        charged = refutation.work
        return part.over()

    refutation.enough = enough
