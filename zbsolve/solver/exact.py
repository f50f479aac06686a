"""The exact models within a solve: which of them is asked, for how long, and what its answer is worth."""

from __future__ import annotations

import logging

from zbsolve.bounds.bound import Bound
from zbsolve.errors import EnvironmentFailedError
from zbsolve.formulations.backend import Backend, Question
from zbsolve.formulations.backends import backends_for
from zbsolve.formulations.common import FormulationResult, Status
from zbsolve.model.instance import Instance
from zbsolve.model.memory import Pairs
from zbsolve.model.tolerances import OPTIMAL_GAP
from zbsolve.plan.certificate import relative_gap
from zbsolve.search.canonical import Orders
from zbsolve.solver.state import Search

log = logging.getLogger(__name__)

# The one that answers last of all, and for any other that does not run here.
LAST_RESORT = "cpsat"
# The exact model's share of the time once policies have run: most where it has little left to prove, none
# where it would spend it on propagating its model (measured with 2 cores).
EXACT_CLOSE_GAP, EXACT_CLOSE_SHARE, EXACT_CLOSE_MOST_TASKS = 0.01, 0.65, 4_000
EXACT_SHARE, EXACT_MOST_TASKS = 0.3, 3_000


def exact_share(search: Search) -> float:
    """Share of the time that is left which the portfolio keeps for the exact model."""
    gap, tasks = relative_gap(search.cost, search.bound.value), search.instance.num_tasks
    if gap <= EXACT_CLOSE_GAP and tasks <= EXACT_CLOSE_MOST_TASKS:
        return EXACT_CLOSE_SHARE
    return EXACT_SHARE if tasks <= EXACT_MOST_TASKS else 0.0


def annealing_left(search: Search) -> float:
    """Seconds until the time of the exact model begins: its share counts from where annealing began."""
    if search.annealing_given is None:
        search.annealing_given = search.left
    return search.left - search.annealing_given * max(0.03, exact_share(search))


def finish_exactly(search: Search) -> None:
    """The exact model last, where it has a chance."""
    if exact_share(search) > 0:
        solve_exactly(search, LAST_RESORT)


def fitting(solver: str, instance: Instance) -> list[Backend]:
    """The exact models of a solver's name that know all of an instance, and are not too slow for its size."""
    return [each for each in backends_for(solver, instance) if instance.num_tasks <= each.most_tasks]


def solve_exactly(search: Search, solver: str, share: float = 1.0) -> None:
    """The first exact model of a solver's name that runs here, with the incumbent as its hint.

    It may take a share of what is left.
    """
    instance, limit = search.instance, share * search.left
    backends = fitting(solver, instance)
    if not backends:
        largest = max(backends_for(solver, instance), key=lambda backend: backend.most_tasks)
        log.warning("%s is left out: %d tasks are over %d", solver, instance.num_tasks, largest.most_tasks)
        return
    if search.done or limit <= 0:
        return

    for backend in dict.fromkeys((*backends, *fitting(LAST_RESORT, instance))):
        try:
            result = backend.solve(_question(search, limit, backend.solvers[0]))
        except ImportError as error:
            log.warning(
                "%s is not installed (%s): install %s; going on without it",
                backend.title,
                error,
                backend.package,
            )
        except EnvironmentFailedError as error:
            log.warning("%s; another solver takes over", error)
        else:
            search.budget.charge(limit if result.work is None else result.work)
            _take(search, result)
            return


def _question(search: Search, limit: float, who: str) -> Question:
    """What remains to be answered; better plans are offered as they come, but for runs to be repeated."""

    def hear(orders: Orders, pairs: Pairs) -> None:
        search.offer(orders, who, pairs)

    return Question(
        instance=search.instance,
        objective=search.objective,
        time_limit=limit,
        hint=search.schedule,
        lower_bound=search.bound.value,
        seed=search.seed,
        deterministic=search.deterministic,
        stop_at_gap=search.target_gap,
        hear=None if search.deterministic else hear,
        stopped=search.stop.is_asked,
    )


def _take(search: Search, result: FormulationResult) -> None:
    """Keep what a formulation found and proved. "Infeasible" is refuted by the incumbent we hold."""
    if result.status is Status.INFEASIBLE:
        log.warning(
            "%s says infeasible (%s), but a valid plan exists: ignored", result.solver, result.native_status
        )
        return
    if result.orders is not None:
        search.offer(result.orders, result.solver, result.pairs)
    # A model was given the bound so far; the same again, rounded otherwise, is not its own proof.
    if result.bound is not None and result.bound > search.bound.value * (1 + OPTIMAL_GAP):
        search.prove(Bound(result.bound, f"{result.solver} model", _proven_by(result, search)))


def _proven_by(result: FormulationResult, search: Search) -> str:
    """What a formulation has shown of the exact model, in words."""
    who = f"{result.solver} {result.version}"
    none_less = f"no schedule costs less than {result.bound:.9g} {search.instance.time_unit}"
    if result.status is Status.OPTIMAL:
        return f"{none_less}: {who} proved it optimal on the exact model"
    return f"{none_less}: the lower bound on the exact model that {who} had when its search ended"
