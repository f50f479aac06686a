"""Bounds by refutation: a cost is assumed, and what the devices' orders say about it contradicts itself.

Suppose a schedule costs no more than C. Then every device has an order whose states
(:mod:`zbsolve.bounds.device_states`) leave time for all that comes before and after on other devices. That
moves the heads and tails of its tasks, and along dependencies and memory waits those of other devices, which
have fewer orders then, and so on. If some device is left without any, no schedule costs C or less. Where that
comes to an end first, nothing is said; a device left out, or a move not followed up, only makes that
likelier.

Times count from the start of F(0, 0), which every task has before it: no device's first state is earlier than
0. The makespan ends with the last task of any device. The span is at least the window of stage 0's device,
and this is what must not exceed C: other devices' tasks come before its end only where a path leads to one
of its own, so tails without one, and what follows the last task on other devices, are minus infinity.

Heads and tails that hold in all schedules within C hold in those within less: the search for the highest C
that is refuted goes on from the least that was not. A state that C leaves no time for has none within less
either, so states are found once, for the first C. Times of schedules are sums of float64, whose rounding
a tolerance covers.

Trials. Set a schedule that takes T <= C anywhere within [0, C]: what is said above of heads (least starts
there) and tails (least times from ends to C) holds wherever it is set, as nothing asks it to begin at 0 or to
end at C. A task that starts there before v ends more than C - v - length before C: if such a tail leads to a
contradiction, the task starts at v or later, wherever the schedule is set. Set to begin at 0, that is
a head of v; the other way round, set to end at C, a tail. So both count from the schedule's own begin and
end, hold within less than C as well, and later trials may rest on them. With the span, it is the window of
stage 0's device that is set within [0, C]. A trial that ends early, for want of passes or time, says nothing.
A trial finds no states: what has no time under its assumption may well have some without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zbsolve.bounds.arcs import Arc, Job, pass_arcs, pass_order
from zbsolve.bounds.argument import Known
from zbsolve.bounds.bound import Bound
from zbsolve.bounds.device_states import DeviceStates
from zbsolve.bounds.waits import Lag, LeastTime, pass_lengths
from zbsolve.bounds.windows import CODE, KINDS, Windows, windows
from zbsolve.compiled import compile_loop
from zbsolve.model.instance import Instance
from zbsolve.model.tolerances import OPTIMAL_GAP, TIME_RTOL
from zbsolve.plan.certificate import MOST_SHAVED

FloatArray = NDArray[np.float64]

DEVICE_ORDERS = "device orders"
# States of all devices together, those that turned out too many included: 64 bytes each with two stages a
# device. A device with more than its own limit is left out: it refutes nothing.
MOST_STATES = 10_000_000
MOST_STATES_OF_ONE = 1_500_000
# With more devices left out than this it is no use: the others are much like them.
MOST_LEFT_OUT = 3
# A head that moves less than this share of the cost is not followed up.
LEAST_MOVE = 1e-5
# Costs closer than this share are not told apart.
RESOLUTION = 2e-4
# Trials: the share of a task's window that is cut off at a time, from windows of at least this share of the
# cost; how far a trial is followed, in passes for each device; and the share of all windows that a round of
# trials must gain to be followed by another.
SHAVED, LEAST_SHAVED = 0.25, 1e-3
PASSES_A_TRIAL = 3
LEAST_GAIN = 0.01
# How far between bound and cost the next cost to be tried lies, at first and at last; trials for each.
FIRST_SHARE, LEAST_SHARE = 0.1, 0.03
TRIALS = (200, 1_000, 5_000, 25_000)
# What a pass or a trial takes by itself, in states gone through (measured): few states cost no less.
OF_ITSELF = 500


def follow(arcs: Any, lags: Any, lengths: Any, heads: Any, tails: Any) -> None:
    """Longest paths: raise heads and tails of all tasks to what arcs imply.

    Parameters
    ----------
    arcs : array, shape (number, 2)
        The second starts ``lags`` after the first. Sorted so that whatever leads to an arc's first task
        stands before it.
    lengths, heads, tails : array, shape (tasks,)
    """
    for a in range(len(arcs)):
        first, second = arcs[a]
        heads[second] = max(heads[second], heads[first] + lags[a])
    for a in range(len(arcs) - 1, -1, -1):
        first, second = arcs[a]
        tails[first] = max(tails[first], lags[a] + lengths[second] + tails[second] - lengths[first])


@cache
def _compiled() -> Any:
    return compile_loop(follow)


class Learnt(NamedTuple):
    """Heads and tails, shape (kinds, stages, m), of all schedules within a cost, and what trials showed."""

    heads: FloatArray
    tails: FloatArray
    within: float
    shaved: tuple[LeastTime, ...]


class Refutation:
    """What is known of all schedules of an instance that cost no more than the last cost not refuted.

    Parameters
    ----------
    lags : tuple of Lag
        Proven of the instance; what is refuted rests on them.
    enough : callable
        Asked before every trial and every pass over a device's states; when it says yes, what is under way
        gives up.
    found : Windows, optional
        Of the instance with these lags, where they are known already.
    """

    def __init__(
        self,
        instance: Instance,
        objective: str,
        *,
        lags: tuple[Lag, ...] = (),
        enough: Callable[[], bool] = lambda: False,
        found: Windows | None = None,
    ) -> None:
        found = windows(instance, lags) if found is None else found
        # The span is watched in the window of stage 0's device, which begins and ends every path.
        first = instance.stages[0].device
        self._observer = instance.num_devices if objective == "makespan" else first
        self.heads = np.ascontiguousarray(found.heads[..., self._observer])
        self.tails = np.ascontiguousarray(found.tails[..., self._observer])
        self.lags = lags
        self._arcs, self._arc_lags = _arcs(instance, lags)
        self._lengths = np.repeat(_lengths(instance)[:, :, None], instance.num_microbatches, axis=2)
        self.enough = enough
        self._known_for = math.inf  # the cost that heads and tails hold within
        self._devices = [DeviceStates(instance, d) for d in range(instance.num_devices)]
        self._device_of = np.array([stage.device for stage in instance.stages])
        self.shaved: list[LeastTime] = []
        self.work = 0  # states gone through so far, with OF_ITSELF: what the time goes into
        self.device = 0  # that had no order left in the last cost refuted
        self._follow(self.heads, self.tails)

    @classmethod
    def of(cls, known: Known) -> Refutation:
        """From what is known already: windows are not computed twice."""
        found = known.windows(known.lags)
        return cls(known.instance, known.objective, lags=known.lags, found=found)

    def known(self) -> Learnt:
        """What holds within the least cost that was not refuted."""
        return Learnt(self.heads, self.tails, self._known_for, tuple(self.shaved))

    def restore(self, known: Learnt) -> None:
        """Go back to what was known for a higher cost."""
        self.heads, self.tails, self._known_for = known.heads, known.tails, known.within
        self.shaved = list(known.shaved)

    def refutes(self, cost: float, least_move: float = LEAST_MOVE) -> bool | None:
        """Whether no schedule costs ``cost`` or less; None when it gave up.

        Parameters
        ----------
        cost : float
            None above the least that was not refuted so far: heads and tails hold within that.
        least_move : float
            Share of the cost. With 0 every cost is refuted that is with any other.
        """
        if cost > self._known_for:
            raise ValueError(f"cost {cost:g} is above {self._known_for:g}, which was not refuted")
        heads, tails = self.heads.copy(), self.tails.copy()
        return self._settle(heads, tails, cost, range(len(self._devices)), least_move)

    def shaves(self, cost: float, draw: np.random.Generator, most: int) -> bool | None:
        """The same by at most so many trials, for a cost that :meth:`refutes` did not refute.

        Every F and backward is assumed to start early within what is left to it, then late. Where that is
        refuted the rest of its window stays, and everything follows from it as in :meth:`refutes`. False,
        too, when a round of trials gains little any more.
        """
        self._require_gone_through(cost)
        S, m = self.heads.shape[1:]
        while True:
            before = self._slack(cost)
            for number in draw.permutation(4 * S * m):
                kind, s, j, after = (int(i) for i in np.unravel_index(number, (2, S, m, 2)))
                head, tail = float(self.heads[kind, s, j]), float(self.tails[kind, s, j])
                left = cost - head - tail - float(self._lengths[kind, s, j])
                if not LEAST_SHAVED * cost < left < math.inf:
                    continue
                if most == 0 or len(self.shaved) == MOST_SHAVED:
                    return False
                if self.enough():
                    return None  # a trial that moves nothing goes over no states, and does not ask
                most -= 1
                time = LeastTime(KINDS[kind], s, j, (tail if after else head) + SHAVED * left, bool(after))
                shown = self.shows(time, cost, most_passes=PASSES_A_TRIAL * len(self._devices))
                if shown is None:
                    return None
                refuted = self.take(time, cost) if shown else False
                if refuted is not False:
                    return refuted
            if self._slack(cost) >= (1 - LEAST_GAIN) * before:
                return False

    def shows(
        self, time: LeastTime, cost: float, most_passes: float = math.inf, least_move: float = LEAST_MOVE
    ) -> bool | None:
        """Whether no schedule within ``cost`` has less time there: assuming it leads to a contradiction.

        False when none is found; None when it gave up. For the cost that :meth:`refutes` did not refute last.
        """
        self._require_gone_through(cost)
        self.work += OF_ITSELF
        kind, s, j, value, after = time
        # Less before its start: so much more after its end, and the other way round.
        length = float(self._lengths[CODE[kind], s, j])
        contrary = LeastTime(kind, s, j, cost - value - length, not after)
        heads, tails = self.heads.copy(), self.tails.copy()
        touched = self._raise(heads, tails, contrary, least_move * cost)
        return self._contradict(heads, tails, cost, touched, least_move, most_passes)

    def take(self, time: LeastTime, cost: float, least_move: float = LEAST_MOVE) -> bool | None:
        """Let all that follows rest on what :meth:`shows` showed; the rest as :meth:`refutes`."""
        self._require_gone_through(cost)
        heads, tails = self.heads.copy(), self.tails.copy()
        touched = self._raise(heads, tails, time, least_move * cost)
        self.shaved.append(time)
        return self._settle(heads, tails, cost, touched, least_move)

    def _settle(
        self, heads: FloatArray, tails: FloatArray, cost: float, touched: Iterable[int], least_move: float
    ) -> bool | None:
        """Whether the cost is refuted; where it is not, what was raised is known from now on."""
        refuted = self._contradict(heads, tails, cost, touched, least_move)
        if refuted is False:
            self.heads, self.tails, self._known_for = heads, tails, cost
        return refuted

    def _require_gone_through(self, cost: float) -> None:
        """Trials find no states: those that an assumption leaves time for are not all that there are."""
        if cost != self._known_for:
            raise ValueError(f"cost {cost:g} is not the last that was not refuted, {self._known_for:g}")

    def _raise(self, heads: FloatArray, tails: FloatArray, time: LeastTime, least: float) -> Iterable[int]:
        """Set one head or tail, follow it up; the devices whose tasks it moves."""
        before = heads.copy(), tails.copy()
        kind, s, j, value, after = time
        of = (CODE[kind], s, j)
        which = tails if after else heads
        which[of] = max(which[of], value)
        return self._follow_up(before, heads, tails, least)

    def _contradict(
        self,
        heads: FloatArray,
        tails: FloatArray,
        cost: float,
        touched: Iterable[int],
        least_move: float,
        most_passes: float = math.inf,
    ) -> bool | None:
        """Whether what is known leaves no schedule within the cost; else ``heads`` and ``tails`` are raised.

        None when it is time to give up. After ``most_passes`` over devices: False, with less raised.
        """
        within = cost * (1 + TIME_RTOL)
        waiting = dict.fromkeys(touched)
        while waiting and most_passes > 0:
            if self.enough():
                return None
            most_passes -= 1
            self.work += OF_ITSELF
            number = next(iter(waiting))
            del waiting[number]
            device = self._devices[number]
            known = heads[device.rows], tails[device.rows]
            if (known[0] + self._lengths[device.rows] + known[1] > within).any():
                self.device = number
                return True
            if device.within < within and not device.too_many:
                device.enumerate(*known, within, self._most_states(), self.enough)
            if device.too_many:
                if sum(each.too_many for each in self._devices) > MOST_LEFT_OUT:
                    return None
                continue
            ends_watched = self._observer in (number, len(self._devices))
            narrowed = device.narrow(*known, 0.0 if ends_watched else -math.inf, within)
            self.work += device.num_states
            if narrowed is None:
                self.device = number
                return True
            heads[device.rows] = np.maximum(known[0], narrowed[0])
            tails[device.rows] = np.maximum(known[1], narrowed[1])
            before = heads.copy(), tails.copy()
            for moved in self._follow_up(before, heads, tails, least_move * cost):
                waiting.setdefault(moved)
        return False

    def _follow_up(
        self, before: tuple[FloatArray, FloatArray], heads: FloatArray, tails: FloatArray, least: float
    ) -> Iterable[int]:
        """Follow the arcs; devices with a head or tail that is above ``before`` by more than ``least``."""
        self._follow(heads, tails)
        moved = (heads > before[0] + least) | (tails > before[1] + least)
        return dict.fromkeys(self._device_of[moved.any(axis=(0, 2))].tolist())

    def _slack(self, cost: float) -> float:
        """Time that all F's and backwards together have left to move in."""
        left = (cost - self.heads - self.tails - self._lengths)[:2]
        # Rounding may leave less than nothing: a sum below zero would gain in every round.
        return float(left[np.isfinite(left)].clip(min=0.0).sum())

    def bound(self, cost: float) -> Bound:
        """What refuting a cost proves; right after :meth:`refutes` said so."""
        trials = f", {len(self.shaved)} times narrowed by trial" if self.shaved else ""
        return Bound(
            cost,
            DEVICE_ORDERS,
            f"within a cost of {cost:g}, device {self.device} has no order under its cap that leaves time "
            f"for what comes before and after on other devices{trials}",
            self.device,
            self.lags,
            tuple(self.shaved),
        )

    @property
    def complete(self) -> bool:
        """Whether no device had to be left out."""
        return not any(device.too_many for device in self._devices)

    def _most_states(self) -> int:
        return min(MOST_STATES - sum(device.num_states for device in self._devices), MOST_STATES_OF_ONE)

    def _follow(self, heads: FloatArray, tails: FloatArray) -> None:
        _compiled()(
            self._arcs, self._arc_lags, self._lengths.ravel(), heads.reshape(-1), tails.reshape(-1)
        )  # fmt: skip


