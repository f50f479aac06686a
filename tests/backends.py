"""The exact models' answers to questions that are asked in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zbsolve.formulations.backend import Backend, Question
from zbsolve.formulations.common import FormulationResult
from zbsolve.model.instance import Instance
from zbsolve.model.objective import Objective


def answers_of(backend: Backend) -> Callable[..., FormulationResult]:
    """``answer(instance, objective, time_limit=…, …)`` of a backend."""

    def answer(instance: Instance, objective: Objective, **options: Any) -> FormulationResult:
        return backend.solve(Question(instance=instance, objective=objective, **options))

    return answer
