"""All arguments for lower bounds on makespan and span, and why they may assume micro-batches in order.

Each argument has its proof in its own file. Every bound is valid for every schedule that
:func:`zbsolve.model.judge.check` accepts, with unrounded durations and exactly kept times. (For rounding, the
checker lets each single time be off by 1e-9 of the makespan; a schedule that used this on every task of a
long chain could end that much a task below a bound. Orders that are timed anew never do.) A certificate
carries the argument's name, so that anyone can go through it again.

Canonical order: the proofs assume that each stage takes the micro-batches in order: its F's, its R's, its
backwards (B or BW), its W's. Take any valid schedule and an order of all its tasks that keeps its times, its
devices' orders and its dependencies. On each stage hand the n-th F to micro-batch n, likewise the n-th R and
the n-th backward, and the n-th W to the micro-batch of the n-th B. If every micro-batch's a ends before its b
starts (by a lag), then so does the n-th a before the n-th b: the first n b's have n a's before them, the last
of which is no earlier than the n-th a. So each dependency is kept. Tasks of one kind and stage are equally
long and hold equally much: neither times nor memory change, and the relabelled schedule is valid at the same
cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from zbsolve.bounds.argument import Argument, Known, OneDeviceArgument
from zbsolve.bounds.arguments.device_orders import DeviceOrders
from zbsolve.bounds.arguments.last_forward import LastForward
from zbsolve.bounds.arguments.memory_area import MemoryArea
from zbsolve.bounds.arguments.one_machine import OneMachine
from zbsolve.bounds.arguments.proven_lags import ProvenLags
from zbsolve.bounds.arguments.two_windows import TwoWindows
from zbsolve.bounds.arguments.unpaired_windows import UnpairedWindows
from zbsolve.bounds.arguments.work_and_way import WorkAndWay
from zbsolve.bounds.bound import Bound
from zbsolve.model.instance import Instance

# One line each. Of equal bounds that of the first is named.
ARGUMENTS: tuple[Argument, ...] = (
    TwoWindows(),
    MemoryArea(),
    WorkAndWay(),
    UnpairedWindows(),
    OneMachine(),
    LastForward(),
    ProvenLags(),
    DeviceOrders(),
)
# What may be asked of a device whose others are still open, as (instance, device, objective).
ONE_DEVICE_BOUNDS: tuple[Callable[[Instance, int, str], Bound | None], ...] = tuple(
    argument.of_device for argument in ARGUMENTS if isinstance(argument, OneDeviceArgument)
)


def bounds_from(known: Known) -> Iterator[Bound]:
    """Every bound that what is known of an instance gives; once there is no more time, the cheap ones."""
    applying = [argument for argument in ARGUMENTS if argument.applies(known.instance)]
    for argument in applying:
        if not argument.reads_paths:
            yield from argument.bounds(known)
    if known.enough():
        return
    for argument in applying:
        if argument.reads_paths:
            yield from argument.bounds(known)


def bounds_from_lags(known: Known) -> Iterator[Bound]:
    """Only those that may have grown with the lags that are known."""
    for argument in ARGUMENTS:
        if argument.rests_on_lags and argument.applies(known.instance):
            yield from argument.bounds(known)


def highest(bounds: Iterable[Bound]) -> Bound:
    """The one of highest value, the first of equals."""
    return max(bounds, key=lambda bound: bound.value)


def all_bounds(
    instance: Instance, objective: str, enough: Callable[[], bool] = lambda: False
) -> Iterator[Bound]:
    """Every bound from an instance alone; once ``enough`` says yes, the cheap ones."""
    return bounds_from(Known(instance, objective, enough=enough))


def best_bound(instance: Instance, objective: str, enough: Callable[[], bool] = lambda: False) -> Bound:
    """The highest of :func:`all_bounds`."""
    return highest(all_bounds(instance, objective, enough))
