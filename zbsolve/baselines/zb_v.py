"""ZB-V: two chunks per device in a V, W in the gaps, p M_B. Qi et al., arXiv 2401.10241, section 6.

Device d holds stages d and 2p - 1 - d, so that a micro-batch's F goes down the devices and up again, and its
backward the same way: both ends of the model lie on device 0. The published schedule is the outcome of a
greedy construction on the profiled times, which is re-stated here for unequal stages:

1. *Warm-up.* The first micro-batch's F goes down the V and back up. While a device waits for it, it and the
   devices above start further micro-batches on the first chunk, as long as memory allows. Then the devices
   are filled up, chunk by chunk in turn, so that none has run fewer F's than the one above it.
2. *Rounds.* Each device takes one B and one F in turn. Of its two chunks it takes the one whose result goes
   towards device p - 1 only when the other has nothing that could arrive, and nothing where memory or a
   missing input forbids it (which equal chunks never meet).
3. *W.* A W goes where the next task's input arrives at least T_W later, where memory is full, and also where
   waiting would idle the device longer than the idlest one: always before the B of the homeward chunk, by
   choice before F's and before the other B's (four variants, of which the best is taken). How long the
   idlest one idles becomes known by building: the construction is repeated with the idle of the last build as
   allowance, as long as it gets better.

:func:`zb_v_candidates` also offers variants that the paper does not try: more warm starts for a search.

What it does not model: fused backwards (every backward is split), more than two chunks per device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zbsolve.baselines.base import Baseline, DeviceOrders, require_v
from zbsolve.baselines.construction import Construction, StuckError
from zbsolve.errors import InputError
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import B, F, TaskKind


class _Fill(NamedTuple):
    """Before which tasks a W may go to keep a device from becoming the idlest."""

    f: bool
    b_outward: bool
    b_homeward: bool


_PUBLISHED = tuple(_Fill(f, b, True) for b in (True, False) for f in (True, False))
_MORE = tuple(_Fill(f, False, False) for f in (True, False))


class _Builder(Construction):
    """One run of the construction."""

    def __init__(self, instance: Instance, room: Sequence[float], fill: _Fill) -> None:
        super().__init__(instance, room)
        self.fill = fill

    def down(self, device: int) -> int:
        """Stage of the chunk through which F goes towards device p - 1."""
        return device

    def up(self, device: int) -> int:
        """Stage of the chunk through which F comes back to device 0."""
        return 2 * self.p - 1 - device

    def place_forward(self, stage: int) -> bool:
        """The stage's next F without any W before it; False when there is none or no memory for it."""
        if self.done[F, stage] >= self.m or not self.has_input(F, stage) or not self.fits(F, stage):
            return False
        self.place(self.next_task(F, stage))
        return True

    def fills(self, kind: TaskKind, stage: int, gap: float, allowance: float) -> bool:
        """Before which tasks a W may go so that the device does not become the idlest."""
        device = self.instance.stages[stage].device
        if kind is F:
            may = self.fill.f
        else:
            may = self.fill.b_homeward if stage == self.down(device) else self.fill.b_outward
        return may and gap > self.patience(device, allowance)

    # --- the three parts -----------------------------------------------------------------------

    def warm_up(self) -> None:
        """F's before the first B."""
        stages = self.instance.stages
        for device in range(self.p):
            self.place_forward(self.down(device))
        for device in reversed(range(self.p)):
            up, down = self.up(device), self.down(device)
            while (
                device < self.p - 1
                and self.done[F, 0] < self.m
                and self.holds(device, stages[down].mem_b * (1 + 2 * device) + stages[up].mem_b)
                and self.has_input(F, up)  # not where a device below lacks memory
                and self.clock[device] + stages[down].t_f <= self.arrival(F, up)
            ):
                placed = [self.place_forward(self.down(above)) for above in range(device + 1)]
                if not any(placed):
                    break  # a device above lacks memory
            self.place_forward(up)
        going_up = False
        for device in range(1, self.p):
            fruitless = 0
            while self._behind(device) and fruitless < 2:
                chunk = self.up if going_up else self.down
                placed = [self.place_forward(chunk(below)) for below in reversed(range(device, self.p))]
                fruitless = 0 if any(placed) else fruitless + 1
                going_up = not going_up

    def _behind(self, device: int) -> bool:
        """Whether a device has started fewer F's than the one above it."""
        above = device - 1
        own = self.done[F, self.down(device)], self.done[F, self.up(device)]
        theirs = self.done[F, self.down(above)], self.done[F, self.up(above)]
        return sum(own) < sum(theirs) or own[1] <= theirs[1] < self.m

    def round(self, allowance: Sequence[float]) -> None:
        """One B, then one F, on every device that has any left."""
        homewards, outwards = [], []
        for device in range(self.p):
            down, up = self.down(device), self.up(device)
            if self.done[B, down] >= self.done[B, up]:
                outwards.append(up)
            elif (
                device == self.p - 1 or self.done[B, up] >= self.m or self._arrives(B, self.down(device + 1))
            ):
                homewards.append(down)
            else:
                outwards.append(up)
        # Each list in the order of its own dependencies.
        for stage in (*reversed(homewards), *outwards):
            self.place_after_w(B, stage, allowance[self.instance.stages[stage].device])
        for device in range(self.p):
            down, up = self.down(device), self.up(device)
            if self.done[F, up] >= self.m:
                continue
            if self.done[F, up] >= self.done[F, down]:
                stage = down
            elif device == self.p - 1 or self._arrives(F, self.up(device + 1)):
                stage = up
            elif self.done[F, down] < self.m and self.has_input(F, down):
                stage = down
            else:
                continue
            self.place_after_w(F, stage, allowance[device])

    def _arrives(self, kind: TaskKind, source: int) -> bool:
        """Whether the neighbour below has run what this device's homeward chunk takes next."""
        target = source + 1 if kind is F else source - 1
        return self.done[kind, source] > self.done[kind, target]

    def run(self, allowance: Sequence[float]) -> DeviceOrders:
        """All three parts; what is left of the W's last."""
        self.warm_up()
        left = 4 * self.p * self.m
        while (remaining := 4 * self.p * self.m - sum(self.done.values())) > 0:
            if remaining == left:
                raise StuckError
            left = remaining
            self.round(allowance)
        return self.finish()


