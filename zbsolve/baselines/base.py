"""What a baseline is, and the rules several of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zbsolve.errors import InputError
from zbsolve.graph import F, Task
from zbsolve.instance import Instance
from zbsolve.schedule import Schedule
from zbsolve.simulator import simulate

DeviceOrders = tuple[tuple[Task, ...], ...]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A hand-made schedule: from an instance to the exact order of tasks on each device.

    ``orders`` raises ``InputError`` with the rule that an instance does not meet. It does not look at the
    memory cap: whether the result fits is for the caller to check. A schedule with ``fused`` backward is
    timed on ``instance.with_fused_backward()``; an ``automatic`` one brings its own memory cap.
    """

    name: str
    summary: str
    source: str
    orders: Callable[[Instance], DeviceOrders]
    fused: bool = False
    automatic: bool = False

    def prepared(self, instance: Instance) -> tuple[Instance, DeviceOrders]:
        """The instance on which the schedule runs, and its orders there."""
        timed_on = instance.with_fused_backward() if self.fused else instance
        return timed_on, self.orders(timed_on)

    def schedule(self, instance: Instance) -> tuple[Instance, Schedule]:
        """The instance on which the schedule runs, and its times (earliest starts)."""
        timed_on, orders = self.prepared(instance)
        return timed_on, simulate(timed_on, orders)


def require_linear(instance: Instance, name: str) -> None:
    """One stage per device, in model order."""
    if [stage.device for stage in instance.stages] != list(range(instance.num_devices)):
        raise InputError(f"{name} needs the linear placement: one stage per device, stage s on device s")


def chunks_in_loop(instance: Instance, name: str) -> int:
    """v of a loop placement (stage s on device s mod p)."""
    p = instance.num_devices
    v, rest = divmod(instance.num_stages, p)
    if rest or [stage.device for stage in instance.stages] != list(range(p)) * v:
        raise InputError(f"{name} needs the loop placement: stage s on device s mod p, as many on each")
    return v


def require_v(instance: Instance, name: str) -> None:
    """Two stages per device in a V: device d holds stages d and 2p - 1 - d."""
    p = instance.num_devices
    if [stage.device for stage in instance.stages] != [*range(p), *reversed(range(p))]:
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
