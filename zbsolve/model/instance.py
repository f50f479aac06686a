"""The problem as the user states it: stages, times, memory, devices.

This is the only place that validates user input. It models what a profile can measure of one
training step; the optimizer step is not part of it (:mod:`zbsolve.model.steps` runs several steps).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from zbsolve.errors import InputError
from zbsolve.files.documents import raise_first, read_document
from zbsolve.files.models import JsonTuple
from zbsolve.model.tolerances import ROUNDING, memory_limit

SCHEMA = "zbsolve.instance/1"

# Beyond these nothing useful can be computed: a slip of the pen, or a unit that does not fit.
MOST_MICROBATCHES = 1_000_000
MOST_TOTAL = 1e200

Placement = Literal["linear", "loop", "v"]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Stage(BaseModel):
    """A contiguous group of layers on one device. Times in ``time_unit``, memory in ``memory_unit``.

    Attributes
    ----------
    device : int
        Rank that holds the stage, ``0 <= device < num_devices``.
    t_f, t_b, t_w : float
        Duration of one micro-batch's F, B (input gradient only) and W (weight gradient only).
    t_bw : float, optional
        Duration of the fused backward BW. When given, a planner may fuse instead of running B then W.
    mem_b : float
        Activation memory that one micro-batch holds from the start of its F to the end of its B (M_B).
    mem_w : float
        Memory that it holds from the end of its B to the end of its W (M_W). It may exceed ``mem_b``:
        the growth is then charged from the start of B.
    peak_f, peak_b, peak_w, peak_bw : float
        Extra memory held only while that task runs. ``peak_bw`` defaults to the larger of the two halves.
    t_r : float, optional
        Duration of a recomputation R. When given, the stage recomputes every micro-batch: its F keeps only
        ``mem_r``, R runs between F and the backward, and ``mem_b`` is held from the start of R.
    mem_r : float
        Memory that a micro-batch holds from its F to its R (the stage's input); only with ``t_r``.
    t_fb : float, optional
        Duration of an F&B pair: F of one micro-batch and BW of another, overlapped. When given (it needs
        ``t_bw``), a planner may pair them with any stage of the same device that has ``t_fb``, too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    device: Annotated[int, Field(ge=0)]
    t_f: NonNegative
    t_b: NonNegative
    t_w: NonNegative
    t_bw: NonNegative | None = None
    mem_b: NonNegative = 1.0
    mem_w: NonNegative = 1.0
    peak_f: NonNegative = 0.0
    peak_b: NonNegative = 0.0
    peak_w: NonNegative = 0.0
    peak_bw: NonNegative | None = None
    t_r: NonNegative | None = None
    mem_r: NonNegative = 0.0
    t_fb: NonNegative | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _check_options(self) -> Stage:
        if self.t_r is None and self.mem_r > 0:
            raise ValueError("mem_r is given without t_r: add t_r (the time of a recomputation) or remove it")
        if self.mem_r > self.mem_b:
            raise ValueError(f"mem_r is {self.mem_r:g}, above mem_b {self.mem_b:g}: it is a part of it")
        if self.t_fb is not None and self.t_bw is None:
            raise ValueError("t_fb is given without t_bw: a pair runs F beside the fused backward, add t_bw")
        if self.t_fb is not None and self.t_r is not None:
            raise ValueError("t_fb is given beside t_r: a pair with recomputation is not modelled, drop one")
        if self.t_fb is not None and self.t_bw is not None:
            least, most = max(self.t_f, self.t_bw), self.t_f + self.t_bw
            # The sum is rounded: 0.1 + 0.7 is less than 0.8.
            if not least <= self.t_fb <= most * (1 + ROUNDING):
                raise ValueError(
                    f"t_fb is {self.t_fb:g}: give {least:g} (the longer of t_f and t_bw) to {most:g}"
                )
        return self

    @property
    def kept_by_forward(self) -> float:
        """What a micro-batch's F leaves behind: ``mem_b``, or ``mem_r`` where the stage recomputes."""
        return self.mem_b if self.t_r is None else self.mem_r

    @property
    def pair_saving(self) -> float:
        """What an F&B pair saves of ``t_f + t_bw``; 0 where the stage has no ``t_fb``."""
        if self.t_fb is None or self.t_bw is None:
            return 0.0
        return max(0.0, self.t_f + self.t_bw - self.t_fb)

    @property
    def growth(self) -> float:
        """Memory that B adds when it starts (``mem_w`` over ``mem_b``; zero where B frees)."""
        return max(0.0, self.mem_w - self.mem_b)

    @property
    def peak_fused(self) -> float:
        """Extra memory while a fused backward runs."""
        return max(self.peak_b, self.peak_w) if self.peak_bw is None else self.peak_bw

    @property
    def highest_peak(self) -> float:
        """The most extra memory that any of the stage's tasks holds while it runs."""
        fused = 0.0 if self.t_bw is None else self.peak_fused
        return max(self.peak_f, self.peak_b, self.peak_w, fused)

    @property
    def min_backward(self) -> float:
        """Shortest device time one micro-batch's whole backward can take, split or fused."""
        split = self.t_b + self.t_w
        return split if self.t_bw is None else min(split, self.t_bw)


class ModelFactory(BaseModel):
    """The model that times were measured on.

    Attributes
    ----------
    factory : str
        ``gpt`` or ``package.module:factory``.
    split : "auto", "deferred" or "generic"
        How its backward was split into B and W.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    factory: Annotated[str, Field(min_length=1)]
    split: Literal["auto", "deferred", "generic"] = "auto"


class ModelCut(ModelFactory):
    """The model that times were measured on, and how it was cut into stages.

    Attributes
    ----------
    layers_per_stage : tuple of int
        Layers of each stage of one copy of the model, in model order.
    """

    layers_per_stage: Annotated[JsonTuple[Annotated[int, Field(ge=1)]], Field(min_length=1)]


class Instance(BaseModel):
    """One training step to schedule: ``num_microbatches`` through ``stages``, in model order.

    Attributes
    ----------
    replicas : int
        How many copies of the model the pipeline holds (2: bidirectional). ``stages`` lists them one after
        the other, as many stages each; ``num_microbatches`` run through each copy. Adding their gradients up
        at the end of the step is not modelled.
    t_comm : float or tuple
        Latency of a hop between different devices, or one per boundary between consecutive stages (0 between
        two replicas).
    t_transfer : float or tuple, optional
        Bytes over bandwidth, on top of the latency, likewise. When given, a transfer occupies its link, the
        directed pair of devices, for that time, and transfers wait for each other in the order in which they
        were produced.
    model : ModelCut, optional
        The model that the times were measured on: what ``zbsolve run`` runs. Without it they are of no known
        model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)

    schema_: Literal["zbsolve.instance/1"] = Field(default="zbsolve.instance/1", alias="schema")
    name: str = "unnamed"
    time_unit: str = "ms"
    memory_unit: str = "MiB"
    num_devices: Annotated[int, Field(ge=1)]
    num_microbatches: Annotated[int, Field(ge=1, le=MOST_MICROBATCHES)]
    stages: Annotated[JsonTuple[Stage], Field(min_length=1)]
    replicas: Annotated[int, Field(ge=1)] = 1
    t_comm: NonNegative | JsonTuple[NonNegative] = 0.0
    t_transfer: NonNegative | JsonTuple[NonNegative] | None = None
    memory_cap: NonNegative | JsonTuple[NonNegative] | None = None
    static_mem: JsonTuple[NonNegative] | None = None
    model: ModelCut | None = None

    @model_validator(mode="after")
    def _check_lengths_and_devices(self) -> Instance:
        p = self.num_devices
        for index, stage in enumerate(self.stages):
            if stage.device >= p:
                raise ValueError(
                    f"stages[{index}].device is {stage.device}: use 0 to {p - 1}, or raise num_devices"
                )
        unused = sorted(set(range(p)) - {stage.device for stage in self.stages})
        if unused:
            raise ValueError(f"device {unused[0]} of {p} holds no stage: give it one or lower num_devices")
        chain, rest = divmod(len(self.stages), self.replicas)
        if rest:
            raise ValueError(
                f"replicas is {self.replicas} and stages has {len(self.stages)}: give each as many stages"
            )
        boundary = "one per boundary between consecutive stages"
        expected = (
            ("t_comm", self.t_comm, len(self.stages) - 1, boundary),
            ("t_transfer", self.t_transfer, len(self.stages) - 1, boundary),
            ("memory_cap", self.memory_cap, p, "one per device"),
            ("static_mem", self.static_mem, p, "one per device"),
        )
        for field, value, length, meaning in expected:
            if isinstance(value, tuple) and len(value) != length:
                raise ValueError(f"{field} has {len(value)} entries: give {length} ({meaning})")
        if self.model is not None and len(self.model.layers_per_stage) != chain:
            raise ValueError(
                f"model.layers_per_stage has {len(self.model.layers_per_stage)} entries: give {chain} "
                "(one per stage), or leave model out"
            )
        for field, value in (("t_comm", self.t_comm), ("t_transfer", self.t_transfer)):
            between = range(chain - 1, len(self.stages) - 1, chain)
            if isinstance(value, tuple) and any(value[b] for b in between):
                raise ValueError(f"{field}[{chain - 1}] lies between two replicas, no hop: give 0 there")
        return self

    @model_validator(mode="after")
    def _check_sums(self) -> Instance:
        """No path through the step and no device's memory may come near float64's end."""
        m = self.num_microbatches
        hops = self.t_comm if isinstance(self.t_comm, tuple) else (self.t_comm,)
        transfers = self.t_transfer if isinstance(self.t_transfer, tuple) else (self.t_transfer or 0.0,)
        times = m * (
            math.fsum(s.t_f + s.t_b + s.t_w + (s.t_bw or 0.0) + (s.t_r or 0.0) for s in self.stages)
            + 2 * len(self.stages) * (max(hops, default=0.0) + max(transfers, default=0.0))
        )
        memory = m * sum(s.mem_b + s.mem_w + s.peak_f + s.peak_b + s.peak_w for s in self.stages)
        for what, total, unit in (("times", times, "time_unit"), ("memory", memory, "memory_unit")):
            if total > MOST_TOTAL:
                raise ValueError(f"the {what} of all stages add up to {total:g}: choose a larger {unit}")
        return self

    # --- queries -------------------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def num_tasks(self) -> int:
        """F, B and W of every stage and micro-batch: the problem's size when nothing is fused."""
        return 3 * self.num_stages * self.num_microbatches

    @property
    def chain(self) -> int:
        """Stages of one copy of the model."""
        return len(self.stages) // self.replicas

    @property
    def total_microbatches(self) -> int:
        """Micro-batches of the whole step, over all replicas."""
        return self.replicas * self.num_microbatches

    def is_first(self, stage: int) -> bool:
        """Whether a stage is the first of its model."""
        return stage % self.chain == 0

    def is_last(self, stage: int) -> bool:
        """Whether a stage is the last of its model: the one that has the loss."""
        return (stage + 1) % self.chain == 0

    def has_neighbour(self, stage: int, step: int) -> bool:
        """Whether the model of a stage goes on before (``step`` -1) or after it (1)."""
        return not (self.is_first(stage) if step < 0 else self.is_last(stage))

    def crosses(self, boundary: int) -> bool:
        """Whether stage ``boundary`` and the next one belong to one model and lie on different devices."""
        if self.is_last(boundary):
            return False
        return self.stages[boundary].device != self.stages[boundary + 1].device

    def transfer(self, boundary: int) -> float:
        """How long a transfer from stage ``boundary`` to the next one, or back, occupies its link."""
        if self.t_transfer is None or not self.crosses(boundary):
            return 0.0
        return self.t_transfer[boundary] if isinstance(self.t_transfer, tuple) else self.t_transfer

    def hop(self, boundary: int) -> float:
        """Time from stage ``boundary`` to the next one over a free link; 0 when one device holds both."""
        if not self.crosses(boundary):
            return 0.0
        latency = self.t_comm[boundary] if isinstance(self.t_comm, tuple) else self.t_comm
        return latency if self.t_transfer is None else latency + self.transfer(boundary)

    def pair_duration(self, forward: int, backward: int) -> float | None:
        """Duration of F of one stage overlapped with BW of another on its device; None where not possible.

        Stages that differ save what the lesser of them saves with itself.
        """
        a, b = self.stages[forward], self.stages[backward]
        if a.device != b.device or a.t_fb is None or b.t_fb is None or b.t_bw is None:
            return None
        return a.t_f + b.t_bw - min(a.pair_saving, b.pair_saving)

    @property
    def recomputes(self) -> bool:
        """Whether any stage recomputes its activations."""
        return any(stage.t_r is not None for stage in self.stages)

    @property
    def has_pairs(self) -> bool:
        """Whether any stage may run F&B pairs."""
        return any(stage.t_fb is not None for stage in self.stages)

    def cap(self, device: int) -> float:
        """Memory cap of a device, infinite when there is none."""
        if self.memory_cap is None:
            return math.inf
        return self.memory_cap[device] if isinstance(self.memory_cap, tuple) else self.memory_cap

    def static(self, device: int) -> float:
        """Memory that a device holds whatever the schedule (parameters, optimizer states)."""
        return 0.0 if self.static_mem is None else self.static_mem[device]

    def stages_on(self, device: int) -> tuple[int, ...]:
        """Stages that a device holds, in model order."""
        return tuple(s for s, stage in enumerate(self.stages) if stage.device == device)

    def device_work(self, device: int) -> float:
        """Least busy time of a device over the whole step (backward fused or split, whichever is shorter)."""
        held = [self.stages[s] for s in self.stages_on(device)]
        # Each F is in one pair at most, and a pair saves no more than its F's stage saves with itself.
        per_microbatch = sum(
            stage.t_f + stage.min_backward + (stage.t_r or 0.0) - stage.pair_saving for stage in held
        )
        return self.num_microbatches * per_microbatch

    def fits(self, device: int, memory: float) -> bool:
        """Whether ``memory``, static memory included, is within the device's cap."""
        return memory <= memory_limit(self.cap(device))

    # --- changes -------------------------------------------------------------------------------

    def with_changes(self, **changes: Any) -> Instance:
        """A validated copy with some fields replaced (lists are accepted for tuples)."""
        data = {name: getattr(self, name) for name in type(self).model_fields}
        data.pop("schema_")
        data.update(changes)
        return make_instance(**data)

    def with_fused_backward(self) -> Instance:
        """A copy in which every stage can fuse; where ``t_bw`` is not given it is ``t_b + t_w``.

        Schedules of the years before the split (GPipe, 1F1B) run BW, and pass the gradient on only at
        its end; this is the instance on which they are timed.
        """
        if all(stage.t_bw is not None for stage in self.stages):
            return self
        fused = [
            stage if stage.t_bw is not None else stage.model_copy(update={"t_bw": stage.t_b + stage.t_w})
            for stage in self.stages
        ]
        return self.with_changes(stages=fused)

    def with_recomputation(self) -> Instance:
        """A copy in which every stage recomputes: R takes ``t_f``, and F keeps ``mem_r`` (0 where not given).

        What one F needs, its input, is the instance's to say: a stage that has ``t_r`` stays as it is. F&B
        pairs are given up: with recomputation they are not modelled.
        """
        stages = [
            stage if stage.t_r is not None else stage.model_copy(update={"t_r": stage.t_f, "t_fb": None})
            for stage in self.stages
        ]
        return self.with_changes(stages=stages)

    def with_memory_cap(self, cap: str | float | Sequence[float] | None) -> Instance:
        """A copy under another cap.

        ``"none"`` removes it; ``"1p"`` gives every device its static memory plus ``1 * p`` times its own
        mem_b (all chunks' mem_b shared over the chunks of a device, so that ``1p`` means the activation
        memory of 1F1B whatever the number of chunks); ``"0.75p"`` and so on likewise; a number is
        that many memory units, on every device.
        """
        if cap is None or cap == "none":
            return self.with_changes(memory_cap=None)
        if isinstance(cap, str) and cap.endswith("p"):
            factor = _positive_number(cap[:-1], cap)
            per_device = [
                self.static(d)
                + factor * self.num_devices * sum(self.stages[s].mem_b for s in self.stages_on(d))
                + max(self.stages[s].highest_peak for s in self.stages_on(d))
                for d in range(self.num_devices)
            ]
            return self.with_changes(memory_cap=per_device)
        if isinstance(cap, str):
            cap = _positive_number(cap, cap)
        return self.with_changes(memory_cap=cap)

    def to_json_dict(self) -> dict[str, Any]:
        """The instance as JSON data, optional fields left out where they are not set."""
        data: dict[str, Any] = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        for stage in data["stages"]:
            for field in ("peak_f", "peak_b", "peak_w", "mem_r"):
                if stage[field] == 0.0:
                    del stage[field]
        if self.replicas == 1:
            del data["replicas"]
        data["memory_cap"] = data.get("memory_cap")
        return data


