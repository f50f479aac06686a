"""Who proved a plan's bound and how, and when a gap counts as closed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from zbsolve.files.models import FileModel, JsonTuple
from zbsolve.plan.actions import Finite

# Steps of a proof by trial: more are not made, and not read.
MOST_SHAVED = 5_000


class ProvenLag(FileModel):
    """A fact about few micro-batches that the bound rests on: :class:`zbsolve.bounds.waits.Lag`."""

    stage: Annotated[int, Field(ge=0)]
    distance: Annotated[int, Field(ge=1)]
    value: Finite
    to_end: bool = False


class ShavedTime(FileModel):
    """A step of a proof by trial: :class:`zbsolve.bounds.waits.LeastTime`.

    It holds in all schedules that cost no more than the bound, as is shown with the steps before it.
    """

    kind: Literal["F", "B", "W"]
    stage: Annotated[int, Field(ge=0)]
    microbatch: Annotated[int, Field(ge=0)]
    value: Finite
    after: bool = False


class Proof(FileModel):
    """Who proved the lower bound and how, so that it can be re-derived from the plan file."""

    method: str
    statement: str
    device: int | None = None
    value: Finite | None = None
    lags: Annotated[JsonTuple[ProvenLag], Field(max_length=16)] = ()
    shaved: Annotated[JsonTuple[ShavedTime], Field(max_length=MOST_SHAVED)] = ()

    @model_serializer(mode="wrap")
    def _leave_out_nothing(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = serialize(self)
        return {name: value for name, value in data.items() if value or name not in ("lags", "shaved")}


class SolverInfo(FileModel):
    """Which solver found the plan. ``seconds`` is left out in deterministic mode (equal bytes)."""

    name: str
    version: str
    seconds: float | None = None
    seed: int = 0


def relative_gap(cost: float, bound: float) -> float:
    """(cost - bound) / cost, never negative; 0 for a step without work."""
    return max(0.0, (cost - bound) / cost) if cost > 0 else 0.0
