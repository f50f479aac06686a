"""The command line and what it is given to read: pipes, files of another kind, options that do not apply."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from zbsolve.cli import app
from zbsolve.model.instance import equal_stages
from zbsolve.plan.plan import Plan
from zbsolve.report.chrome_trace import chrome_trace, save_chrome_trace
from zbsolve.solver.portfolio import solve

ROOT = Path(__file__).resolve().parent.parent


def invoke(*arguments: object) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refusal(*arguments: object) -> str:
    """The one line of a command that refuses its input."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    return result.stderr


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two equal stages of ones, m = 4, cap 2: 13 is optimal."""
    return solve(equal_stages(2, 4, memory_cap=2.0, name="pair"), time_limit=5).plan


@pytest.fixture
def plan_file(tmp_path: Path, plan: Plan) -> Path:
    """The plan as a file."""
    path = tmp_path / "p.json"
    plan.save(path)
    return path


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_a_pipe_is_read_once(plan: Plan, name: str) -> None:
    """``zbsolve solve I.json --json | zbsolve show -``, and so compare and check."""
    for command, said in (("show", "0 |F0ff"), ("compare", "gpipe"), ("check", "valid: 24 tasks")):
        done = subprocess.run(
            [sys.executable, "-m", "zbsolve", command, name],
            input=plan.to_json(),
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout


def test_standard_input_may_be_an_instance(plan: Plan) -> None:
    """The shipped names do not hide ``-``; what is wrong in it is said of it."""
    text = json.dumps(plan.instance.to_json_dict())
    result = CliRunner().invoke(app, ["solve", "-", "--solver", "1f1b"], input=text)
    assert result.exit_code == 0, result.output
    broken = CliRunner().invoke(app, ["show", "-"], input="{")
    assert broken.stderr.startswith("zbsolve: -: line 1: not JSON")


def test_a_chrome_trace_is_known_for_what_it_is(tmp_path: Path, plan: Plan) -> None:
    """It is for the viewers; show wants what it was made from."""
    path = tmp_path / "plan.trace.json"
    save_chrome_trace(path, chrome_trace(plan))
    line = refusal("show", path)
    assert "is a Chrome trace, for Perfetto or chrome://tracing to open" in line
    assert line.endswith("give a plan, an instance or a trace\n")
    assert "give a plan" in refusal("run", path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("solve", "P"), "is a plan, not an instance: give an instance"),
        (("check", "docs/unequal-p4.json"), "is an instance, not a plan: give a plan"),
        (("compare", "docs/layers-head.json"), "is a layer profile, not a plan or an instance"),
        (("show", "docs/layers-head.json"), "is a layer profile, not a plan, an instance or a trace"),
        (("show", "P", "--trace", "P"), "is a plan, not a trace: give a trace"),
        (("partition", "P", "-p", "2"), "is a plan, not a layer profile"),
        (("bench", "--known", "P"), "is a plan, not known figures"),
    ],
)
def test_files_of_another_kind_are_named(plan_file: Path, arguments: tuple[str, ...], says: str) -> None:
    """What it is and what is wanted, not the first field that is missing."""
    given = [str(plan_file) if a == "P" else str(ROOT / a) if "/" in a else a for a in arguments]
    assert says in refusal(*given)


def test_a_baseline_that_does_not_fit_names_every_device() -> None:
    """GPipe holds all 8 micro-batches of 110, 160, 130 and 120 MiB: 880, 1280, 1040, 960 of 650."""
    result = invoke("solve", ROOT / "docs/unequal-p4.json", "--solver", "gpipe")
    assert result.exit_code == 1
    assert result.stderr == (
        "zbsolve: gpipe does not fit: device 0 needs 880 MiB, has 650; device 1 needs 1280 MiB, has 650; "
        "device 2 needs 1040 MiB, has 650; device 3 needs 960 MiB, has 650: raise memory_cap there or choose "
        "another\n"
    )


def test_a_plan_cannot_be_solved_another_way(plan_file: Path) -> None:
    """Options about solving are refused beside a plan, all in one line; without them it is compared."""
    line = refusal("compare", plan_file, "--objective", "makespan", "--solver", "1f1b")
    assert "is a plan, solved already: leave out --objective and --solver, or give its instance" in line
    for option, value in (("--memory-cap", "1p"), ("--time-limit", "3"), ("--seed", "0")):
        assert f"leave out {option}" in refusal("compare", plan_file, option, value)
    assert invoke("compare", plan_file).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("steps", "P", "--optimizer", "1e308"), "--optimizer 1e+308: give a time up to 1e+200"),
        (
            ("partition", "docs/layers-head.json", "-p", "4", "--hop", "inf"),
            "--hop inf: give a finite latency",
        ),
        (("estimate", "--tflops", "-3"), "--tflops -3: give a positive number"),
        (("estimate", "--memory-gb", "nan"), "--memory-gb nan: give a positive number"),
        (("solve", "docs/unequal-p4.json", "--seed", "9" * 26), "'--seed': Input should be less than"),
        (("solve", "docs/unequal-p4.json", "--gap", "5"), "'--gap': Input should be less than or equal to 1"),
        (("run", "P", "--save", "P"), "is a file, not a folder: choose another place"),
        (("run", "P", "--save", "P/deeper"), "is a file, not a folder: choose another place"),
    ],
)
def test_numbers_and_places_that_cannot_be_used_are_refused(
    plan_file: Path, arguments: tuple[str, ...], says: str
) -> None:
    """Before any work is done, with the option as it was typed."""
    given = [
        a.replace("P", str(plan_file), 1) if a[:1] == "P" else str(ROOT / a) if a[:5] == "docs/" else a
        for a in arguments
    ]
    assert says in refusal(*given)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path, plan: Plan) -> None:
    """Some editors write one."""
    path = tmp_path / "i.json"
    path.write_text("\ufeff" + json.dumps(plan.instance.to_json_dict()), encoding="utf-8")
    assert invoke("show", path).exit_code == 0
