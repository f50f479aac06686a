"""DualPipe and DualPipeV: the published figures' orders, bubbles, memory, rules."""

from __future__ import annotations

from itertools import pairwise

import pytest

from zbsolve.baselines import BASELINES
from zbsolve.errors import InputError
from zbsolve.model.instance import Instance, equal_stages
from zbsolve.model.judge import check
from zbsolve.plan.check import check_plan
from zbsolve.plan.make import peaks_of
from zbsolve.report.timeline import drawn
from zbsolve.solver.portfolio import certify


def overlapping(p: int, m: int, placement: str, t_fb: float = 3.0) -> Instance:
    """Unit F, B, W; BW takes 2, a pair t_fb."""
    plain = equal_stages(p, m, placement="v" if placement == "v" else "linear")
    return plain.with_changes(
        stages=[stage.model_copy(update={"t_bw": 2.0, "t_fb": t_fb}) for stage in plain.stages]
    )


# Micro-batches in the order of the boxes of the published pictures (github.com/deepseek-ai/DualPipe). In
# that of DualPipe (p = 8, m = 20) only one direction is numbered; in that of DualPipeV (4 devices, m = 10)
# an apostrophe marks the second chunk, printed in white.
DUALPIPE_FIGURE = {
    0: "0 1 2 3 4 5 6 7 0 8 1 9 2 3 4 5 6 6 7 7 8 8 9 9",
    1: "0 1 2 3 4 5 6 0 7 1 8 2 9 3 4 5 6 7 8 7 9 8 9",
    3: "0 1 2 3 4 0 5 1 6 2 7 3 8 4 9 5 6 7 8 9 8 9",
    4: "0 1 2 3 0 4 1 5 2 6 3 7 4 8 5 9 6 7 8 9 8 9",
    7: "0 0 0 1 1 1 2 2 2 3 3 4 4 5 5 6 6 7 7 8 8 9 9",
}
DUALPIPE_V_FIGURE = (
    "0 1 2 3 4 5 6 0' 0' 0' 1' 1' 1' 2' 2' 2' 3' 7 3' 4' 0 8 4' 5' 1 9 5' 6' 2 6' 7' 3 7' 8' 4 8' 9' 5 9' "
    "6 6 7 7 8 8 9 9",
    "0 1 2 3 4 0' 5 1' 0' 0' 2' 1' 1' 3' 6 2' 4' 0 7 3' 5' 1 8 4' 6' 2 9 5' 7' 3 6' 8' 4 7' 9' 5 8' "
    "6 9' 7 9' 8 7 9 8 9",
    "0 1 2 0' 3 1' 4 2' 0' 0' 3' 5 1' 4' 0 6 2' 5' 1 7 3' 6' 2 8 4' 7' 3 9 5' 8' 4 6' 9' 5 7' "
    "6 8' 7 9' 8 7 9 9' 8 9",
    "0 0' 1 1' 2 2' 3 3' 4 0' 4' 0 5 1' 5' 1 6 2' 6' 2 7 3' 7' 3 8 4' 8' 4 9 5' 9' 5 6' 6 7' 7 "
    "8' 8 9' 9 8' 8 9' 9",
)


def test_dualpipe_has_the_published_order() -> None:
    """p = 8, m = 20: the numbered direction of the figure, device by device."""
    _, orders = BASELINES["dualpipe"].prepared(overlapping(8, 20, "linear"))
    for device, figure in DUALPIPE_FIGURE.items():
        assert " ".join(str(task.microbatch) for task in orders[device] if task.stage < 8) == figure


def test_dualpipe_is_symmetric() -> None:
    """Device r does with one replica what device p - 1 - r does with the other."""
    _, orders = BASELINES["dualpipe"].prepared(overlapping(8, 20, "linear"))
    for device in range(8):
        mirrored = tuple(task._replace(stage=(task.stage + 8) % 16) for task in orders[7 - device])
        assert orders[device] == mirrored


