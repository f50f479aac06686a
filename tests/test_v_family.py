"""ZB-V, V-Half, V-Min: published bubbles, memory, any size."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources

import pytest

from zbsolve.baselines import BASELINES
from zbsolve.baselines.building_block import Block, v_half, v_min
from zbsolve.baselines.zb_v import zb_v_candidates
from zbsolve.benchmark.random_instances import random_instance
from zbsolve.errors import InputError
from zbsolve.model.instance import equal_stages, load_instance, make_instance
from zbsolve.model.judge import check
from zbsolve.model.memory import peak_memory
from zbsolve.model.simulator import simulate

KNOWN = json.loads((resources.files("zbsolve.instances") / "known.json").read_text())["instances"]
BIG = "zbv-p24-m192", "zbv-p32-m96", "zbv-p32-m128", "zbv-p32-m256"
CELLS = [
    pytest.param(name, marks=[pytest.mark.slow] if name in BIG else [])
    for name in KNOWN
    if name.startswith("zbv-")
]


@pytest.mark.parametrize("cell", CELLS)
def test_published_zb_v_bubbles_to_three_decimals(cell: str) -> None:
    """Bubble rates by span, Zero Bubble paper, Table 8, at p M_B."""
    with resources.as_file(resources.files("zbsolve.instances") / f"{cell}.json") as path:
        instance = load_instance(path)
    _, schedule = BASELINES["zb-v"].schedule(instance)
    assert check(instance, schedule) == []  # the instance's cap is p M_B
    bubble = 1 - instance.device_work(0) / schedule.span
    # Half a unit of the third decimal.
    assert abs(bubble - KNOWN[cell]["published_bubble_by_span"]["zb-v"]) <= 0.5e-3


def test_zb_v_has_no_bubble_in_span_at_equal_times() -> None:
    """p = 4, m = 12, T_F = T_B = T_W = 1: every device works 12 * 2 * 3 = 72 without a break."""
    instance = equal_stages(4, 12, placement="v", memory_cap=8.0)  # p M_B: 4 micro-batches on 2 chunks
    _, schedule = BASELINES["zb-v"].schedule(instance)
    assert check(instance, schedule) == []
    assert schedule.span == pytest.approx(72)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (2, 1), (3, 2), (4, 3), (4, 8), (5, 17), (8, 6)])
@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
def test_v_baselines_are_valid_at_any_size(name: str, p: int, m: int) -> None:
    """m < p, m not a multiple of p, p = 1, unequal stages, hops: every rule holds."""
    instance = equal_stages(p, m, 2.0, 3.0, 1.0, 0.25, placement="v")
    slow = instance.stages[0].model_copy(update={"t_f": 5.0, "t_w": 4.0, "mem_b": 1.5})
    unequal = instance.with_changes(stages=[slow, *instance.stages[1:]])
    for each in (instance, unequal):
        timed_on, schedule = BASELINES[name].schedule(each)
        assert check(timed_on, schedule) == []


def test_greedy_constructions_split_every_backward() -> None:
    """Where the instance could fuse (as measured profiles can), ZB-V and ZB-1p still run B and W."""
    for name, placement in (("zb-v", "v"), ("zb-1p", "linear"), ("v-half", "v")):
        plain = equal_stages(3, 7, placement="v" if placement == "v" else "linear")
        fusible = plain.with_changes(
            stages=[stage.model_copy(update={"t_bw": 1.5}) for stage in plain.stages]
        )
        assert BASELINES[name].orders(fusible) == BASELINES[name].orders(plain)


def test_zb_v_candidates_keep_to_the_given_memory() -> None:
    """Every variant stays within the room it was given, and one of them is the published one."""
    instance = equal_stages(4, 10, 3.0, 4.0, 2.0, 0.5, placement="v", mem_w=0.5)
    room = [10.0, 9.0, 8.0, 8.0]
    capped = instance.with_memory_cap("none").with_changes(memory_cap=room)
    candidates = list(zb_v_candidates(instance, room))
    assert len(candidates) >= 6
    for orders in candidates:
        assert check(capped, simulate(capped, orders)) == []
    assert BASELINES["zb-v"].orders(instance) in set(zb_v_candidates(instance))


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize(
    ("name", "peak"), [("v-half", lambda p: (p + 2) // 2), ("v-min", lambda p: (p + 4) // 3)]
)
def test_controllable_memory_peaks(name: str, peak: Callable[[int], int], p: int) -> None:
    """(p + 2) / 2 and (p + 4) / 3 whole stages' activations, rounded down; twice that in chunks."""
    instance = equal_stages(p, 3 * p, placement="v")
    orders = BASELINES[name].orders(instance)
    assert max(peak_memory(instance, d, order) for d, order in enumerate(orders)) == 2 * peak(p)


