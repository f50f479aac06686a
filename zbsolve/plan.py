"""The plan: one program per device with its sends and receives, and a certificate of how good it is.

Lowering adds the messages that a schedule implies. One total order of messages, consistent with the
plan's own timeline, is fixed for all devices: each device enqueues its sends and receives in that order.
That is what makes the programs safe on transports that pair messages by order and may block a sender
(proof in :func:`order_messages`; :func:`dry_run` shows it for each plan before anything is launched).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from zbsolve.errors import InfeasibleError
from zbsolve.files import write_text_atomically
from zbsolve.graph import Task, TaskKind, backward_kinds
from zbsolve.instance import Instance, parse_instance, raise_first, read_document
from zbsolve.links import Queue, Transfer, time_on_queues
from zbsolve.memory import peak_memory
from zbsolve.schedule import Schedule, TimedTask, Violation, check
from zbsolve.simulator import Links, simulate_for, topological_order
from zbsolve.tolerances import is_closed, same_figure, time_tolerance

SCHEMA = "zbsolve.plan/1"

ComputeOp = Literal["F", "R", "B", "W", "BW"]
MessageOp = Literal["SEND_F", "RECV_F", "SEND_B", "RECV_B"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
# Steps of a proof by trial: more are not made, and not read.
MOST_SHAVED = 5_000
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


class ProvenLag(_FileModel):
    """A fact about few micro-batches that the bound rests on: :class:`zbsolve.precedence.Lag`."""

    stage: Annotated[int, Field(ge=0)]
    distance: Annotated[int, Field(ge=1)]
    value: Finite
    to_end: bool = False


class ShavedTime(_FileModel):
    """A step of a proof by trial: :class:`zbsolve.precedence.LeastTime`.

    It holds in all schedules that cost no more than the bound, as is shown with the steps before it.
    """

    kind: Literal["F", "B", "W"]
    stage: Annotated[int, Field(ge=0)]
    microbatch: Annotated[int, Field(ge=0)]
    value: Finite
    after: bool = False


class Proof(_FileModel):
    """Who proved the lower bound and how, so that it can be re-derived from the plan file."""

    method: str
    statement: str
    device: int | None = None
    value: Finite | None = None
    lags: Annotated[tuple[ProvenLag, ...], Field(max_length=16)] = ()
    shaved: Annotated[tuple[ShavedTime, ...], Field(max_length=MOST_SHAVED)] = ()

    @field_validator("lags", "shaved", mode="before")
    @classmethod
    def _accept_json_array(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_serializer(mode="wrap")
    def _leave_out_nothing(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = serialize(self)
        return {name: value for name, value in data.items() if value or name not in ("lags", "shaved")}


class SolverInfo(_FileModel):
    """Which solver found the plan. ``seconds`` is left out in deterministic mode (equal bytes)."""

    name: str
    version: str
    seconds: float | None = None
    seed: int = 0


class Plan(_FileModel):
    """A schedule for an instance, lowered and certified. Times in the instance's unit.

    ``gap`` is (cost - lower bound) / cost for the stated objective; ``status`` is "optimal" only
    when the proof closed it. ``queue`` names the queue model whose waits the times contain
    (:mod:`zbsolve.links`); "unlimited" has none.
    """

    schema_: Literal["zbsolve.plan/1"] = Field(default="zbsolve.plan/1", alias="schema")
    instance: Instance
    objective: Literal["makespan", "span"]
    status: Literal["optimal", "feasible"]
    makespan: Finite
    span: Finite
    lower_bound: Finite
    gap: Finite
    bound_proof: Proof
    solver: SolverInfo
    peak_memory: tuple[Finite, ...]
    programs: tuple[Program, ...]
    queue: Queue = "unlimited"

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)

    @field_validator("peak_memory", "programs", mode="before")
    @classmethod
    def _accept_json_array(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _one_program_per_device(self) -> Plan:
        p = self.instance.num_devices
        if [program.device for program in self.programs] != list(range(p)):
            raise ValueError(f"programs: give one program for each device 0 to {p - 1}, in order")
        if len(self.peak_memory) != p:
            raise ValueError(f"peak_memory has {len(self.peak_memory)} entries: give {p} (one per device)")
        return self

    @property
    def cost(self) -> float:
        """Value of the plan's own objective."""
        return self.span if self.objective == "span" else self.makespan

    def schedule(self) -> Schedule:
        """The timed compute tasks, without messages."""
        return Schedule(
            tuple(
                tuple(
                    TimedTask(Task(TaskKind(a.op), a.stage, a.microbatch), a.start, a.end)
                    for a in program.actions
                    if a.is_compute
                )
                for program in self.programs
            )
        )

    def to_json_dict(self) -> dict[str, Any]:
        """JSON data in the file format's field order."""
        return {
            "schema": SCHEMA,
            "instance": self.instance.to_json_dict(),
            "objective": self.objective,
            "status": self.status,
            "makespan": self.makespan,
            "span": self.span,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "bound_proof": self.bound_proof.model_dump(mode="json", exclude_none=True),
            "solver": self.solver.model_dump(exclude_none=True),
            "peak_memory": list(self.peak_memory),
            "queue": self.queue,
            "programs": [
                {"device": program.device, "actions": [_action_json(a) for a in program.actions]}
                for program in self.programs
            ],
        }

    def to_json(self) -> str:
        """The plan file's text: one action a line, so that plans can be read and compared."""
        data = self.to_json_dict()
        programs = data.pop("programs")
        head = json.dumps(data, indent=1)[:-2]
        blocks = [
            f'  {{"device": {program["device"]}, "actions": [\n'
            + ",\n".join("   " + json.dumps(action) for action in program["actions"])
            + "\n  ]}"
            for program in programs
        ]
        return head + ',\n "programs": [\n' + ",\n".join(blocks) + "\n ]\n}\n"

    def save(self, path: str | Path) -> None:
        """Write the plan file, whole or not at all."""
        write_text_atomically(path, self.to_json())

    def _repr_html_(self) -> str:
        """How a notebook shows the plan: certificate, memory, Gantt chart."""
        from zbsolve.report.notebook import plan_html

        return plan_html(self)

    def digest(self) -> str:
        """SHA-256 of programs and instance: ranks compare it before they start."""
        data = self.to_json_dict()
        text = json.dumps({"instance": data["instance"], "programs": data["programs"]}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _action_json(action: Action) -> dict[str, Any]:
    data: dict[str, Any] = {
        "op": action.op,
        "stage": action.stage,
        "microbatch": action.microbatch,
        "start": action.start,
        "end": action.end,
    }
    if action.peer is not None:
        data["peer"] = action.peer
        data["message"] = action.message
    return data


def load_plan(path: str | Path) -> Plan:
    """Read a plan file; the format is validated here, the rules by :func:`check_plan`."""
    return parse_plan(read_document(path, SCHEMA), str(path))


def parse_plan(data: Any, where: str) -> Plan:
    """Validate JSON data. ``where`` (a file name) begins the error line."""
    if isinstance(data, dict) and isinstance(data.get("instance"), dict):
        data = {**data, "instance": parse_instance(data["instance"], f"{where}: instance")}
    try:
        return Plan.model_validate(data)
    except ValidationError as error:
        raise_first(error, where)


# --- lowering ----------------------------------------------------------------------------------


class Message(NamedTuple):
    """One transfer between devices: the output of F (or the input gradient) of a stage and micro-batch."""

    producer: Task
    consumer: Task
    source: int
    target: int
    ready: float
    arrival: float

    @property
    def direction(self) -> Literal["F", "B"]:
        return "F" if self.producer.kind is TaskKind.F else "B"


def order_messages(instance: Instance, schedule: Schedule) -> list[Message]:
    """Every message that the schedule implies, in one total order consistent with its timeline.

    Sorted by the moment the producer ends, ties by a topological order. If the consumer of one message
    has to run before the producer of another, the first message's ready time is not later and its
    producer is topologically earlier, so the order respects every dependency. Therefore when all
    devices enqueue in this order no set of devices can block each other: of the messages not yet
    exchanged take the first; both its devices have finished all earlier ones, so every task before its
    send has its inputs, and its receiver is already waiting for it.
    """
    order = topological_order(instance, schedule.orders, schedule.pairs)
    ranked = {task: rank for rank, (_, task) in enumerate(order)}
    links = Links(instance)
    messages = []
    for source, program in enumerate(schedule.devices):
        for task, _, end in program:
            consumer = _remote_consumer(instance, task, ranked)
            if consumer is not None:
                boundary = min(task.stage, consumer.stage)
                target = instance.stages[consumer.stage].device
                arrival = links.leaves(task, end) + instance.hop(boundary)
                messages.append(Message(task, consumer, source, target, end, arrival))
    messages.sort(key=lambda message: (message.ready, ranked[message.producer]))
    return messages


def _remote_consumer(instance: Instance, task: Task, present: dict[Task, int]) -> Task | None:
    """The task on another device that needs this task's result, if any."""
    kind, stage, microbatch = task
    if kind in (TaskKind.W, TaskKind.R):
        return None
    neighbour = stage + 1 if kind is TaskKind.F else stage - 1
    boundary = min(stage, neighbour)
    if not 0 <= boundary < instance.num_stages - 1 or not instance.crosses(boundary):
        return None
    if kind is TaskKind.F:
        return Task(TaskKind.F, neighbour, microbatch)
    kinds = backward_kinds(instance, neighbour)
    return next(t for k in kinds if (t := Task(k, neighbour, microbatch)) in present)


def lower(instance: Instance, schedule: Schedule) -> tuple[Program, ...]:
    """Programs with messages: each send right after its producer, each receive as early as the order permits.

    A receive is enqueued right behind the device's previous message, so that an early sender never
    waits for a device that is busy computing.
    """
    programs: list[list[Action]] = [[] for _ in range(instance.num_devices)]
    messages_of: list[list[tuple[int, Message]]] = [[] for _ in range(instance.num_devices)]
    for number, message in enumerate(order_messages(instance, schedule)):
        messages_of[message.source].append((number, message))
        messages_of[message.target].append((number, message))
    for device, program in enumerate(schedule.devices):
        actions = programs[device]
        pending = iter(messages_of[device])
        upcoming = next(pending, None)
        # The first of a pair has ended, and may send, when the second has.
        first_of_pair = {forward for forward, _ in schedule.pairs}
        ended: set[Task] = set()
        for timed in (None, *program):
            if timed is not None:
                task = timed.task
                actions.append(
                    Action(
                        op=task.kind.value,
                        stage=task.stage,
                        microbatch=task.microbatch,
                        start=timed.start,
                        end=timed.end,
                    )
                )
                ended.add(task)
                if task in first_of_pair:
                    continue
            while upcoming is not None:
                number, message = upcoming
                sends = message.source == device
                if sends and message.producer not in ended:
                    break
                actions.append(_message_action(number, message, sends))
                upcoming = next(pending, None)
        assert upcoming is None  # every send has its producer in the program
    return tuple(Program(device=d, actions=tuple(actions)) for d, actions in enumerate(programs))


# By whether it sends, and the direction.
_MESSAGE_OPS: dict[tuple[bool, str], MessageOp] = {
    (True, "F"): "SEND_F",
    (False, "F"): "RECV_F",
    (True, "B"): "SEND_B",
    (False, "B"): "RECV_B",
}


def _message_action(number: int, message: Message, sends: bool) -> Action:
    end = message.producer if sends else message.consumer
    return Action(
        op=_MESSAGE_OPS[sends, message.direction],
        stage=end.stage,
        microbatch=end.microbatch,
        start=message.ready,
        end=message.arrival,
        peer=message.target if sends else message.source,
        message=number,
    )


# --- deadlock dry run --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stuck:
    """Why programs cannot finish: what each blocked device waits for."""

    waits: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.waits)


