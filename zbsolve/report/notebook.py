"""How notebooks show instances and plans: the terminal's own tables, and a picture that needs no script.

:func:`explorer` gives the interactive page instead, for notebooks whose reader runs scripts.
"""

from __future__ import annotations

import base64
from html import escape
from io import StringIO

from rich.console import Console, RenderableType

from zbsolve.model.instance import Instance
from zbsolve.plan.plan import Plan
from zbsolve.report.figures import plan_picture
from zbsolve.report.html import page
from zbsolve.report.text import certificate_table, device_table, instance_table, memory_table
from zbsolve.report.viewer_data import page_data, plan_lane

# Above this a vector picture is slower to show than its pixels.
MOST_VECTOR_TASKS = 3_000


def instance_html(instance: Instance) -> str:
    """Tables of stages and devices."""
    return f"<b>{escape(instance.name)}</b>" + _tables(instance_table(instance), device_table(instance))


def plan_html(plan: Plan) -> str:
    """Certificate, memory per device, and the Gantt chart as a picture."""
    kind, suffix = ("svg+xml", ".svg") if plan.instance.num_tasks <= MOST_VECTOR_TASKS else ("png", ".png")
    data = base64.b64encode(plan_picture(plan, suffix)).decode("ascii")
    text = f"Gantt chart of {plan.instance.name}: {plan.objective} {plan.cost:.6g} {plan.instance.time_unit}"
    picture = f'<img src="data:image/{kind};base64,{data}" alt="{escape(text)}" style="max-width:100%">'
    return (
        f"<b>{escape(plan.instance.name)}</b>{_tables(certificate_table(plan), memory_table(plan))}{picture}"
    )


class Explorer:
    """Shows a plan's interactive page in a notebook, in a frame that can reach nothing outside itself."""

    def __init__(self, plan: Plan, against: Plan | None = None) -> None:
        lanes = [plan_lane(plan, plan.solver.name)]
        if against is not None:
            lanes.append(plan_lane(against, against.solver.name))
        self._page = page(page_data(lanes, plan.instance.name))
        self._height = min(1200, 420 + 80 * plan.instance.num_devices)

    def _repr_html_(self) -> str:
        return (
            f'<iframe title="zbsolve plan" sandbox="allow-scripts" srcdoc="{escape(self._page)}" '
            f'style="width:100%;height:{self._height}px;border:0"></iframe>'
        )


def explorer(plan: Plan, against: Plan | None = None) -> Explorer:
    """The interactive page of a plan (beside another one) as the last line of a notebook's cell."""
    return Explorer(plan, against)


def _tables(*tables: RenderableType) -> str:
    """The terminal's tables as preformatted text."""
    console = Console(file=StringIO(), record=True, width=140, highlight=False)
    for table in tables:
        console.print(table)
    return console.export_html(inline_styles=True, code_format='<pre style="line-height:1.3">{code}</pre>')
