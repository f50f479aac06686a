"""What the ranks of a run measured, gathered into one trace."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zbsolve.errors import InputError
from zbsolve.model.instance import Instance
from zbsolve.plan.plan import Plan
from zbsolve.run_options import RunOptions
from zbsolve.runtime.execute.executor import OpRecord
from zbsolve.runtime.training.gradients import TOLERANCE, Difference
from zbsolve.trace.trace import Event, GradientCheck, Step, Trace, step_makespan

TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
MEMORY_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Outcome:
    """What a plan's run measured: the trace, and bytes per stage and device for the profile.

    ``rollbacks`` counts the steps that post-validation took back, ``skipped`` those without an update;
    ``resident`` is the process memory (bytes) of the rank that has most, after each measured step; ``rises``
    are the bytes by which an op (F, B, W, BW) of each stage goes above what was held before it.
    """

    trace: Trace
    held_after_f: dict[int, int] = field(default_factory=dict)
    held_after_b: dict[int, int] = field(default_factory=dict)
    static_bytes: tuple[int, ...] = ()
    rollbacks: int = 0
    skipped: int = 0
    resident: tuple[int, ...] = ()
    rises: dict[str, dict[int, int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "trace": json.loads(self.trace.to_json()),
            "held_after_f": sorted(self.held_after_f.items()),
            "held_after_b": sorted(self.held_after_b.items()),
            "static_bytes": list(self.static_bytes),
            "rollbacks": self.rollbacks,
            "skipped": self.skipped,
            "resident": list(self.resident),
            "rises": {op: sorted(by_stage.items()) for op, by_stage in self.rises.items()},
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        """From JSON data."""
        return cls(
            Trace.model_validate(data["trace"]),
            dict(data["held_after_f"]),
            dict(data["held_after_b"]),
            tuple(data["static_bytes"]),
            data["rollbacks"],
            data["skipped"],
            tuple(data["resident"]),
            {op: dict(by_stage) for op, by_stage in data["rises"].items()},
        )


def time_unit(instance: Instance) -> float:
    """The instance's time unit in seconds."""
    if instance.time_unit not in TIME_UNITS:
        raise InputError(
            f"time_unit is {instance.time_unit!r}: a run needs a unit of real time, "
            f"one of {', '.join(TIME_UNITS)}"
        )
    return TIME_UNITS[instance.time_unit]


def merge(
    plan: Plan, options: RunOptions, parts: Sequence[dict[str, Any]], device: torch.device, backend: str
) -> Outcome:
    """One outcome of all ranks' parts (JSON data), in rank order: pipeline by pipeline, device by device."""
    instance = plan.instance
    first = parts[: instance.num_devices]  # the trace is the first pipeline's
    unit = time_unit(instance)
    one_host = len({part["host"] for part in first}) == 1
    steps = [
        _merge_step(
            [part["steps"][k] for part in first],
            unit,
            one_host,
            [part["steps"][k]["loss"] for part in parts if part["steps"][k]["loss"] is not None],
        )
        for k in range(options.steps)
    ]
    held_f: dict[int, int] = {}
    held_b: dict[int, int] = {}
    rises: dict[str, dict[int, int]] = {}
    peak = levels = highest = None
    split: list[str] = ["emulated"] * instance.num_stages
    if not options.emulate:
        for part in first:
            held_f.update(dict(part["held"][0]))
            held_b.update(dict(part["held"][1]))
            for op, by_stage in part["rises"].items():
                rises.setdefault(op, {}).update(dict(by_stage))
            for s, mechanism in part["split"]:
                split[s] = mechanism
        memory = MEMORY_UNITS.get(instance.memory_unit)
        if memory is not None:
            peak = tuple((part["static"] + max(part["highest"], default=0)) / memory for part in first)
            levels, highest = (
                tuple(tuple((part["static"] + level) / memory for level in part[what]) for part in first)
                for what in ("levels", "highest")
            )
    trace = Trace(
        plan_digest=plan.digest(),
        mode="emulated" if options.emulate else "real",
        hardware=_hardware(options, len(parts), device),
        backend=backend,
        model="sleeping stages" if options.emulate else options.model,
        time_unit=instance.time_unit,
        memory_unit=instance.memory_unit,
        split=tuple(split),
        steps=tuple(steps),
        peak_memory=peak,
        memory=levels,
        memory_during=highest,
        gradients=_gradient_check([part["difference"] for part in parts]),
    )
    return Outcome(
        trace,
        held_f,
        held_b,
        tuple(part.get("static", 0) for part in first),
        max(part.get("rollbacks", 0) for part in parts),
        max(part.get("skipped", 0) for part in parts),
        tuple(max(part["steps"][k]["resident"] for part in parts) for k in range(options.steps)),
        rises,
    )


def _merge_step(steps: list[dict[str, Any]], unit: float, one_host: bool, losses: list[float]) -> Step:
    """One step of all ranks on one clock, its zero at the first op of any; the loss is the ranks' sum."""
    origins = [0.0 if one_host else step["zero"] for step in steps]
    records = [(rank, OpRecord(**op)) for rank, step in enumerate(steps) for op in step["ops"]]
    zero = min((record.start - origins[rank] for rank, record in records), default=0.0)
    events = tuple(
        Event(
            device=rank,
            op=record.op,
            stage=record.stage,
            microbatch=record.microbatch,
            start=(record.start - origins[rank] - zero) / unit,
            end=(record.end - origins[rank] - zero) / unit,
            wait=max(0.0, record.wait) / unit,
        )
        for rank, record in records
    )
    loss = sum(losses) if losses else None
    finite = loss is not None and math.isfinite(loss)
    return Step(events=events, makespan=step_makespan(events), loss=loss if finite else None)


def _gradient_check(found: list[dict[str, Any] | None]) -> GradientCheck | None:
    differences = [Difference(**entry) for entry in found if entry is not None]
    if not differences:
        return None
    worst = max(differences, key=lambda d: d.worst)
    return GradientCheck(
        checked=True,
        equal=worst.worst <= TOLERANCE,
        bit_equal=all(d.bit_equal for d in differences),
        # JSON has no infinity: a missing gradient is written as the largest number.
        worst_relative_difference=min(worst.worst, sys.float_info.max),
        tolerance=TOLERANCE,
        where=worst.where,
    )


def _hardware(options: RunOptions, size: int, device: torch.device) -> str:
    if options.green_contexts:
        what = f"{torch.cuda.get_device_name(device)} cut into {size} parts (green contexts)"
    elif device.type == "cuda":
        what = f"{size} x {torch.cuda.get_device_name(device)}"
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        what = f"{platform.machine()} CPU with {cores} cores, {size} ranks of {options.threads} thread(s)"
    return f"{what}, {platform.system()}, torch {torch.__version__}"
