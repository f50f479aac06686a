"""The documentation: it builds without a warning, and every command in it runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from zbsolve import cli

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


class Block(NamedTuple):
    """A block of shell commands, and the mark above it (``slow``, ``server`` or nothing)."""

    page: str
    mark: str
    text: str


def blocks(page: str) -> list[Block]:
    """The shell blocks of a page, in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.finditer(r"(?:<!-- (slow|server) -->\n)?```bash\n(.*?)```", text, re.DOTALL)
    return [Block(page, match[1] or "", match[2]) for match in found]


def pages_with(mark: str) -> list[str]:
    """Pages that hold blocks of a mark."""
    return [page for page in PAGES if any(block.mark == mark for block in blocks(page))]


def workplace(folder: Path, page: str) -> dict[str, str]:
    """A folder like the repository's root with the page's own files; an environment with ``zbsolve``."""
    (folder / "docs").symlink_to(DOCS)
    (folder / "examples").symlink_to(ROOT / "examples")
    text = (DOCS / page).read_text(encoding="utf-8")
    for name, content in re.findall(r'```json title="([^"]+)"\n(.*?)```', text, re.DOTALL):
        (folder / name).write_text(content, encoding="utf-8")
    bin_folder = folder / ".bin"
    bin_folder.mkdir()
    script = bin_folder / "zbsolve"
    # The package of this checkout, wherever the folder in which it is called.
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}:$PYTHONPATH" exec "{sys.executable}" -m zbsolve "$@"\n')
    script.chmod(0o755)
    return {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"}


def run_block(block: Block, folder: Path, environment: dict[str, str], timeout: float) -> None:
    """Run a block's commands as a reader would; the first that fails fails the test."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{block.page}:\n{block.text}\n{done.stdout[-1500:]}{done.stderr[-1500:]}"


@pytest.mark.parametrize("page", pages_with(""))
def test_commands_run(page: str, tmp_path: Path) -> None:
    """Every unmarked block of a page, in order, in one folder."""
    environment = workplace(tmp_path, page)
    for block in blocks(page):
        if block.mark == "":
            run_block(block, tmp_path, environment, 120)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize("page", pages_with("slow"))
def test_slow_commands_run(page: str, tmp_path: Path) -> None:
    """Blocks that start processes with torch."""
    environment = workplace(tmp_path, page)
    for block in blocks(page):
        if block.mark == "slow":
            run_block(block, tmp_path, environment, 600)


@pytest.mark.parametrize("page", pages_with("server"))
def test_servers_answer(page: str, tmp_path: Path) -> None:
    """A block that serves: it says where, answers there, and ends on Ctrl-C. Any free port will do here."""
    environment = workplace(tmp_path, page)
    for block in blocks(page):
        if block.mark != "server":
            continue
        command = ["bash", "-c", f"exec {block.text.strip()} --port 0"]
        with subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                found = re.search(r"http\S+", process.stdout.readline())
                assert found is not None
                with urllib.request.urlopen(found[0], timeout=30) as answer:
                    assert answer.status == 200
                process.send_signal(signal.SIGINT)
                assert process.wait(20) == 0
            finally:
                process.kill()


def test_every_command_is_somewhere_in_the_pages() -> None:
    """Each command of the help page is shown in use on some page."""
    text = "".join((DOCS / page).read_text(encoding="utf-8") for page in PAGES)
    assert {c.name for c in cli.app.registered_commands if f"zbsolve {c.name}" not in text} <= {
        "demo",
        "measure",
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: every warning is an error."""
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(f"the site was built in {time.monotonic() - began:.1f} s")
    return folder


def test_the_reference_holds_every_command_field_and_function(site: Path) -> None:
    """Generated from the code: what exists is there."""
    commands = (site / "reference/cli.html").read_text(encoding="utf-8")
    for command in cli.app.registered_commands:
        assert f"zbsolve {command.name}" in commands
    assert "--memory-cap" in commands
    fields = (site / "reference/files.html").read_text(encoding="utf-8")
    for name in ("num_microbatches", "t_bw", "static_mem", "bound_proof", "microbatch", "plan_digest"):
        assert f"<code>{name}</code>" in fields
    functions = (site / "reference/api.html").read_text(encoding="utf-8")
    for name in (
        "zbsolve.solver.portfolio.solve",
        "zbsolve.plan.plan.load_plan",
        "zbsolve.report.explain.explain",
    ):
        assert f'id="{name}"' in functions
    assert "forced on a device between its first F and its first backward" in re.sub(
        r"\s+", " ", (site / "proofs.html").read_text(encoding="utf-8")
    )


def test_the_site_asks_nothing_of_other_hosts(site: Path) -> None:
    """Style, scripts and fonts are the site's own."""
    for path in site.rglob("*.html"):
        for address in re.findall(
            r'(?:src|rel="stylesheet" href)="([^"]+)"', path.read_text(encoding="utf-8")
        ):
            assert not address.startswith(("http:", "https:", "//")), f"{path.name}: {address}"
