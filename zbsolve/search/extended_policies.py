"""The list scheduler for instances with recomputation, F&B pairs and several replicas.

Event-driven like :mod:`zbsolve.search.list_scheduler`: the device that can start first decides next, B before
F, F as memory allows, W into gaps. Beyond that one,

* an R runs just in time for its gradient, or earlier in a gap, as far ahead as the policy allows;
* an F and a BW whose inputs are both known run as a pair where waiting for the later one costs less than
  what they save;
* backwards are fused or split by micro-batch: the first and the last few of a stage split, as in DualPipe;
* with several replicas the devices' promises have one order of micro-batches over all replicas: what takes
  memory (F, R, a B that grows) is admitted only if the device can still carry every micro-batch in turn
  through to its end, those among them that it has not met included. So the first unfinished one always
  fits, on every device, and no device waits for another's memory in a circle.

:func:`run_policy` is written for numba and also runs as plain Python.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zbsolve.bounds.waits import back, room
from zbsolve.compiled import compile_loop
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.memory import Pairs
from zbsolve.model.objective import column_of
from zbsolve.search.extended_arrays import ExtendedArrays, decode, time_codes, to_extended_arrays

Orders = tuple[tuple[Task, ...], ...]
IntArray = NDArray[np.int64]


class ExtendedPolicy(NamedTuple):
    """What the list scheduler may be told. Shapes (S,) and (p,).

    Attributes
    ----------
    limit : most micro-batches in flight between F and backward of a stage, beside the memory cap
    backlog : pending W of a stage from which on W goes before F
    split_first, split_last : how many of a stage's first and last backwards run as B and W; all others as BW
        where the stage can
    ahead : most R's of a stage that may run before their gradients are known, in gaps
    patience_f, patience_w : how far an F, or a W or early R, may delay a B that is known to arrive, as a
        share of its own duration
    patience_pair : how long a device may wait to pair, as a multiple of what the pair saves (below 0: none)
    depth_first : prefer the later stage among the F's of a device (else the earlier)
    """

    limit: IntArray
    backlog: IntArray
    split_first: IntArray
    split_last: IntArray
    ahead: IntArray
    patience_f: NDArray[np.float64]
    patience_w: NDArray[np.float64]
    patience_pair: NDArray[np.float64]
    depth_first: NDArray[np.bool_]


def can_finish(a: Any, d: int, done: Any, level: float) -> bool:
    """Whether a device at a memory level can carry its micro-batches to their end one after the other.

    By number, then by replica, up to the newest that it has begun; pending W's before all of them.
    """
    free = a.room[d] - level
    if np.isinf(free):
        return True
    newest, oldest = 0, a.m
    for k in range(a.held[d]):
        s = a.chunks[d, k]
        pending = done[s, 5] - done[s, 2]
        if pending > 0:
            if a.transient[s, 2] > free:
                return False
            free += pending * a.release[s, 2]
        newest = max(newest, done[s, 0])
        oldest = min(oldest, done[s, 1])
    for j in range(oldest, newest):
        k = 0
        while k < a.held[d]:
            begin = k
            while k < a.held[d] and a.replica[a.chunks[d, k]] == a.replica[a.chunks[d, begin]]:
                k += 1
            held, ahead, need = 0.0, 0.0, 0.0
            for i in range(begin, k):
                s = a.chunks[d, i]
                if j < done[s, 1]:
                    continue
                if j < done[s, 0]:
                    held += a.acquire[s, 0]
                    if j < done[s, 4]:
                        held += a.acquire[s, 4]
                else:
                    need = max(need, ahead + a.acquire[s, 0] + a.transient[s, 0])
                    ahead += a.acquire[s, 0]
            for i in range(k - 1, begin - 1, -1):
                s = a.chunks[d, i]
                if j < done[s, 1]:
                    continue
                kept = a.acquire[s, 0]
                if a.recompute[s]:
                    kept += a.acquire[s, 4]
                    if not j < done[s, 4]:
                        ahead += a.acquire[s, 4]
                        need = max(need, ahead)
                grown = ahead + a.acquire[s, 1]
                own = max(grown + a.transient[s, 1], grown - a.release[s, 1] + a.transient[s, 2])
                if a.can_fuse[s]:
                    own = min(own, ahead + a.transient[s, 3])
                need = max(need, own)
                ahead -= kept
            if need > free:
                return False
            free += held
    return True


def admitted(a: Any, d: int, s: int, kind: int, done: Any, level: float) -> bool:
    """Whether a single task fits now, and all that is to come can be finished after it."""
    if level + a.acquire[s, kind] + a.transient[s, kind] > a.room[d]:
        return False
    grown = level + a.acquire[s, kind] - a.release[s, kind]
    if a.acquire[s, kind] == 0.0 and kind != 1:
        return True
    column = 0 if kind == 0 else 4 if kind == 4 else 1
    done[s, column] += 1
    if kind == 1:
        done[s, 5] += 1
    safe = can_finish(a, d, done, grown)
    done[s, column] -= 1
    if kind == 1:
        done[s, 5] -= 1
    return safe


def pair_admitted(a: Any, d: int, s: int, q: int, done: Any, level: float) -> bool:
    """Whether F of s beside BW of q fits now, and all that is to come can be finished after them."""
    taken = a.acquire[s, 0] + a.acquire[q, 3]
    if level + taken + a.transient[s, 0] + a.transient[q, 3] > a.room[d]:
        return False
    done[s, 0] += 1
    done[q, 1] += 1
    safe = can_finish(a, d, done, level + taken - a.release[q, 3])
    done[s, 0] -= 1
    done[q, 1] -= 1
    return safe


def run_policy(a: Any, policy: Any, codes: Any, lengths: Any) -> bool:
    """Fill ``codes`` and ``lengths``; False when nothing can start (the policy does not fit in memory)."""
    S, m, p = a.device.shape[0], a.m, a.room.shape[0]
    done = np.zeros((S, 6), dtype=np.int64)  # F, backward, W, (none), R, split backwards
    own = np.zeros((S, m))  # end of F, or of R where the stage recomputes
    end_f = np.zeros((S, m))
    out_f = np.zeros((S, m))
    out_b = np.zeros((S, m))
    free = np.zeros(p)
    level = np.zeros(p)
    link = np.zeros((p, p))
    choice = np.full(p, -1, dtype=np.int64)
    partner = np.full(p, -1, dtype=np.int64)
    start = np.full(p, np.inf)
    stale = np.ones(p, dtype=np.bool_)
    lengths[:] = 0
    unfinished = p
    while unfinished > 0:
        for d in range(p):
            if not stale[d]:
                continue
            stale[d] = False
            choice[d], partner[d], start[d] = -1, -1, np.inf
            now = free[d]
            # --- backwards, and the R's that they wait for --------------------------------------------------
            b_time, b_code = np.inf, -1
            w_stage, w_most = -1, 0
            r_stage = -1
            crowded = False
            for i in range(a.held[d]):
                s = a.chunks[d, i]
                j = done[s, 1]
                if j < done[s, 0] and (a.last[s] or j < done[s + 1, 1]):
                    gradient = now if a.last[s] else max(now, out_b[s + 1, j])
                    if a.recompute[s] and done[s, 4] <= j:
                        ready = max(max(now, end_f[s, j]), gradient - a.time[s, 4])
                        if ready <= b_time and admitted(a, d, s, 4, done, level[d]):
                            b_time, b_code = ready, 8 * s + 4
                    else:
                        ready = max(gradient, own[s, j])
                        fused = a.can_fuse[s] and policy.split_first[s] <= j < m - policy.split_last[s]
                        kind = 3 if fused else 1
                        if ready <= b_time:
                            fits = admitted(a, d, s, kind, done, level[d])
                            if not fits and a.can_fuse[s]:
                                kind = 4 - kind
                                fits = admitted(a, d, s, kind, done, level[d])
                            if fits:
                                b_time, b_code = ready, 8 * s + kind
                pending = done[s, 5] - done[s, 2]
                if pending > 0 and level[d] + a.transient[s, 2] <= a.room[d]:
                    if pending > w_most:
                        w_stage, w_most = s, pending
                    crowded = crowded or pending >= policy.backlog[s]
                early = a.recompute[s] and done[s, 4] < done[s, 0] and done[s, 4] - j < policy.ahead[s]
                early = early and r_stage < 0 and end_f[s, done[s, 4]] <= now
                if early and admitted(a, d, s, 4, done, level[d]):
                    r_stage = s
            # --- the best F alone, and the best pair -------------------------------------------------------
            f_time, f_stage = np.inf, -1
            pair_start, pair_f, pair_b, saving = np.inf, -1, -1, 0.0
            for i in range(a.held[d]):
                s = a.chunks[d, i]
                j = done[s, 0]
                if j >= m or (not a.first[s] and j >= done[s - 1, 0]):
                    continue
                ready = now if a.first[s] else max(now, out_f[s - 1, j])
                in_flight = j - done[s, 1]
                better = ready < f_time or (ready == f_time and policy.depth_first[d])
                if better and in_flight < policy.limit[s] and admitted(a, d, s, 0, done, level[d]):
                    f_time, f_stage = ready, s
                if policy.patience_pair[d] < 0:
                    continue
                for k in range(a.held[d]):
                    q = a.chunks[d, k]
                    b = done[q, 1]
                    if not a.pair_time[s, q] < np.inf or b >= done[q, 0]:
                        continue
                    if not a.last[q] and b >= done[q + 1, 1]:
                        continue
                    if in_flight - (1 if s == q else 0) >= policy.limit[s]:
                        continue
                    both = max(ready, max(own[q, b], 0.0 if a.last[q] else out_b[q + 1, b]))
                    better = both < pair_start or (both == pair_start and policy.depth_first[d])
                    if better and pair_admitted(a, d, s, q, done, level[d]):
                        pair_start, pair_f, pair_b = both, s, q
                        saving = a.time[s, 0] + a.time[q, 3] - a.pair_time[s, q]
            # --- decide -------------------------------------------------------------------------------------
            take, when = -1, np.inf
            alone = min(b_time, f_time)
            if pair_f >= 0 and pair_start - max(now, alone) <= policy.patience_pair[d] * saving:
                take, when = 8 * pair_f + 5, pair_start
                partner[d] = pair_b
            elif b_code >= 0 and b_time <= now:
                take, when = b_code, now
            else:
                blocked = f_stage < 0 or (crowded and w_stage >= 0)
                if not blocked and b_time >= f_time + (1.0 - policy.patience_f[d]) * a.time[f_stage, 0]:
                    take, when = 8 * f_stage, f_time
                if take < 0 and b_code >= 0:
                    take, when = b_code, b_time
            if when > now or take < 0:
                gap = when - now
                if r_stage >= 0 and (take < 0 or gap >= (1.0 - policy.patience_w[d]) * a.time[r_stage, 4]):
                    take, when = 8 * r_stage + 4, now
                    partner[d] = -1
                elif w_stage >= 0 and (take < 0 or gap >= (1.0 - policy.patience_w[d]) * a.time[w_stage, 2]):
                    take, when = 8 * w_stage + 2, now
                    partner[d] = -1
            choice[d], start[d] = take, when
        # --- the device that starts first commits -----------------------------------------------------
        d = 0
        for e in range(1, p):
            if start[e] < start[d]:
                d = e
        if choice[d] < 0:
            return False
        s, kind = choice[d] // 8, choice[d] % 8
        q = partner[d]
        end = start[d] + (a.pair_time[s, q] if q >= 0 else a.time[s, kind])
        free[d] = end
        stale[d] = True
        codes[d, lengths[d]] = choice[d]
        lengths[d] += 1
        backward = s if kind == 1 or kind == 3 else -1
        if q >= 0:
            codes[d, lengths[d]] = 8 * q + 3
            lengths[d] += 1
            level[d] += a.acquire[q, 3] - a.release[q, 3]
            kind, backward = 0, q
        level[d] += a.acquire[s, kind] - a.release[s, kind]
        if kind == 0:
            j = done[s, 0]
            done[s, 0] += 1
            own[s, j] = end_f[s, j] = end
            if not a.last[s]:
                e = a.device[s + 1]
                leaves = end
                if a.occupied[s] >= 0:
                    leaves = max(end, link[d, e])
                    link[d, e] = leaves + a.occupied[s]
                out_f[s, j] = leaves + a.hop[s]
                stale[e] = True
        elif kind == 2:
            done[s, 2] += 1
        elif kind == 4:
            own[s, done[s, 4]] = end
            done[s, 4] += 1
        if backward >= 0:
            j = done[backward, 1]
            done[backward, 1] += 1
            if kind == 1:
                done[backward, 5] += 1
            if not a.first[backward]:
                e = a.device[backward - 1]
                leaves = end
                if a.occupied[backward - 1] >= 0:
                    leaves = max(end, link[d, e])
                    link[d, e] = leaves + a.occupied[backward - 1]
                out_b[backward, j] = leaves + a.hop[backward - 1]
                stale[e] = True
        left = False
        for i in range(a.held[d]):
            s = a.chunks[d, i]
            left = left or done[s, 1] < m or done[s, 2] < done[s, 5]
        if not left:
            unfinished -= 1
    return True


# --- policies ------------------------------------------------------------------------------------------

# (patience_f, patience_w), most often best first.
PATIENCES = ((0.75, 0.75), (0.25, 0.25), (1.0, 0.0), (0.5, 0.5), (0.0, 0.0))
DEPTHS = (1.0, 2.0, 1.5, math.inf, 0.75, 0.5)


def _limits(instance: Instance, depth: float) -> list[int]:
    """Per stage, micro-batches in flight that keep its device busy over ``depth`` of its round trips."""
    limits = []
    for s, stage in enumerate(instance.stages):
        last = s - s % instance.chain + instance.chain - 1
        way = stage.t_f + back(stage)
        for q in range(s, last):
            later = instance.stages[q + 1]
            way += 2 * instance.hop(q) + later.t_f + (later.t_r or 0.0) + back(later)
        slot = instance.device_work(stage.device) / instance.num_microbatches
        # W's leave two thirds of a slot.
        wanted = math.inf if slot == 0 or math.isinf(depth) else depth * way / slot * 1.5
        limits.append(int(max(1, min(instance.num_microbatches, math.ceil(min(wanted, 1e9) - 1e-9)))))
    return limits


def _fitting(instance: Instance) -> list[int]:
    """Per stage, as many micro-batches as the device's cap holds when all its stages hold as many."""
    limits = []
    for stage in instance.stages:
        each = sum(instance.stages[q].kept_by_forward for q in instance.stages_on(stage.device))
        free = room(instance, stage.device)
        most = instance.num_microbatches
        limits.append(int(max(1, min(most, free / each))) if each > 0 else most)
    return limits


