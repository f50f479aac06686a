"""The automatic heuristic: a list scheduler for any instance, placement and memory cap.

Idea (Qi et al., arXiv 2401.10241, section 3, generalised to unequal stages, several chunks per device and
W memory of its own): run as many F in the warm-up as memory allows, then B before F, W into the gaps or when
memory is full, the rest of the W last. Devices decide in the order of their start times, so that each
decision sees every arrival known by then.

It never deadlocks on memory: F is admitted only if afterwards the device can still finish its micro-batches
one by one, oldest first (a banker's check with one global order, so the devices' promises agree).

The core, :func:`run_policy`, is written for numba and also runs as plain Python.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zbsolve.compiled import compile_loop, is_ready
from zbsolve.model.graph import (
    Task,
)
from zbsolve.model.instance import Instance
from zbsolve.search.arrays import Arrays, FloatArray, IntArray, decode, to_arrays


def flat(arrays: Arrays) -> Arrays:
    """The same in one dimension: index ``4 * stage + kind``, and ``device * most chunks + chunk``."""
    return Arrays._make(field.ravel() if isinstance(field, np.ndarray) else field for field in arrays)


def listed(arrays: Arrays) -> Arrays:
    """:func:`flat` arrays as lists, whose elements plain Python reads several times faster."""
    return Arrays._make(field.tolist() if isinstance(field, np.ndarray) else field for field in flat(arrays))


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """What the list scheduler may be told. Shapes (S,) and (p,).

    Attributes
    ----------
    limit : most micro-batches in flight between F and B of a stage, beside the memory cap
    backlog : pending W of a stage from which on W goes before F
    fuse : run BW instead of B and W on a stage
    patience_f, patience_w : how far an F or W may delay a B that is known to arrive, as a share of the
        F's or W's own duration (0: not at all, 1: fully)
    depth_first : prefer the later chunk among the F's of a device (else the earlier)
    """

    limit: IntArray
    backlog: IntArray
    fuse: NDArray[np.bool_]
    patience_f: FloatArray
    patience_w: FloatArray
    depth_first: NDArray[np.bool_]


class Scratch(NamedTuple):
    """What :func:`run_policy` writes to while it runs. Shapes (S,), (S * m,) and (p,)."""

    done_f: Any
    done_b: Any
    done_w: Any
    end_f: Any
    end_b: Any
    free: Any
    first: Any
    level: Any
    choice: Any
    start: Any
    stale: Any
    stale_devices: Any


def run_policy(
    arrays: Any,
    limit: Any,
    backlog: Any,
    fuse: Any,
    patience_f: Any,
    patience_w: Any,
    depth_first: Any,
    scratch: Any,
    out: Any,
    out_length: Any,
) -> tuple[float, float]:
    """Run one policy; fills ``out`` and returns (makespan, span of earliest starts).

    ``out[d * width + i] = 4 * stage + kind`` is task i of device d; width: 3 * m * most chunks of a device.
    ``arrays`` are :func:`flat` ones. All may be arrays or, several times faster in plain Python, lists.
    """
    m, device, time, hop = arrays.m, arrays.device, arrays.time, arrays.hop
    acquire, transient, release, room = arrays.acquire, arrays.transient, arrays.release, arrays.room
    chunks, count = arrays.chunks, arrays.held
    need_forward, need_backward = arrays.need_forward, arrays.need_backward
    done_f, done_b, done_w, end_f, end_b = scratch[:5]
    free, first, level, choice, start, stale, stale_devices = scratch[5:]
    S, p = len(device), len(room)
    most_chunks, width = len(chunks) // p, len(out) // p
    inf = np.inf
    remaining = 0
    for s in range(S):
        done_f[s] = done_b[s] = done_w[s] = 0
        remaining += m * (2 if fuse[s] else 3)
    for d in range(p):
        out_length[d] = 0
        free[d] = level[d] = 0.0
        first[d] = -1.0
        stale[d] = True
        stale_devices[d] = d
    number_stale = p

    while remaining > 0:
        while number_stale > 0:
            number_stale -= 1
            d = stale_devices[number_stale]
            stale[d] = False
            now = free[d]
            # --- arrivals: earliest B, and the best F whose memory and limit allow it -----------------
            b_time, b_stage = inf, -1
            f_time, f_stage = inf, -1
            w_stage, w_most = -1, -1
            crowded = False
            for i in range(d * most_chunks, d * most_chunks + count[d]):
                s = chunks[i]
                j = done_b[s]
                if j < done_f[s] and (s == S - 1 or j < done_b[s + 1]):
                    ready = end_f[s * m + j]
                    if s < S - 1:
                        ready = max(ready, end_b[(s + 1) * m + j] + hop[s])
                    ready = max(ready, now)
                    code = 4 * s + (3 if fuse[s] else 1)
                    fits = level[d] + acquire[code] + transient[code] <= room[d]
                    if fits and not fuse[s]:
                        # The W that follows must be able to run.
                        after = level[d] + acquire[code] - release[code]
                        fits = after + transient[4 * s + 2] <= room[d]
                    # Ready at the same time: the later stage first, its result travels further.
                    if fits and ready <= b_time:
                        b_time, b_stage = ready, s
                if not fuse[s]:
                    pending = done_b[s] - done_w[s]
                    if pending > 0 and level[d] + transient[4 * s + 2] <= room[d]:
                        if pending > w_most:
                            w_stage, w_most = s, pending
                        if pending >= backlog[s]:
                            crowded = True
            for i in range(d * most_chunks, d * most_chunks + count[d]):
                s = chunks[i]
                j = done_f[s]
                if j >= m or (s > 0 and j >= done_f[s - 1]) or j - done_b[s] >= limit[s]:
                    continue
                ready = now
                if s > 0:
                    ready = max(ready, end_f[(s - 1) * m + j] + hop[s - 1])
                better = ready < f_time or (ready == f_time and depth_first[d])
                if not better:
                    continue
                if level[d] + acquire[4 * s] + transient[4 * s] > room[d]:
                    continue
                # --- banker's check: after this F, can every micro-batch here be finished in turn? -----
                avail = room[d] - level[d] - acquire[4 * s]
                head = chunks[d * most_chunks]
                last = chunks[d * most_chunks + count[d] - 1]
                most_needed = 0.0
                safe = True
                for k in range(d * most_chunks, d * most_chunks + count[d]):
                    q = chunks[k]
                    most_needed = max(most_needed, need_backward[q], need_forward[q])
                    if not fuse[q] and done_b[q] > done_w[q]:
                        if transient[4 * q + 2] > avail:
                            safe = False
                        avail += (done_b[q] - done_w[q]) * release[4 * q + 2]
                if safe:
                    newest = done_f[head] + (1 if s == head else 0)
                    for b in range(done_b[head], newest):
                        if avail >= most_needed:
                            break  # it only grows from here on
                        held = 0.0
                        back = -1  # first chunk still to go back through
                        ahead = -1  # last chunk whose F is done
                        for k in range(d * most_chunks, d * most_chunks + count[d]):
                            q = chunks[k]
                            has_f = b < done_f[q] or (q == s and b == j)
                            if has_f and b >= done_b[q]:
                                held += acquire[4 * q]
                                back = q
                            if has_f:
                                ahead = q
                        need = need_backward[back] if ahead == last else need_forward[ahead]
                        if need > avail:
                            safe = False
                            break
                        avail += held
                if safe:
                    f_time, f_stage = ready, s
            # --- decide ---------------------------------------------------------------------------------
            take, when = -1, inf
            if b_stage >= 0 and b_time <= now:
                take, when = 4 * b_stage + (3 if fuse[b_stage] else 1), now
            else:
                blocked = f_stage < 0 or (crowded and w_stage >= 0)
                if not blocked and b_time >= f_time + (1.0 - patience_f[d]) * time[4 * f_stage]:
                    take, when = 4 * f_stage, f_time
                if take < 0 and b_stage >= 0:
                    take, when = 4 * b_stage + (3 if fuse[b_stage] else 1), b_time
                if w_stage >= 0:
                    room_for_w = now + (1.0 - patience_w[d]) * time[4 * w_stage + 2]
                    if take < 0 or when >= room_for_w:
                        take, when = 4 * w_stage + 2, now
            choice[d] = take
            start[d] = when
        # --- the device that starts first commits ---------------------------------------------------------
        d = 0
        for q in range(1, p):
            if start[q] < start[d]:
                d = q
        code = choice[d]
        if code < 0:
            return inf, inf  # nothing can start: the policy's fusing does not fit in memory
        s, kind = code // 4, code % 4
        end = start[d] + time[code]
        if first[d] < 0:
            first[d] = start[d]
        level[d] += acquire[code] - release[code]
        free[d] = end
        out[d * width + out_length[d]] = code
        out_length[d] += 1
        remaining -= 1
        neighbour = -1
        if kind == 0:
            end_f[s * m + done_f[s]] = end
            done_f[s] += 1
            if s + 1 < S:
                neighbour = device[s + 1]
        elif kind == 2:
            done_w[s] += 1
        else:
            end_b[s * m + done_b[s]] = end
            done_b[s] += 1
            if s > 0:
                neighbour = device[s - 1]
        stale[d] = True
        stale_devices[0] = d
        number_stale = 1
        if neighbour >= 0 and not stale[neighbour]:
            stale[neighbour] = True
            stale_devices[1] = neighbour
            number_stale = 2
    makespan, span = 0.0, 0.0
    for d in range(p):
        makespan = max(makespan, free[d])
        span = max(span, free[d] - first[d])
    return makespan, span


def preset(
    instance: Instance,
    *,
    limit: int | None = None,
    backlog: int | None = None,
    fuse: bool = False,
    patience_f: float = 0.0,
    patience_w: float = 0.0,
    depth_first: bool = True,
) -> Policy:
    """A policy that treats every stage and device alike."""
    S, p, m = instance.num_stages, instance.num_devices, instance.num_microbatches
    can_fuse = np.array([stage.t_bw is not None for stage in instance.stages])
    return Policy(
        limit=np.full(S, m if limit is None else limit),
        backlog=np.full(S, m + 1 if backlog is None else backlog),
        fuse=can_fuse & fuse,
        patience_f=np.full(p, patience_f),
        patience_w=np.full(p, patience_w),
        depth_first=np.full(p, depth_first),
    )


def plain_seconds(instance: Instance) -> float:
    """About what one run of a policy takes in plain Python (measured on 8 to 32 devices)."""
    return instance.num_tasks * (2.7e-6 + 5e-8 * instance.num_devices)


def machine_code_is_ready() -> bool:
    """Whether a compiled :class:`ListScheduler` runs at once, with nothing to be made first."""
    return is_ready(run_policy)


class ListScheduler:
    """Runs policies on one instance, reusing its arrays. ``compiled`` switches to machine code."""

    def __init__(self, instance: Instance, *, compiled: bool = False) -> None:
        self.instance = instance
        self.arrays = to_arrays(instance)
        self._compiled = compiled
        self._run = compile_loop(run_policy) if compiled else run_policy
        S, p, m = instance.num_stages, instance.num_devices, instance.num_microbatches
        width = 3 * m * int(self.arrays.held.max())
        counts, times, flags = np.zeros(S, dtype=np.int64), np.zeros(S * m), np.ones(p, dtype=np.bool_)
        devices, clocks = np.zeros(p + 1, dtype=np.int64), np.zeros(p)
        scratch = Scratch(
            counts, counts, counts, times, times, clocks, clocks, clocks, devices, clocks, flags, devices
        )
        out = np.zeros(p * width, dtype=np.int64), np.zeros(p, dtype=np.int64)
        self._scratch = Scratch._make(self._plain(array) for array in scratch)
        self._out, self._lengths = map(self._plain, out)
        self._arrays = flat(self.arrays) if compiled else listed(self.arrays)
        self._costs = math.inf, math.inf
        self.keep()

    def _plain(self, array: NDArray[Any]) -> Any:
        """A copy for the loop: an array for machine code, a list for plain Python."""
        return array.copy() if self._compiled else array.tolist()

    def run(self, policy: Policy) -> tuple[float, float]:
        """(makespan, span) of a policy at earliest starts; the orders stay in ``codes`` and ``lengths``.

        Infinite when the policy cannot run within memory.
        """
        self._costs = self._run(
            self._arrays,
            self._plain(policy.limit),
            self._plain(policy.backlog),
            self._plain(policy.fuse),
            self._plain(policy.patience_f),
            self._plain(policy.patience_w),
            self._plain(policy.depth_first),
            self._scratch,
            self._out,
            self._lengths,
        )
        return self._costs

    @property
    def codes(self) -> IntArray:
        """Codes of the last run, a device a row (see :func:`decode`)."""
        return np.array(self._out, dtype=np.int64).reshape(self.instance.num_devices, -1)

    @property
    def lengths(self) -> IntArray:
        """How many of each row of ``codes`` the last run has filled."""
        return np.array(self._lengths, dtype=np.int64)

    def orders(self) -> tuple[tuple[Task, ...], ...]:
        """Device orders of the last run."""
        return decode(self.codes, self.lengths)

    def keep(self) -> None:
        """Remember the last run as the best: its orders, coded, and its (makespan, span)."""
        self.best_codes = self.codes, self.lengths
        self.best_costs = self._costs

    def best_orders(self) -> tuple[tuple[Task, ...], ...]:
        """Device orders of the last run that was kept."""
        return decode(*self.best_codes)
