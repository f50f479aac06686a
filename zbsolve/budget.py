"""What a search may still spend: seconds on the wall, or counts of work that stand for seconds; and its end.

One kind of object for both, so that a phase is written once. On the wall a :class:`Budget` runs out by itself
and :meth:`Budget.charge` does nothing. Counted (deterministic mode) only ``charge`` moves it: what a phase
is known to take is charged, and the same seed ends at the same place on every machine. Either way nothing is
left of it once its :class:`Stop` has been asked.

What a step takes is measured or known likewise: :class:`Pace`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """The wish that a search end early and keep what it has; handed down to all that search within it.

    Loops see it in their budgets. What has none for a while, a library's loop or a long construction, is left
    by an exception, once: within :meth:`leaving_at_once`, from a signal's handler.
    """

    def __init__(self) -> None:
        self.asked = False
        self._leaves_at_once = 0  # how many searches are under way, one within the other
        self._left = False

    def ask(self) -> None:
        """End the search, as soon as it looks."""
        self.asked = True

    def is_asked(self) -> bool:
        """Whether it has been asked for; to be handed on as a question."""
        return self.asked

    def on_signal(self, _signal: int, _frame: FrameType | None) -> None:
        """The handler of a signal: asks, and leaves a search that is under way.

        To send the signal again does no harm, before, within or after the search.
        """
        self.asked = True
        if self._leaves_at_once and not self._left:
            self._left = True
            raise KeyboardInterrupt

    @contextmanager
    def leaving_at_once(self) -> Iterator[None]:
        """While this lasts a signal raises ``KeyboardInterrupt``: there is nothing that it could spoil."""
        self._leaves_at_once += 1
        try:
            yield
        finally:
            self._leaves_at_once -= 1


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
    stop : Stop, optional
        Asked, it ends this budget and all parts of it.
    """

    def __init__(
        self, seconds: float, clock: Callable[[], float] = time.monotonic, stop: Stop | None = None
    ) -> None:
        self._clock = clock
        self._stop = Stop() if stop is None else stop
        self._began = clock()
        self._until = self._began + seconds

    @classmethod
    def counted(cls, seconds: float, stop: Stop | None = None) -> Budget:
        """One that only :meth:`charge` uses up."""
        return cls(seconds, _WorkClock(), stop)

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
        """Seconds to go; below zero once it is overdrawn, none once it is stopped."""
        left = self._until - self._clock()
        return min(left, 0.0) if self._stop.asked else left

    def over(self) -> bool:
        """Whether nothing is left; to be handed on as a question (``enough=budget.over``)."""
        return self.left <= 0

    def affords(self, seconds: float) -> bool:
        """Whether something that takes so long would end in time."""
        return seconds < self.left and not self._stop.asked

    def part(self, seconds: float) -> Budget:
        """The next so many seconds of it, no more than are left; charges to either are to both."""
        return Budget(min(seconds, self.left), self._clock, self._stop)

    def beyond(self, seconds: float) -> Budget:
        """The next so many seconds, whether they are left or not: for what may exceed it."""
        return Budget(seconds, self._clock, self._stop)

    def set_aside(self, seconds: float) -> None:
        """Keep so much for what comes after: this ends the earlier."""
        self._until -= seconds

    def charge(self, seconds: float) -> None:
        """Note work that stands for so many seconds; the wall's clock has them already."""
        if isinstance(self._clock, _WorkClock):
            self._clock.now += seconds


class Pace:
    """What a step of a search takes of a budget: as measured on the wall, as known when counted.

    Attributes
    ----------
    seconds : float
        What the last one took; before the first, what is known.
    """

    def __init__(self, budget: Budget, known: float) -> None:
        self._budget = budget
        self._known = known
        self.seconds = known

    @contextmanager
    def steps(self, number: int = 1) -> Iterator[None]:
        """So many are taken meanwhile."""
        began = self._budget.spent
        yield
        self._budget.charge(number * self._known)
        self.seconds = (self._budget.spent - began) / number


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
