"""Per-device orders to times: earliest starts, the least span, and why an order cannot run.

Both cost measures of a fixed set of orders are longest-path problems on one graph (dependencies plus
"next on the same device"):

* makespan: every task as early as possible.
* span: devices may begin later than they could. With ``L[d, e]`` the longest path from the first task of
  device d to the end of the last task of device e, first starts ``x`` reach a span T exactly when
  ``x[d] + L[d, e] - x[e] <= T`` for all d, e: the least T is the largest cycle mean of L, and the
  x are its potentials. (It is also the period of a pipeline whose devices start their next step without
  a barrier, which is why optimizer post-validation pays by span.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import numpy as np
from numpy.typing import NDArray

from zbsolve.errors import InfeasibleError
from zbsolve.graph import Task, duration, needs, predecessors
from zbsolve.instance import Instance
from zbsolve.schedule import Schedule, TimedTask

Orders = Sequence[Sequence[Task]]


class CycleError(InfeasibleError):
    """The orders wait for each other in a circle; ``cycle`` lists its tasks, each waiting for the next."""

    def __init__(self, cycle: Sequence[Task]) -> None:
        self.cycle = tuple(cycle)
        super().__init__(
            "the orders deadlock: " + " waits for ".join(str(task) for task in (*cycle, cycle[0]))
        )


def topological_order(instance: Instance, orders: Orders) -> list[tuple[int, Task]]:
    """All (device, task) such that dependencies and device orders point backwards.

    Raises
    ------
    CycleError
        When no such order exists: running these programs would deadlock.
    """
    return _propagate(instance, orders, {})[0]


def _propagate(
    instance: Instance, orders: Orders, not_before: Mapping[Task, float]
) -> tuple[list[tuple[int, Task]], dict[Task, float]]:
    """A topological order of (device, task), and earliest starts with ``not_before`` as further limits.

    A dependency on a task that is in no order counts as met: whether tasks are missing is for the checker.
    """
    kinds = {(task.kind, task.stage) for order in orders for task in order}
    needed = {(kind, stage): needs(instance, kind, stage) for kind, stage in kinds}
    length = {(kind, stage): duration(instance, kind, stage) for kind, stage in kinds}
    ends: dict[Task, float] = dict.fromkeys((task for order in orders for task in order), -1.0)
    starts: dict[Task, float] = {}
    waiting: dict[Task, list[int]] = {}
    position = [0] * len(orders)
    free = [0.0] * len(orders)
    ready = list(range(len(orders)))
    sequence: list[tuple[int, Task]] = []
    while ready:
        device = ready.pop()
        order = orders[device]
        now = free[device]
        for place in range(position[device], len(order)):
            task = order[place]
            kind, stage, microbatch = task
            start = now
            blocker = None
            for before, at, lag in needed[kind, stage]:
                key = Task(before, at, microbatch)
                end = ends.get(key)
                if end is None:
                    continue
                if end < 0:
                    blocker = key
                    break
                if end + lag > start:
                    start = end + lag
            if blocker is not None:
                waiting.setdefault(blocker, []).append(device)
                break
            if not_before:
                start = max(start, not_before.get(task, 0.0))
            starts[task] = start
            ends[task] = now = start + length[kind, stage]
            sequence.append((device, task))
            position[device] += 1
            if task in waiting:
                ready += waiting.pop(task)
        free[device] = now
    if len(sequence) < sum(map(len, orders)):
        raise CycleError(_find_cycle(instance, orders, position, starts.keys(), ends.keys()))
    return sequence, starts


def _first_blocker(instance: Instance, task: Task, done: Set[Task], present: Set[Task]) -> Task | None:
    for edge in predecessors(instance, task):
        if edge.before not in done and edge.before in present:
            return edge.before
    return None


def _find_cycle(
    instance: Instance, orders: Orders, position: Sequence[int], done: Set[Task], present: Set[Task]
) -> list[Task]:
    """Follow "waits for" from a blocked device until a device repeats."""
    device_of = {task: device for device, order in enumerate(orders) for task in order}
    device = next(d for d, order in enumerate(orders) if position[d] < len(order))
    chain: list[Task] = []
    seen: dict[int, int] = {}
    while device not in seen:
        seen[device] = len(chain)
        head = orders[device][position[device]]
        blocker = _first_blocker(instance, head, done, present)
        assert blocker is not None  # the head of a stuck device is blocked
        chain.append(head)
        device = device_of[blocker]
        if orders[device][position[device]] != blocker:
            chain.append(blocker)  # It sits behind its own device's head, which is blocked in turn.
    return chain[seen[device] :]


def simulate(instance: Instance, orders: Orders) -> Schedule:
    """The schedule in which every task starts as early as the orders and dependencies allow.

    Its makespan is the least that these orders permit.
    """
    return _timed(instance, orders, _propagate(instance, orders, {})[1])


def simulate_least_span(instance: Instance, orders: Orders) -> Schedule:
    """The schedule of least span that these orders permit (later first starts)."""
    longest = _device_paths(instance, orders)
    offsets = _potentials(longest, max_cycle_mean(longest), instance, orders)
    first = {order[0]: offsets[d] for d, order in enumerate(orders) if order}
    return _timed(instance, orders, _propagate(instance, orders, first)[1])


def simulate_for(instance: Instance, orders: Orders, objective: str) -> Schedule:
    """Least makespan or least span of these orders, by the objective's name."""
    return simulate_least_span(instance, orders) if objective == "span" else simulate(instance, orders)


