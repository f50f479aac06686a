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

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from zbsolve.errors import InfeasibleError
from zbsolve.graph import Task, duration, predecessors
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
    done: set[Task] = set()
    present = {task for order in orders for task in order}
    waiting: dict[Task, list[int]] = {}
    position = [0] * len(orders)
    ready = list(range(len(orders)))
    result: list[tuple[int, Task]] = []
    while ready:
        device = ready.pop()
        order = orders[device]
        while position[device] < len(order):
            task = order[position[device]]
            blocker = _first_blocker(instance, task, done, present)
            if blocker is not None:
                waiting.setdefault(blocker, []).append(device)
                break
            done.add(task)
            result.append((device, task))
            position[device] += 1
            ready.extend(waiting.pop(task, ()))
    if len(result) < sum(len(order) for order in orders):
        raise CycleError(_find_cycle(instance, orders, position, done, present))
    return result


def _first_blocker(instance: Instance, task: Task, done: set[Task], present: set[Task]) -> Task | None:
    for edge in predecessors(instance, task):
        if edge.before not in done and edge.before in present:
            return edge.before
    return None


def _find_cycle(
    instance: Instance, orders: Orders, position: Sequence[int], done: set[Task], present: set[Task]
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
    starts = _earliest_starts(instance, topological_order(instance, orders), {})
    return _timed(instance, orders, starts)


def simulate_least_span(instance: Instance, orders: Orders) -> Schedule:
    """The schedule of least span that these orders permit (later first starts)."""
    topological = topological_order(instance, orders)
    longest = _device_paths(instance, orders, topological)
    offsets = _potentials(longest, max_cycle_mean(longest), instance, orders, topological)
    first = {order[0]: offsets[d] for d, order in enumerate(orders) if order}
    return _timed(instance, orders, _earliest_starts(instance, topological, first))


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


def _earliest_starts(
    instance: Instance, topological: Sequence[tuple[int, Task]], not_before: Mapping[Task, float]
) -> dict[Task, float]:
    starts: dict[Task, float] = {}
    ends: dict[Task, float] = {}
    free = [0.0] * instance.num_devices
    for device, task in topological:
        start = max(free[device], not_before.get(task, 0.0))
        for edge in predecessors(instance, task):
            end = ends.get(edge.before)
            if end is not None:
                start = max(start, end + edge.lag)
        starts[task] = start
        free[device] = ends[task] = start + duration(instance, task.kind, task.stage)
    return starts


def _device_paths(
    instance: Instance, orders: Orders, topological: Sequence[tuple[int, Task]]
) -> NDArray[np.float64]:
    """``L[d, e]``: longest path from the start of device d's first task to the end of device e's last.

    Minus infinity where no path exists. Shape (p, p).
    """
    p = len(orders)
    none = np.full(p, -np.inf)
    ends: dict[Task, NDArray[np.float64]] = {}
    free = [none] * p
    for device, task in topological:
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
    topological: Sequence[tuple[int, Task]],
) -> list[float]:
    """First starts x >= 0 with ``x[d] + longest[d, e] <= x[e] + span`` that the dependencies also allow."""
    p = len(orders)
    first = {order[0]: d for d, order in enumerate(orders) if order}
    x = np.zeros(p)
    slack = 1e-12 * max(1.0, span)
    for _ in range(2 * p + 2):
        new = np.maximum(x, (x[:, None] + longest - span - slack).max(axis=0))
        starts = _earliest_starts(instance, topological, {t: float(new[d]) for t, d in first.items()})
        for task, d in first.items():
            new[d] = max(new[d], starts[task])
        if np.all(new <= x + slack):
            break
        x = new
    return [float(value) for value in x]
