"""The job file: what a group of ranks is told."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from zbsolve.run_options import RunOptions


@dataclass(frozen=True)
class Job:
    """What a group of ranks does. ``plans`` run by turns on the same layers."""

    options: RunOptions
    plans: tuple[str, ...] = ()
    outcome: str = ""

    def save(self, path: Path) -> None:
        """Write the job file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read a job file."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(RunOptions.from_json(data["options"]), tuple(data["plans"]), data["outcome"])
