"""What an argument for a lower bound is: when it applies, what it proves, how its evidence is gone through.

An argument is a file in :mod:`zbsolve.bounds.arguments` and a line in :mod:`zbsolve.bounds.catalogue`. All
that asks for bounds goes through that list: the solver, the joint search, and whoever checks a plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from zbsolve.bounds.bound import Bound
from zbsolve.bounds.waits import Lag, LeastTime
from zbsolve.bounds.windows import Windows, windows
from zbsolve.model.instance import Instance
from zbsolve.model.tolerances import OPTIMAL_GAP


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Known:
    """What arguments share about an instance, each fact computed once, when it is first asked for.

    Attributes
    ----------
    lags : tuple of Lag
        Proven of the instance.
    cost : float, optional
        Of some schedule, where one is known: arguments by trial look below it.
    enough : callable
        Once it says yes, what is under way says less, in less time.
    """

    instance: Instance
    objective: str
    lags: tuple[Lag, ...] = ()
    cost: float | None = None
    enough: Callable[[], bool] = _never
    computed: dict[tuple[Lag, ...], Windows] = field(default_factory=dict, repr=False, compare=False)

    def windows(self, lags: tuple[Lag, ...] = ()) -> Windows:
        """Longest paths, with these lags; computed anew where they were cut short and there is time now."""
        found = self.computed.get(lags)
        if found is None or not (found.in_full or self.enough()):
            found = self.computed[lags] = windows(self.instance, lags, self.enough)
        return found

    def with_lags(self, lags: tuple[Lag, ...]) -> Known:
        """With these lags; what was computed is handed on."""
        return replace(self, lags=lags)

    def limited(self, enough: Callable[[], bool]) -> Known:
        """The same for who has not the time for everything; what was computed is shared."""
        return replace(self, enough=enough)


class Evidence(NamedTuple):
    """What a plan file states: a bound, by which method, and what it rests on.

    ``lags_proven`` tells whether all of its lags were proven anew: those that were are in
    :attr:`Known.lags`. ``seconds`` is how long an argument may take to go through the rest.
    """

    method: str
    value: float
    lags: tuple[Lag, ...]
    shaved: tuple[LeastTime, ...]
    lags_proven: bool
    seconds: float


class Replay(NamedTuple):
    """What an argument proves anew, and whether it was gone through in full: what it lacks then is false."""

    bounds: tuple[Bound, ...]
    gone_through: bool = True


class Argument(ABC):
    """One way to prove lower bounds, known by its name: to certificates and in ``docs/proofs.md``."""

    name: ClassVar[str]
    # Whether it needs longest paths, which take long for a large instance: left out where time is short.
    reads_paths: ClassVar[bool] = False
    # Whether its bounds may rest on lags proven elsewhere.
    rests_on_lags: ClassVar[bool] = False

    @abstractmethod
    def applies(self, instance: Instance) -> bool:
        """Whether its proof holds for an instance."""

    @abstractmethod
    def bounds(self, known: Known) -> Iterator[Bound]:
        """What it proves of an instance that it applies to."""

    def replay(self, known: Known, evidence: Evidence) -> Replay:
        """What it proves again of a plan's instance; by default, all from the instance alone."""
        return Replay(tuple(self.bounds(known)))


class OneDeviceArgument(Argument):
    """An argument that reads nothing of other devices but how long the ways through them are.

    These are the sums of F's, backwards and hops before the device's first stage, between its stages, and on
    from its last one and back. Families of joint decisions stand on it
    (:mod:`zbsolve.partition.relaxation`): there the others are free, and each such way is put in as one
    stage. An argument that reads more of them (their work, their memory, how many there are) holds for an
    instance but not there, and is not of this class. ``tests/test_one_device_bounds.py`` watches over that.
    """

    @abstractmethod
    def of_device(self, instance: Instance, device: int, objective: str) -> Bound | None:
        """What it proves from one device; None where that says nothing."""

    def bounds(self, known: Known) -> Iterator[Bound]:
        """Device by device."""
        for device in range(known.instance.num_devices):
            bound = self.of_device(known.instance, device, known.objective)
            if bound is not None:
                yield bound


def reach(value: float) -> float:
    """The highest stated value that float64 rounding lets pass for ``value``."""
    return value + OPTIMAL_GAP * abs(value)
