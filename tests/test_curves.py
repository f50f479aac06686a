"""Curves of memory and of a search: right corners, every format, few and many devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from zbsolve import cli
from zbsolve.baselines import BASELINES
from zbsolve.model.instance import equal_stages
from zbsolve.plan.plan import Plan
from zbsolve.report.curves import save_memory_figure, save_search_figure
from zbsolve.report.timeline import memory_corners
from zbsolve.solver.portfolio import certify, solve


def baseline(p: int, m: int, name: str = "zb-h1", cap: float | None = None) -> Plan:
    """A baseline's plan on equal stages."""
    return certify(*BASELINES[name].schedule(equal_stages(p, m, memory_cap=cap)), "makespan", name)


def test_memory_corners() -> None:
    """p = 2, m = 1, ones: device 1 holds 1 from its F at 1 until its W ends at 4; the step is 5 long."""
    plan = baseline(2, 1)
    times, levels = memory_corners(plan.instance, plan.schedule(), 1)
    assert (times[0], times[-1]) == (0, 5)
    inside = [level for time, level in zip(times, levels, strict=True) if 1 < time < 4]
    assert inside
    assert set(inside) == {1}
    assert levels[0] == levels[-1] == 0


@pytest.mark.parametrize("p", [1, 4, 64])
def test_memory_figure_of_few_and_many_devices(tmp_path: Path, p: int) -> None:
    """A curve each up to 8 devices, a map above; both formats of vectors and pixels."""
    plan = baseline(p, 8, cap=p + 8.0)
    for suffix, begin in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        save_memory_figure(tmp_path / f"x{suffix}", plan)
        assert (tmp_path / f"x{suffix}").read_bytes().startswith(begin)
    text = (tmp_path / "x.svg").read_text()
    assert ("% of the cap" in text) is (p == 64)
    assert ("device 0" in text) is (p < 64)


def test_search_figure_says_status_and_bound(tmp_path: Path) -> None:
    """The title holds what the plan proves; a baseline without a search is one point."""
    result = solve(equal_stages(2, 4, memory_cap=2.0), time_limit=5)
    save_search_figure(tmp_path / "x.svg", result)
    assert "optimal, gap 0.00%" in (tmp_path / "x.svg").read_text()
    save_search_figure(tmp_path / "y.svg", solve(equal_stages(2, 4), solver="1f1b"))
    assert "feasible" in (tmp_path / "y.svg").read_text()


def test_commands_draw_them(tmp_path: Path) -> None:
    """``show --figure memory`` and ``solve --curve``; a wrong format is refused before the search."""
    plan, instance = tmp_path / "p.json", "zb-1.5B-m24-1p"
    runner = CliRunner()

    def invoke(*arguments: object) -> tuple[int, str]:
        result = runner.invoke(cli.app, [str(argument) for argument in arguments])
        return result.exit_code, result.stderr

    curve = tmp_path / "c.png"
    assert invoke("solve", instance, "--solver", "1f1b", "-o", plan, "--curve", curve)[0] == 0
    assert invoke("show", plan, "--figure", "memory", "-o", tmp_path / "m.svg")[0] == 0
    for path in (curve, tmp_path / "m.svg"):
        assert path.stat().st_size > 1000
    code, message = invoke("solve", instance, "--curve", tmp_path / "c.bmp")
    assert code == 2
    assert "unknown picture format" in message
    for arguments in (
        ["show", plan, "--figure", "memory"],
        ["show", instance, "--figure", "memory", "-o", curve],
    ):
        code, message = invoke(*arguments)
        assert code == 2
        assert "--figure memory: give a plan" in message
