"""Recomputation, F&B pairs and replicas: bounds, exact model, list scheduler, search, against the truth."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.extended_brute_force import least_makespan
from tests.extended_strategies import Pair, programs
from zbsolve.baselines import BASELINES
from zbsolve.baselines.comparison import best_baseline, compare_with_baselines, reference_cost
from zbsolve.baselines.dualpipe import bidirectional
from zbsolve.bounds.catalogue import all_bounds, best_bound
from zbsolve.errors import InfeasibleError, InputError
from zbsolve.formulations.common import Status
from zbsolve.formulations.cpsat_extended import solve_extended
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance, equal_stages, make_instance
from zbsolve.model.judge import check
from zbsolve.model.memory import peak_memory
from zbsolve.model.serial import require_feasible
from zbsolve.model.simulator import CycleError, simulate
from zbsolve.plan.check import check_plan
from zbsolve.plan.torch_csv import export_torch_csv
from zbsolve.report.text import certificate_table, comparison_table
from zbsolve.search.extended_arrays import decode, encode, time_codes, to_extended_arrays
from zbsolve.search.extended_orders import ExtendedOrderSearch
from zbsolve.search.extended_policies import ExtendedPolicySearch, presets, run_policy
from zbsolve.solver.portfolio import solve

TIMES = st.sampled_from([0.5, 1.0, 2.0])
SHAPES = (
    ((0,), 1),
    ((0, 1), 1),
    ((0, 0), 1),
    ((0, 0), 2),
    ((0, 1, 0), 1),
    ((0, 1, 1, 0), 1),
    ((0, 1, 1, 0), 2),
)


@st.composite
def tiny_instances(draw: st.DrawFn, most: int = 8, stages_at_most: int = 4) -> Instance:
    """Any subset of stages recomputes, fuses or pairs; some under a cap; at most so many F's."""
    devices, replicas = draw(st.sampled_from([shape for shape in SHAPES if len(shape[0]) <= stages_at_most]))
    stages: list[dict[str, Any]] = []
    for device in devices:
        stage: dict[str, Any] = {"device": device, "t_f": draw(TIMES), "t_b": draw(TIMES), "t_w": draw(TIMES)}
        stage |= {"mem_b": draw(st.sampled_from([1.0, 1.5])), "mem_w": draw(st.sampled_from([0.5, 1.0, 1.5]))}
        option = draw(st.sampled_from(["none", "recompute", "recompute, fused", "fused", "pair", "pair"]))
        if option.startswith("recompute"):
            stage |= {"t_r": draw(TIMES), "mem_r": draw(st.sampled_from([0.0, 0.5]))}
        if option.endswith("fused") or option == "pair":
            stage["t_bw"] = stage["t_b"] + stage["t_w"] - draw(st.sampled_from([0.0, 0.25]))
        if option == "pair":
            f, bw = stage["t_f"], stage["t_bw"]
            stage["t_fb"] = max(f, bw) + draw(st.sampled_from([0.0, 0.5])) * min(f, bw)
        stages.append(stage)
    p = max(devices) + 1
    return make_instance(
        name="tiny",
        num_devices=p,
        num_microbatches=draw(st.integers(1, max(1, most // len(devices)))),
        replicas=replicas,
        stages=stages,
        t_comm=draw(st.sampled_from([0.0, 0.5])),
        memory_cap=draw(st.sampled_from([None, 2.5, 4.0])),
    )


def feasible(instance: Instance) -> bool:
    try:
        require_feasible(instance)
    except InfeasibleError:
        return False
    return True


def pairing(instance: Instance, t_bw: float = 2.0, t_fb: float = 2.0) -> Instance:
    return instance.with_changes(
        stages=[stage.model_copy(update={"t_bw": t_bw, "t_fb": t_fb}) for stage in instance.stages]
    )


# --- against exhaustive search -----------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=150)
@given(tiny_instances(most=4, stages_at_most=3))
def test_bounds_and_exact_model_against_exhaustive_search(instance: Instance) -> None:
    """No bound is above the optimum, and the exact model gives it."""
    if not feasible(instance):
        return
    optimum = least_makespan(instance)
    for bound in all_bounds(instance, "makespan"):
        assert bound.value <= optimum + 1e-9, bound
    # The exact model proves both objectives; no span is above its makespan.
    result = solve_extended(instance, "makespan", time_limit=30)
    assert result.status is Status.OPTIMAL
    assert result.bound == pytest.approx(optimum)
    assert result.orders is not None
    assert simulate(instance, result.orders, result.pairs).makespan == pytest.approx(optimum)
    span = solve_extended(instance, "span", time_limit=30)
    assert span.status is Status.OPTIMAL
    assert span.bound is not None
    assert best_bound(instance, "span").value <= span.bound + 1e-9
    assert span.bound <= optimum + 1e-9


@settings(derandomize=True, deadline=None, max_examples=60)
@given(tiny_instances())
def test_the_list_scheduler_runs_within_memory(instance: Instance) -> None:
    """Every policy gives a valid schedule wherever one micro-batch fits: no deadlock, no overrun."""
    if not feasible(instance):
        return
    search = ExtendedPolicySearch(instance, "makespan", 0)
    for number in range(60):
        before = search.best
        if not search.try_preset():
            search.step(number / 60)
        if number == 0:
            assert math.isfinite(search.best[0])
        if search.best < before:
            assert search.best_orders is not None
            schedule = simulate(instance, *search.best_orders)
            assert schedule.makespan == pytest.approx(search.best[0])
            assert check(instance, schedule) == []


@pytest.mark.parametrize("cap", [1.0, 2.0])
def test_replicas_do_not_wait_for_each_others_memory(cap: float) -> None:
    """Room for one or two micro-batches: every policy runs to the end, none fills two devices in a circle."""
    instance = replicas(2, 3).with_changes(memory_cap=cap)
    arrays = to_extended_arrays(instance)
    codes, lengths = encode(instance, tuple(() for _ in range(2)), frozenset())
    policies = list(presets(instance))
    assert policies
    for policy in policies:
        assert run_policy(arrays, policy, codes, lengths)


# --- codes, moves ------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=150)
@given(programs())
def test_codes_are_timed_as_the_simulator_times_them(
    program: tuple[Instance, tuple[tuple[Task, ...], ...], frozenset[Pair]],
) -> None:
    """Renamed into order a schedule ends no later, and both timings agree."""
    instance, orders, pairs = program
    codes, lengths = encode(instance, orders, pairs)
    renamed, renamed_pairs = decode(codes, lengths)
    makespan, span, _ = time_codes(to_extended_arrays(instance), codes, lengths)
    try:
        schedule = simulate(instance, renamed, renamed_pairs)
    except (CycleError, InputError):
        # A pair that saves nothing is no pair of the codes.
        assert math.isinf(makespan)
        return
    if math.isfinite(makespan):
        assert (makespan, span) == pytest.approx((schedule.makespan, schedule.span))
    if instance.t_transfer is None:
        assert schedule.makespan <= simulate(instance, orders, pairs).makespan + 1e-9


@settings(derandomize=True, deadline=None, max_examples=50)
@given(tiny_instances(), st.integers(0, 2**20))
def test_annealing_keeps_the_rules(instance: Instance, seed: int) -> None:
    """Whatever was moved, paired, split and joined: the best is valid, and no worse than the start."""
    if not feasible(instance):
        return
    search = ExtendedPolicySearch(instance, "makespan", 0)
    search.try_preset()
    assert search.best_orders is not None
    annealing = ExtendedOrderSearch(instance, *search.best_orders, "makespan", seed, compiled=False)
    cost = annealing.run(150, 2.0, 0.0)
    assert cost <= search.best[0] + 1e-9
    schedule = simulate(instance, *annealing.orders())
    assert check(instance, schedule) == []
    assert schedule.makespan == pytest.approx(cost)


# --- the whole way -----------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=12)
@given(tiny_instances())
def test_any_subset_of_options_goes_the_whole_way(instance: Instance) -> None:
    """Solve, check, compare, show; an export is written or refused in one line."""
    if not feasible(instance):
        return
    plan = solve(instance, time_limit=0.3).plan
    assert check_plan(plan) == []
    assert plan.lower_bound <= plan.makespan + 1e-9
    comparison_table(compare_with_baselines(plan), plan)
    certificate_table(plan)
    best = best_baseline(instance, "makespan")
    assert best is None or plan.makespan <= best[1] + 1e-9 or instance.num_tasks == 0
    with contextlib.suppress(InputError):  # options that the format does not have are refused by name
        export_torch_csv(instance, plan.schedule())


def replicas(p: int, m: int) -> Instance:
    """Two replicas in opposite directions, m micro-batches each, no fused backward."""
    instance = bidirectional(equal_stages(p, 2 * m))
    return instance.with_changes(
        stages=[stage.model_copy(update={"t_bw": None}) for stage in instance.stages]
    )


@pytest.mark.parametrize(
    ("instance", "optimum"),
    [
        # Two devices, 18 of work each, and both can begin at once: no idle time at all.
        (replicas(2, 3), 18.0),
        # Device 1 begins no earlier than 1, and has 24 or 48 of work.
        (replicas(4, 4), 25.0),
        (replicas(4, 8), 49.0),
        # F0, three pairs of 2, BW3: 1 + 6 + 2.
        (pairing(equal_stages(1, 4)), 9.0),
        # Device 1: F0 from 1, then three pairs and BW3 until 10; device 0's last BW of 2 until 12.
        (pairing(equal_stages(2, 4)), 12.0),
    ],
)
def test_small_steps_are_proven_optimal(instance: Instance, optimum: float) -> None:
    """Replicas without t_bw, and pairs: worked out by hand."""
    plan = solve(instance, time_limit=10.0).plan
    assert plan.makespan == optimum
    assert plan.status == "optimal"


def test_nothing_pairs_in_the_first_and_last_window() -> None:
    """p = 1, m = 4: 8 of work if all F's were paired, but the first F runs alone, as does the last BW."""
    values = {bound.method: bound.value for bound in all_bounds(pairing(equal_stages(1, 4)), "makespan")}
    assert values["unpaired windows"] == 9.0


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_never_worse_than_the_catalogue(objective: str) -> None:
    """DualPipe and DualPipeV, as they are and with their BW taken apart, are floors even in no time."""
    for name, instance in (
        ("dualpipe", bidirectional(pairing(equal_stages(4, 16), t_fb=2.5))),
        ("dualpipe", replicas(4, 8)),
        ("dualpipe-v", pairing(equal_stages(4, 10, placement="v"), t_fb=2.5)),
    ):
        timed_on, schedule = BASELINES[name].schedule(instance, objective)
        del timed_on
        plan = solve(instance, objective=objective, time_limit=0.5).plan  # type: ignore[arg-type]
        assert plan.cost <= schedule.cost(objective) + 1e-9


# --- limits, memory, gains -----------------------------------------------------------------------------


def test_the_time_limit_holds() -> None:
    """8 devices in a V with pairs, 64 micro-batches, 1 s: no more than 1 s over it, in processor time."""
    instance = pairing(equal_stages(8, 64, placement="v"))
    began = time.process_time()
    plan = solve(instance, time_limit=1.0).plan
    assert time.process_time() - began < 2.0
    assert check_plan(plan) == []


def test_deterministic_mode_gives_the_same_plan() -> None:
    """Counts in place of seconds."""
    instance = pairing(equal_stages(2, 5), t_fb=2.5)
    plans = [solve(instance, time_limit=0.2, deterministic=True).plan.to_json() for _ in range(2)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("instance", "most"),
    [
        (equal_stages(4, 10, placement="v"), 8.0),  # ZB-V holds 2p chunks
        (equal_stages(2, 8, placement="loop"), 5.0),
    ],
)
def test_equal_costs_take_less_memory(instance: Instance, most: float) -> None:
    """The optimum is found at once, and with all micro-batches in flight: 16 chunks."""
    plan = solve(instance, time_limit=5.0).plan
    assert plan.status == "optimal"
    assert max(plan.peak_memory) <= most


def test_lighter_plans_cost_the_same() -> None:
    """A warm start of GPipe's memory at the optimum's cost on one device gives way to one of less."""
    instance = equal_stages(1, 6)
    _, gpipe = BASELINES["gpipe"].schedule(instance.with_fused_backward())
    assert peak_memory(instance.with_fused_backward(), 0, gpipe.orders[0]) == 6
    plan = solve(instance, time_limit=1.0).plan
    assert (plan.makespan, plan.peak_memory[0]) == (18, 1)


@pytest.mark.parametrize(
    ("instance", "reference", "note"),
    [
        # 1F1B of m micro-batches in a line: (m + p - 1) (t_f + t_bw), t_f + t_bw being 6 a device and 3.
        (equal_stages(4, 8, placement="v"), 66.0, "one chunk per device in a line"),
        (equal_stages(4, 8, placement="loop"), 66.0, "one chunk per device in a line"),
        (replicas(4, 4), 33.0, "one replica in a line"),
    ],
)
def test_gains_are_stated_on_every_placement(instance: Instance, reference: float, note: str) -> None:
    """Over 1F1B on the folded pipeline."""
    cost, words = reference_cost(instance, "makespan")
    assert cost == reference
    assert words.endswith(note)