def refuted_bounds(refutation: Refutation, bound: float, cost: float) -> Iterator[Bound]:
    """Ever higher bounds between ``bound`` and the ``cost`` of a schedule: what needs no trials."""
    tried = cost * (1 - OPTIMAL_GAP)  # first of all: is the schedule optimal?
    top = refutation.known()
    least = cost
    while least - bound > RESOLUTION * cost:
        refuted = refutation.refutes(tried)
        if refuted is None:
            break
        if refuted:
            yield refutation.bound(tried)
            bound = tried
        else:
            least = tried
            if top.within == math.inf:
                top = refutation.known()
        tried = (bound + least) / 2
    refutation.restore(top)


def shaved_bounds(refutation: Refutation, bound: float, cost: float, seed: int = 0) -> Iterator[Bound]:
    """The same by trials, ever more of them; ``bound`` is what :func:`refuted_bounds` came to, or more."""
    top = refutation.known()
    draw = np.random.default_rng(seed)
    for most in TRIALS:
        share, known = FIRST_SHARE, top
        while share >= LEAST_SHARE and cost - bound > RESOLUTION * cost:
            tried = bound + share * (cost - bound)
            refutation.restore(known if tried <= known.within else top)
            refuted = refutation.refutes(tried)
            if refuted is False:
                refuted = refutation.shaves(tried, draw, most)
            if refuted is None:
                return
            if refuted:
                yield refutation.bound(tried)
                bound = tried
                share = min(0.5, 2 * share)
            else:
                known = refutation.known()
                share /= 3


