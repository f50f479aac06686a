"""What a run measured, and how it compares with what its plan predicted.

A trace holds every compute op of every measured step on one clock common to all devices, in the
instance's time unit. It tells three kinds of lost time apart: an op that took longer than planned, time
blocked in a receive, and the rest of the bubble. It does not model why an op was slow, and it holds no
events for messages: their time shows as the wait of the op that needs them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import Field, ValidationError

from zbsolve.files.atomic import write_text_atomically
from zbsolve.files.documents import raise_first, read_document
from zbsolve.files.models import FileModel, JsonTuple
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance, Stage
from zbsolve.model.kinds import BW, B, F, TaskKind
from zbsolve.model.memory import Pairs
from zbsolve.model.schedule import TimedTask
from zbsolve.model.simulator import Links
from zbsolve.plan.actions import ComputeOp

SCHEMA = "zbsolve.trace/1"

Finite = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Index = Annotated[int, Field(ge=0)]


class Event(FileModel):
    """One compute op as it ran.

    ``start`` and ``end`` are relative to the step's common zero. ``end`` includes the call that hands the
    result to the transport. ``wait`` is the time blocked in a receive right before ``start``.
    """

    device: Index
    op: ComputeOp
    stage: Index
    microbatch: Index
    start: Finite
    end: Finite
    wait: NonNegative = 0.0

    @property
    def duration(self) -> float:
        """Length of the op without its wait."""
        return self.end - self.start

    @property
    def task(self) -> Task:
        """The op as a task of the plan."""
        return Task(TaskKind(self.op), self.stage, self.microbatch)

    def __str__(self) -> str:
        return f"{self.op}{self.stage}.{self.microbatch}"


class Step(FileModel):
    """One measured step: its ops, its makespan (first start to last end), its loss.

    ``loss`` is null when the run was emulated or the loss is not a finite number.
    """

    events: JsonTuple[Event]
    makespan: NonNegative
    loss: float | None = None


class GradientCheck(FileModel):
    """Gradients of the first step against the unpipelined model.

    ``equal`` allows the rounding of sums taken in another order (``tolerance``, relative to the largest
    entry of the same gradient); ``bit_equal`` allows nothing. ``where`` names the worst parameter.
    """

    checked: bool
    equal: bool
    bit_equal: bool
    worst_relative_difference: float
    tolerance: float
    where: str


class Trace(FileModel):
    """Measured steps of one plan.

    ``split`` names, per stage, how the backward was split ("deferred", "generic" or "emulated").
    ``peak_memory`` is the highest memory per device, in the instance's memory unit: static memory plus
    activations, and transients as far as the runtime sees them; null when nothing real was held. ``memory``
    is the memory after each op of each device, in program order; ``memory_during`` the most while each ran.
    """

    schema_: Literal["zbsolve.trace/1"] = Field(default="zbsolve.trace/1", alias="schema")
    plan_digest: str
    mode: Literal["real", "emulated"]
    hardware: str
    backend: str
    model: str
    time_unit: str
    memory_unit: str
    split: JsonTuple[str]
    steps: Annotated[JsonTuple[Step], Field(min_length=1)]
    peak_memory: JsonTuple[float] | None = None
    memory: JsonTuple[JsonTuple[float]] | None = None
    memory_during: JsonTuple[JsonTuple[float]] | None = None
    gradients: GradientCheck | None = None

    @property
    def losses(self) -> tuple[float | None, ...]:
        """Loss of each step (mean over the whole batch)."""
        return tuple(step.loss for step in self.steps)

    @property
    def makespan(self) -> float:
        """Median measured makespan over the steps."""
        return median(step.makespan for step in self.steps)

    @property
    def median_step(self) -> Step:
        """The step whose makespan lies in the middle (the lower one of two): the one to draw."""
        return sorted(self.steps, key=lambda step: step.makespan)[(len(self.steps) - 1) // 2]

    def to_json(self) -> str:
        """The trace file's text, one event a line."""
        data = self.model_dump(mode="json", by_alias=True)
        steps = data.pop("steps")
        head = json.dumps(data, indent=1)[:-2]
        blocks = [
            f'  {{"makespan": {json.dumps(step["makespan"])}, "loss": {json.dumps(step["loss"])}, '
            '"events": [\n' + ",\n".join("   " + json.dumps(event) for event in step["events"]) + "\n  ]}"
            for step in steps
        ]
        return head + ',\n "steps": [\n' + ",\n".join(blocks) + "\n ]\n}\n"

    def save(self, path: str | Path) -> None:
        """Write the trace file, whole or not at all."""
        write_text_atomically(path, self.to_json())