def dry_run(instance: Instance, programs: Sequence[Program]) -> Stuck | None:
    """Run the programs with blocking sends and receives (each waits for its counterpart); None when all end.

    A pair exchanges messages only head to head and of the same number, as on a transport that pairs by
    order. A compute action needs its inputs to have arrived, which also catches a receive
    placed behind its consumer.
    """
    position = [0] * len(programs)
    done: set[Task] = set()
    arrived: set[tuple[str, int, int]] = set()

    def head(device: int) -> Action | None:
        actions = programs[device].actions
        return actions[position[device]] if position[device] < len(actions) else None

    def runnable(action: Action) -> bool:
        task = Task(TaskKind(action.op), action.stage, action.microbatch)
        return all(_input_ready(instance, task, needed, done, arrived) for needed in _inputs(instance, task))

    active = list(range(len(programs)))
    while active:
        device = active.pop()
        while (action := head(device)) is not None:
            if action.is_compute:
                if not runnable(action):
                    break
                done.add(Task(TaskKind(action.op), action.stage, action.microbatch))
                position[device] += 1
                continue
            peer = action.peer
            other = head(peer) if peer is not None and 0 <= peer < len(programs) else None
            if other is None or not _are_counterparts(device, action, other):
                break
            assert peer is not None
            receive = action if action.op.startswith("RECV") else other
            arrived.add((receive.op[-1], receive.stage, receive.microbatch))
            position[device] += 1
            position[peer] += 1
            active.append(peer)
    blocked = [(d, action) for d in range(len(programs)) if (action := head(d)) is not None]
    if not blocked:
        return None
    return Stuck(
        tuple(
            f"device {d} waits in {action}"
            + (f" for device {action.peer}" if action.peer is not None else "")
            for d, action in blocked
        )
    )


