"""When machine code of the searches' loops is worth the seconds that it takes to load or to make."""

from __future__ import annotations

from zbsolve.model.instance import Instance
from zbsolve.search.list_scheduler import machine_code_is_ready, plain_seconds
from zbsolve.solver.state import Search

# It is loaded where plain Python takes longer than that, and made only on long searches.
LOADING_SECONDS = 0.4
COMPILE_FROM_SECONDS = 15.0
# At most, to make one of the annealings' (measured); how much faster it is than plain Python.
COMPILE_SECONDS = 8.0
MACHINE_CODE_GAIN = 40.0


def policy_seconds(instance: Instance, compiled: bool) -> float:
    """About what one run of a policy takes."""
    return plain_seconds(instance) / (MACHINE_CODE_GAIN if compiled else 1.0)


def in_machine_code(search: Search, runs: int) -> bool:
    """Whether so many runs of policies are worth machine code; their outcome is the same either way."""
    if runs * plain_seconds(search.instance) <= LOADING_SECONDS:
        return False
    return search.deterministic or search.left >= COMPILE_FROM_SECONDS or machine_code_is_ready()


def extended_pays(search: Search) -> bool:
    """Whether that of the loops for recomputation, pairs and replicas pays: compiled once a machine."""
    long = search.time_limit >= COMPILE_FROM_SECONDS and search.budget.affords(COMPILE_SECONDS)
    return long and not search.deterministic
