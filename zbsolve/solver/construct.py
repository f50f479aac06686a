"""The first plans, and the bounds that are functions of the instance: what every solve begins with.

Baselines, the greedy construction, the automatic heuristic and its refinement, else the serial order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from zbsolve.baselines import BASELINES
from zbsolve.baselines.base import is_linear, orders_for
from zbsolve.baselines.greedy import greedy_candidates
from zbsolve.bounds.catalogue import bounds_from, highest
from zbsolve.budget import collector_paused
from zbsolve.errors import InputError
from zbsolve.model.instance import Instance
from zbsolve.model.objective import is_span
from zbsolve.model.serial import serial_orders
from zbsolve.search.arrays import encode
from zbsolve.search.canonical import Orders, canonical
from zbsolve.search.list_scheduler import ListScheduler
from zbsolve.search.policies import Refinement, affordable_patiences, automatic
from zbsolve.solver.machine_code import in_machine_code, policy_seconds
from zbsolve.solver.state import Search

# The combinatorial bounds' share of the limit.
BOUNDS_SHARE = 0.3
# About what all variants of the greedy construction take in plain Python (measured).
GREEDY_SECONDS_A_TASK = 3.3e-5
# Tasks that the first plan's refinement runs through policies: about a second of plain Python.
REFINEMENT_TASKS = 120_000


def construct(search: Search) -> None:
    """The catalogue, our heuristics, else the serial order: as many as the time allows, one at least.

    The first two come before the bounds: those of a large instance take longer.
    """
    bounded = False
    search.untried = _constructions(search)
    for number, (name, orders) in enumerate(search.untried, start=1):
        search.offer(orders, name)
        if search.schedule is not None and number > 1 and not bounded:
            prove_bounds(search)
            bounded = True
        if search.done:
            return
    if not bounded:
        prove_bounds(search)


def prove_bounds(search: Search) -> None:
    """The combinatorial bounds, the cheap ones alone where time is short."""
    enough = search.budget.part(BOUNDS_SHARE * search.time_limit).over
    search.prove(highest(bounds_from(search.known.limited(enough))))


def _constructions(search: Search) -> Iterator[tuple[str, Orders]]:
    """Orders by name, the likely best first: what comes after often need not be checked.

    Those that the search has no time for are left out, but for the first.
    """
    instance, objective = search.instance, search.objective
    refinement = Refinement(instance, objective)
    if is_linear(instance):
        yield from _greedy(search, refinement)
        yield from _heuristics(search, refinement)
        yield from _fitting_baselines(instance, search)
    else:
        yield from _fitting_baselines(instance, search)
        yield from _heuristics(search, refinement)
    if search.quick(0.0):
        yield "serial", serial_orders(instance)


def _greedy(search: Search, refinement: Refinement) -> Iterator[tuple[str, Orders]]:
    """The greedy construction under the instance's own cap, and then with other W's."""
    instance = search.instance
    seconds = GREEDY_SECONDS_A_TASK * instance.num_tasks
    if not search.quick(seconds):
        return
    with collector_paused():
        greedy = min(
            greedy_candidates(instance), key=lambda found: found.costs(search.objective), default=None
        )
    search.budget.charge(seconds)
    if greedy is not None:
        yield "greedy", greedy.orders
        refinement.take(*encode(greedy.orders), greedy.costs(search.objective)[0])


def _heuristics(search: Search, refinement: Refinement) -> Iterator[tuple[str, Orders]]:
    """The automatic heuristic's best, and that of its refinement."""
    instance, objective = search.instance, search.objective
    patiences = affordable_patiences(instance)
    compiled = in_machine_code(search, patiences)
    scheduler = ListScheduler(instance, compiled=compiled)
    seconds = policy_seconds(instance, compiled)

    def enough() -> bool:
        search.budget.charge(seconds)
        return not search.quick(seconds)

    cost = math.inf
    if search.affords_with_grace(seconds):
        cost = automatic(scheduler, objective, patiences, enough)
    if cost < math.inf:
        refinement.take(*scheduler.best_codes, cost)
        if is_span(objective) or refinement.cost == cost:
            # Least span may fall more than that of earliest starts: other W's do not always stay ahead.
            yield "heuristic", canonical(instance, scheduler.best_orders())
    if refinement.cost < search.cost:
        yield "heuristic", canonical(instance, refinement.orders())
    most = REFINEMENT_TASKS // instance.num_tasks
    if not search.done and refinement.run(scheduler, most, search.bound.value, enough):
        yield "heuristic", canonical(instance, refinement.orders())


def _fitting_baselines(instance: Instance, search: Search) -> Iterator[tuple[str, Orders]]:
    """Baselines that apply, as orders of this very instance (BW taken apart where it has no t_bw).

    The likely best first: what comes after need not be checked when it is no better. Those that the search
    has no time for are left out.
    """
    m = instance.num_microbatches
    groups = [f"interleaved:{n}" for n in range(instance.num_devices + 1, m) if m % n == 0]
    # The automatic ones last: on other placements than the linear one they take longest.
    for name in sorted((*reversed(BASELINES), *groups), key=lambda name: BASELINES[name].automatic):
        baseline = BASELINES[name]
        if baseline.automatic and is_linear(instance) and _same_caps(instance, name.removeprefix("zb-")):
            continue  # the greedy construction has run under the instance's own cap
        seconds = baseline.seconds_a_task * instance.num_tasks
        if not search.quick(seconds):
            continue
        try:
            with collector_paused():
                timed_on, orders = baseline.prepared(instance)
        except InputError:
            continue
        search.budget.charge(seconds)
        ours = orders_for(instance, timed_on, orders)
        if ours is None or (timed_on.recomputes and not instance.recomputes):
            continue  # another model than the one to solve
        yield (name if ours == orders else f"{name}, backward split"), ours


def _same_caps(instance: Instance, cap: str) -> bool:
    """Whether a named cap is the instance's own."""
    named = instance.with_memory_cap(cap)
    return all(named.cap(d) == instance.cap(d) for d in range(instance.num_devices))
