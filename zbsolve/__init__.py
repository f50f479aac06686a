"""Pipeline-parallel schedules: solved, certified, run, and compared with what was measured.

    import zbsolve

    instance = zbsolve.load_instance("docs/unequal-p4.json")
    plan = zbsolve.solve(instance, time_limit=10).plan
    plan.save("plan.json")

The path of the data is one way::

    Instance -> Schedule (re-checked) -> Plan -> runtime -> Trace -> report

Every name is loaded when it is first used: ``import zbsolve`` itself loads no solver, no torch, no numpy.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The few names that a user needs, and where each lives.
_HOMES = {
    "Bound": "zbsolve.bounds.bound",
    "Instance": "zbsolve.model.instance",
    "Plan": "zbsolve.plan.plan",
    "Schedule": "zbsolve.model.schedule",
    "SolveResult": "zbsolve.solver.portfolio",
    "Stage": "zbsolve.model.instance",
    "Trace": "zbsolve.trace.trace",
    "ZbsolveError": "zbsolve.errors",
    "best_bound": "zbsolve.bounds.catalogue",
    "check": "zbsolve.model.judge",
    "check_plan": "zbsolve.plan.check",
    "compare_with_baselines": "zbsolve.baselines.comparison",
    "equal_stages": "zbsolve.model.instance",
    "explorer": "zbsolve.report.notebook",
    "load_instance": "zbsolve.model.instance",
    "load_plan": "zbsolve.plan.plan",
    "load_trace": "zbsolve.trace.trace",
    "make_instance": "zbsolve.model.instance",
    "simulate": "zbsolve.model.simulator",
    "solve": "zbsolve.solver.portfolio",
}
__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from zbsolve.baselines.comparison import compare_with_baselines as compare_with_baselines
    from zbsolve.bounds.bound import Bound as Bound
    from zbsolve.bounds.catalogue import best_bound as best_bound
    from zbsolve.errors import ZbsolveError as ZbsolveError
    from zbsolve.model.instance import Instance as Instance
    from zbsolve.model.instance import Stage as Stage
    from zbsolve.model.instance import equal_stages as equal_stages
    from zbsolve.model.instance import load_instance as load_instance
    from zbsolve.model.instance import make_instance as make_instance
    from zbsolve.model.judge import check as check
    from zbsolve.model.schedule import Schedule as Schedule
    from zbsolve.model.simulator import simulate as simulate
    from zbsolve.plan.check import check_plan as check_plan
    from zbsolve.plan.plan import Plan as Plan
    from zbsolve.plan.plan import load_plan as load_plan
    from zbsolve.report.notebook import explorer as explorer
    from zbsolve.solver.portfolio import SolveResult as SolveResult
    from zbsolve.solver.portfolio import solve as solve
    from zbsolve.trace.trace import Trace as Trace
    from zbsolve.trace.trace import load_trace as load_trace


def __getattr__(name: str) -> Any:
    """A public name, loaded with the module it lives in."""
    if name not in _HOMES:
        raise AttributeError(f"module 'zbsolve' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def load_ipython_extension(shell: Any) -> None:
    """Have notebooks show instances and plans; done by itself where ``zbsolve`` is imported in one."""

    def shown_by(function: str) -> Any:
        return lambda value: getattr(importlib.import_module("zbsolve.report.notebook"), function)(value)

    html = shell.display_formatter.formatters["text/html"]
    html.for_type_by_name("zbsolve.model.instance", "Instance", shown_by("instance_html"))
    html.for_type_by_name("zbsolve.plan.plan", "Plan", shown_by("plan_html"))


_ipython = sys.modules.get("IPython")
_shell = None if _ipython is None else _ipython.get_ipython()
if _shell is not None:
    load_ipython_extension(_shell)
