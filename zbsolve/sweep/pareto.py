"""Which configurations nobody beats in both of two costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zbsolve.sweep.run import Result

Cost = Callable[[Result], float]


def time_per_sample(row: Result) -> float:
    """Step divided by the samples in it: comparable whatever the batch."""
    return row[1].per_sample


def peak_memory(row: Result) -> float:
    """Memory of the device that holds most."""
    return row[1].peak_memory


def num_devices(row: Result) -> float:
    """Devices of all replicas."""
    return float(row[0].p * row[0].d)


def pareto_front(rows: Sequence[Result], first: Cost, second: Cost) -> list[Result]:
    """Rows that no other is at least as good as in both costs (the first of equal ones), by ``first``."""
    fitting = [row for row in rows if row[1].status == "ok"]
    front: list[Result] = []
    for row in sorted(fitting, key=lambda row: (first(row), second(row))):
        if not front or second(row) < second(front[-1]):
            front.append(row)
    return front
