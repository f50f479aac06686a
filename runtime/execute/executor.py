"""Executes one device's program, action by action, and records what each op took.

The program is the plan's: nothing is reordered, added or left out. The two halves of an F&B pair run one
after the other, on CUDA on two streams at once, and are recorded as one interval. What a stage computes is
behind :class:`StageSet`, so real layers and emulated ones run through the same loop.

Times come from ``time.perf_counter``, which on Linux is one clock for all processes of a host. On several
hosts each rank's zero is its own exit from the barrier that opens a step, so that events of different
hosts are only as comparable as that barrier is sharp. On CUDA, ops are timed with events on the stream that
they run on and placed on the host's clock at the opening barrier; that path was not run on a GPU. Where a
plan has F&B pairs, or a run puts W's aside, streams are those of :mod:`zbsolve.runtime.execute.lanes`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from zbsolve.model.instance import Instance
from zbsolve.model.kinds import GRADIENT_KINDS, TABLE, TaskKind, step_of
from zbsolve.model.memory import Pairs
from zbsolve.model.schedule import Schedule, TimedTask
from zbsolve.plan.actions import Program, task_of
from zbsolve.runtime.execute.lanes import Lanes
from zbsolve.runtime.execute.transport import Incoming, Shape, Transport
from zbsolve.runtime.status import Status, encode

# (stage, micro-batch)
Fused = Set[tuple[int, int]]


class StageSet(Protocol):
    """The stages that a device holds."""

    def begin(self, step: int, fused: Fused, pairs: Pairs) -> None:
        """Get ready for a step (not timed) in which ``fused`` have BW where the others have B and W."""
        ...

    def shapes(self, direction: str, stage: int, microbatch: int) -> Sequence[Shape]:
        """What the message carries that ``stage`` receives going F (its inputs) or B (output gradients)."""
        ...

    def run(self, op: str, stage: int, microbatch: int, received: list[torch.Tensor]) -> list[torch.Tensor]:
        """Compute one op; returns what goes to the next consumer (outputs of F, input gradients of B, BW)."""
        ...

    def put_aside(self, stage: int, microbatch: int) -> Sequence[torch.Tensor]:
        """What the W of a micro-batch will read, and then free."""
        ...

    def complete(self, stage: int) -> None:
        """All weight gradients of a stage are there."""
        ...

    def end(self) -> None:
        """The step's ops are done; what :meth:`complete` began must be, too."""
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
    """Time on whichever stream of a CUDA device is current. Not run on a GPU."""

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


@dataclass(frozen=True)
class OpRecord:
    """One op as measured, in seconds on the host's clock."""

    op: str
    stage: int
    microbatch: int
    start: float
    end: float
    wait: float


Key = tuple[str, int, int]  # direction F or B, stage, micro-batch


@dataclass(frozen=True, slots=True)
class _Compute:
    """An op with everything that its place in the program decides.

    ``source`` is the message it consumes, from this device when ``local``. ``answers`` is the number of our
    own forward message whose consumer must have run when ``source`` is there. ``hands`` is the key under
    which its result waits for the next op, here when ``hands_local``, else for its send. ``completes``: no
    gradient of its stage's weights comes after it. ``paired``: it is half of an F&B pair.
    """

    op: str
    stage: int
    microbatch: int
    waiting: bytes
    running: bytes
    source: Key | None
    local: bool
    answers: int | None
    hands: Key | None
    hands_local: bool
    completes: bool
    paired: bool

    @property
    def receives(self) -> bool:
        """Whether it waits for another device."""
        return self.source is not None and not self.local


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A send or a receive."""

    sends: bool
    key: Key
    message: int
    peer: int
    running: bytes


def _compile(instance: Instance, program: Program) -> list[_Compute | _Transfer]:
    """The program with each action's neighbours looked up once, not in every step."""
    device_of = [stage.device for stage in instance.stages]
    pairs = pairs_of(program)
    paired = {task for pair in pairs for task in pair}
    # A gradient answers the message that went down before it: its consumer has run.
    sent = {
        (a.stage, a.microbatch): a.message
        for a in program.actions
        if not a.is_compute and a.sends and a.direction == "F"
    }
    last_of = {a.stage: a for a in program.actions if a.op in GRADIENT_KINDS}
    compiled: list[_Compute | _Transfer] = []
    for action in program.actions:
        op, stage, microbatch = action.op, action.stage, action.microbatch
        running = encode(op, stage, microbatch)
        if not action.is_compute:
            assert action.peer is not None
            assert action.message is not None
            key = (action.direction, stage, microbatch)
            compiled.append(_Transfer(action.sends, key, action.message, action.peer, running))
            continue
        source = hands = None
        local = hands_local = False
        row = TABLE[TaskKind(op)]
        if row.direction is not None:
            step = step_of(row.direction)
            before, after = stage - step, stage + step
            if instance.has_neighbour(stage, -step):
                source = (row.direction, stage, microbatch)
                local = device_of[before] == program.device
            if instance.has_neighbour(stage, step):
                hands_local = device_of[after] == program.device
                hands = (row.direction, after if hands_local else stage, microbatch)
        answers = sent.get((stage, microbatch)) if row.direction == "B" and not local else None
        waiting = encode(op, stage, microbatch, waiting=True)
        completes = action is last_of[stage]
        half = task_of(action) in paired
        compiled.append(
            _Compute(
                op,
                stage,
                microbatch,
                waiting,
                running,
                source,
                local,
                answers,
                hands,
                hands_local,
                completes,
                half,
            )
        )
    return compiled


