"""The MILP with CBC, on instances without options."""

from __future__ import annotations

from zbsolve.formulations.backend import Backend, Question
from zbsolve.formulations.common import FormulationResult
from zbsolve.model.options import is_plain


def solve(question: Question) -> FormulationResult:
    """Ask :mod:`zbsolve.formulations.milp`."""
    from zbsolve.formulations.milp import solve_milp

    return solve_milp(
        question.instance,
        question.objective,
        backend="cbc",
        time_limit=question.time_limit,
        hint=question.hint,
        lower_bound=question.lower_bound,
        seed=question.seed,
        stopped=question.stopped,
    )


BACKEND = Backend(
    name="milp-cbc",
    title="MILP with CBC",
    package="pulp",
    solvers=("milp", "milp-cbc"),
    models=is_plain,
    most_tasks=400,  # measured with 2 cores
    most_tasks_alone=1_000,  # it would not leave the root node within a minute
    without="--solver milp-cbc does not work",
    solve=solve,
)
