"""PyTorch's pipeline-schedule CSV (its "compute only" grammar): written exactly, read strictly.

Row k is rank k; there is no header; a cell is ``<stage><op><micro-batch>`` with torch's letters: ``F``
forward, ``I`` input-gradient backward (our B), ``W`` weight-gradient backward (our W), ``B`` full backward
(our BW). An empty cell is idle time. torch's own loader accepts duplicates, micro-batches that do not exist
and trailing text in a cell; this one refuses each, naming row and cell.

Not modelled: torch's overlapped, sharding and communication cells (they are refused by name). The format
carries neither times nor memory, so that reading it needs the instance that it is meant for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from zbsolve.errors import InputError
from zbsolve.graph import BW, B, F, Task, TaskKind, W
from zbsolve.instance import Instance

TO_TORCH = {F: "F", B: "I", W: "W", BW: "B"}
FROM_TORCH = {letter: kind for kind, letter in TO_TORCH.items()}

_CELL = re.compile(r"(0|[1-9][0-9]{0,8})([FIWB])(0|[1-9][0-9]{0,8})")
_OTHER_TORCH_OPS = re.compile(r"UNSHARD|RESHARD|REDUCE_GRAD|SEND_[FB]|RECV_[FB]|OVERLAP_F_B")


def export_torch_csv(instance: Instance, orders: Sequence[Sequence[Task]]) -> str:
    """The orders of all devices as text that torch 2.6 and later load with format "compute_only".

    Raises
    ------
    InputError
        When the last stage does not take its forwards in micro-batch order: torch looks losses up by
        position there, and would train on wrong gradients without a word. Also for recomputation and several
        replicas, for which the format has no words. F&B pairs are written one after the other.
    """
    for used, option in (
        (instance.recomputes, "recomputation (t_r)"),
        (instance.replicas > 1, "several replicas"),
    ):
        if used:
            raise InputError(f"torch-csv: the format has no {option}: give a plan of an instance without")
    last = instance.num_stages - 1
    for order in orders:
        forwards = [task.microbatch for task in order if task.kind is F and task.stage == last]
        if forwards != sorted(forwards):
            raise InputError(
                f"torch-csv: the last stage (stage {last}) runs its F's in the order {_shown(forwards)}: "
                "torch needs 0, 1, 2, … there (it pairs losses by position): reorder the micro-batches"
            )
    rows = (
        ",".join(f"{task.stage}{TO_TORCH[task.kind]}{task.microbatch}" for task in order) for order in orders
    )
    return "".join(f"{row}\n" for row in rows)


def import_torch_csv(text: str, instance: Instance, where: str = "csv") -> tuple[tuple[Task, ...], ...]:
    """The order of each device's tasks. Errors name row (from 0: the rank) and cell (from 1).

    Parameters
    ----------
    text : str
        The file's text.
    instance : Instance
        Says how many ranks, stages and micro-batches there are, which rank holds which stage,
        and which stages may run a full backward (``t_bw``).
    where : str
        Begins each error line (a file name).
    """
    rows = text.removesuffix("\n").split("\n")
    if len(rows) != instance.num_devices:
        blank = next((number for number, row in enumerate(rows) if not row.strip()), None)
        hint = "" if blank is None else f" (row {blank} is blank: torch counts it as a rank; remove it)"
        raise InputError(
            f"{where}: {len(rows)} rows for {instance.num_devices} devices{hint}: "
            "give one row per rank, no header"
        )
    seen: dict[Task, str] = {}
    orders = []
    for rank, row in enumerate(rows):
        order = []
        for column, cell in enumerate(row.rstrip("\r").split(","), start=1):
            if not cell.strip():
                continue  # idle
            place = f"row {rank}, cell {column}"
            task = _parse_cell(cell.strip(" "), instance, rank, f"{where}: {place}")
            if task in seen:
                raise InputError(f"{where}: {place}: {cell.strip()} was already in {seen[task]}: keep one")
            seen[task] = place
            order.append(task)
        orders.append(tuple(order))
    _require_complete(seen, instance, where)
    return tuple(orders)


def _parse_cell(cell: str, instance: Instance, rank: int, where: str) -> Task:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise InputError(f"{where}: {_why_not(cell)}")
    kind = FROM_TORCH[match[2]]
    stage, microbatch = int(match[1]), int(match[3])
    if stage >= instance.num_stages:
        raise InputError(
            f"{where}: {cell}: no stage {stage}: the instance has 0 to {instance.num_stages - 1}"
        )
    if microbatch >= instance.num_microbatches:
        raise InputError(
            f"{where}: {cell}: no micro-batch {microbatch}: "
            f"the instance has 0 to {instance.num_microbatches - 1}"
        )
    home = instance.stages[stage].device
    if home != rank:
        raise InputError(
            f"{where}: {cell}: stage {stage} is on device {home} in the instance: move it to row {home}, "
            "or use an instance with this placement"
        )
    if kind is BW and instance.stages[stage].t_bw is None:
        raise InputError(
            f"{where}: {cell}: a full backward, and stage {stage} has no t_bw: "
            "add t_bw to the instance, or use I and W"
        )
    return Task(kind, stage, microbatch)


def _why_not(cell: str) -> str:
    if _CELL.fullmatch(cell.upper()):
        return f"{cell!r}: lower case: write {cell.upper()}"
    other = _OTHER_TORCH_OPS.search(cell)
    if other is not None:
        return f"{cell!r}: {other[0]} is not supported: export the compute-only schedule (F, I, W, B)"
    return f"{cell!r} is not a task: write <stage><F|I|W|B><micro-batch>, such as 0F0"


def _require_complete(seen: dict[Task, str], instance: Instance, where: str) -> None:
    for stage, data in enumerate(instance.stages):
        for microbatch in range(instance.num_microbatches):
            have = {kind for kind in TaskKind if Task(kind, stage, microbatch) in seen}
            if have in ({F, B, W}, {F, BW}):
                continue
            prefix = f"{where}: row {data.device}: stage {stage} micro-batch {microbatch}"
            if BW in have and have & {B, W}:
                raise InputError(
                    f"{prefix} has B beside I or W: B is the full backward: keep one or the others"
                )
            needed = (F, BW) if BW in have else (F, B, W)
            missing = [f"{stage}{TO_TORCH[kind]}{microbatch}" for kind in needed if kind not in have]
            raise InputError(f"{prefix}: {' and '.join(missing)} missing: add it")


def _shown(values: Sequence[int]) -> str:
    head = ", ".join(map(str, values[:6]))
    return head + (", …" if len(values) > 6 else "")
