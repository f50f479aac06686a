"""Tiny joint problems at random, and whether any schedule of any decision beats a claimed bound.

The search over schedules is plain depth first over device orders, from the definitions of
``docs/concepts.md``: no bound, simulator, memory or checking code of the product is used. A decision's
instance, the one that a plan file has, is where both meet.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, pairwise, permutations, product

from zbsolve.model.instance import Instance, Stage
from zbsolve.partition.cluster import Cluster, DeviceGroup, Host, Link
from zbsolve.partition.layers import Keep, Layer, LayerProfile
from zbsolve.partition.problem import CHUNKS, Decision, DecisionProblem, Placement

SLACK = 1e-7  # relative: a schedule this little below a bound is float64 rounding

Name = tuple[str, int, int]

SHAPES: tuple[tuple[int, Placement, int], ...] = (
    (1, "linear", 1),
    (1, "linear", 3),
    (2, "linear", 1),
    (2, "linear", 2),
    (2, "linear", 2),
    (2, "linear", 3),
    (3, "linear", 1),
    (3, "linear", 2),
    (1, "v", 2),
    (1, "loop", 2),
    (2, "v", 1),
    (2, "loop", 1),
)


def every_decision(problem: DecisionProblem) -> Iterator[Decision]:
    """All decisions, by plain enumeration: cuts, device orders, placements, keeps."""
    n, p = len(problem.profile.layers), problem.num_devices
    for placement in problem.placements:
        stages = CHUNKS[placement] * p
        for cuts in combinations(range(1, n), stages - 1):
            split = tuple(b - a for a, b in pairwise([0, *cuts, n]))
            for devices in permutations(range(problem.cluster.num_devices), p):
                for keep in product(problem.keeps, repeat=stages):
                    yield Decision(placement, devices, split, keep)


def random_problem(seed: int) -> DecisionProblem:
    """Unequal layers, some of no length, on unlike devices with memory that is often tight."""
    rng = random.Random(seed)
    p, placement, m = rng.choice(SHAPES)
    stages = CHUNKS[placement] * p
    fusible = rng.random() < 0.35
    times = rng.choice([(0.0, 1.0, 1.0, 2.0), (1.0, 1.0, 2.0, 4.0), (0.5, 1.0, 3.0)])
    layers = tuple(
        Layer(
            t_f=rng.choice(times),
            t_b=rng.choice(times),
            t_w=rng.choice([0.0, 1.0, 1.0, 2.0]),
            t_bw=rng.choice([0.0, 1.5, 2.0, 4.0]) if fusible else None,
            mem_b=rng.choice([0.0, 0.5, 1.0, 2.0]),
            mem_w=rng.choice([0.0, 0.5, 1.0, 2.0]),
            peak_f=rng.choice([0.0, 0.0, 0.5]),
            peak_b=rng.choice([0.0, 0.0, 0.5]),
            peak_w=rng.choice([0.0, 0.0, 0.5]),
            static_mem=rng.choice([0.0, 0.0, 0.5, 1.0]),
            mem_out=rng.choice([0.0, 0.25, 0.5]),
        )
        for _ in range(stages + (rng.random() < 0.4))
    )
    alike = rng.random() < 0.5
    memories = [None, 1.5, 2.0, 3.0, 4.0, 6.0]
    one = (1.0, rng.choice(memories))
    groups = []
    for d in range(p):
        speed, memory = one if alike else (rng.choice([1.0, 1.0, 2.0]), rng.choice(memories))
        groups.append(DeviceGroup(speed=speed, memory=memory, node=d % 2))
    cluster = Cluster(
        devices=tuple(groups),
        same_node=Link(latency=rng.choice([0.0, 0.0, 0.5]), bandwidth=rng.choice([None, 1.0])),
        other_node=rng.choice([None, Link(latency=1.0)]),
        host=Host(bandwidth=2.0, overlap=0.5),
    )
    keeps = rng.choice(
        [(Keep.plain,), (Keep.recompute,), (Keep.recompute, Keep.checkpoint)]
        + 3 * [(Keep.plain, Keep.recompute)]
        + ([tuple(Keep)] if stages * m <= 2 else [])
    )
    return DecisionProblem(
        LayerProfile(layers=layers),
        cluster,
        p,
        m,
        objective="span" if stages * m <= 4 and rng.random() < 0.4 else "makespan",
        placements=(placement,),
        keeps=keeps,
    )


def cheaper_decision(problem: DecisionProblem, bound: float) -> Decision | None:
    """A decision that has a schedule which costs less than ``bound``, if there is any."""
    limit = bound - SLACK * max(1.0, bound)
    for decision in every_decision(problem):
        if has_schedule_below(problem.instance(decision), problem.objective, limit):
            return decision
    return None


def least_cost(instance: Instance, objective: str, below: float = math.inf) -> float:
    """Least cost of all schedules, to about 1e-6, by bisection; infinite where none (``below`` that) fits."""
    low, high = 0.0, 2.0 * sum(_length(instance, t) for t in _every_task(instance)) + 1.0
    high += 2 * instance.num_microbatches * sum(_hop(instance, s) for s in range(instance.num_stages - 1))
    high = min(high, below)
    if not has_schedule_below(instance, objective, high):
        return math.inf
    while high - low > 1e-6:
        middle = (low + high) / 2
        if has_schedule_below(instance, objective, middle):
            high = middle
        else:
            low = middle
    return high


def has_schedule_below(instance: Instance, objective: str, limit: float) -> bool:
    """Whether some schedule that fits the caps costs at most ``limit``."""
    return _Search(instance, objective, limit).run()


def _length(instance: Instance, task: Name) -> float:
    kind, s, _ = task
    stage = instance.stages[s]
    lengths = {"F": stage.t_f, "R": stage.t_r, "B": stage.t_b, "W": stage.t_w, "BW": stage.t_bw}
    return lengths[kind] or 0.0


def _every_task(instance: Instance) -> Iterator[Name]:
    for s in range(instance.num_stages):
        for j in range(instance.num_microbatches):
            yield from ((kind, s, j) for kind in ("F", "R", "B", "W", "BW"))


def _hop(instance: Instance, s: int) -> float:
    if instance.stages[s].device == instance.stages[s + 1].device:
        return 0.0
    return instance.t_comm[s] if isinstance(instance.t_comm, tuple) else instance.t_comm


def _backward(stage: Stage) -> float:
    """Device time of one micro-batch's backward, split or fused, whichever is less."""
    split = stage.t_b + stage.t_w
    return split if stage.t_bw is None else min(split, stage.t_bw)


