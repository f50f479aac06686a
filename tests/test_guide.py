"""The worked guide: every command in it works as written, in order, on shipped files."""

from __future__ import annotations

import os
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zbsolve.cli import app

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "guide-7b-unequal.md"


def commands() -> list[list[str]]:
    """The guide's command lines, without the program's name."""
    lines = re.findall(r"^ {4}zbsolve (.*)$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    return [shlex.split(line) for line in lines]


def run(arguments: list[str]) -> str:
    """Run one command, and what it printed."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (arguments, result.output)
    return result.output


def hurried(arguments: list[str], seconds: str = "1") -> list[str]:
    """The same with a short time limit."""
    return [seconds if before == "--time-limit" else a for before, a in zip(["", *arguments], arguments)]  # noqa: B905


def test_the_guide_has_a_command_for_each_step() -> None:
    """None is lost to a change of layout."""
    found = [arguments[0] for arguments in commands()]
    assert found.count("partition") == 6
    assert {"profile", "check", "compare", "show", "sweep", "advise", "run", "export"} <= set(found)


def test_planning_commands_work_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decision, check, compare, picture, less memory and export, with a second each to search."""
    monkeypatch.chdir(tmp_path)
    slow = {"profile", "sweep", "advise", "run"}
    for arguments in commands():
        if arguments[0] not in slow and "layers.json" not in arguments and "v" not in arguments:
            printed = run(hurried(arguments))
            if arguments[0] == "partition":
                assert "joint bound" in printed
                assert "the joint plan against it" in printed or "does not fit" in printed
    made = {path.name for path in tmp_path.iterdir()}
    assert {"decision.json", "plan.json", "plan.png", "plan.csv"} <= made


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_every_command_works_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the profile to the run; the measured gain is printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    for arguments in commands():
        print(" ".join(arguments), run(arguments), sep="\n")
