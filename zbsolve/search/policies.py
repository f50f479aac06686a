"""The automatic heuristic and the search over its policies.

:func:`presets` is a fixed, small set of policies (the warm-up depth, and how patiently a device waits for a
backward that is on its way); :func:`automatic` takes the best of them, deterministically.
:class:`PolicySearch` goes on from there: it changes the policy of a few devices or stages at a time and keeps
what is not worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from zbsolve.bounds.waits import back, room
from zbsolve.bounds.ways import round_trip
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.objective import column_of
from zbsolve.model.tolerances import COUNT_ROUNDING
from zbsolve.search.arrays import IntArray, decode
from zbsolve.search.backbones import GapFiller
from zbsolve.search.list_scheduler import ListScheduler, Policy, preset

Orders = tuple[tuple[Task, ...], ...]


def in_flight_for_round_trip(instance: Instance, depth: float | list[float]) -> list[int]:
    """Per stage, micro-batches in flight that keep F and B busy over ``depth`` round trips.

    At depth 1 and equal stages without hops that is 1F1B's p - r, at depth 2 about ZB-H2's 2 (p - r) - 1.
    A list gives each device a depth of its own.
    """
    limits = []
    for s, stage in enumerate(instance.stages):
        wanted = depth[stage.device] if isinstance(depth, list) else depth
        limits.append(
            max(1, math.ceil(min(wanted * _trips(instance, s), instance.num_microbatches) - COUNT_ROUNDING))
        )
    return limits


def _trips(instance: Instance, s: int) -> float:
    """Micro-batches that a device starts in one round trip of stage s, running F and B alone; at most m."""
    stage = instance.stages[s]
    slot = sum(instance.stages[q].t_f + back(instance.stages[q]) for q in instance.stages_on(stage.device))
    way = stage.t_f + round_trip(instance, s, s) + back(stage)
    most = float(instance.num_microbatches)
    return min(most, way / slot) if slot > 0 else most


def depth_within_memory(instance: Instance) -> list[float]:
    """Per device, the depth whose micro-batches in flight on all its stages just fit under its cap.

    Without it the first chunk of a device would fill the memory that the later ones need.
    """
    depths = []
    for device in range(instance.num_devices):
        stages = instance.stages_on(device)
        per_depth = sum(instance.stages[s].mem_b * _trips(instance, s) for s in stages)
        most = float(instance.num_microbatches)
        depths.append(min(most, room(instance, device) / per_depth) if per_depth > 0 else most)
    return depths


# (patience_f, patience_w) that were best on some published cell or random instance, most often first.
PATIENCES = (
    (0.75, 0.75),
    (0.75, 0.25),
    (0.75, 0.0),
    (0.25, 0.25),
    (0.25, 0.0),
    (0.5, 0.5),
    (1.0, 0.75),
    (0.0, 0.0),
)


def affordable_patiences(instance: Instance) -> int:
    """How many of ``PATIENCES`` plain Python tries in about a second."""
    tasks = instance.num_tasks
    return len(PATIENCES) if tasks <= 1_000 else 2 if tasks <= 8_000 else 1


def presets(instance: Instance, patiences: int = len(PATIENCES)) -> Iterator[Policy]:
    """Policies worth trying on any instance; fewer, of fewer shapes, for fewer ``patiences``."""
    no_limit = (instance.num_microbatches,) * instance.num_stages
    shapes = dict.fromkeys((no_limit, *map(tuple, warm_up_shapes(instance, patiences))))
    fuses = (False, True) if any(stage.t_bw is not None for stage in instance.stages) else (False,)
    for f, w in PATIENCES[:patiences]:  # outermost: a trial cut short has still seen every shape
        for limits in shapes:
            for fuse in fuses:
                base = preset(instance, fuse=fuse, patience_f=f, patience_w=w)
                yield replace(base, limit=np.array(limits))


def warm_up_shapes(instance: Instance, patiences: int) -> Iterator[list[int]]:
    """Limits on the micro-batches in flight per stage: depths in round trips, and ramps from first to last.

    Ramps are for several chunks per device: under a tight cap the later chunks need room, and how
    much the earlier ones may take is not a matter of round trips alone.
    """
    thorough = patiences == len(PATIENCES)
    for depth in (1.0, 1.5, 1.8, 1.9, 2.0)[: 5 if thorough else patiences - 1]:
        yield in_flight_for_round_trip(instance, depth)
    S = instance.num_stages
    if instance.num_devices == S:
        return
    fitting = depth_within_memory(instance)
    yield in_flight_for_round_trip(instance, min(fitting))
    yield in_flight_for_round_trip(instance, fitting)
    for first in (1, 2, 3, 4, 6, 8, 12, 16) if thorough else (2, 4, 8):
        for share in (0.25, 0.5, 1.0) if thorough else (0.5,):
            last = first * share
            yield [max(1, round(first + (last - first) * s / (S - 1))) for s in range(S)]


def automatic(
    scheduler: ListScheduler, objective: str, patiences: int, enough: Callable[[], bool] = lambda: False
) -> float:
    """Run every preset; the best one's cost (infinite when none fits), its orders kept in ``scheduler``.

    ``enough`` is asked before each: it may end the trial early.
    """
    column = column_of(objective)
    best = math.inf
    for policy in presets(scheduler.instance, patiences):
        if enough():
            break
        cost = scheduler.run(policy)[column]
        if cost < best:
            best = cost
            scheduler.keep()
    return best


# (patience_f, patience_w) of policies whose F's and backwards are good beside other W's than their own, and
# patiences with which these then fill the gaps; best on most published cells and random instances first.
BACKBONES = (
    (0.1, 1.0),
    (0.5, 1.0),
    (0.85, 0.95),
    (0.9, 0.75),
    (1.0, 0.85),
    (0.25, 1.0),
    (0.85, 0.0),
    (0.9, 0.5),
    (0.65, 0.0),
    (0.75, 0.95),
    (1.0, 0.25),
    (0.0, 1.0),
    (0.75, 0.0),
    (1.0, 0.0),
)
GAP_PATIENCES = (0.95, 0.9, 0.85, 0.7, 0.5)


class Refinement:
    """Orders whose W's are chosen apart from their F's and backwards.

    A policy decides on a W when it decides on an F, knowing what has arrived; once F's and backwards stand,
    the arrivals are known ahead, and the W's go where they delay least (:mod:`zbsolve.search.backbones`).
    """

    def __init__(self, instance: Instance, objective: str) -> None:
        self._instance = instance
        self._column = column_of(objective)
        self._filler = GapFiller(instance)
        self.cost = math.inf
        self._best: tuple[IntArray, IntArray] | None = None

    def take(self, codes: IntArray, lengths: IntArray, cost: float) -> None:
        """Orders, coded, and what they cost at earliest starts; then the same with other W's."""
        if cost < self.cost:
            self.cost, self._best = cost, (codes, lengths)
        self._filler.take(codes, lengths)
        for patience in GAP_PATIENCES:
            cost = self._filler.run(patience)[self._column]
            if cost < self.cost:
                self.cost, self._best = cost, self._filler.codes()

    def run(
        self, scheduler: ListScheduler, most: int, bound: float, enough: Callable[[], bool] = lambda: False
    ) -> bool:
        """At most so many :func:`backbone_policies`, while the cost is above ``bound``; whether it fell.

        ``enough`` is asked before each: it may end the trial early.
        """
        before = self.cost
        for policy in islice(backbone_policies(self._instance), most):
            if self.cost <= bound or enough():
                break
            cost = scheduler.run(policy)[self._column]
            if cost < math.inf:
                self.take(scheduler.codes, scheduler.lengths, cost)
        return self.cost < before

    def orders(self) -> Orders:
        """The best orders, if any fit."""
        assert self._best is not None  # for the caller to know: the cost is finite
        return decode(*self._best)