def _timed(instance: Instance, orders: Orders, starts: Mapping[Task, float]) -> Schedule:
    length = {(t.kind, t.stage): duration(instance, t.kind, t.stage) for t in starts}
    return Schedule(
        tuple(
            tuple(TimedTask(t, starts[t], starts[t] + length[t.kind, t.stage]) for t in order)
            for order in orders
        )
    )


def _device_paths(instance: Instance, orders: Orders) -> NDArray[np.float64]:
    """``L[d, e]``: longest path from the start of device d's first task to the end of device e's last.

    Minus infinity where no path exists. Shape (p, p).
    """
    p = len(orders)
    none = np.full(p, -np.inf)
    ends: dict[Task, NDArray[np.float64]] = {}
    free = [none] * p
    for device, task in topological_order(instance, orders):
        start = free[device]
        if start is none:
            start = none.copy()
            start[device] = 0.0
        for edge in predecessors(instance, task):
            end = ends.get(edge.before)
            if end is not None:
                start = np.maximum(start, end + edge.lag)
        free[device] = ends[task] = start + duration(instance, task.kind, task.stage)
    return np.stack(free, axis=1)


def max_cycle_mean(weights: NDArray[np.float64]) -> float:
    """Largest mean weight of a cycle of a complete digraph (Karp 1978); diagonal entries are loops.

    ``weights`` has shape (n, n), -inf where there is no edge.
    """
    n = weights.shape[0]
    walks = np.empty((n + 1, n))
    walks[0] = 0.0  # from a virtual source to every node: every cycle is reachable
    for k in range(1, n + 1):
        walks[k] = (walks[k - 1][:, None] + weights).max(axis=0)
    lengths = n - np.arange(n)
    with np.errstate(invalid="ignore"):
        means = (walks[n][None, :] - walks[:n]) / lengths[:, None]
    means[np.isnan(means)] = np.inf  # -inf minus -inf: this k constrains nothing
    return float(means.min(axis=0).max())


def _potentials(
    longest: NDArray[np.float64],
    span: float,
    instance: Instance,
    orders: Orders,
) -> list[float]:
    """First starts x >= 0 with ``x[d] + longest[d, e] <= x[e] + span`` that the dependencies also allow."""
    p = len(orders)
    first = {order[0]: d for d, order in enumerate(orders) if order}
    x = np.zeros(p)
    slack = 1e-12 * max(1.0, span)
    for _ in range(2 * p + 2):
        new = np.maximum(x, (x[:, None] + longest - span - slack).max(axis=0))
        _, starts = _propagate(instance, orders, {t: float(new[d]) for t, d in first.items()})
        for task, d in first.items():
            new[d] = max(new[d], starts[task])
        if np.all(new <= x + slack):
            break
        x = new
    return [float(value) for value in x]
