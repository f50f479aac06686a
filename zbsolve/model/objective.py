"""The two costs of a schedule, and where each stands in the pairs that searches return."""

from __future__ import annotations

from typing import Literal

from zbsolve.errors import InputError

# Strings, as in files and on the command line.
Objective = Literal["makespan", "span"]
OBJECTIVES: tuple[Objective, ...] = ("makespan", "span")


def column_of(objective: str) -> int:
    """Where an objective stands in (makespan, span).

    Raises
    ------
    InputError
        It is neither.
    """
    for place, known in enumerate(OBJECTIVES):
        if objective == known:
            return place
    raise InputError(f"objective {objective!r} is not known: use {' or '.join(OBJECTIVES)}")


def is_span(objective: str) -> bool:
    """Whether it is the span; an unknown one is refused as by :func:`column_of`."""
    return column_of(objective) == 1
