"""CP-SAT on instances without options."""

from __future__ import annotations

from zbsolve.formulations.backend import Backend, Question
from zbsolve.formulations.common import FormulationResult
from zbsolve.model.memory import NO_PAIRS
from zbsolve.model.options import is_plain
from zbsolve.search.canonical import Orders


def solve(question: Question) -> FormulationResult:
    """Ask :mod:`zbsolve.formulations.cpsat`."""
    from zbsolve.formulations.cpsat import solve_cpsat

    hear = question.hear

    def improved(orders: Orders, _bound: float) -> None:
        assert hear is not None
        hear(orders, NO_PAIRS)

    return solve_cpsat(
        question.instance,
        question.objective,
        time_limit=question.time_limit,
        hint=question.hint,
        lower_bound=question.lower_bound,
        seed=question.seed,
        deterministic=question.deterministic,
        stop_at_gap=question.stop_at_gap,
        on_improvement=None if hear is None else improved,
        stopped=question.stopped,
    )


BACKEND = Backend(
    name="cpsat",
    title="CP-SAT",
    package="ortools",
    solvers=("cpsat",),
    models=is_plain,
    most_tasks=8_000,  # measured with 2 cores
    most_tasks_alone=8_000,
    without="exact proofs are left out: plans and bounds get weaker",
    solve=solve,
)
