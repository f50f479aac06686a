"""Lower bounds for whole families of decisions, from what one device must do whatever the others get.

A family is everything that begins in one way: the first devices of the pipeline, in order, with their layers,
are settled; the rest is free. Three statements hold for every member of it, so for the best:

* **one device**: a device with settled chunks works ``m`` times their passes, after the F's and hops before
  it, and its first backward waits for the way through the rest of the model and back while its memory
  fills (:data:`zbsolve.bounds.catalogue.ONE_DEVICE_BOUNDS`). All other stages enter only through these
  chains. They are put in as one stage each (:func:`outline`), as long as the shortest chain that any member
  of the family has: these bounds read nothing else of other devices, and no other bound may be asked of an
  outline.
* **the rest, alone**: whichever way the remaining layers are dealt out, some device is the worst; the
  dynamic program :meth:`Relaxation.to_go` minimises, over all ways, the maximum of the one-device bounds.
  In it the chain before a device is the shortest that leads to its state.
* **the rest, after what is settled** (:meth:`Relaxation.to_go_after`): the same dynamic program with the
  head exactly as settled, and the work of each device alone behind it. Heads add up along the pipeline, so no
  relaxation of them is needed. It is for unlike devices, where the first program's heads are too short.

A chain is never longer for a plain stage than for one that checkpoints or offloads, so chains of free layers
count plain ones. A stage that recomputes has the chains of a plain one: its R may run while the gradient is
still on its way, and counts only as work of its device (and, like all work, in what fits into a wait there).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zbsolve.bounds.catalogue import ONE_DEVICE_BOUNDS
from zbsolve.bounds.waits import back
from zbsolve.model.instance import Instance, Stage
from zbsolve.model.serial import serial_program
from zbsolve.partition.bottleneck import Dealing, bottlenecks_to_go, least_of_two_chunks
from zbsolve.partition.layers import Keep
from zbsolve.partition.problem import CHUNKS, DecisionProblem, Placement

Segment = tuple[int, int]

# Elementary steps of the least bottleneck's arrays that take about as long as looking at one option.
STEPS_PER_OPTION = 400.0


class State(NamedTuple):
    """How far the layers are dealt out: ``used[c]`` devices of class c are settled, the last one of ``last``.

    First chunks reach up to layer ``low``. Second chunks: with V they reach down to ``high``, with loop from
    ``middle`` up to ``high``. One chunk: ``high`` and ``middle`` stay at the number of layers.
    """

    used: tuple[int, ...]
    last: int
    low: int
    high: int
    middle: int


class Option(NamedTuple):
    """The next device of the pipeline: its class and its chunks' layers, and what is left after it."""

    cls: int
    segments: tuple[Segment, ...]
    after: State


