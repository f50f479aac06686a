"""From a profile and a cluster to one recommendation, with the figures behind it.

Everything is computed, nothing looked up: each way to use the devices (p x d, placement, micro-batch size) is
costed as in a sweep, the best is compared with the hand-made schedules on the same stages, and the question
is asked again with less memory, slower links and other batches until the answer changes. Reasons are in
:mod:`zbsolve.sweep.reasons`.

Not in the figures: overlap of the gradients' all-reduce with the last backwards, tensor and expert
parallelism, and F&B overlap, which is only pointed at where hops are long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zbsolve.errors import InfeasibleError
from zbsolve.partition.problem import Placement
from zbsolve.sweep.grid import Config, Inputs
from zbsolve.sweep.reasons import Reason, reasons_for
from zbsolve.sweep.ways import WORTH_IT, Candidate, costed, ways

# How many rivals are costed again under other circumstances.
RIVALS = 3
# Families that the joint search divides per pipeline device under another circumstance.
STEPS_AGAIN = 2

# Circumstances that are tried in turn until another configuration wins.
LESS_MEMORY = (0.9, 0.8, 0.65, 0.5)
SLOWER_LINKS = (4.0, 16.0, 64.0)
OTHER_BATCHES = (0.5, 0.25, 2.0, 4.0)


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
    configs = ways(inputs.cluster, global_batch, microbatch_sizes, placements)
    candidates = costed(inputs, configs, say)
    if not candidates:
        candidates = costed(inputs, [replace(c, recompute=True) for c in configs], say)
    if not candidates:
        raise InfeasibleError(
            "infeasible: no way to use these devices holds the model, not even when every activation is "
            "recomputed: use more devices, or devices with more memory"
        )
    best = candidates[0]
    say("the hand-made schedules")
    reasons = tuple(reasons_for(inputs, global_batch, best, candidates))
    changes = tuple(_changes(inputs, global_batch, candidates, say))
    return Advice(best, candidates[1] if len(candidates) > 1 else None, reasons, changes, tuple(candidates))


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
        found = costed(*make(factor), say=lambda _: None, steps=STEPS_AGAIN)
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
