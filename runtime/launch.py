"""Starting ranks on this host, watching them, and leaving none behind.

The parent serves the store, so that a rank's death never takes it away; each rank ends by itself when the
store does. The parent reads each rank's place from its status file, which survives the rank.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from zbsolve.errors import EnvironmentFailedError, InputError
from zbsolve.plan import Plan
from zbsolve.runtime.status import Place, announce_failure, read_place
from zbsolve.runtime.worker import Job, Outcome

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
# After one rank failed, the others get this long to end by themselves.
_END_SECONDS = 5.0

# glibc gives large blocks back to the system by default; the page faults of taking them again made the
# same ops 21 to 36 % slower.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}


def launch(plans: Sequence[Plan], job: Job, progress: Callable[[str], None] | None = None) -> list[Outcome]:
    """Run a job's plans with one process a device and return what rank 0 gathered.

    Raises
    ------
    InputError
        What a rank refused before step 1.
    EnvironmentFailedError
        A rank raised, was killed, or nothing moved for the job's timeout; names rank, op, stage, micro-batch.
    """
    size = plans[0].instance.num_devices
    with tempfile.TemporaryDirectory(prefix="zbsolve-run-") as name:
        folder = Path(name)
        paths = []
        for number, plan in enumerate(plans):
            paths.append(str(folder / f"plan{number}.json"))
            plan.save(paths[-1])
        job = replace(job, plans=tuple(paths), outcome=str(folder / "outcome.json"))
        job.save(folder / "job.json")
        limit = datetime.timedelta(seconds=job.timeout)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        processes = [_start(folder, rank, size, store.port, job) for rank in range(size)]
        try:
            _watch(folder, processes, store, job, progress)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        data = json.loads(Path(job.outcome).read_text(encoding="utf-8"))
    return [Outcome.from_json(entry) for entry in data]


def _start(folder: Path, rank: int, size: int, port: int, job: Job) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    environment.update(_MALLOC)
    environment.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS=str(job.threads),
        PYTHONPATH=os.pathsep.join([entry for entry in sys.path if entry] + [os.getcwd()]),
    )
    environment.pop("LOCAL_RANK", None)
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
    command = [sys.executable, "-m", "zbsolve.runtime.worker", "--job"]
    command += [str(folder / "job.json"), str(rank), str(size)]
    with (folder / f"log{rank}").open("wb") as log:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )


def _watch(
    folder: Path,
    processes: Sequence[subprocess.Popen[bytes]],
    store: TCPStore,
    job: Job,
    progress: Callable[[str], None] | None,
) -> None:
    """Return when all ranks ended well; raise as soon as one did not, after ending the rest."""
    moved = time.monotonic()
    last: list[Place] = []
    shown = ""
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            _end_all(folder, processes, store, failed[0])
        if all(code == 0 for code in codes):
            return
        places = [read_place(folder / f"status{rank}") for rank in range(len(processes))]
        if places != last:
            moved, last = time.monotonic(), places
        elif time.monotonic() - moved > job.timeout + _END_SECONDS:
            where = "; ".join(f"rank {rank} in {place}" for rank, place in enumerate(places))
            raise EnvironmentFailedError(f"nothing moved for {time.monotonic() - moved:.0f} s: {where}")
        text = f"{places[0].op} of step {places[0].step}" if places[0].step < 0 else f"step {places[0].step}"
        text = "starting" if places[0].step < 0 else text
        if progress is not None and text != shown:
            progress(f"{len(processes)} ranks: {text}")
            shown = text
        time.sleep(_POLL_SECONDS)


def _end_all(
    folder: Path, processes: Sequence[subprocess.Popen[bytes]], store: TCPStore, failed: int
) -> None:
    """Make the failure known, let the others end, and raise what happened."""
    cause = _words(folder, failed, processes[failed].returncode)
    cause = announce_failure(store, cause)
    until = time.monotonic() + _END_SECONDS
    while time.monotonic() < until and any(process.poll() is None for process in processes):
        time.sleep(_POLL_SECONDS)
    for rank in range(len(processes)):
        report = _report(folder, rank)
        if report is not None and report[1] == InputError.exit_code:
            raise InputError(report[0])
    others = [
        f"rank {rank} ended in {read_place(folder / f'status{rank}')}"
        for rank in range(len(processes))
        if not cause.startswith(f"rank {rank} ")
    ]
    for rank in range(len(processes)):
        logger.debug("log of rank %d: %s", rank, (folder / f"log{rank}").read_text(errors="replace"))
    raise EnvironmentFailedError("; ".join([cause, *others]))


def _report(folder: Path, rank: int) -> tuple[str, int] | None:
    try:
        data = json.loads((folder / f"report{rank}.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return data["message"], data["exit_code"]


def _words(folder: Path, rank: int, code: int) -> str:
    """What a rank said when it ended, or what can be told of one that could not speak."""
    report = _report(folder, rank)
    if report is not None:
        return report[0]
    place = read_place(folder / f"status{rank}")
    if code < 0:
        try:
            what = f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            what = f"was killed by signal {-code}"
    else:
        lines = (folder / f"log{rank}").read_text(errors="replace").strip().splitlines()
        what = f"ended with exit code {code}" + (f" ({lines[-1]})" if lines else "")
    return f"rank {rank} {what} in {place}"
