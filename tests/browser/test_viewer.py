"""The page of a plan in a real browser: paths, zoom, bubbles, steps, lanes, keys, speed, accessibility."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Pages
from zbsolve.baselines import BASELINES
from zbsolve.model.instance import equal_stages
from zbsolve.plan.plan import Plan
from zbsolve.report.html import save_plan_page
from zbsolve.solver.portfolio import certify, solve
from zbsolve.trace.trace import Event, Step, Trace

CHART = "zbsolveViewer.current.chart"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """p = 2, m = 4, ones, cap 2: the optimum of 13, with one bubble that the cap causes."""
    return solve(equal_stages(2, 4, memory_cap=2.0, name="pair <&>"), time_limit=5).plan


@pytest.fixture(scope="module")
def other(plan: Plan) -> Plan:
    """1F1B on the same instance: 15."""
    return baseline_plan(plan, "1f1b")


def baseline_plan(plan: Plan, name: str) -> Plan:
    """A baseline on a plan's instance."""
    return certify(*BASELINES[name].schedule(plan.instance), "makespan", name)


@pytest.fixture(scope="module")
def page_file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the plan alone."""
    path = tmp_path_factory.mktemp("page") / "plan.html"
    save_plan_page(path, plan)
    return path


def point(page: Any, lane: int, name: str) -> dict[str, float]:
    """Middle of a task's box on the plot."""
    return page.evaluate(
        """([index, name]) => {
            const chart = zbsolveViewer.current.chart, lane = chart.lanes[index], task = lane.search(name);
            return { x: chart.view.x((lane.start[task] + lane.end[task]) / 2),
                     y: chart.laneTop(lane.device(task), index) + chart.laneHeight / 2 };
        }""",
        [lane, name],
    )


def click_task(page: Any, name: str, lane: int = 0) -> str:
    """Click a task's box; the details then."""
    page.click(".overlay", position=point(page, lane, name))
    return page.inner_text(".details")


def visible(page: Any) -> list[float]:
    """The visible stretch of time."""
    return page.evaluate(f"[{CHART}.view.from, {CHART}.view.to]")


def test_figures_and_certificate_are_there(pages: Pages, page_file: Path) -> None:
    """Makespan 13, proven: said in words, with the name as the user wrote it."""
    page = pages.open_file(page_file)
    assert page.inner_text("h1") == "pair <&>"
    card = page.inner_text(".card")
    assert "proven optimal" in card
    assert "makespan (objective)\n13 ms" in card or "makespan\n13 ms" in card  # the mark is style, not text
    assert "lower bound\n13 ms" in card
    assert "gap\n0.000 %" in card


def test_a_click_highlights_the_micro_batches_whole_path(pages: Pages, page_file: Path) -> None:
    """Micro-batch 1 has F, B, W on both stages: six boxes stay bright, all others turn pale."""
    page = pages.open_file(page_file)
    pixel = """([x, y]) => {
        const base = zbsolveViewer.current.chart.base, ratio = base.width / base.clientWidth;
        return [...base.getContext("2d").getImageData(x * ratio, y * ratio, 1, 1).data];
    }"""
    place = point(page, 0, "B1.3")
    spot = [place["x"] - 14, place["y"] - 10]  # beside the label
    before = page.evaluate(pixel, spot)
    details = click_task(page, "F0.1")
    assert "F0.1: forward, stage 0, micro-batch 1, device 0" in details
    # F0.1 runs 1-2; the next task of device 0 is B0.0 at 3, so it may end 1 later.
    assert "1 to 2 ms (takes 1 ms)" in details
    assert "may end 1 ms later" in details
    bright = page.evaluate(f"[...{CHART}.chosenTasks()[0]].map((task) => {CHART}.lanes[0].fullName(task))")
    assert sorted(bright) == ["B0.1", "B1.1", "F0.1", "F1.1", "W0.1", "W1.1"]
    page.wait_for_timeout(100)
    after = page.evaluate(pixel, spot)
    assert before[:3] == [230, 159, 0]  # the full colour of B
    assert after != before
    page.keyboard.press("Escape")
    assert page.evaluate(f"{CHART}.selection") is None


