"""Exhaustive search of tiny steps with recomputation, F&B pairs and replicas. Shares no code with zbsolve.

Depth first over all sequences of tasks by their starts, each as early as its place allows; states that were
met before are cut. Micro-batches of a stage are taken in order. Every task must take some time.
"""

from __future__ import annotations

import math
from typing import Any

from zbsolve.model.instance import Instance

Done = tuple[tuple[str, int, int], ...]


class _Search:
    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.chain = instance.num_stages // instance.replicas
        self.best = math.inf
        hops = instance.t_comm
        self.longest_hop = max(hops, default=0.0) if isinstance(hops, tuple) else hops
        self.seen: set[Any] = set()

    def hop(self, a: int, b: int) -> float:
        if self.instance.stages[a].device == self.instance.stages[b].device:
            return 0.0
        t = self.instance.t_comm
        return t[min(a, b)] if isinstance(t, tuple) else t

    def ready(self, kind: str, s: int, j: int, ends: dict[tuple[str, int, int], float]) -> float | None:
        """When a task's inputs are there; None when one is missing."""
        stage = self.instance.stages[s]
        if j > 0 and kind in "FR" and (kind, s, j - 1) not in ends:
            return None
        if kind == "F":
            if s % self.chain == 0:
                return 0.0
            end = ends.get(("F", s - 1, j))
            return None if end is None else end + self.hop(s - 1, s)
        if kind == "R":
            return ends.get(("F", s, j))
        if kind == "W":
            return ends.get(("B", s, j))
        if j > 0 and ("B", s, j - 1) not in ends and ("BW", s, j - 1) not in ends:
            return None
        own = ends.get(("F" if stage.t_r is None else "R", s, j))
        if own is None:
            return None
        if s % self.chain == self.chain - 1:
            return own
        later = ends.get(("B", s + 1, j), ends.get(("BW", s + 1, j)))
        return None if later is None else max(own, later + self.hop(s, s + 1))

    def memory(self, d: int, ends: dict[tuple[str, int, int], float], now: tuple[Any, ...]) -> float:
        """What device d holds while the tasks ``now`` run on it."""
        held = 0.0
        for s, stage in enumerate(self.instance.stages):
            if stage.device != d:
                continue
            kept = stage.mem_b if stage.t_r is None else stage.mem_r
            for j in range(self.instance.num_microbatches):
                have = {k for k in ("F", "R", "B", "W", "BW") if (k, s, j) in ends}
                runs = {k for k, q, i in now if (q, i) == (s, j)}
                if "F" in have | runs and not have & {"B", "BW"}:
                    held += stage.mem_b if "R" in have | runs else kept
                if "B" in have and "W" not in have:
                    held += stage.mem_w
                if "B" in runs:
                    held += max(0.0, stage.mem_w - stage.mem_b) + stage.peak_b
                held += stage.peak_f * ("F" in runs) + stage.peak_w * ("W" in runs)
                fused = max(stage.peak_b, stage.peak_w) if stage.peak_bw is None else stage.peak_bw
                held += fused * ("BW" in runs)
        return held

    def run(self) -> float:
        self.go({}, [0.0] * self.instance.num_devices, 0.0)
        return self.best

    def go(self, ends: dict[tuple[str, int, int], float], free: list[float], now: float) -> None:
        stages, m = self.instance.stages, self.instance.num_microbatches
        # What ended so long ago that its result is everywhere might as well have ended just then.
        past = now - self.longest_hop
        key = (
            frozenset((task, max(end, past)) for task, end in ends.items()),
            tuple(max(each, now) for each in free),
            now,
        )
        if key in self.seen or (free and max(free) >= self.best):
            return
        self.seen.add(key)
        single = []
        for s, stage in enumerate(stages):
            for j in range(m):
                fused, split = ("BW", s, j) in ends, ("B", s, j) in ends
                kinds = [("F", stage.t_f)] if ("F", s, j) not in ends else []
                if stage.t_r is not None and ("R", s, j) not in ends:
                    kinds.append(("R", stage.t_r))
                if not fused and not split:
                    kinds.append(("B", stage.t_b))
                    if stage.t_bw is not None:
                        kinds.append(("BW", stage.t_bw))
                if split and ("W", s, j) not in ends:
                    kinds.append(("W", stage.t_w))
                for kind, length in kinds:
                    when = self.ready(kind, s, j, ends)
                    if when is not None:
                        single.append(((kind, s, j), when, length))
        if not single and all(
            ("BW", s, j) in ends or ("W", s, j) in ends for s in range(len(stages)) for j in range(m)
        ):
            self.best = min(self.best, max(free))
            return
        moves = [((task,), when, length) for task, when, length in single]
        for f, f_when, f_length in single:
            for b, b_when, b_length in single:
                x, y = stages[f[1]], stages[b[1]]
                if f[0] != "F" or b[0] != "BW" or x.device != y.device or None in (x.t_fb, y.t_fb):
                    continue
                saved = min(z.t_f + (z.t_bw or 0.0) - (z.t_fb or 0.0) for z in (x, y))
                moves.append(((f, b), max(f_when, b_when), f_length + b_length - saved))
        for tasks, when, length in moves:
            d = stages[tasks[0][1]].device
            if self.memory(d, ends, tasks) > self.instance.cap(d) + 1e-9:
                continue
            start = max(free[d], when)
            if start >= now:
                end = start + length
                self.go({**ends, **dict.fromkeys(tasks, end)}, [*free[:d], end, *free[d + 1 :]], start)


def least_makespan(instance: Instance) -> float:
    """The optimum; infinite where nothing fits. Static memory and contended links are not modelled."""
    return _Search(instance).run()
