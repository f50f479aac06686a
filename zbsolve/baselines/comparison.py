"""The solved plan beside every hand-made schedule on the same model and devices: figures, no formatting.

A baseline that runs a fused backward is timed with BW = ``t_bw``, or ``t_b + t_w`` where the instance gives
none. A schedule of another placement runs on the instance cut anew (:mod:`zbsolve.model.recut`), one of two
replicas on the doubled one; its row says so. A baseline over the memory cap is still listed, marked as not
fitting.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from zbsolve.baselines import BASELINES
from zbsolve.errors import InputError, ZbsolveError
from zbsolve.model.bubble import bubble_rate
from zbsolve.model.instance import Instance
from zbsolve.model.memory import Breakdown, peak_breakdown, peak_memory
from zbsolve.model.recut import recut
from zbsolve.model.schedule import Schedule
from zbsolve.plan.make import peaks_of
from zbsolve.plan.plan import Plan

# What may be changed to run a schedule, and a word for it.
SHORT = {
    "one chunk per device in a line": "line",
    "two chunks per device in a loop": "loop",
    "two chunks per device in a V": "V",
    "one replica in a line": "1 replica",
    "two replicas": "2 replicas",
    "recomputation, stage inputs not counted": "recomputed",
    "recomputation": "recomputed",
}

# Less than this share of the step is rounding, not a gain.
NO_GAIN = 5e-5


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule on one model and its devices.

    Attributes
    ----------
    bubble_rate_makespan, bubble_rate_span : float
        1 - work / cost.
    r_bubble_makespan, r_bubble_span : float, optional
        t_bubble / t_ideal, the other convention: cost / work - 1 (None where there is no work).
    peak_memory : float
        Highest over the devices; ``peaks`` has each device's, broken down.
    hops : int
        Boundaries between devices that a micro-batch crosses on its way through the model.
    parameters : int
        How often the parameters are held.
    gain : float, optional
        Over 1F1B, as a share of 1F1B's step (None without 1F1B).
    runs_on : str
        "" on the instance as it is; else what was changed to run this schedule.
    """

    name: str
    makespan: float
    span: float
    bubble_rate_makespan: float
    bubble_rate_span: float
    r_bubble_makespan: float | None
    r_bubble_span: float | None
    peak_memory: float
    peaks: tuple[Breakdown, ...]
    hops: int
    parameters: int
    fits_cap: bool
    gain: float | None
    runs_on: str = ""

    @property
    def gain_text(self) -> str:
        """The gain in words."""
        return gain_text(self.gain)

    @property
    def label(self) -> str:
        """The name, with a word on what was changed to run it."""
        return self.name + (f" ({SHORT[self.runs_on]})" if self.runs_on else "")

    @property
    def fullest(self) -> tuple[int, Breakdown]:
        """The device with the highest peak, and what it holds then."""
        return max(enumerate(self.peaks), key=lambda item: (sum(item[1]), -item[0]))


@dataclass(frozen=True, slots=True)
class ComparisonTable:
    """All rows, the solved plan last, and the baselines that do not apply with the rule they need."""

    rows: tuple[Row, ...]
    not_applicable: tuple[tuple[str, str], ...]
    one_f_one_b: str

    def to_json_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "schema": "zbsolve.comparison/1",
            "rows": [{**asdict(row), "peaks": [each._asdict() for each in row.peaks]} for row in self.rows],
            "not_applicable": [{"name": name, "rule": rule} for name, rule in self.not_applicable],
        }


def gain_text(gain: float | None) -> str:
    """A gain over 1F1B in per cent of the step; a loss and no gain are said plainly."""
    if gain is None:
        return "-"
    if abs(gain) < NO_GAIN:
        return "no gain"
    return f"{gain:.1%} of the step" if gain > 0 else f"{-gain:.1%} slower"


def make_row(
    name: str,
    instance: Instance,
    objective: str,
    timed_on: Instance,
    schedule: Schedule,
    reference: float | None,
    runs_on: str = "",
) -> Row:
    """Figures of one schedule on an instance; ``reference`` is 1F1B's cost under the objective.

    Memory is judged by the cap of ``instance``: some baselines are built under a cap of their own.
    """
    peaks = peaks_of(timed_on, schedule)
    cost = schedule.cost(objective)
    rates = [bubble_rate(schedule, cost) for cost in (schedule.makespan, schedule.span)]
    return Row(
        name=name,
        makespan=schedule.makespan,
        span=schedule.span,
        bubble_rate_makespan=rates[0],
        bubble_rate_span=rates[1],
        r_bubble_makespan=_over_work(rates[0]),
        r_bubble_span=_over_work(rates[1]),
        peak_memory=max(peaks),
        peaks=tuple(
            peak_breakdown(timed_on, device, order, schedule.pairs)
            for device, order in enumerate(schedule.orders)
        ),
        hops=sum(timed_on.crosses(boundary) for boundary in range(timed_on.chain - 1)),
        parameters=timed_on.replicas,
        fits_cap=all(instance.fits(device, peak) for device, peak in enumerate(peaks)),
        gain=None if not reference else (reference - cost) / reference,
        runs_on=runs_on,
    )


