"""Predictions of many schedules beside their measurement, in one run."""

from __future__ import annotations

from zbsolve.endtoend.predictions import Prediction, emulated, misordered


def test_a_small_run_of_every_kind() -> None:
    """Two emulated devices, three steps: each schedule is predicted within a quarter, even under load."""
    # The stated figures are for `zbsolve measure predictions` on a quiet machine.
    rows = emulated(2, steps=3, op=10.0, solve_seconds=1.0, placements=("linear",), progress=lambda _: None)
    assert [row.schedule for row in rows] == ["1f1b", "zb-h1", "zb-1p", "zb-2p", "zbsolve"]
    for row in rows:
        assert 0.75 < row.ratio < 1.25, row


def test_misordered_by_hand() -> None:
    """Pairs more than 1 % apart as predicted, of one part and p, in another measured order, are named."""

    def row(name: str, predicted: float, measured: float, devices: int = 4) -> Prediction:
        return Prediction("emulated", devices, "linear", name, predicted, measured)

    a, b, c = row("a", 100.0, 105.0), row("b", 100.5, 104.0), row("c", 110.0, 104.5)
    d = row("d", 90.0, 200.0, devices=8)
    assert misordered([a, b, c, d]) == [(a, c)]
