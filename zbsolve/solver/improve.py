"""Better plans from the incumbent: periodic patterns, policies, annealing; and less memory in the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from zbsolve.bounds.catalogue import best_bound
from zbsolve.budget import Budget
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import BW
from zbsolve.model.objective import is_span
from zbsolve.plan.certificate import relative_gap
from zbsolve.plan.make import peaks_of
from zbsolve.search.backbones import BackboneSearch
from zbsolve.search.canonical import canonical
from zbsolve.search.list_scheduler import ListScheduler
from zbsolve.search.orders import OrderSearch
from zbsolve.search.policies import PATIENCES, PolicyRace, affordable_patiences
from zbsolve.solver.exact import annealing_left, exact_share
from zbsolve.solver.less_memory import under_tighter_caps, with_later_forwards
from zbsolve.solver.machine_code import (
    COMPILE_FROM_SECONDS,
    COMPILE_SECONDS,
    in_machine_code,
    policy_seconds,
)
from zbsolve.solver.state import Search

log = logging.getLogger(__name__)

# Periodic schedules: for which sizes, the share of the time, the tries in it, when the period is settled.
PATTERNS_FROM_MICROBATCHES = 8
PATTERNS_MOST_TASKS = 20_000  # beyond, timing and checking a single unrolled pattern takes seconds
PATTERNS_SHARE = 0.1
PATTERNS_ATTEMPTS = 8
PATTERNS_CLOSE = 1.002
# Policies' share of the time before annealing: they find the last per cent of nearly even pipelines.
POLICIES_SHARE = 0.15
POLICIES_CLOSE_GAP, POLICIES_CLOSE_SHARE = 0.02, 0.4
# Of the annealing time: backbones, orders; then both again, once trials have had their share.
FIRST_ANNEALING, SECOND_ANNEALING = (0.57, 0.43), (0.5, 0.5)
FIRST_ANNEALING_SHARE = 0.6
# Annealing rounds: short enough to stop on time, and how many moves tell the pace.
ROUND_SECONDS = 0.5
ROUND_TRIAL_STEPS = 200
# Lowering the plan's memory in the end: its share of the time limit, and that where none is left; what one
# look takes.
LIGHTEN_SHARE, LIGHTEN_LEAST_SHARE = 0.1, 0.02
LOOK_SECONDS_A_TASK = 2e-5


def search_patterns(search: Search) -> None:
    """Periodic schedules of ever shorter period, where a cap and many micro-batches make the rate decide."""
    instance = search.instance
    m = instance.num_microbatches
    capped = not math.isinf(min(map(instance.cap, range(instance.num_devices))))
    if not capped or m < PATTERNS_FROM_MICROBATCHES or instance.num_tasks > PATTERNS_MOST_TASKS:
        return
    try:
        from zbsolve.formulations.cpsat_periodic import find_pattern
    except ImportError as error:
        log.warning("periodic schedules are left out (%s): install ortools", error)
        return
    kinds = {(timed.task.kind, timed.task.stage) for timed in search.incumbent}
    fused = tuple((BW, s) in kinds for s in range(instance.num_stages))
    # What one micro-batch takes is spent once; the rest of the cost comes from the period.
    once = best_bound(instance.with_changes(num_microbatches=1), search.objective).value
    work = max(
        sum(_job_time(instance, s, fused[s]) for s in instance.stages_on(d))
        for d in range(instance.num_devices)
    )
    shortest = max(work, (search.bound.value - once) / (m - 1))
    longest = (search.cost - once) / (m - 1)
    share = search.budget.part(PATTERNS_SHARE * search.left)
    for attempt in range(PATTERNS_ATTEMPTS):
        if search.done or share.over() or longest <= shortest * PATTERNS_CLOSE:
            return
        # The first attempts settle where the answer lies, and are easier: they get less.
        limit = share.left / max(1, (PATTERNS_ATTEMPTS - attempt) / 2)
        period = math.sqrt(shortest * longest)
        pattern = find_pattern(
            instance,
            period,
            fused,
            time_limit=limit,
            seed=search.seed,
            deterministic=search.deterministic,
            stopped=search.stop.is_asked,
        )
        share.charge(limit)
        if pattern is None:
            shortest = period
        else:
            longest = period
            search.offer(pattern.orders(instance), "periodic")


def _job_time(instance: Instance, s: int, fused: bool) -> float:
    """What a stage takes of its device for one micro-batch."""
    stage = instance.stages[s]
    return stage.t_f + (stage.t_bw if fused and stage.t_bw is not None else stage.t_b + stage.t_w)


def search_policies(search: Search) -> None:
    """Descent over policies, for a share of the time (most of it where no other search follows)."""
    instance = search.instance
    share = 0.3 if exact_share(search) > 0 else 0.9
    if search.time_limit >= COMPILE_FROM_SECONDS:  # annealing follows
        share = POLICIES_SHARE
        if relative_gap(search.cost, search.bound.value) <= POLICIES_CLOSE_GAP:
            share = POLICIES_CLOSE_SHARE
    part = search.budget.part(share * search.left)
    given = part.left
    patiences = len(PATIENCES)
    compiled = in_machine_code(search, 2 * patiences)
    if not compiled:
        patiences = affordable_patiences(instance)
    seconds = policy_seconds(instance, compiled)
    entrants = min(8, int(0.25 * given / seconds)) if seconds > 0 else 8
    if entrants == 0:
        return
    scheduler = ListScheduler(instance, compiled=compiled)
    trial = part.part(0.3 * given)

    def enough() -> bool:
        part.charge(seconds)
        return not trial.affords(seconds)

    race = PolicyRace(scheduler, search.objective, search.seed, patiences, enough, entrants)
    part.charge(entrants * seconds)
    while not search.done:
        used = 1.0 - part.left / given
        descent = race.next(used)
        if descent is None or not part.affords(seconds):
            break
        descent.step()
        part.charge(seconds)
        if descent.cost < search.cost and search.may_offer(part):
            search.offer(canonical(instance, descent.orders()), "policy search")
    # The best first; least span may be below that of earliest starts.
    for descent in sorted(race.running, key=lambda descent: descent.value):
        worth = is_span(search.objective) or descent.cost < search.cost
        if worth and not search.done and search.budget.affords(search.offer_seconds):
            search.offer(canonical(instance, descent.orders()), "policy search")


def anneal(search: Search) -> None:
    """Two annealings of the incumbent, for the larger part of their time."""
    _search_orders(search, FIRST_ANNEALING, FIRST_ANNEALING_SHARE)


def anneal_again(search: Search) -> None:
    """Two more, once bounds by trial have had their share."""
    _search_orders(search, SECOND_ANNEALING, 1.0)


def _search_orders(search: Search, shares: tuple[float, ...], of_time: float) -> None:
    """Annealing of the incumbent, in machine code on two threads; the exact model has the rest of the time.

    F's and backwards with W's filled in by rule, then all orders as they are, from where the first came to.
    """
    if search.deterministic or search.time_limit < COMPILE_FROM_SECONDS:
        return
    given = of_time * max(0.0, annealing_left(search))
    annealing = search.budget.part(given)
    behind = 0.0
    for number, share in enumerate(shares):
        behind += share
        # What one of them leaves over is the next one's.
        part = annealing.part(annealing.left - (1.0 - behind) * given)
        if search.done or part.over():
            return
        if number % 2 == 0:
            _anneal(search, BackboneSearch, "backbone search", part, most_slack=25.0)
        else:
            _anneal(search, OrderSearch, "order search", part, most_slack=4.0)


def _anneal(
    search: Search, kind: type[BackboneSearch | OrderSearch], who: str, part: Budget, *, most_slack: float
) -> None:
    """One cooling of two annealings side by side, the second at half the slack."""
    instance, objective = search.instance, search.objective
    part.set_aside(search.offer_seconds)  # for the last offer
    if not (kind.is_ready() or part.affords(COMPILE_SECONDS)):
        return
    start = canonical(instance, search.incumbent.orders)
    annealings = [
        kind(instance, start, objective, seed=search.seed + 1_000 * number, compiled=True)
        for number in range(2)
    ]
    mean_task = sum(timed.end - timed.start for timed in search.incumbent) / instance.num_tasks
    annealings[0].run(1, 0.0, search.bound.value)  # compiles
    began = part.spent
    annealings[0].run(ROUND_TRIAL_STEPS, 0.0, search.bound.value)
    pace = max(1e-7, (part.spent - began) / ROUND_TRIAL_STEPS)
    # High slack pays only where there are moves enough to come down from it.
    given = part.left
    most_slack = min(most_slack, max(0.5, given / pace / instance.num_tasks / 15)) * mean_task
    steps = ROUND_TRIAL_STEPS
    with ThreadPoolExecutor(len(annealings)) as pool:
        while not search.done and not part.over():
            warmth = (part.left / given) ** 2
            steps = min(max(20, round(min(ROUND_SECONDS, part.left) / pace)), 2 * steps)
            round_began = part.spent
            rounds = [
                pool.submit(annealing.run, steps, most_slack * warmth / (1 + number), search.bound.value)
                for number, annealing in enumerate(annealings)
            ]
            costs = [done.result() for done in rounds]
            # Refused moves cost far less than kept ones, and the slack decides how many are kept: the pace of
            # one round says only roughly what the next one needs.
            pace = max(1e-7, (part.spent - round_began) / steps)
            if min(costs) < search.cost and (min(costs) <= search.bound.value or search.may_offer(part)):
                _offer_best(search, annealings, who)
    _offer_best(search, annealings, who)


def _offer_best(search: Search, annealings: Sequence[BackboneSearch | OrderSearch], who: str) -> None:
    """The better one of two annealings, where it is better than what is known."""
    best = min(annealings, key=lambda annealing: annealing.cost)
    if best.cost < search.cost:
        search.offer(canonical(search.instance, best.orders()), who)


def lighten(search: Search) -> None:
    """The plan with less memory at its cost, where that is quickly found.

    Last of all: it has a little time of its own where none is left.
    """
    if search.schedule is None or search.stop.asked:
        return
    limit, instance, objective = search.time_limit, search.instance, search.objective
    share = max(LIGHTEN_LEAST_SHARE * limit, min(search.left, LIGHTEN_SHARE * limit))
    # What was solved at once is not held up for long.
    budget = search.budget.beyond(min(share, 0.5 + search.budget.spent))
    look = LOOK_SECONDS_A_TASK * instance.num_tasks

    def enough() -> bool:
        budget.charge(look)
        return budget.over()

    if not budget.affords(look):
        return
    for name, orders in search.untried:  # what was not needed for the cost may hold less
        if enough():
            break
        search.offer(orders, name)
    schedule = search.incumbent
    cost = schedule.cost(objective)
    peak = max(peaks_of(instance, schedule))
    found = under_tighter_caps(instance, objective, cost, peak, enough)
    if found is not None:
        search.offer(found[0], search.found_by, found[1])
        schedule = search.schedule
    orders = with_later_forwards(instance, schedule.orders, schedule.pairs, objective, cost, enough)
    search.offer(orders, search.found_by, schedule.pairs)