def _over_work(rate: float) -> float | None:
    """cost / work - 1 from 1 - work / cost."""
    return rate / (1 - rate) if rate < 1 else None


def scheduled(name: str, instance: Instance, objective: str) -> tuple[Instance, Schedule, str]:
    """A baseline on an instance, else on the same model cut anew for it; and what was changed.

    Raises
    ------
    InputError
        With the rule that neither meets.
    """
    try:
        return *BASELINES[name].schedule(instance, objective), ""
    except InputError as error:
        rule = error
    placement = BASELINES[name].placement
    if placement is None:
        raise rule
    try:
        cut = recut(instance, placement)
    except InputError:
        raise rule from None
    if [stage.device for stage in cut.stages] == [stage.device for stage in instance.stages]:
        raise rule
    if instance.replicas > 1 and placement == "linear":
        return *BASELINES[name].schedule(cut, objective), "one replica in a line"
    chunks = "one chunk" if placement == "linear" else "two chunks"
    where = {"linear": "in a line", "loop": "in a loop", "v": "in a V"}[placement]
    return *BASELINES[name].schedule(cut, objective), f"{chunks} per device {where}"


def one_f_one_b_cost(instance: Instance, objective: str) -> tuple[float | None, str]:
    """Cost of 1F1B on the instance, or None and the reason: it does not apply, or not under the cap."""
    try:
        timed_on, schedule = BASELINES["1f1b"].schedule(instance, objective)
    except ZbsolveError as error:
        return None, f"1F1B does not apply: {error}"
    for device, order in enumerate(schedule.orders):
        peak = peak_memory(timed_on, device, order)
        if not instance.fits(device, peak):
            return None, (
                f"1F1B does not fit the cap: device {device} would need {peak:g} {instance.memory_unit}, "
                f"has {instance.cap(device):g}"
            )
    return schedule.cost(objective), ""


def reference_cost(instance: Instance, objective: str) -> tuple[float | None, str]:
    """1F1B's cost at equal devices: on the instance, or on it cut anew; or None and the reason."""
    cost, reason = one_f_one_b_cost(instance, objective)
    if cost is None and reason.startswith("1F1B does not apply"):
        try:
            timed_on, schedule, runs_on = scheduled("1f1b", instance, objective)
        except InputError:
            return None, reason
        if all(instance.fits(d, peak) for d, peak in enumerate(peaks_of(timed_on, schedule))):
            return schedule.cost(objective), f"gains are over 1F1B with {runs_on}"
    return cost, reason


# Above so many tasks timing every baseline takes seconds: ``compare`` does so.
BASELINES_MOST_TASKS = 8_000


def best_baseline(instance: Instance, objective: str) -> tuple[str, float] | None:
    """The best baseline, not searched for, that runs on this very model and fits its caps; None without."""
    best: tuple[str, float] | None = None
    for name, baseline in BASELINES.items() if instance.num_tasks <= BASELINES_MOST_TASKS else ():
        if baseline.automatic:
            continue
        try:
            timed_on, schedule = baseline.schedule(instance, objective)
        except ZbsolveError:
            continue
        if changed_model(instance, timed_on):
            continue
        cost = schedule.cost(objective)
        fits = all(instance.fits(d, peak) for d, peak in enumerate(peaks_of(timed_on, schedule)))
        if fits and (best is None or cost < best[1]):
            best = name, cost
    return best


def changed_model(instance: Instance, timed_on: Instance) -> str:
    """What a baseline changed of the model to run, in words; "" where nothing but its backwards are fused."""
    if timed_on.replicas > instance.replicas:
        return "two replicas"
    if [stage.t_r is None for stage in timed_on.stages] != [stage.t_r is None for stage in instance.stages]:
        kept = any(stage.mem_r for stage in timed_on.stages)
        return "recomputation" if kept else "recomputation, stage inputs not counted"
    return ""


def baseline_row(
    name: str,
    instance: Instance,
    objective: str,
    found: tuple[Instance, Schedule, str],
    reference: float | None,
) -> Row:
    """Figures of a baseline that :func:`scheduled` has found, with what was changed to run it."""
    timed_on, schedule, runs_on = found
    runs_on = runs_on or changed_model(instance, timed_on)
    return make_row(name, instance, objective, timed_on, schedule, reference, runs_on)


def compare_with_baselines(plan: Plan) -> ComparisonTable:
    """Every applicable baseline, then the plan itself, on the plan's model and devices."""
    instance, objective = plan.instance, plan.objective
    reference, reason = reference_cost(instance, objective)
    rows = []
    not_applicable = []
    for name in BASELINES:
        try:
            found = scheduled(name, instance, objective)
        except ZbsolveError as error:
            not_applicable.append((name, str(error)))
            continue
        rows.append(baseline_row(name, instance, objective, found, reference))
    own = f"zbsolve ({plan.solver.name})"
    rows.append(make_row(own, instance, objective, instance, plan.schedule(), reference))
    return ComparisonTable(tuple(rows), tuple(not_applicable), reason)


def cap_text(instance: Instance, device: int) -> str:
    """The cap of a device, or "none"."""
    cap = instance.cap(device)
    return f"{cap:,.6g}" if cap < math.inf else "none"
