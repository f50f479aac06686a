"""The commands ``catalogue`` and ``steps``, and schedules by name in ``solve``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from zbsolve.baselines.formulas import Figures
from zbsolve.benchmark.catalogue import Entry
from zbsolve.cli import app
from zbsolve.model.instance import Instance, equal_stages
from zbsolve.plan.plan import load_plan


def invoke(*arguments: object) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def saved(path: Path, instance: Instance) -> Path:
    """The instance as a file."""
    path.write_text(json.dumps(instance.to_json_dict()))
    return path


def test_catalogue_verifies_the_schedules_named() -> None:
    """ZB-H1's row: bubble 3, peak 4, as a table, as JSON and as Markdown."""
    shown = invoke("catalogue", "zb-h1", "--time-limit", 0.5)
    assert shown.exit_code == 0, shown.output
    assert "zb-h1" in shown.stdout
    (row,) = json.loads(invoke("catalogue", "zb-h1", "--time-limit", 0.5, "--json").stdout)
    assert row["example"] == {"bubble": 3.0, "peak": 4.0, "hops": 3}
    assert row["holds"]
    assert row["cells"] == row["agreeing"] > 0
    assert "| zb-h1 | (p - 1)(T_F + T_B - T_W)" in invoke("catalogue", "zb-h1", "--markdown").stdout


def test_catalogue_fails_when_something_is_not_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A formula that is off by one is found, and the exit code is 1."""
    import zbsolve.benchmark.catalogue

    def wrong(name: str, time_limit: float) -> Entry:
        return Entry(name, "", "", "", "", "span", 5, 4, Figures(0.0, 1.0, 0), 0, 1.0, 1.0, "optimal")

    monkeypatch.setattr(zbsolve.benchmark.catalogue, "entry", wrong)
    result = invoke("catalogue", "zb-v")
    assert result.exit_code == 1
    assert "not as published, or not valid: zb-v" in result.stderr


def test_an_unknown_schedule_is_refused() -> None:
    """Exit 2 and the names that there are."""
    result = invoke("catalogue", "zb-h3")
    assert result.exit_code == 2
    assert "schedule 'zb-h3' is not known: use one of naive, gpipe" in result.stderr


def test_steps_of_a_plan(tmp_path: Path) -> None:
    """ZB-H2, p = 4, m = 8: 27 a step with a barrier, 24 with post-validation."""
    given = saved(tmp_path / "i.json", equal_stages(4, 8))
    path = tmp_path / "p.json"
    assert invoke("solve", given, "--solver", "zb-h2", "-o", path).exit_code == 0
    result = invoke("steps", path, "--steps", 3)
    assert result.exit_code == 0, result.output
    lines = {line.split()[1]: line for line in result.stdout.splitlines() if len(line.split()) > 2}
    assert lines["barrier"].split()[3:6:2] == ["81", "27"]
    assert lines["post-validation"].split()[3:6:2] == ["75", "24"]


def test_schedules_of_other_models_are_solvers_by_name(tmp_path: Path) -> None:
    """DualPipe doubles the replicas, gpipe-r adds R, N is part of a name; each plan passes check."""
    linear = saved(tmp_path / "i.json", equal_stages(4, 8))
    loop = saved(tmp_path / "l.json", equal_stages(2, 8, placement="loop"))
    for given, name in ((linear, "dualpipe"), (linear, "gpipe-r"), (loop, "interleaved:4")):
        path = tmp_path / "p.json"
        result = invoke("solve", given, "--solver", name, "-o", path)
        assert result.exit_code == 0, result.output
        checked = invoke("check", path)
        assert checked.exit_code == 0, checked.output
        plan = load_plan(path)
        assert plan.instance.replicas == (2 if name == "dualpipe" else 1)
        assert plan.instance.recomputes == (name == "gpipe-r")
        assert invoke("show", path).exit_code == 0
        assert invoke("show", path, "-o", tmp_path / "x.png").exit_code == 0
        assert invoke("show", path, "-o", tmp_path / "x.trace.json").exit_code == 0
    bad = invoke("solve", loop, "--solver", "interleaved:x")
    assert bad.exit_code == 2
    assert "'interleaved:x' is not known" in bad.stderr


def test_deterministic_plans_with_pairs_are_the_same_bytes(tmp_path: Path) -> None:
    """Equal seeds, equal files; the pairs pay."""
    plain = equal_stages(2, 6)
    pairs = plain.with_changes(
        stages=[stage.model_copy(update={"t_bw": 2.0, "t_fb": 2.25}) for stage in plain.stages]
    )
    given = saved(tmp_path / "i.json", pairs)
    texts = set()
    for number in range(2):
        path = tmp_path / f"p{number}.json"
        result = invoke("solve", given, "-o", path, "--time-limit", 1, "--deterministic")
        assert result.exit_code == 0, result.output
        texts.add(path.read_bytes())
    assert len(texts) == 1
    assert len(load_plan(path).schedule().pairs) > 0
