"""What a benchmark says: a row a case, a summary a suite, and the report of them all."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from zbsolve import __version__
from zbsolve.model.objective import Objective
from zbsolve.model.tolerances import OPTIMAL_GAP


@dataclass(frozen=True, slots=True)
class PlainRun:
    """A plain model, without hint, lower bound or search around it. ``skipped`` says why it was not run."""

    solver: str
    skipped: str | None = None
    status: str | None = None
    cost: float | None = None
    bound: float | None = None
    gap: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Outcome of one case.

    Attributes
    ----------
    published, published_rounding, published_schedule
        The published cost, what its printed digits leave open, and the schedule it belongs to.
    one_f_one_b, one_f_one_b_reason
        Cost of 1F1B on the instance; None with the reason where it does not apply or fit the cap.
    heuristic : float
        Cost of the first plan: baselines that fit, and the heuristics, without search or exact model.
    time_limit : float
        Seconds that the solve was given; ``seconds`` is what it took.
    contradictions : tuple of str
        Sentences about pairs of cost and bound that cannot both be right.
    """

    suite: str
    instance: str
    objective: Objective
    cost: float
    bound: float
    gap: float
    status: str
    found_by: str
    proven_by: str
    statement: str
    seconds: float
    published: float | None
    published_rounding: float | None
    published_schedule: str | None
    one_f_one_b: float | None
    one_f_one_b_reason: str
    heuristic: float
    plain: tuple[PlainRun, ...] = ()
    contradictions: tuple[str, ...] = ()
    time_limit: float = math.inf

    @property
    def limit_kept(self) -> bool:
        """Whether the solve took no more than 1 s or a fifth above its limit, whichever is more."""
        return self.seconds <= max(self.time_limit + 1.0, 1.2 * self.time_limit)

    @property
    def optimal(self) -> bool:
        return self.status == "optimal"

    @property
    def published_gain(self) -> float | None:
        """Share of the published cost that is saved."""
        return None if not self.published else (self.published - self.cost) / self.published

    @property
    def one_f_one_b_gain(self) -> float | None:
        """Share of 1F1B's step that is saved."""
        return None if not self.one_f_one_b else (self.one_f_one_b - self.cost) / self.one_f_one_b

    @property
    def worse_than_published(self) -> bool:
        """Whether the cost is above the published one by more than its printed digits leave open."""
        if self.published is None or self.published_rounding is None:
            return False
        return self.cost > (self.published + self.published_rounding) * (1 + OPTIMAL_GAP)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a suite's rows come to. Gaps are shares of the cost; ``p90`` is the nearest-rank percentile.

    ``most_of_limit``: seconds over time limit of the row in which that is most.
    """

    suite: str
    rows: int
    optimal: int
    within_01_percent: int
    within_05_percent: int
    median_gap: float
    p90_gap: float
    max_gap: float
    worst: str
    published: int
    worse_than_published: int
    better_than_published: int
    median_one_f_one_b_gain: float | None
    limits_kept: int
    most_of_limit: float


def summarise(rows: Iterable[Row]) -> list[Summary]:
    """One summary a suite, in the order of the rows."""
    by_suite: dict[str, list[Row]] = {}
    for row in rows:
        by_suite.setdefault(row.suite, []).append(row)
    return [_summary(suite, members) for suite, members in by_suite.items()]


def _summary(suite: str, rows: list[Row]) -> Summary:
    gaps = sorted(row.gap for row in rows)
    worst = max(rows, key=lambda row: row.gap)
    published = [row for row in rows if row.published is not None]
    gains = [row.one_f_one_b_gain for row in rows if row.one_f_one_b_gain is not None]
    return Summary(
        suite=suite,
        rows=len(rows),
        optimal=sum(row.optimal for row in rows),
        within_01_percent=sum(gap <= 1e-3 for gap in gaps),
        within_05_percent=sum(gap <= 5e-3 for gap in gaps),
        median_gap=statistics.median(gaps),
        p90_gap=gaps[math.ceil(0.9 * len(gaps)) - 1],
        max_gap=gaps[-1],
        worst=f"{worst.instance}, {worst.objective}",
        published=len(published),
        worse_than_published=sum(row.worse_than_published for row in published),
        better_than_published=sum(
            row.cost < (row.published - (row.published_rounding or 0.0)) * (1 - OPTIMAL_GAP)
            for row in published
            if row.published is not None
        ),
        median_one_f_one_b_gain=statistics.median(gains) if gains else None,
        limits_kept=sum(row.limit_kept for row in rows),
        most_of_limit=max(row.seconds / row.time_limit for row in rows),
    )


@dataclass
class Report:
    """Rows so far, and how they were made."""

    command: str
    time_limit: float
    seed: int
    date: str
    planned: int
    rows: list[Row] = field(default_factory=list)
    interrupted: bool = False

    @property
    def contradictions(self) -> list[str]:
        return [sentence for row in self.rows for sentence in row.contradictions]

    def to_json_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "schema": "zbsolve.bench/1",
            "command": self.command,
            "version": __version__,
            "date": self.date,
            "time_limit": self.time_limit,
            "seed": self.seed,
            "cpu_count": os.cpu_count(),
            "planned": self.planned,
            "interrupted": self.interrupted,
            "summaries": [asdict(summary) for summary in summarise(self.rows)],
            "rows": [asdict(row) for row in self.rows],
        }
