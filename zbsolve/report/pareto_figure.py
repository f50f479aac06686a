"""The Pareto picture of a sweep: time against memory, and time against devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from zbsolve.report.figures import save_figure
from zbsolve.sweep.pareto import Cost, num_devices, pareto_front, peak_memory, time_per_sample
from zbsolve.sweep.run import Result

# One colour and mark a schedule; the solved plans first.
_MARKS = "osD^v<>Ph*X"


def save_pareto_figure(
    path: str | Path, rows: Sequence[Result], time_unit: str, memory_unit: str, title: str
) -> None:
    """Every configuration that fits as a point, the fronts as lines."""
    figure = Figure(figsize=(11.0, 4.6), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    _panel(left, rows, peak_memory, f"peak memory of a device ({memory_unit})", time_unit)
    _panel(right, rows, num_devices, "devices", time_unit)
    left.legend(fontsize="small")
    save_figure(path, figure)


def _panel(axes: Axes, rows: Sequence[Result], cost: Cost, label: str, time_unit: str) -> None:
    fitting = [row for row in rows if row[1].status == "ok"]
    schedules = sorted({row[0].schedule for row in fitting}, key=lambda name: (name != "solved", name))
    for number, schedule in enumerate(schedules):
        chosen = [row for row in fitting if row[0].schedule == schedule]
        axes.scatter(
            [cost(row) for row in chosen],
            [time_per_sample(row) for row in chosen],
            s=18,
            alpha=0.6,
            marker=_MARKS[number % len(_MARKS)],
            label=schedule,
        )
    # Sorted by time; drawn by memory or devices, a step at each point that is better.
    front = pareto_front(rows, time_per_sample, cost)
    axes.plot(
        [cost(row) for row in front],
        [time_per_sample(row) for row in front],
        color="black",
        linewidth=1.0,
        drawstyle="steps-pre",
        label="Pareto front",
    )
    axes.set_xlabel(label)
    axes.set_ylabel(f"step time per sample ({time_unit})")
    axes.set_yscale("log")
    for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(visible=True, alpha=0.3)
