"""Per-device orders to times: earliest starts, the least span, and why an order cannot run.

Both cost measures of a fixed set of orders are longest-path problems on one graph (dependencies plus
"next on the same device"):

* makespan: every task as early as possible.
* span: devices may begin later than they could. With ``L[d, e]`` the longest path from the first task of
  device d to the end of the last task of device e, first starts ``x`` reach a span T exactly when
  ``x[d] + L[d, e] - x[e] <= T`` for all d, e: the least T is the largest cycle mean of L, and the
  x are its potentials. (It is also the period of a pipeline whose devices start their next step without
  a barrier, which is why optimizer post-validation pays by span.)

F&B pairs are given beside the orders, where their two tasks stand next to each other, F first: both start
when the inputs of both are there, and end together. Where transfers occupy their links (``t_transfer``), a
link serves the results of its sending device in the order of that device's program: all remain longest paths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zbsolve.errors import InfeasibleError, InputError
from zbsolve.model.graph import Task, duration, needs, predecessors
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import BACKWARDS, FORWARDS, TaskKind
from zbsolve.model.memory import NO_PAIRS, Pairs
from zbsolve.model.objective import is_span
from zbsolve.model.schedule import Schedule, TimedTask
from zbsolve.model.tolerances import ROUNDING

Orders = Sequence[Sequence[Task]]


class CycleError(InfeasibleError):
    """The orders wait for each other in a circle; ``cycle`` lists its tasks, each waiting for the next."""

    def __init__(self, cycle: Sequence[Task]) -> None:
        self.cycle = tuple(cycle)
        super().__init__(
            "the orders deadlock: " + " waits for ".join(str(task) for task in (*cycle, cycle[0]))
        )


def topological_order(instance: Instance, orders: Orders, pairs: Pairs = NO_PAIRS) -> list[tuple[int, Task]]:
    """All (device, task) such that dependencies and device orders point backwards.

    Raises
    ------
    CycleError
        When no such order exists: running these programs would deadlock.
    """
    return _propagate(instance, orders, {}, pairs)[0]


class _Run(NamedTuple):
    """Outcome of one pass over the orders: a topological order, starts and ends."""

    sequence: list[tuple[int, Task]]
    starts: dict[Task, float]
    ends: dict[Task, float]


def _propagate(instance: Instance, orders: Orders, not_before: Mapping[Task, float], pairs: Pairs) -> _Run:
    """A topological order of (device, task), and earliest starts with ``not_before`` as further limits.

    A dependency on a task that is in no order counts as met: whether tasks are missing is for the checker.
    """
    kinds = {(task.kind, task.stage) for order in orders for task in order}
    needed = {(kind, stage): needs(instance, kind, stage) for kind, stage in kinds}
    length = {(kind, stage): duration(instance, kind, stage) for kind, stage in kinds}
    links = Links(instance) if instance.t_transfer is not None else None
    second_of = dict(pairs)
    ends: dict[Task, float] = dict.fromkeys((task for order in orders for task in order), -1.0)
    delivered = ends if links is None else dict(ends)
    starts: dict[Task, float] = {}
    waiting: dict[Task, list[int]] = {}
    position = [0] * len(orders)
    free = [0.0] * len(orders)
    ready = list(range(len(orders)))
    sequence: list[tuple[int, Task]] = []

    def earliest(task: Task, start: float) -> tuple[float, Task | None]:
        """Start by dependencies, and the task that has not run yet if there is one."""
        for before, at, lag in needed[task.kind, task.stage]:
            key = Task(before, at, task.microbatch)
            end = (ends if at == task.stage else delivered).get(key)
            if end is None:
                continue
            if end < 0:
                return start, key
            if end + lag > start:
                start = end + lag
        if not_before:
            start = max(start, not_before.get(task, 0.0))
        return start, None

    def finish(task: Task, start: float, end: float, device: int) -> None:
        starts[task], ends[task] = start, end
        if links is not None:
            delivered[task] = links.leaves(task, end)
        sequence.append((device, task))
        position[device] += 1
        if task in waiting:
            ready.extend(waiting.pop(task))

    while ready:
        device = ready.pop()
        order = orders[device]
        now = free[device]
        while position[device] < len(order):
            task = order[position[device]]
            start, blocker = earliest(task, now)
            second = second_of.get(task)
            if second is not None and blocker is None:
                start, blocker = earliest(second, start)
            if blocker is not None:
                waiting.setdefault(blocker, []).append(device)
                break
            if second is None:
                now = start + length[task.kind, task.stage]
                finish(task, start, now, device)
                continue
            together = instance.pair_duration(task.stage, second.stage)
            if together is None or order[position[device] + 1 : position[device] + 2] != (second,):
                raise InputError(
                    f"{task} and {second} cannot run as a pair: their stages need t_fb on one device, "
                    "and BW must come right after F"
                )
            now = start + together
            finish(task, start, now, device)
            finish(second, start, now, device)
        free[device] = now
    if len(sequence) < sum(map(len, orders)):
        raise CycleError(_find_cycle(instance, orders, position, starts.keys(), ends.keys(), second_of))
    return _Run(sequence, starts, ends)


class Links:
    """Directed links between devices, each with one transfer at a time, in the order of production.

    ``maximum`` takes the later of two times (numbers, or arrays of them).
    """

    def __init__(self, instance: Instance, maximum: Callable[[Any, Any], Any] = max) -> None:
        self._maximum = maximum
        self._route: dict[tuple[TaskKind, int], tuple[int, int, float]] = {}
        for boundary in range(instance.num_stages - 1):
            if instance.crosses(boundary):
                here, there = instance.stages[boundary].device, instance.stages[boundary + 1].device
                occupied = instance.transfer(boundary)
                self._route |= {(kind, boundary): (here, there, occupied) for kind in FORWARDS}
                self._route |= {(kind, boundary + 1): (there, here, occupied) for kind in BACKWARDS}
        self._free: dict[tuple[int, int], Any] = {}

    def leaves(self, task: Task, end: Any) -> Any:
        """When the result of a task that ends at ``end`` gets its link; takes the link."""
        route = self._route.get((task.kind, task.stage))
        if route is None:
            return end
        source, target, occupied = route
        start = self._maximum(end, self._free.get((source, target), end))
        self._free[source, target] = start + occupied
        return start


def _first_blocker(instance: Instance, task: Task, done: Set[Task], present: Set[Task]) -> Task | None:
    for edge in predecessors(instance, task):
        if edge.before not in done and edge.before in present:
            return edge.before
    return None


def _find_cycle(
    instance: Instance,
    orders: Orders,
    position: Sequence[int],
    done: Set[Task],
    present: Set[Task],
    second_of: Mapping[Task, Task],
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
        if blocker is None and head in second_of:
            blocker = _first_blocker(instance, second_of[head], done, present)
        assert blocker is not None  # the head of a stuck device is blocked
        chain.append(head)
        device = device_of[blocker]
        if orders[device][position[device]] != blocker:
            chain.append(blocker)  # It sits behind its own device's head, which is blocked in turn.
    return chain[seen[device] :]


def simulate(instance: Instance, orders: Orders, pairs: Pairs = NO_PAIRS) -> Schedule:
    """The schedule in which every task starts as early as the orders and dependencies allow.

    Its makespan is the least that these orders permit.
    """
    return _timed(orders, _propagate(instance, orders, {}, pairs))


def simulate_least_span(instance: Instance, orders: Orders, pairs: Pairs = NO_PAIRS) -> Schedule:
    """The schedule of least span that these orders permit (later first starts)."""
    longest = device_paths(instance, orders, pairs)
    offsets = _potentials(longest, max_cycle_mean(longest), instance, orders, pairs)
    first = {order[0]: offsets[d] for d, order in enumerate(orders) if order}
    return _timed(orders, _propagate(instance, orders, first, pairs))


def simulate_for(instance: Instance, orders: Orders, objective: str, pairs: Pairs = NO_PAIRS) -> Schedule:
    """Least makespan or least span of these orders, by the objective's name."""
    if is_span(objective):
        return simulate_least_span(instance, orders, pairs)
    return simulate(instance, orders, pairs)


