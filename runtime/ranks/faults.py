"""Failures on purpose, so that what happens then can be tested: at any op, on any rank, or on every link."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from zbsolve.run_options import Fault
from zbsolve.runtime.execute.transport import Transport


class InjectedError(RuntimeError):
    """What a rank raises when it is told to."""


def strike(fault: Fault) -> None:
    """Fail as told."""
    if fault.kind == "raise":
        raise InjectedError("told to fail")
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)  # a stall: only the other ranks and the timeout can end it


class FaultAt:
    """Looks at each op before it runs, and strikes where a fault is due."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._due = {(f.step, f.op, f.stage, f.microbatch): f for f in faults}

    def __call__(self, step: int, op: str, stage: int, microbatch: int) -> None:
        fault = self._due.get((step, op, stage, microbatch))
        if fault is not None:
            strike(fault)


class SlowTransport(Transport):
    """Every message leaves ``delay`` seconds late, in order, while the sender goes on."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None, delay: float) -> None:
        super().__init__(device, group)
        self._delay = delay
        self._due: queue.SimpleQueue[tuple[float, Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._left: dict[int, threading.Event] = {}
        threading.Thread(target=self._deliver, daemon=True).start()

    def _deliver(self) -> None:
        while True:
            due, send, left = self._due.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            send()
            left.set()

    def send(self, message: int, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send later."""
        left = self._left[message] = threading.Event()

        def start() -> None:
            super(SlowTransport, self).send(message, peer, tensors)

        self._due.put((time.perf_counter() + self._delay, start, left))

    def release(self, message: int) -> None:
        """Wait until the message has left, then let go of it."""
        left = self._left.pop(message, None)
        if left is not None:
            left.wait()
        super().release(message)

    def finish(self) -> None:
        """Wait for all sends."""
        for message in list(self._left):
            self.release(message)
        super().finish()
