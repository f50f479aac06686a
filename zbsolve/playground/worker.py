"""One solve in a process of its own: a job as JSON on stdin, its progress as JSON lines on stdout.

SIGINT ends the search early and keeps the best plan, as Ctrl-C does on the command line. It may be sent
again: libraries can swallow the exception that it raises, and once the search has ended it does nothing. Run
by :mod:`zbsolve.playground.jobs` as ``python -m zbsolve.playground.worker``.
"""

from __future__ import annotations

import json
import signal
import sys
from types import FrameType
from typing import Any

from zbsolve.errors import ZbsolveError
from zbsolve.instance import parse_instance
from zbsolve.plan import make_plan
from zbsolve.solver import Progress, solve


def main() -> None:
    """Solve the job and say how it goes; the last line is ``done`` or ``error``."""
    job = json.load(sys.stdin)
    signal.signal(signal.SIGINT, _stop_search)
    try:
        result = solve(
            parse_instance(job["instance"], "instance"),
            objective=job["objective"],
            solver=job["solver"],
            time_limit=job["time_limit"],
            progress=_say_progress,
        )
    except ZbsolveError as error:
        _say(type="error", message=" ".join(str(error).split()))
    except KeyboardInterrupt:
        _say(type="error", message="cancelled before there was a plan")
    except MemoryError:
        _say(type="error", message="not enough memory: use fewer micro-batches or stages")
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _say(type="done", interrupted=result.interrupted, plan=result.plan.to_json_dict())


def _stop_search(_signal: int, frame: FrameType | None) -> None:
    """Raise ``KeyboardInterrupt``, unless the search has ended and its plan is being made."""
    while frame is not None:
        if frame.f_code is make_plan.__code__:
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _say_progress(progress: Progress) -> None:
    _say(
        type="progress",
        seconds=progress.seconds,
        cost=progress.cost,
        bound=progress.bound,
        gap=progress.gap,
        who=progress.who,
    )


def _say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