def _timed(orders: Orders, run: _Run) -> Schedule:
    return Schedule(tuple(tuple(TimedTask(t, run.starts[t], run.ends[t]) for t in order) for order in orders))


def device_paths(instance: Instance, orders: Orders, pairs: Pairs) -> NDArray[np.float64]:
    """``L[d, e]``: longest path from the start of device d's first task to the end of device e's last.

    Minus infinity where no path exists. Shape (p, p).
    """
    p = len(orders)
    none = np.full(p, -np.inf)
    ends: dict[Task, NDArray[np.float64]] = {}
    delivered: dict[Task, NDArray[np.float64]] = {}
    free = [none] * p
    links = Links(instance, np.maximum) if instance.t_transfer is not None else None
    second_of = dict(pairs)
    seconds = set(second_of.values())
    kinds = {(task.kind, task.stage) for order in orders for task in order}
    needed = {(kind, stage): needs(instance, kind, stage) for kind, stage in kinds}
    for device, task in topological_order(instance, orders, pairs):
        if task not in seconds:
            start = free[device]
            if start is none:
                start = none.copy()
                start[device] = 0.0
            second = second_of.get(task)
            for each in (task,) if second is None else (task, second):
                for kind, at, lag in needed[each.kind, each.stage]:
                    end = (ends if at == each.stage else delivered).get(Task(kind, at, each.microbatch))
                    if end is not None:
                        start = np.maximum(start, end + lag)
            if second is None:
                length = duration(instance, task.kind, task.stage)
            else:
                length = instance.pair_duration(task.stage, second.stage) or 0.0
            free[device] = start + length
        ends[task] = end = free[device]
        delivered[task] = end if links is None else links.leaves(task, end)
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
    pairs: Pairs,
) -> list[float]:
    """First starts x >= 0 with ``x[d] + longest[d, e] <= x[e] + span`` that the dependencies also allow."""
    p = len(orders)
    first = {order[0]: d for d, order in enumerate(orders) if order}
    x = np.zeros(p)
    slack = ROUNDING * span
    for _ in range(2 * p + 2):
        new = np.maximum(x, (x[:, None] + longest - span - slack).max(axis=0))
        run = _propagate(instance, orders, {t: float(new[d]) for t, d in first.items()}, pairs)
        for task, d in first.items():
            new[d] = max(new[d], run.starts[task])
        if np.all(new <= x + slack):
            break
        x = new
    return [float(value) for value in x]
