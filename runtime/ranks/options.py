"""What a run is told: options for people, and the job file that its ranks read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

from zbsolve.errors import InputError
from zbsolve.model.instance import Instance
from zbsolve.runtime.ranks.faults import Fault

Update = Literal["barrier", "post-validation"]
Precision = Literal["float32", "bfloat16", "float16"]

# What runs where neither the plan nor the caller names a model.
DEFAULT_MODEL = "gpt"

_CHOICES = {
    "split": ("auto", "deferred", "generic"),
    "backend": ("auto", "gloo", "nccl"),
    "optimizer": ("adam", "sgd", "none"),
    "update": ("barrier", "post-validation"),
    "precision": ("float32", "bfloat16", "float16"),
}


@dataclass(frozen=True)
class RunOptions:
    """How to run a plan.

    Attributes
    ----------
    model : str
        ``gpt`` or ``package.module:factory``. Without it the plan's own model, else ``gpt``
        (:meth:`for_instance`).
    split : "auto", "deferred" or "generic"
        How backward is split into B and W; "auto" is the way of the plan's own model, where it names one.
    steps, warmup : int
        Measured steps, and steps before the first of them.
    layers_per_stage : tuple of int, optional
        Without it the plan's own, else the split recorded in the instance's stage names, else an even one.
    optimizer : "adam", "sgd" or "none"
        Steps after every ``accumulate`` steps, outside the measured time.
    update : "barrier" or "post-validation"
        Whether all ranks agree on the gradients' norm and finiteness before the optimizer steps, or step on
        what they know and verify it during the next step (:mod:`zbsolve.runtime.training.update`).
    clip : float, optional
        Largest norm of all gradients together; larger ones are scaled down to it.
    precision : "float32", "bfloat16" or "float16"
        Autocast type of every F; float16 also scales the loss, dynamically.
    async_weights : bool
        W's of deferred stages on a CUDA stream of their own, behind everything else; nothing waits for them
        but what adds to the same gradients and the step's end. No plan says it: it is the run's choice.
    green_contexts : bool
        All devices on one GPU that is cut into as many parts (:mod:`zbsolve.runtime.execute.green`).
    data_parallel : int
        Pipelines side by side, each with the plan's number of micro-batches of every step.
    load, save : str, optional
        Checkpoint folder to begin from, and to write after the last step.
    faults, link_delay : tuple of Fault, float
        Failures to inject, and seconds to hold every message back: for tests of the runtime itself.
    """

    model: str = ""
    steps: int = 5
    warmup: int = 2
    emulate: bool = False
    payload_mib: float = 1.0
    check_gradients: bool = True
    split: Literal["auto", "deferred", "generic"] = "auto"
    layers_per_stage: tuple[int, ...] | None = None
    threads: int = 1
    timeout: float = 120.0
    seed: int = 0
    backend: str = "auto"
    optimizer: str = "adam"
    learning_rate: float = 3e-4
    update: Update = "barrier"
    clip: float | None = None
    precision: Precision = "float32"
    accumulate: int = 1
    async_weights: bool = False
    green_contexts: bool = False
    data_parallel: int = 1
    load: str | None = None
    save: str | None = None
    faults: tuple[Fault, ...] = ()
    link_delay: float = 0.0

    def for_instance(self, instance: Instance) -> tuple[RunOptions, tuple[str, ...]]:
        """The options with what is left open taken from the model that the instance's times are of.

        Returns
        -------
        (RunOptions, tuple of str)
            And a line for each thing in which the run is of another model than the times.
        """
        own = instance.model
        model = self.model or (DEFAULT_MODEL if own is None else own.factory)
        if self.emulate:
            return replace(self, model=model), ()
        if own is None:
            unknown = f"the plan's times are of no known model: unless they are of {model}, what is predicted"
            return replace(self, model=model), (f"{unknown} says nothing about this run",)
        if model != own.factory:
            other = f"the plan's times are of {own.factory}, this runs {model}: what is predicted"
            return replace(self, model=model), (f"{other} says nothing about it",)
        notes = []
        split = own.split if self.split == "auto" else self.split
        if split != own.split:
            notes.append(f"the plan's times are of split {own.split}, this runs {split}")
        layers = self.layers_per_stage or own.layers_per_stage
        if layers != own.layers_per_stage:
            cuts = (",".join(map(str, cut)) for cut in (own.layers_per_stage, layers))
            notes.append("the plan's times are of {} layers per stage, this runs {}".format(*cuts))
        return replace(self, model=model, split=split, layers_per_stage=layers), tuple(notes)

    def check(self) -> None:
        """Raise ``InputError`` for the first option that makes no sense."""
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise InputError(f"{name} is {value!r}: give one of {', '.join(allowed)}")
        for name in ("steps", "threads", "accumulate", "data_parallel"):
            require_positive(name, getattr(self, name))
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"clip is {self.clip:g}: give a norm above 0")
        if self.emulate and (self.load or self.save):
            raise InputError("an emulated run has no weights: leave load and save out")
        if self.green_contexts:
            others = ("emulate", self.emulate), ("async_weights", self.async_weights)
            for name, given in (*others, ("data_parallel", self.data_parallel > 1)):
                if given:
                    raise InputError(f"green_contexts and {name} do not go together: leave one out")
        if self.emulate and self.data_parallel > 1:
            raise InputError("an emulated run has no gradients to sum: leave data_parallel at 1")


def require_positive(option: str, value: int) -> None:
    """Raise ``InputError`` for a count below 1."""
    if value < 1:
        raise InputError(f"{option} is {value}: give at least 1")


@dataclass(frozen=True)
class Job:
    """What a group of ranks does. ``plans`` run by turns on the same layers."""

    options: RunOptions
    plans: tuple[str, ...] = ()
    outcome: str = ""

    def save(self, path: Path) -> None:
        """Write the job file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read a job file."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(options_from(data["options"]), tuple(data["plans"]), data["outcome"])


def options_from(data: dict[str, Any]) -> RunOptions:
    """Options from JSON data."""
    known = {field.name for field in fields(RunOptions)}
    assert data.keys() <= known  # written by this version
    layers = data.get("layers_per_stage")
    faults = tuple(Fault(**fault) for fault in data.get("faults", ()))
    changed = {"faults": faults, "layers_per_stage": None if layers is None else tuple(layers)}
    return RunOptions(**cast("dict[str, Any]", {**data, **changed}))
