"""From a schedule to programs with messages, and the dry run that shows them free of deadlock."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zbsolve.model.graph import Need, Task, alternatives, receiver
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import TABLE, Direction, travelling
from zbsolve.model.schedule import Schedule
from zbsolve.model.simulator import Links, topological_order
from zbsolve.plan.actions import Action, Program, message_op, task_of

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
    def direction(self) -> Direction:
        """The way it travels."""
        direction = TABLE[self.producer.kind].direction
        assert direction is not None  # what is sent is handed on
        return direction


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


def _remote_consumer(instance: Instance, task: Task, present: Container[Task]) -> Task | None:
    """The task on another device that needs this task's result, if any."""
    direction = TABLE[task.kind].direction
    if direction is None:
        return None
    target = receiver(instance, task.stage, direction)
    if target is None or not instance.crosses(min(task.stage, target)):
        return None
    consumers = (Task(kind, target, task.microbatch) for kind in travelling(direction))
    return next(consumer for consumer in consumers if consumer in present)


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


def _message_action(number: int, message: Message, sends: bool) -> Action:
    end = message.producer if sends else message.consumer
    return Action(
        op=message_op(sends, message.direction),
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
        task = task_of(action)
        return all(
            any(_is_there(instance, need, task, done, arrived) for need in given)
            for given in alternatives(instance, task.kind, task.stage)
        )

    active = list(range(len(programs)))
    while active:
        device = active.pop()
        while (action := head(device)) is not None:
            if action.is_compute:
                if not runnable(action):
                    break
                done.add(task_of(action))
                position[device] += 1
                continue
            peer = action.peer
            other = head(peer) if peer is not None and 0 <= peer < len(programs) else None
            if other is None or not _are_counterparts(device, action, other):
                break
            assert peer is not None
            receive = other if action.sends else action
            arrived.add((receive.direction, receive.stage, receive.microbatch))
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
    opposite = message_op(not action.sends, action.direction)
    return other.op == opposite and other.peer == device and other.message == action.message


def _is_there(
    instance: Instance,
    need: Need,
    task: Task,
    done: Container[Task],
    arrived: Container[tuple[str, int, int]],
) -> bool:
    """Whether what a task waits for has run on its device, or has come by message."""
    if instance.stages[need.stage].device == instance.stages[task.stage].device:
        return Task(need.kind, need.stage, task.microbatch) in done
    return (TABLE[need.kind].direction, task.stage, task.microbatch) in arrived