def _are_counterparts(device: int, action: Action, other: Action) -> bool:
    opposite = ("RECV_" if action.op.startswith("SEND") else "SEND_") + action.op[-1]
    return other.op == opposite and other.peer == device and other.message == action.message


def _inputs(instance: Instance, task: Task) -> list[Task]:
    """Alternatives collapsed: the F, R or B of the neighbour or own stage whose result a task needs."""
    kind, stage, microbatch = task
    if kind is TaskKind.F:
        return [] if instance.is_first(stage) else [Task(TaskKind.F, stage - 1, microbatch)]
    if kind is TaskKind.W:
        return [Task(TaskKind.B, stage, microbatch)]
    if kind is TaskKind.R or instance.stages[stage].t_r is None:
        own = [Task(TaskKind.F, stage, microbatch)]
    else:
        own = [Task(TaskKind.R, stage, microbatch)]
    if kind is TaskKind.R or instance.is_last(stage):
        return own
    return [*own, Task(TaskKind.B, stage + 1, microbatch)]


def _input_ready(
    instance: Instance, task: Task, needed: Task, done: set[Task], arrived: set[tuple[str, int, int]]
) -> bool:
    if not (needed.stage < instance.num_stages and task.stage < instance.num_stages):
        return False
    if instance.stages[needed.stage].device != instance.stages[task.stage].device:
        return ("F" if needed.kind is TaskKind.F else "B", task.stage, task.microbatch) in arrived
    if needed in done:
        return True
    return needed.kind is TaskKind.B and needed._replace(kind=TaskKind.BW) in done


