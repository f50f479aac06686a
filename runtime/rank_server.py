"""One process that has loaded torch and forks ranks on request.

Loading torch takes seconds of processor time, which p ranks would each spend on one host at once. This
process spends it once, starts no thread and touches no device, and forks. It ends, and ends its ranks,
as soon as whoever started it does: its standard input closes then.

Protocol: one JSON line a request on standard input, answered by one JSON line with the ranks' process ids.
A rank's exit code is written to ``exit<rank>`` in the run's folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.05


def serve() -> None:
    """Answer requests until standard input closes."""
    ranks: dict[int, Path] = {}  # process id -> where its exit code goes
    pending = b""
    while True:
        readable, _, _ = select.select([0], [], [], POLL_SECONDS)
        if readable:
            data = os.read(0, 65536)
            if not data:
                break
            pending += data
            while b"\n" in pending:
                line, pending = pending.split(b"\n", 1)
                started = _start(json.loads(line))
                ranks |= started
                sys.stdout.write(json.dumps(list(started)) + "\n")
                sys.stdout.flush()
        _reap(ranks)
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _start(request: dict[str, Any]) -> dict[int, Path]:
    folder = Path(request["folder"])
    started = {}
    for rank in range(request["size"]):
        pid = os.fork()
        if pid == 0:
            _become_rank(request, folder, rank)
        started[pid] = folder / f"exit{rank}"
    return started


def _become_rank(request: dict[str, Any], folder: Path, rank: int) -> None:
    """Run a rank in this (forked) process and end it."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["cwd"])
        sys.path[:] = request["path"]
        from zbsolve.runtime.worker import main

        code = main(["--job", str(folder / "job.json"), str(rank), str(request["size"])])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _reap(ranks: dict[int, Path]) -> None:
    """Write down the exit codes of ranks that have ended."""
    for pid in list(ranks):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            place = ranks.pop(pid)
            # The run may be over and its folder gone.
            with contextlib.suppress(FileNotFoundError):
                draft = place.with_suffix(".draft")
                draft.write_text(str(os.waitstatus_to_exitcode(status)), encoding="utf-8")
                draft.rename(place)


if __name__ == "__main__":
    import torch

    import zbsolve.runtime.worker  # noqa: F401 -- what every rank needs, torch above all

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # the first optimizer loads 800 modules more
    serve()
