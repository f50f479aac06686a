"""From a profile and a cluster to one recommendation, with the figures behind it.

Everything is computed, nothing looked up: each way to use the devices (p x d, placement, micro-batch size) is
costed as in a sweep, the best is compared with the hand-made schedules on the same stages, and the question
is asked again with less memory, slower links and other batches until the answer changes. The usual rules of
thumb appear as reasons with this model's own figures, also where they do not hold for it.

Not in the figures: overlap of the gradients' all-reduce with the last backwards, tensor and expert
parallelism, and F&B overlap, which is only pointed at where hops are long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zbsolve.baselines import BASELINES
from zbsolve.errors import InfeasibleError
from zbsolve.partition.cluster import Cluster
from zbsolve.partition.layers import Keep
from zbsolve.partition.outcome import even_decision, even_plan
from zbsolve.partition.problem import DecisionProblem, Placement
from zbsolve.sweep.grid import Config, Grid, Inputs, Outcome, evaluate
from zbsolve.words import percent

# How many rivals are costed again under other circumstances.
RIVALS = 3

# Families that the joint search divides per pipeline device: for each way, and under another circumstance.
STEPS = 4
STEPS_AGAIN = 2

# Below this share of the step a gain is called none: a profile is not that exact.
WORTH_IT = 0.01

# Circumstances that are tried in turn until another configuration wins.
LESS_MEMORY = (0.9, 0.8, 0.65, 0.5)
SLOWER_LINKS = (4.0, 16.0, 64.0)
OTHER_BATCHES = (0.5, 0.25, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration and what it costs."""

    config: Config
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Reason:
    """A rule of thumb, what it says here, and whether it speaks for the recommendation."""

    rule: str
    figures: str
    speaks_for: bool


