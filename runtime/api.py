"""The runtime's front door: profile a model, run a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

from zbsolve.errors import InfeasibleError, InputError
from zbsolve.instance import Instance, make_instance, place
from zbsolve.partition.splits import even_split
from zbsolve.plan import Plan, check_plan
from zbsolve.runtime import models, profiler
from zbsolve.runtime.launch import launch
from zbsolve.runtime.layer_profiler import LayerOptions, profile_layers
from zbsolve.runtime.split_backward import Mechanism
from zbsolve.runtime.worker import Job, choose_backend, time_unit
from zbsolve.trace import Trace

Progress = Callable[[str], None]

__all__ = ["LayerOptions", "ProfileOptions", "RunOptions", "profile_layers", "profile_model", "run_plan"]


@dataclass(frozen=True)
class ProfileOptions:
    """How to profile. ``model`` is ``gpt`` or ``package.module:factory``; ``repeats`` counts timed steps."""

    model: str = "gpt"
    num_devices: int = 2
    num_microbatches: int = 8
    placement: str = "linear"
    chunks: int | None = None
    layers_per_stage: tuple[int, ...] | None = None
    repeats: int = 7
    warmup: int = 3
    threads: int = 1
    split: str = "auto"
    seed: int = 0
    timeout: float = 120.0


@dataclass(frozen=True)
class RunOptions:
    """How to run a plan.

    Without ``layers_per_stage`` the split recorded in the instance's stage names is used, else an even
    one. ``optimizer`` ("adam", "sgd" or "none") steps after every step, outside the measured time.
    """

    model: str = "gpt"
    steps: int = 5
    warmup: int = 2
    emulate: bool = False
    payload_mib: float = 1.0
    check_gradients: bool = True
    split: str = "auto"
    layers_per_stage: tuple[int, ...] | None = None
    threads: int = 1
    timeout: float = 120.0
    seed: int = 0
    backend: str = "auto"
    optimizer: str = "adam"
    learning_rate: float = 3e-4


def profile_model(options: ProfileOptions, progress: Progress | None = None) -> Instance:
    """Measure a model's pass times, memory and hop latency on this machine.

    Returns
    -------
    Instance
        Times in ms, memory in MiB, no memory cap; each stage's name says which layers it has.

    Raises
    ------
    InputError
        Options that do not fit the model, or a model that cannot be split.
    EnvironmentFailedError
        A rank failed.
    """
    _one_of("placement", options.placement, ("linear", "loop", "v"))
    mechanism = _mechanism(options.split)
    _positive("num_devices", options.num_devices)
    _positive("num_microbatches", options.num_microbatches)
    _positive("repeats", options.repeats)
    model = models.load_model(options.model, options.seed)
    placement = cast(Literal["linear", "loop", "v"], options.placement)
    devices = place(options.num_devices, placement, options.chunks)
    layers = len(model.layers)
    split = models.check_split(
        options.layers_per_stage or even_split(layers, len(devices)), layers, len(devices)
    )
    held = models.stage_ranges(split)
    draft = make_instance(
        name=options.model,
        num_devices=options.num_devices,
        num_microbatches=options.num_microbatches,
        stages=[
            {"device": d, "t_f": 1.0, "t_b": 1.0, "t_w": 1.0, "t_bw": 2.0, "mem_b": 1.0, "mem_w": 1.0}
            | {"name": models.stage_name(model.layers, layers_held)}
            for d, layers_held in zip(devices, held, strict=True)
        ],
    )
    job = Job(
        plans=(),
        model=options.model,
        steps=options.repeats,
        warmup=options.warmup,
        check_gradients=False,
        split=mechanism,
        layers_per_stage=split,
        threads=options.threads,
        timeout=options.timeout,
        seed=options.seed,
        backend=choose_backend("auto", options.num_devices),
        optimizer="none",
    )
    plans = [profiler.profiling_plan(draft, fused) for fused in (False, True)]
    split_run, fused_run = launch(plans, job, progress)
    return profiler.build_instance(draft, split_run, fused_run, progress)


def run_plan(plan: Plan, options: RunOptions, progress: Progress | None = None) -> Trace:
    """Execute a plan with one process a device on this host and measure every op.

    Raises
    ------
    InfeasibleError
        The plan breaks a rule; nothing was started.
    InputError
        Options, model or plan do not fit together; refused before step 1.
    EnvironmentFailedError
        A rank raised, died or hung; names rank, op, stage and micro-batch.
    """
    mechanism = _mechanism(options.split)
    _one_of("backend", options.backend, ("auto", "gloo", "nccl"))
    _one_of("optimizer", options.optimizer, ("adam", "sgd", "none"))
    _positive("steps", options.steps)
    time_unit(plan.instance)
    for used, option in (
        (plan.instance.recomputes, "recomputation (t_r)"),
        (plan.instance.replicas > 1, "several replicas"),
    ):
        if used:
            raise InputError(f"the runtime does not execute {option}: give a plan of an instance without")
    violations = check_plan(plan)
    if violations:
        raise InfeasibleError(f"the plan is not valid, nothing was started: {violations[0]}")
    backend = options.backend if options.backend != "auto" else "gloo" if options.emulate else "auto"
    job = Job(
        plans=(),
        model=options.model,
        steps=options.steps,
        warmup=options.warmup,
        emulate=options.emulate,
        payload_mib=options.payload_mib,
        check_gradients=options.check_gradients,
        split=mechanism,
        layers_per_stage=options.layers_per_stage,
        threads=options.threads,
        timeout=options.timeout,
        seed=options.seed,
        backend=choose_backend(backend, plan.instance.num_devices),
        optimizer=options.optimizer,
        learning_rate=options.learning_rate,
    )
    (outcome,) = launch([plan], job, progress)
    return outcome.trace


def _mechanism(name: str) -> Mechanism:
    _one_of("split", name, ("auto", "deferred", "generic"))
    return cast(Mechanism, name)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{option} is {value!r}: give one of {', '.join(allowed)}")


def _positive(option: str, value: int) -> None:
    if value < 1:
        raise InputError(f"{option} is {value}: give at least 1")
