"""What a baseline is, and the rules several of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zbsolve.errors import InputError
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance, Placement
from zbsolve.model.kinds import BW, B, F, R, W
from zbsolve.model.memory import NO_PAIRS, Pairs
from zbsolve.model.recompute import fold, unfold
from zbsolve.model.schedule import Schedule
from zbsolve.model.simulator import simulate_for

DeviceOrders = tuple[tuple[Task, ...], ...]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A hand-made schedule: from an instance to the exact order of tasks on each device.

    ``orders`` raises ``InputError`` with the rule that an instance does not meet. It does not look at the
    memory cap: whether the result fits is for the caller to check. A schedule is timed on ``adapt(instance)``
    where it has one (GPipe with its backward fused, DualPipe with two replicas), which raises likewise; an
    ``automatic`` one brings its own memory cap. ``placement`` is the one that it needs (None: any), which
    :mod:`zbsolve.model.recut` can make of another. ``pairs`` says which of the orders' neighbours F and BW
    run overlapped. ``seconds_a_task`` is about what the generator takes, by which a search under a limit
    decides whether it has time for it. Recomputation is no generator's business: R comes right before its
    backward.
    """

    name: str
    summary: str
    source: str
    orders: Callable[[Instance], DeviceOrders]
    adapt: Callable[[Instance], Instance] | None = None
    pairs: Callable[[Instance], Pairs] | None = None
    placement: Placement | None = None
    automatic: bool = False
    seconds_a_task: float = 5e-6

    def prepared(self, instance: Instance) -> tuple[Instance, DeviceOrders]:
        """The instance on which the schedule runs, and its orders there."""
        timed_on = instance if self.adapt is None else self.adapt(instance)
        return timed_on, unfold(timed_on, self.orders(fold(timed_on)))

    def schedule(self, instance: Instance, objective: str = "makespan") -> tuple[Instance, Schedule]:
        """The instance on which the schedule runs, and its best times there for the objective."""
        timed_on, orders = self.prepared(instance)
        pairs = NO_PAIRS if self.pairs is None else self.pairs(timed_on)
        return timed_on, simulate_for(timed_on, orders, objective, pairs)


def orders_for(instance: Instance, timed_on: Instance, orders: DeviceOrders) -> DeviceOrders | None:
    """Orders of a schedule that was made for ``timed_on``, for an instance; None where that is another model.

    A BW is taken apart where the stage has no ``t_bw``. R comes right before its backward where the stage
    recomputes, and nowhere else: a schedule may recompute more stages, or fewer.
    """

    def shape(of: Instance) -> tuple[object, ...]:
        return of.replicas, of.num_microbatches, [stage.device for stage in of.stages]

    if shape(timed_on) != shape(instance):
        return None
    bare = (
        tuple(each for task in order if task.kind is not R for each in _split_where_needed(instance, task))
        for order in orders
    )
    return unfold(instance, bare)


def _split_where_needed(instance: Instance, task: Task) -> tuple[Task, ...]:
    if task.kind is BW and instance.stages[task.stage].t_bw is None:
        return task._replace(kind=B), task._replace(kind=W)
    return (task,)


def fused(instance: Instance) -> Instance:
    """Schedules of the years before the split run BW."""
    return instance.with_fused_backward()


def is_linear(instance: Instance) -> bool:
    """Whether stage s is device s's only one, of one replica."""
    devices = [stage.device for stage in instance.stages]
    return instance.replicas == 1 and devices == list(range(instance.num_devices))


def require_linear(instance: Instance, name: str) -> None:
    """One stage per device, in model order, one replica."""
    if not is_linear(instance):
        raise InputError(f"{name} needs the linear placement: one stage per device, stage s on device s")


def chunks_in_loop(instance: Instance, name: str) -> int:
    """v of a loop placement (stage s on device s mod p)."""
    p = instance.num_devices
    v, rest = divmod(instance.num_stages, p)
    if rest or instance.replicas > 1 or [stage.device for stage in instance.stages] != list(range(p)) * v:
        raise InputError(f"{name} needs the loop placement: stage s on device s mod p, as many on each")
    return v


def require_v(instance: Instance, name: str) -> None:
    """Two stages per device in a V: device d holds stages d and 2p - 1 - d."""
    p = instance.num_devices
    devices = [stage.device for stage in instance.stages]
    if instance.replicas > 1 or devices != [*range(p), *reversed(range(p))]:
        raise InputError(f"{name} needs the V placement: device d of p holds stages d and 2p - 1 - d")


def one_forward_one_backward(
    forwards: Sequence[Task], backwards: Sequence[Sequence[Task]], warmup: int
) -> tuple[Task, ...]:
    """``warmup`` forwards, then a backward and a forward in turn, then the rest of the backwards."""
    warmup = min(warmup, len(forwards))
    order = list(forwards[:warmup])
    for index, backward in enumerate(backwards):
        order += backward
        if warmup + index < len(forwards):
            order.append(forwards[warmup + index])
    return tuple(order)


def forwards_of(instance: Instance, stage: int) -> list[Task]:
    """F of a stage for every micro-batch, in order."""
    return [Task(F, stage, j) for j in range(instance.num_microbatches)]
