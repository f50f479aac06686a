"""What a device's program is made of: compute steps and messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from zbsolve.files.models import FileModel, JsonTuple
from zbsolve.model.graph import Task
from zbsolve.model.kinds import Direction, TaskKind

Finite = Annotated[float, Field(allow_inf_nan=False)]

# What a device computes: every kind of task by its letter. What it exchanges: a send or receive each way.
COMPUTE_OPS = tuple(kind.value for kind in TaskKind)
MESSAGE_OPS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
if TYPE_CHECKING:
    ComputeOp = str
    Op = str
else:
    ComputeOp = Literal[COMPUTE_OPS]
    Op = Literal[COMPUTE_OPS + MESSAGE_OPS]


def message_op(sends: bool, direction: Direction) -> Op:
    """The name of a send or receive."""
    return f"{'SEND' if sends else 'RECV'}_{direction}"


class Action(FileModel):
    """One step of a device's program.

    Compute: ``F``, ``R``, ``B``, ``W``, ``BW`` of ``stage`` and ``microbatch``; an F and the BW right after
    it with the same ``start`` and ``end`` are an F&B pair, to run overlapped. Messages are named by the
    stage that executes them: ``SEND_F`` of stage s sends its output to stage s+1, ``RECV_F`` of stage s
    receives from s-1, ``SEND_B`` of stage s sends its input gradient to s-1, ``RECV_B`` of s receives from
    s+1. ``peer`` is the other device and ``message`` the place in the total order of messages, equal on both
    sides.
    """

    op: Op
    stage: Annotated[int, Field(ge=0)]
    microbatch: Annotated[int, Field(ge=0)]
    start: Finite
    end: Finite
    peer: int | None = None
    message: int | None = None

    @property
    def is_compute(self) -> bool:
        """Whether it is a task; else it is a message."""
        return self.op in COMPUTE_OPS

    @property
    def sends(self) -> bool:
        """Whether it is a send; only of messages."""
        return self.op.startswith("SEND")

    @property
    def direction(self) -> Direction:
        """The way a message travels; only of messages."""
        return "F" if self.op.endswith("F") else "B"

    def __str__(self) -> str:
        return f"{self.op}{self.stage}.{self.microbatch}"


def task_of(action: Action) -> Task:
    """The task that a compute action runs."""
    return Task(TaskKind(action.op), action.stage, action.microbatch)


class Program(FileModel):
    """What one device does, in order."""

    device: int
    actions: JsonTuple[Action]
