"""Where a rank is, readable from outside even after it was killed, and how failures reach the others.

Each rank writes its current action into a small memory-mapped file before it begins it; whoever started
the rank reads it. A thread in every rank watches the shared store for the abort key, so that a rank
blocked in a receive ends as soon as any other fails.
"""

from __future__ import annotations

import datetime
import json
import logging
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from zbsolve.errors import EnvironmentFailedError
from zbsolve.plan.actions import COMPUTE_OPS, MESSAGE_OPS

logger = logging.getLogger(__name__)

_FORMAT = struct.Struct("<iiiii")
_HEAD = struct.Struct("<i")
_OPS = ("setup", "barrier", *COMPUTE_OPS, *MESSAGE_OPS, "check", "update", "done")
_ABORT = "abort"
POLL_SECONDS = 0.2


class Place(NamedTuple):
    """What a rank was doing."""

    op: str
    step: int
    stage: int
    microbatch: int
    waiting: bool

    def __str__(self) -> str:
        if self.stage < 0:
            return f"{self.op} of step {self.step}" if self.step >= 0 else self.op
        kind = f"the wait before {self.op}" if self.waiting else self.op
        where = f"{kind} of stage {self.stage}"
        if self.microbatch >= 0:
            where += f", micro-batch {self.microbatch}"
        return where + (f", step {self.step}" if self.step >= 0 else "")


def encode(op: str, stage: int, microbatch: int, waiting: bool = False) -> bytes:
    """A place without its step, ready for :meth:`Status.at`."""
    return _FORMAT.pack(0, _OPS.index(op), stage, microbatch, int(waiting))[_HEAD.size :]


class Status:
    """The current place of this rank, in ``path`` when given (else in memory only)."""

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._map = mmap.mmap(-1, _FORMAT.size)
        else:
            path.write_bytes(bytes(_FORMAT.size))
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _FORMAT.size)
        self.set("setup", -1, -1, -1)

    def set(self, op: str, step: int, stage: int, microbatch: int) -> None:
        """Note what comes next."""
        self.step(step)
        self.at(encode(op, stage, microbatch))

    def step(self, number: int) -> None:
        """Note the step alone."""
        _HEAD.pack_into(self._map, 0, number)

    def at(self, encoded: bytes) -> None:
        """Note a place within the step; the quick way for what comes thousands of times."""
        self._map[_HEAD.size :] = encoded

    def get(self) -> Place:
        """What was noted last."""
        return _decode(self._map[:])


def read_place(path: Path) -> Place:
    """The place that a rank noted last, dead or alive."""
    try:
        return _decode(path.read_bytes())
    except (OSError, struct.error):
        return Place("setup", -1, -1, -1, False)


def _decode(data: bytes) -> Place:
    step, op, stage, microbatch, waiting = _FORMAT.unpack(data[: _FORMAT.size])
    return Place(_OPS[op], step, stage, microbatch, bool(waiting))


def announce_failure(store: Store, message: str) -> str:
    """Make a failure known to all ranks; the first one counts. Returns the one that counts."""
    if store.add(f"{_ABORT}/count", 1) == 1:
        store.set(_ABORT, message)
    return str(store.get(_ABORT).decode())


class Monitor(threading.Thread):
    """Ends this process when another rank failed, stopped beating, or the store is gone.

    It has its own connection: the main thread may be blocked in the other one.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        rank: int,
        size: int,
        status: Status,
        timeout: float,
        report: Callable[[str, int], None],
    ) -> None:
        super().__init__(daemon=True)
        self._connect = connect
        self._rank, self._size = rank, size
        self._status = status
        self._timeout = timeout
        self._report = report
        self._stopped = threading.Event()

    def run(self) -> None:
        seen: dict[int, tuple[str, float]] = {}
        try:
            store = self._connect()
            while not self._stopped.wait(POLL_SECONDS):
                if store.check([_ABORT]):
                    self._end(store.get(_ABORT).decode())
                place = self._status.get()
                store.set(f"beat/{self._rank}", json.dumps([time.time(), str(place)]))
                self._check_beats(store, seen)
        except Exception as error:  # noqa: BLE001 -- whatever broke the store, this rank must not outlive it
            if not self._stopped.is_set():
                self._end(f"the store is gone ({type(error).__name__}): whoever started the ranks has ended")

    def _check_beats(self, store: Store, seen: dict[int, tuple[str, float]]) -> None:
        now = time.monotonic()
        for rank in range(self._size):
            if rank == self._rank or not store.check([f"beat/{rank}"]) or store.check([f"left/{rank}"]):
                continue
            beat = store.get(f"beat/{rank}").decode()
            if seen.get(rank, ("", 0.0))[0] != beat:
                seen[rank] = (beat, now)
            elif now - seen[rank][1] > self._timeout:
                place = json.loads(beat)[1]
                self._end(f"rank {rank} has been silent for {self._timeout:g} s, last seen in {place}")

    def _end(self, reason: str) -> None:
        if not self._stopped.is_set():
            self._report(f"rank {self._rank} ended in {self._status.get()}: {reason}", 3)
            os._exit(EnvironmentFailedError.exit_code)

    def stop(self) -> None:
        """Stop watching: this rank has finished."""
        self._stopped.set()


def connect_store(host: str, port: int, timeout: float) -> TCPStore:
    """A new connection to the store that whoever started the ranks serves."""
    return TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=timeout)
    )


def report_to(path: Path | None) -> Callable[[str, int], None]:
    """Where a rank leaves its last words: a file of its own, or standard error under torchrun."""

    def report(message: str, exit_code: int) -> None:
        if path is None:
            sys.stderr.write(message + "\n")
            sys.stderr.flush()
        elif not path.exists():
            path.write_text(json.dumps({"message": message, "exit_code": exit_code}), encoding="utf-8")

    return report
