"""Hand-made schedules: orders, rules, published bubbles."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from zbsolve.baselines import BASELINES, applicable
from zbsolve.baselines.one_f_one_b import orders_interleaved
from zbsolve.errors import InputError
from zbsolve.model.instance import Instance, equal_stages, load_instance
from zbsolve.model.judge import check
from zbsolve.model.memory import peak_memory
from zbsolve.model.simulator import simulate

KNOWN = json.loads((resources.files("zbsolve.instances") / "known.json").read_text())["instances"]
CELLS = [
    pytest.param(name, marks=[pytest.mark.slow] if "28.3B" in name else [])
    for name in KNOWN
    if name.startswith("zb-")
]


def shipped(name: str) -> Instance:
    """An instance of the package's own data."""
    with resources.as_file(resources.files("zbsolve.instances") / f"{name}.json") as path:
        return load_instance(path)


def words(name: str, instance: Instance, device: int) -> str:
    """A device's order in short: F0 B0 W0 ..."""
    _, orders = BASELINES[name].prepared(instance)
    return " ".join(f"{task.kind}{task.microbatch}" for task in orders[device])


def test_1f1b_orders_of_three_devices() -> None:
    """p - r forwards, then one backward and one forward in turn."""
    instance = equal_stages(3, 4)
    assert words("1f1b", instance, 0) == "F0 F1 F2 BW0 F3 BW1 BW2 BW3"
    assert words("1f1b", instance, 2) == "F0 BW0 F1 BW1 F2 BW2 F3 BW3"


def test_zb_h1_keeps_r_weight_gradients_back() -> None:
    """Device r runs W of micro-batch j - r after B of j."""
    instance = equal_stages(3, 4)
    assert words("zb-h1", instance, 0) == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert words("zb-h1", instance, 2) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (2, 7), (4, 3), (4, 8), (5, 12)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_linear_baselines_are_valid_at_any_size(name: str, p: int, m: int) -> None:
    """m < p, m not a multiple of p, p = 1: every rule holds."""
    timed_on, schedule = BASELINES[name].schedule(equal_stages(p, m, 2.0, 3.0, 1.0, 0.5))
    assert check(timed_on, schedule) == []


@pytest.mark.parametrize(
    ("name", "bubble", "peak"),
    [
        # p = 4, m = 8, T_F = 3, T_B = 4, T_W = 2: work 72 on each device.
        ("gpipe", 3 * (3 + 4 + 2), 8),  # (p-1)(t_f + t_bw), m in flight
        ("1f1b", 3 * (3 + 4 + 2), 4),  # the same bubble, p in flight
        ("zb-h1", 3 * (3 + 4 - 2), 4),  # (p-1)(T_F + T_B - T_W), p M_B
        ("zb-h2", 3 * (3 + 4 - 2 * 2), 7),  # (p-1)(T_F + T_B - 2 T_W), (2p-1) M_B
    ],
)
def test_bubble_and_peak_formulas(name: str, bubble: float, peak: float) -> None:
    """Simulated bubble and peak on device 0 equal the published formulas."""
    timed_on, schedule = BASELINES[name].schedule(equal_stages(4, 8, 3.0, 4.0, 2.0))
    device = schedule.devices[0]
    assert device[-1].end - device[0].start - 72 == pytest.approx(bubble)
    assert max(peak_memory(timed_on, d, order) for d, order in enumerate(schedule.orders)) == peak


def test_interleaved_bubble_and_peak() -> None:
    """p=4, v=2: bubble (p-1)(t_f+t_b)/v and 5.5 whole stages' activations at device 0 (11 half stages)."""
    instance = equal_stages(4, 8, 1.0, 1.0, 1.0, placement="loop")
    timed_on, schedule = BASELINES["interleaved"].schedule(instance)
    assert check(timed_on, schedule) == []
    # Per device 8 * 2 * 3 = 48 of work; a whole stage takes 6, so the bubble is 3 * 6 / 2 = 9.
    assert schedule.makespan == pytest.approx(48 + 9)
    assert peak_memory(timed_on, 0, schedule.orders[0]) == 11


@pytest.mark.parametrize("group", [4, 8, 16])
def test_interleaved_from_depth_first_to_breadth_first(group: int) -> None:
    """N from p to m: the same bubble, a growing peak of 2 (p-1) + (v-1) N + 1 chunks."""
    instance = equal_stages(4, 16, placement="loop").with_fused_backward()
    orders = orders_interleaved(instance, group)
    schedule = simulate(instance, orders)
    assert check(instance, schedule) == []
    assert schedule.makespan == pytest.approx(16 * 6 + 9)
    assert peak_memory(instance, 0, orders[0]) == 6 + group + 1


def test_rules_are_stated_when_a_schedule_does_not_apply() -> None:
    """Placement and m that a schedule does not allow are refused with the rule."""
    with pytest.raises(InputError, match="linear placement"):
        BASELINES["1f1b"].orders(equal_stages(2, 2, placement="v"))
    loop = equal_stages(2, 9, placement="loop").with_fused_backward()
    # N = p = 2 does not divide 9: 3 and 9 do.
    with pytest.raises(InputError, match=r"p is 2, m is 9, N is 2: use interleaved:N with N = 3 or 9"):
        BASELINES["interleaved"].orders(loop)
    with pytest.raises(InputError, match=r"in a row through each chunk .* m is 9, N is 10"):
        BASELINES["interleaved:10"].orders(loop)
    with pytest.raises(InputError, match="as many micro-batches as devices: m is 3, p is 4"):
        BASELINES["interleaved"].orders(equal_stages(4, 3, placement="loop").with_fused_backward())
    names = {baseline.name for baseline in applicable(equal_stages(2, 2, placement="v"))}
    assert names == {"naive", "gpipe", "gpipe-r", "zb-1p", "zb-2p", "zb-v", "v-half", "v-min"}


@pytest.mark.parametrize("cell", CELLS)
def test_published_bubbles_to_four_decimals(cell: str) -> None:
    """1F1B, ZB-H1, ZB-H2, and ZB-1p or ZB-2p bubble rates by span, Zero Bubble paper, Table 5."""
    instance = shipped(cell)
    for name in ("1f1b", "zb-h1", "zb-h2", f"zb-{cell[-2:]}"):
        timed_on, schedule = BASELINES[name].schedule(instance, "span")
        bubble = 1 - timed_on.device_work(0) / schedule.span
        published = KNOWN[cell]["published_bubble_by_span"][name]
        # Half a unit of the fourth decimal: equal as printed.
        assert abs(bubble - published) <= 0.5e-4 + 1e-6, name