def test_zoom_and_pan_by_buttons_wheel_keys_and_drag(pages: Pages, page_file: Path) -> None:
    """Each way changes the visible time; All shows the whole step again; no way leaves the step."""
    page = pages.open_file(page_file)
    whole = visible(page)
    page.click("[aria-label='Zoom in']")
    first = visible(page)
    assert first[1] - first[0] == pytest.approx((whole[1] - whole[0]) / 1.6)
    page.focus(".overlay")
    page.keyboard.press("+")
    second = visible(page)
    assert second[1] - second[0] == pytest.approx((first[1] - first[0]) / 1.6)
    page.keyboard.press("ArrowRight")
    assert visible(page)[0] > second[0]
    box = page.locator(".overlay").bounding_box()
    page.mouse.move(box["x"] + 600, box["y"] + 20)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    page.wait_for_timeout(100)
    third = visible(page)
    assert third[1] - third[0] < second[1] - second[0]
    page.mouse.down()
    page.mouse.move(box["x"] + 700, box["y"] + 20, steps=4)
    page.mouse.up()
    assert visible(page)[0] < third[0]
    for _ in range(40):
        page.keyboard.press("ArrowLeft")
    assert visible(page)[0] == pytest.approx(whole[0])
    page.click("[aria-label='Show the whole step']")
    assert visible(page) == pytest.approx(whole)


def test_a_bubble_says_why(pages: Pages, page_file: Path) -> None:
    """Device 0 idles from 2 to 3: F0.2 is ready, the cap of 2 keeps it out."""
    page = pages.open_file(page_file)
    place = page.evaluate(f"({{ x: {CHART}.view.x(2.5), y: {CHART}.laneTop(0, 0) + 10 }})")
    page.hover(".overlay", position=place)
    assert "idle 1 ms (memory)" in page.inner_text(".tip")
    page.click(".overlay", position=place)
    details = page.inner_text(".details")
    assert "Bubble of device 0: 1 ms, from 2 to 3" in details
    assert "B0.0 waits for B1.0 on device 1, which ends at 3" in details
    assert "device 0 would hold 3 MiB of 2" in details
    page.click(".details button")
    assert "B1.0: backward for input" in page.inner_text(".details")


def test_hover_shows_times_slack_and_memory(pages: Pages, page_file: Path) -> None:
    """The tip at a box and at the memory band."""
    page = pages.open_file(page_file)
    page.hover(".overlay", position=point(page, 0, "B1.0"))
    tip = page.inner_text(".tip")
    assert "2 to 3 ms" in tip
    assert "waits for: F1.0 (same device, ends at 2)" in tip
    page.hover(".overlay", position=page.evaluate(f"({{x: {CHART}.view.x(1.5), y: {CHART}.bandTop(0) + 8}})"))
    assert page.inner_text(".tip") == "device 0 at 1.5 ms: 2 MiB of 2"


def test_stepping_through_events_moves_every_device_along(pages: Pages, page_file: Path) -> None:
    """Events by start: F0.0 at 0, then F0.1 and F1.0 at 1; the table says what runs."""
    page = pages.open_file(page_file)
    page.focus(".overlay")
    seen = []
    for _ in range(3):
        page.keyboard.press("n")
        seen.append(page.inner_text(".details h2").split(":")[0])
    assert seen == ["F0.0", "F0.1", "F1.0"]
    rows = [row.inner_text().split("\t") for row in page.query_selector_all("tbody tr")]
    assert [row[-2] for row in rows] == ["F0.1", "F1.0"]
    assert [row[-1] for row in rows] == ["2", "1"]
    page.keyboard.press("p")
    assert page.inner_text(".details h2").startswith("F0.1")
    page.keyboard.press("ArrowDown")
    assert page.inner_text(".details h2").startswith("F1.0")


def test_the_chain_of_causes_and_the_critical_path(pages: Pages, page_file: Path) -> None:
    """B0.0 waited for B1.0, that for F1.0, that for F0.0."""
    page = pages.open_file(page_file)
    click_task(page, "B0.0")
    page.click("text=Why then?")
    assert "F0.0 → F1.0 → B1.0 → B0.0" in page.inner_text(".details")
    page.keyboard.press("c")
    assert page.get_attribute("text=Critical path", "aria-pressed") == "true"
    page.keyboard.press("m")
    assert page.evaluate(f"{CHART}.bandHeight") == 0


def test_find_a_task_by_its_name(pages: Pages, page_file: Path) -> None:
    """F1.3 is selected; a name that does not exist gets a sentence."""
    page = pages.open_file(page_file)
    page.fill(".find input", "F1.3")
    page.keyboard.press("Enter")
    assert page.inner_text(".details h2").startswith("F1.3")
    page.fill(".find input", "F9.9")
    page.keyboard.press("Enter")
    assert "No task is called F9.9" in page.inner_text(".details")


