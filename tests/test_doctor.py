"""The doctor: what is there is tried, what is missing is named with what it costs and how to mend it."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from zbsolve import cli
from zbsolve.endtoend import doctor
from zbsolve.endtoend.doctor import Finding, State, can_plan, examine
from zbsolve.errors import EnvironmentFailedError


def test_solvers_here_prove_the_known_optimum() -> None:
    """CP-SAT, HiGHS and CBC are dependencies: each is found working, with its version."""
    findings = {finding.part: finding for finding in examine()}
    for part, package in (("CP-SAT", "ortools"), ("MILP with HiGHS", "highspy"), ("MILP with CBC", "pulp")):
        assert findings[part].state is State.OK, findings[part]
        assert version(package) in findings[part].found
    assert findings["loopback"].state is State.OK
    if find_spec("torch") is None:
        assert findings["torch"].consequence.startswith("profile, run and demo do not work")
    else:
        assert version("torch").split("+")[0] in findings["torch"].found
        assert findings["gloo"].state is State.OK


def test_a_missing_package_says_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Absent: named with what does not work and the command that mends it."""

    def none(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", none)
    findings = {finding.part: finding for finding in examine()}
    assert findings["CP-SAT"].state is State.ABSENT
    assert findings["CP-SAT"].consequence.endswith("pip install ortools")
    assert findings["torch"].consequence == (
        'profile, run and demo do not work: pip install "zbsolve[runtime]"'
    )
    assert not can_plan(list(findings.values()))


def test_a_solver_that_fails_or_lies_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A binary that does not run, and an answer that is not the optimum."""

    def fail(*_: object, **__: object) -> None:
        raise EnvironmentFailedError("cbc: cannot be executed")

    monkeypatch.setattr("zbsolve.formulations.milp.solve_milp", fail)
    monkeypatch.setattr(doctor, "KNOWN_OPTIMUM", 6.0)
    findings = {finding.part: finding for finding in examine()}
    assert findings["MILP with CBC"].state is State.BROKEN
    assert "cannot be executed" in findings["MILP with CBC"].consequence
    assert findings["CP-SAT"].state is State.BROKEN
    assert "of 7, the optimum is 6" in findings["CP-SAT"].consequence


def test_the_command_prints_a_table_or_json_and_exits_3_without_a_solver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table holds every part; without an exact solver the exit code is 3."""
    findings = [Finding("CP-SAT", State.OK, "ortools 9"), Finding("GPUs", State.ABSENT, "none", "[b]slow")]
    monkeypatch.setattr(doctor, "examine", lambda: iter(findings))
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 0
    assert "[b]slow" in result.stdout
    result = CliRunner().invoke(cli.app, ["doctor", "--json"])
    assert json.loads(result.stdout)[1] == {
        "part": "GPUs",
        "state": "absent",
        "found": "none",
        "consequence": "[b]slow",
    }
    monkeypatch.setattr(doctor, "examine", lambda: iter(findings[1:]))
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 3
    assert "no exact solver works here" in result.stderr
