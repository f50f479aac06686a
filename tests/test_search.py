"""Heuristic, policy search and order search: always valid, never worse than where they began."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from tests.strategies import small_instances
from zbsolve.errors import InfeasibleError
from zbsolve.model.instance import Instance, equal_stages, make_instance, place
from zbsolve.model.judge import check
from zbsolve.model.serial import require_feasible, serial_orders, serial_program
from zbsolve.model.simulator import simulate
from zbsolve.search.arrays import decode
from zbsolve.search.backbones import BackboneSearch
from zbsolve.search.canonical import canonical
from zbsolve.search.list_scheduler import ListScheduler
from zbsolve.search.orders import OrderSearch
from zbsolve.search.policies import PolicyRace, automatic, presets


def random_instance(seed: int, placement: str, fuse: bool = False) -> Instance:
    """A seeded unequal instance with a tight cap."""
    draw = np.random.default_rng(seed)
    p, m = int(draw.integers(2, 5)), int(draw.integers(3, 9))
    stages = [
        {
            "device": d,
            "t_f": float(draw.integers(1, 4)),
            "t_b": float(draw.integers(1, 4)),
            "t_w": float(draw.integers(0, 4)),
            "mem_b": float(draw.integers(1, 3)),
            "mem_w": float(draw.integers(1, 4)),
            **({"t_bw": float(draw.integers(2, 7))} if fuse else {}),
        }
        for d in place(p, placement)  # type: ignore[arg-type]
    ]
    instance = make_instance(num_devices=p, num_microbatches=m, stages=stages, t_comm=0.5)
    caps = [serial_program(instance, d)[0] * float(draw.choice([1.0, 1.5, 2.5])) for d in range(p)]
    return instance.with_changes(memory_cap=caps)


@settings(max_examples=80, derandomize=True, deadline=None)
@given(small_instances(max_passes=16))
def test_every_policy_gives_a_valid_schedule_or_says_it_cannot(instance: Instance) -> None:
    """Whatever the placement and the cap, what the list scheduler returns keeps every rule."""
    try:
        require_feasible(instance)
    except InfeasibleError:
        return
    scheduler = ListScheduler(instance)
    for policy in presets(instance, patiences=2):
        makespan, span = scheduler.run(policy)
        if math.isinf(makespan):
            continue
        schedule = simulate(instance, scheduler.orders())
        assert check(instance, schedule) == []
        assert schedule.makespan == pytest.approx(makespan)
        assert schedule.span == pytest.approx(span)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(small_instances(max_passes=8))
def test_serial_order_is_valid_wherever_one_microbatch_fits(instance: Instance) -> None:
    """The incumbent of last resort exists exactly when no device is too small."""
    try:
        require_feasible(instance)
    except InfeasibleError:
        return
    assert check(instance, simulate(instance, serial_orders(instance))) == []


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("placement", ["linear", "loop", "v"])
@pytest.mark.parametrize("fuse", [False, True])
def test_searches_improve_and_stay_valid(objective: str, placement: str, fuse: bool) -> None:
    """Costs that the searches report are those of valid schedules, and never above their start."""
    for seed in range(4):
        instance = random_instance(seed, placement, fuse)
        scheduler = ListScheduler(instance)
        cost = automatic(scheduler, objective, patiences=8)
        orders = serial_orders(instance)
        if math.isfinite(cost):
            race = PolicyRace(scheduler, objective, seed, patiences=8, enough=lambda: False)
            for step in range(80):
                descent = race.next(step / 80)
                assert descent is not None
                descent.step()
            assert len(race.running) == 1
            assert race.running[0].cost <= cost
            orders = canonical(instance, race.running[0].orders())
            assert simulate(instance, orders).cost(objective) == pytest.approx(race.running[0].cost)
        begin = simulate(instance, orders).cost(objective)
        annealing = OrderSearch(instance, canonical(instance, orders), objective, seed=seed, compiled=False)
        best = annealing.run(steps=300, slack=0.5, target=0.0)
        schedule = simulate(instance, annealing.orders())
        assert check(instance, schedule) == []
        assert best <= begin + 1e-9
        assert schedule.cost(objective) == pytest.approx(best)
        backbones = BackboneSearch(instance, orders, objective, seed=seed, compiled=False)
        first = backbones.run(steps=0, slack=0.0, target=0.0)
        best = backbones.run(steps=300, slack=0.5, target=0.0)
        if math.isfinite(best):
            schedule = simulate(instance, canonical(instance, backbones.orders()))
            assert check(instance, schedule) == []
            assert best <= first
            assert schedule.cost(objective) == pytest.approx(best)


def test_a_backbone_fills_its_gaps_with_w() -> None:
    """F0 F1 | B1 B0 on two devices, cap 1 each: the W's wait for the gap, then for the memory.

    Device 0: F 0-1, (F, B on device 1 until 3), B 3-4, W 4-5 because the next F lacks memory; then the same
    again: 5-10. Device 1: F 1-2, B 2-3, W in the gap 3-4.
    """
    instance = equal_stages(2, 2, memory_cap=1)
    backbones = BackboneSearch(instance, serial_orders(instance), "makespan", seed=0, compiled=False)
    assert backbones.run(steps=0, slack=0.0, target=0.0) == pytest.approx(10.0)
    kinds = [[task.kind.name for task in order] for order in backbones.orders()]
    assert kinds == [["F", "B", "W", "F", "B", "W"]] * 2


def test_machine_code_and_plain_python_agree() -> None:
    """The compiled loops take the same decisions as the plain ones."""
    instance = random_instance(5, "v")
    plain, compiled = ListScheduler(instance), ListScheduler(instance, compiled=True)
    for policy in presets(instance, patiences=2):
        assert plain.run(policy) == pytest.approx(compiled.run(policy))
        assert plain.orders() == compiled.orders()


def test_codes_round_trip() -> None:
    """Order search decodes to the very orders it was given."""
    instance = equal_stages(3, 4)
    orders = serial_orders(instance)
    search = OrderSearch(instance, orders, "makespan", seed=0, compiled=False)
    assert decode(search.codes, search.lengths) == orders
