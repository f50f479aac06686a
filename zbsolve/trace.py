"""What a run measured, and how it compares with what its plan predicted.

A trace holds every compute op of every measured step on one clock common to all devices, in the
instance's time unit. It tells three kinds of lost time apart: an op that took longer than planned, time
blocked in a receive, and the rest of the bubble. It does not model why an op was slow, and it holds no
events for messages: their time shows as the wait of the op that needs them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from zbsolve.errors import InputError
from zbsolve.files import write_text_atomically
from zbsolve.graph import BW, B, F, Task, TaskKind
from zbsolve.instance import Instance, Stage, raise_first, read_document
from zbsolve.memory import Pairs
from zbsolve.plan import Plan
from zbsolve.schedule import TimedTask
from zbsolve.simulator import Links

SCHEMA = "zbsolve.trace/1"

ComputeOp = Literal["F", "R", "B", "W", "BW"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Index = Annotated[int, Field(ge=0)]


def _tuples(data: Any, *fields: str) -> Any:
    # Strict mode takes only tuples for tuples, and JSON has only arrays.
    if not isinstance(data, Mapping):
        return data
    return {k: tuple(v) if k in fields and isinstance(v, list) else v for k, v in data.items()}


class _FileModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)


class Event(_FileModel):
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


class Step(_FileModel):
    """One measured step: its ops, its makespan (first start to last end), its loss.

    ``loss`` is null when the run was emulated or the loss is not a finite number.
    """

    events: tuple[Event, ...]
    makespan: NonNegative
    loss: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _accept_json_arrays(cls, data: Any) -> Any:
        return _tuples(data, "events")


class GradientCheck(_FileModel):
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


class Trace(_FileModel):
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
    split: tuple[str, ...]
    steps: Annotated[tuple[Step, ...], Field(min_length=1)]
    peak_memory: tuple[float, ...] | None = None
    memory: tuple[tuple[float, ...], ...] | None = None
    memory_during: tuple[tuple[float, ...], ...] | None = None
    gradients: GradientCheck | None = None

    @model_validator(mode="before")
    @classmethod
    def _accept_json_arrays(cls, data: Any) -> Any:
        data = _tuples(data, "split", "steps", "peak_memory", "memory", "memory_during")
        for field in ("memory", "memory_during"):
            if isinstance(data, dict) and isinstance(data.get(field), tuple):
                data[field] = tuple(tuple(v) if isinstance(v, list) else v for v in data[field])
        return data

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


@dataclass(frozen=True, slots=True)
class OpRow:
    """Durations of one op kind on one stage: planned, and the median and extremes measured.

    F&B pairs have rows of their own (op "F&B"): the F of ``stage`` with the BW of ``partner``, as one op.
    """

    op: str
    stage: int
    device: int
    predicted: float
    measured: float
    fastest: float
    slowest: float
    count: int
    partner: int | None = None

    @property
    def stages(self) -> str:
        """The stage, or both stages of a pair."""
        return str(self.stage) if self.partner is None else f"{self.stage}+{self.partner}"

    @property
    def ratio(self) -> float:
        """Measured over predicted; 1 when both are zero, infinite when only the prediction is."""
        if self.predicted > 0:
            return self.measured / self.predicted
        return 1.0 if self.measured <= 0 else float("inf")

    @property
    def where(self) -> str:
        """The op's place in words."""
        return f"{self.op} of stage {self.stages} on device {self.device}"


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """Where one device's share of the makespan went (medians over steps, in the instance's time unit).

    ``busy`` + ``bubble`` is the makespan; ``wait`` is the part of the bubble that is spent in receives.
    ``slow`` is what ops took beyond the plan; ``excess_wait`` is time in receives beyond the idle time that
    the plan has before those ops.
    """

    device: int
    busy_predicted: float
    busy: float
    bubble_predicted: float
    bubble: float
    wait: float
    excess_wait: float

    @property
    def slow(self) -> float:
        """Busy time beyond the plan (negative when the ops were faster)."""
        return self.busy - self.busy_predicted