class Relaxation:
    """Options and bounds of one placement.

    Parameters
    ----------
    cutoff : float
        Costs from there on need not be told apart.
    effort : float
        How many options the dynamic programs may look at; beyond that :meth:`bottleneck` stands in for them.
    enough : callable
        When it says yes, they look at no more options either.
    """

    def __init__(
        self,
        problem: DecisionProblem,
        placement: Placement,
        cutoff: float,
        effort: float = math.inf,
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        self.problem, self.placement, self.cutoff, self.effort = problem, placement, cutoff, effort
        self.enough = enough
        self.layers = len(problem.profile.layers)
        self.p, self.m = problem.num_devices, problem.num_microbatches
        self.chunks = CHUNKS[placement]
        self.makespan = problem.objective == "makespan"
        self._hops = _class_hops(problem)
        self._least_hop = min((h for rows in self._hops.values() for h in rows), default=0.0)
        self._fastest = max(cls.speed for cls in problem.classes)
        self._between_f, self._between_b, self._work = [0.0], [0.0], [0.0]
        for layer in problem.profile.layers:
            self._between_f.append(self._between_f[-1] + layer.t_f / self._fastest)
            t_b = layer.t_b if layer.t_bw is None else min(layer.t_b, layer.t_bw)
            self._between_b.append(self._between_b[-1] + t_b / self._fastest)
            backward = layer.t_b + layer.t_w
            least = backward if layer.t_bw is None else min(backward, layer.t_bw)
            self._work.append(self._work[-1] + layer.t_f + least)
        self._alone: dict[tuple[object, ...], float] = {}
        self._least: dict[State, float] = {}
        self._after: dict[State, float] = {}
        self._chains: dict[tuple[tuple[int, ...], int, int], tuple[float, float]] = {}
        self._trips: dict[State, float] = {}
        self._all_effort = effort

    # --- options -----------------------------------------------------------------------------------

    def starts(self) -> Iterator[State]:
        """Where dealing out begins: nothing settled (for loop, one for each first layer of second chunks)."""
        none, n = (0,) * len(self.problem.classes), self.layers
        if self.placement != "loop":
            yield State(none, -1, 0, n, n)
        elif self.problem.split is not None:
            middle = sum(self.problem.split[: self.p])
            yield State(none, -1, 0, middle, middle)
        else:
            for middle in range(self.p, n - self.p + 1):
                yield State(none, -1, 0, middle, middle)

    def options(self, state: State) -> Iterator[Option]:
        """Every next device, smaller shares first."""
        r = sum(state.used)
        for cls, members in enumerate(self.problem.classes):
            if state.used[cls] == len(members.members) or (self.problem.fixed_order and cls != r):
                continue
            used = (*state.used[:cls], state.used[cls] + 1, *state.used[cls + 1 :])
            for segments, low, high in self._shares(state, r):
                yield Option(cls, segments, State(used, cls, low, high, state.middle))

    def _shares(self, state: State, r: int) -> Iterator[tuple[tuple[Segment, ...], int, int]]:
        """Chunks of place r: every later device still gets a layer per chunk, the last one all the rest."""
        low, high, middle, left = state.low, state.high, state.middle, self.p - 1 - r
        if self.chunks == 1:
            for end in self._ends(low, self.layers, left, r):
                yield ((low, end),), end, high
        elif self.placement == "loop":
            for end in self._ends(low, middle, left, r):
                for second in self._ends(high, self.layers, left, self.p + r):
                    yield ((low, end), (high, second)), end, second
        else:
            split = self.problem.split
            if split is not None:
                end, first = low + split[r], high - split[2 * self.p - 1 - r]
                yield ((low, end), (first, high)), end, first
                return
            for end in range(low + 1, high - 2 * left):
                least = end + 2 * left
                for first in range(high - 1, least - 1, -1) if left else (end,):
                    yield ((low, end), (first, high)), end, first

    def _ends(self, first: int, stop: int, left: int, stage: int) -> range:
        split = self.problem.split
        if split is not None:
            return range(first + split[stage], first + split[stage] + 1)
        return range(first + 1, stop - left + 1) if left else range(stop, stop + 1)

    def keeps(self) -> Iterator[tuple[Keep, ...]]:
        """Every choice of what the chunks of one device keep."""
        return product(self.problem.keeps, repeat=self.chunks)

    def hop(self, state: State, cls: int) -> float:
        """Hop from the last settled device to one of class ``cls``, between their first chunks."""
        return 0.0 if state.last < 0 else self._hops[state.last, cls][state.low - 1]

    # --- one device -----------------------------------------------------------------------------------

    def work(self, option: Option, keep: tuple[Keep, ...]) -> float:
        """Device time of the whole step."""
        chunks = self._chunks(option, keep)
        return self.m * sum(stage.t_f + (stage.t_r or 0.0) + stage.min_backward for stage in chunks)

    def _chunks(self, option: Option, keep: tuple[Keep, ...]) -> list[Stage]:
        return [
            self.problem.stage(first, end, option.cls, kept)
            for (first, end), kept in zip(option.segments, keep, strict=True)
        ]

    def alone(self, option: Option, keep: tuple[Keep, ...], head: float, tail: float) -> float:
        """Bound from one device: ``head`` before its first F, ``tail`` after its last backward.

        Infinite when it cannot hold one micro-batch.
        """
        trip = self.trip(option.after) if self.chunks == 1 else 0.0
        key = (option.cls, option.segments, keep, head, tail, trip, sum(option.after.used))
        found = self._alone.get(key)
        if found is None:
            found = self._alone[key] = self._bound_alone(option, keep, head, tail, trip)
        return found

    def _bound_alone(
        self, option: Option, keep: tuple[Keep, ...], head: float, tail: float, trip: float
    ) -> float:
        chunks = self._chunks(option, keep)
        static = sum(self.problem.static(*segment) for segment in option.segments)
        cap = self.problem.classes[option.cls].memory
        between, after = self.way(option) if self.chunks == 2 else ((0.0, 0.0), trip)
        instance = outline(chunks, self.m, head, tail, between, after, static, cap)
        if cap < math.inf and not instance.fits(0, serial_program(instance, 0)[0]):
            return math.inf
        found = (of_device(instance, 0, self.problem.objective) for of_device in ONE_DEVICE_BOUNDS)
        return max(bound.value for bound in found if bound is not None)

    def way(self, option: Option) -> tuple[tuple[float, float], float]:
        """Shortest (F, backward) chains between a device's two chunks, and on from the second and back."""
        r, n, hop = sum(option.after.used) - 1, self.layers, self._least_hop
        (_, end), (second, stop) = option.segments
        hops = 2 * (self.p - 1 - r) if self.placement == "v" else self.p if self.p > 1 else 0
        on = r if self.placement == "v" else self.p - 1 - r
        between = (
            self._between_f[second] - self._between_f[end] + hops * hop,
            self._between_b[second] - self._between_b[end] + hops * hop,
        )
        f, b = self._between_f[n] - self._between_f[stop], self._between_b[n] - self._between_b[stop]
        return between, f + b + 2 * on * hop

    def way_round(self, option: Option, settled: int) -> tuple[float, float]:
        """Loop: shortest (F, backward) chains from the last settled first chunk to the first second chunk."""
        hops, end = (self.p - settled + 1) * self._least_hop, option.segments[0][1]
        middle = option.after.middle
        return (
            self._between_f[middle] - self._between_f[end] + hops,
            self._between_b[middle] - self._between_b[end] + hops,
        )

    def class_hop(self, option: Option, following: Option, chunk: int) -> float:
        """Hop between the same chunks of two devices that follow each other in the pipeline."""
        first = following if chunk and self.placement == "v" else option
        return self._hops[option.cls, following.cls][first.segments[chunk][1] - 1]

    # --- chains ---------------------------------------------------------------------------------------

    def chain(self, used: tuple[int, ...], last: int, low: int) -> tuple[float, float]:
        """Shortest head (to the end of the last settled device's F) and tail of all that lead to a state."""
        if last < 0:
            return 0.0, 0.0
        key = (used, last, low)
        found = self._chains.get(key)
        if found is not None:
            return found
        before = (*used[:last], used[last] - 1, *used[last + 1 :])
        r = sum(before)
        head = tail = math.inf
        for first in range(r, low) if r else (0,):
            stage = self.problem.stage(first, low, last)
            for previous in [c for c, number in enumerate(before) if number] or [-1]:
                ahead, behind = self.chain(before, previous, first)
                hop = 0.0 if previous < 0 else self._hops[previous, last][first - 1]
                head = min(head, ahead + hop + stage.t_f)
                tail = min(tail, behind + hop + (back(stage) if r else stage.min_backward))
        self._chains[key] = head, tail
        return head, tail

    def trip(self, state: State) -> float:
        """One chunk a device: shortest way on from the last settled device through the rest and back."""
        if sum(state.used) == self.p:
            return 0.0
        found = self._trips.get(state)
        if found is None:
            found = math.inf
            for option in self.options(state):
                (segment,) = option.segments
                stage = self.problem.stage(*segment, option.cls)
                own = stage.t_f + back(stage) + 2 * self.hop(state, option.cls)
                found = min(found, own + self.trip(option.after))
            self._trips[state] = found
        return found

    # --- the rest -------------------------------------------------------------------------------------

    @cached_property
    def _dealing(self) -> Dealing:
        return Dealing(self.problem)

    @cached_property
    def _bottlenecks_to_go(self) -> dict[tuple[int, ...], NDArray[np.float64]]:
        return bottlenecks_to_go(self._dealing)

    @cached_property
    def _bottleneck_of_all(self) -> float:
        steps = STEPS_PER_OPTION * self._all_effort
        least = min(map(self.balanced, self.starts()))
        return least_of_two_chunks(self._dealing, self.placement, least, steps)

    def bottleneck(self, state: State) -> float:
        """The rest dealt out in whole layers: the least work of its busiest device.

        Both objectives are at least that (:mod:`zbsolve.partition.bottleneck`). With two chunks a device it
        is known of the whole only; else :meth:`balanced` is said.
        """
        even = self.balanced(state)
        if self.chunks == 1:
            used = (sum(state.used),) if self._dealing.merged else state.used
            return max(even, float(self._bottlenecks_to_go[used][state.low]))
        return even if any(state.used) else max(even, self._bottleneck_of_all)

    def balanced(self, state: State) -> float:
        """The rest dealt out as if layers could be cut anywhere: no way leaves every device less work."""
        left = self.p - sum(state.used)
        speeds = [
            members.speed
            for members, used in zip(self.problem.classes, state.used, strict=True)
            for _ in range(len(members.members) - used)
        ]
        work = self._work[state.middle if self.placement == "loop" else state.high] - self._work[state.low]
        if self.placement == "loop":
            work += self._work[self.layers] - self._work[state.high]
        return self.m * work / sum(sorted(speeds)[-left:])

    def _spent(self) -> bool:
        return self.effort <= 0 or self.enough()

    def to_go(self, state: State) -> float:
        """Least, over all ways to deal out the rest, of the worst one-device bound in it.

        At least ``cutoff`` is all that is said of larger values.
        """
        if sum(state.used) == self.p:
            return 0.0
        found = self._least.get(state)
        if found is not None:
            return found
        if self._spent():
            return self.bottleneck(state)
        ahead, behind = self.chain(state.used, state.last, state.low)
        cheap = []
        for option in self.options(state):
            hop = self.hop(state, option.cls)
            head = ahead + hop if self.makespan else 0.0
            for keep in self.keeps():
                self.effort -= 1
                value = head + self.work(option, keep)
                if value < self.cutoff:
                    cheap.append((value, option, keep, head, behind + hop))
        cheap.sort(key=lambda entry: entry[0])
        best = self.cutoff
        for value, option, keep, head, tail in cheap:
            if value >= best:
                break
            rest = max(value, self.to_go(option.after))
            if rest < best:
                best = min(best, max(rest, self.alone(option, keep, head, tail)))
        if self._spent():  # parts of it were only estimated
            best = max(best, min(self.cutoff, self.bottleneck(state)))
        self._least[state] = best
        return best

    def to_go_after(self, state: State) -> float:
        """Least, over all ways, of the worst (head from the end of the last settled F on, plus work)."""
        if sum(state.used) == self.p:
            return 0.0
        found = self._after.get(state)
        if found is not None:
            return found
        if self._spent():
            return self.bottleneck(state)
        best = self.cutoff
        plain = (Keep.plain,) * self.chunks
        for option in self.options(state):
            self.effort -= 1
            hop = self.hop(state, option.cls)
            work = hop + self.work(option, plain)
            if work < best:
                first = self.problem.stage(*option.segments[0], option.cls)
                best = min(best, max(work, hop + first.t_f + self.to_go_after(option.after)))
        self._after[state] = best
        return best


def outline(
    chunks: list[Stage],
    m: int,
    head: float,
    tail: float,
    between: tuple[float, float],
    after: float,
    static: float,
    cap: float,
) -> Instance:
    """An instance whose device 0 has ``chunks``, and whose other stages are chains of the given lengths.

    For bounds that read of other devices only these chains: a chain is several devices at once, so this
    instance is no pipeline and must not be scheduled.
    """
    own = [chunk.model_copy(update={"device": 0}) if chunk.device else chunk for chunk in chunks]
    stages = [_chain(1, head, tail), own[0]]
    if len(own) == 2:
        stages += [_chain(2, *between), own[1]]
    stages.append(_chain(3, after, 0.0))
    return Instance.model_construct(
        name="outline",
        num_devices=4,
        num_microbatches=m,
        stages=tuple(stages),
        t_comm=0.0,
        memory_cap=(cap, math.inf, math.inf, math.inf),
        static_mem=(static, 0.0, 0.0, 0.0),
    )


def _chain(device: int, t_f: float, t_b: float) -> Stage:
    return Stage.model_construct(device=device, t_f=t_f, t_b=t_b, t_w=0.0, mem_b=0.0, mem_w=0.0)


def _class_hops(problem: DecisionProblem) -> dict[tuple[int, int], list[float]]:
    """Hop between two devices of each pair of classes, over the boundary behind each layer."""
    sizes = [layer.mem_out for layer in problem.profile.layers[:-1]]
    hops = {}
    for a, one in enumerate(problem.classes):
        for b, other in enumerate(problem.classes):
            if a != b or len(one.members) > 1:
                link = problem.cluster.link(one.members[0], other.members[-1])
                hops[a, b] = [link.hop(size) for size in sizes]
    return hops
