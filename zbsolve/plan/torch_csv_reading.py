"""Reading PyTorch's pipeline-schedule CSV (:mod:`zbsolve.plan.torch_csv` says what stands in it), strictly.

torch's own loader accepts duplicates, micro-batches that do not exist, trailing text in a cell, and messages
in orders that hand the wrong data over; this one refuses each, naming row and cell. A plan has messages of
its own, and no sharding: those cells are checked, left out and counted. Recomputations R, which have no cell,
are put right before their backward.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from zbsolve.errors import InputError
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance
from zbsolve.model.kinds import (
    BW,
    TABLE,
    B,
    F,
    TaskKind,
    W,
)
from zbsolve.model.memory import Pairs
from zbsolve.model.recompute import unfold
from zbsolve.plan.actions import MESSAGE_OPS, Action, Op, Program
from zbsolve.plan.lowering import dry_run
from zbsolve.plan.torch_csv import refuse_replicas

Orders = tuple[tuple[Task, ...], ...]

FROM_TORCH = {row.torch: kind for kind, row in TABLE.items() if row.torch is not None}

_NUMBER = "(0|[1-9][0-9]{0,8})"
_TASK = re.compile(f"{_NUMBER}([{''.join(FROM_TORCH)}]){_NUMBER}")
_MESSAGE = re.compile(f"{_NUMBER}({'|'.join(MESSAGE_OPS)}){_NUMBER}")
_SHARDING = re.compile(f"{_NUMBER}(UNSHARD|RESHARD|REDUCE_GRAD)")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class ImportedCsv(NamedTuple):
    """What a file says: each device's order, and the F&B pairs.

    ``notes`` are lines for a person: what of the file was left out or taken apart, and what was added.
    """

    orders: Orders
    pairs: Pairs
    notes: tuple[str, ...]


class _Message(NamedTuple):
    """A SEND or RECV as a cell says it."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


@dataclass(slots=True)
class _Rows:
    """What the cells of a file hold, by rank, and where each was."""

    items: list[list[Task | _Message]] = field(default_factory=list)
    seen: dict[Task | _Message, str] = field(default_factory=dict)
    pairs: set[tuple[Task, Task]] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)
    apart: Counter[str] = field(default_factory=Counter)


def import_torch_csv(text: str, instance: Instance, where: str = "csv") -> ImportedCsv:
    """The order of each device's tasks, and their pairs.

    Errors name row (from 0: the rank) and cell (from 1).

    Parameters
    ----------
    text : str
        The file's text, of either grammar.
    instance : Instance
        Says how many ranks, stages and micro-batches there are, which rank holds which stage,
        which stages may run a full backward (``t_bw``) and pairs (``t_fb``), and which recompute (``t_r``).
    where : str
        Begins each error line (a file name).
    """
    refuse_replicas(instance, where)
    lines = text.removesuffix("\n").split("\n")
    if len(lines) != instance.num_devices:
        blank = next((number for number, line in enumerate(lines) if not line.strip()), None)
        hint = "" if blank is None else f" (row {blank} is blank: torch counts it as a rank; remove it)"
        raise InputError(
            f"{where}: {len(lines)} rows for {instance.num_devices} devices{hint}: "
            "give one row per rank, no header"
        )
    rows = _Rows()
    for rank, line in enumerate(lines):
        rows.items.append([])
        for column, cell in enumerate(line.rstrip("\r").split(","), start=1):
            if cell.strip():  # else idle
                _read_cell(cell.strip(" "), instance, rank, where, f"row {rank}, cell {column}", rows)
    orders = [[item for item in items if isinstance(item, Task)] for items in rows.items]
    _require_complete(rows.seen, instance, where)
    if any(isinstance(item, _Message) for item in rows.seen):
        _require_messages(rows, instance, where)
    return ImportedCsv(unfold(instance, orders), frozenset(rows.pairs), tuple(_import_notes(instance, rows)))


def _read_cell(cell: str, instance: Instance, rank: int, where: str, place: str, rows: _Rows) -> None:
    def note(item: Task | _Message, text: str) -> None:
        if item in rows.seen:
            raise InputError(f"{where}: {place}: {text} was already in {rows.seen[item]}: keep one")
        rows.seen[item] = place
        rows.items[rank].append(item)

    at = f"{where}: {place}"
    pair = _PAIR.fullmatch(cell)
    if pair is not None:
        parts = [part.strip(" ") for part in pair[1].split(";")]
        tasks = [_parse_task(part, instance, rank, at) for part in parts]
        kinds = sorted(task.kind for task in tasks)
        if kinds not in ([B, F], [BW, F]):
            raise InputError(f"{at}: {cell}: a pair is one F and one B (or I), such as (0F1;0B0)OVERLAP_F_B")
        for task, part in zip(tasks, parts, strict=True):
            note(task, part)
        forward, backward = sorted(tasks, key=lambda task: task.kind is not F)
        if backward.kind is B:
            rows.apart["a pair with I is not modelled"] += 1
        elif instance.pair_duration(forward.stage, backward.stage) is None:
            rows.apart["their stages have no t_fb"] += 1
        else:
            rows.pairs.add((forward, backward))
            rows.items[rank][-2:] = [forward, backward]
        return
    if (match := _MESSAGE.fullmatch(cell)) is not None:
        message = _Message(match[2], int(match[1]), int(match[3]))
        _require_place(message.stage, message.microbatch, instance, rank, at, cell)
        _require_needed(message, instance, at)
        note(message, cell)
        rows.left_out[message.op] += 1
        return
    if (match := _SHARDING.fullmatch(cell)) is not None:
        _require_place(int(match[1]), 0, instance, rank, at, cell)
        rows.left_out[match[2]] += 1
        return
    note(_parse_task(cell, instance, rank, at), cell)


