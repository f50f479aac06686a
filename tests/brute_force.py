"""Exhaustive optimum of tiny instances, sharing no code with the solvers, the simulator or the checker.

Every vector of per-device orders with identical micro-batches in order is generated once or more, as the
sequence of its tasks by earliest start; memory is tracked from its definition. Makespan is read off; the
least span of an order vector is found by Bellman-Ford on its difference constraints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from zbsolve.model.instance import Instance

Name = tuple[str, int, int]
Edge = tuple[Name, Name, float]


class Optimum(NamedTuple):
    """Least makespan and least span (infinite where no order fits the caps), number of orders."""

    makespan: float
    span: float
    orders: int


def brute_force(instance: Instance) -> Optimum:
    """Try every order. Use at most about 14 tasks."""
    makespan = span = math.inf
    seen = set()
    for orders, starts in all_orders(instance):
        if orders in seen:
            continue
        seen.add(orders)
        ends = [starts[t] + length(instance, t) for order in orders for t in order]
        makespan = min(makespan, max(ends) - min(starts.values()))
        if not math.isinf(span) and not _span_reachable(instance, orders, span - 1e-6):
            continue
        span = least_span(instance, orders)
    return Optimum(makespan, span, len(seen))


def length(instance: Instance, task: Name) -> float:
    """Duration by the instance's own fields."""
    kind, s, _ = task
    stage = instance.stages[s]
    return {"F": stage.t_f, "B": stage.t_b, "W": stage.t_w, "BW": stage.t_bw or 0.0}[kind]


def _hop(instance: Instance, s: int) -> float:
    if instance.stages[s].device == instance.stages[s + 1].device:
        return 0.0
    return instance.t_comm[s] if isinstance(instance.t_comm, tuple) else instance.t_comm


def all_orders(instance: Instance) -> Iterator[tuple[tuple[tuple[Name, ...], ...], dict[Name, float]]]:
    """Every vector of device orders that keeps dependencies and caps, with its earliest starts."""
    p, m, last = instance.num_devices, instance.num_microbatches, instance.num_stages - 1
    orders: list[list[Name]] = [[] for _ in range(p)]
    starts: dict[Name, float] = {}
    ends: dict[Name, float] = {}
    level = [instance.static(d) for d in range(p)]
    needed = 2 * m * (last + 1)  # F and backward of each; a W more for each that is split

    def backward_end(s: int, j: int) -> float | None:
        return ends.get(("B", s, j), ends.get(("BW", s, j)))

    def ready(task: Name) -> float | None:
        """Earliest time by dependencies, None when one is missing."""
        kind, s, j = task
        if kind == "F":
            if s == 0:
                return 0.0
            end = ends.get(("F", s - 1, j))
            return None if end is None else end + _hop(instance, s - 1)
        if kind == "W":
            return ends.get(("B", s, j))
        own = ends.get(("F", s, j))
        if own is None or s == last:
            return own
        later = backward_end(s + 1, j)
        return None if later is None else max(own, later + _hop(instance, s))

    def candidates() -> Iterator[Name]:
        """The next F, backward and W of each stage, micro-batches in order."""
        for s, stage in enumerate(instance.stages):
            for kinds in (("F",), ("B", "BW"), ("W",)):
                for j in range(m):
                    if kinds == ("W",) and ("BW", s, j) in starts:
                        continue
                    if any((kind, s, j) in starts for kind in kinds):
                        continue
                    yield from ((k, s, j) for k in kinds if k != "BW" or stage.t_bw is not None)
                    break

    def memory(task: Name) -> tuple[float, float]:
        """Extra memory while the task runs, and the change it leaves."""
        kind, s, _ = task
        stage = instance.stages[s]
        if kind == "F":
            return stage.mem_b + stage.peak_f, stage.mem_b
        if kind == "B":
            return max(stage.mem_b, stage.mem_w) - stage.mem_b + stage.peak_b, stage.mem_w - stage.mem_b
        if kind == "W":
            return stage.peak_w, -stage.mem_w
        peak = max(stage.peak_b, stage.peak_w) if stage.peak_bw is None else stage.peak_bw
        return peak, -stage.mem_b

    def extend(now: float, left: int) -> Iterator[tuple[tuple[tuple[Name, ...], ...], dict[Name, float]]]:
        if left == 0:
            yield tuple(tuple(order) for order in orders), dict(starts)
            return
        for task in list(candidates()):
            earliest = ready(task)
            if earliest is None:
                continue
            device = instance.stages[task[1]].device
            order = orders[device]
            start = max(earliest, ends[order[-1]] if order else 0.0)
            if start < now:
                continue  # the same orders come up in the sequence that is sorted by start
            during, change = memory(task)
            cap = instance.cap(device)
            if level[device] + during > cap + 1e-9 * cap:
                continue
            order.append(task)
            starts[task], ends[task] = start, start + length(instance, task)
            level[device] += change
            yield from extend(start, left - 1 + (1 if task[0] == "B" else 0))
            level[device] -= change
            del starts[task], ends[task]
            order.pop()

    yield from extend(0.0, needed)


def _edges(instance: Instance, orders: tuple[tuple[Name, ...], ...]) -> list[Edge]:
    """Difference constraints ``start[b] >= start[a] + weight`` without those of the span."""
    present = {task for order in orders for task in order}
    edges: list[Edge] = []

    def add(a: Name, b: Name, lag: float) -> None:
        if a in present and b in present:
            edges.append((a, b, length(instance, a) + lag))

    for s in range(instance.num_stages):
        for j in range(instance.num_microbatches):
            if s:
                add(("F", s - 1, j), ("F", s, j), _hop(instance, s - 1))
                for later in ("B", "BW"):
                    for earlier in ("B", "BW"):
                        add((later, s, j), (earlier, s - 1, j), _hop(instance, s - 1))
            for kind in ("B", "BW"):
                add(("F", s, j), (kind, s, j), 0.0)
            add(("B", s, j), ("W", s, j), 0.0)
    for order in orders:
        for a, b in pairwise(order):
            add(a, b, 0.0)
    return edges


def _span_reachable(instance: Instance, orders: tuple[tuple[Name, ...], ...], span: float) -> bool:
    """Bellman-Ford: no positive cycle once every device must end within ``span`` of its start."""
    edges = _edges(instance, orders)
    edges += [(o[-1], o[0], length(instance, o[-1]) - span) for o in orders if o]
    start = {task: 0.0 for order in orders for task in order}
    for _ in range(len(start) + 1):
        changed = False
        for a, b, weight in edges:
            if start[a] + weight > start[b] + 1e-11:
                start[b] = start[a] + weight
                changed = True
        if not changed:
            return True
    return False


def least_span(instance: Instance, orders: tuple[tuple[Name, ...], ...]) -> float:
    """Least span of one order vector, by bisection to about 1e-9."""
    low, high = 0.0, 2.0 * sum(length(instance, t) for order in orders for t in order) + 1.0
    high += 2.0 * instance.num_microbatches * sum(_hop(instance, s) for s in range(instance.num_stages - 1))
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        if _span_reachable(instance, orders, middle):
            high = middle
        else:
            low = middle
    return high
