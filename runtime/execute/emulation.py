"""Stages without layers: they take their instance's time and pass real tensors on.

What this shows is order, overlap, waiting and the transport's own cost, on any machine. It says nothing
about kernels or memory; every trace made with it is labelled "emulated".
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Set

import torch

from zbsolve.model.graph import Task, duration
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import TABLE, TaskKind
from zbsolve.model.memory import Pairs
from zbsolve.runtime.execute.transport import Shape

# A sleep overshoots by some 0.1 ms; the rest of an op's time is spent looking at the clock.
_SPIN_SECONDS = 0.0003


class EmulatedStages:
    """Every stage of an instance, asleep for its times; ``unit`` is the instance's time unit in seconds."""

    def __init__(self, instance: Instance, unit: float, payload_mib: float) -> None:
        self._instance = instance
        self._unit = unit
        self._payload = torch.zeros(max(1, round(payload_mib * 2**20 / 4)))
        self._shares: dict[Task, float] = {}
        self._shape = (Shape(tuple(self._payload.shape), self._payload.dtype),)

    def begin(self, step: int, fused: Set[tuple[int, int]], pairs: Pairs) -> None:
        """Share each F&B pair's time between its halves."""
        self._shares = {}
        for forward, backward in pairs:
            alone = [duration(self._instance, t.kind, t.stage) for t in (forward, backward)]
            together = self._instance.pair_duration(forward.stage, backward.stage)
            assert together is not None  # the plan was checked
            for task, own in zip((forward, backward), alone, strict=True):
                self._shares[task] = together * own / sum(alone) if sum(alone) else 0.0

    def shapes(self, direction: str, stage: int, microbatch: int) -> Sequence[Shape]:
        """One tensor of the payload's size, whatever the message."""
        return self._shape

    def run(self, op: str, stage: int, microbatch: int, received: list[torch.Tensor]) -> list[torch.Tensor]:
        """Take the op's time; F, B and BW hand the payload on."""
        until = time.perf_counter()
        kind = TaskKind(op)
        share = self._shares.get(Task(kind, stage, microbatch)) if self._shares else None
        until += (duration(self._instance, kind, stage) if share is None else share) * self._unit
        pause = until - time.perf_counter() - _SPIN_SECONDS
        if pause > 0:
            time.sleep(pause)
        while time.perf_counter() < until:
            pass
        return [] if TABLE[kind].direction is None else [self._payload]

    def put_aside(self, stage: int, microbatch: int) -> Sequence[torch.Tensor]:
        """Nothing is read."""
        return ()

    def complete(self, stage: int) -> None:
        """No gradients to sum."""

    def end(self) -> None:
        """Nothing is under way."""
