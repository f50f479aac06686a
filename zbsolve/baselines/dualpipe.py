"""DualPipe and DualPipeV. DeepSeek-V3 technical report, arXiv 2412.19437, section 3.2.1.

The order is that of the authors' public program (github.com/deepseek-ai/DualPipe), which also has DualPipeV,
its "cut in half".

DualPipe is bidirectional: two replicas of p stages flow towards each other, device r holds stage r of one and
stage p - 1 - r of the other, and each takes half of the micro-batches. DualPipeV folds one replica of 2p
stages in a V. Either way a device has a *near* stage, by which micro-batches come in, and a *far* one, by
which they go out, and with h = its distance from the end where its near stage begins, H = p/2 (DualPipeV: p)
and n micro-batches by either door, its program is

    2 (H - h - 1) times F near
    h + 1         times F near, F far
    H - h - 1     times B far, its W, F far
    n - 2H + h + 1 times [F near & BW far], [F far & BW near]
    H - h - 1     times BW far, [F far & BW near]
    h + 1         times BW far, BW near, the last h + 1 of these with their W kept back
    H - h - 1     times W, B near
    h + 1         times W

where brackets are F&B pairs, run overlapped where the instance gives ``t_fb``. On the innermost device
(h = H - 1) the first pair is not overlapped. Not modelled: adding up the two replicas' gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from zbsolve.baselines.base import Baseline, DeviceOrders, fused, require_linear, require_v
from zbsolve.errors import InputError
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import BW, B, F, TaskKind, W
from zbsolve.model.memory import Pairs


class _Door(NamedTuple):
    """Where a device stands: distance h from its near stage's end, H, micro-batches n, its two stages."""

    h: int
    half: int
    n: int
    near: int
    far: int


class _Program:
    """One device's order, and which neighbours in it are F&B pairs."""

    def __init__(self, door: _Door) -> None:
        self.order: list[Task] = []
        self.pairs: list[tuple[Task, Task]] = []
        self._pending: deque[Task] = deque()
        self._next = {(kind, stage): 0 for kind in (F, B) for stage in (door.near, door.far)}
        self._build(door)

    def _build(self, door: _Door) -> None:
        h, outer, near, far = door.h, door.half - door.h - 1, door.near, door.far
        for _ in range(2 * outer):
            self._run(F, near)
        for _ in range(h + 1):
            self._run(F, near)
            self._run(F, far)
        for _ in range(outer):
            self._run(B, far)
            self._run_w()
            self._run(F, far)
        for number in range(door.n - 2 * door.half + h + 1):
            self._run_pair(near, far, overlapped=number > 0 or outer > 0)
            self._run_pair(far, near)
        for _ in range(outer):
            self._run(BW, far)
            self._run_pair(far, near)
        for number in range(2 * (h + 1)):
            self._run(BW if number <= h else B, near if number % 2 else far)
        for _ in range(outer):
            self._run_w()
            self._run(B, near)
        for _ in range(h + 1):
            self._run_w()

    def _run(self, kind: TaskKind, stage: int) -> Task:
        key = (F if kind is F else B, stage)
        task = Task(kind, stage, self._next[key])
        self._next[key] += 1
        self.order.append(task)
        if kind is B:
            self._pending.append(task._replace(kind=W))
        return task

    def _run_w(self) -> None:
        self.order.append(self._pending.popleft())

    def _run_pair(self, forward: int, backward: int, overlapped: bool = True) -> None:
        pair = self._run(F, forward), self._run(BW, backward)
        if overlapped:
            self.pairs.append(pair)


def _programs(instance: Instance) -> Iterator[_Program]:
    """The programs of a bidirectional instance, or of one in a V, device by device."""
    p, stages = instance.num_devices, instance.num_stages
    half = stages // 4 if instance.replicas == 2 else p
    n = instance.num_microbatches
    for device in range(p):
        h = min(device, p - 1 - device) if instance.replicas == 2 else device
        near = device if device == h else stages - 1 - device
        yield _Program(_Door(h, half, n, near, stages - 1 - near))


def _pairs(instance: Instance) -> Pairs:
    return frozenset(
        pair
        for program in _programs(instance)
        for pair in program.pairs
        if instance.pair_duration(pair[0].stage, pair[1].stage) is not None
    )


def bidirectional(instance: Instance) -> Instance:
    """The two-replica instance that does the work of one of linear placement, on its devices.

    Each replica takes half of the micro-batches; a device holds two stages, and the static memory of both.
    """
    if instance.replicas == 2:
        return instance.with_fused_backward()
    require_linear(instance, "dualpipe")
    p, m = instance.num_devices, instance.num_microbatches
    if p % 2 or m % 2:
        raise InputError(f"dualpipe needs p and m even: p is {p}, m is {m}")
    reverse = [stage.model_copy(update={"device": p - 1 - stage.device}) for stage in instance.stages]

    def doubled(value: float | tuple[float, ...] | None) -> float | tuple[float, ...] | None:
        return (*value, 0.0, *value) if isinstance(value, tuple) else value

    return instance.with_changes(
        num_microbatches=m // 2,
        replicas=2,
        stages=[*instance.stages, *reverse],
        t_comm=doubled(instance.t_comm),
        t_transfer=doubled(instance.t_transfer),
        static_mem=None
        if instance.static_mem is None
        else [instance.static(d) + instance.static(p - 1 - d) for d in range(p)],
    ).with_fused_backward()


def orders_dualpipe(instance: Instance) -> DeviceOrders:
    """Orders on a two-replica instance."""
    p, m = instance.num_devices, instance.total_microbatches
    devices = [stage.device for stage in instance.stages]
    if instance.replicas != 2 or p % 2 or devices != [*range(p), *reversed(range(p))]:
        raise InputError(
            "dualpipe needs two replicas of p stages, p even: device r holds stages r and p - 1 - r"
        )
    if m < 2 * p:
        raise InputError(f"dualpipe needs m >= 2p: m is {m}, p is {p}")
    return tuple(tuple(program.order) for program in _programs(instance))


def orders_dualpipe_v(instance: Instance) -> DeviceOrders:
    """Orders on a V placement."""
    require_v(instance, "dualpipe-v")
    p, m = instance.num_devices, instance.num_microbatches
    if m < 2 * p:
        raise InputError(f"dualpipe-v needs m >= 2p (p devices of two stages): m is {m}, p is {p}")
    return tuple(tuple(program.order) for program in _programs(instance))


DUALPIPE = Baseline(
    "dualpipe",
    "two replicas towards each other, F&B pairs, twice the parameters",
    "arXiv 2412.19437, section 3.2.1",
    orders_dualpipe,
    adapt=bidirectional,
    pairs=_pairs,
    placement="linear",
)
DUALPIPE_V = Baseline(
    "dualpipe-v",
    "DualPipe cut in half: two chunks per device in a V, F&B pairs",
    "github.com/deepseek-ai/DualPipe",
    orders_dualpipe_v,
    adapt=fused,
    pairs=_pairs,
    placement="v",
)
