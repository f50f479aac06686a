"""Less memory at the same cost, by lower caps and later F's; and which of two plans of one cost is lighter.

A device holds a micro-batch from its F on. Where an F runs earlier than anything needs it, it can go behind
other tasks of its device: the fullest device first, each F as late as the cost stays. Its own memory falls,
that of no other device changes. Before that the list scheduler tries lower caps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zbsolve.model.graph import Task, predecessors
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import F
from zbsolve.model.memory import Pairs, peak_memory
from zbsolve.model.schedule import Schedule
from zbsolve.model.serial import serial_program
from zbsolve.model.simulator import CycleError, simulate_for
from zbsolve.model.tolerances import ROUNDING
from zbsolve.search.extended_policies import ExtendedPolicySearch

Orders = tuple[tuple[Task, ...], ...]

# Halvings of the range of caps, and how close to the cap that is known to do it ends.
BISECTIONS, LEAST_STEP = 8, 0.02


def under_tighter_caps(
    instance: Instance, objective: str, cost: float, peak: float, enough: Callable[[], bool]
) -> tuple[Orders, Pairs] | None:
    """The list scheduler's plan of no more than ``cost`` under the lowest cap at which it still finds one.

    By bisection between what one micro-batch needs and ``peak``, the highest of any device so far.
    """
    needs = [serial_program(instance, d)[0] for d in range(instance.num_devices)]
    low, high, found = max(needs), peak, None
    for _ in range(BISECTIONS):
        if high - low <= LEAST_STEP * high:
            break
        cap = (low + high) / 2
        caps = [min(instance.cap(d), max(cap, need)) for d, need in enumerate(needs)]
        search = ExtendedPolicySearch(instance.with_changes(memory_cap=caps), objective, 0)
        while search.best[0] > cost * (1 + ROUNDING):
            if enough():
                return found
            if not search.try_preset():
                break
        if search.best[0] <= cost * (1 + ROUNDING) and search.best_orders is not None:
            found = search.best_orders
            held = max(peak_memory(instance, d, order, found[1]) for d, order in enumerate(found[0]))
            high = min(cap, held)
        else:
            low = cap
    return found


def with_later_forwards(
    instance: Instance, orders: Orders, pairs: Pairs, objective: str, cost: float, enough: Callable[[], bool]
) -> Orders:
    """Orders that cost no more than ``cost`` and whose peaks are no higher; ``enough`` ends it early."""
    in_pairs = {task for pair in pairs for task in pair}

    def keeps_cost(changed: Orders) -> bool:
        try:
            return simulate_for(instance, changed, objective, pairs).cost(objective) <= cost * (1 + ROUNDING)
        except CycleError:
            return False

    peaks = [peak_memory(instance, d, order, pairs) for d, order in enumerate(orders)]
    for device in sorted(range(len(orders)), key=lambda d: -peaks[d]):
        place = len(orders[device]) - 1
        while place >= 0:
            for changed in _later(orders[device], place, in_pairs):
                if enough():
                    return orders
                if peak_memory(instance, device, changed, pairs) > peaks[device]:
                    continue
                candidate = (*orders[:device], changed, *orders[device + 1 :])
                if keeps_cost(candidate):
                    orders = candidate
                    break
            place -= 1
    return orders


def _later(order: tuple[Task, ...], place: int, in_pairs: set[Task]) -> Iterator[tuple[Task, ...]]:
    """The order with the F at a place moved later: right before what needs it, half as far, and so on."""
    task = order[place]
    if task.kind is not F or task in in_pairs:
        return
    last = place
    while last + 1 < len(order):
        following = order[last + 1]
        same_stage = following.stage == task.stage
        if same_stage and (following.kind is F or following.microbatch == task.microbatch):
            break
        last += 1
    while last > place:
        # Never between the tasks of a pair.
        split = last + 1 < len(order) and order[last] in in_pairs and order[last].kind is F
        if not split:
            yield (*order[:place], *order[place + 1 : last + 1], task, *order[last + 1 :])
        last = place + (last - place) // 2


def most_messages_in_flight(instance: Instance, schedule: Schedule) -> int:
    """The most results that are between two devices at once: produced, and what needs them not yet begun."""
    at = {timed.task: timed for timed in schedule}
    events = []
    for task, timed in at.items():
        for edge in predecessors(instance, task):
            before = at.get(edge.before)
            devices = (instance.stages[edge.before.stage].device, instance.stages[task.stage].device)
            if before is not None and devices[0] != devices[1]:
                events += [(before.end, 1), (timed.start, -1)]
    most = present = 0
    for _, change in sorted(events):  # at one instant what is taken leaves first
        present += change
        most = max(most, present)
    return most
