"""What the solver front knows of an exact model without importing its library.

A backend is a file in :mod:`zbsolve.formulations.backends` that says what it is called, what it models, up to
which size, and how it answers a :class:`Question`; libraries are imported when it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zbsolve.formulations.common import FormulationResult, never
from zbsolve.model.instance import Instance
from zbsolve.model.memory import Pairs
from zbsolve.model.objective import Objective
from zbsolve.model.schedule import Schedule
from zbsolve.search.canonical import Orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What an exact model is asked.

    Attributes
    ----------
    time_limit : float
        Seconds, model building included; a backend that can count takes them as counts in deterministic mode.
    hint : Schedule, optional
        A valid schedule; the answer is never worse.
    lower_bound : float
        Proven, in the instance's time unit.
    stop_at_gap : float
        Stop once (cost - bound) / cost is within this.
    hear : callable, optional
        Called with each better solution's orders and pairs, maybe from another thread.
    stopped : callable
        Asked ten times a second or so, where the library permits: whether to end early.
    """

    instance: Instance
    objective: Objective
    time_limit: float
    hint: Schedule | None = None
    lower_bound: float = 0.0
    seed: int = 0
    deterministic: bool = False
    stop_at_gap: float = 0.0
    hear: Callable[[Orders, Pairs], object] | None = None
    stopped: Callable[[], bool] = never


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One exact model with one library.

    Attributes
    ----------
    name : str
        Its own, in reports.
    title, package : str
        What people call it, and the distribution that it needs.
    solvers : tuple of str
        The solver names that choose it; where several backends have one, the first that works answers.
    models : callable
        Whether it models all options of an instance.
    most_tasks : int
        Above this size it spends any limit on building its model.
    most_tasks_alone : int
        The same with neither hint nor bound.
    without : str
        What does not work without it.
    solve : callable
        Answers a question. Raises ``ImportError`` without its library, ``EnvironmentFailedError`` when that
        does not run here.
    """

    name: str
    title: str
    package: str
    solvers: tuple[str, ...]
    models: Callable[[Instance], bool]
    most_tasks: int
    most_tasks_alone: int
    without: str
    solve: Callable[[Question], FormulationResult]