@dataclass(frozen=True, slots=True)
class Comparison:
    """A plan's prediction beside what was measured. ``ratio`` is measured over predicted makespan."""

    predicted_makespan: float
    measured_makespan: float
    steps: int
    ops: tuple[OpRow, ...]
    devices: tuple[DeviceRow, ...]
    worst: OpRow
    hops: tuple[float | None, ...]

    @property
    def ratio(self) -> float:
        """Measured over predicted makespan."""
        if self.predicted_makespan > 0:
            return self.measured_makespan / self.predicted_makespan
        return 1.0 if self.measured_makespan <= 0 else float("inf")


def compare(plan: Plan, trace: Trace) -> Comparison:
    """Predicted against measured, op by op and device by device.

    Raises
    ------
    InputError
        When the trace was measured with another plan.
    """
    if trace.plan_digest != plan.digest():
        raise InputError(
            f"the trace belongs to another plan (digest {trace.plan_digest[:12]}, this plan has "
            f"{plan.digest()[:12]}): give the plan that was run"
        )
    return compare_times(plan, trace)


def compare_times(plan: Plan, trace: Trace) -> Comparison:
    """Like :func:`compare`, for a plan with the same orders but other times (after recalibration).

    Raises
    ------
    InputError
        When the trace lacks an op of the plan or has one that the plan lacks.
    """
    schedule = plan.schedule()
    planned = {(t.task.kind.value, t.task.stage, t.task.microbatch): t for t in schedule}
    for number, step in enumerate(trace.steps):
        ran = {(e.op, e.stage, e.microbatch) for e in step.events}
        if ran != planned.keys() or len(step.events) != len(planned):
            odd = sorted(ran ^ planned.keys())
            name = "{}{}.{}".format(*odd[0]) if odd else "an op twice"
            raise InputError(f"trace step {number} and plan differ in {name}: give the plan that was run")
    durations = _durations(trace, lambda step: schedule.pairs)
    lengths = {key: timed.end - timed.start for timed, key in _keys(schedule, schedule.pairs)}
    rows = []
    for key, measured in sorted(durations.items(), key=lambda item: (item[0].stage, item[0].op, item[0])):
        rows.append(
            OpRow(
                key.op,
                key.stage,
                plan.instance.stages[key.stage].device,
                lengths[key],
                median(measured),
                min(measured),
                max(measured),
                len(measured),
                key.partner,
            )
        )
    # A ratio off 1 in either direction is a wrong prediction; planned zeros have no ratio to speak of.
    judged = [row for row in rows if row.predicted > 0] or rows
    worst = max(judged, key=lambda row: max(row.ratio, 1 / row.ratio if row.ratio > 0 else float("inf")))
    return Comparison(
        predicted_makespan=plan.makespan,
        measured_makespan=trace.makespan,
        steps=len(trace.steps),
        ops=tuple(rows),
        devices=tuple(_device_row(plan, trace, d) for d in range(plan.instance.num_devices)),
        worst=worst,
        hops=measured_hops(plan.instance, trace),
    )


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


def _durations(trace: Trace, pairs_of: Callable[[Step], Pairs]) -> dict[OpKey, list[float]]:
    found: dict[OpKey, list[float]] = defaultdict(list)
    for step in trace.steps:
        for event, key in _keys(step.events, pairs_of(step)):
            found[key].append(event.duration)
    return dict(found)


def measured_pairs(step: Step) -> Pairs:
    """The F&B pairs of a measured step: an F and a BW of one device recorded as one interval."""
    together: dict[tuple[int, float, float], list[Task]] = defaultdict(list)
    for event in step.events:
        if event.end > event.start:
            together[event.device, event.start, event.end].append(event.task)
    ordered = (sorted(tasks, key=lambda task: task.kind is not F) for tasks in together.values())
    return frozenset((tasks[0], tasks[1]) for tasks in ordered if [task.kind for task in tasks] == [F, BW])


