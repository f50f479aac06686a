"""The kinds of work in a step, one row each: the one table that says what a kind is.

A row says how long a task of the kind takes, what it waits for, to whom it hands its result, what memory it
acquires, needs while it runs and releases, and how it is written and drawn. The task graph, the simulator,
lowering and its dry run, links, the executor and its lanes, traces and every picture read it. Only the judge
(:mod:`zbsolve.model.judge`) states the same rules again, on purpose, in words and code of its own.

Memory: per stage and micro-batch, ``mem_b`` is held from the start of F to the end of B, ``mem_w`` from the
end of B to the end of W; where ``mem_w`` exceeds ``mem_b`` the growth is charged from the start of B.
``peak_*`` is held only while that task runs. A fused BW never holds ``mem_w``. Where a stage recomputes, its
F acquires ``mem_r`` only and its R the rest of ``mem_b``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from zbsolve.model.instance import Stage


class TaskKind(StrEnum):
    """F forward, R recomputation, B input-gradient backward, W weight-gradient backward, BW both fused."""

    F = "F"
    R = "R"
    B = "B"
    W = "W"
    BW = "BW"


F, R, B, W, BW = TaskKind.F, TaskKind.R, TaskKind.B, TaskKind.W, TaskKind.BW

# The way a result travels: F down the stages, B (a gradient) up.
Direction = Literal["F", "B"]


# Memory in the instance's unit, or exact in whole numbers of a finer one.
Amount = TypeVar("Amount", int, float)


class MemoryEffect(NamedTuple, Generic[Amount]):
    """Memory a task acquires at its start, holds extra while it runs, and releases at its end."""

    acquire: Amount
    transient: Amount
    release: Amount

    @property
    def while_running(self) -> Amount:
        """Rise above the level before the task, while it runs."""
        return self.acquire + self.transient

    @property
    def net(self) -> Amount:
        """Change of the level once the task has ended."""
        return self.acquire - self.release


class EffectOf(Protocol):
    """What a task of a stage does to its device's memory, ``read`` turning a figure of the stage into
    amounts."""

    def __call__(self, stage: Stage, read: Callable[[float], Amount]) -> MemoryEffect[Amount]: ...


def _effect_of_f(stage: Stage, read: Callable[[float], Amount]) -> MemoryEffect[Amount]:
    return MemoryEffect(read(stage.kept_by_forward), read(stage.peak_f), read(0.0))


def _effect_of_r(stage: Stage, read: Callable[[float], Amount]) -> MemoryEffect[Amount]:
    return MemoryEffect(read(stage.mem_b) - read(stage.kept_by_forward), read(0.0), read(0.0))


def _effect_of_b(stage: Stage, read: Callable[[float], Amount]) -> MemoryEffect[Amount]:
    none, mem_b, mem_w = read(0.0), read(stage.mem_b), read(stage.mem_w)
    return MemoryEffect(max(none, mem_w - mem_b), read(stage.peak_b), max(none, mem_b - mem_w))


def _effect_of_w(stage: Stage, read: Callable[[float], Amount]) -> MemoryEffect[Amount]:
    return MemoryEffect(read(0.0), read(stage.peak_w), read(stage.mem_w))


def _effect_of_bw(stage: Stage, read: Callable[[float], Amount]) -> MemoryEffect[Amount]:
    return MemoryEffect(read(0.0), read(stage.peak_fused), read(stage.mem_b))


class Input(NamedTuple):
    """What a task waits for, of the same micro-batch: the end of whichever of ``kinds`` the schedule has.

    Where it may have several of them, it is the first. ``step`` tells the stage: 0 the task's own, -1 the one
    before, 1 the one after; from another stage it is a result that was handed on.
    """

    kinds: tuple[TaskKind, ...]
    step: Literal[-1, 0, 1]


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the table.

    Attributes
    ----------
    meaning : str
        In words, for legends.
    field : str
        Where a stage keeps its duration; None there where the stage has no such task.
    optional : bool
        Whether a schedule may do without it on a stage that has it: B and W, or BW, are alternatives.
    inputs : tuple of Input
        What it waits for.
    hands_to : int
        Which neighbour needs its result: 1 the stage after, -1 the stage before, 0 none but its own stage.
    adds_gradient : bool
        Whether it adds to the gradient of its stage's weights.
    effect : function of a stage and how to read amounts
        What it does to its device's memory.
    colour, fill : str
        How it is drawn: of Okabe and Ito's palette, told apart with every common colour blindness, and black
        text reads on each; in a terminal.
    torch : str, optional
        Its letter in torch's pipeline-schedule CSV, where it has one.
    """

    meaning: str
    field: str
    optional: bool
    inputs: tuple[Input, ...]
    hands_to: Literal[-1, 0, 1]
    adds_gradient: bool
    effect: EffectOf
    colour: str
    fill: str
    torch: str | None

    @property
    def direction(self) -> Direction | None:
        """The way its result travels; None where no other stage needs it."""
        return _DIRECTIONS[self.hands_to]

    def time(self, stage: Stage) -> float | None:
        """Duration of such a task by itself; None where the stage has none."""
        duration: float | None = getattr(stage, self.field)
        return duration

    def on(self, stage: Stage) -> bool:
        """Whether a stage may run such tasks."""
        return self.time(stage) is not None


