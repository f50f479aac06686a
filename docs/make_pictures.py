"""Draws every picture of the documentation: ``python docs/make_pictures.py [NAME …]``.

Pages are photographed in a headless Chromium, concepts are drawn with the package's own figures.
All pictures are stored with few colours: they show flat boxes, and are small that way.
"""

from __future__ import annotations

import logging
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from zbsolve.baselines import BASELINES
from zbsolve.model.instance import Instance, equal_stages, load_instance
from zbsolve.model.kinds import TABLE
from zbsolve.model.schedule import Schedule
from zbsolve.plan.plan import Plan
from zbsolve.report.html import save_plan_page
from zbsolve.report.timeline import label, memory_corners
from zbsolve.solver.portfolio import certify, solve

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "img"
COLOURS_KEPT = 96
CHART = "zbsolveViewer.current.chart"

log = logging.getLogger("pictures")


def main() -> None:
    """Draw the pictures named on the command line, or all of them."""
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO)
    wanted = sys.argv[1:]
    for name, draw in CONCEPTS.items():
        if not wanted or name in wanted:
            target = IMAGES / f"{name}.png"
            with mpl.rc_context({"font.size": 9}):
                draw().savefig(target, dpi=130)
            _shrink(target)
    with tempfile.TemporaryDirectory() as folder:
        photograph(Path(folder), wanted)


# --- concepts ------------------------------------------------------------------------------------


def lanes(axes: Axes, instance: Instance, schedule: Schedule, title: str) -> None:
    """A small Gantt chart: one row a device, boxes with their names."""
    for device, program in enumerate(schedule.devices):
        for task, start, end in program:
            axes.barh(
                device, end - start, left=start, height=0.86, color=TABLE[task.kind].colour, edgecolor="white"
            )
            axes.text((start + end) / 2, device, label(instance, task), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(schedule.devices)), [f"device {d}" for d in range(len(schedule.devices))])
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=9)
    axes.tick_params(length=0)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)


def concept_split() -> Figure:
    """1F1B with BW above the optimum with B and W apart, on one axis."""
    instance = equal_stages(4, 6, memory_cap=4.0)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    timed_on, fused = BASELINES["1f1b"].schedule(instance)
    best = solve(instance, time_limit=10).plan
    lanes(upper, timed_on, fused, f"1F1B, BW fused: makespan {fused.makespan:g}")
    lanes(lower, instance, best.schedule(), f"B and W apart: makespan {best.makespan:g} ({best.status})")
    lower.set_xlabel("time (one pass = 1)")
    return figure


