"""One solve in a process of its own: a job as JSON on stdin, its progress as JSON lines on stdout.

SIGINT ends the search early and keeps the best plan, as Ctrl-C does on the command line; more of them do no
harm. Run by :mod:`zbsolve.playground.jobs` as ``python -m zbsolve.playground.worker``.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

from zbsolve.budget import Stop
from zbsolve.errors import ZbsolveError
from zbsolve.model.instance import parse_instance
from zbsolve.solver.portfolio import Progress, solve


def main() -> None:
    """Solve the job and say how it goes; the last line is ``done`` or ``error``."""
    stop = Stop()
    signal.signal(signal.SIGINT, stop.on_signal)
    job = json.load(sys.stdin)
    last: dict[str, Any]
    try:
        result = solve(
            parse_instance(job["instance"], "instance"),
            objective=job["objective"],
            solver=job["solver"],
            time_limit=job["time_limit"],
            progress=_say_progress,
            stop=stop,
        )
    except ZbsolveError as error:
        last = {"type": "error", "message": " ".join(str(error).split())}
    except KeyboardInterrupt:
        last = {"type": "error", "message": "cancelled before there was a plan"}
    except MemoryError:
        last = {"type": "error", "message": "not enough memory: use fewer micro-batches or stages"}
    else:
        last = {"type": "done", "interrupted": result.interrupted, "plan": result.plan.to_json_dict()}
    # A signal could cut the long line short (where Python does not buffer), or kill while Python shuts down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _say(**last)


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
