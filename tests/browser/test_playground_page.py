"""The playground in a real browser: baselines, live solve, cancel, files good and bad, link, downloads."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Pages
from zbsolve.model.instance import equal_stages
from zbsolve.plan.check import check_plan
from zbsolve.plan.plan import load_plan

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def address(browser: Any) -> Iterator[str]:
    """A playground of its own process."""
    command = [sys.executable, "-m", "zbsolve", "playground", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        yield re.search(r"http\S+", process.stdout.readline())[0]  # type: ignore[index]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def open_playground(pages: Pages, address: str, width: int = 1280, **options: Any) -> Any:
    """The page with its baselines drawn."""
    page = pages.new(width, 900, **options)
    page.goto(address)
    page.wait_for_selector(".card")
    return page


def wait_for_text(page: Any, selector: str, text: str) -> None:
    """Until an element says ``text`` (the page's policy forbids waiting by script)."""
    page.locator(selector).filter(has_text=text).wait_for()


def test_baselines_follow_the_form(pages: Pages, address: str) -> None:
    """p = 4: 1F1B takes (m + 3) * 3: 33 for m = 8, 45 for m = 12; a click draws another schedule."""
    page = open_playground(pages, address)
    row = "tr:has(button:text-is('1f1b'))"
    assert "33" in page.inner_text(row)
    page.fill("#m", "12")
    wait_for_text(page, "#baselines", "45")
    page.click("button:text-is('zb-h1')")
    wait_for_text(page, ".card h2", "zb-h1")
    # ZB-H1: 12 * 3 of work and (p - 1)(1 + 1 - 1) = 3 of bubble.
    assert "39 ms" in page.inner_text(".card")


def test_a_solve_is_live_and_ends_beside_the_baseline(pages: Pages, address: str, tmp_path: Path) -> None:
    """p = 4, m = 8, cap 1p: 27, proven; the curve is drawn, both lanes are there, the plan downloads."""
    page = open_playground(pages, address)
    page.fill("#cap", "1p")
    page.fill("#mem_w", "1")
    page.click("#solve")
    page.wait_for_selector("#downloads:not([hidden])", timeout=60_000)
    assert "makespan 27 ms, lower bound 27, gap 0.000 %" in page.inner_text("#status")
    assert page.inner_text("#status").startswith("proven optimal")
    assert page.locator("#curve polyline").count() == 2
    cards = [card.inner_text() for card in page.query_selector_all(".card")]
    assert len(cards) == 2
    assert cards[0].startswith("A: solved")
    assert cards[1].startswith("B: 1f1b")
    assert "18.2% of the step" in page.inner_text("tr.solved")
    with page.expect_download() as started:
        page.click("text=plan.json")
    started.value.save_as(tmp_path / "p.json")
    assert check_plan(load_plan(tmp_path / "p.json")) == []


def test_cancel_keeps_the_best_plan(pages: Pages, address: str) -> None:
    """A search that its 14 s do not close is cancelled after the first figures."""
    page = open_playground(pages, address)
    page.select_option("#placement", "v")
    for field, value in {"m": "12", "t_b": "1.3", "t_w": "0.7", "cap": "0.6p", "time_limit": "14"}.items():
        page.fill(f"#{field}", value)
    wait_for_text(page, "#notes", "288 tasks")
    page.click("#solve")
    page.wait_for_selector("#curve polyline", state="attached")
    assert page.is_disabled("#solve")
    page.click("#cancel")
    page.wait_for_selector("#downloads:not([hidden])", timeout=30_000)
    assert page.inner_text("#status").startswith("cancelled: the best plan until then")
    assert page.is_enabled("#solve")


def test_a_file_is_loaded_and_a_bad_one_refused_in_one_line(
    pages: Pages, address: str, tmp_path: Path
) -> None:
    """The bad file's field is named, and what was there stays."""
    data = equal_stages(2, 4, name="mine").to_json_dict()
    (tmp_path / "good.json").write_text(json.dumps(data))
    (tmp_path / "bad.json").write_text(json.dumps({**data, "stages": [{**data["stages"][0], "t_f": -1}]}))
    (tmp_path / "noise.json").write_text("not a file of ours")
    page = open_playground(pages, address)
    page.set_input_files("#file", tmp_path / "good.json")
    page.wait_for_selector("h1:text-is('mine')")
    assert "2 devices, 2 stages, 4 micro-batches" in page.inner_text("#loaded")
    page.set_input_files("#file", tmp_path / "bad.json")
    page.wait_for_selector("#error:not([hidden])")
    assert page.inner_text("#error").startswith("bad.json: stages[0].t_f: ")
    page.set_input_files("#file", tmp_path / "noise.json")
    wait_for_text(page, "#error", "not JSON")
    assert page.inner_text("h1") == "mine"
    page.click("#unload")
    page.wait_for_selector("h1:text-is('p=4, m=8')")
    assert page.is_hidden("#error")


def test_a_bad_cap_and_a_huge_problem_are_one_line(pages: Pages, address: str) -> None:
    """What is wrong and how to mend it, beside the last good drawing."""
    page = open_playground(pages, address)
    page.fill("#cap", "lots")
    page.wait_for_selector("#error:not([hidden])")
    assert "memory cap 'lots'" in page.inner_text("#error")
    page.fill("#cap", "")
    page.fill("#p", "4000")
    page.fill("#m", "4000")
    wait_for_text(page, "#error", "48,000,000 tasks")


def test_a_link_brings_the_setting_back(pages: Pages, address: str) -> None:
    """Another page that follows the link shows the same sizes; a damaged one shows the defaults."""
    page = open_playground(pages, address)
    page.fill("#p", "3")
    page.fill("#m", "5")
    page.wait_for_selector("h1:text-is('p=3, m=5')")
    page.click("#share")
    link = page.input_value("#link")
    other = pages.new()
    other.goto(link)
    other.wait_for_selector("h1:text-is('p=3, m=5')")
    assert other.input_value("#m") == "5"
    broken = pages.new()
    broken.goto(f"{address}#%%%")
    broken.wait_for_selector("h1:text-is('p=4, m=8')")


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_accessible_and_within_its_width(pages: Pages, address: str, width: int, scheme: str) -> None:
    """axe-core finds nothing serious with a solved plan, and nothing sticks out sideways."""
    from axe_playwright_python.sync_playwright import Axe

    page = open_playground(pages, address, width, color_scheme=scheme, bypass_csp=True)
    page.select_option("#solver", "heuristic")
    page.click("#solve")
    page.wait_for_selector("#downloads:not([hidden])", timeout=60_000)
    page.click("#share")
    violations = Axe().run(page).response["violations"]
    print(f"axe, playground, {scheme}, {width} px: {[(v['id'], v['impact']) for v in violations]}")
    assert [
        (v["id"], [node["html"][:80] for node in v["nodes"]])
        for v in violations
        if v["impact"] in ("serious", "critical")
    ] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
