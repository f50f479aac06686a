"""Instances with recomputation, F&B pairs and replicas as arrays, and orders as codes, for fast loops.

A code is ``8 * stage + kind`` with the kinds F, B, W, BW, R and PAIRED: an F that runs overlapped with the BW
right behind it. Micro-batches of a stage run in order (:mod:`zbsolve.bounds.catalogue` has the proof that
this loses nothing; a pair keeps its place and length when its two tasks are renamed), so a code at a place
names its task.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zbsolve.model.graph import Task, duration, kinds_of
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import (
    BW,
    B,
    F,
    R,
    TaskKind,
    W,
)
from zbsolve.model.memory import Pairs, effect
from zbsolve.search.arrays import to_arrays

KINDS: tuple[TaskKind, ...] = (F, B, W, BW, R)
PAIRED = 5  # the code of an F that is paired with the next code's BW
CODES: dict[TaskKind, int] = {kind: code for code, kind in enumerate(KINDS)}

Orders = tuple[tuple[Task, ...], ...]
IntArray = NDArray[np.int64]


class ExtendedArrays(NamedTuple):
    """An instance as arrays. Shapes: (S,) per stage, (S, 5) per stage and kind, (p,) per device.

    ``first`` and ``last`` mark the ends of a replica's chain. ``pair_time[s, q]`` is the duration of F of s
    beside BW of q, infinite where that is not possible or saves nothing. ``occupied`` is how long a transfer
    to the next stage and back takes its link, -1 where none is crossed or contended. ``chunks[d, :held[d]]``
    are the stages of device d by replica, then in model order. ``room`` is the cap less static memory.
    """

    m: int
    device: IntArray
    replica: IntArray
    first: NDArray[np.bool_]
    last: NDArray[np.bool_]
    recompute: NDArray[np.bool_]
    can_fuse: NDArray[np.bool_]
    time: NDArray[np.float64]
    pair_time: NDArray[np.float64]
    hop: NDArray[np.float64]
    occupied: NDArray[np.float64]
    acquire: NDArray[np.float64]
    transient: NDArray[np.float64]
    release: NDArray[np.float64]
    room: NDArray[np.float64]
    chunks: IntArray
    held: IntArray


def to_extended_arrays(instance: Instance) -> ExtendedArrays:
    """The arrays of an instance."""
    S, p = instance.num_stages, instance.num_devices
    time = np.full((S, len(KINDS)), np.nan)
    effects = np.zeros((3, S, len(KINDS)))
    pair_time = np.full((S, S), np.inf)
    for s, stage in enumerate(instance.stages):
        for kind in kinds_of(instance, s):
            time[s, CODES[kind]] = duration(instance, kind, s)
            effects[:, s, CODES[kind]] = effect(stage, kind)
        for q in range(S):
            together = instance.pair_duration(s, q)
            if together is not None and together < stage.t_f + (instance.stages[q].t_bw or 0.0):
                pair_time[s, q] = together
    held = [instance.stages_on(d) for d in range(p)]
    chunks = np.full((p, max(map(len, held))), -1, dtype=np.int64)
    for d, stages in enumerate(held):
        chunks[d, : len(stages)] = stages
    contended = instance.t_transfer is not None
    occupied = [
        instance.transfer(b) if contended and b + 1 < S and instance.crosses(b) else -1.0 for b in range(S)
    ]
    return ExtendedArrays(
        m=instance.num_microbatches,
        device=np.array([stage.device for stage in instance.stages]),
        replica=np.array([s // instance.chain for s in range(S)]),
        first=np.array([instance.is_first(s) for s in range(S)]),
        last=np.array([instance.is_last(s) for s in range(S)]),
        recompute=np.array([stage.t_r is not None for stage in instance.stages]),
        can_fuse=np.array([stage.t_bw is not None for stage in instance.stages]),
        time=time,
        pair_time=pair_time,
        hop=np.array([*(instance.hop(b) for b in range(S - 1)), 0.0]),
        occupied=np.array(occupied),
        acquire=effects[0],
        transient=effects[1],
        release=effects[2],
        room=to_arrays(instance).room,
        chunks=chunks,
        held=np.array([len(stages) for stages in held]),
    )


def encode(instance: Instance, orders: Orders, pairs: Pairs) -> tuple[IntArray, IntArray]:
    """Codes and lengths of device orders: shapes (p, most tasks a device can have) and (p,)."""
    width = instance.num_microbatches * max(
        sum(3 if instance.stages[s].t_r is None else 4 for s in instance.stages_on(d))
        for d in range(instance.num_devices)
    )
    codes = np.zeros((instance.num_devices, width), dtype=np.int64)
    lengths = np.array([len(order) for order in orders])
    firsts = {pair[0] for pair in pairs}
    for d, order in enumerate(orders):
        codes[d, : len(order)] = [
            8 * task.stage + (PAIRED if task in firsts else CODES[task.kind]) for task in order
        ]
    return codes, lengths


def decode(codes: Any, lengths: Any) -> tuple[Orders, frozenset[tuple[Task, Task]]]:
    """Device orders and F&B pairs from codes, the micro-batches of every stage in order."""
    orders, pairs = [], []
    for row, length in zip(codes.tolist(), lengths.tolist(), strict=True):
        order: list[Task] = []
        reached: dict[tuple[int, int], int] = {}
        split: dict[int, list[int]] = {}
        for code in row[:length]:
            s, kind = divmod(code, 8)
            counted = {PAIRED: 0, CODES[BW]: CODES[B]}.get(kind, kind)
            j = reached.get((s, counted), 0)
            reached[s, counted] = j + 1
            if kind == CODES[B]:
                split.setdefault(s, []).append(j)
            elif kind == CODES[W]:
                j = split[s][j]
            order.append(Task(F if kind == PAIRED else KINDS[kind], s, j))
        pairs += [(order[i], order[i + 1]) for i in range(length) if row[i] % 8 == PAIRED]
        orders.append(tuple(order))
    return tuple(orders), frozenset(pairs)


def time_codes(a: Any, codes: Any, lengths: Any) -> tuple[float, float, float]:
    """(makespan, span, sum of devices' ends) at earliest starts; infinite on deadlock or want of memory."""
    S, m, p = a.device.shape[0], a.m, a.room.shape[0]
    done = np.zeros((S, 6), dtype=np.int64)  # F, backward, W, (none), R, split backwards
    out_f = np.zeros((S, m))  # when the next stage has it
    out_b = np.zeros((S, m))
    at = np.zeros(p, dtype=np.int64)
    free = np.zeros(p)
    level = np.zeros(p)
    first = np.zeros(p)
    link = np.zeros((p, p))
    stack = np.empty(p + 2 * S * m + 1, dtype=np.int64)
    total = 0
    for d in range(p):
        stack[d] = d
        total += lengths[d]
    top = p
    finished = 0
    while top > 0:
        top -= 1
        d = stack[top]
        while at[d] < lengths[d]:
            code = codes[d, at[d]]
            s, kind = code // 8, code % 8
            begin = free[d]
            tasks = 1
            back = s if kind == 1 or kind == 3 else -1
            if kind == 0 or kind == 5:
                if not a.first[s]:
                    if done[s - 1, 0] <= done[s, 0]:
                        break
                    begin = max(begin, out_f[s - 1, done[s, 0]])
                if kind == 5:
                    tasks = 2
                    back = codes[d, at[d] + 1] // 8 if at[d] + 1 < lengths[d] else -1
                    if back < 0 or codes[d, at[d] + 1] % 8 != 3 or not a.pair_time[s, back] < np.inf:
                        return np.inf, np.inf, np.inf
            elif kind == 2:
                if done[s, 2] >= done[s, 5]:
                    return np.inf, np.inf, np.inf
            elif kind == 4 and done[s, 4] >= done[s, 0]:
                return np.inf, np.inf, np.inf
            if back >= 0:
                j = done[back, 1]
                if done[back, 4 if a.recompute[back] else 0] <= j:
                    return np.inf, np.inf, np.inf  # its own F or R is behind it
                if not a.last[back]:
                    if done[back + 1, 1] <= j:
                        break
                    begin = max(begin, out_b[back + 1, j])
            # --- memory: of a pair both transients at once, what BW frees only at its end ---------------
            own = 0 if kind == 5 else kind
            acquire, transient, release = a.acquire[s, own], a.transient[s, own], a.release[s, own]
            length = a.time[s, own]
            if kind == 5:
                acquire += a.acquire[back, 3]
                transient += a.transient[back, 3]
                release += a.release[back, 3]
                length = a.pair_time[s, back]
            if level[d] + acquire + transient > a.room[d]:
                return np.inf, np.inf, np.inf
            level[d] += acquire - release
            if at[d] == 0:
                first[d] = begin
            end = begin + length
            free[d] = end
            at[d] += tasks
            finished += tasks
            # --- results -----------------------------------------------------------------------------
            if own == 0:
                j = done[s, 0]
                done[s, 0] += 1
                if not a.last[s]:
                    e = a.device[s + 1]
                    leaves = end
                    if a.occupied[s] >= 0:
                        leaves = max(end, link[d, e])
                        link[d, e] = leaves + a.occupied[s]
                    out_f[s, j] = leaves + a.hop[s]
                    if e != d:
                        stack[top] = e
                        top += 1
            elif own == 2 or own == 4:
                done[s, own] += 1
            if back >= 0:
                j = done[back, 1]
                done[back, 1] += 1
                if kind == 1:
                    done[back, 5] += 1
                if not a.first[back]:
                    e = a.device[back - 1]
                    leaves = end
                    if a.occupied[back - 1] >= 0:
                        leaves = max(end, link[d, e])
                        link[d, e] = leaves + a.occupied[back - 1]
                    out_b[back, j] = leaves + a.hop[back - 1]
                    if e != d:
                        stack[top] = e
                        top += 1
    if finished < total:
        return np.inf, np.inf, np.inf
    return free.max(), (free - first).max(), free.sum()
