"""PyTorch's pipeline-schedule CSV, both of its grammars, written exactly.

Row k is rank k; there is no header; a cell is ``<stage><op><micro-batch>`` with torch's letters: ``F``
forward, ``I`` input-gradient backward (our B), ``W`` weight-gradient backward (our W), ``B`` full backward
(our BW). ``(0F7;7B3)OVERLAP_F_B`` is an F&B pair. An empty cell is idle time. "compute_only" files hold
nothing else; "compute_comms" files are lowered: they also hold ``SEND_F``, ``RECV_F``, ``SEND_B`` and
``RECV_B`` (named by the stage that executes them), ``REDUCE_GRAD``, and ``UNSHARD`` and ``RESHARD`` for
sharded stages.

This module says what the format is and writes it; :mod:`zbsolve.plan.torch_csv_reading` reads it.

Not modelled: several replicas (torch refuses a stage on two ranks). A recomputation R has no cell: torch
runs it inside the backward of a checkpointed stage, so R's are left out of a file and put right before their
backward when one is read. The format carries neither times nor memory, so that reading it needs the instance
that it is meant for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from zbsolve.errors import InputError
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import (
    BW,
    TABLE,
    F,
    R,
    W,
)
from zbsolve.model.memory import NO_PAIRS, Pairs
from zbsolve.model.recompute import unfold
from zbsolve.model.schedule import Schedule
from zbsolve.model.simulator import simulate
from zbsolve.model.tolerances import time_tolerance
from zbsolve.plan.actions import Program, task_of
from zbsolve.plan.lowering import lower

Grammar = Literal["compute_only", "compute_comms"]

# The first torch that reads a file: with F, I, W, B alone; with OVERLAP_F_B; with REDUCE_GRAD.
PLAIN_SINCE, PAIRS_SINCE, LOWERED_SINCE = "2.6", "2.9", "2.10"


@dataclass(frozen=True, slots=True)
class TorchCsv:
    """A file's text, and what its reader should know: one line each."""

    text: str
    notes: tuple[str, ...]


def export_torch_csv(
    instance: Instance, schedule: Schedule, *, grammar: Grammar = "compute_only", with_pairs: bool = True
) -> TorchCsv:
    """The orders of all devices as text that torch loads.

    Parameters
    ----------
    grammar : "compute_only" or "compute_comms"
        Whether torch adds the messages, or the file holds the plan's own, in the plan's order.
    with_pairs : bool
        Whether F&B pairs are written as such; else one half after the other, for torch before 2.9.

    Raises
    ------
    InputError
        When the last stage does not take its forwards in micro-batch order: torch looks losses up by
        position there, and would train on wrong gradients without a word. Also for several replicas.
    """
    refuse_replicas(instance, "torch-csv")
    last = instance.num_stages - 1
    for order in schedule.orders:
        forwards = [task.microbatch for task in order if task.kind is F and task.stage == last]
        if forwards != sorted(forwards):
            raise InputError(
                f"torch-csv: the last stage (stage {last}) runs its F's in the order {_shown(forwards)}: "
                "torch needs 0, 1, 2, … there (it pairs losses by position): reorder the micro-batches"
            )
    pairs: Pairs = schedule.pairs if with_pairs else NO_PAIRS
    if grammar == "compute_only":
        rows = [_cells(order, pairs) for order in schedule.orders]
    else:
        rows = [_lowered_cells(instance, program, pairs) for program in lower(instance, schedule)]
    text = "".join(",".join(row) + "\n" for row in rows)
    return TorchCsv(text, tuple(_export_notes(instance, schedule, grammar, pairs)))


def refuse_replicas(instance: Instance, where: str) -> None:
    """Raise ``InputError``; ``where`` begins the error line."""
    if instance.replicas > 1:
        raise InputError(
            f"{where}: {instance.replicas} replicas: torch has no stage on two ranks: give an instance of one"
        )


def _cells(order: Sequence[Task], pairs: Pairs) -> Iterator[str]:
    """Compute cells of one device."""
    second_of = dict(pairs)
    seconds = set(second_of.values())
    for task in order:
        if task.kind is R or task in seconds:
            continue
        second = second_of.get(task)
        yield _cell(task) if second is None else f"({_cell(task)};{_cell(second)})OVERLAP_F_B"


def _cell(task: Task) -> str:
    return f"{task.stage}{TABLE[task.kind].torch}{task.microbatch}"


def _lowered_cells(instance: Instance, program: Program, pairs: Pairs) -> Iterator[str]:
    """Compute, messages, and each stage's REDUCE_GRAD once its last backward has run and sent."""
    second_of = dict(pairs)
    seconds = set(second_of.values())
    left = dict.fromkeys(instance.stages_on(program.device), instance.num_microbatches)
    done: list[int] = []  # stages whose gradients are whole
    for action in program.actions:
        if not action.is_compute:
            yield f"{action.stage}{action.op}{action.microbatch}"
            continue
        task = task_of(action)
        if task.kind in (W, BW):
            left[task.stage] -= 1
        if task not in seconds:
            yield from (f"{stage}REDUCE_GRAD" for stage in done)
            done.clear()
            yield from _cells((task,), pairs)
        if task.kind in (W, BW) and left[task.stage] == 0:
            done.append(task.stage)
    yield from (f"{stage}REDUCE_GRAD" for stage in done)


def _export_notes(instance: Instance, schedule: Schedule, grammar: Grammar, pairs: Pairs) -> Iterator[str]:
    if grammar == "compute_comms":
        yield f'torch {LOWERED_SINCE} and later read it with _load_csv(file, format="compute_comms")'
    elif pairs:
        yield f"torch {PAIRS_SINCE} and later read it; --without-pairs writes for {PLAIN_SINCE} and later"
    else:
        yield f"torch {PLAIN_SINCE} and later read it"
    if pairs:
        yield (
            f"{len(pairs)} F&B pairs as OVERLAP_F_B: torch overlaps them by a function of yours "
            "(register_custom_function), else runs one half after the other"
        )
    makespan = simulate(instance, schedule.orders, schedule.pairs).makespan

    def change(read: float) -> str:
        if abs(read - makespan) <= time_tolerance(makespan):
            return ""
        return f" (makespan {makespan:.6g} becomes {read:.6g})"

    if apart := len(schedule.pairs) - len(pairs):
        yield f"{apart} F&B pairs one half after the other" + change(
            simulate(instance, schedule.orders).makespan
        )
    recomputations = sum(timed.task.kind is R for timed in schedule)
    if recomputations:
        folded = unfold(instance, ([t for t in order if t.kind is not R] for order in schedule.orders))
        yield (
            f"left out: {recomputations} R: torch recomputes inside the backward of a checkpointed stage"
            + (change(simulate(instance, folded, pairs).makespan))
        )


def _shown(values: Sequence[int]) -> str:
    head = ", ".join(map(str, values[:6]))
    return head + (", …" if len(values) > 6 else "")
