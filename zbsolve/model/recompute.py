"""Recomputation folded into the backward: an instance without R that stands for "R right before B".

Orders in which every R comes right before its B or BW are orders of the folded instance, whose backwards are
longer by t_r, with the same memory at every task. So generators and searches that know nothing of R plan
recomputing stages, too. Run for real, such orders end no later: R need not wait for the gradient as its
backward does. What they leave out is an R even earlier, in a gap between other tasks, at the price of holding
mem_b longer: no bound of the folded instance holds. What does hold is every bound of the instance whose R's
take no time (:func:`instant_recomputation`).
"""

from __future__ import annotations

from collections.abc import Iterable

from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance, Stage
from zbsolve.model.kinds import BW, B, R


def fold(instance: Instance) -> Instance:
    """The instance with t_r added to t_b and t_bw, and memory to match; itself where nothing recomputes."""
    if not instance.recomputes:
        return instance
    return instance.with_changes(stages=[folded(stage) for stage in instance.stages])


def instant_recomputation(instance: Instance) -> Instance:
    """The instance with every R left out: what its backward needs is there as soon as it starts.

    Deleting the R's from a schedule gives one of this instance, at the same times: F keeps ``mem_r``, until
    the backward starts, and the backward holds as much as with an R right before it. So nothing holds more
    than it did, and every bound of this instance holds wherever the R's are.
    """
    if not instance.recomputes:
        return instance
    stages = tuple(
        stage if stage.t_r is None else folded(stage.model_copy(update={"t_r": 0.0}))
        for stage in instance.stages
    )
    return instance.model_copy(update={"stages": stages})


def folded(stage: Stage) -> Stage:
    """One stage with its R folded into its backward."""
    if stage.t_r is None:
        return stage
    # While R and B run, max(mem_b, mem_w) + peak_b is held; the folded B accounts for max(mem_r, mem_w) of it
    # by its own growth over mem_r. BW never holds mem_w.
    more = max(stage.mem_b, stage.mem_w) - max(stage.mem_r, stage.mem_w)
    return stage.model_copy(
        update={
            "t_r": None,
            "mem_r": 0.0,
            "t_b": stage.t_r + stage.t_b,
            "t_bw": None if stage.t_bw is None else stage.t_r + stage.t_bw,
            "mem_b": stage.mem_r,
            "peak_b": more + stage.peak_b,
            "peak_bw": stage.mem_b - stage.mem_r + stage.peak_fused,
        }
    )


def unfold(instance: Instance, orders: Iterable[Iterable[Task]]) -> tuple[tuple[Task, ...], ...]:
    """Orders of the folded instance as orders of ``instance``: each R right before its B or BW."""
    return tuple(
        tuple(
            each
            for task in order
            for each in (
                (task._replace(kind=R), task)
                if task.kind in (B, BW) and instance.stages[task.stage].t_r is not None
                else (task,)
            )
        )
        for order in orders
    )