def pairs_of(program: Program) -> Pairs:
    """The F&B pairs of a program."""
    timed = (TimedTask(task_of(a), a.start, a.end) for a in program.actions if a.is_compute)
    return Schedule((tuple(timed),)).pairs


def _joined(records: list[OpRecord], paired: Sequence[bool]) -> list[OpRecord]:
    """Both halves of each F&B pair from the first start to the last end: they are one op together."""
    joined = list(records)
    for place, half in enumerate(paired):
        if half and records[place].op == "F":
            first, second = records[place], records[place + 1]
            start, end = min(first.start, second.start), max(first.end, second.end)
            joined[place] = replace(first, start=start, end=end)
            joined[place + 1] = replace(second, start=start, end=end, wait=0.0)
    return joined


class Executor:
    """Runs the program of one device, step after step."""

    def __init__(
        self,
        instance: Instance,
        program: Program,
        stages: StageSet,
        transport: Transport,
        status: Status,
        strike: Callable[[int, str, int, int], None] | None = None,
        *,
        lanes: Lanes | None = None,
    ) -> None:
        """``lanes``: on which streams actions are issued, where one does not do."""
        self.strike = strike
        self.stages = stages
        self.transport = transport
        self.status = status
        self.clock: Clock = CudaClock() if transport.device.type == "cuda" else Clock()
        self._actions = _compile(instance, program)
        self._pairs = pairs_of(program)
        self._fused = frozenset((a.stage, a.microbatch) for a in program.actions if a.op == "BW")
        self._lanes = lanes

    def step(self, number: int, *, together: bool = True) -> list[OpRecord]:
        """Run all actions of one step, between two barriers unless not ``together``."""
        self.stages.begin(number, self._fused, self._pairs)
        # A collection in the middle of an op would be charged to it. Young objects hold what the last step
        # left behind; the old ones (torch itself has half a million) are Python's business, between steps.
        gc.collect(1)
        gc.disable()
        self.status.set("barrier", number, -1, -1)
        try:
            if together:
                dist.barrier()
            self.clock.open()
            marks = self._run(number)
            self.status.set("barrier", number, -1, -1)
            self.transport.finish()
            self.stages.end()
            if together:
                dist.barrier()
        finally:
            gc.enable()
        seconds = self.clock.seconds
        records = []
        for action, (waited_from, start, end) in marks:
            begun = seconds(start)
            wait = begun - seconds(waited_from) if action.receives else 0.0
            records.append(OpRecord(action.op, action.stage, action.microbatch, begun, seconds(end), wait))
        return _joined(records, [action.paired for action, _ in marks])

    def _run(self, number: int) -> list[tuple[_Compute, list[object]]]:
        """All actions of a step; each op with the marks of its wait, start and end."""
        mark, place = self.clock.mark, self.status.at
        run, transport, strike = self.stages.run, self.transport, self.strike
        incoming: dict[Key, Incoming] = {}
        local: dict[Key, list[torch.Tensor]] = {}
        outbox: dict[Key, list[torch.Tensor]] = {}
        marks: list[tuple[_Compute, list[object]]] = []
        last: list[object] = [None, None, None]
        lanes = self._lanes
        if lanes is not None:
            lanes.begin()
        for at, action in enumerate(self._actions):
            if lanes is not None:
                lanes.enter(at)
            if isinstance(action, _Compute):
                received: list[torch.Tensor] = []
                waited_from = None
                if action.source is not None:
                    if action.local:
                        received = local.pop(action.source)
                    else:
                        place(action.waiting)
                        waited_from = mark()
                        received = incoming.pop(action.source).wait()
                        if action.answers is not None:
                            # The gradient is the answer to our own forward message: its consumer has run.
                            transport.release(action.answers)
                if lanes is not None:
                    lanes.adopt(at, received)
                    if lanes.aside(at):
                        lent = self.stages.put_aside(action.stage, action.microbatch)
                        lanes.adopt(at, lent)
                        del lent
                place(action.running)
                start = mark()
                if strike is not None:
                    strike(number, action.op, action.stage, action.microbatch)
                result = run(action.op, action.stage, action.microbatch, received)
                if action.hands is not None:
                    (local if action.hands_local else outbox)[action.hands] = result
                if action.completes:
                    self.stages.complete(action.stage)
                last = [waited_from, start, mark()]
                marks.append((action, last))
                if lanes is not None:
                    lanes.leave(at)
                continue
            place(action.running)
            if action.sends:
                transport.send(action.message, action.peer, outbox.pop(action.key))
            else:
                shapes = self.stages.shapes(*action.key)
                incoming[action.key] = transport.receive(action.message, action.peer, shapes)
            if lanes is None:
                last[2] = mark()  # an op's length includes the calls that follow it: only waiting is not busy
        if lanes is not None:
            lanes.end()
        return marks
