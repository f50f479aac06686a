"""Micro-batches relabelled so that each stage takes them in order."""

from __future__ import annotations

from collections.abc import Sequence

from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import B, F, W

Orders = tuple[tuple[Task, ...], ...]


# --- common steps of every formulation ---------------------------------------------------------


def canonical(instance: Instance, orders: Sequence[Sequence[Task]]) -> Orders:
    """The same orders with the micro-batches of every stage renamed so that they come in order.

    Micro-batches are identical, so renaming changes neither memory nor any end time for the worse: the
    k-th F, the k-th backward (B or BW) and the W of the k-th B of a stage go to its k-th micro-batch.
    """
    renamed: list[tuple[Task, ...]] = []
    for order in orders:
        forwards = [0] * instance.num_stages
        backwards = [0] * instance.num_stages
        split: list[list[int]] = [[] for _ in range(instance.num_stages)]
        weights = [0] * instance.num_stages
        device_order = []
        for kind, s, _ in order:
            if kind is F:
                j = forwards[s]
                forwards[s] += 1
            elif kind is W:
                j = split[s][weights[s]]
                weights[s] += 1
            else:
                j = backwards[s]
                backwards[s] += 1
                if kind is B:
                    split[s].append(j)
            device_order.append(Task(kind, s, j))
        renamed.append(tuple(device_order))
    return tuple(renamed)
