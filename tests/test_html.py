"""The page of a plan as a file: what its data say, that nothing in it can break out, that it is whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from zbsolve import cli
from zbsolve.errors import InputError
from zbsolve.model.instance import equal_stages
from zbsolve.plan.plan import Plan
from zbsolve.report.html import SCRIPTS, page, read, save_plan_page
from zbsolve.report.viewer_data import KINDS, page_data, plan_lane, schedule_lane
from zbsolve.solver.portfolio import solve


@pytest.fixture(scope="module")
def plan() -> Plan:
    """p = 2, m = 4, ones, cap 2: optimum 13."""
    return solve(equal_stages(2, 4, memory_cap=2.0), time_limit=5).plan


def invoke(*arguments: object) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def data_of(text: str) -> dict[str, object]:
    """The data that a page carries."""
    found = re.search(r'<script type="application/json" id="viewer-data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_lane_holds_times_causes_memory_and_bubbles(plan: Plan) -> None:
    """Device 0 of the optimum: F0.0 0-1, F0.1 1-2, B0.0 from 3 after B1.0; 1 then 2 in flight."""
    lane = plan_lane(plan, "plan")
    tasks, memory = lane["tasks"], lane["memory"]
    assert lane["offsets"] == [0, 12, 24]
    assert (tasks["start"][:3], tasks["end"][:3]) == ([0, 1, 3], [1, 2, 4])
    assert [KINDS[kind] for kind in tasks["kind"][:3]] == ["F", "F", "B"]
    assert tasks["slack"][:3] == [0, 1, 0]
    waited_for = tasks["cause"][2]
    assert KINDS[tasks["kind"][waited_for]] == "B"
    assert (tasks["stage"][waited_for], tasks["end"][waited_for]) == (1, 3)
    assert memory["during"][:3] == [1, 2, 2]
    assert (memory["peak"], memory["cap"]) == ([2, 2], [2, 2])
    assert [bubble[:4] for bubble in lane["bubbles"]] == [[0, 2, 3, 2], [1, 0, 1, 0]]
    assert lane["devices"][0] == {"busy": 12, "idle": {"memory": 1}}
    figures = lane["figures"]
    assert (figures["makespan"], figures["lowerBound"], figures["status"]) == (13, 13, "optimal")


def test_a_lane_without_a_cap_says_none() -> None:
    """JSON has no infinity."""
    plan = solve(equal_stages(1, 1), time_limit=1).plan
    lane = schedule_lane(plan.instance, plan.schedule(), "x", "makespan")
    assert lane["memory"]["cap"] == [None]
    json.dumps(lane, allow_nan=False)


def test_names_cannot_break_out_of_the_page(plan: Plan, tmp_path: Path) -> None:
    """A name that ends a script, or looks like a placeholder, comes back as it was."""
    name = "</script><script>alert(1)</script> {{script}} {{data}} & \u2028"
    renamed = plan.model_copy(update={"instance": plan.instance.model_copy(update={"name": name})})
    save_plan_page(tmp_path / "x.html", renamed)
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert data_of(text)["title"] == name
    assert text.count("<script") == 2
    assert "<title>&lt;/script&gt;" in text


def test_the_page_is_one_file_that_asks_for_nothing(plan: Plan) -> None:
    """No address of another host, no linked file, and a policy that forbids requests."""
    text = page(page_data([plan_lane(plan, "plan")], "x"))
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|<link|<img|@import|url\(|\bfetch\(|XMLHttpRequest|WebSocket", text)
    assert page(page_data([plan_lane(plan, "plan")], "x")) == text


def test_every_script_is_used() -> None:
    """What lies beside the template is in the bundle; nothing else is."""
    folder = Path(cli.__file__).parent.parent / "report/viewer"
    assert {path.name for path in folder.glob("*.js")} == set(SCRIPTS)
    assert all(read(name).startswith("//") for name in SCRIPTS)


def test_lanes_in_different_time_units_are_refused(plan: Plan) -> None:
    """Milliseconds and seconds have no common axis."""
    other = plan.model_copy(update={"instance": plan.instance.model_copy(update={"time_unit": "s"})})
    with pytest.raises(InputError, match="time units ms and s have no common axis"):
        page_data([plan_lane(plan, "a"), plan_lane(other, "b")], "x")


def test_show_writes_the_page_of_one_plan_or_two(plan: Plan, tmp_path: Path) -> None:
    """Lanes are named after who found the plans, and told apart where that is the same."""
    plan.save(tmp_path / "p.json")
    result = invoke("show", tmp_path / "p.json", "-o", tmp_path / "p.html")
    assert result.exit_code == 0, result.output
    assert [lane["name"] for lane in data_of((tmp_path / "p.html").read_text())["lanes"]] == ["plan"]
    result = invoke("show", tmp_path / "p.json", "--against", tmp_path / "p.json", "-o", tmp_path / "q.html")
    assert result.exit_code == 0, result.output
    names = [lane["name"] for lane in data_of((tmp_path / "q.html").read_text())["lanes"]]
    assert names == [f"A: {plan.solver.name}", f"B: {plan.solver.name}"]


def test_against_needs_a_page_of_a_plan(plan: Plan, tmp_path: Path) -> None:
    """Pictures and instances take no second plan; nothing is written."""
    plan.save(tmp_path / "p.json")
    for file, output in (("p.json", "x.png"), ("p.json", None)):
        arguments = ["show", tmp_path / file, "--against", tmp_path / "p.json"]
        result = invoke(*arguments, *(["-o", tmp_path / output] if output else []))
        assert result.exit_code == 2
        assert "give a plan and -o x.html" in result.stderr
    result = invoke("show", "zb-1.5B-m24-1p", "-o", tmp_path / "x.html")
    assert result.exit_code == 2
    assert "solve it first" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.json"]