def zb_v_candidates(
    instance: Instance, room: Sequence[float] | None = None, *, published: bool = False
) -> Iterator[DeviceOrders]:
    """Every outcome of the construction under ``room`` of activation memory per device (default: p M_B).

    M_B here is what one micro-batch holds on both chunks of a device. Each is a valid set of orders within
    ``room``; none may come when memory is too tight for the warm-up. ``published`` keeps to the
    variants of the paper.
    """
    for orders, _ in _outcomes(instance, room, published):
        yield orders


def _outcomes(
    instance: Instance, room: Sequence[float] | None, published: bool
) -> Iterator[tuple[DeviceOrders, float]]:
    """The orders of :func:`zb_v_candidates`, each with its span at earliest starts."""
    require_v(instance, "zb-v")
    if room is None:
        room = [
            instance.num_devices * sum(instance.stages[s].mem_b for s in instance.stages_on(d))
            for d in range(instance.num_devices)
        ]
    for fill in _PUBLISHED if published else _PUBLISHED + _MORE:
        allowance = [0.0] * instance.num_devices
        least = math.inf
        while True:
            builder = _Builder(instance, room, fill)
            try:
                orders = builder.run(allowance)
            except StuckError:
                break
            yield orders, builder.span
            worst = max(builder.idle)
            if not worst < least:
                break
            least = worst
            allowance = [worst - idle for idle in builder.idle]


def orders_zb_v(instance: Instance) -> DeviceOrders:
    """The published variant of least span at earliest starts, the first among equals."""
    best = min(_outcomes(instance, None, published=True), key=lambda outcome: outcome[1], default=None)
    if best is None:
        raise InputError("zb-v needs p times the activation memory of a device's two chunks: it does not fit")
    return best[0]


ZB_V = Baseline(
    "zb-v",
    "two chunks per device in a V: zero bubble in span at equal times, p M_B",
    "arXiv 2401.10241, section 6",
    orders_zb_v,
    placement="v",
    seconds_a_task=6e-5,
)
