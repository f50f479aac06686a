"""What a run and a profile are told: the one declaration of every option that the runtime takes.

A new option is a field here and the code that acts on it; both command lines, the check, job files and help
pages follow (:mod:`zbsolve.options`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Literal

from zbsolve.errors import InputError
from zbsolve.options import Declaration, Options

if TYPE_CHECKING:
    from zbsolve.model.instance import Instance

# What runs where neither the plan nor the caller names a model.
DEFAULT_MODEL = "gpt"

# What a run and a profile both take.
Split = Annotated[
    Literal["auto", "deferred", "generic"], Declaration(help="How backward is split into B and W.")
]
Layers = Annotated[
    tuple[int, ...] | None,
    Declaration(
        metavar="N,N,…",
        help="Layers of each stage (default: the plan's, else even).",
        rank_flag="--layers",
        rank_help="layers per stage, such as 5,5",
    ),
]
Threads = Annotated[int, Declaration(least=1, help="Threads of each process.")]
Timeout = Annotated[
    float,
    Declaration(
        above=0,
        give="a positive number of seconds",
        metavar="S",
        help="Give up when a process stays silent so long.",
    ),
]
Seed = Annotated[int, Declaration(least=0, most=2_000_000_000, help="Random seed.")]
GreenContexts = Annotated[
    bool,
    Declaration(
        help="All devices on one GPU that is cut into as many parts.",
        listed_after="timeout",
        rank_help="all devices on one GPU, cut into parts",
    ),
]


@dataclass(frozen=True)
class Fault:
    """``kind`` happens on the rank that runs this op of this step (counted from 0, warm-up included)."""

    kind: Literal["raise", "kill", "stall"]
    op: str
    stage: int
    microbatch: int
    step: int


@dataclass(frozen=True)
class RunOptions(Options):
    """How to run a plan. What an option's help does not say:

    Attributes
    ----------
    model : str
        Without it the plan's own model, else ``gpt`` (:meth:`for_instance`).
    split : "auto", "deferred" or "generic"
        "auto" is the way of the plan's own model, where it names one.
    layers_per_stage : tuple of int, optional
        Without it the plan's own, else the split recorded in the instance's stage names, else an even one.
    optimizer : "adam", "sgd" or "none"
        Steps after every ``accumulate`` steps, outside the measured time.
    update : "barrier" or "post-validation"
        Whether all ranks agree on the gradients' norm and finiteness before the optimizer steps, or step on
        what they know and verify it during the next step (:mod:`zbsolve.runtime.training.update`).
    clip : float, optional
        Larger gradients, all together, are scaled down to it.
    precision : "float32", "bfloat16" or "float16"
        float16 also scales the loss, dynamically.
    async_weights : bool
        W's of deferred stages run behind everything else; nothing waits for them but what adds to the same
        gradients and the step's end. No plan says it: it is the run's choice.
    green_contexts : bool
        See :mod:`zbsolve.runtime.execute.green`.
    data_parallel : int
        Each pipeline has the plan's number of micro-batches of every step.
    faults, link_delay : tuple of Fault, float
        Failures to inject, and seconds to hold every message back: for tests of the runtime itself.
    """

    model: Annotated[
        str,
        Declaration(
            metavar="MODEL",
            help="gpt, or pkg.module:factory (default: the plan's own, else gpt).",
            rank_help="gpt, or package.module:factory (default: the plan's)",
        ),
    ] = ""
    steps: Annotated[int, Declaration(least=1, help="Measured steps.")] = 5
    warmup: Annotated[int, Declaration(least=0, help="Steps before the first measured one.")] = 2
    emulate: Annotated[bool, Declaration(help="Stages sleep for their time and move real tensors.")] = False
    payload_mib: Annotated[
        float, Declaration(least=0.0, give="a number of MiB", help="Message size when emulating.")
    ] = 1.0
    check_gradients: Annotated[
        bool, Declaration(help="Compare every gradient with the unpipelined model.")
    ] = True
    split: Split = "auto"
    layers_per_stage: Layers = None
    threads: Threads = 1
    timeout: Timeout = 120.0
    seed: Seed = 0
    backend: Annotated[Literal["auto", "gloo", "nccl"], Declaration(help="Transport.")] = "auto"
    optimizer: Annotated[Literal["adam", "sgd", "none"], Declaration(on_command=False)] = "adam"
    learning_rate: Annotated[float, Declaration(on_command=False)] = 3e-4
    update: Annotated[
        Literal["barrier", "post-validation"],
        Declaration(help="Optimizer's step: agreed on before, or verified afterwards."),
    ] = "barrier"
    clip: Annotated[
        float | None,
        Declaration(
            above=0,
            give="a norm above 0",
            metavar="NORM",
            help="Largest norm of all gradients.",
            rank_help="largest norm of all gradients",
        ),
    ] = None
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"], Declaration(help="Autocast type of every F.")
    ] = "float32"
    accumulate: Annotated[
        int, Declaration(least=1, help="Steps per optimizer step.", rank_help="steps per optimizer step")
    ] = 1
    green_contexts: GreenContexts = False
    async_weights: Annotated[
        bool,
        Declaration(
            help="On CUDA: W's on a stream of their own.", rank_help="W's on a CUDA stream of their own"
        ),
    ] = False
    data_parallel: Annotated[
        int, Declaration(least=1, help="Pipelines side by side.", rank_help="pipelines side by side")
    ] = 1
    load: Annotated[
        str | None,
        Declaration(
            metavar="DIR",
            help="Begin from this checkpoint, of any split.",
            rank_help="checkpoint folder to begin from",
        ),
    ] = None
    save: Annotated[
        str | None,
        Declaration(
            metavar="DIR",
            help="Write a checkpoint at the end.",
            rank_help="checkpoint folder to write at the end",
        ),
    ] = None
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

    def check(self, *, as_flags: bool = False) -> None:
        """Also that options which are fine by themselves go together."""
        super().check(as_flags=as_flags)
        if self.emulate and (self.load or self.save):
            raise InputError("an emulated run has no weights: leave load and save out")
        if self.green_contexts:
            others = ("emulate", self.emulate), ("async_weights", self.async_weights)
            for name, given in (*others, ("data_parallel", self.data_parallel > 1)):
                if given:
                    raise InputError(f"green_contexts and {name} do not go together: leave one out")
        if self.emulate and self.data_parallel > 1:
            raise InputError("an emulated run has no gradients to sum: leave data_parallel at 1")


@dataclass(frozen=True)
class ProfileOptions(Options):
    """How to profile. ``model`` is ``gpt`` or ``package.module:factory``."""

    model: str = "gpt"
    num_devices: Annotated[
        int, Declaration(flag="--devices", short="-p", least=1, help="Devices (processes).")
    ] = 2
    num_microbatches: Annotated[
        int, Declaration(flag="--microbatches", short="-m", least=1, help="Micro-batches.")
    ] = 8
    placement: Annotated[
        Literal["linear", "loop", "v"], Declaration(help="Which device holds which stage.")
    ] = "linear"
    chunks: Annotated[int | None, Declaration(least=1, help="Stages per device.")] = None
    layers_per_stage: Layers = None
    repeats: Annotated[int, Declaration(least=1, help="Measurements; the median counts.")] = 7
    warmup: Annotated[int, Declaration(least=0, help="Runs before the first measurement.")] = 3
    threads: Threads = 1
    split: Split = "auto"
    seed: Seed = 0
    timeout: Timeout = 120.0
    green_contexts: GreenContexts = False

    def of_layers(self) -> LayerOptions:
        """The same, as far as it is about layers one by one."""
        return LayerOptions(**{part.name: getattr(self, part.name) for part in fields(LayerOptions)})


@dataclass(frozen=True)
class LayerOptions(Options):
    """How to profile layers. ``num_microbatches`` is for the model's ``microbatches``: the first is used."""

    model: str = "gpt"
    num_microbatches: int = 8
    repeats: int = 7
    warmup: int = 3
    threads: Threads = 1
    split: Split = "auto"
    seed: Seed = 0
    timeout: Timeout = 600.0