@dataclass(frozen=True, slots=True)
class Change:
    """A circumstance, and what would be best then (None: the recommendation stays best as far as tried)."""

    circumstance: str
    then: Candidate | None
    gain: float = 0.0


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommendation, why, the next best, and what would change it."""

    best: Candidate
    next_best: Candidate | None
    reasons: tuple[Reason, ...]
    changes: tuple[Change, ...]
    candidates: tuple[Candidate, ...]

    def to_json_dict(self) -> dict[str, Any]:
        """As JSON data."""

        def shown(candidate: Candidate | None) -> dict[str, Any] | None:
            if candidate is None:
                return None
            fields = ("p", "d", "placement", "microbatch_size", "m", "schedule", "recompute")
            costs = ("step", "all_reduce", "per_sample", "lower_bound", "peak_memory", "layers_per_stage")
            return {
                **{name: getattr(candidate.config, name) for name in fields},
                **{name: getattr(candidate.outcome, name) for name in costs},
            }

        return {
            "schema": "zbsolve.advice/1",
            "best": shown(self.best),
            "next_best": shown(self.next_best),
            "reasons": [
                {"rule": r.rule, "figures": r.figures, "speaks_for": r.speaks_for} for r in self.reasons
            ],
            "changes": [
                {"circumstance": c.circumstance, "then": shown(c.then), "gain": c.gain} for c in self.changes
            ],
            "candidates": [shown(candidate) for candidate in self.candidates],
        }


def advise(
    inputs: Inputs,
    global_batch: int,
    *,
    microbatch_sizes: tuple[int, ...] = (1,),
    placements: tuple[Placement, ...] = ("linear", "v"),
    progress: Callable[[str], None] | None = None,
) -> Advice:
    """Recommend how to train ``global_batch`` samples a step.

    Raises
    ------
    InfeasibleError
        Nothing fits, not even with every activation recomputed.
    """
    say = progress or (lambda _: None)
    configs = _ways(inputs.cluster, global_batch, microbatch_sizes, placements)
    candidates = _costed(inputs, configs, say)
    if not candidates:
        candidates = _costed(inputs, [replace(c, recompute=True) for c in configs], say)
    if not candidates:
        raise InfeasibleError(
            "infeasible: no way to use these devices holds the model, not even when every activation is "
            "recomputed: use more devices, or devices with more memory"
        )
    best = candidates[0]
    say("the hand-made schedules")
    reasons = tuple(_reasons(inputs, global_batch, best, candidates))
    changes = tuple(_changes(inputs, global_batch, candidates, say))
    return Advice(best, candidates[1] if len(candidates) > 1 else None, reasons, changes, tuple(candidates))


def _ways(
    cluster: Cluster, global_batch: int, sizes: tuple[int, ...], placements: tuple[Placement, ...]
) -> list[Config]:
    n = cluster.num_devices
    counts = tuple(k for k in range(1, n + 1) if n % k == 0)
    grid = Grid(p=counts, d=counts, placements=placements, microbatch_sizes=sizes, global_batch=global_batch)
    # One device has no use for a second chunk; half the devices are no faster than all of them.
    return [
        config
        for config in grid.configs(cluster)
        if not (config.p == 1 and config.placement != "linear") and config.p * config.d == n
    ] or grid.configs(cluster)


def _costed(
    inputs: Inputs, configs: Iterable[Config], say: Callable[[str], None], steps: int = STEPS
) -> list[Candidate]:
    """Those that fit, fastest first; in front of them the simplest of those that are about as fast."""
    found = []
    for config in configs:
        say(str(config))
        outcome = evaluate(inputs, config, steps)
        if outcome.status == "ok":
            found.append(Candidate(config, outcome))
    found.sort(key=_effort)
    fastest = min((c.outcome.per_sample for c in found), default=0.0)
    best = min(
        (c for c in found if c.outcome.per_sample <= fastest * (1 + WORTH_IT)), key=_simplicity, default=None
    )
    return [] if best is None else [best, *(c for c in found if c is not best)]


def _effort(candidate: Candidate) -> tuple[float, int, bool]:
    return round(candidate.outcome.per_sample, 9), *_simplicity(candidate)[:2]


def _simplicity(candidate: Candidate) -> tuple[int, bool, bool, float]:
    """Fewer pipeline devices, one chunk each, nothing recomputed."""
    config = candidate.config
    return config.p, config.placement != "linear", config.recompute, candidate.outcome.per_sample


# --- reasons --------------------------------------------------------------------------------------------


def _reasons(
    inputs: Inputs, global_batch: int, best: Candidate, candidates: Sequence[Candidate]
) -> Iterable[Reason]:
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


def problem_of(inputs: Inputs, candidate: Candidate) -> DecisionProblem:
    """The decision that the slowest replica of a candidate leaves open."""
    config = candidate.config
    first = candidate.outcome.slowest * config.p
    part = inputs.cluster.with_memory(config.memory).part(first, config.p)
    return DecisionProblem(
        inputs.profile(config.microbatch_size),
        part,
        config.p,
        config.m,
        placements=(config.placement,),
        keeps=(Keep.plain, Keep.checkpoint) if config.recompute else (Keep.plain,),
    )


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


# --- what would change it ---------------------------------------------------------------------------------


def _changes(
    inputs: Inputs, global_batch: int, candidates: Sequence[Candidate], say: Callable[[str], None]
) -> Iterable[Change]:
    rivals = candidates[:RIVALS]

    def memory(factor: float) -> tuple[Inputs, list[Config]]:
        cluster = inputs.cluster.with_memory(factor)
        configs = [c.config for c in rivals]
        return replace(inputs, cluster=cluster), [*configs, replace(configs[0], recompute=True)]

    def links(factor: float) -> tuple[Inputs, list[Config]]:
        return replace(inputs, cluster=inputs.cluster.with_links(factor)), [c.config for c in rivals]

    def batch(factor: float) -> tuple[Inputs, list[Config]]:
        wanted = global_batch * factor
        sizes = [(c.config, c.config.d * c.config.microbatch_size) for c in rivals]
        whole = [replace(c, m=round(wanted / unit)) for c, unit in sizes if wanted % unit == 0]
        return inputs, [c for c in whole if c.m >= 1]

    limited = any(device.memory < float("inf") for device in inputs.cluster.each)
    questions: list[tuple[str, Sequence[float], Callable[[float], tuple[Inputs, list[Config]]]]] = []
    if limited:
        questions.append(("memory x{:g}", LESS_MEMORY, memory))
    questions.append(("links {:g} times slower", SLOWER_LINKS, links))
    questions += [(f"batch x{factor:g}", (factor,), batch) for factor in OTHER_BATCHES]
    best = candidates[0].config
    for text, factors, make in questions:
        yield _first_change(text, factors, make, best, say)


def _first_change(
    text: str,
    factors: Sequence[float],
    make: Callable[[float], tuple[Inputs, list[Config]]],
    best: Config,
    say: Callable[[str], None],
) -> Change:
    """The first factor at which another configuration is faster by what is worth it, or the last tried."""
    for factor in factors:
        say(text.format(factor))
        found = _costed(*make(factor), say=lambda _: None, steps=STEPS_AGAIN)
        if not found:
            return Change(text.format(factor) + ": nothing fits any more", None)
        stays = next((c for c in found if replace(c.config, m=best.m) == best), None)
        if stays is None:
            return Change(text.format(factor) + " (the recommendation no longer fits)", found[0])
        gain = 1 - found[0].outcome.per_sample / stays.outcome.per_sample
        if gain >= WORTH_IT:
            return Change(text.format(factor), found[0], gain)
        if replace(found[0].config, m=best.m) != best:
            return Change(text.format(factor) + " (then as good, and simpler)", found[0])
    return Change(f"{text.format(factors[-1])}: no change", None)
