"""``doctor``: what this installation can do here."""

from __future__ import annotations

from dataclasses import asdict

from zbsolve.cli.base import command, echo_json, make_console, status
from zbsolve.cli.inputs import JsonOption
from zbsolve.errors import EnvironmentFailedError


@command("doctor")
def doctor_command(as_json: JsonOption = False) -> None:
    """Print versions, solvers, torch, GPUs, and what will not work.

    Each solver is tried on a tiny instance. Exit 3 where no exact solver works.
    """
    from zbsolve.endtoend.doctor import can_plan, examine

    findings = []
    with status("looking …") as update:
        for finding in examine():
            update(f"looking … {finding.part}")
            findings.append(finding)
    if as_json:
        echo_json([asdict(finding) for finding in findings])
    else:
        from rich.markup import escape
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for heading in ("part", "state", "found", "what will not work"):
            table.add_column(heading, overflow="fold")
        for finding in findings:
            table.add_row(finding.part, finding.state, escape(finding.found), escape(finding.consequence))
        make_console().print(table)
    if not can_plan(findings):
        raise EnvironmentFailedError("no exact solver works here: pip install --force-reinstall ortools")
