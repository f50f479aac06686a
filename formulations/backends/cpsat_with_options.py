"""CP-SAT on instances with recomputation, F&B pairs or several replicas."""

from __future__ import annotations

from zbsolve.formulations.backend import Backend, Question
from zbsolve.formulations.common import FormulationResult
from zbsolve.model.options import is_extended
from zbsolve.model.simulator import simulate_for
from zbsolve.search.extended_arrays import decode, encode


def solve(question: Question) -> FormulationResult:
    """Ask :mod:`zbsolve.formulations.cpsat_extended`, with the hint's micro-batches in order."""
    from zbsolve.formulations.cpsat_extended import solve_extended

    instance, hint = question.instance, question.hint
    if hint is not None:
        orders, pairs = decode(*encode(instance, hint.orders, hint.pairs))
        hint = simulate_for(instance, orders, question.objective, pairs)
    return solve_extended(
        instance,
        question.objective,
        time_limit=question.time_limit,
        hint=hint,
        lower_bound=question.lower_bound,
        seed=question.seed,
        deterministic=question.deterministic,
        stop_at_gap=question.stop_at_gap,
        on_improvement=question.hear,
        stopped=question.stopped,
    )


BACKEND = Backend(
    name="cpsat-with-options",
    title="CP-SAT",
    package="ortools",
    solvers=("cpsat",),
    models=is_extended,
    most_tasks=1_500,  # measured with 2 cores
    most_tasks_alone=1_500,
    without="exact proofs are left out: plans and bounds get weaker",
    solve=solve,
)
