"""Memory of a run, op by op, against its plan's curve and the cap.

Op by op, levels after each op are compared, static memory included: what an op needs only while it runs is
in neither. A device's highest memory, which is held against its cap, has that as well: planned (``peak_*``)
and, where the trace has it, measured. On CPU the measured level is what autograd saved plus what was put
aside, and while an op runs the tensors that it makes; on CUDA it is the allocator's.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbsolve.errors import InputError
from zbsolve.model.graph import Task
from zbsolve.model.memory import memory_curve
from zbsolve.model.tolerances import MEASURED_MEMORY_RTOL
from zbsolve.plan.plan import Plan
from zbsolve.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One device: highest memory planned and measured, and the op after which levels are farthest apart.

    ``excess`` is measured minus planned there, in the instance's memory unit; ``over_cap`` by how much the
    highest measured memory exceeds the device's cap (0 when it does not, or there is none).
    """

    device: int
    planned: float
    measured: float
    worst: Task | None
    excess: float
    over_cap: float

    @property
    def alarm(self) -> bool:
        """Whether the device held more than its cap allows."""
        return self.over_cap > MEASURED_MEMORY_RTOL * self.measured


def compare_memory(plan: Plan, trace: Trace) -> list[MemoryRow]:
    """A row a device; empty when the run held nothing real.

    Raises
    ------
    InputError
        The trace has another number of ops than the plan.
    """
    if trace.memory is None:
        return []
    rows = []
    instance, schedule = plan.instance, plan.schedule()
    for device, (order, levels) in enumerate(zip(schedule.orders, trace.memory, strict=True)):
        curve = memory_curve(instance, device, order, schedule.pairs)
        planned = [point.after for point in curve]
        if len(levels) != len(planned):
            raise InputError(
                f"device {device} has {len(levels)} memory levels in the trace and {len(planned)} ops in "
                "the plan: give the plan that was run"
            )
        differences = [measured - due for measured, due in zip(levels, planned, strict=True)]
        worst = max(range(len(order)), key=lambda i: abs(differences[i]), default=None)
        during = levels if trace.memory_during is None else trace.memory_during[device]
        highest = max((*levels, *during), default=0.0)
        cap = instance.cap(device)
        rows.append(
            MemoryRow(
                device=device,
                planned=max((point.during for point in curve), default=instance.static(device)),
                measured=highest,
                worst=None if worst is None else order[worst],
                excess=0.0 if worst is None else differences[worst],
                over_cap=max(0.0, highest - cap),
            )
        )
    return rows
