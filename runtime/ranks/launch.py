"""Starting ranks on this host, watching them, and leaving none behind.

The parent serves the store, so that a rank's death never takes it away; each rank ends by itself when the
store does. The parent reads each rank's place from its status file, which survives the rank.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from zbsolve.errors import EnvironmentFailedError, InputError
from zbsolve.plan.plan import Plan
from zbsolve.runtime.ranks.job import Job
from zbsolve.runtime.ranks.outcome import Outcome
from zbsolve.runtime.status import Place, announce_failure, read_place

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
# After one rank failed, the others get this long to end by themselves.
_END_SECONDS = 5.0

# glibc gives large blocks back to the system by default; the page faults of taking them again made the
# same ops 21 to 36 % slower.
MALLOC = {
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
    options, notes = job.options.for_instance(plans[0].instance)
    for note in notes:
        logger.info(note)
    size = 1 if options.green_contexts else plans[0].instance.num_devices * options.data_parallel
    with tempfile.TemporaryDirectory(prefix="zbsolve-run-") as name:
        folder = Path(name)
        paths = []
        for number, plan in enumerate(plans):
            paths.append(str(folder / f"plan{number}.json"))
            plan.save(paths[-1])
        job = replace(job, options=options, plans=tuple(paths), outcome=str(folder / "outcome.json"))
        job.save(folder / "job.json")
        limit = datetime.timedelta(seconds=options.timeout)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        processes = _start_all(folder, size, store.port, job)
        try:
            _watch(folder, processes, store, job, progress)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        data = json.loads(Path(job.outcome).read_text(encoding="utf-8"))
    return [Outcome.from_json(entry) for entry in data]


class RankProcess:
    """A rank on this host. It is the rank server's child: its exit code is read from a file."""

    def __init__(self, pid: int, exit_file: Path, server: subprocess.Popen[bytes]) -> None:
        self.pid, self._exit_file, self._server = pid, exit_file, server
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, None while it runs; negative when a signal ended it."""
        if self.returncode is None:
            try:
                self.returncode = int(self._exit_file.read_text(encoding="utf-8"))
            except FileNotFoundError:
                if self._server.poll() is not None:
                    self.kill()
                    self.returncode = -signal.SIGKILL
        return self.returncode

    def kill(self) -> None:
        """End it without asking."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Return once it has ended."""
        while self.poll() is None:
            time.sleep(_POLL_SECONDS)


_servers: dict[int, subprocess.Popen[bytes]] = {}
_asking = threading.Lock()  # a request and its answer belong together, whichever thread runs a plan


def _server(threads: int) -> subprocess.Popen[bytes]:
    """The rank server for ranks of so many threads; it stays for the next run of this process."""
    server = _servers.get(threads)
    if server is None or server.poll() is not None:
        environment = {**os.environ, **MALLOC, "OMP_NUM_THREADS": str(threads)}
        environment["PYTHONPATH"] = os.pathsep.join([*(entry for entry in sys.path if entry), os.getcwd()])
        server = subprocess.Popen(
            [sys.executable, "-m", "zbsolve.runtime.rank_server"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the process that watches the ranks
        )
        _servers[threads] = server
    return server


@atexit.register
def _close_servers() -> None:
    for server in _servers.values():
        assert server.stdin is not None
        server.stdin.close()
        server.wait()


def _start_all(folder: Path, size: int, port: int, job: Job) -> list[RankProcess]:
    environment = {**os.environ, **MALLOC}
    environment.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS=str(job.options.threads)
    )
    environment.pop("LOCAL_RANK", None)
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
    request = {
        "folder": str(folder),
        "size": size,
        "environment": environment,
        "cwd": os.getcwd(),
        "path": [*(entry for entry in sys.path if entry), os.getcwd()],
    }
    with _asking:
        server = _server(job.options.threads)
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            server.stdin.write(json.dumps(request).encode() + b"\n")
            server.stdin.flush()
            pids = json.loads(server.stdout.readline())
        except (OSError, json.JSONDecodeError) as error:
            raise EnvironmentFailedError(
                f"the process that starts the ranks has ended ({error}): run it again with ZBSOLVE_LOG=DEBUG"
            ) from None
    return [RankProcess(pid, folder / f"exit{rank}", server) for rank, pid in enumerate(pids)]


def _watch(
    folder: Path,
    processes: Sequence[RankProcess],
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
        elif time.monotonic() - moved > job.options.timeout + _END_SECONDS:
            where = "; ".join(f"rank {rank} in {place}" for rank, place in enumerate(places))
            raise EnvironmentFailedError(f"nothing moved for {time.monotonic() - moved:.0f} s: {where}")
        text = f"{places[0].op} of step {places[0].step}" if places[0].step < 0 else f"step {places[0].step}"
        text = "starting" if places[0].step < 0 else text
        if progress is not None and text != shown:
            progress(f"{len(processes)} ranks: {text}")
            shown = text
        time.sleep(_POLL_SECONDS)


def _end_all(folder: Path, processes: Sequence[RankProcess], store: TCPStore, failed: int) -> None:
    """Make the failure known, let the others end, and raise what happened."""
    cause = _words(folder, failed, processes[failed].returncode or 0)
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
