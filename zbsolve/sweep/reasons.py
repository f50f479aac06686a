"""Why a way to use the devices is recommended: the usual rules of thumb, each with this model's own figures.

A rule is shown also where it does not hold for the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from zbsolve.baselines import BASELINES
from zbsolve.partition.outcome import even_decision, even_plan
from zbsolve.partition.problem import DecisionProblem
from zbsolve.sweep.grid import Inputs, Outcome, evaluate
from zbsolve.sweep.ways import STEPS, WORTH_IT, Candidate, problem_of
from zbsolve.words import percent


@dataclass(frozen=True, slots=True)
class Reason:
    """A rule of thumb, what it says here, and whether it speaks for the recommendation."""

    rule: str
    figures: str
    speaks_for: bool


def reasons_for(
    inputs: Inputs, global_batch: int, best: Candidate, candidates: Sequence[Candidate]
) -> Iterable[Reason]:
    """Every rule that has something to say about the best candidate."""
    config, outcome = best.config, best.outcome
    yield _fits_without(inputs, best, candidates)
    yield Reason(
        "m = B / (b d): the more micro-batches, the smaller the bubble's share",
        f"m = {config.m} over p = {config.p}: 1F1B's bubble on equal stages would be (p-1)/m = "
        f"{percent((config.p - 1) / config.m)} of the work",
        config.m >= config.p,
    )
    if config.d > 1:
        share = outcome.all_reduce / outcome.step
        yield Reason(
            "replicas cost an all-reduce of the gradients (not overlapped here)",
            f"{outcome.all_reduce:.4g} of {outcome.step:.4g} {inputs.cluster.time_unit} a step, "
            f"{percent(share)}",
            share < 0.1,
        )
    if config.p == 1:
        return
    problem = problem_of(inputs, best)
    yield from _schedules(inputs, best)
    yield _placement(best, candidates)
    yield _split(problem, outcome)
    yield _backward(problem)
    yield _memory(inputs, best)
    yield _links(problem, outcome)


def _fits_without(inputs: Inputs, best: Candidate, candidates: Sequence[Candidate]) -> Reason:
    profile = inputs.profile(best.config.microbatch_size)
    need = sum(layer.static_mem + max(layer.mem_b, layer.mem_w) for layer in profile.layers)
    most = max(device.memory for device in inputs.cluster.each)
    alone = next((c for c in candidates if c.config.p == 1), None)
    unit = profile.memory_unit
    figures = f"one micro-batch of the whole model takes about {need:,.6g} {unit}, a device has {most:,.6g}"
    if alone is not None:
        slower = alone.outcome.per_sample / best.outcome.per_sample - 1
        figures += "; it fits"
        figures += f", and data parallel alone is {percent(slower)} slower" if best is not alone else ""
    else:
        figures += ": it does not fit"
    rule = "no pipeline where the model fits without one"
    return Reason(rule, figures, (alone is None) == (best.config.p > 1) or best is alone)


def _schedules(inputs: Inputs, best: Candidate) -> Iterable[Reason]:
    """The hand-made schedules on the same devices, each on the balanced split."""
    costs: dict[str, float] = {}
    for name in BASELINES:
        outcome = evaluate(inputs, replace(best.config, schedule=name, recompute=False))
        if outcome.status == "ok":
            costs[name] = outcome.step
    if not costs:
        yield Reason("hand-made schedules", "none fits in this memory on these stages", True)
        return
    name = min(costs, key=lambda n: costs[n])
    gain = 1 - best.outcome.step / costs[name]
    listed = ", ".join(f"{n} {cost:.5g}" for n, cost in sorted(costs.items(), key=lambda item: item[1]))
    yield Reason(
        "a hand-made schedule is enough where it is as fast",
        f"solved {best.outcome.step:.5g} against {listed} {inputs.cluster.time_unit}: "
        f"{percent(gain)} of the step below {name}, the best of them",
        gain >= WORTH_IT,
    )
    if "1f1b" in costs:
        config, gain = best.config, 1 - best.outcome.step / costs["1f1b"]
        yield Reason(
            "1F1B is good from m = 4 p on",
            f"m = {config.m / config.p:.3g} p; over 1F1B the plan gains {percent(gain)} of the step",
            gain >= WORTH_IT,
        )


def _placement(best: Candidate, candidates: Sequence[Candidate]) -> Reason:
    config = best.config
    same = [
        c
        for c in candidates
        if (c.config.p, c.config.d, c.config.microbatch_size) == (config.p, config.d, config.microbatch_size)
        and c.config.placement != config.placement
    ]
    rule = "two chunks a device pay when m is small and links are good"
    if not same:
        return Reason(rule, f"no other placement fits; {config.placement} is used", True)
    other = same[0]
    slower = other.outcome.step / best.outcome.step - 1
    return Reason(
        rule,
        f"{other.config.placement} instead of {config.placement} is {percent(slower)} slower",
        slower >= 0,
    )


def _split(problem: DecisionProblem, outcome: Outcome) -> Reason:
    even = even_plan(problem, time_limit=2.0)
    split = ",".join(map(str, outcome.layers_per_stage))
    rule = "unequal layers want an unequal split"
    if even is None:
        return Reason(rule, f"the even split does not fit in memory; {split} does", True)
    gain = 1 - outcome.makespan / even.makespan
    return Reason(
        rule, f"{split} takes {percent(gain)} less than the even split, solved as well", gain >= WORTH_IT
    )


def _backward(problem: DecisionProblem) -> Reason:
    layers = problem.profile.layers
    t_b, t_w = sum(layer.t_b for layer in layers), sum(layer.t_w for layer in layers)
    fused = [layer.t_bw for layer in layers if layer.t_bw is not None]
    rule = "B and W apart (ZB-H1, ZB-1p) where the split is cheap"
    share = t_w / (t_b + t_w) if t_b + t_w else 0.0
    figures = f"W is {share:.0%} of the backward"
    if len(fused) < len(layers) or not sum(fused):
        return Reason(rule, figures + "; the profile has no fused backward to compare with", share > 0.1)
    dearer = (t_b + t_w) / sum(fused) - 1
    return Reason(rule, f"{figures}; B + W take {percent(dearer)} more than a fused BW", dearer < 0.1)


def _memory(inputs: Inputs, best: Candidate) -> Reason:
    """What half of the memory for activations would cost: spare memory is what ZB-2p and ZB-V use."""
    least = min(device.memory for device in inputs.cluster.each)
    rule = "more memory buys a smaller bubble (ZB-2p, ZB-V), up to a point"
    if least == float("inf"):
        return Reason(rule, "the cluster states no memory limit", True)
    half = evaluate(inputs, replace(best.config, memory=0.7 * best.config.memory), STEPS)
    used = best.outcome.peak_memory
    unit = inputs.cluster.memory_unit
    if half.status != "ok":
        return Reason(rule, f"the plan holds {used:,.6g} {unit} at most; with 70 % nothing fits", True)
    slower = half.step / best.outcome.step - 1
    return Reason(
        rule,
        f"the plan holds {used:,.6g} {unit} at most; with 70 % of the memory a step takes "
        f"{percent(slower)} longer",
        slower >= WORTH_IT,
    )


def _links(problem: DecisionProblem, outcome: Outcome) -> Reason:
    decision = replace(even_decision(problem), split=outcome.layers_per_stage)
    instance = problem.instance(decision)
    work = max(stage.t_f for stage in instance.stages)
    longest = max((instance.hop(b) for b in range(instance.num_stages - 1)), default=0.0)
    share = longest / work if work else 0.0
    tail = "; overlapping it (F&B pairs, DualPipe) would pay" if share > 0.2 else ""
    return Reason(
        "long hops want fewer chunks, or overlap (DualPipe, DualPipeV for cross-node MoE)",
        f"the longest hop is {percent(share)} of the longest stage's F{tail}",
        share <= 0.2,
    )
