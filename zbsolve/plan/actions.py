"""What a device's program is made of: compute steps and messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
)

ComputeOp = Literal["F", "R", "B", "W", "BW"]
MessageOp = Literal["SEND_F", "RECV_F", "SEND_B", "RECV_B"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
COMPUTE_OPS = frozenset(("F", "R", "B", "W", "BW"))


class _FileModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Action(_FileModel):
    """One step of a device's program.

    Compute: ``F``, ``R``, ``B``, ``W``, ``BW`` of ``stage`` and ``microbatch``; an F and the BW right after
    it with the same ``start`` and ``end`` are an F&B pair, to run overlapped. Messages are named by the
    stage that executes them: ``SEND_F`` of stage s sends its output to stage s+1, ``RECV_F`` of stage s
    receives from s-1, ``SEND_B`` of stage s sends its input gradient to s-1, ``RECV_B`` of s receives from
    s+1. ``peer`` is the other device and ``message`` the place in the total order of messages, equal on both
    sides.
    """

    op: Literal[ComputeOp, MessageOp]  # not a union of both: an error then lists every op
    stage: Annotated[int, Field(ge=0)]
    microbatch: Annotated[int, Field(ge=0)]
    start: Finite
    end: Finite
    peer: int | None = None
    message: int | None = None

    @property
    def is_compute(self) -> bool:
        return self.op in COMPUTE_OPS

    def __str__(self) -> str:
        return f"{self.op}{self.stage}.{self.microbatch}"


class Program(_FileModel):
    """What one device does, in order."""

    device: int
    actions: tuple[Action, ...]

    @field_validator("actions", mode="before")
    @classmethod
    def _accept_json_array(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value
