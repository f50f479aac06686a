"""The phases for instances with recomputation, F&B pairs or several replicas.

They begin with the catalogue (:mod:`zbsolve.solver.with_options`) and policies, and go on with descent over
policies, the ordinary solver on the instance without these options, annealing and the exact model.
"""

from __future__ import annotations

import logging

from zbsolve.budget import Pace
from zbsolve.model.recompute import unfold
from zbsolve.model.serial import serial_orders
from zbsolve.model.tolerances import OPTIMAL_GAP
from zbsolve.search.canonical import Orders
from zbsolve.search.extended_orders import ExtendedOrderSearch
from zbsolve.search.extended_policies import ExtendedPolicySearch
from zbsolve.solver.exact import LAST_RESORT, fitting, solve_exactly
from zbsolve.solver.machine_code import extended_pays
from zbsolve.solver.state import LIMIT_KEPT_TASKS, Search
from zbsolve.solver.with_options import candidates, neighbours

log = logging.getLogger(__name__)

# Seconds that plain Python takes to time a task, for a move (many are refused half-way), to run a policy, to
# pair neighbours (measured), and to begin one of the larger searches.
SECONDS_A_TASK = 5e-6
MOVE_SECONDS_A_TASK = 2e-6
POLICY_SECONDS_A_TASK = 5 * SECONDS_A_TASK
PAIRING_SECONDS_A_TASK = 4 * SECONDS_A_TASK
BEGINNING_SECONDS_A_TASK = 20 * SECONDS_A_TASK
# The exact model at once on so few tasks, with its share of the time; its share at last.
EXACT_AT_ONCE_TASKS, EXACT_AT_ONCE_SHARE = 150, 0.5
EXACT_SHARE = 0.3
# Shares of the catalogue and again of first policies, and of the descent over policies.
FIRST_PLANS_SHARE, POLICIES_SHARE = 0.15, 0.2
# Annealing in rounds: short enough to stop on time, and enough of them to cool down.
ROUND_SECONDS, LEAST_ROUNDS = 0.5, 20


def first_plans(search: Search) -> None:
    """The serial order, a policy, the catalogue, and policies from presets."""
    instance = search.instance
    _first_of_all(search)
    if instance.num_tasks > LIMIT_KEPT_TASKS:
        log.warning(
            "%d tasks are over %d: with recomputation, F&B pairs or replicas only a first plan is made",
            instance.num_tasks,
            LIMIT_KEPT_TASKS,
        )
        return
    policies = search.policies = ExtendedPolicySearch(
        instance, search.objective, search.seed, seconds_a_run=BEGINNING_SECONDS_A_TASK * instance.num_tasks
    )
    pairing = PAIRING_SECONDS_A_TASK * instance.num_tasks
    part = search.budget.part(FIRST_PLANS_SHARE * search.left)
    pace = Pace(search.budget, POLICY_SECONDS_A_TASK * instance.num_tasks)

    def enough() -> bool:
        part.charge(pairing)
        return search.done or not part.affords(pairing)

    # A policy first: no schedule of the catalogue is found as fast as one that suits the instance.
    if search.budget.affords(2 * policies.seconds_a_run):
        with pace.steps():
            policies.try_preset()
        _offer_policy(search, policies)
    for name, orders, pairs in candidates(instance, enough):
        search.offer(orders, name, pairs)
    if extended_pays(search):
        policies.compile()
    part = search.budget.part(FIRST_PLANS_SHARE * search.left)
    there_are_more = True
    while there_are_more and not search.done and part.affords(2 * pace.seconds):
        with pace.steps():
            there_are_more = policies.try_preset()
    _offer_policy(search, policies)


def _first_of_all(search: Search) -> None:
    """The serial order; where time is short, the first schedule of the catalogue that fits."""
    instance = search.instance
    seconds = PAIRING_SECONDS_A_TASK * instance.num_tasks
    short = not search.budget.affords(10 * seconds) or instance.num_tasks > LIMIT_KEPT_TASKS

    def enough() -> bool:
        return search.schedule is not None or not search.budget.affords(seconds)

    if short:
        for name, orders, pairs in candidates(instance, enough):
            search.offer(orders, name, pairs)
    if search.schedule is None or search.budget.affords(10 * seconds):
        search.offer(serial_orders(instance), "serial")


def solve_small_exactly(search: Search) -> None:
    """The exact model early on, where it is likely to close the gap."""
    if search.instance.num_tasks <= EXACT_AT_ONCE_TASKS:
        solve_exactly(search, LAST_RESORT, EXACT_AT_ONCE_SHARE)


def finish_exactly(search: Search) -> None:
    """The exact model last, where it has a chance."""
    if fitting(LAST_RESORT, search.instance):
        solve_exactly(search, LAST_RESORT)


def descend(search: Search) -> None:
    """Descent over policies from the best of the first."""
    policies = search.policies
    if policies is None:
        return
    part = search.budget.part(POLICIES_SHARE * search.left)
    given = part.left
    pace = Pace(part, POLICY_SECONDS_A_TASK * search.instance.num_tasks)
    while not search.done and part.affords(2 * pace.seconds):
        with pace.steps():
            policies.step(1.0 - part.left / given)
        if policies.best[0] < search.cost * (1 - OPTIMAL_GAP):
            _offer_policy(search, policies)
    _offer_policy(search, policies)


def _offer_policy(search: Search, policies: ExtendedPolicySearch) -> None:
    if policies.best_orders is not None:
        search.offer(policies.best_orders[0], "policy search", policies.best_orders[1])


def offer_unfolded(search: Search, orders: Orders, who: str) -> None:
    """Orders of the instance without these options: R right before its backward, and then with pairs."""
    instance = search.instance
    unfolded = unfold(instance, orders)
    search.offer(unfolded, who)
    if instance.has_pairs:
        search.offer(unfolded, f"{who}, paired", neighbours(instance, unfolded))


def anneal(search: Search) -> None:
    """One cooling of the incumbent's orders and pairs."""
    instance, schedule = search.instance, search.incumbent
    if not search.budget.affords(BEGINNING_SECONDS_A_TASK * instance.num_tasks):
        return
    annealing = ExtendedOrderSearch(
        instance,
        schedule.orders,
        schedule.pairs,
        search.objective,
        search.seed,
        compiled=extended_pays(search),
    )
    annealing.run(1, 0.0, search.bound.value)  # compiles
    mean_task = sum(timed.end - timed.start for timed in schedule) / instance.num_tasks
    share = 1.0 - EXACT_SHARE if fitting(LAST_RESORT, instance) else 1.0
    part = search.budget.part(share * search.left)
    given = part.left
    pace = Pace(part, MOVE_SECONDS_A_TASK * instance.num_tasks)
    while not search.done and not part.over():
        warmth = part.left / given
        round_seconds = min(ROUND_SECONDS, given / LEAST_ROUNDS, part.left)
        number = max(1, round(round_seconds / max(1e-8, pace.seconds)))
        # The search keeps the best, so a round begins where the last one's best was.
        with pace.steps(number):
            cost = annealing.run(number, mean_task * warmth**2, search.bound.value)
        if cost < search.cost:
            orders, pairs = annealing.orders()
            search.offer(orders, "order search", pairs)
