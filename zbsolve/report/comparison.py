"""The solved plan beside every hand-made schedule on the same instance: figures, no formatting.

A baseline that runs a fused backward is timed with BW = ``t_bw``, or ``t_b + t_w`` where the instance gives
none. A baseline over the memory cap is still listed, marked as not fitting.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from zbsolve.baselines import BASELINES
from zbsolve.errors import ZbsolveError
from zbsolve.instance import Instance
from zbsolve.memory import peak_memory
from zbsolve.plan import Plan
from zbsolve.report.timeline import bubble_rate
from zbsolve.schedule import Schedule
from zbsolve.simulator import simulate_for

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
    """All rows, a solved plan last, and the baselines that do not apply with the rule they need."""

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


def make_row(
    name: str,
    instance: Instance,
    objective: str,
    timed_on: Instance,
    schedule: Schedule,
    reference: float | None,
) -> Row:
    """Figures of one schedule on an instance; ``reference`` is 1F1B's cost under the objective.

    Memory is judged by the cap of ``instance``: some baselines are built under a cap of their own.
    """
    peaks = [peak_memory(timed_on, device, order) for device, order in enumerate(schedule.orders)]
    cost = schedule.cost(objective)
    return Row(
        name=name,
        makespan=schedule.makespan,
        span=schedule.span,
        bubble_rate_makespan=bubble_rate(schedule, schedule.makespan),
        bubble_rate_span=bubble_rate(schedule, schedule.span),
        peak_memory=max(peaks),
        fits_cap=all(instance.fits(device, peak) for device, peak in enumerate(peaks)),
        gain=None if not reference else (reference - cost) / reference,
    )


def baseline_schedule(instance: Instance, name: str, objective: str) -> tuple[Instance, Schedule]:
    """A baseline's orders at their best times for the objective, and the instance that they run on."""
    timed_on, orders = BASELINES[name].prepared(instance)
    return timed_on, simulate_for(timed_on, orders, objective)


def one_f_one_b_cost(instance: Instance, objective: str) -> tuple[float | None, str]:
    """Cost of 1F1B on the instance, or None and the reason: it does not apply, or not under the cap."""
    try:
        timed_on, schedule = baseline_schedule(instance, "1f1b", objective)
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


def compare_baselines(instance: Instance, objective: str) -> ComparisonTable:
    """Every applicable baseline on an instance."""
    reference, reason = one_f_one_b_cost(instance, objective)
    rows = []
    not_applicable = []
    for name in BASELINES:
        try:
            timed_on, schedule = baseline_schedule(instance, name, objective)
        except ZbsolveError as error:
            not_applicable.append((name, str(error)))
            continue
        rows.append(make_row(name, instance, objective, timed_on, schedule, reference))
    return ComparisonTable(tuple(rows), tuple(not_applicable), reason)


def compare_with_baselines(plan: Plan) -> ComparisonTable:
    """Every applicable baseline, then the plan itself, on the plan's instance."""
    instance, objective = plan.instance, plan.objective
    table = compare_baselines(instance, objective)
    reference, _ = one_f_one_b_cost(instance, objective)
    own = make_row(f"zbsolve ({plan.solver.name})", instance, objective, instance, plan.schedule(), reference)
    return replace(table, rows=(*table.rows, own))


def cap_text(instance: Instance, device: int) -> str:
    """The cap of a device, or "none"."""
    cap = instance.cap(device)
    return f"{cap:,.6g}" if cap < math.inf else "none"