_DIRECTIONS: dict[int, Direction | None] = {1: "F", -1: "B", 0: None}
# A backward needs what its stage's forward kept, or its recomputation made anew, and the gradient from below.
_BACKWARD_INPUTS = (Input((R, F), 0), Input((B, BW), 1))

TABLE: dict[TaskKind, Kind] = {
    F: Kind(
        meaning="forward",
        field="t_f",
        optional=False,
        inputs=(Input((F,), -1),),
        hands_to=1,
        adds_gradient=False,
        effect=_effect_of_f,
        colour="#56B4E9",
        fill="f",
        torch="F",
    ),
    R: Kind(
        meaning="recomputation",
        field="t_r",
        optional=False,
        inputs=(Input((F,), 0),),
        hands_to=0,
        adds_gradient=False,
        effect=_effect_of_r,
        colour="#9AD0F0",
        fill="r",
        torch=None,
    ),
    B: Kind(
        meaning="backward for input",
        field="t_b",
        optional=True,
        inputs=_BACKWARD_INPUTS,
        hands_to=-1,
        adds_gradient=False,
        effect=_effect_of_b,
        colour="#E69F00",
        fill="b",
        torch="I",
    ),
    W: Kind(
        meaning="backward for weights",
        field="t_w",
        optional=True,
        inputs=(Input((B,), 0),),
        hands_to=0,
        adds_gradient=True,
        effect=_effect_of_w,
        colour="#6FC29B",
        fill="w",
        torch="W",
    ),
    BW: Kind(
        meaning="fused backward",
        field="t_bw",
        optional=True,
        inputs=_BACKWARD_INPUTS,
        hands_to=-1,
        adds_gradient=True,
        effect=_effect_of_bw,
        colour="#CC79A7",
        fill="#",
        torch="B",
    ),
}

# Those whose result travels each way, and those after which a gradient of weights has grown.
FORWARDS = tuple(kind for kind, row in TABLE.items() if row.hands_to == 1)
BACKWARDS = tuple(kind for kind, row in TABLE.items() if row.hands_to == -1)
GRADIENT_KINDS = frozenset(kind for kind, row in TABLE.items() if row.adds_gradient)


def travelling(direction: Direction) -> tuple[TaskKind, ...]:
    """The kinds whose result travels a way."""
    return FORWARDS if direction == "F" else BACKWARDS


def step_of(direction: Direction) -> Literal[-1, 1]:
    """By how many stages a way leads from the sender to the receiver."""
    return 1 if direction == "F" else -1
