"""Searching instances with recomputation, F&B pairs and several replicas: where the search begins.

Every schedule of the catalogue that is of the instance's model, with the pairs that it brings and with all
that the instance allows; and the instance without these options, for the ordinary solver. From there go on
:mod:`zbsolve.search.extended_policies`, :mod:`zbsolve.search.extended_orders` and the exact model. Link
contention needs none of this: its instances go the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zbsolve.baselines import BASELINES
from zbsolve.baselines.base import forwards_of, one_forward_one_backward, orders_for
from zbsolve.errors import InputError
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import BW, F
from zbsolve.model.memory import NO_PAIRS, Pairs
from zbsolve.model.recompute import fold
from zbsolve.model.simulator import CycleError, simulate

Orders = tuple[tuple[Task, ...], ...]


def candidates(instance: Instance, enough: Callable[[], bool]) -> Iterator[tuple[str, Orders, Pairs]]:
    """Every schedule of the catalogue on this very model: with its own pairs, and with all it allows.

    ``enough`` ends it early.
    """
    if enough():
        return
    for name, orders, pairs in _catalogued(instance):
        yield name, orders, pairs
        ways = (("paired", orders), ("forwards first, paired", forwards_first(orders)))
        for how, changed in ways if instance.has_pairs else ():
            if enough():
                return
            try:
                yield f"{name}, {how}", changed, neighbours(instance, changed, enough)
            except CycleError:
                continue
        if enough():
            return


def _catalogued(instance: Instance) -> Iterator[tuple[str, Orders, Pairs]]:
    # Those with pairs first, the serial one and those that search for long last.
    likely_first = sorted(
        BASELINES.items(), key=lambda item: (item[1].automatic, item[0] == "naive", item[1].pairs is None)
    )
    for name, baseline in likely_first:
        try:
            timed_on, orders = baseline.prepared(instance)
        except InputError:
            continue
        ours = orders_for(instance, timed_on, orders)
        if ours is None:
            continue
        pairs = NO_PAIRS if baseline.pairs is None else baseline.pairs(timed_on)
        yield name, ours, pairs
    if instance.has_pairs and all(stage.device == s for s, stage in enumerate(instance.stages)):
        # A pair holds its F back until its BW's input is there: neighbours run freely side by side only
        # with another F of lead a device, which is ZB-H2's warm-up.
        p, m = instance.num_devices, instance.num_microbatches
        doubled = tuple(
            one_forward_one_backward(
                forwards_of(instance, r), [[Task(BW, r, j)] for j in range(m)], 2 * (p - r) - 1
            )
            for r in range(p)
        )
        ours = orders_for(instance, instance, doubled)
        assert ours is not None  # made for this very instance
        yield "1f1b with twice the lead", ours, NO_PAIRS


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


def neighbours(instance: Instance, orders: Orders, enough: Callable[[], bool] = lambda: False) -> Pairs:
    """Every F with the BW right after it that may run as a pair, saves time, and deadlocks nothing.

    None of them where ``enough`` ends the search for those that deadlock. Raises ``CycleError`` when the
    orders cannot run even without pairs.
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
            found = fewer if len(fewer) < len(found) and not enough() else set()
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