# --- judging a plan ----------------------------------------------------------------------------


def check_plan(plan: Plan) -> list[Violation]:
    """Every rule that a plan breaks: the schedule's, the messages', and the figures it states."""
    schedule = plan.schedule()
    violations = check(plan.instance, schedule)
    if violations:
        return violations
    violations += _check_messages(plan, schedule)
    stuck = dry_run(plan.instance, plan.programs)
    if stuck is not None:
        violations.append(Violation("deadlock", str(stuck)))
    violations += _check_figures(plan, schedule)
    return violations


def _check_messages(plan: Plan, schedule: Schedule) -> list[Violation]:
    expected = {
        (a.op, a.stage, a.microbatch): (d, a) for d, a in _message_actions(lower(plan.instance, schedule))
    }
    queued: dict[int, Transfer] = {}
    if plan.queue != "unlimited":
        try:
            timing = time_on_queues(plan.instance, plan.programs, plan.queue)
        except InfeasibleError as error:
            return [Violation("messages", str(error))]
        queued = {transfer.number: transfer for transfer in timing.transfers}
    found: set[tuple[str, int, int]] = set()
    violations = []
    tolerance = time_tolerance(schedule.makespan)
    for device, action in _message_actions(plan.programs):
        key = (action.op, action.stage, action.microbatch)
        home, unhindered = expected.get(key, (None, action))
        due = unhindered if action.message is None else queued.get(action.message, unhindered)
        if key in found:
            violations.append(Violation("messages", f"device {device}: {action} appears twice"))
        elif home != device:
            violations.append(Violation("messages", f"device {device}: {action} is not needed there"))
        elif max(abs(action.start - due.start), abs(action.end - due.end)) > tolerance:
            violations.append(
                Violation(
                    "messages",
                    f"device {device}: {action} is stated from {action.start:g} to {action.end:g}, "
                    f"its data leave at {due.start:g} and arrive at {due.end:g}",
                )
            )
        found.add(key)
    for op, stage, microbatch in sorted(expected.keys() - found):
        violations.append(Violation("messages", f"{op}{stage}.{microbatch} is missing"))
    return violations


def _message_actions(programs: Sequence[Program]) -> list[tuple[int, Action]]:
    return [(p.device, action) for p in programs for action in p.actions if not action.is_compute]


