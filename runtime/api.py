"""The runtime's front door: profile a model, run a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from zbsolve.errors import InfeasibleError
from zbsolve.model.instance import Instance, ModelCut, make_instance, place
from zbsolve.partition.splits import even_split
from zbsolve.plan.check import check_plan
from zbsolve.plan.plan import Plan
from zbsolve.run_options import LayerOptions, ProfileOptions, RunOptions
from zbsolve.runtime.execute.data import distinct_shapes
from zbsolve.runtime.measure import profiler
from zbsolve.runtime.measure.layer_profiler import profile_layers
from zbsolve.runtime.models import pipeline_model as models
from zbsolve.runtime.models.load import load_model
from zbsolve.runtime.ranks.job import Job
from zbsolve.runtime.ranks.launch import launch
from zbsolve.runtime.ranks.outcome import Outcome, time_unit
from zbsolve.trace.trace import Trace

Progress = Callable[[str], None]

__all__ = [
    "LayerOptions",
    "ProfileOptions",
    "RunOptions",
    "profile_layers",
    "profile_model",
    "run_plan",
    "train",
    "train_by_turns",
]


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
    options.check()
    run_options = RunOptions(
        model=options.model,
        steps=options.repeats,
        warmup=options.warmup,
        check_gradients=False,
        split=options.split,
        threads=options.threads,
        timeout=options.timeout,
        seed=options.seed,
        optimizer="none",
        green_contexts=options.green_contexts,
    )
    model = load_model(options.model, options.seed)
    devices = place(options.num_devices, options.placement, options.chunks)
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
    steps = range(1 + options.warmup + options.repeats)
    unlike = distinct_shapes(model, steps, options.num_microbatches, options.seed) > 1
    if unlike and progress is not None:
        progress(
            "micro-batches are of unlike shapes: each is measured, and one time a stage, the mean over a "
            "step's micro-batches, stands for all"
        )
    job = Job(replace(run_options, layers_per_stage=split))
    plans = [profiler.profiling_plan(draft, fused) for fused in (False, True)]
    split_run, fused_run = launch(plans, job, progress)
    instance = profiler.build_instance(draft, split_run, fused_run, progress, unlike=unlike)
    source = ModelCut(factory=options.model, split=options.split, layers_per_stage=split)
    return instance.with_changes(model=source)


def run_plan(plan: Plan, options: RunOptions, progress: Progress | None = None) -> Trace:
    """Execute a plan with one process a device on this host and measure every op; see :func:`train`."""
    return train(plan, options, progress).trace


def train(plan: Plan, options: RunOptions, progress: Progress | None = None) -> Outcome:
    """Execute a plan like :func:`run_plan`; also what happened beside the trace (rollbacks, memory).

    Raises
    ------
    InfeasibleError
        The plan breaks a rule; nothing was started.
    InputError
        Options, model or plan do not fit together; refused before step 1.
    EnvironmentFailedError
        A rank raised, died or hung; names rank, op, stage and micro-batch.
    """
    return train_by_turns([plan], options, progress)[0]


def train_by_turns(
    plans: Sequence[Plan], options: RunOptions, progress: Progress | None = None
) -> list[Outcome]:
    """Several plans of one model in one group of ranks, step by step by turns; errors as of :func:`train`.

    A machine that slows down, for seconds or for good, does so for all of them: what they are compared by.
    """
    options.check()
    for plan in plans:
        time_unit(plan.instance)
        violations = check_plan(plan)
        if violations:
            raise InfeasibleError(f"the plan is not valid, nothing was started: {violations[0]}")
    return launch(plans, Job(options), progress)