def presets(instance: Instance) -> Iterator[ExtendedPolicy]:
    """Policies worth trying on any instance, the likely best first."""
    S, p, m = instance.num_stages, instance.num_devices, instance.num_microbatches
    fusible = any(stage.t_bw is not None for stage in instance.stages)
    outer = np.array([instance.chain - 1 - s % instance.chain for s in range(S)])
    splits = [(np.full(S, m), np.zeros(S, dtype=np.int64))]
    if fusible:
        none = np.zeros(S, dtype=np.int64)
        splits = [(none, none), (none, outer // 2), *splits]
    shapes = dict.fromkeys(
        (*(tuple(_limits(instance, depth)) for depth in DEPTHS), tuple(_fitting(instance)))
    )
    aheads = (0, 1) if instance.recomputes else (0,)
    pairings = (4.0, 1.0, -1.0) if instance.has_pairs else (-1.0,)
    for f, w in PATIENCES:
        for limits in shapes:
            for first, last in splits:
                for pairing in pairings:
                    for ahead in aheads:
                        for depth_first in (True, False) if p < S else (True,):
                            yield ExtendedPolicy(
                                limit=np.array(limits),
                                backlog=np.full(S, m + 1),
                                split_first=first.copy(),
                                split_last=last.copy(),
                                ahead=np.full(S, ahead),
                                patience_f=np.full(p, f),
                                patience_w=np.full(p, w),
                                patience_pair=np.full(p, pairing),
                                depth_first=np.full(p, depth_first),
                            )


Value = tuple[float, float]


@dataclass(frozen=True, slots=True, eq=False)
class _Tried:
    value: Value
    policy: ExtendedPolicy


class ExtendedPolicySearch:
    """Descent over policies from the best few presets, in turn; sideways steps allowed.

    Compares (cost, both costs and mean end), at earliest starts. Plain Python until :meth:`compile`.
    ``seconds_a_run`` is how long the last run took; before the first, a guess.
    """

    def __init__(self, instance: Instance, objective: str, seed: int, seconds_a_run: float = 0.0) -> None:
        self.instance = instance
        self.arrays: ExtendedArrays = to_extended_arrays(instance)
        self._column = column_of(objective)
        self._random = np.random.default_rng(seed)
        self._run, self._time = run_policy, time_codes
        width = instance.num_microbatches * 4 * int(self.arrays.held.max())
        self.codes = np.zeros((instance.num_devices, width), dtype=np.int64)
        self.lengths = np.zeros(instance.num_devices, dtype=np.int64)
        self._waiting = presets(instance)
        self._kept: list[_Tried] = []
        self._turn = 0
        self.best = (math.inf, math.inf)
        self.best_orders: tuple[Orders, Pairs] | None = None
        self.seconds_a_run = seconds_a_run

    def _evaluate(self, policy: ExtendedPolicy) -> Value:
        began = time.monotonic()
        try:
            return self._value(policy)
        finally:
            self.seconds_a_run = time.monotonic() - began

    def _value(self, policy: ExtendedPolicy) -> Value:
        if not self._run(self.arrays, policy, self.codes, self.lengths):
            return math.inf, math.inf
        found = self._time(self.arrays, self.codes, self.lengths)
        value = found[self._column], sum(found[:2]) + found[2] / len(self.lengths)
        if value < self.best:
            self.best, self.best_orders = value, decode(self.codes, self.lengths)
        return value

    def compile(self) -> None:
        """Go on in machine code."""
        self._run = compile_loop(run_policy, can_finish, admitted, pair_admitted)
        self._time = compile_loop(time_codes)

    def try_preset(self) -> bool:
        """Run the next preset; False when there is none left."""
        policy = next(self._waiting, None)
        if policy is None:
            return False
        value = self._evaluate(policy)
        if math.isfinite(value[0]) and all(value != tried.value for tried in self._kept):
            self._kept = sorted((*self._kept, _Tried(value, policy)), key=lambda tried: tried.value)[:6]
        return True

    def step(self, used: float) -> None:
        """Change one of the policies kept, with a share ``used`` of the budget gone: fewer go on then."""
        if not self._kept:
            return
        places = max(1, math.ceil(len(self._kept) * (1.0 - used)))
        self._kept = sorted(self._kept, key=lambda tried: tried.value)[:places]
        self._turn = (self._turn + 1) % len(self._kept)
        policy = self._neighbour(self._kept[self._turn].policy)
        value = self._evaluate(policy)
        if value <= self._kept[self._turn].value:
            self._kept[self._turn] = _Tried(value, policy)

    def _neighbour(self, policy: ExtendedPolicy) -> ExtendedPolicy:
        draw, m = self._random, self.instance.num_microbatches
        changed = {name: array.copy() for name, array in policy._asdict().items()}
        for _ in range(1 + int(draw.integers(0, 3))):
            names = ["limit", "limit", "limit", "patience_f", "patience_w", "depth_first", "backlog"]
            if self.arrays.can_fuse.any():
                names += ["split_first", "split_last"]
            if self.instance.has_pairs:
                names += ["patience_pair"]
            if self.instance.recomputes:
                names += ["ahead"]
            name = names[int(draw.integers(len(names)))]
            array = changed[name]
            # A run of neighbours: their policies want to change together.
            low = int(draw.integers(len(array)))
            part = slice(low, low + 1 + int(draw.geometric(0.5)))
            if draw.random() < 0.15:
                part = slice(None)
            if name == "depth_first":
                array[part] = ~array[part]
            elif name in ("patience_f", "patience_w"):
                array[part] = draw.random()
            elif name == "patience_pair":
                array[part] = draw.choice([-1.0, 0.0, 0.5, 1.0, 2.0, 4.0])
            elif name == "backlog":
                array[part] = draw.integers(1, m + 2) if draw.random() < 0.5 else m + 1
            else:
                least = 1 if name == "limit" else 0
                array[part] = np.clip(array[part] + draw.integers(-2, 3), least, m)
                if name.startswith("split") and draw.random() < 0.2:
                    array[part] = 0 if draw.random() < 0.5 else m
        return ExtendedPolicy(**changed)
