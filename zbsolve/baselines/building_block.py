"""V-Half and V-Min: a repeated building block in a V. Qi et al., arXiv 2405.15362 ("Controllable Memory").

A building block says in which slots of one unit each a micro-batch's four passes run on each device: F on the
chunk down and up, B on the chunk up and down again (device d holds stages d and 2p - 1 - d). It is repeated
every 6 slots, one for each pass and its W. A pass's *lifespan*, its F to its W, over 6 is how many it holds
in flight, so the block fixes the memory: about 1/2 (V-Half) and 1/3 (V-Min) of 1F1B's. Then

* *reorder*: before the steady phase and after it passes move to earlier free slots of their device, as long
  as neither order of dependencies nor the device's peak suffers;
* *W*: each takes the first free slot after its B, oldest first;
* *squeeze*: of all this only the order per device is kept; it runs as early as the true times allow.

So the order is that of equal passes whatever the times; unequal times only stretch it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from zbsolve.baselines.base import Baseline, DeviceOrders, require_v
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import B, F, W

PERIOD = 6

# Per device: slot of F down, F up, B up, B down of the first micro-batch.
Block = list[tuple[int, int, int, int]]
Slots = NDArray[np.int64]


def v_half(p: int) -> Block:
    """Passes down advance two slots a device, passes up one; 3 slots of delay keep slots apart for even p."""
    delay = 3 if p % 2 == 0 else 0
    return [(2 * d, 3 * p - d - 2, 3 * p + delay + 2 * d - 1, 6 * p + delay - d - 2) for d in range(p)]


def v_min(p: int) -> Block:
    """Every pass advances one slot a device; 2 slots of delay keep slots apart where 3 divides p."""
    delay = 2 if p % 3 == 0 else 0
    return [(d, 2 * p - d - 1, 2 * p + delay + d, 4 * p + delay - d - 1) for d in range(p)]


class _Grid:
    """Slots of every pass: ``slots[d, k, j]`` for device, pass (F down, F up, B up, B down), micro-batch."""

    def __init__(self, block: Block, m: int) -> None:
        self.p, self.m = len(block), m
        self.slots: Slots = np.array(block)[:, :, None] + PERIOD * np.arange(m)[None, None, :]
        width = int(self.slots.max()) + 2 * m + 1  # the last W's may follow after the last B
        self.occupied = np.zeros((self.p, width), dtype=np.int64)  # 1 an F, 2 a B
        for d in range(self.p):
            self.occupied[d, self.slots[d, :2].ravel()] = 1
            self.occupied[d, self.slots[d, 2:].ravel()] = 2
        self.peak = [self._peak(d) for d in range(self.p)]

    def weights_done(self, device: int) -> Slots:
        """W's finished by the end of each slot when each takes the first free slot after its B."""
        row = self.occupied[device]
        began = np.cumsum(row == 2)
        # Pending W's are a queue: one joins with a B, one leaves in a free slot (Lindley's recursion).
        net = began - np.cumsum(row == 0)
        pending: Slots = net - np.minimum(0, np.minimum.accumulate(net))
        return began - pending

    def _peak(self, device: int) -> int:
        """Most chunks in flight, from F to the end of W."""
        done = self.weights_done(device)
        before = np.concatenate(([0], done[:-1]))
        return int((np.cumsum(self.occupied[device] == 1) - before).max())

    def _earliest(self, d: int, k: int, j: int) -> int:
        """First slot that dependencies leave to a pass."""
        slots, after = self.slots, [-1]
        goes_down = k in (0, 2)
        if goes_down and d > 0:
            after.append(slots[d - 1, k, j])
        if not goes_down and d + 1 < self.p:
            after.append(slots[d + 1, k, j])
        if k > 0:
            after.append(slots[d, k - 1, j])
        if j > 0:
            after.append(slots[d, k, j - 1])
        return int(max(after)) + 1

    def reorder(self) -> None:
        """Move passes outside the steady phase (first B home on device 0 to last F on it) to the left."""
        steady_from, steady_to = self.slots[0, 3, 0], self.slots[0, 0, -1]
        for flat in np.argsort(self.slots, axis=None, kind="stable"):
            d, k, j = (int(i) for i in np.unravel_index(flat, self.slots.shape))
            now = int(self.slots[d, k, j])
            if steady_from <= now <= steady_to:
                continue
            row = self.occupied[d]
            for slot in range(self._earliest(d, k, j), now):
                if row[slot]:
                    continue
                row[slot], row[now] = row[now], 0
                if self._peak(d) <= self.peak[d]:
                    self.slots[d, k, j] = slot
                    break
                row[slot], row[now] = 0, row[slot]

    def orders(self) -> DeviceOrders:
        """Device orders, W's in their slots."""
        result = []
        for d in range(self.p):
            stage = (d, 2 * self.p - 1 - d, 2 * self.p - 1 - d, d)
            placed = [
                (int(self.slots[d, k, j]), Task(F if k < 2 else B, stage[k], j))
                for k in range(4)
                for j in range(self.m)
            ]
            backwards = [task for _, task in sorted(placed, key=lambda item: item[0]) if task.kind is B]
            when = np.flatnonzero(np.diff(self.weights_done(d), prepend=0))
            placed += [(int(slot), task._replace(kind=W)) for slot, task in zip(when, backwards, strict=True)]
            result.append(tuple(task for _, task in sorted(placed, key=lambda item: item[0])))
        return tuple(result)


def orders_from(name: str, block: Callable[[int], Block], instance: Instance) -> DeviceOrders:
    """Repeat, reorder, fill with W."""
    require_v(instance, name)
    grid = _Grid(block(instance.num_devices), instance.num_microbatches)
    grid.reorder()
    return grid.orders()


V_HALF = Baseline(
    "v-half",
    "building block in a V: (p + 2) / 2 M_B, rounded down",
    "arXiv 2405.15362, section 3",
    partial(orders_from, "v-half", v_half),
    placement="v",
)
V_MIN = Baseline(
    "v-min",
    "building block in a V: (p + 4) / 3 M_B, rounded down",
    "arXiv 2405.15362, section 3",
    partial(orders_from, "v-min", v_min),
    placement="v",
)
