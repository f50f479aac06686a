"""A newcomer's walk by the documentation alone, each step timed: ``python -m tests.walk``.

From a clone of this repository to "my own model's plan": installs into a fresh environment, then runs the
blocks of the quick start and of the page on one's own model as they stand. Needs the network for the install;
``TORCH`` names the build of torch to install first (as in the Makefile), for machines without a GPU.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.test_docs import ROOT, blocks

PAGES = ("index.md", "howto/own-model.md")
PATIENCE = 1200.0

log = logging.getLogger("walk")


def steps(torch: str) -> list[tuple[str, str]]:
    """What a newcomer types, with where it is written."""
    install = [
        ("clone", f"git clone -q --no-hardlinks {ROOT} ."),
        ("environment", f"{sys.executable} -m venv .venv"),
        ("install torch's CPU build", f"pip install -q '{torch}'"),
        ("index.md", "pip install -q '.[runtime,playground]'"),
    ]
    # One step a command: what a block exports holds for the commands after it.
    exports: list[str] = []
    typed = []
    for page in PAGES:
        for block in blocks(page):
            for line in block.text.strip().splitlines():
                if line.startswith("export "):
                    exports.append(line)
                else:
                    typed.append((page, "; ".join([*exports, line])))
    return install + typed


def main() -> int:
    """Walk, and print the table; stops where a step fails."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    total = 0.0
    with tempfile.TemporaryDirectory(prefix="walk-") as folder:
        environment = {**os.environ, "PATH": f"{Path(folder) / '.venv/bin'}:{os.environ['PATH']}"}
        environment.pop("PYTHONPATH", None)
        log.info("| written in | typed | seconds |\n|---|---|---|")
        for where, command in steps(os.environ.get("TORCH", "torch==2.13.0")):
            began = time.monotonic()
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=PATIENCE,
            )
            seconds = time.monotonic() - began
            total += seconds
            log.info("| %s | `%s` | %.1f |", where, command.replace(str(ROOT), "ADDRESS"), seconds)
            if done.returncode != 0:
                log.error("this step failed:\n%s%s", done.stdout[-2000:], done.stderr[-2000:])
                return 1
    log.info("| | all | %.1f |", total)
    return 0


if __name__ == "__main__":
    sys.exit(main())
