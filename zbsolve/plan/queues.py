"""What a plan's messages cost when transfers wait for each other in queues.

A plan's own times assume that any number of transfers are under way at once. Real transports run them one
after another in queues (streams), in the order in which they were enqueued, and a transfer at the head of a
queue that waits for its producer holds up what is behind it:

* ``shared``: one queue a device for all its transfers (torch before 2.12, or a group made with a
  ``device_id``: one communicator for everybody);
* ``pair``: one queue for each pair of devices (torch 2.12 and later without ``device_id``);
* ``direction``: one for each pair and direction (two groups, or one NCCL communicator per direction);
* ``unlimited``: none, as the plan's times assume (gloo, which pairs messages by tag).

A transfer starts when its producer has ended and it heads the queues of both its devices, and occupies
them for its hop. Enqueueing costs nothing and is never late (the host runs ahead of the device). With orders
and queues fixed all of that is one longest-path problem, like the simulator's. Not modelled: bandwidth
shared between queues.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from zbsolve.errors import InfeasibleError
from zbsolve.model.graph import Task, predecessors
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import step_of, travelling
from zbsolve.model.schedule import Schedule, TimedTask
from zbsolve.plan.actions import Action, Program, task_of

Queue = Literal["unlimited", "direction", "pair", "shared"]
QUEUES: tuple[Queue, ...] = ("unlimited", "direction", "pair", "shared")

_Node = tuple[str, Hashable]


class Transfer(NamedTuple):
    """One message on the wire."""

    number: int
    source: int
    target: int
    start: float
    end: float


@dataclass(frozen=True)
class QueueTiming:
    """Programs timed under a queue model: ``makespan`` is first start to last end, as always."""

    queue: Queue
    schedule: Schedule
    transfers: tuple[Transfer, ...]

    @property
    def makespan(self) -> float:
        """First start to last end over all devices."""
        return self.schedule.makespan


def time_on_queues(instance: Instance, programs: Sequence[Program], queue: Queue) -> QueueTiming:
    """Earliest starts of all ops and transfers of programs under a queue model.

    Raises
    ------
    InfeasibleError
        The queues' orders and the dependencies wait for each other in a circle.
    """
    graph = _Graph(instance, programs, queue)
    ends = graph.longest_paths()
    devices = []
    for program in programs:
        timed = []
        for action in program.actions:
            if action.is_compute:
                task = task_of(action)
                node = graph.node(task)
                timed.append(TimedTask(task, ends[node] - graph.length[node], ends[node]))
        devices.append(tuple(timed))
    transfers = tuple(
        Transfer(number, source, target, ends["message", number] - hop, ends["message", number])
        for number, (source, target, hop) in sorted(graph.messages.items())
    )
    return QueueTiming(queue, Schedule(tuple(devices)), transfers)


class _Graph:
    """Ops and transfers as nodes with lengths, and what each waits for."""

    def __init__(self, instance: Instance, programs: Sequence[Program], queue: Queue) -> None:
        self.length: dict[_Node, float] = {}
        self.waits: dict[_Node, list[_Node]] = defaultdict(list)
        self.messages: dict[int, tuple[int, int, float]] = {}
        devices = [[_timed(a) for a in program.actions if a.is_compute] for program in programs]
        present = {task for program in devices for task, _, _ in program}
        # The halves of an F&B pair are one node: they wait together and end together.
        self._second_of = {second: first for first, second in Schedule(tuple(map(tuple, devices))).pairs}
        last_in: dict[Hashable, _Node] = {}
        # Devices enqueue independently; the messages' numbers say the order in each of a device's queues.
        for program in programs:
            before: _Node | None = None
            for action in program.actions:
                if action.is_compute:
                    node = self.node(task_of(action))
                    self.length[node] = action.end - action.start
                    self._wait(node, () if before in (None, node) else (before,))
                    local = (
                        self.node(edge.before)
                        for edge in predecessors(instance, task_of(action))
                        if edge.before in present and _device(instance, edge.before) == program.device
                    )
                    self._wait(node, local)
                    before = node
                else:
                    self._add_message(instance, program.device, action, queue, last_in)

    def node(self, task: Task) -> _Node:
        """The node of an op, that of the F for both halves of a pair."""
        return ("task", self._second_of.get(task, task))

    def _wait(self, node: _Node, others: Iterable[_Node]) -> None:
        self.waits[node].extend(others)

    def _add_message(
        self, instance: Instance, device: int, action: Action, queue: Queue, last_in: dict[Hashable, _Node]
    ) -> None:
        assert action.message is not None
        assert action.peer is not None
        node: _Node = ("message", action.message)
        sends = action.sends
        ends = [
            self.node(Task(kind, action.stage, action.microbatch)) for kind in travelling(action.direction)
        ]
        if sends:
            hop = instance.hop(min(action.stage, action.stage + step_of(action.direction)))
            self.length[node] = hop
            self.messages[action.message] = (device, action.peer, hop)
            self._wait(node, ends)
        else:
            for end in ends:
                self._wait(end, [node])
        key: Hashable
        if queue == "shared":
            key = device
        elif queue == "pair":
            key = (device, action.peer)
        elif queue == "direction":
            key = (device, action.peer, sends)
        else:
            return
        if key in last_in:
            self._wait(node, [last_in[key]])
        last_in[key] = node

    def longest_paths(self) -> dict[_Node, float]:
        """The end of every node."""
        waits = {node: [w for w in self.waits[node] if w in self.length] for node in self.length}
        missing = {node: len(w) for node, w in waits.items()}
        after: dict[_Node, list[_Node]] = defaultdict(list)
        for node, others in waits.items():
            for other in others:
                after[other].append(node)
        ends: dict[_Node, float] = {}
        ready = [node for node, count in missing.items() if not count]
        while ready:
            node = ready.pop()
            start = max((ends[other] for other in waits[node]), default=0.0)
            ends[node] = start + self.length[node]
            for follower in after[node]:
                missing[follower] -= 1
                if not missing[follower]:
                    ready.append(follower)
        if len(ends) < len(self.length):
            kind, what = next(node for node in self.length if node not in ends)
            raise InfeasibleError(
                f"the message order deadlocks: {kind} {what} is part of, or behind, a circle of waits: "
                "solve the instance again"
            )
        return ends


def _timed(action: Action) -> TimedTask:
    return TimedTask(task_of(action), action.start, action.end)


def _device(instance: Instance, task: Task) -> int:
    return instance.stages[task.stage].device
