"""What Ctrl-C does to a search: it ends it, and never costs the plan that it has found."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from zbsolve.budget import Stop


@contextmanager
def one_stops_the_search() -> Iterator[Stop]:
    """While this lasts Ctrl-C asks a stop, which is to be handed to a search: a second one, sent out of
    impatience, is none. Main thread only."""
    stop = Stop()
    before = signal.signal(signal.SIGINT, stop.on_signal)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
