"""The executor's own cost beside torch's schedule runtime."""

from __future__ import annotations

from zbsolve.runtime.measure.overhead import LAYERS, SCHEDULES, measure_overhead


def test_the_executor_adds_less_than_torchs() -> None:
    """On every schedule and kind of layer the executor adds less host time per action than torch's does."""
    # The stated figure (at most half) is for `zbsolve measure overhead` on a quiet machine; here other
    # tests may run beside, so that only the order of the two is held.
    rows = measure_overhead(num_microbatches=16, repeats=5)
    assert len(rows) == len(SCHEDULES) * len(LAYERS) * 3
    by_key = {(row.schedule, row.layers, row.executor): row for row in rows}
    for schedule in SCHEDULES:
        for layers in LAYERS:
            torch_adds = by_key[schedule, layers, "torch"].above
            assert by_key[schedule, layers, "zbsolve, deferred"].above < torch_adds
            # F and BW, or F, B and W, of 16 micro-batches.
            assert by_key[schedule, layers, "torch"].actions == 16 * (2 if schedule == "1f1b" else 3)
