"""What a search may still spend: seconds on the wall, or counts of work that stand for seconds.

One kind of object for both, so that a phase is written once. On the wall a :class:`Budget` runs out by itself
and :meth:`Budget.charge` does nothing. Counted (deterministic mode) only ``charge`` moves it: what a phase
is known to take is charged, and the same seed ends at the same place on every machine.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _WorkClock:
    """A clock that stands still but for what it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Budget:
    """So many seconds from now on.

    Parameters
    ----------
    seconds : float
        May be infinite.
    clock : callable
        The time in seconds; :func:`time.monotonic` unless another is given.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._until = self._began + seconds

    @classmethod
    def counted(cls, seconds: float) -> Budget:
        """One that only :meth:`charge` uses up."""
        return cls(seconds, _WorkClock())

    @property
    def is_counted(self) -> bool:
        """Whether it is counts of work, not the wall's clock, that use it up."""
        return isinstance(self._clock, _WorkClock)

    @property
    def spent(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """Seconds to go; below zero once it is overdrawn."""
        return self._until - self._clock()

    def over(self) -> bool:
        """Whether nothing is left; to be handed on as a question (``enough=budget.over``)."""
        return self.left <= 0

    def affords(self, seconds: float) -> bool:
        """Whether something that takes so long would end in time."""
        return seconds < self.left

    def part(self, seconds: float) -> Budget:
        """The next so many seconds of it, no more than are left; charges to either are to both."""
        return Budget(min(seconds, self.left), self._clock)

    def set_aside(self, seconds: float) -> None:
        """Keep so much for what comes after: this ends the earlier."""
        self._until -= seconds

    def charge(self, seconds: float) -> None:
        """Note work that stands for so many seconds; the wall's clock has them already."""
        if isinstance(self._clock, _WorkClock):
            self._clock.now += seconds


NO_END = Budget(float("inf"))


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection meanwhile: for making many small objects that all stay, in no cycles.

    It would look at all of them again and again, for up to two fifths of the time (measured).
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
