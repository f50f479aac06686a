"""A page of one file: the viewer's template, style and scripts around the data of one or two plans.

The page needs no network: its content security policy forbids every request, and everything is inside.
"""

from __future__ import annotations

import json
import re
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from zbsolve.files.atomic import write_text_atomically
from zbsolve.model.instance import Instance
from zbsolve.plan.plan import Plan
from zbsolve.report.viewer_data import measured_lane, page_data, plan_lane
from zbsolve.trace.trace import Trace

# Later scripts use what earlier ones define.
SCRIPTS = ("format.js", "model.js", "scale.js", "paint.js", "chart.js", "panels.js", "viewer.js")


def save_plan_page(
    path: str | Path, plan: Plan, trace: Trace | None = None, against: Plan | None = None
) -> None:
    """Write the page of a plan; with its measured step, or another plan, as further lanes on one axis."""
    names = ("plan", "other plan") if against is None else _two_names(plan, against)
    lanes = [plan_lane(plan, names[0])]
    if against is not None:
        lanes.append(plan_lane(against, names[1]))
    if trace is not None:
        lanes[0]["name"] = "predicted" if against is None else names[0]
        lanes.append(measured_lane(plan.instance, trace))
    write_text_atomically(path, page(page_data(lanes, plan.instance.name)))


def save_trace_page(path: str | Path, instance: Instance, trace: Trace) -> None:
    """Write the page of a measured run alone."""
    write_text_atomically(path, page(page_data([measured_lane(instance, trace)], trace.model)))


def _two_names(plan: Plan, other: Plan) -> tuple[str, str]:
    """Who found each plan, told apart where it is the same."""
    first, second = plan.solver.name, other.solver.name
    return (first, second) if first != second else (f"A: {first}", f"B: {second}")


def page(data: dict[str, Any]) -> str:
    """The page as text. Data cannot end the script element that holds them: ``<`` is written as an escape."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    parts = {
        "title": escape(data["title"]),
        "style": read("viewer.css"),
        "script": viewer_script(),
        "data": text,
    }
    # One pass: what the user wrote is never taken for a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], read("viewer.html"))


def viewer_script() -> str:
    """All of the viewer's scripts as one, in a scope of its own."""
    parts = "\n".join(read(name) for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}\n}})();'


def read(name: str) -> str:
    """A file of the viewer."""
    return files("zbsolve.report").joinpath("viewer", name).read_text(encoding="utf-8")
