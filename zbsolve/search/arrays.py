"""An instance as arrays, and device orders as codes: what machine code works on."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import BW, B, F, TaskKind, W
from zbsolve.model.memory import effect
from zbsolve.model.tolerances import memory_room

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# Codes of task kinds inside the arrays.
CODES: dict[TaskKind, int] = {F: 0, B: 1, W: 2, BW: 3}
KINDS: tuple[TaskKind, ...] = (F, B, W, BW)


class Arrays(NamedTuple):
    """An instance as arrays, for loops in machine code.

    Shapes: (S,) per stage, (S, 4) per stage and kind, (p,) per device. ``chunks[d, :held[d]]`` are the stages
    of device d in model order. ``need[s, b]`` is the memory above the present level with which the device of
    stage s can finish a micro-batch that has run F up to and including stage s there and (only when s is the
    device's last stage) has b stages left to go back through.
    ``room`` is the cap less static memory, tolerance included.
    """

    m: int
    device: IntArray
    time: FloatArray
    hop: FloatArray
    acquire: FloatArray
    transient: FloatArray
    release: FloatArray
    can_fuse: NDArray[np.bool_]
    room: FloatArray
    chunks: IntArray
    held: IntArray
    need_forward: FloatArray
    need_backward: FloatArray


def to_arrays(instance: Instance) -> Arrays:
    """The arrays of an instance."""
    S, p = instance.num_stages, instance.num_devices
    time = np.zeros((S, 4))
    effects = np.zeros((3, S, 4))
    for s, stage in enumerate(instance.stages):
        time[s] = stage.t_f, stage.t_b, stage.t_w, np.nan if stage.t_bw is None else stage.t_bw
        for kind, code in CODES.items():
            effects[:, s, code] = effect(stage, kind)
    hop = np.array([*(instance.hop(b) for b in range(S - 1)), 0.0])
    room = np.array([memory_room(instance.cap(d), instance.static(d)) for d in range(p)])
    held = [instance.stages_on(d) for d in range(p)]
    width = max(len(stages) for stages in held)
    chunks = np.full((p, width), -1, dtype=np.int64)
    need_forward = np.zeros(S)
    need_backward = np.zeros(S)
    for d, stages in enumerate(held):
        chunks[d, : len(stages)] = stages
        # Going back from each chunk on: the level falls by mem_b of each chunk as it is done.
        back = 0.0
        for s in stages:
            stage = instance.stages[s]
            split = max(stage.growth + stage.peak_b, stage.mem_w - stage.mem_b + stage.peak_w)
            own = min(split, stage.peak_fused) if stage.t_bw is not None else split
            back = max(own, back - stage.mem_b)
            need_backward[s] = back
        ahead = back
        for s in reversed(stages):
            need_forward[s] = ahead  # F of s done: what the rest of the way needs
            stage = instance.stages[s]
            ahead = max(stage.mem_b + stage.peak_f, stage.mem_b + ahead)
    return Arrays(
        m=instance.num_microbatches,
        device=np.array([stage.device for stage in instance.stages]),
        time=time,
        hop=hop,
        acquire=effects[0],
        transient=effects[1],
        release=effects[2],
        can_fuse=~np.isnan(time[:, 3]),
        room=room,
        chunks=chunks,
        held=np.array([len(stages) for stages in held]),
        need_forward=need_forward,
        need_backward=need_backward,
    )


def decode(codes: Any, lengths: Any) -> tuple[tuple[Task, ...], ...]:
    """Device orders from ``out`` and ``out_length`` of :func:`run_policy`, micro-batches in order."""
    orders = []
    next_of: dict[tuple[int, int], int] = {}
    for row, length in zip(codes.tolist(), lengths.tolist(), strict=True):
        order = []
        for code in row[:length]:
            s, kind = divmod(code, 4)
            # B and BW of a stage share one count: they are the same micro-batches' backward.
            key = (s, 1 if kind == 3 else kind)
            j = next_of.get(key, 0)
            next_of[key] = j + 1
            order.append(Task(KINDS[kind], s, j))
        orders.append(tuple(order))
    return tuple(orders)


def encode(orders: tuple[tuple[Task, ...], ...]) -> tuple[IntArray, IntArray]:
    """Codes and lengths that :func:`decode` reads, of device orders whose micro-batches run in order.

    Shapes (p, longest order), zero behind a shorter order's end, and (p,).
    """
    lengths = np.array([len(order) for order in orders])
    codes = np.zeros((len(orders), int(lengths.max())), dtype=np.int64)
    for d, order in enumerate(orders):
        codes[d, : len(order)] = [4 * task.stage + CODES[task.kind] for task in order]
    return codes, lengths