def load_trace(path: str | Path) -> Trace:
    """Read and validate a trace file."""
    return parse_trace(read_document(path, SCHEMA), str(path))


def parse_trace(data: Any, where: str) -> Trace:
    """Validate JSON data. ``where`` (a file name) begins the error line."""
    try:
        return Trace.model_validate(data)
    except ValidationError as error:
        raise_first(error, where)


# --- predicted against measured ------------------------------------------------------------------


# What the two halves of a pair are called as one op.
PAIR = "F&B"


class OpKey(NamedTuple):
    """An op kind of a stage; of an F&B pair, the stage of its F and that of its BW (``partner``)."""

    op: str
    stage: int
    partner: int | None = None


Ran = TypeVar("Ran", Event, TimedTask)


def _keys(ran: Iterable[Ran], pairs: Pairs) -> Iterator[tuple[Ran, OpKey]]:
    """Each op with what it counts as; a pair once, by its F."""
    second_of = dict(pairs)
    seconds = set(second_of.values())
    for each in ran:
        if each.task in second_of:
            yield each, OpKey(PAIR, each.task.stage, second_of[each.task].stage)
        elif each.task not in seconds:
            yield each, OpKey(each.task.kind.value, each.task.stage)


def measured_pairs(step: Step) -> Pairs:
    """The F&B pairs of a measured step: an F and a BW of one device recorded as one interval."""
    together: dict[tuple[int, float, float], list[Task]] = defaultdict(list)
    for event in step.events:
        if event.end > event.start:
            together[event.device, event.start, event.end].append(event.task)
    ordered = (sorted(tasks, key=lambda task: task.kind is not F) for tasks in together.values())
    return frozenset((tasks[0], tasks[1]) for tasks in ordered if [task.kind for task in tasks] == [F, BW])


def _remote_inputs(instance: Instance, task: Task) -> tuple[Task, ...]:
    """The tasks on other devices that a task may wait for (a backward for B or BW, whichever ran)."""
    kinds, source = {F: ((F,), -1), B: ((B, BW), 1), BW: ((B, BW), 1)}.get(task.kind, ((), 0))
    stage = task.stage + source
    if not (kinds and 0 <= stage < instance.num_stages and instance.crosses(min(stage, task.stage))):
        return ()
    return tuple(Task(kind, stage, task.microbatch) for kind in kinds)


def _sent_at_once(instance: Instance, step: Step) -> dict[Task, float]:
    """End of every op whose result, as far as the instance's links go, left its device at that end."""
    if instance.t_transfer is None:
        return {event.task: event.end for event in step.events}
    links = Links(instance)
    sent = {}
    for event in sorted(step.events, key=lambda event: (event.start, event.end)):
        if links.leaves(event.task, event.end) <= event.end:
            sent[event.task] = event.end
    return sent


def _with_saving(stage: Stage, saving: float) -> Stage:
    """The stage with the ``t_fb`` that saves so much, within what ``t_f`` and ``t_bw`` allow."""
    fused = stage.t_bw or 0.0
    least, most = max(stage.t_f, fused), stage.t_f + fused
    return stage.model_copy(update={"t_fb": min(max(most - saving, least), most), "t_bw": fused})


def step_makespan(events: Iterable[Event]) -> float:
    """First start to last end of the ops of one step."""
    events = tuple(events)
    return max(e.end for e in events) - min(e.start for e in events) if events else 0.0
