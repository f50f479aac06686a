"""The true optimum of a tiny instance, by branch and bound over the orders of its devices.

A partial schedule is one order a device, every task as early as it can be. It is extended by one more task,
or one F&B pair, at the end of some device's order. Micro-batches of a stage are taken in order
(``tests/exhaustive/enumeration.py`` looks at all other orders as well, where instances are small enough).

What may follow, and when, depends only on how many of each stage's F's, R's, backwards and W's have run, on
when each device is free, on when results that are under way arrive and on when links are free. A partial
schedule with the same counts and all of these times no earlier than another's is dropped.

Times. A schedule's makespan is least when everything starts as early as it can, from 0. For the span, devices
may begin later than they could: let each time be a vector, the longest path to it from every device's first
task. Windows of at most T are possible exactly if no circle of devices has longer paths than T a device, each
from a device's first task to the next one's last end: the least span is the greatest mean of such a circle.
The makespan is the same with one common source in place of the devices. All this only grows with the times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import combinations, permutations
from typing import NamedTuple

from tests.exhaustive.problem import Data, Problem, read

NO_PATH = -math.inf  # joins whole numbers: sums and comparisons stay exact

Time = tuple[float, ...]
Task = tuple[str, int, int]  # kind, stage, micro-batch
Step = tuple[Task, ...]  # one task, or F and BW of a pair


class Optimum(NamedTuple):
    """Least cost, and per device the steps of an order that reaches it."""

    cost: Fraction
    orders: tuple[tuple[Step, ...], ...]


class _Counts(NamedTuple):
    """How many of a stage's tasks have run; ``backward`` are B's and BW's, ``split`` the B's alone."""

    forward: int = 0
    recomputed: int = 0
    backward: int = 0
    split: int = 0
    weight: int = 0


class _Partial(NamedTuple):
    """A partial schedule, as far as it matters to what follows.

    ``free`` a device, ``levels`` of memory a device; ``onward[s]`` and ``back[s]`` are the arrivals of
    results for stage s that no F or backward has taken yet; ``links`` when each directed pair is free.
    """

    counts: tuple[_Counts, ...]
    levels: tuple[int, ...]
    free: tuple[Time, ...]
    onward: tuple[tuple[Time, ...], ...]
    back: tuple[tuple[Time, ...], ...]
    links: tuple[Time, ...]


def optimum(data: Data, objective: str) -> Optimum | None:
    """Least ``makespan`` or ``span`` of an instance; None when no order fits the caps."""
    return search(read(data), objective)


def search(problem: Problem, objective: str) -> Optimum | None:
    """The same of an instance that is read already."""
    return _Search(problem, objective).run()


@cache
def _circles(devices: int) -> tuple[tuple[int, ...], ...]:
    """Every simple circle of devices, each once."""
    return tuple(
        (chosen[0], *rest)
        for size in range(1, devices + 1)
        for chosen in combinations(range(devices), size)
        for rest in permutations(chosen[1:])
    )


def _later(a: Time, b: Time) -> Time:
    return tuple(map(max, a, b))


def _after(time: Time, length: int) -> Time:
    return tuple(value + length for value in time)


class _Search:
    def __init__(self, problem: Problem, objective: str) -> None:
        self.problem = problem
        self.span = objective == "span"
        p = problem.devices
        self.sources = p if self.span else 1
        self.means = math.lcm(*range(1, p + 1)) if self.span else 1
        self.never: Time = (NO_PATH,) * self.sources
        routes = sorted({(a, b) for a in range(p) for b in range(p) if a != b})
        self.link_of = {route: number for number, route in enumerate(routes)} if problem.contended else {}
        self.best = math.inf
        self.best_orders: tuple[tuple[Step, ...], ...] = ()
        self.rests: dict[tuple[int, _Counts], int] = {}
        self.seen: dict[tuple[_Counts, ...], list[Time]] = {}
        self.orders: list[list[Step]] = [[] for _ in range(p)]
        self.held = [[s for s, st in enumerate(problem.stages) if st.device == d] for d in range(p)]

    def run(self) -> Optimum | None:
        number, p = len(self.problem.stages), self.problem.devices
        start = self.never if self.span else (0,)
        self._extend(
            _Partial(
                (_Counts(),) * number,
                (0,) * p,
                (start,) * p,
                ((),) * number,
                ((),) * number,
                (self.never,) * len(self.link_of),
            )
        )
        if math.isinf(self.best):
            return None
        return Optimum(Fraction(int(self.best), self.means) * self.problem.time_unit, self.best_orders)

    def _extend(self, partial: _Partial) -> None:
        steps = list(self._possible(partial))
        if not steps and all(
            c.backward == self.problem.microbatches and c.weight == c.split for c in partial.counts
        ):
            cost = self._cost(partial.free)
            if cost < self.best:
                self.best, self.best_orders = cost, tuple(map(tuple, self.orders))
            return
        children = []
        for step in steps:
            child = self._append(partial, step)
            if child is not None:
                device = self.problem.stages[step[0][1]].device
                children.append((max(child.free[device]), step[0][0] == "W", step, child, device))
        children.sort(key=lambda each: each[:3])
        for _, _, step, child, device in children:
            if self._least_cost(child) >= self.best or self._dominated(child):
                continue
            self.orders[device].append(step)
            self._extend(child)
            self.orders[device].pop()

    def _possible(self, partial: _Partial) -> Iterator[Step]:
        """Every step whose inputs exist, in whatever future they arrive."""
        problem, m, counts = self.problem, self.problem.microbatches, partial.counts
        forwards, fused = [], []
        for s, (stage, done) in enumerate(zip(problem.stages, counts, strict=True)):
            if done.forward < (m if problem.first(s) else counts[s - 1].forward):
                forwards.append(("F", s, done.forward))
                yield (forwards[-1],)
            if stage.recompute is not None and done.recomputed < done.forward:
                yield (("R", s, done.recomputed),)
            own = done.forward if stage.recompute is None else done.recomputed
            if done.backward < min(own, m if problem.last(s) else counts[s + 1].backward):
                yield (("B", s, done.backward),)
                if stage.fused is not None:
                    fused.append(("BW", s, done.backward))
                    yield (fused[-1],)
            if done.weight < done.split:
                yield (("W", s, -1),)  # of which micro-batch is told by the order, see `named`
        for forward in forwards:
            for backward in fused:
                if problem.pair_length(forward[1], backward[1]) is not None:
                    yield forward, backward

    def _append(self, partial: _Partial, step: Step) -> _Partial | None:
        """The partial schedule with one step more; None where memory does not allow it."""
        problem = self.problem
        device = problem.stages[step[0][1]].device
        counts, onward, back = list(partial.counts), list(partial.onward), list(partial.back)
        start = partial.free[device]
        if self.span and not self.orders[device]:
            start = (*start[:device], 0, *start[device + 1 :])
        acquired = transient = left = 0
        for kind, s, _ in step:
            stage, done = problem.stages[s], counts[s]
            if kind == "F":
                counts[s] = done._replace(forward=done.forward + 1)
                acquired += problem.kept(s)
                transient += stage.peak_f
                left += problem.kept(s)
                length = stage.f
                if onward[s]:
                    start, onward[s] = _later(start, onward[s][0]), onward[s][1:]
            elif kind == "R":
                counts[s] = done._replace(recomputed=done.recomputed + 1)
                acquired += stage.mem_b - stage.mem_r
                left += stage.mem_b - stage.mem_r
                assert stage.recompute is not None
                length = stage.recompute
            elif kind == "W":
                counts[s] = done._replace(weight=done.weight + 1)
                transient += stage.peak_w
                left -= stage.mem_w
                length = stage.w
            else:
                if back[s]:
                    start, back[s] = _later(start, back[s][0]), back[s][1:]
                if kind == "B":
                    counts[s] = done._replace(backward=done.backward + 1, split=done.split + 1)
                    acquired += max(0, stage.mem_w - stage.mem_b)
                    transient += stage.peak_b
                    left += stage.mem_w - stage.mem_b
                    length = stage.b
                else:
                    counts[s] = done._replace(backward=done.backward + 1)
                    transient += stage.peak_fused
                    left -= stage.mem_b
                    assert stage.fused is not None
                    length = stage.fused
        cap = problem.caps[device]
        if cap is not None and partial.levels[device] + acquired + transient > cap:
            return None
        if len(step) == 2:
            length = problem.pair_length(step[0][1], step[1][1]) or 0
        end = _after(start, length)
        links = list(partial.links)
        for kind, s, _ in step:
            if kind == "F" and not problem.last(s) and problem.remote(s, s + 1):
                onward[s + 1] = (*onward[s + 1], self._arrival(links, end, s, s + 1))
            if kind in ("B", "BW") and not problem.first(s) and problem.remote(s, s - 1):
                back[s - 1] = (*back[s - 1], self._arrival(links, end, s, s - 1))
        levels, free = list(partial.levels), list(partial.free)
        levels[device] += left
        free[device] = end
        return _Partial(*map(tuple, (counts, levels, free, onward, back, links)))  # type: ignore[arg-type]

    def _arrival(self, links: list[Time], end: Time, sender: int, receiver: int) -> Time:
        """When a result arrives; it occupies its link, if links are contended, from when that is free."""
        boundary = min(sender, receiver)
        if not self.problem.contended:
            return _after(end, self.problem.hop[boundary])
        stages = self.problem.stages
        number = self.link_of[stages[sender].device, stages[receiver].device]
        links[number] = _after(_later(end, links[number]), self.problem.transfer[boundary])
        return _after(links[number], self.problem.hop[boundary])

    def _dominated(self, partial: _Partial) -> bool:
        """Whether a partial schedule of the same counts was no later anywhere; else it is remembered.

        A result that arrives before its device is free might as well arrive then; likewise links.
        """
        stages = self.problem.stages
        times = list(partial.free)
        for waiting in (partial.onward, partial.back):
            for s, arrivals in enumerate(waiting):
                times += [_later(arrival, partial.free[stages[s].device]) for arrival in arrivals]
        for (sender, _), number in self.link_of.items():
            times.append(_later(partial.links[number], partial.free[sender]))
        flat = tuple(value for time in times for value in time)
        known = self.seen.setdefault(partial.counts, [])
        if any(all(a <= b for a, b in zip(other, flat, strict=True)) for other in known):
            return True
        known[:] = [other for other in known if not all(a <= b for a, b in zip(flat, other, strict=True))]
        known.append(flat)
        return False

    def _least_cost(self, partial: _Partial) -> float:
        """No completion costs less: each device has the rest of its work still to do."""
        ends = [
            _after(free, sum(self._rest(s, partial.counts[s]) for s in self.held[device]))
            for device, free in enumerate(partial.free)
        ]
        return self._cost(tuple(ends))

    def _rest(self, s: int, done: _Counts) -> int:
        """The least time that what a stage has still to do takes of its device."""
        known = self.rests.get((s, done))
        if known is not None:
            return known
        stage, m = self.problem.stages[s], self.problem.microbatches
        backward = stage.b + stage.w if stage.fused is None else min(stage.b + stage.w, stage.fused)
        rest = (m - done.forward) * (stage.f - (stage.pair_saving or 0))
        rest += (m - done.recomputed) * (stage.recompute or 0)
        rest += (m - done.backward) * backward + (done.split - done.weight) * stage.w
        self.rests[s, done] = rest
        return rest

    def _cost(self, ends: tuple[Time, ...]) -> float:
        """Makespan, or span times ``means``, of the last ends of all devices."""
        if not self.span:
            return max(end[0] for end in ends)
        return max(
            sum(ends[circle[i]][circle[i - 1]] for i in range(len(circle))) * (self.means // len(circle))
            for circle in _circles(len(ends))
        )


def named(order: tuple[Step, ...]) -> tuple[Step, ...]:
    """The order with its W's named: each is of the stage's next micro-batch whose B has run."""
    pending: dict[int, list[int]] = {}
    result = []
    for step in order:
        kind, s, j = step[0]
        if kind == "B":
            pending.setdefault(s, []).append(j)
        result.append((("W", s, pending[s].pop(0)),) if kind == "W" else step)
    return tuple(result)