def _lengths(instance: Instance) -> FloatArray:
    """Of every kind and stage, shape (3, S); as in :mod:`zbsolve.bounds.device_states`."""
    return np.array([pass_lengths(stage) for stage in instance.stages]).T


def _arcs(instance: Instance, lags: tuple[Lag, ...]) -> tuple[NDArray[np.int64], FloatArray]:
    """:func:`zbsolve.bounds.arcs.pass_arcs` task by task, as :func:`follow` takes them."""
    S, m = instance.num_stages, instance.num_microbatches
    lengths = _lengths(instance)
    leading: dict[Job, list[tuple[Arc, float]]] = {job: [] for job in pass_order(instance)}
    for arc in pass_arcs(instance, lags):
        kind, s = arc.before
        leading[arc.after].append((arc, arc.between_starts(float(lengths[CODE[kind], s]))))
    pairs: list[tuple[int, int]] = []
    apart: list[float] = []
    for j in range(m):
        for (kind, s), into in leading.items():
            for arc, length in into:
                if j >= arc.distance:
                    before, q = arc.before
                    first = (CODE[before] * S + q) * m + j - arc.distance
                    pairs.append((first, (CODE[kind] * S + s) * m + j))
                    apart.append(length)
    return np.array(pairs, dtype=np.int64), np.array(apart)