@dataclass
class _Search:
    """Depth first over device orders, each as the sequence of its tasks by earliest start.

    Micro-batches are alike and taken in order. What has no time left to finish within the limit is cut off;
    for the span, where tasks may start later than they could, by the difference constraints of the orders
    so far (Bellman-Ford).
    """

    instance: Instance
    objective: str
    limit: float
    orders: list[list[Name]] = field(init=False)
    start: dict[Name, float] = field(default_factory=dict)
    end: dict[Name, float] = field(default_factory=dict)
    seen: set[object] = field(default_factory=set)

    def __post_init__(self) -> None:
        inst = self.instance
        self.orders = [[] for _ in range(inst.num_devices)]
        self.held = [0.0 if inst.static_mem is None else inst.static_mem[d] for d in range(inst.num_devices)]
        caps = inst.memory_cap
        self.caps = [
            math.inf if caps is None else caps[d] if isinstance(caps, tuple) else caps
            for d in range(inst.num_devices)
        ]
        # Least device time that each (kind, stage) still to come takes; a backward counts split or fused.
        self.work = [0.0] * inst.num_devices
        for stage in inst.stages:
            self.work[stage.device] += inst.num_microbatches * (
                stage.t_f + (stage.t_r or 0.0) + _backward(stage)
            )

    def run(self) -> bool:
        left = sum(2 + (stage.t_r is not None) for stage in self.instance.stages)
        return self._extend(0.0, left * self.instance.num_microbatches)

    def _ready(self, task: Name) -> float | None:
        """Earliest start by dependencies, None when one is missing."""
        kind, s, j = task
        if kind == "F":
            if s == 0:
                return 0.0
            before = self.end.get(("F", s - 1, j))
            return None if before is None else before + _hop(self.instance, s - 1)
        if kind == "R":
            return self.end.get(("F", s, j))
        if kind == "W":
            return self.end.get(("B", s, j))
        own = self.end.get(("F" if self.instance.stages[s].t_r is None else "R", s, j))
        if own is None or s + 1 == self.instance.num_stages:
            return own
        later = self.end.get(("B", s + 1, j), self.end.get(("BW", s + 1, j)))
        return None if later is None else max(own, later + _hop(self.instance, s))

    def _candidates(self) -> Iterator[Name]:
        for s, stage in enumerate(self.instance.stages):
            kinds: list[tuple[str, ...]] = [("F",), ("B", "BW"), ("W",)]
            if stage.t_r is not None:
                kinds.insert(1, ("R",))
            for alike in kinds:
                for j in range(self.instance.num_microbatches):
                    if any((kind, s, j) in self.start for kind in alike):
                        continue
                    if alike == ("W",) and ("BW", s, j) in self.start:
                        continue
                    yield from ((k, s, j) for k in alike if k != "BW" or stage.t_bw is not None)
                    break

    def _memory(self, task: Name) -> tuple[float, float]:
        """Extra memory while the task runs, and the change that it leaves."""
        kind, s, _ = task
        stage = self.instance.stages[s]
        kept = stage.mem_b if stage.t_r is None else stage.mem_r
        if kind == "F":
            return kept + stage.peak_f, kept
        if kind == "R":
            return stage.mem_b - kept, stage.mem_b - kept
        if kind == "B":
            return max(0.0, stage.mem_w - stage.mem_b) + stage.peak_b, stage.mem_w - stage.mem_b
        if kind == "W":
            return stage.peak_w, -stage.mem_w
        peak = max(stage.peak_b, stage.peak_w) if stage.peak_bw is None else stage.peak_bw
        return peak, -stage.mem_b

    def _forced(self, task: Name) -> float:
        """Of the device's work to come, what a task does."""
        kind, s, _ = task
        stage = self.instance.stages[s]
        if kind in ("F", "R"):
            return _length(self.instance, task)
        least = _backward(stage)
        if kind == "BW":
            return least
        first = min(stage.t_b, least)
        return first if kind == "B" else least - first

    def _extend(self, now: float, left: int) -> bool:
        if left == 0:
            return True
        key = (
            (
                now,
                tuple(self.start),
            )
            if self.objective == "span"
            else (
                now,
                frozenset(self.start),
                tuple(self.end[order[-1]] if order else 0.0 for order in self.orders),
                tuple(sorted(self._awaited())),
            )
        )
        if key in self.seen:
            return False
        self.seen.add(key)
        for task in list(self._candidates()):
            earliest = self._ready(task)
            if earliest is None:
                continue
            device = self.instance.stages[task[1]].device
            order = self.orders[device]
            start = max(earliest, self.end[order[-1]] if order else 0.0)
            if start < now:
                continue  # the same orders come up in the sequence that is sorted by start
            during, change = self._memory(task)
            cap = self.caps[device]
            if self.held[device] + during > cap + 1e-9 * max(1.0, cap):
                continue
            forced = self._forced(task)
            order.append(task)
            self.start[task], self.end[task] = start, start + _length(self.instance, task)
            self.held[device] += change
            self.work[device] -= forced
            found = self._possible(start) and self._extend(start, left - 1 + (task[0] == "B"))
            self.work[device] += forced
            self.held[device] -= change
            del self.start[task], self.end[task]
            order.pop()
            if found:
                return True
        return False

    def _awaited(self) -> Iterator[tuple[Name, float]]:
        """Ends that something to come may still wait for."""
        for (kind, s, j), end in self.end.items():
            open_backward = not {("B", s, j), ("BW", s, j)} & self.start.keys()
            open_upstream = s > 0 and not {("B", s - 1, j), ("BW", s - 1, j)} & self.start.keys()
            more = s + 1 < self.instance.num_stages
            waiting = {
                "F": open_backward or (more and ("F", s + 1, j) not in self.start),
                "R": open_backward,
                "B": open_upstream or ("W", s, j) not in self.start,
                "BW": open_upstream,
                "W": False,
            }
            if waiting[kind]:
                yield (kind, s, j), end

    def _possible(self, now: float) -> bool:
        """Whether each device can still do its work within the limit, nothing starting before ``now``."""
        if self.objective == "span":
            return self._windows_possible()
        return all(
            max(now, self.end[order[-1]] if order else 0.0) + work <= self.limit
            for order, work in zip(self.orders, self.work, strict=True)
        )

    def _windows_possible(self) -> bool:
        """Bellman-Ford: no positive cycle once each device's window is within the limit."""
        edges: list[tuple[Name, Name, float]] = []

        def add(a: Name, b: Name, lag: float) -> None:
            if a in self.start and b in self.start:
                edges.append((a, b, _length(self.instance, a) + lag))

        for kind, s, j in self.start:
            task = (kind, s, j)
            if kind == "F" and s > 0:
                add(("F", s - 1, j), task, _hop(self.instance, s - 1))
            elif kind in ("R", "B", "BW"):
                add(("F", s, j), task, 0.0)
            if kind in ("B", "BW"):
                add(("R", s, j), task, 0.0)
                for later in ("B", "BW"):
                    if s + 1 < self.instance.num_stages:
                        add((later, s + 1, j), task, _hop(self.instance, s))
            elif kind == "W":
                add(("B", s, j), task, 0.0)
        for device, order in enumerate(self.orders):
            edges += [(a, b, _length(self.instance, a)) for a, b in pairwise(order)]
            if order:
                last = _length(self.instance, order[-1]) + self.work[device]
                edges.append((order[-1], order[0], last - self.limit))
        times = dict.fromkeys(self.start, 0.0)
        for _ in range(len(times) + 1):
            changed = False
            for a, b, weight in edges:
                if times[a] + weight > times[b] + 1e-11:
                    times[b] = times[a] + weight
                    changed = True
            if not changed:
                return True
        return False
