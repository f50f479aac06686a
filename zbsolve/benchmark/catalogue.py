"""The catalogue verified: each schedule's formula against the simulator, its plan, and the solver beside it.

Nothing here is stated: every figure of a row is computed when the row is made. (That orders are the
published ones is held by the tests, which have the published figures; that gradients are right, by the
runtime's.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from zbsolve.baselines import BASELINES
from zbsolve.baselines.formulas import (
    FORMULAS,
    Figures,
    Sizes,
    instance_for,
    simulated,
    verified,
)
from zbsolve.model.tolerances import TIME_RTOL
from zbsolve.plan.check import check_plan
from zbsolve.solver.portfolio import certify, solve

# Sizes at which formula and simulation are compared, where the formula holds.
GRID = tuple(
    Sizes(p, m, v, t_f=t_f, t_b=t_b, t_w=t_w, mem_r=0.125)
    for p in (2, 3, 4, 8)
    for m in (4, 8, 16, 24)
    for v in (1, 2, 3)
    for t_f, t_b, t_w in ((1.0, 1.0, 1.0), (3.0, 4.0, 2.0))
)
# The size whose plan is made and checked, and at which the solver competes.
EXAMPLE = Sizes(4, 8, mem_r=0.125)
EXAMPLE_LOOP = Sizes(4, 8, 2)


@dataclass(frozen=True, slots=True)
class Entry:
    """One schedule of the catalogue, verified.

    Attributes
    ----------
    cells, agreeing : int
        Sizes of :data:`GRID` at which the formula holds, and at how many of these the simulator agrees in
        bubble, peak and hops.
    example : Figures
        Bubble, peak and hops at p = 4, m = 8 (v = 2 in a loop), equal times.
    violations : int
        Rules that the plan of the example breaks, deadlock and figures included.
    cost, solved : float
        Cost of the example, and of the solver's plan on the same instance with no more memory per device.
    """

    name: str
    summary: str
    source: str
    formula: str
    where: str
    cost_name: str
    cells: int
    agreeing: int
    example: Figures
    violations: int
    cost: float
    solved: float
    status: str

    @property
    def holds(self) -> bool:
        """Whether everything that can be verified here is as it should be."""
        return self.cells == self.agreeing > 0 and self.violations == 0 and self.solver_never_worse

    @property
    def solver_never_worse(self) -> bool:
        """Whether the solver's plan costs no more."""
        return self.solved <= self.cost * (1 + TIME_RTOL)

    def to_json_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {**asdict(self), "example": self.example._asdict(), "holds": self.holds}


def entries(time_limit: float = 2.0) -> Iterator[Entry]:
    """Every schedule, verified; the solver has ``time_limit`` seconds for each."""
    for name in FORMULAS:
        yield entry(name, time_limit)


def entry(name: str, time_limit: float = 2.0) -> Entry:
    """One schedule, verified."""
    formula, baseline = FORMULAS[name], BASELINES[name]
    loop = baseline.placement == "loop"
    checks = [verified(name, sizes) for sizes in GRID if (sizes.v > 1) == loop]
    example = EXAMPLE_LOOP if loop else EXAMPLE
    instance, schedule = baseline.schedule(instance_for(name, example), formula.cost)
    plan = certify(instance, schedule, formula.cost, name)
    capped = instance.with_changes(memory_cap=list(plan.peak_memory))
    solved = solve(capped, objective=formula.cost, time_limit=time_limit).plan
    return Entry(
        name=name,
        summary=baseline.summary,
        source=baseline.source,
        formula=formula.text,
        where=formula.where,
        cost_name=formula.cost,
        cells=sum(check is not None for check in checks),
        agreeing=sum(check is True for check in checks),
        example=simulated(name, example),
        violations=len(check_plan(plan)),
        cost=schedule.cost(formula.cost),
        solved=solved.cost,
        status=solved.status,
    )


def markdown(rows: list[Entry]) -> str:
    """The table of docs/catalogue.md."""
    lines = [
        "| schedule | bubble; peak | formula holds for | formula = simulation | example: bubble, peak, hops "
        "| plan | solver beside it |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        bubble, peak, hops = row.example
        beside = (
            "equal"
            if abs(row.solved - row.cost) <= TIME_RTOL * row.cost
            else f"{1 - row.solved / row.cost:.1%} less"
        )
        lines.append(
            f"| {row.name} | {row.formula} | {row.where} | {row.agreeing} of {row.cells} sizes "
            f"| {bubble:g} ({row.cost_name}), {peak:g}, {hops} "
            f"| {'valid' if row.violations == 0 else f'{row.violations} violations'} "
            f"| {beside if row.solver_never_worse else 'WORSE'} |"
        )
    return "\n".join(lines) + "\n"
