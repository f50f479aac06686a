"""docs/adding-a-schedule.md and docs/catalogue.md say what is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from zbsolve.baselines import BASELINES
from zbsolve.baselines.base import Baseline
from zbsolve.baselines.comparison import compare_with_baselines
from zbsolve.baselines.formulas import FORMULAS
from zbsolve.benchmark.catalogue import entry, markdown
from zbsolve.model.instance import equal_stages
from zbsolve.model.judge import check
from zbsolve.plan.check import check_plan
from zbsolve.plan.make import peaks_of
from zbsolve.solver.portfolio import solve

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Baseline:
    """The page's file, executed, and its one line of registration."""
    code = re.search(r"```python\n(.*?)```", (DOCS / "adding-a-schedule.md").read_text("utf-8"), re.DOTALL)
    assert code is not None
    module: dict[str, Any] = {"__name__": "zbsolve.baselines.early_1f1b"}
    exec(compile(code[1], "early_1f1b.py", "exec"), module)
    baseline: Baseline = module["EARLY_1F1B"]
    monkeypatch.setitem(BASELINES, baseline.name, baseline)
    return baseline


def test_the_pages_example_has_the_pages_figures(example: Baseline) -> None:
    """Unit passes, p = 4, m = 8, hop 1: 45 against 49, 6 activations against 4."""
    instance = equal_stages(4, 8, t_comm=1.0)
    found = {}
    for name in ("1f1b", example.name):
        timed_on, schedule = BASELINES[name].schedule(instance)
        assert check(timed_on, schedule) == []
        found[name] = (schedule.makespan, max(peaks_of(timed_on, schedule)))
    assert found == {"1f1b": (49.0, 4.0), "early-1f1b": (45.0, 6.0)}


def test_a_registered_schedule_is_everywhere(example: Baseline) -> None:
    """As a solver, in compare (also cut anew), and among the warm starts: nothing else to write."""
    instance = equal_stages(4, 8, t_comm=1.0)
    plan = solve(instance, solver=example.name).plan
    assert check_plan(plan) == []
    rows = {row.name: row for row in compare_with_baselines(plan).rows}
    assert rows[example.name].makespan == plan.makespan
    folded = solve(equal_stages(2, 8, placement="v"), time_limit=1).plan
    rows = {row.name: row for row in compare_with_baselines(folded).rows}
    assert rows[example.name].runs_on == "one chunk per device in a line"


def test_the_catalogue_page_has_every_schedule_and_source() -> None:
    """One row a schedule in the verified table, and one in that of sources."""
    page = (DOCS / "catalogue.md").read_text("utf-8")
    for name, baseline in BASELINES.items():
        assert page.count(f"\n| {name} |") == 2, name
        assert baseline.source.split(",")[0] in page, name


@pytest.mark.parametrize("name", FORMULAS)
def test_the_catalogue_page_is_what_the_command_prints(name: str) -> None:
    """Each row of the verified table, made anew; the solver's column may differ where its time is short."""
    page = (DOCS / "catalogue.md").read_text("utf-8")
    row = entry(name, time_limit=0.5)
    assert row.holds, row
    made = markdown([row]).splitlines()[2]
    assert made.rsplit("|", 2)[0] in page
