"""Predicted against measured: slow ops, waits in receives and the rest of the bubble told apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from zbsolve.errors import InputError
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import TABLE
from zbsolve.model.memory import Pairs
from zbsolve.plan.plan import Plan
from zbsolve.trace.trace import (
    PAIR,
    OpKey,
    Step,
    Trace,
    _keys,
    _remote_inputs,
    _sent_at_once,
    _with_saving,
    measured_pairs,
)


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


def _durations(trace: Trace, pairs_of: Callable[[Step], Pairs]) -> dict[OpKey, list[float]]:
    found: dict[OpKey, list[float]] = defaultdict(list)
    for step in trace.steps:
        for event, key in _keys(step.events, pairs_of(step)):
            found[key].append(event.duration)
    return dict(found)


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


def recalibrate(instance: Instance, trace: Trace) -> Instance:
    """The instance with times replaced by the medians measured in a trace, to re-time the same orders.

    An op's measured length includes the call that sends its result. What the trace does not show (an op
    kind that never ran by itself, a hop that nobody waited for, how long a transfer occupies its link) keeps
    the instance's value. ``t_fb`` is such that the measured pairs take their time, as far as its rules allow:
    a pair slower than both its halves by themselves counts as saving nothing.
    """
    durations = {key: median(values) for key, values in _durations(trace, measured_pairs).items()}
    alone = [
        stage.model_copy(
            update={
                row.field: durations[OpKey(kind, s)]
                for kind, row in TABLE.items()
                if OpKey(kind, s) in durations
            }
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
