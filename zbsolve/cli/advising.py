"""``advise``: one recommendation for a model on a cluster, with its reasons."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zbsolve.cli.base import command, echo_json, make_console, say_interrupted, status
from zbsolve.cli.inputs import (
    JsonOption,
    Placement,
    check_writable,
    integers,
    load_profiles,
    placement_names,
    require_positive,
)
from zbsolve.cli.names import shipped

if TYPE_CHECKING:
    from zbsolve.partition.search import JointResult
    from zbsolve.sweep.advise import Advice
    from zbsolve.sweep.grid import Inputs


@command("advise")
def advise_command(
    layers: Annotated[
        list[str],
        typer.Argument(
            metavar="LAYERS.json…",
            help="Layer profiles (one a micro-batch size), or a model.",
            autocompletion=shipped("model"),
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(
            metavar="C.json", help="Cluster file or shipped name.", autocompletion=shipped("cluster")
        ),
    ],
    batch: Annotated[int, typer.Option(min=1, help="Samples a step, over all replicas.")],
    microbatch_size: Annotated[
        str, typer.Option("--microbatch-size", "-b", metavar="N,N,…", help="Samples per micro-batch.")
    ] = "1",
    placement: Annotated[
        list[Placement] | None, typer.Option(help="Placement to consider; repeatable (default: linear, v).")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="P.json", help="Solve the recommendation further, write its plan.")
    ] = None,
    time_limit: Annotated[float, typer.Option(metavar="S", help="Seconds to search for --plan.")] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Recommend how to train a model on a cluster, and say why.

    Costs every way to use all devices (p x d, placement, micro-batch size), and gives the best with the
    figures behind it, the next best, and what would change the answer. Among ways within 1 % of the fastest
    it takes the simplest.
    """
    from zbsolve.sweep.advise import advise

    check_writable(plan)
    require_positive(time_limit, "--time-limit")
    inputs = load_profiles(layers, cluster)
    with status("advising …") as update:
        advice = advise(
            inputs,
            batch,
            microbatch_sizes=integers(microbatch_size, "--microbatch-size") or (1,),
            placements=placement_names(placement, "linear", "v"),
            progress=lambda text: update(f"advising: {text}"),
        )
        solved = None if plan is None else _solve(inputs, advice, time_limit)
    if solved is not None and solved.interrupted:
        say_interrupted()
    if solved is not None and plan is not None:
        solved.plan.save(plan)
    if as_json:
        echo_json(advice.to_json_dict())
    else:
        _print_advice(inputs, advice)
        if solved is not None:
            typer.echo(
                f"wrote {plan} (the slowest replica): makespan {solved.plan.makespan:.6g}, "
                f"joint bound {solved.lower_bound:.6g}, gap {solved.gap:.3%}"
            )


def _solve(inputs: Inputs, advice: Advice, time_limit: float) -> JointResult:
    from zbsolve.partition.search import decide
    from zbsolve.sweep.ways import problem_of

    return decide(problem_of(inputs, advice.best), time_limit=time_limit)


def _print_advice(inputs: Inputs, advice: Advice) -> None:
    from zbsolve.report.advice_text import candidate_table, change_lines, reason_table, summary_lines

    console = make_console()
    for line in summary_lines(advice, inputs.cluster.time_unit, inputs.cluster.memory_unit):
        typer.echo(line)
    console.print(reason_table(advice))
    typer.echo("what would change it:")
    for line in change_lines(advice):
        typer.echo(f"  {line}")
    console.print(candidate_table(advice, inputs.cluster.time_unit, inputs.cluster.memory_unit))
