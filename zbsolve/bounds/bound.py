"""What a proven lower bound says."""

from __future__ import annotations

from dataclasses import dataclass

from zbsolve.bounds.waits import Lag, LeastTime


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound: its value, the method that proves it, the device it looks at, and a sentence.

    ``lags`` are facts about few micro-batches that it rests on and that an exact model has proven; ``shaved``
    are least times within its value, each proven with those before it (:mod:`zbsolve.bounds.refutation`).
    """

    value: float
    method: str
    statement: str
    device: int | None = None
    lags: tuple[Lag, ...] = ()
    shaved: tuple[LeastTime, ...] = ()
