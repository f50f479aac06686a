"""Executes one device's program, action by action, and records what each op took.

The program is the plan's: nothing is reordered, added or left out. What a stage computes is behind
:class:`StageSet`, so real layers and emulated ones run through the same loop.

Times come from ``time.perf_counter``, which on Linux is one clock for all processes of a host. On several
hosts each rank's zero is its own exit from the barrier that opens a step, so that events of different
hosts are only as comparable as that barrier is sharp. On CUDA, ops are timed with events on the
compute stream and placed on the host's clock at the opening barrier; that path was not run on a GPU.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from zbsolve.instance import Instance
from zbsolve.plan import Action, Program
from zbsolve.runtime.status import Status
from zbsolve.runtime.transport import Incoming, Shape, Transport


class StageSet(Protocol):
    """The stages that a device holds."""

    def begin(self, step: int) -> None:
        """Get ready for a step (not timed)."""
        ...

    def shapes(self, direction: str, stage: int, microbatch: int) -> Sequence[Shape]:
        """What the message carries that ``stage`` receives going F (its inputs) or B (output gradients)."""
        ...

    def run(self, op: str, stage: int, microbatch: int, received: list[torch.Tensor]) -> list[torch.Tensor]:
        """Compute one op; returns what goes to the next consumer (outputs of F, input gradients of B, BW)."""
        ...


class Clock:
    """Host time. :meth:`mark` is called during a step, :meth:`seconds` after it."""

    def open(self) -> None:
        """Called right after the barrier that opens a step."""
        self.zero = time.perf_counter()

    def mark(self) -> object:
        """A point in time."""
        return time.perf_counter()

    def seconds(self, mark: object) -> float:
        """A mark on the host's clock."""
        assert isinstance(mark, float)
        return mark


class CudaClock(Clock):
    """Time on the compute stream of the current CUDA device. Not run on a GPU."""

    def open(self) -> None:
        torch.cuda.synchronize()
        self._base = _cuda_event()
        self._base.record()
        super().open()

    def mark(self) -> object:
        event = _cuda_event()
        event.record()
        return event

    def seconds(self, mark: object) -> float:
        assert isinstance(mark, torch.cuda.Event)
        mark.synchronize()
        return self.zero + float(self._base.elapsed_time(mark)) / 1e3


def _cuda_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass
class _Timed:
    action: Action
    before_wait: object
    start: object
    end: object


@dataclass(frozen=True)
class OpRecord:
    """One op as measured, in seconds on the host's clock."""

    op: str
    stage: int
    microbatch: int
    start: float
    end: float
    wait: float


class Executor:
    """Runs the program of one device, step after step."""

    def __init__(
        self, instance: Instance, program: Program, stages: StageSet, transport: Transport, status: Status
    ) -> None:
        self.instance = instance
        self.program = program
        self.stages = stages
        self.transport = transport
        self.status = status
        self.clock: Clock = CudaClock() if transport.device.type == "cuda" else Clock()
        self._send_numbers = {
            (a.op, a.stage, a.microbatch): a.message for a in program.actions if a.op.startswith("SEND")
        }

    def step(self, number: int) -> list[OpRecord]:
        """Run all actions of one step between two barriers."""
        self.stages.begin(number)
        gc.collect()
        gc.disable()  # a collection in the middle of an op would be charged to it
        self.status.set("barrier", number, -1, -1)
        try:
            dist.barrier()
            self.clock.open()
            timed = self._run(number)
            self.status.set("barrier", number, -1, -1)
            self.transport.finish()
            dist.barrier()
        finally:
            gc.enable()
        return [self._record(entry) for entry in timed]

    def _run(self, number: int) -> list[_Timed]:
        mark = self.clock.mark
        incoming: dict[tuple[str, int, int], Incoming] = {}
        local: dict[tuple[str, int, int], list[torch.Tensor]] = {}
        outbox: dict[tuple[str, int, int], list[torch.Tensor]] = {}
        timed: list[_Timed] = []
        for action in self.program.actions:
            op, stage, microbatch = action.op, action.stage, action.microbatch
            if action.is_compute:
                self.status.set(op, number, stage, microbatch, waiting=True)
                before_wait = mark()
                received = self._input(action, incoming, local)
                self.status.set(op, number, stage, microbatch)
                start = mark()
                result = self.stages.run(op, stage, microbatch, received)
                self._hand_over(action, result, local, outbox)
                timed.append(_Timed(action, before_wait, start, mark()))
                continue
            assert action.peer is not None
            assert action.message is not None
            self.status.set(op, number, stage, microbatch)
            direction = op[-1]
            if op.startswith("RECV"):
                shapes = self.stages.shapes(direction, stage, microbatch)
                incoming[direction, stage, microbatch] = self.transport.receive(
                    action.message, action.peer, shapes
                )
            else:
                self.transport.send(action.message, action.peer, outbox.pop((direction, stage, microbatch)))
            if timed:  # An op's length includes the calls that follow it; only waiting is not busy.
                timed[-1].end = mark()
        return timed

    def _input(
        self,
        action: Action,
        incoming: dict[tuple[str, int, int], Incoming],
        local: dict[tuple[str, int, int], list[torch.Tensor]],
    ) -> list[torch.Tensor]:
        """What an op needs from its neighbour, waiting for it where it comes from another device."""
        stage, microbatch = action.stage, action.microbatch
        if action.op == "W":
            return []
        direction = "F" if action.op == "F" else "B"
        source = stage - 1 if direction == "F" else stage + 1
        if not 0 <= source < self.instance.num_stages:
            return []
        key = (direction, stage, microbatch)
        if self.instance.stages[source].device == self.program.device:
            return local.pop(key)
        received = incoming.pop(key).wait()
        if direction == "B":
            # The gradient is the answer to our own forward message: its consumer has run.
            sent = self._send_numbers.get(("SEND_F", stage, microbatch))
            if sent is not None:
                self.transport.release(sent)
        return received

    def _hand_over(
        self,
        action: Action,
        result: list[torch.Tensor],
        local: dict[tuple[str, int, int], list[torch.Tensor]],
        outbox: dict[tuple[str, int, int], list[torch.Tensor]],
    ) -> None:
        if action.op == "W":
            return
        direction = "F" if action.op == "F" else "B"
        target = action.stage + 1 if direction == "F" else action.stage - 1
        if not 0 <= target < self.instance.num_stages:
            return
        if self.instance.stages[target].device == self.program.device:
            local[direction, target, action.microbatch] = result
        else:
            outbox[direction, action.stage, action.microbatch] = result

    def _record(self, entry: _Timed) -> OpRecord:
        seconds = self.clock.seconds
        start = seconds(entry.start)
        action = entry.action
        waits = self._receives(action)
        return OpRecord(
            action.op,
            action.stage,
            action.microbatch,
            start,
            seconds(entry.end),
            start - seconds(entry.before_wait) if waits else 0.0,
        )

    def _receives(self, action: Action) -> bool:
        if action.op == "W":
            return False
        source = action.stage - 1 if action.op == "F" else action.stage + 1
        return (
            0 <= source < self.instance.num_stages
            and self.instance.stages[source].device != self.program.device
        )
