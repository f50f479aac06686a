"""The solved plan beside every hand-made schedule on the same instance: figures, no formatting.

A baseline that runs a fused backward is timed with BW = ``t_bw``, or ``t_b + t_w`` where the instance gives
none. A baseline over the memory cap is still listed, marked as not fitting.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from zbsolve.baselines import BASELINES
from zbsolve.errors import ZbsolveError
from zbsolve.instance import Instance
from zbsolve.memory import peak_memory
from zbsolve.plan import Plan, peaks_of
from zbsolve.report.timeline import bubble_rate
from zbsolve.schedule import Schedule

# Less than this share of the step is rounding, not a gain.
NO_GAIN = 5e-5


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule on one instance. ``gain`` is over 1F1B, as a share of 1F1B's step (None without 1F1B)."""

    name: str
    makespan: float
    span: float
    bubble_rate_makespan: float
    bubble_rate_span: float
    peak_memory: float
    fits_cap: bool
    gain: float | None

    @property
    def gain_text(self) -> str:
        """The gain in words."""
        return gain_text(self.gain)


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
            "rows": [asdict(row) for row in self.rows],
            "not_applicable": [{"name": name, "rule": rule} for name, rule in self.not_applicable],
        }


def gain_text(gain: float | None) -> str:
    """A gain over 1F1B in per cent of the step; a loss and no gain are said plainly."""
    if gain is None:
        return "-"
    if abs(gain) < NO_GAIN:
        return "no gain"
    return f"{gain:.1%} of the step" if gain > 0 else f"{-gain:.1%} slower"


def make_row(name: str, plan: Plan, timed_on: Instance, schedule: Schedule, reference: float | None) -> Row:
    """Figures of one schedule beside a plan; ``reference`` is 1F1B's cost under the plan's objective.

    Memory is judged by the cap of the plan's instance: some baselines are built under a cap of their own.
    """
    peaks = peaks_of(timed_on, schedule)
    cost = schedule.cost(plan.objective)
    return Row(
        name=name,
        makespan=schedule.makespan,
        span=schedule.span,
        bubble_rate_makespan=bubble_rate(schedule, schedule.makespan),
        bubble_rate_span=bubble_rate(schedule, schedule.span),
        peak_memory=max(peaks),
        fits_cap=all(plan.instance.fits(device, peak) for device, peak in enumerate(peaks)),
        gain=None if not reference else (reference - cost) / reference,
    )


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


def compare_with_baselines(plan: Plan) -> ComparisonTable:
    """Every applicable baseline, then the plan itself, on the plan's instance."""
    instance, objective = plan.instance, plan.objective
    reference, reason = one_f_one_b_cost(instance, objective)
    rows = []
    not_applicable = []
    for name in BASELINES:
        try:
            timed_on, schedule = BASELINES[name].schedule(instance, objective)
        except ZbsolveError as error:
            not_applicable.append((name, str(error)))
            continue
        rows.append(make_row(name, plan, timed_on, schedule, reference))
    rows.append(make_row(f"zbsolve ({plan.solver.name})", plan, instance, plan.schedule(), reference))
    return ComparisonTable(tuple(rows), tuple(not_applicable), reason)


def cap_text(instance: Instance, device: int) -> str:
    """The cap of a device, or "none"."""
    cap = instance.cap(device)
    return f"{cap:,.6g}" if cap < math.inf else "none"
