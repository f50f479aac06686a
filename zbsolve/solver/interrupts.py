"""What Ctrl-C does to a search: it ends it, and never costs the plan that it has found."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from zbsolve.solver.portfolio import result_of, solve


def stop_search(_signal: int, frame: FrameType | None) -> None:
    """Raise ``KeyboardInterrupt`` in a search; not before or after it, nor while one is being handled.

    A handler of SIGINT. To send the signal again does no harm: libraries can swallow the exception, and
    between the end of a search and the plan there is nothing left to interrupt.
    """
    stoppable, inner = False, None
    while frame is not None:
        if frame.f_code is solve.__code__:  # the outermost counts: a search may have others within
            stoppable = inner is not result_of.__code__
        inner, frame = frame.f_code, frame.f_back
    if stoppable and not isinstance(sys.exc_info()[1], KeyboardInterrupt):
        raise KeyboardInterrupt


@contextmanager
def one_stops_the_search() -> Iterator[None]:
    """While this lasts a second Ctrl-C, sent out of impatience, is none. Main thread only."""
    before = signal.signal(signal.SIGINT, stop_search)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