@pytest.mark.parametrize(
    ("name", "p", "bubble"),
    [
        # Span less work at equal times, in T_F = T_B = T_W = 1 per chunk, of the authors' public program.
        ("v-half", 4, 5),
        ("v-half", 8, 17),
        ("v-half", 16, 41),
        ("v-min", 4, 11),
        ("v-min", 8, 27),
        ("v-min", 16, 59),
    ],
)
def test_controllable_memory_bubbles(name: str, p: int, bubble: float) -> None:
    """About p/2m and 2p/3m of the step: 3p and 4p units, less a constant, whatever m."""
    for m in (2 * p, 4 * p):
        _, schedule = BASELINES[name].schedule(equal_stages(p, m, placement="v"))
        assert schedule.span - 6 * m == pytest.approx(bubble)


@pytest.mark.parametrize("block", [v_half, v_min])
def test_building_blocks_never_meet_themselves(block: Callable[[int], Block]) -> None:
    """Repeated every 6 slots, the four passes of a device keep to different slots, in their order."""
    for p in range(2, 40):
        for passes in block(p):
            assert len({slot % 6 for slot in passes}) == 4
            assert list(passes) == sorted(passes)


def test_v_min_block_of_four_devices() -> None:
    """Slots of arXiv 2405.15362: down 0 1 2 3, up 7 6 5 4, then B's the same way, 8 slots later."""
    assert v_min(4) == [(0, 7, 8, 15), (1, 6, 9, 14), (2, 5, 10, 13), (3, 4, 11, 12)]


def test_zb_v_states_its_rules() -> None:
    """Placement and memory that ZB-V needs are named."""
    with pytest.raises(InputError, match="V placement"):
        BASELINES["zb-v"].orders(equal_stages(2, 2))
    instance = equal_stages(4, 8, placement="v")
    assert list(zb_v_candidates(instance, [1.0] * 4)) == []
    assert max(peak_memory(instance, d, o) for d, o in enumerate(BASELINES["zb-v"].orders(instance))) == 8


def test_zb_v_ends_where_an_upper_device_lacks_memory() -> None:
    """Unequal memory under p M_B: the warm-up of random-50 stops when nothing more fits, and gives orders."""
    instance = random_instance(50)
    for orders in zb_v_candidates(instance, published=True):
        assert check(instance.with_memory_cap(None), simulate(instance, orders)) == []


def test_zb_v_goes_on_where_a_lower_device_lacks_memory() -> None:
    """Device 1, cap 5: beside two F's of stage 1 there is no room for stage 2's first, which takes 1 + 3."""
    stages = [
        {"device": d, "t_f": 1.0, "t_b": 1.0, "t_w": 2.0, "mem_b": mem_b, "mem_w": 1.0, "peak_f": peak_f}
        for d, mem_b, peak_f in ((0, 1.0, 2.0), (1, 1.0, 2.0), (1, 1.0, 3.0), (0, 2.0, 0.0))
    ]
    instance = make_instance(num_devices=2, num_microbatches=3, stages=stages, memory_cap=[3.0, 5.0])
    for orders in zb_v_candidates(instance):
        assert check(instance.with_memory_cap(None), simulate(instance, orders)) == []