def test_two_plans_and_a_measured_run_share_one_axis(
    pages: Pages, plan: Plan, other: Plan, tmp_path: Path
) -> None:
    """A: the optimum of 13, B: 1F1B of 15, C: a run in which every op took twice as long."""
    events = [
        Event(
            device=device,
            op=task.kind.value,
            stage=task.stage,
            microbatch=task.microbatch,
            start=2 * start,
            end=2 * end,
            wait=1.0 if (task.kind.value, task.stage, task.microbatch) == ("B", 0, 0) else 0.0,
        )
        for device, program in enumerate(plan.schedule().devices)
        for task, start, end in program
    ]
    trace = Trace(
        plan_digest=plan.digest(),
        mode="real",
        hardware="a test",
        backend="gloo",
        model="by hand",
        time_unit="ms",
        memory_unit="MiB",
        split=("deferred",) * 2,
        steps=(Step(events=tuple(events), makespan=2 * plan.makespan),),
    )
    path = tmp_path / "three.html"
    save_plan_page(path, plan, trace, other)
    page = pages.open_file(path)
    cards = [card.inner_text() for card in page.query_selector_all(".card")]
    assert len(cards) == 3
    assert cards[1].startswith("B: 1f1b")
    assert "15 ms" in cards[1]
    assert "26 ms (median of 1 steps)" in cards[2]
    assert visible(page)[1] == pytest.approx(26, rel=0.01)
    details = click_task(page, "B0.0", lane=2)
    # B0.0 is planned from 3 to 4 and ran from 6 to 8.
    assert "6 to 8 ms" in details
    assert "3 to 4 ms, 0.5 times as long" in details
    assert "2 times as long" in click_task(page, "B0.0", lane=0)
    assert page.evaluate(f"{CHART}.lanes[2].waits") == [[0, 5, 6]]


def test_theme_follows_the_system_and_the_button(pages: Pages, page_file: Path) -> None:
    """Dark by the system's wish, light by the button's second choice."""
    page = pages.open_file(page_file, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(18, 22, 28)"
    page.click("text=Theme: auto")
    assert page.evaluate(background) == "rgb(255, 255, 255)"


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out_sideways(pages: Pages, page_file: Path, width: int) -> None:
    """On a phone and on a laptop the page itself never scrolls sideways."""
    page = pages.open_file(page_file, width, 800)
    click_task(page, "F1.1")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_touch_selects_and_pans(pages: Pages, page_file: Path) -> None:
    """A tap is a click."""
    page = pages.open_file(page_file, 390, 800, has_touch=True)
    place = point(page, 0, "F1.1")
    page.tap(".overlay", position=place)
    assert page.inner_text(".details h2").startswith("F1.1")


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_axe_finds_nothing_serious(pages: Pages, page_file: Path, scheme: str, width: int) -> None:
    """axe-core on the page with something selected: no violation of serious or critical impact."""
    from axe_playwright_python.sync_playwright import Axe

    page = pages.open_file(page_file, width, 900, color_scheme=scheme, bypass_csp=True)
    click_task(page, "F0.1")
    page.click("text=Keys")
    violations = Axe().run(page).response["violations"]
    found = [
        (v["id"], v["impact"], [node["html"][:80] for node in v["nodes"]])
        for v in violations
        if v["impact"] in ("serious", "critical")
    ]
    print(f"axe, {scheme}, {width} px: {[(v['id'], v['impact']) for v in violations]}")
    assert found == []


def test_speed_at_25_000_tasks(pages: Pages, tmp_path: Path) -> None:
    """p = 32, m = 256: first paint and pan frames are printed; limits are loose, machines differ."""
    instance = equal_stages(32, 256, 1.1, 1.05, 0.7, 0.05, mem_w=0.6, memory_cap=33.0)
    plan = certify(*BASELINES["zb-h1"].schedule(instance), "makespan", "zb-h1")
    path = tmp_path / "big.html"
    save_plan_page(path, plan)
    page = pages.open_file(path)
    assert page.evaluate(f"{CHART}.lanes[0].size") == 24_576
    page.wait_for_function("performance.getEntriesByName('first-paint').length > 0")
    paint = page.evaluate("performance.getEntriesByName('first-paint')[0].startTime")
    frames = page.evaluate(
        """async () => {
            const chart = zbsolveViewer.current.chart;
            chart.view.zoom(2);
            chart.drawTimes.length = 0;
            const frames = [];
            let last = performance.now();
            for (let k = 0; k < 60; k += 1) {
                chart.view.pan(k < 30 ? 3 : -3);
                chart.requestDraw();
                await new Promise(requestAnimationFrame);
                frames.push(performance.now() - last);
                last = performance.now();
            }
            return [frames.slice(1), chart.drawTimes.slice(1)];
        }"""
    )
    median, worst = statistics.median(frames[0]), max(frames[0])
    print(
        f"24,576 tasks, {path.stat().st_size / 1e6:.1f} MB: first paint {paint:.0f} ms; pan frame median "
        f"{median:.0f} ms, worst {worst:.0f} ms; drawing alone median {statistics.median(frames[1]):.1f} ms"
    )
    assert paint < 10_000
    assert median < 250
