"""Curves for papers: each device's memory against its cap, and a search's cost and bound over its seconds.

Few devices get a curve each; many get a map of device over time, whose rows stay readable at p = 64.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zbsolve.model.schedule import Schedule
from zbsolve.plan.plan import Plan
from zbsolve.report.figures import CAP_COLOUR, MEMORY_COLOUR, save_figure
from zbsolve.report.timeline import memory_corners, time_range

if TYPE_CHECKING:
    from zbsolve.solver.portfolio import SolveResult

MOST_CURVES = 8
MAP_COLUMNS = 800

# Of Okabe and Ito's palette, as everywhere; the line styles differ, too.
COST_COLOUR, BOUND_COLOUR = "#D55E00", "#0072B2"


def save_memory_figure(path: str | Path, plan: Plan) -> None:
    """In-flight memory of every device over time against its cap."""
    schedule = plan.schedule()
    draw = _memory_curves if plan.instance.num_devices <= MOST_CURVES else _memory_map
    save_figure(path, draw(plan, schedule))


def _memory_curves(plan: Plan, schedule: Schedule) -> Figure:
    instance, p = plan.instance, plan.instance.num_devices
    figure = Figure(figsize=(8, 1.1 + 0.85 * p), layout="constrained")
    rows: list[Axes] = list(figure.subplots(p, 1, sharex=True, sharey=True, squeeze=False)[:, 0])
    first, last = time_range(schedule)
    for device, axes in enumerate(rows):
        times, levels = memory_corners(instance, schedule, device)
        axes.fill_between(times, levels, color=MEMORY_COLOUR, linewidth=0)
        if math.isfinite(cap := instance.cap(device)):
            axes.axhline(cap, color=CAP_COLOUR, linestyle="--", linewidth=1)
        axes.set_ylabel(f"device {device}", rotation=0, ha="right", va="center")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    rows[0].set_xlim(first, last)
    rows[0].set_ylim(bottom=0)
    rows[0].set_title(
        f"{instance.name}: in-flight memory ({instance.memory_unit})" + _cap_words(plan), loc="left"
    )
    rows[-1].set_xlabel(f"time ({instance.time_unit})")
    return figure


def _memory_map(plan: Plan, schedule: Schedule) -> Figure:
    """Device over time, coloured by memory: as a share of the cap where every device has one."""
    instance, p = plan.instance, plan.instance.num_devices
    first, last = time_range(schedule)
    moments = np.linspace(first, last, MAP_COLUMNS, endpoint=False) + (last - first) / (2 * MAP_COLUMNS)
    caps = [instance.cap(device) for device in range(p)]
    shares = all(math.isfinite(cap) and cap > 0 for cap in caps)
    cells = np.empty((p, MAP_COLUMNS))
    for device in range(p):
        times, levels = memory_corners(instance, schedule, device)
        cells[device] = np.asarray(levels)[np.searchsorted(times, moments, side="right") - 1]
        if shares:
            cells[device] *= 100 / caps[device]
    figure = Figure(figsize=(9, 1.6 + 0.14 * p), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        cells,
        aspect="auto",
        interpolation="nearest",
        cmap="cividis",
        vmin=0,
        vmax=100 if shares else None,
        extent=(first, last, p - 0.5, -0.5),
    )
    unit = "% of the cap" if shares else instance.memory_unit
    figure.colorbar(image, ax=axes, label=f"in-flight memory ({unit})", pad=0.01)
    axes.set_title(f"{instance.name}: in-flight memory", loc="left")
    axes.set_ylabel("device")
    axes.set_xlabel(f"time ({instance.time_unit})")
    return figure


def save_search_figure(path: str | Path, result: SolveResult) -> None:
    """Best cost and proven bound over the seconds of a search, with the gap between them."""
    plan = result.plan
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    unit, objective = plan.instance.time_unit, plan.objective
    # A deterministic solve and a baseline have no clock: their last line stands alone.
    end = max([plan.solver.seconds or 0.0, *(line.seconds for line in result.history)])
    seconds = [line.seconds for line in result.history] + [end]
    costs = [line.cost for line in result.history] + [plan.cost]
    bounds = [line.bound for line in result.history] + [plan.lower_bound]
    axes.fill_between(seconds, bounds, costs, step="post", color="#E8E8E8", linewidth=0)
    axes.step(seconds, costs, where="post", color=COST_COLOUR, linewidth=1.8, label=objective)
    axes.step(
        seconds, bounds, where="post", color=BOUND_COLOUR, linewidth=1.8, linestyle="--", label="lower bound"
    )
    axes.plot(seconds[-1:], costs[-1:], "o", color=COST_COLOUR, markersize=4)
    axes.set_xlim(left=0)
    axes.margins(y=0.1)
    axes.set_xlabel("seconds of search")
    axes.set_ylabel(f"{objective} ({unit})")
    axes.set_title(
        f"{plan.instance.name}: {plan.status}, gap {plan.gap:.2%} (bound by {plan.bound_proof.method})",
        loc="left",
    )
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save_figure(path, figure)


def _cap_words(plan: Plan) -> str:
    return ", cap dashed" if plan.instance.memory_cap is not None else ""
