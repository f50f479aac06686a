"""Searching what the exact models do not know: recomputation, F&B pairs, several replicas.

The search takes every schedule of the catalogue that fits, the ordinary solver's plan of the instance without
these options (R right before its backward, nothing paired), and then improves the best by local moves:
neighbours change places, an F and a BW next to each other become a pair or stop being one. Link contention
needs none of this: its instances go the ordinary way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from zbsolve.baselines import BASELINES
from zbsolve.baselines.base import forwards_of, one_forward_one_backward
from zbsolve.errors import InputError
from zbsolve.graph import BW, F, Task
from zbsolve.instance import Instance
from zbsolve.memory import NO_PAIRS, Pairs, peak_memory
from zbsolve.recompute import fold
from zbsolve.simulator import CycleError, simulate

Orders = tuple[tuple[Task, ...], ...]


def candidates(instance: Instance) -> Iterator[tuple[str, Orders, Pairs]]:
    """Every schedule of the catalogue on this very model: with its own pairs, and with all it allows."""
    for name, orders, pairs in _catalogued(instance):
        yield name, orders, pairs
        if not instance.has_pairs:
            continue
        for how, changed in (("paired", orders), ("forwards first, paired", forwards_first(orders))):
            try:
                yield f"{name}, {how}", changed, neighbours(instance, changed)
            except CycleError:
                continue


def _catalogued(instance: Instance) -> Iterator[tuple[str, Orders, Pairs]]:
    for name, baseline in BASELINES.items():
        try:
            timed_on, orders = baseline.prepared(instance)
        except InputError:
            continue
        if (timed_on.replicas, _recomputing(timed_on)) != (instance.replicas, _recomputing(instance)):
            continue
        if any(t.kind is BW and instance.stages[t.stage].t_bw is None for order in orders for t in order):
            continue  # it needs a fused backward that this instance does not have
        yield name, orders, NO_PAIRS if baseline.pairs is None else baseline.pairs(timed_on)
    if instance.has_pairs and all(stage.device == s for s, stage in enumerate(instance.stages)):
        # A pair holds its F back until its BW's input is there: neighbours run freely side by side only
        # with another F of lead a device, which is ZB-H2's warm-up.
        p, m = instance.num_devices, instance.num_microbatches
        if all(stage.t_bw is not None for stage in instance.stages):
            yield (
                "1f1b with twice the lead",
                tuple(
                    one_forward_one_backward(
                        forwards_of(instance, r), [[Task(BW, r, j)] for j in range(m)], 2 * (p - r) - 1
                    )
                    for r in range(p)
                ),
                NO_PAIRS,
            )


def _recomputing(instance: Instance) -> tuple[bool, ...]:
    """Which stages have R's: orders for others are none of this instance."""
    return tuple(stage.t_r is not None for stage in instance.stages)


def forwards_first(orders: Orders) -> Orders:
    """Each BW that an F follows after that F: 1F1B then has its F and BW in the order of a pair."""
    result = []
    for order in orders:
        changed = list(order)
        place = 0
        while place + 1 < len(changed):
            first, second = changed[place], changed[place + 1]
            if first.kind is BW and second.kind is F:
                changed[place], changed[place + 1] = second, first
                place += 1
            place += 1
        result.append(tuple(changed))
    return tuple(result)


def without_options(instance: Instance) -> Instance:
    """The instance for the ordinary solver: R folded into its backward, no pairs (one replica)."""
    plain = fold(instance)
    return plain.with_changes(stages=[stage.model_copy(update={"t_fb": None}) for stage in plain.stages])


def neighbours(instance: Instance, orders: Orders) -> Pairs:
    """Every F with the BW right after it that may run as a pair, saves time, and deadlocks nothing.

    Raises ``CycleError`` when the orders cannot run even without pairs.
    """
    found = set()
    for order in orders:
        place = 0
        while place + 1 < len(order):
            if _may_pair(instance, order[place], order[place + 1]):
                found.add((order[place], order[place + 1]))
                place += 1
            place += 1
    while True:
        try:
            simulate(instance, orders, found)
        except CycleError as error:
            if not found:
                raise
            # Where the orders run without pairs, each circle goes through one.
            fewer = {pair for pair in found if not {*pair} & {*error.cycle}}
            found = fewer if len(fewer) < len(found) else set()
        else:
            return frozenset(found)


def _may_pair(instance: Instance, first: Task, second: Task) -> bool:
    if first.kind is not F or second.kind is not BW:
        return False
    if (first.stage, first.microbatch) == (second.stage, second.microbatch):
        return False
    together = instance.pair_duration(first.stage, second.stage)
    if together is None:
        return False
    return together < instance.stages[first.stage].t_f + (instance.stages[second.stage].t_bw or 0.0)


class LocalMoves:
    """Stochastic descent over orders and pairs; sideways steps allowed. Every step simulates anew."""

    def __init__(self, instance: Instance, orders: Orders, pairs: Pairs, objective: str, seed: int) -> None:
        self.instance, self.objective = instance, objective
        self.random = np.random.default_rng(seed)
        self.orders, self.pairs = orders, pairs
        self.value = self._evaluate(orders, pairs)

    @property
    def cost(self) -> float:
        """Objective at earliest starts."""
        return self.value[0]

    def _evaluate(self, orders: Orders, pairs: Pairs) -> tuple[float, float]:
        try:
            schedule = simulate(self.instance, orders, pairs)
        except CycleError:
            return math.inf, math.inf
        return schedule.cost(self.objective), sum(program[-1].end for program in schedule.devices if program)

    def _fits(self, device: int, order: tuple[Task, ...], pairs: Pairs) -> bool:
        return self.instance.fits(device, peak_memory(self.instance, device, order, pairs))

    def step(self) -> bool:
        """Try one move; whether the objective improved."""
        device = int(self.random.integers(len(self.orders)))
        order = list(self.orders[device])
        if len(order) < 2:
            return False
        place = int(self.random.integers(len(order) - 1))
        a, b = order[place], order[place + 1]
        pairs = self.pairs
        if _may_pair(self.instance, a, b) and self.random.random() < 0.5:
            pairs = pairs ^ {(a, b)}
            if any(len({pair, (a, b)}) == 2 and {*pair} & {a, b} for pair in pairs):
                pairs = frozenset(pair for pair in pairs if pair == (a, b) or not {*pair} & {a, b})
        else:
            order[place], order[place + 1] = b, a
            pairs = frozenset(pair for pair in pairs if not {*pair} & {a, b})
            for first, second in ((place - 1, place), (place, place + 1), (place + 1, place + 2)):
                if first >= 0 and second < len(order) and self.random.random() < 0.5:
                    new = order[first], order[second]
                    free = not any({*pair} & {*new} for pair in pairs)
                    if free and _may_pair(self.instance, *new):
                        pairs = pairs | {new}
        changed = tuple(order)
        if not self._fits(device, changed, pairs):
            return False
        orders = (*self.orders[:device], changed, *self.orders[device + 1 :])
        value = self._evaluate(orders, pairs)
        improved = value[0] < self.value[0]
        if value <= self.value:
            self.orders, self.pairs, self.value = orders, pairs, value
        return improved
