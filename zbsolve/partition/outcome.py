"""What a joint decision is compared with, and the file that records it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zbsolve.errors import InfeasibleError
from zbsolve.partition.layers import Keep
from zbsolve.partition.problem import CHUNKS, Decision, DecisionProblem
from zbsolve.partition.search import JointResult
from zbsolve.partition.splits import even_split
from zbsolve.plan import Plan
from zbsolve.recompute import unfold
from zbsolve.simulator import simulate_for
from zbsolve.solver import certify, solve

SCHEMA = "zbsolve.decision/1"


def runnable_plan(result: JointResult) -> Plan:
    """The plan to run: each recomputation an R of its own, right before its B, timed anew.

    It ends no later than the plan of the search, in which R is part of B: R need not wait for the gradient.
    Without recomputation it is that plan. Its own bound holds for R anywhere, the joint bound for R right
    before B.
    """
    if Keep.recompute not in result.decision.keep:
        return result.plan
    instance = result.problem.instance(result.decision, fold=False)
    orders = unfold(instance, result.plan.schedule().orders)
    schedule = simulate_for(instance, orders, result.plan.objective)
    return certify(instance, schedule, result.plan.objective, result.plan.solver.name)


def even_decision(problem: DecisionProblem) -> Decision:
    """Equal numbers of layers on the cluster's first devices, in the file's order, by the first placement."""
    placement = problem.placements[0]
    stages = CHUNKS[placement] * problem.num_devices
    return Decision(
        placement,
        tuple(range(problem.num_devices)),
        even_split(len(problem.profile.layers), stages),
        (problem.keeps[0] if len(problem.keeps) == 1 else Keep.plain,) * stages,
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

    ``devices`` names the cluster's device for each rank; ``plan`` is :func:`runnable_plan`, its
    ``lower_bound`` for this decision alone; ``lower_bound`` is the joint one.
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
        "plan": runnable_plan(result).to_json_dict(),
    }
