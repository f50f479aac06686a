"""What families of joint decisions stand on: bounds of one device that read only how long the ways are."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbsolve.bounds.bound import Bound
from zbsolve.bounds.catalogue import ONE_DEVICE_BOUNDS
from zbsolve.bounds.waits import back
from zbsolve.bounds.ways import backward_tail, forward_head, round_trip
from zbsolve.model.instance import Instance, Stage, make_instance
from zbsolve.partition import relaxation
from zbsolve.partition.relaxation import outline

TIMES = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5])
AMOUNTS = st.sampled_from([0.0, 0.5, 1.0, 2.0])
# One stage a device, V, and loop: the last two give each device two.
PLACES = ((0, 1, 2, 3), (0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2))

OneDeviceBound = Callable[[Instance, int, str], Bound | None]


@st.composite
def instances(draw: st.DrawFn) -> tuple[Instance, int]:
    """Unequal stages under tight caps, and a device; only that one may recompute."""
    places = draw(st.sampled_from(PLACES))
    device = draw(st.sampled_from(sorted(set(places))))
    stages = []
    for place in places:
        stage: dict[str, object] = {name: draw(TIMES) for name in ("t_f", "t_b", "t_w")}
        stage |= {name: draw(AMOUNTS) for name in ("mem_b", "mem_w", "peak_b")}
        stage |= {"device": place, "t_bw": draw(st.sampled_from([None, 1.5, 4.0]))}
        if place == device and draw(st.booleans()):
            stage |= {"t_r": draw(TIMES)}
        stages.append(stage)
    instance = make_instance(
        num_devices=max(places) + 1,
        num_microbatches=draw(st.integers(1, 5)),
        stages=stages,
        t_comm=[draw(TIMES) for _ in places[1:]],
        memory_cap=[draw(st.sampled_from([3.0, 5.0, 9.0])) for _ in range(max(places) + 1)],
        static_mem=[draw(AMOUNTS) for _ in range(max(places) + 1)],
    )
    return instance, device


def outline_of(instance: Instance, device: int) -> Instance:
    """The device as the search sees it: its own stages, all others as ways of the right length."""
    held = instance.stages_on(device)
    without: list[Stage] = [stage.model_copy(update={"t_r": None}) for stage in instance.stages]
    plain = instance.model_copy(update={"stages": tuple(without)})
    between = (0.0, 0.0)
    if len(held) == 2:
        inner = range(held[0] + 1, held[1])
        hops = sum(instance.hop(b) for b in range(held[0], held[1]))
        between = (
            hops + sum(instance.stages[s].t_f for s in inner),
            hops + sum(back(instance.stages[s]) for s in inner),
        )
    return outline(
        [instance.stages[s] for s in held],
        instance.num_microbatches,
        forward_head(instance, held[0]),
        backward_tail(instance, held[0]),
        between,
        round_trip(plain, held[-1], held[-1]),
        instance.static(device),
        instance.cap(device),
    )


def reads_only_ways(bound: OneDeviceBound, instance: Instance, device: int, objective: str) -> bool:
    """Whether a bound says the same of a device and of its outline."""
    real = bound(instance, device, objective)
    seen = bound(outline_of(instance, device), 0, objective)
    if real is None or seen is None:
        return real is seen
    return seen.value == pytest.approx(real.value, abs=1e-9)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(instances(), st.sampled_from(["makespan", "span"]))
def test_bounds_of_one_device_read_only_the_ways_to_others(
    drawn: tuple[Instance, int], objective: str
) -> None:
    """Each gives the same value when all other stages are put in as ways of the same length."""
    for bound in ONE_DEVICE_BOUNDS:
        assert reads_only_ways(bound, *drawn, objective), bound


def _busiest_other(instance: Instance, _device: int, _objective: str) -> Bound:
    return Bound(max(map(instance.device_work, range(instance.num_devices))), "work", "the busiest device's")


def _fullest_other(instance: Instance, _device: int, _objective: str) -> Bound:
    return Bound(max(stage.mem_w for stage in instance.stages), "memory", "the most that any W needs")


def _number_of_devices(instance: Instance, _device: int, _objective: str) -> Bound:
    return Bound(float(instance.num_devices), "devices", "one unit for each")


@pytest.mark.parametrize("wrong", [_busiest_other, _fullest_other, _number_of_devices])
def test_a_bound_that_reads_more_of_other_devices_is_noticed(wrong: OneDeviceBound) -> None:
    """Three that hold for an instance and not for an outline: their work, their memory, their number."""
    stages = [
        {"device": d, "t_f": 1.0, "t_b": 1.0, "t_w": 1.0 + d, "mem_b": 1.0, "mem_w": 1.0 + d}
        for d in (0, 1, 2, 2, 1, 0)
    ]
    instance = make_instance(num_devices=3, num_microbatches=4, stages=stages, memory_cap=9.0)
    assert not reads_only_ways(wrong, instance, 0, "span")
    assert all(reads_only_ways(bound, instance, 0, "span") for bound in ONE_DEVICE_BOUNDS)


def test_the_relaxation_asks_an_outline_for_nothing_else() -> None:
    """Of the bounds' room it imports only those that are watched over here, and how long a backward takes."""
    tree = ast.parse(inspect.getsource(relaxation))
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zbsolve.bounds")
        for alias in node.names
    }
    assert names == {"ONE_DEVICE_BOUNDS", "back"}
