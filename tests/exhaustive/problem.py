"""An instance's plain JSON data as whole numbers, for an oracle that shares no code with zbsolve.

Times and amounts of memory are decimal numbers: multiplied by a common denominator they are integers, so
sums are exact and equal costs tie. Caps are raised by a billionth of themselves, as the schema grants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

Data = dict[str, Any]

CAP_SLACK = Fraction(1, 10**9)


@dataclass(frozen=True, slots=True)
class StageNumbers:
    """One stage; None where the instance leaves an option out."""

    device: int
    f: int
    b: int
    w: int
    fused: int | None
    recompute: int | None
    pair_saving: int | None
    mem_b: int
    mem_w: int
    mem_r: int
    peak_f: int
    peak_b: int
    peak_w: int
    peak_fused: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything a step is made of. ``hop[s]`` and ``transfer[s]`` lie between stages s and s + 1.

    Attributes
    ----------
    chain : int
        Stages of one replica.
    time_unit, memory_unit : Fraction
        What one of our units is in the instance's.
    contended : bool
        Whether transfers occupy links.
    caps : tuple
        Per device, static memory already taken off; None where there is no cap.
    """

    devices: int
    microbatches: int
    chain: int
    stages: tuple[StageNumbers, ...]
    hop: tuple[int, ...]
    transfer: tuple[int, ...]
    contended: bool
    caps: tuple[int | None, ...]
    static: tuple[int, ...]
    time_unit: Fraction
    memory_unit: Fraction

    def first(self, s: int) -> bool:
        """Whether a stage is the first of its model."""
        return s % self.chain == 0

    def last(self, s: int) -> bool:
        """Whether a stage is the last of its model."""
        return s % self.chain == self.chain - 1

    def remote(self, s: int, t: int) -> bool:
        """Whether results of stage s travel to stage t."""
        return self.stages[s].device != self.stages[t].device

    def kept(self, s: int) -> int:
        """What a micro-batch holds after its F: the input only, where activations are recomputed."""
        stage = self.stages[s]
        return stage.mem_b if stage.recompute is None else stage.mem_r

    def pair_length(self, forward: int, backward: int) -> int | None:
        """F of one stage beside BW of another; None where they may not overlap."""
        a, b = self.stages[forward], self.stages[backward]
        if a.device != b.device or a.pair_saving is None or b.pair_saving is None:
            return None
        assert b.fused is not None
        return a.f + b.fused - min(a.pair_saving, b.pair_saving)


def _number(value: Any) -> Fraction:
    return Fraction(repr(value))


def _scale(values: list[Fraction]) -> int:
    return math.lcm(*(value.denominator for value in values))


def _per(value: Any, number: int) -> list[Fraction]:
    """One number for all places, or one a place."""
    return [_number(v) for v in value] if isinstance(value, list) else [_number(value)] * number


def read(data: Data) -> Problem:
    """The numbers of an instance's JSON data."""
    stages = data["stages"]
    boundaries, p = len(stages) - 1, data["num_devices"]
    hop = _per(data.get("t_comm", 0.0), boundaries)
    contended = data.get("t_transfer") is not None
    transfer = _per(data["t_transfer"] if contended else 0.0, boundaries)
    times = [_number(v) for st in stages for k, v in st.items() if k.startswith("t_") and v is not None]
    time_scale = _scale([*times, *hop, *transfer])
    cap = data.get("memory_cap")
    caps = [None] * p if cap is None else _per(cap, p)
    static = _per(data["static_mem"] if data.get("static_mem") is not None else 0.0, p)
    amounts = [
        _number(v)
        for st in stages
        for k, v in st.items()
        if k.startswith(("mem_", "peak_")) and v is not None
    ]
    memory_scale = _scale([*amounts, *static])

    def time(stage: Data, field: str) -> int | None:
        return None if stage.get(field) is None else int(_number(stage[field]) * time_scale)

    def amount(stage: Data, field: str, default: float = 0.0) -> int:
        return int(_number(stage.get(field, default)) * memory_scale)

    def numbers(stage: Data) -> StageNumbers:
        f, b, w = (time(stage, field) or 0 for field in ("t_f", "t_b", "t_w"))
        fused, pair = time(stage, "t_bw"), time(stage, "t_fb")
        peak_b, peak_w = amount(stage, "peak_b"), amount(stage, "peak_w")
        return StageNumbers(
            device=stage["device"],
            f=f,
            b=b,
            w=w,
            fused=fused,
            recompute=time(stage, "t_r"),
            pair_saving=None if pair is None or fused is None else f + fused - pair,
            mem_b=amount(stage, "mem_b", 1.0),
            mem_w=amount(stage, "mem_w", 1.0),
            mem_r=amount(stage, "mem_r"),
            peak_f=amount(stage, "peak_f"),
            peak_b=peak_b,
            peak_w=peak_w,
            peak_fused=max(peak_b, peak_w) if stage.get("peak_bw") is None else amount(stage, "peak_bw"),
        )

    return Problem(
        devices=p,
        microbatches=data["num_microbatches"],
        chain=len(stages) // data.get("replicas", 1),
        stages=tuple(map(numbers, stages)),
        hop=tuple(int(value * time_scale) for value in hop),
        transfer=tuple(int(value * time_scale) for value in transfer),
        contended=contended,
        caps=tuple(
            None if limit is None else math.floor((limit * (1 + CAP_SLACK) - held) * memory_scale)
            for limit, held in zip(caps, static, strict=True)
        ),
        static=tuple(int(held * memory_scale) for held in static),
        time_unit=Fraction(1, time_scale),
        memory_unit=Fraction(1, memory_scale),
    )
