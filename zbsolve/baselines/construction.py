"""Programs that grow task by task and are timed as they grow: what greedy constructions share.

Every backward is split: B, and its W pending until it is placed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from zbsolve.model.graph import Task, duration, needs
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import BW, B, F, TaskKind, W
from zbsolve.model.memory import effect
from zbsolve.model.tolerances import memory_limit


class StuckError(Exception):
    """The construction needs memory that no pending W can free, or a task that was not placed."""


class Construction(ABC):
    """One run: orders, first starts, clocks, idle times since then, memory, pending W's of each device.

    ``room`` is the activation memory of each device.
    """

    def __init__(self, instance: Instance, room: Sequence[float]) -> None:
        self.instance = instance
        self.p, self.m = instance.num_devices, instance.num_microbatches
        self.room = [memory_limit(each) for each in room]
        self.orders: list[list[Task]] = [[] for _ in range(self.p)]
        self.clock = [0.0] * self.p
        self.first: list[float] = [0.0] * self.p  # when the device's first task starts
        self.idle = [0.0] * self.p
        self.level = [0.0] * self.p
        self.pending: list[deque[Task]] = [deque() for _ in range(self.p)]
        self.done = {(kind, s): 0 for kind in (F, B) for s in range(instance.num_stages)}
        keys = [(kind, s) for kind in (F, B, W) for s in range(instance.num_stages)]
        # A stage takes its micro-batches in order: the end of number j is entry j.
        self._ends: dict[tuple[TaskKind, int], list[float]] = {key: [] for key in keys}
        # Nothing is fused here, so no B waits for a BW.
        self._needs = {key: [n for n in needs(instance, *key) if n.kind is not BW] for key in keys}
        self._effect = {(kind, s): effect(instance.stages[s], kind) for kind, s in keys}
        self.length = {key: duration(instance, *key) for key in keys}

    def next_task(self, kind: TaskKind, stage: int) -> Task:
        """The stage's next F or B."""
        return Task(kind, stage, self.done[kind, stage])

    def has_input(self, kind: TaskKind, stage: int) -> bool:
        """Whether everything that the stage's next F or B needs has been placed."""
        j = self.done[kind, stage]
        return all(len(self._ends[k, s]) > j for k, s, _ in self._needs[kind, stage])

    def arrival(self, kind: TaskKind, stage: int) -> float:
        """When the inputs of the stage's next F or B are there."""
        j = self.done[kind, stage]
        return max((self._ends[k, s][j] + lag for k, s, lag in self._needs[kind, stage]), default=0.0)

    def place(self, task: Task) -> None:
        """A task at the end of its device's program."""
        kind, stage, _ = task
        device = self.instance.stages[stage].device
        change = self._effect[kind, stage]
        if not self.holds(device, change.while_running):
            raise StuckError
        start = self.clock[device]
        if kind is not W:
            start = max(start, self.arrival(kind, stage))
            self.done[kind, stage] += 1
        if self.orders[device]:
            self.idle[device] += start - self.clock[device]
        else:
            self.first[device] = start
        self.level[device] += change.net
        self.clock[device] = end = start + self.length[kind, stage]
        self._ends[kind, stage].append(end)
        self.orders[device].append(task)
        if kind is B:
            self.pending[device].append(Task(W, stage, task.microbatch))

    def place_w(self, device: int) -> None:
        """The device's oldest pending W."""
        self.place(self.pending[device].popleft())

    def holds(self, device: int, more: float) -> bool:
        """Whether a device has room for that much more."""
        return self.level[device] + more <= self.room[device]

    def fits(self, kind: TaskKind, stage: int) -> bool:
        """Whether the stage's next F or B has room."""
        return self.holds(self.instance.stages[stage].device, self._effect[kind, stage].while_running)

    def patience(self, device: int, allowance: float = 0.0) -> float:
        """How long a device may idle without becoming the idlest, or idler than ``allowance``."""
        return max(allowance, *self.idle) - self.idle[device]

    def place_after_w(self, kind: TaskKind, stage: int, allowance: float = 0.0) -> bool:
        """The stage's next F or B, after as many W's as memory asks for and the wait for it can take.

        False, and nothing but W's placed, when its input is missing or memory does not allow it.
        """
        device = self.instance.stages[stage].device
        if self.done[kind, stage] >= self.m or not self.has_input(kind, stage):
            return False
        pending = self.pending[device]
        while not self.fits(kind, stage):
            if not pending:
                return False
            self.place_w(device)
        arrival = self.arrival(kind, stage)
        while pending and arrival >= self.clock[device] + self.length[W, pending[0].stage]:
            self.place_w(device)
        if pending and self.fills(kind, stage, arrival - self.clock[device], allowance):
            self.place_w(device)
        self.place(self.next_task(kind, stage))
        return True

    @property
    def span(self) -> float:
        """Longest window of a device so far: tasks are placed at their earliest starts."""
        return max(end - start for start, end in zip(self.first, self.clock, strict=True))

    @abstractmethod
    def fills(self, kind: TaskKind, stage: int, gap: float, allowance: float) -> bool:
        """Whether one more W goes before a task that it delays (for each construction to say)."""

    def finish(self) -> tuple[tuple[Task, ...], ...]:
        """What is left of the W's, and the orders."""
        for device in range(self.p):
            while self.pending[device]:
                self.place_w(device)
        return tuple(map(tuple, self.orders))
