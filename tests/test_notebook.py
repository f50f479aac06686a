"""Notebooks: plans and instances show themselves, and the example runs from the first cell to the last."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zbsolve.baselines import BASELINES
from zbsolve.model.instance import equal_stages
from zbsolve.plan.plan import Plan
from zbsolve.report.explain import REASONS, Reason
from zbsolve.report.notebook import explorer, instance_html, plan_html
from zbsolve.solver.portfolio import certify, solve

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def plan() -> Plan:
    """p = 2, m = 4, cap 2: 13, under a name that is markup."""
    return solve(equal_stages(2, 4, memory_cap=2.0, name="<b>pair</b>"), time_limit=5).plan


def test_a_plan_shows_certificate_memory_and_chart(plan: Plan) -> None:
    """The tables of the terminal, and an SVG picture inside the text."""
    html = plan_html(plan)
    assert "13 ms" in html
    assert "optimal" in html
    assert "&lt;b&gt;pair" in html
    assert "<b>pair</b>" not in html
    found = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert found is not None
    assert base64.b64decode(found[1]).startswith(b"<?xml")


def test_a_big_plan_is_shown_as_pixels() -> None:
    """More than 3,000 tasks: PNG."""
    instance = equal_stages(8, 130)
    html = plan_html(certify(*BASELINES["zb-h1"].schedule(instance), "makespan", "zb-h1"))
    assert "data:image/png;base64," in html


def test_an_instance_shows_its_stages() -> None:
    """Every stage has its row."""
    html = instance_html(equal_stages(3, 2, t_f=1.25, name="three").with_memory_cap(7))
    assert "three" in html
    assert html.count("1.25") >= 3


def test_the_explorer_is_a_frame_that_reaches_nothing(plan: Plan) -> None:
    """A sandbox with scripts and no more; the page is inside, escaped."""
    html = explorer(plan, plan)._repr_html_()
    assert html.startswith(
        '<iframe title="zbsolve plan" sandbox="allow-scripts" srcdoc="&lt;!doctype html&gt;'
    )
    assert html.count("<") == 2


def test_the_example_notebook_runs(tmp_path: Path) -> None:
    """In a kernel of its own, as a reader would run it; the stored copy holds no outputs."""
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    source = ROOT / "examples" / "plan.ipynb"
    stored = nbformat.read(source, as_version=4)
    assert all(not cell.get("outputs") for cell in stored.cells)
    code = (
        "import nbformat, sys; from nbclient import NotebookClient\n"
        "notebook = nbformat.read(sys.argv[1], as_version=4)\n"
        "NotebookClient(notebook, timeout=120, kernel_name='python3',"
        " resources={'metadata': {'path': sys.argv[3]}}).execute()\n"
        "nbformat.write(notebook, sys.argv[2])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "out.ipynb"), str(source.parent)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    text = (tmp_path / "out.ipynb").read_text(encoding="utf-8")
    assert "591" in text
    assert "text/html" in text
    assert f"{Reason.DRAIN}: {REASONS[Reason.DRAIN]}" in text
