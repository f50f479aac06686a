"""The exhaustive search itself: against values worked by hand, and against every order of the tiniest."""

from __future__ import annotations

from typing import Any

import pytest

from tests.exhaustive.cases import MIXES, case
from tests.exhaustive.enumeration import least
from tests.exhaustive.problem import Data
from tests.exhaustive.search import optimum

# What the plain enumeration goes through in some tenths of a second: tasks on one device, and on all.
MOST_ON_ONE, MOST_TASKS = 6, 9
NUMBERS = 15


def equal(devices: tuple[int, ...], m: int, stage: dict[str, float] | None = None, **fields: Any) -> Data:
    """Stages of unit times; their memory is the schema's default, 1."""
    each = {"t_f": 1.0, "t_b": 1.0, "t_w": 1.0} | (stage or {})
    p = max(devices) + 1
    return {
        "num_devices": p,
        "num_microbatches": m,
        "stages": [{"device": d} | each for d in devices],
    } | fields


GROWTH = {"mem_b": 1.0, "mem_w": 2.0}
PAIRED = {"t_bw": 2.0, "t_fb": 2.0}
MEASURED = {"t_f": 18.522, "t_b": 18.086, "t_w": 9.337}

BY_HAND: dict[str, tuple[Data, float | None, float | None]] = {
    # Four F's, four B's, and the first stage's W.
    "p4 m1": (equal((0, 1, 2, 3), 1), 9, 9),
    "p1 m3": (equal((0,), 3), 9, 9),
    # Three F's, F and B of three micro-batches on device 3, three B's back to B0.2, and its W.
    "p4 m3": (equal((0, 1, 2, 3), 3), 13, 13),
    # Device 1 begins at 1 and has 9 of work; device 0 has B1.0's result at 3, right after its F's.
    "p2 m3": (equal((0, 1), 3), 10, 9),
    # One at a time: F0, F1, B1, B0, W0 of each of four.
    "p2 m4 cap 1": (equal((0, 1), 4, memory_cap=1.0), 20, 20),
    "cap 0": (equal((0,), 1, memory_cap=0.0), None, None),
    # As in the W-less 2 F + 2 B with two hops between them, then W0.
    "a hop": (equal((0, 1), 1, t_comm=1.0), 7, 7),
    # 2 x (18.522 + 0.601) + 4 x (18.522 + 18.086) + 2 x (0.601 + 18.086) + 9.337
    "measured": (equal((0, 1, 2), 3, MEASURED, t_comm=0.601), 194.781, 194.781),
    # B takes a second unit when it starts: one at a time under a cap of 2, none under a cap of 1 ...
    "growth, cap 2": (equal((0,), 2, GROWTH, memory_cap=2.0), 6, 6),
    "growth, cap 1": (equal((0,), 1, GROWTH, memory_cap=1.0), None, None),
    # ... where BW, as long as both, never holds mem_w.
    "growth, fused, cap 1": (equal((0,), 1, GROWTH | {"t_bw": 2.0}, memory_cap=1.0), 3, 3),
    "transient": (equal((0,), 1, {"peak_b": 1.0}, memory_cap=1.5), None, None),
    "static": (equal((0,), 1, static_mem=[1.0], memory_cap=1.5), None, None),
    # F0.0, six passes of device 1 up to its second B, B0.1, W0.1. Both R's of device 0 run while it waits.
    "recomputation": (equal((0, 1), 2, {"t_r": 1.0}), 9, 9),
    # R holds mem_b itself: with mem_r = 0 both F's fit under a cap of 1, both R's do not.
    "recomputation, cap 1": (equal((0,), 2, {"t_r": 1.0, "mem_r": 0.0}, memory_cap=1.0), 8, 8),
    # F, three pairs of 2, BW of 2: 1 + 6 + 2.
    "pairs": (equal((0,), 4, PAIRED), 9, 9),
    # Both transients at once: not under a cap for two micro-batches and one transient. Unpaired, 4 x 3.
    "pairs, transients": (equal((0,), 4, PAIRED | {"peak_f": 1.0, "peak_b": 1.0}, memory_cap=3.0), 12, 12),
    # Each device has 18 of work, and one of the two first stages to begin with.
    "two replicas": (equal((0, 1, 1, 0), 3, replicas=2), 18, 18),
    # F0.1's link is taken until 4, so F1.1 runs from 7, B1.1 from 8; 12 at device 0, and two passes.
    "a contended link": (equal((0, 1), 2, t_transfer=3.0), 14, 14),
    "a free link": (equal((0, 1), 2, t_comm=3.0), 13, 13),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_values_worked_by_hand(name: str) -> None:
    """Least makespan and span, None where nothing fits."""
    data, makespan, span = BY_HAND[name]
    for objective, expected in (("makespan", makespan), ("span", span)):
        best = optimum(data, objective)
        assert (None if best is None else float(best.cost)) == expected, objective


@pytest.mark.parametrize("mix", MIXES)
def test_no_order_of_the_tiniest_is_better_or_missing(mix: str) -> None:
    """The same optimum as all permutations have, micro-batches out of order included."""
    compared = 0
    for number in range(NUMBERS):
        data = case(mix, number, most_passes=3)
        tasks = [0] * data["num_devices"]
        for stage in data["stages"]:
            tasks[stage["device"]] += data["num_microbatches"] * (4 if "t_r" in stage else 3)
        if max(tasks) > MOST_ON_ONE or sum(tasks) > MOST_TASKS:
            continue
        for objective in ("makespan", "span"):
            best = optimum(data, objective)
            assert (None if best is None else best.cost) == least(data, objective), (
                mix,
                number,
                objective,
                data,
            )
            compared += 1
    assert compared >= 4