def backbone_policies(instance: Instance) -> Iterator[Policy]:
    """Policies for :class:`Refinement`, as deep as memory allows, best first."""
    shapes = [[instance.num_microbatches] * instance.num_stages]
    if instance.num_stages > instance.num_devices:
        shapes.append(in_flight_for_round_trip(instance, depth_within_memory(instance)))
    fuses = (False, True) if any(stage.t_bw is not None for stage in instance.stages) else (False,)
    for f, w in BACKBONES:
        for limits in shapes:
            for fuse in fuses:
                base = preset(instance, fuse=fuse, patience_f=f, patience_w=w)
                yield replace(base, limit=np.array(limits))


class PolicySearch:
    """Stochastic descent over policies: one stage or device at a time, sideways steps allowed.

    Compares (objective, sum of both costs), so that it moves on plateaus of a bottleneck's makespan.
    """

    def __init__(self, scheduler: ListScheduler, objective: str, start: Policy, seed: int) -> None:
        self.scheduler = scheduler
        self.column = column_of(objective)
        self.random = np.random.default_rng(seed)
        self.policy = start
        self.value = self._evaluate(start)

    @property
    def cost(self) -> float:
        """Objective of the best policy, at earliest starts."""
        return self.value[0]

    def _evaluate(self, policy: Policy) -> tuple[float, float]:
        both = self.scheduler.run(policy)
        return both[self.column], both[0] + both[1]

    def step(self) -> bool:
        """Try one changed policy; whether the objective improved."""
        policy = self._neighbour()
        value = self._evaluate(policy)
        improved = value[0] < self.value[0]
        if value <= self.value:
            self.policy, self.value = policy, value
        return improved

    def orders(self) -> Orders:
        """Device orders of the best policy."""
        self.scheduler.run(self.policy)
        return self.scheduler.orders()

    def _neighbour(self) -> Policy:
        draw, policy = self.random, self.policy
        instance = self.scheduler.instance
        S, p, m = instance.num_stages, instance.num_devices, instance.num_microbatches
        changes = 1 + int(draw.integers(0, 3))
        for _ in range(changes):
            what = draw.integers(0, 7)
            # A run of neighbouring stages or devices: their policies want to change together.
            size = S if what in (0, 1, 2) else p
            low = int(draw.integers(0, size))
            high = min(size, low + 1 + int(draw.geometric(0.5)))
            part = slice(low, high)
            if what == 0:
                limit = policy.limit.copy()
                limit[part] = np.clip(np.minimum(limit[part], m) + draw.integers(-2, 3), 1, m)
                policy = replace(policy, limit=limit)
            elif what == 1:
                backlog = policy.backlog.copy()
                backlog[part] = draw.integers(1, m + 2) if draw.random() < 0.5 else m + 1
                policy = replace(policy, backlog=backlog)
            elif what == 2 and self.scheduler.arrays.can_fuse.any():
                fuse = policy.fuse.copy()
                fuse[part] = ~fuse[part] & self.scheduler.arrays.can_fuse[part]
                policy = replace(policy, fuse=fuse)
            elif what == 3:
                patience = policy.patience_f.copy()
                patience[part] = draw.random()
                policy = replace(policy, patience_f=patience)
            elif what == 4:
                patience = policy.patience_w.copy()
                patience[part] = draw.random()
                policy = replace(policy, patience_w=patience)
            elif what == 5:
                # All limits together: the shape of the warm-up is kept, its depth changes.
                scaled = np.minimum(policy.limit, m) * (1.0 + 0.1 * draw.standard_normal())
                limit = np.clip(np.rint(scaled + draw.normal(0.0, 0.5)), 1, m).astype(np.int64)
                policy = replace(policy, limit=limit)
            else:
                depth_first = policy.depth_first.copy()
                depth_first[part] = ~depth_first[part]
                policy = replace(policy, depth_first=depth_first)
        return policy