def concept_memory() -> Figure:
    """Memory of device 0 under three caps, each with its optimum."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    rows = figure.subplots(3, 1, sharex=True, sharey=True)
    for axes, cap in zip(rows, ("0.5p", "1p", "2p"), strict=True):
        plan = solve(equal_stages(4, 8).with_memory_cap(cap), time_limit=10).plan
        times, levels = memory_corners(plan.instance, plan.schedule(), 0)
        axes.fill_between(times, levels, color="#7A8BA6", linewidth=0)
        axes.axhline(plan.instance.cap(0), color="#B22222", linestyle="--")
        words = f"--memory-cap {cap}: makespan {plan.makespan:g}, span {plan.span:g} ({plan.status})"
        axes.set_title(words, loc="left", fontsize=9)
        axes.set_ylabel("device 0")
    rows[-1].set_xlabel("time (one pass = 1)")
    return figure


def concept_span() -> Figure:
    """One schedule with its makespan, and the window of the device that is its span."""
    instance = equal_stages(4, 4)
    plan = solve(instance, objective="span", time_limit=10).plan
    schedule = plan.schedule()
    figure = Figure(figsize=(9, 2.7), layout="constrained")
    axes = figure.subplots()
    lanes(axes, instance, schedule, "")
    first = min(t.start for t in schedule)
    longest = max(schedule.devices, key=lambda program: program[-1].end - program[0].start)
    device = schedule.devices.index(longest)
    arrow = {"arrowstyle": "<->", "color": "black", "shrinkA": 0, "shrinkB": 0}
    below = len(schedule.devices) - 0.2
    axes.annotate("", (first, below), (first + plan.makespan, below), arrowprops=arrow)
    middle = first + plan.makespan / 2
    axes.text(middle, below + 0.35, f"makespan {plan.makespan:g}", ha="center", va="center")
    axes.annotate("", (longest[0].start, device - 0.55), (longest[-1].end, device - 0.55), arrowprops=arrow)
    axes.text(longest[0].start, -0.9, f"span {plan.span:g}: the window of device {device}", va="center")
    axes.set_ylim(below + 0.8, -1.2)
    axes.set_xlabel("time (one pass = 1)")
    return figure


CONCEPTS: dict[str, Callable[[], Figure]] = {
    "concept-split": concept_split,
    "concept-memory": concept_memory,
    "concept-span": concept_span,
}


# --- photographs ---------------------------------------------------------------------------------


def baseline_plan(instance: Instance, name: str) -> Plan:
    """A baseline as a plan."""
    return certify(*BASELINES[name].schedule(instance), "makespan", name)


def photograph(folder: Path, wanted: list[str]) -> None:
    """Every picture of a page."""
    from playwright.sync_api import sync_playwright

    unequal = load_instance(ROOT / "docs" / "unequal-p4.json")
    best = solve(unequal, time_limit=30).plan
    plans = {
        "page-p4": (best, None),
        "page-bubble": (best, None),
        "page-two": (best, baseline_plan(unequal, "1f1b")),
        "page-phone": (best, None),
        "page-p8": (baseline_plan(equal_stages(8, 24, 1.1, 1.05, 0.7, 0.05, memory_cap=9.0), "zb-h1"), None),
        "page-p32": (
            baseline_plan(equal_stages(32, 64, 1.1, 1.05, 0.7, 0.05, memory_cap=33.0), "zb-h1"),
            None,
        ),
    }
    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        for name, (plan, against) in plans.items():
            if wanted and name not in wanted:
                continue
            file = folder / f"{name}.html"
            save_plan_page(file, plan, against=against)
            width, height = (390, 780) if name == "page-phone" else (1280, 940 if name == "page-p32" else 800)
            scheme = "dark" if name in ("page-two", "page-phone") else "light"
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(file.as_uri())
            page.wait_for_function(f"{CHART}.drawTimes.length > 0")
            ACTIONS.get(name, lambda _: None)(page)
            _shoot(page, name)
        if not wanted or "playground" in wanted:
            _photograph_playground(browser)
        browser.close()


def _select_bubble(page: Any) -> None:
    place = page.evaluate(f"({{x: {CHART}.view.x(110), y: {CHART}.laneTop(0, 0) + 10}})")
    page.click(".overlay", position=place)


def _select_path(page: Any) -> None:
    page.evaluate(f"{CHART}.select({{lane: 0, task: {CHART}.lanes[0].search('F0.3'), device: 0}})")


def _critical(page: Any) -> None:
    page.keyboard.press("c")


ACTIONS: dict[str, Callable[[Any], None]] = {
    "page-bubble": _select_bubble,
    "page-two": _select_path,
    "page-p8": _critical,
}


def _photograph_playground(browser: Any) -> None:
    command = [sys.executable, "-m", "zbsolve", "playground", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        found = re.search(r"http\S+", server.stdout.readline())
        assert found is not None
        page = browser.new_page(viewport={"width": 1280, "height": 1340})
        page.goto(found[0])
        page.wait_for_selector(".card")
        page.set_input_files("#file", ROOT / "docs" / "unequal-p4.json")
        page.wait_for_selector("h1:text-is('unequal-p4')")
        page.click("#solve")
        page.wait_for_selector("#downloads:not([hidden])", timeout=60_000)
        _shoot(page, "playground")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(20)


def _shoot(page: Any, name: str) -> None:
    page.wait_for_timeout(400)  # the next frames have been drawn
    target = IMAGES / f"{name}.png"
    page.screenshot(path=target)
    page.close()
    _shrink(target)


def _shrink(path: Path) -> None:
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(COLOURS_KEPT, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    log.info("%s: %d kB", path.relative_to(ROOT), path.stat().st_size // 1000)


if __name__ == "__main__":
    main()