def peaks_of(instance: Instance, schedule: Schedule) -> tuple[float, ...]:
    """Peak memory of each device under a schedule, static memory included."""
    return tuple(peak_memory(instance, d, order, schedule.pairs) for d, order in enumerate(schedule.orders))


def _check_figures(plan: Plan, schedule: Schedule) -> list[Violation]:
    """Stated makespan, span, peak memory, gap and status against what the programs really give."""
    peaks = peaks_of(plan.instance, schedule)
    cost = schedule.cost(plan.objective)
    gap = relative_gap(cost, plan.lower_bound)
    rows = [
        ("makespan", plan.makespan, schedule.makespan),
        ("span", plan.span, schedule.span),
        *((f"peak_memory[{d}]", plan.peak_memory[d], peak) for d, peak in enumerate(peaks)),
    ]
    found = [
        f"{name} is stated as {stated:.10g}, the programs give {real:.10g}"
        for name, stated, real in rows
        if not same_figure(stated, real)
    ]
    if not same_figure(1.0 - plan.gap, 1.0 - gap) or plan.gap < 0:
        found.append(f"gap is stated as {plan.gap:.10g}, the programs and lower_bound give {gap:.10g}")
    if plan.lower_bound > cost + time_tolerance(cost):
        found.append(f"lower_bound {plan.lower_bound:.10g} is above the plan's own cost {cost:.10g}")
    if plan.status == "optimal" and not is_closed(gap):
        found.append(f"status is optimal but the gap is {100 * gap:.4g}%: not proven")
    # Each single time may be off by the tolerance; all of a path together may not gain by it.
    least = simulate_for(plan.instance, schedule.orders, plan.objective, schedule.pairs).cost(plan.objective)
    if cost < least - time_tolerance(least):
        found.append(f"{plan.objective} {cost:.10g} is below {least:.10g}, the least that these orders take")
    return [Violation("figures", sentence) for sentence in found]


def relative_gap(cost: float, bound: float) -> float:
    """(cost - bound) / cost, never negative; 0 for a step without work."""
    return max(0.0, (cost - bound) / cost) if cost > 0 else 0.0


def make_plan(
    instance: Instance,
    schedule: Schedule,
    *,
    objective: Literal["makespan", "span"],
    lower_bound: float,
    proof: Proof,
    solver: SolverInfo,
    judged: bool = False,
) -> Plan:
    """Lower a schedule and state its figures; raises ``InfeasibleError`` when it breaks a rule.

    A bound within float64 rounding of the cost is stated as the cost itself. ``judged``: the schedule has
    passed :func:`zbsolve.schedule.check` already.
    """
    violations = [] if judged else check(instance, schedule)
    if violations:
        raise InfeasibleError(f"the schedule is not valid: {violations[0]}")
    cost = schedule.cost(objective)
    bound = min(lower_bound, cost)
    gap = relative_gap(cost, bound)
    return Plan(
        instance=instance,
        objective=objective,
        status="optimal" if is_closed(gap) else "feasible",
        makespan=schedule.makespan,
        span=schedule.span,
        lower_bound=bound,
        gap=gap,
        bound_proof=proof,
        solver=solver,
        peak_memory=peaks_of(instance, schedule),
        programs=lower(instance, schedule),
    )


def assume_queue(plan: Plan, queue: Queue) -> Plan:
    """The same programs, timed with the waits of a queue model: the plan then says that it assumes it.

    The lower bound stays one: queues only add waits.
    """
    timing = time_on_queues(plan.instance, plan.programs, queue)
    times: dict[Task | int, tuple[float, float]] = {t.task: (t.start, t.end) for t in timing.schedule}
    times |= {transfer.number: (transfer.start, transfer.end) for transfer in timing.transfers}

    def timed(action: Action) -> Action:
        place = action.message
        key = Task(TaskKind(action.op), action.stage, action.microbatch) if place is None else place
        start, end = times[key]
        return action.model_copy(update={"start": start, "end": end})

    programs = tuple(
        program.model_copy(update={"actions": tuple(map(timed, program.actions))})
        for program in plan.programs
    )
    gap = relative_gap(timing.schedule.cost(plan.objective), plan.lower_bound)
    changes = {
        "programs": programs,
        "queue": queue,
        "makespan": timing.schedule.makespan,
        "span": timing.schedule.span,
        "gap": gap,
        "status": "optimal" if is_closed(gap) else "feasible",
    }
    return plan.model_copy(update=changes)