def _positive_number(text: str, given: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InputError(
            f"memory cap {given!r}: give a number of memory units, a multiple of 1F1B's memory such as "
            "1p, 2p or 0.75p, or none"
        )
    return value


def make_instance(**fields: Any) -> Instance:
    """Build an Instance from keyword arguments; raises ``InputError`` with one line when they do not fit."""
    return parse_instance(fields, "instance")


def parse_instance(data: Any, where: str) -> Instance:
    """Validate JSON data. ``where`` (a file name) begins the error line."""
    try:
        return Instance.model_validate(data)
    except ValidationError as error:
        raise_first(error, where)


def load_instance(path: str | Path) -> Instance:
    """Read and validate an instance file."""
    return parse_instance(read_document(path, SCHEMA), str(path))


def equal_stages(
    p: int,
    m: int,
    t_f: float = 1.0,
    t_b: float = 1.0,
    t_w: float = 1.0,
    t_comm: float = 0.0,
    *,
    mem_b: float = 1.0,
    mem_w: float = 1.0,
    memory_cap: float | Sequence[float] | None = None,
    placement: Placement = "linear",
    chunks: int | None = None,
    name: str = "equal",
) -> Instance:
    """An instance of identical stages; times, memory and ``chunks`` are per stage.

    ``chunks`` (v) defaults to 1 for the linear placement, 2 for the others.
    """
    devices = place(p, placement, chunks)
    stages = [
        {"device": d, "t_f": t_f, "t_b": t_b, "t_w": t_w, "mem_b": mem_b, "mem_w": mem_w} for d in devices
    ]
    return make_instance(
        name=name,
        num_devices=p,
        num_microbatches=m,
        stages=stages,
        t_comm=t_comm,
        memory_cap=memory_cap,
    )


def place(p: int, placement: Placement, chunks: int | None = None) -> list[int]:
    """Device of each stage, in model order: linear, loop (0..p-1, 0..p-1), or V (0..p-1, p-1..0)."""
    v = (1 if placement == "linear" else 2) if chunks is None else chunks
    forward = list(range(p))
    if placement == "linear" and v != 1:
        raise InputError("a linear placement has one chunk per device: use loop or v for more")
    if placement == "v":
        return [d for chunk in range(v) for d in (forward if chunk % 2 == 0 else forward[::-1])]
    return forward * v
