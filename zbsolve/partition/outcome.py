"""What a joint decision is compared with, and the file that records it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zbsolve.errors import InfeasibleError
from zbsolve.partition.layers import Keep
from zbsolve.partition.problem import CHUNKS, Decision, DecisionProblem
from zbsolve.partition.search import JointResult
from zbsolve.partition.splits import even_split
from zbsolve.plan.plan import Plan
from zbsolve.solver.portfolio import solve

SCHEMA = "zbsolve.decision/1"


def even_decision(problem: DecisionProblem) -> Decision:
    """Equal numbers of layers on the cluster's first devices, in the file's order, by the first placement.

    Every stage is plain where that is allowed, else as the first choice has it.
    """
    placement = problem.placements[0]
    stages = CHUNKS[placement] * problem.num_devices
    return Decision(
        placement,
        tuple(range(problem.num_devices)),
        even_split(len(problem.profile.layers), stages),
        (Keep.plain if Keep.plain in problem.keeps else problem.keeps[0],) * stages,
    )


def even_plan(problem: DecisionProblem, time_limit: float = 5.0) -> Plan | None:
    """The best plan of the even split, solved as any instance; None where it does not fit in memory."""
    instance = problem.instance(even_decision(problem))
    try:
        return solve(instance, objective=problem.objective, time_limit=time_limit).plan
    except InfeasibleError:
        return None


def better_of(result: JointResult, even: Plan | None) -> JointResult:
    """The result with the even split's plan instead of its own, where that is better and was allowed.

    The joint bound holds for that decision, too.
    """
    if even is None or even.cost >= result.plan.cost:
        return result
    decision = even_decision(result.problem)
    if result.problem.split not in (None, decision.split):
        return result
    return replace(result, decision=decision, plan=even)


def to_json_dict(result: JointResult) -> dict[str, Any]:
    """The decision, its certificate and its plan as JSON data.

    ``devices`` names the cluster's device for each rank; ``lower_bound`` is the joint one, that of ``plan``
    for this decision alone.
    """
    problem, decision = result.problem, result.decision
    return {
        "schema": SCHEMA,
        "model": problem.profile.name,
        "cluster": problem.cluster.name,
        "microbatch_size": problem.profile.microbatch_size,
        "objective": problem.objective,
        "considered": {
            "placements": list(problem.placements),
            "keeps": [keep.value for keep in problem.keeps],
            "split": None if problem.split is None else list(problem.split),
            "decisions": result.decisions,
            "examined": result.examined,
        },
        "placement": decision.placement,
        "layers_per_stage": list(decision.split),
        "keep": [keep.value for keep in decision.keep],
        "devices": [
            {"rank": rank, "index": index, "name": problem.cluster.each[index].name}
            for rank, index in enumerate(decision.devices)
        ],
        "cost": result.plan.cost,
        "lower_bound": result.lower_bound,
        "gap": result.gap,
        "status": result.status,
        "statement": result.statement,
        "seconds": round(result.seconds, 3),
        "plan": result.plan.to_json_dict(),
    }