def test_dualpipe_v_has_the_published_order() -> None:
    """4 devices, 8 stages, m = 10: every box of the figure."""
    _, orders = BASELINES["dualpipe-v"].prepared(overlapping(4, 10, "v"))
    for order, figure in zip(orders, DUALPIPE_V_FIGURE, strict=True):
        assert " ".join(f"{task.microbatch}{chr(39) * (task.stage >= 4)}" for task in order) == figure


@pytest.mark.parametrize(
    ("name", "p", "m", "placement", "pairs"),
    # Pairs of the device at distance h: 2 (10 - 8 + h + 1) + 4 - h - 1, one less innermost: 9, 10, 11, 11.
    [("dualpipe", 8, 20, "linear", 2 * 41), ("dualpipe-v", 4, 10, "v", 41)],
)
def test_published_bubble_and_peak(name: str, p: int, m: int, placement: str, pairs: int) -> None:
    """(8/2 - 1)(F&B + BW - 3W) = 3 (3 + 2 - 3) = 6 over 60 of work; 8 + 1 activations; a valid plan."""
    instance, schedule = BASELINES[name].schedule(overlapping(p, m, placement))
    assert check(instance, schedule) == []
    assert schedule.makespan == 66
    assert max(peaks_of(instance, schedule)) == 9
    assert len(schedule.pairs) == pairs
    assert check_plan(certify(instance, schedule, "makespan", name)) == []


@pytest.mark.parametrize("p", [2, 4, 6, 8])
@pytest.mark.parametrize("extra", [0, 2, 6])
def test_any_even_p_and_m_from_2p_on(p: int, extra: int) -> None:
    """Valid with unequal stages, hops and without t_fb, where the brackets run one after the other."""
    for name, devices, placement in (("dualpipe", p, "linear"), ("dualpipe-v", p // 2, "v")):
        plain = equal_stages(
            devices, 2 * p + extra, 2.0, 3.0, 1.0, 0.25, placement="v" if placement == "v" else "linear"
        )
        slow = plain.stages[0].model_copy(update={"t_f": 5.0, "t_bw": 6.0, "t_fb": 7.0})
        rest = [stage.model_copy(update={"t_bw": 4.0, "t_fb": 5.0}) for stage in plain.stages[1:]]
        for instance in (plain, plain.with_changes(stages=[slow, *rest])):
            timed_on, schedule = BASELINES[name].schedule(instance)
            assert check(timed_on, schedule) == []
            assert (schedule.pairs == frozenset()) == (instance is plain)


@pytest.mark.parametrize(
    ("name", "instance", "rule"),
    [
        ("dualpipe", equal_stages(3, 8), "p and m even: p is 3"),
        ("dualpipe", equal_stages(4, 9), "m is 9"),
        ("dualpipe", equal_stages(4, 6), "m >= 2p: m is 6"),
        ("dualpipe", equal_stages(4, 8, placement="v"), "linear placement"),
        ("dualpipe-v", equal_stages(4, 6, placement="v"), "m >= 2p"),
        ("dualpipe-v", equal_stages(4, 8), "V placement"),
    ],
)
def test_rules_are_stated(name: str, instance: Instance, rule: str) -> None:
    """What DualPipe does not allow is refused with the rule."""
    with pytest.raises(InputError, match=rule):
        BASELINES[name].prepared(instance)


def test_pairs_are_drawn_side_by_side() -> None:
    """F takes its third of a pair of 3, BW the rest; what a picture shows never overlaps."""
    instance, schedule = BASELINES["dualpipe"].schedule(overlapping(4, 8, "linear"))
    shown = drawn(instance, schedule)
    forward, backward = next(iter(sorted(schedule.pairs)))
    times = {timed.task: timed for timed in shown}
    assert times[forward].end - times[forward].start == 1
    assert times[backward].end - times[backward].start == 2
    for program in shown.devices:
        assert all(a.end <= b.start for a, b in pairwise(program))
