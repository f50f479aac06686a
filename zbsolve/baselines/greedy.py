"""The greedy construction behind ZB-1p and ZB-2p, linear placement. Qi et al., arXiv 2401.10241, section 3.

1. *Warm-up.* The first F goes down the pipeline. Before its first B a device starts as many more as memory
   and the wait for that B allow, fewer than the device above it.
2. *Rounds.* Each takes one F, if the device below takes one, too, then one B. By choice a device that is two
   F's ahead of the one below skips an F that would delay that one's next B.
3. *W* goes where the next input arrives at least T_W later, where memory is full, where waiting would make
   the device the idlest, and, by choice, wherever there is a wait at all.

The three choices make eight variants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from zbsolve.baselines.base import DeviceOrders, require_linear
from zbsolve.baselines.construction import Construction, StuckError
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import B, F, TaskKind
from zbsolve.model.objective import is_span


class _Greedy(Construction):
    """One variant. On a linear placement a device is its stage."""

    def __init__(
        self, instance: Instance, room: Sequence[float], *, wait_for_b: bool, skip_f: bool, always_fill: bool
    ) -> None:
        super().__init__(instance, room)
        self.wait_for_b, self.skip_f, self.always_fill = wait_for_b, skip_f, always_fill

    def fills(self, kind: TaskKind, stage: int, gap: float, allowance: float) -> bool:
        """Only into a wait; into one that the device can afford by choice."""
        return gap > 0 and (self.always_fill or gap > self.patience(stage, allowance))

    def warm_up(self) -> None:
        """F's before the first B, and that B."""
        stages = self.instance.stages
        for d in range(self.p):
            self.place(self.next_task(F, d))
        more = [0] * self.p
        arrival = self.clock[-1] + stages[-1].t_b
        for d in reversed(range(self.p - 1)):
            arrival += self.instance.hop(d)
            clock, level = self.clock[d], self.level[d]
            while 1 + more[d] < self.m and level + stages[d].mem_b <= self.room[d]:
                if clock + stages[d].t_f > arrival if self.wait_for_b else clock >= arrival:
                    break
                clock += stages[d].t_f
                level += stages[d].mem_b
                more[d] += 1
            arrival = max(clock, arrival) + stages[d].t_b
        for d in range(1, self.p):
            more[d] = min(more[d], max(0, more[d - 1] - 1))
        for d in range(self.p):
            for _ in range(more[d]):
                self.place(self.next_task(F, d))
        for d in reversed(range(self.p)):
            self.place(self.next_task(B, d))

    def _takes_f(self, d: int) -> bool:
        """Whether a device wants an F in this round."""
        forwards = self.done[F, d]
        if forwards >= self.m:
            return False
        if not self.skip_f or d + 1 == self.p or forwards < self.done[F, d + 1] + 2:
            return True
        below = self.instance.stages[d + 1]
        # When the device below could pass its next gradient on, were it to run one more F before.
        due = self.clock[d + 1] + below.t_f + below.t_b + self.instance.hop(d)
        now = self.clock[d]
        if now >= due:
            return False
        stage = self.instance.stages[d]
        level, freed = self.level[d] + stage.mem_b, 0.0
        for _ in self.pending[d]:
            if level <= self.room[d]:
                break
            level -= stage.mem_w
            freed += stage.t_w
        if now + stage.t_f + freed <= due:
            return True
        return due - now > self.patience(d)

    def run(self) -> DeviceOrders:
        """Warm-up, rounds, the rest of the W's."""
        self.warm_up()
        for _ in range(1, self.m):
            wanted = [self._takes_f(d) for d in range(self.p)]
            for d in reversed(range(self.p - 1)):
                wanted[d] = wanted[d] and wanted[d + 1]
            for d in range(self.p):
                if wanted[d] and not self.place_after_w(F, d):
                    raise StuckError
            for d in reversed(range(self.p)):
                while d == 0 and self.done[F, d] == self.m and self.pending[d]:
                    self.place_w(d)  # nothing waits for device 0: its B's may end last
                if not self.place_after_w(B, d):
                    raise StuckError
        return self.finish()


class Greedy(NamedTuple):
    """A variant's orders, and what they cost at earliest starts."""

    orders: DeviceOrders
    makespan: float
    span: float

    def costs(self, objective: str) -> tuple[float, float]:
        """The cost by name, makespan or span, and the other, to choose by."""
        return (self.span, self.makespan) if is_span(objective) else (self.makespan, self.span)


def greedy_candidates(instance: Instance) -> Iterator[Greedy]:
    """Every variant that fits under the instance's cap."""
    require_linear(instance, "the greedy construction")
    room = [instance.cap(d) - instance.static(d) for d in range(instance.num_devices)]
    for wait_for_b, skip_f, always_fill in product((True, False), repeat=3):
        builder = _Greedy(instance, room, wait_for_b=wait_for_b, skip_f=skip_f, always_fill=always_fill)
        try:
            orders = builder.run()
        except StuckError:
            continue
        yield Greedy(orders, max(builder.clock), builder.span)
