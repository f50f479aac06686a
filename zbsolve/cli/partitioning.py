"""``partition``: layers into stages, by their times alone or as one decision with the schedule."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zbsolve.cli.base import command, echo_json, make_console, say_interrupted, status
from zbsolve.cli.inputs import (
    GapOption,
    LimitOption,
    Objective,
    ObjectiveOption,
    Placement,
    SeedOption,
    check_writable,
    integers,
    placement_names,
    require_positive,
)
from zbsolve.cli.names import shipped, shipped_or_file
from zbsolve.errors import InputError

if TYPE_CHECKING:
    from zbsolve.partition.cluster import Cluster
    from zbsolve.partition.layers import LayerProfile
    from zbsolve.partition.problem import Decision, DecisionProblem
    from zbsolve.partition.search import JointResult
    from zbsolve.plan.plan import Plan


class KeepOption(StrEnum):
    """What may be done with activations to save memory."""

    recompute = "recompute"
    checkpoint = "checkpoint"
    offload = "offload"


LayersArgument = Annotated[
    str,
    typer.Argument(
        metavar="LAYERS.json",
        help="Layer profile, or a shipped model's name.",
        autocompletion=shipped("model"),
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        metavar="C.json",
        help="Cluster file, or a shipped cluster's name.",
        autocompletion=shipped("cluster"),
    ),
]


@command("partition")
def partition_command(
    layers: LayersArgument,
    devices: Annotated[
        int | None, typer.Option("--devices", "-p", min=1, help="Devices (default: the cluster's).")
    ] = None,
    microbatches: Annotated[int, typer.Option("--microbatches", "-m", min=1, help="Micro-batches.")] = 8,
    hop: Annotated[
        float, typer.Option("--hop", min=0.0, help="Latency between devices, without --cluster.")
    ] = 0.0,
    memory: Annotated[
        float | None, typer.Option(min=0.0, help="Memory of each device, without --cluster.")
    ] = None,
    cluster: ClusterOption = None,
    memory_share: Annotated[
        float, typer.Option(metavar="X", help="Allow this share of the devices' memory.")
    ] = 1.0,
    joint: Annotated[
        bool, typer.Option("--joint", help="Decide split, devices and order of passes together.")
    ] = False,
    placement: Annotated[
        list[Placement] | None, typer.Option(help="Placement to consider; repeatable (default: linear).")
    ] = None,
    allow: Annotated[
        list[KeepOption] | None,
        typer.Option(help="Also let stages recompute, checkpoint or offload; repeatable."),
    ] = None,
    layers_per_stage: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Keep this split, decide the rest.")
    ] = None,
    objective: ObjectiveOption = Objective.makespan,
    time_limit: LimitOption = 60.0,
    gap: GapOption = 0.0,
    seed: SeedOption = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="I.json", help="Write the instance here.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(metavar="P.json", help="Write the plan here.")] = None,
    decision: Annotated[
        Path | None, typer.Option(metavar="D.json", help="Write decision, certificate and plan here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the decision alone on stdout.")] = False,
) -> None:
    """Split layers into stages, by time alone or jointly.

    By itself: the split whose busiest stage is least busy (one stage a device), beside the split into equal
    numbers of layers. With --joint, or any option that needs it: split, device order, placement and order of
    passes as one decision under the devices' memory, with a lower bound that holds for all of them.
    """
    from zbsolve.files.atomic import write_json_atomically
    from zbsolve.partition import layers as layer_files
    from zbsolve.partition import splits
    from zbsolve.report import text

    for path in (output, plan, decision):
        check_writable(path)
    require_positive(time_limit, "--time-limit")
    profile = layer_files.load_layers(shipped_or_file(layers, "model"))
    needs_joint = (cluster, memory, plan, decision, layers_per_stage)
    joint = joint or as_json or bool(placement) or bool(allow) or any(v is not None for v in needs_joint)
    problem = _problem(
        profile,
        _machines(profile, cluster, devices, hop, memory, memory_share),
        devices,
        microbatches,
        objective,
        placement,
        allow,
        layers_per_stage,
    )
    if not as_json and cluster is None:
        costs = [layer.cost for layer in profile.layers]
        p = problem.num_devices
        shown = {"even": splits.even_split(len(costs), p), "balanced": splits.balanced_split(costs, p)}
        make_console().print(text.partition_table(costs, shown, profile.time_unit))
    if not joint:
        if output is not None:
            instance = problem.instance(_balanced(problem))
            write_json_atomically(output, instance.to_json_dict())
            typer.echo(f"wrote {output}")
        return
    from zbsolve.partition.outcome import better_of, even_plan, to_json_dict

    result = _decide(problem, time_limit, gap, seed)
    _write(result, output, plan, decision)
    if as_json:
        echo_json(to_json_dict(result))
        return
    even = even_plan(problem, min(10.0, time_limit))
    better = better_of(result, even)
    if better is not result:
        _write(better, output, plan, decision)
    _print_joint(better, even)
    for path in (output, plan, decision):
        if path is not None:
            typer.echo(f"wrote {path}")


def _machines(
    profile: LayerProfile,
    name: str | None,
    devices: int | None,
    hop: float,
    memory: float | None,
    share: float,
) -> Cluster:
    from zbsolve.partition.cluster import equal_cluster, load_cluster

    if not 0 < share < math.inf:
        raise InputError(f"--memory-share {share:g}: give a positive number, such as 0.8")
    if not hop < math.inf:
        raise InputError(f"--hop {hop:g}: give a finite latency")
    if name is not None:
        if hop or memory is not None:
            raise InputError("--hop and --memory: the cluster file has them: leave them out with --cluster")
        return load_cluster(shipped_or_file(name, "cluster")).with_memory(share)
    if devices is None:
        raise InputError("--devices is missing: give the number of devices with -p, or --cluster C.json")
    return equal_cluster(
        devices,
        memory=None if memory is None else memory * share,
        hop=hop,
        time_unit=profile.time_unit,
        memory_unit=profile.memory_unit,
    )


def _problem(
    profile: LayerProfile,
    machines: Cluster,
    devices: int | None,
    microbatches: int,
    objective: Objective,
    placements: list[Placement] | None,
    allow: list[KeepOption] | None,
    split: str | None,
) -> DecisionProblem:
    from zbsolve.partition.layers import Keep
    from zbsolve.partition.problem import DecisionProblem

    return DecisionProblem(
        profile=profile,
        cluster=machines,
        num_devices=devices or machines.num_devices,
        num_microbatches=microbatches,
        objective=objective.value,
        placements=placement_names(placements, "linear"),
        keeps=(Keep.plain, *dict.fromkeys(Keep(choice.value) for choice in allow or ())),
        split=integers(split, "--layers-per-stage"),
    )


def _balanced(problem: DecisionProblem) -> Decision:
    from zbsolve.partition.layers import Keep
    from zbsolve.partition.problem import Decision
    from zbsolve.partition.splits import balanced_split

    p = problem.num_devices
    split = balanced_split([layer.cost for layer in problem.profile.layers], p)
    return Decision("linear", tuple(range(p)), split, (Keep.plain,) * p)


def _decide(problem: DecisionProblem, time_limit: float, gap: float, seed: int) -> JointResult:
    from zbsolve.partition.search import decide

    with status(f"deciding {problem.profile.name} …") as update:
        result = decide(problem, time_limit=time_limit, gap=gap, seed=seed, progress=update)
    if result.interrupted:
        say_interrupted()
    return result


def _write(result: JointResult, output: Path | None, plan: Path | None, decision: Path | None) -> None:
    from zbsolve.files.atomic import write_json_atomically
    from zbsolve.partition.outcome import to_json_dict

    if output is not None:
        write_json_atomically(output, result.plan.instance.to_json_dict())
    if plan is not None:
        result.plan.save(plan)
    if decision is not None:
        write_json_atomically(decision, to_json_dict(result))


def _print_joint(result: JointResult, even: Plan | None) -> None:
    from zbsolve.report.decision_text import decision_table, joint_lines

    make_console().print(decision_table(result))
    for line in joint_lines(result, even):
        typer.echo(line)
