"""The exact models that there are, a file each: :mod:`zbsolve.formulations.backend` says what a file says.

To be read without any solver library. A further one is a file here and a line below; solver names,
``zbsolve bench --versus``, ``zbsolve doctor`` and the tests of all solvers read this table.
"""

from __future__ import annotations

from zbsolve.errors import InputError
from zbsolve.formulations.backend import Backend
from zbsolve.formulations.backends import cpsat, cpsat_with_options, milp_cbc, milp_highs
from zbsolve.model.instance import Instance
from zbsolve.model.options import options_of

# Where several have a solver's name, the one to be asked first stands first.
BACKENDS: tuple[Backend, ...] = (
    cpsat.BACKEND,
    cpsat_with_options.BACKEND,
    milp_highs.BACKEND,
    milp_cbc.BACKEND,
)

EXACT_SOLVERS: tuple[str, ...] = tuple(
    dict.fromkeys(solver for backend in BACKENDS for solver in backend.solvers)
)


def backends_for(solver: str, instance: Instance) -> tuple[Backend, ...]:
    """Those of a solver's name that model an instance, in the order in which they are to be asked.

    Raises
    ------
    InputError
        None of them models all its options.
    """
    found = tuple(each for each in BACKENDS if solver in each.solvers and each.models(instance))
    if not found:
        option = (*options_of(instance), "this instance")[0]
        raise InputError(f"{solver} does not model {option}: use --solver auto or heuristic, or leave it out")
    return found