def _device_row(plan: Plan, trace: Trace, device: int) -> DeviceRow:
    program = plan.schedule().devices[device]
    planned_idle: dict[tuple[str, int, int], float] = {}
    free = min((t.start for d in plan.schedule().devices for t in d), default=0.0)
    for (kind, stage, microbatch), start, end in program:
        planned_idle[kind.value, stage, microbatch] = max(0.0, start - free)
        free = end
    busy, wait, excess, bubble = [], [], [], []
    for step in trace.steps:
        events = [event for event in step.events if event.device == device]
        busy.append(_covered((event.start, event.end) for event in events))
        wait.append(sum(event.wait for event in events))
        excess.append(
            sum(
                max(0.0, event.wait - planned_idle[event.op, event.stage, event.microbatch])
                for event in events
            )
        )
        bubble.append(step.makespan - busy[-1])
    busy_predicted = _covered((start, end) for _, start, end in program)
    return DeviceRow(
        device=device,
        busy_predicted=busy_predicted,
        busy=median(busy),
        bubble_predicted=plan.makespan - busy_predicted,
        bubble=median(bubble),
        wait=median(wait),
        excess_wait=median(excess),
    )


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union: the two halves of an F&B pair share one interval."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def measured_hops(instance: Instance, trace: Trace) -> tuple[float | None, ...]:
    """Median latency per boundary, from the ops that were already waiting when their input was sent.

    An op that found its input there says nothing about the hop; neither does a pair that waited for two
    inputs, nor an input that, by the instance's ``t_transfer``, had to wait for its link. None where no op
    waited, 0 where one device holds both stages, and between two replicas.
    """
    samples: dict[int, list[float]] = defaultdict(list)
    for step in trace.steps:
        sent = _sent_at_once(instance, step)
        inputs = {event.task: _remote_inputs(instance, event.task) for event in step.events}
        halves = {task: other for pair in measured_pairs(step) for task, other in (pair, pair[::-1])}
        for event in step.events:
            if event.task in halves and inputs[halves[event.task]]:
                continue
            for source in inputs[event.task]:
                end = sent.get(source)
                if end is not None and event.start - event.wait < end:
                    samples[min(source.stage, event.stage)].append(max(0.0, event.start - end))
    hops: list[float | None] = []
    for boundary in range(instance.num_stages - 1):
        if not instance.crosses(boundary):
            hops.append(0.0)
        else:
            hops.append(median(samples[boundary]) if samples[boundary] else None)
    return tuple(hops)


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


def recalibrate(instance: Instance, trace: Trace) -> Instance:
    """The instance with times replaced by the medians measured in a trace, to re-time the same orders.

    An op's measured length includes the call that sends its result. What the trace does not show (an op
    kind that never ran by itself, a hop that nobody waited for, how long a transfer occupies its link) keeps
    the instance's value. ``t_fb`` is such that the measured pairs take their time, as far as its rules allow:
    a pair slower than both its halves by themselves counts as saving nothing.
    """
    durations = {key: median(values) for key, values in _durations(trace, measured_pairs).items()}
    fields = (("F", "t_f"), ("R", "t_r"), ("B", "t_b"), ("W", "t_w"), ("BW", "t_bw"))
    alone = [
        stage.model_copy(
            update={field: durations[OpKey(op, s)] for op, field in fields if OpKey(op, s) in durations}
        )
        for s, stage in enumerate(instance.stages)
    ]
    # A pair of unlike stages saves what the lesser saves with itself: the most that a stage saved is its own.
    saved: dict[int, float] = {}
    for (op, forward, backward), length in durations.items():
        if op == PAIR and backward is not None:
            saving = alone[forward].t_f + (alone[backward].t_bw or 0.0) - length
            for s in (forward, backward):
                saved[s] = max(saved.get(s, 0.0), saving)
    stages = [
        _with_saving(stage, saved[s] if s in saved else instance.stages[s].pair_saving)
        if s in saved or stage.t_fb is not None
        else stage
        for s, stage in enumerate(alone)
    ]
    hops, transfers = [], []
    for boundary, hop in enumerate(measured_hops(instance, trace)):
        whole = instance.hop(boundary) if hop is None else hop
        transfers.append(min(instance.transfer(boundary), whole))
        hops.append(whole - transfers[-1])
    return instance.with_changes(
        stages=stages, t_comm=hops, t_transfer=None if instance.t_transfer is None else transfers
    )


def _with_saving(stage: Stage, saving: float) -> Stage:
    """The stage with the ``t_fb`` that saves so much, within what ``t_f`` and ``t_bw`` allow."""
    fused = stage.t_bw or 0.0
    least, most = max(stage.t_f, fused), stage.t_f + fused
    return stage.model_copy(update={"t_fb": min(max(most - saving, least), most), "t_bw": fused})


def step_makespan(events: Iterable[Event]) -> float:
    """First start to last end of the ops of one step."""
    events = tuple(events)
    return max(e.end for e in events) - min(e.start for e in events) if events else 0.0