def _parse_task(cell: str, instance: Instance, rank: int, at: str) -> Task:
    match = _TASK.fullmatch(cell)
    if match is None:
        raise InputError(f"{at}: {_why_not(cell)}")
    kind = FROM_TORCH[match[2]]
    stage, microbatch = int(match[1]), int(match[3])
    _require_place(stage, microbatch, instance, rank, at, cell)
    if kind is BW and instance.stages[stage].t_bw is None:
        raise InputError(
            f"{at}: {cell}: a full backward, and stage {stage} has no t_bw: "
            "add t_bw to the instance, or use I and W"
        )
    return Task(kind, stage, microbatch)


def _require_place(stage: int, microbatch: int, instance: Instance, rank: int, at: str, cell: str) -> None:
    if stage >= instance.num_stages:
        raise InputError(f"{at}: {cell}: no stage {stage}: the instance has 0 to {instance.num_stages - 1}")
    if microbatch >= instance.num_microbatches:
        raise InputError(
            f"{at}: {cell}: no micro-batch {microbatch}: "
            f"the instance has 0 to {instance.num_microbatches - 1}"
        )
    home = instance.stages[stage].device
    if home != rank:
        raise InputError(
            f"{at}: {cell}: stage {stage} is on device {home} in the instance: move it to row {home}, "
            "or use an instance with this placement"
        )


# Stage at the other end of a message, counted from the one that executes it.
_OTHER_END: Mapping[Op, int] = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}


def _require_needed(message: _Message, instance: Instance, at: str) -> None:
    other = message.stage + _OTHER_END[message.op]
    if not 0 <= other < instance.num_stages:
        raise InputError(f"{at}: {message}: there is no stage {other}: remove it")
    if not instance.crosses(min(message.stage, other)):
        raise InputError(f"{at}: {message}: stages {message.stage} and {other} are on one device: remove it")


def _why_not(cell: str) -> str:
    upper = cell.upper()
    if upper != cell and any(form.fullmatch(upper) for form in (_TASK, _PAIR, _MESSAGE, _SHARDING)):
        return f"{cell!r}: lower case: write {upper}"
    return f"{cell!r} is not a task: write <stage><F|I|W|B><micro-batch>, such as 0F0"


def _require_complete(seen: Mapping[Task | _Message, str], instance: Instance, where: str) -> None:
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
            missing = [f"{stage}{TABLE[kind].torch}{microbatch}" for kind in needed if kind not in have]
            raise InputError(f"{prefix}: {' and '.join(missing)} missing: add it")


def _require_messages(rows: _Rows, instance: Instance, where: str) -> None:
    """Refuse messages that lack a counterpart, come on the wrong side of a task, or can block each other."""
    for microbatch in range(instance.num_microbatches):
        for b in filter(instance.crosses, range(instance.num_stages - 1)):
            for op, stage in (("SEND_F", b), ("RECV_F", b + 1), ("SEND_B", b + 1), ("RECV_B", b)):
                message = _Message(op, stage, microbatch)
                if message not in rows.seen:
                    raise InputError(
                        f"{where}: row {instance.stages[stage].device}: {message} missing: add it, or remove "
                        "every SEND and RECV (a compute-only schedule)"
                    )
    programs = []
    for rank, items in enumerate(rows.items):
        done: set[Task] = set()
        actions: list[Action] = []
        for item in items:
            if isinstance(item, Task):
                for task in unfold(instance, [[item]])[0]:
                    actions.append(_action(task.kind.value, task.stage, task.microbatch))
                done.add(item)
                continue
            kinds = {"SEND_F": (F,), "SEND_B": (B, BW)}.get(item.op)
            if kinds and not any(Task(kind, item.stage, item.microbatch) in done for kind in kinds):
                raise InputError(f"{where}: {rows.seen[item]}: {item} comes before its task: move it behind")
            other = item.stage + _OTHER_END[item.op]
            boundary = min(item.stage, other)
            number = (item.op[-1] == "B") + 2 * (item.microbatch + instance.num_microbatches * boundary)
            peer = instance.stages[other].device
            actions.append(_action(item.op, item.stage, item.microbatch, peer, number))
        programs.append(Program(device=rank, actions=tuple(actions)))
    stuck = dry_run(instance, programs)
    if stuck is not None:
        raise InputError(
            f"{where}: messages come too late for a task, in two orders, or can block each other: {stuck}: "
            "remove every SEND and RECV (a compute-only schedule)"
        )


def _action(
    op: str, stage: int, microbatch: int, peer: int | None = None, message: int | None = None
) -> Action:
    """An action without times: the file has none."""
    return Action.model_validate(
        {"op": op, "stage": stage, "microbatch": microbatch, "start": 0.0, "end": 0.0}
        | {"peer": peer, "message": message}
    )


def _import_notes(instance: Instance, rows: _Rows) -> Iterator[str]:
    if rows.left_out:
        yield "left out: " + ", ".join(f"{count} {op}" for op, count in rows.left_out.items())
    for reason, count in rows.apart.items():
        yield f"taken apart: {count} OVERLAP_F_B, one half after the other ({reason})"
    if instance.recomputes:
        added = instance.num_microbatches * sum(stage.t_r is not None for stage in instance.stages)
        yield f"added: {added} R, each right before its backward (the format has none)"
