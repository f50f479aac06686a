"""The ``zbsolve`` command, also as ``python -m zbsolve``: one clean line for Ctrl-C from the first moment on.

Nothing but the standard library is imported before that holds: the rest takes a fifth of a second.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def _quit(_signal: int, _frame: FrameType | None) -> None:
    """While modules are loaded there is nothing to keep, and an exception could come out anywhere."""
    os.write(2, b"zbsolve: interrupted\n")
    os._exit(130)


def main() -> None:
    """Entry point of the ``zbsolve`` command."""
    # Shells start background jobs with SIGINT ignored: ``kill -INT`` is to keep the best plan there, too.
    signal.signal(signal.SIGINT, _quit)
    from zbsolve.cli import main as run
    from zbsolve.cli.base import EXIT_INTERRUPTED

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        os.write(2, b"zbsolve: interrupted\n")
        sys.exit(EXIT_INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is written: only Python's own end is left


if __name__ == "__main__":
    main()
