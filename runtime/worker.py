"""The process that runs one rank, and how its failures are told.

Two ways in, one way through. ``zbsolve run`` has its ranks started (:mod:`zbsolve.runtime.ranks.launch`) and
hands each a job file. Under torchrun the same module takes the plan and options from its command line:

    torchrun --nproc-per-node 2 -m zbsolve.runtime.worker plan.json --model gpt --trace-out trace.json

Rank 0 writes the outcome. A rank that fails tells the others through the store, and every rank's last words
name the rank, op, stage and micro-batch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from zbsolve.errors import EnvironmentFailedError, InputError, ZbsolveError
from zbsolve.options import declarations, integers
from zbsolve.plan.plan import load_plan
from zbsolve.run_options import RunOptions
from zbsolve.runtime.ranks.job import Job
from zbsolve.runtime.ranks.outcome import Outcome
from zbsolve.runtime.ranks.rank import Rank
from zbsolve.runtime.status import Monitor, Status, announce_failure, connect_store, report_to

logger = logging.getLogger(__name__)

# How long a rank whose peer vanished waits for somebody to say what really happened.
_GRACE_SECONDS = 1.5


# --- process entry ------------------------------------------------------------------------------


def _fail(store: Store | None, rank: int, status: Status, error: Exception) -> tuple[str, int]:
    """Tell everyone; the words and exit code to leave with."""
    place = status.get()
    if isinstance(error, ZbsolveError):
        message, code = str(error), error.exit_code
    else:
        first = (str(error).strip().splitlines() or ["no message"])[0]
        first = re.sub(r"^\[\S+:\d+\] ", "", first)  # gloo begins with the place in its own source
        message = f"rank {rank} failed in {place}: {type(error).__name__}: {first}"
        code = EnvironmentFailedError.exit_code
        peer_may_be_gone = place.waiting or place.op in ("barrier", "setup", "update") or "_" in place.op
        if peer_may_be_gone and isinstance(error, RuntimeError):
            # The cause is likelier at the other end. If it says so, the monitor ends this process.
            time.sleep(_GRACE_SECONDS)
    if store is not None:
        try:
            announce_failure(store, message)
        except RuntimeError:
            logger.debug("the store is gone too")
    return message, code


def _run_guarded(
    job: Job,
    rank: int,
    size: int,
    connect: Callable[[], Store],
    status: Status,
    report: Callable[[str, int], None],
) -> list[Outcome]:
    """Run a rank; on any failure report it and end the process, without waiting for other threads."""
    store: Store | None = None
    try:
        store = connect()
        monitor = Monitor(connect, rank, size, status, job.options.timeout, report)
        monitor.start()
        outcomes = Rank(job, rank, size, store, status).run()
        status.set("done", -1, -1, -1)
        monitor.stop()
        store.set(f"left/{rank}", "")
        return outcomes
    except Exception as error:  # noqa: BLE001 -- a rank may run any user code; all of it must be reported
        logger.debug("%s", traceback.format_exc())
        message, code = _fail(store, rank, status, error)
        report(message, code)
        sys.stdout.flush()
        os._exit(code)


def _from_job(path: Path, rank: int, size: int) -> int:
    """A rank that :mod:`zbsolve.runtime.ranks.launch` started; its parent serves the store."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends its ranks
    job = Job.load(path)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    status = Status(path.parent / f"status{rank}")
    report = report_to(path.parent / f"report{rank}.json")
    outcomes = _run_guarded(
        job, rank, size, lambda: connect_store(host, port, job.options.timeout), status, report
    )
    if rank == 0:
        text = json.dumps([outcome.to_json() for outcome in outcomes])
        Path(job.outcome).write_text(text, encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    """The plan, every declared option, and where the trace goes."""
    parser = argparse.ArgumentParser(prog="python -m zbsolve.runtime.worker", allow_abbrev=False)
    parser.add_argument("plan", help="plan file, the same on every rank")
    for name, option in declarations(RunOptions).items():
        flag, said = option.words.rank_flag or option.flag, option.words.rank_help or None
        if option.kind is bool:
            turned = ("store_false", "--no-" + flag[2:]) if option.default else ("store_true", flag)
            parser.add_argument(turned[1], dest=name, action=turned[0], help=said)
            continue
        metavar = None if option.choices else flag[2:].replace("-", "_").upper()
        kind = partial(_integers, flag) if option.kind is tuple else option.kind
        parser.add_argument(
            flag,
            dest=name,
            type=kind,
            default=option.default,
            choices=option.choices or None,
            metavar=metavar,
            help=said,
        )
    parser.add_argument("--trace-out", default=None, help="where rank 0 writes the trace")
    return parser


def _integers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return integers(text, flag)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _from_torchrun(arguments: Sequence[str]) -> int:
    """A rank under torchrun, or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    parser = _parser()
    given = parser.parse_args(arguments)
    missing = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if missing:
        parser.error(f"{missing[0]} is not set: start this under torchrun, or use `zbsolve run`")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = RunOptions(**{name: getattr(given, name) for name in declarations(RunOptions)})
    try:
        options, notes = options.for_instance(load_plan(given.plan).instance)
        options.check()
    except ZbsolveError as error:
        parser.error(str(error))
    for note in notes if rank == 0 else ():
        logger.warning(note)
    job = Job(options, (given.plan,))
    connect = _torchrun_store(rank, options.timeout)
    outcomes = _run_guarded(job, rank, size, connect, Status(), report_to(None))
    for outcome in outcomes:
        if given.trace_out is not None:
            outcome.trace.save(given.trace_out)
        gradients = outcome.trace.gradients
        if gradients is not None and not gradients.equal:
            report_to(None)(f"gradients differ from the unpipelined model: {gradients.where}", 1)
            return 1
    return 0


def _torchrun_store(rank: int, timeout: float) -> Callable[[], Store]:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    prefix = f"zbsolve/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    served: list[Store] = []

    def connect() -> Store:
        if serves and not served:
            limit = datetime.timedelta(seconds=timeout)
            served.append(TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit))
            return PrefixStore(prefix, served[0])
        return PrefixStore(prefix, connect_store(host, port, timeout))

    return connect


def main(arguments: Sequence[str]) -> int:
    """Process entry; returns the exit code."""
    logging.basicConfig(level=os.environ.get("ZBSOLVE_LOG", "WARNING"), format="%(levelname)s %(message)s")
    if len(arguments) == 4 and arguments[0] == "--job":
        return _from_job(Path(arguments[1]), int(arguments[2]), int(arguments[3]))
    return _from_torchrun(arguments)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # The monitor may be in a call to the store; ending the interpreter under it would abort the process.
    os._exit(code)