class PolicyRace:
    """Descents from the best few presets side by side; the worse half drops out as the budget is used up.

    ``enough`` is asked after each preset: it may end their trial early, on large instances.
    """

    def __init__(
        self,
        scheduler: ListScheduler,
        objective: str,
        seed: int,
        patiences: int,
        enough: Callable[[], bool],
        entrants: int = 8,
    ) -> None:
        column = column_of(objective)
        by_cost: dict[tuple[float, float], Policy] = {}
        for policy in presets(scheduler.instance, patiences):
            both = scheduler.run(policy)
            if math.isfinite(both[column]):
                by_cost.setdefault((both[column], sum(both)), policy)
            if enough():
                break
        # Equal costs are nearly always equal schedules: one of them is enough.
        self.running = [
            PolicySearch(scheduler, objective, by_cost[key], seed + number)
            for number, key in enumerate(sorted(by_cost)[:entrants])
        ]
        self._entrants = len(self.running)
        self._turn = 0

    def next(self, used: float) -> PolicySearch | None:
        """The descent whose turn it is with a share ``used`` of the budget gone; None when none can run."""
        # 8 run in the first quarter, then 4, 2, and one in the last.
        places = max(1, math.ceil(self._entrants / 2 ** int(4 * min(used, 1.0))))
        if len(self.running) > places:
            self.running = sorted(self.running, key=lambda descent: descent.value)[:places]
        if not self.running:
            return None
        self._turn = (self._turn + 1) % len(self.running)
        return self.running[self._turn]
