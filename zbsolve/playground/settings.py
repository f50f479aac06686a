"""What the page's form says, and the instance that it means."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zbsolve.errors import InputError
from zbsolve.files.documents import raise_first, require_schema
from zbsolve.model.instance import SCHEMA, Instance, equal_stages, parse_instance
from zbsolve.model.objective import Objective

# Above this a page answers too slowly to play with; the command line has no such limit.
MOST_TASKS = 60_000
LONGEST_SOLVE = 600.0

Size = Annotated[int, Field(ge=1, le=4096)]
Amount = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]


class Settings(BaseModel):
    """The form. With ``instance`` (a loaded file) sizes, times and memory come from there, not from the form.

    Attributes
    ----------
    p, m, v : int
        Devices, micro-batches, chunks per device (v counts for loop and V placements).
    t_f, t_b, t_w, t_comm, mem_b, mem_w : float
        Per device, shared over its chunks: v chunks do the same work in v parts.
    n : int, optional
        N, consecutive micro-batches per chunk of one more interleaved schedule beside the catalogue's.
    cap : str
        As ``--memory-cap``; "" leaves a loaded instance's own cap.
    schedule : str
        The baseline to draw.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    p: Size = 4
    m: Size = 8
    v: Annotated[int, Field(ge=1, le=16)] = 2
    n: Annotated[int, Field(ge=1, le=4096)] | None = None
    placement: Literal["linear", "loop", "v"] = "linear"
    t_f: Amount = 1.0
    t_b: Amount = 1.0
    t_w: Amount = 1.0
    t_comm: Amount = 0.0
    mem_b: Amount = 1.0
    mem_w: Amount = 0.5
    cap: Annotated[str, Field(max_length=40)] = ""
    objective: Objective = "makespan"
    schedule: Annotated[str, Field(max_length=80)] = "1f1b"
    solver: Annotated[str, Field(max_length=80)] = "auto"
    time_limit: Annotated[float, Field(gt=0, le=LONGEST_SOLVE)] = 20.0
    instance: dict[str, Any] | None = None

    def to_instance(self) -> Instance:
        """The instance meant, under the cap meant.

        Raises
        ------
        InputError
            Sizes that do not fit together, a bad cap, or more tasks than a page can show.
        """
        if self.instance is not None:
            require_schema(self.instance, "instance", SCHEMA)
            instance = parse_instance(self.instance, "instance")
        else:
            chunks = 1 if self.placement == "linear" else self.v
            _require_few(3 * self.p * chunks * self.m)
            instance = equal_stages(
                self.p,
                self.m,
                self.t_f / chunks,
                self.t_b / chunks,
                self.t_w / chunks,
                self.t_comm,
                mem_b=self.mem_b / chunks,
                mem_w=self.mem_w / chunks,
                placement=self.placement,
                chunks=chunks,
                name=f"p={self.p}, m={self.m}" + (f", v={chunks} ({self.placement})" if chunks > 1 else ""),
            )
        _require_few(instance.num_tasks)
        return instance.with_memory_cap(self.cap) if self.cap else instance


def _require_few(tasks: int) -> None:
    if tasks > MOST_TASKS:
        raise InputError(
            f"{tasks:,} tasks: the page shows up to {MOST_TASKS:,}: use fewer micro-batches or devices, "
            "or the command line"
        )


def parse_settings(data: Any) -> Settings:
    """Settings of a request; raises ``InputError`` with one line that names the field."""
    try:
        return Settings.model_validate(data)
    except ValidationError as error:
        raise_first(error, "settings")
