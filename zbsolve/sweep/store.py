"""Results of a sweep in one SQLite file: each is there whole, or not at all.

A result is committed as soon as it is known, under a key that is a function of configuration and inputs. A
sweep that was killed goes on where it was; one that runs again finds everything done.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from zbsolve.errors import InputError
from zbsolve.sweep.grid import Config, Outcome

_TABLE = """
CREATE TABLE IF NOT EXISTS results (
    key TEXT PRIMARY KEY, config TEXT NOT NULL, outcome TEXT NOT NULL, seconds REAL NOT NULL
) WITHOUT ROWID
"""
# What this application's files begin with, by SQLite's own means ("zbsw").
_APPLICATION = 0x7A627377


class Store:
    """The open file. Use as a context manager."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._database = sqlite3.connect(self.path, timeout=60.0, isolation_level=None)
            found = self._database.execute("PRAGMA application_id").fetchone()[0]
            tables = self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if found != _APPLICATION and tables:
                raise InputError(f"{path}: is a database of something else: choose another file")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute(f"PRAGMA application_id = {_APPLICATION}")
            self._database.execute(_TABLE)
        except sqlite3.Error as error:
            raise InputError(f"{path}: cannot be used as the sweep's store ({error}): give another") from None

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()

    def add(self, key: str, config: Config, outcome: Outcome, seconds: float) -> None:
        """Commit one result; a key that is there already keeps its first one."""
        self._database.execute(
            "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)",
            (key, json.dumps(asdict(config)), json.dumps(asdict(outcome)), seconds),
        )

    def get(self, keys: Iterable[str]) -> dict[str, tuple[Outcome, float]]:
        """The results that are there, with the seconds that each took."""
        found = {}
        for key in keys:
            row = self._database.execute(
                "SELECT outcome, seconds FROM results WHERE key = ?", (key,)
            ).fetchone()
            if row is not None:
                found[key] = Outcome.from_json(json.loads(row[0])), row[1]
        return found

    def __len__(self) -> int:
        return int(self._database.execute("SELECT count(*) FROM results").fetchone()[0])
