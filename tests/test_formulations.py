"""The exact formulations against exhaustive search, and what they may claim."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.backends import answers_of
from tests.brute_force import brute_force
from tests.strategies import small_instances
from zbsolve.errors import EnvironmentFailedError
from zbsolve.formulations import milp
from zbsolve.formulations.backends import BACKENDS
from zbsolve.formulations.common import FormulationResult, Status
from zbsolve.formulations.cpsat import solve_cpsat
from zbsolve.formulations.ticks import make_ticks
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance, equal_stages, make_instance
from zbsolve.model.judge import check
from zbsolve.model.kinds import BW, B, F, W
from zbsolve.model.simulator import simulate, simulate_for
from zbsolve.search.canonical import canonical

Solve = Callable[..., FormulationResult]


# PuLP 3 announces the interface of PuLP 4, which the requirements exclude.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:pulp")

SOLVERS: dict[str, Solve] = {
    backend.name: answers_of(backend) for backend in BACKENDS if backend.models(equal_stages(2, 2))
}
OBJECTIVES = ("makespan", "span")
RANDOM = settings(
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def cost_of(instance: Instance, objective: str, result: FormulationResult) -> float:
    assert result.orders is not None
    schedule = simulate_for(instance, result.orders, objective)
    assert check(instance, schedule) == []
    return schedule.cost(objective)


def serial_orders(instance: Instance) -> tuple[tuple[Task, ...], ...]:
    """One micro-batch after the other, W right behind its B."""
    orders: list[list[Task]] = [[] for _ in range(instance.num_devices)]
    for j in range(instance.num_microbatches):
        for s, stage in enumerate(instance.stages):
            orders[stage.device].append(Task(F, s, j))
        for s in reversed(range(instance.num_stages)):
            orders[instance.stages[s].device] += [Task(B, s, j), Task(W, s, j)]
    return tuple(tuple(order) for order in orders)


@RANDOM
@given(small_instances())
def test_all_solvers_find_the_exhaustive_optimum(instance: Instance) -> None:
    """CP-SAT and MILP by HiGHS and CBC equal brute force on both objectives, infeasibility included."""
    truth = brute_force(instance)
    for objective in OBJECTIVES:
        best = truth.span if objective == "span" else truth.makespan
        for name, solve in SOLVERS.items():
            result = solve(instance, objective, time_limit=60.0)
            if math.isinf(best):
                assert result.status is Status.INFEASIBLE, (name, objective, result)
                continue
            assert result.status is Status.OPTIMAL, (name, objective, best, result)
            assert cost_of(instance, objective, result) == pytest.approx(best, rel=1e-6, abs=1e-6), name
            assert result.bound is not None
            assert result.bound <= best * (1 + 1e-9) + 1e-9, (name, objective)


@settings(RANDOM, max_examples=15)
@given(small_instances(max_passes=3), st.lists(st.floats(0.01, 9.0), min_size=12, max_size=12))
def test_bounds_hold_for_the_unrounded_instance(instance: Instance, times: list[float]) -> None:
    """With durations of 16 digits the tick rounds down: optimum found, bound not above it, gap below 1e-6."""
    changed = [
        stage.model_copy(update={"t_f": times[3 * s], "t_b": times[3 * s + 1], "t_w": times[3 * s + 2]})
        for s, stage in enumerate(instance.stages)
    ]
    instance = instance.model_copy(update={"stages": tuple(changed)})
    truth = brute_force(instance)
    for objective in OBJECTIVES:
        best = truth.span if objective == "span" else truth.makespan
        for name in ("cpsat", "milp-highs"):
            result = SOLVERS[name](instance, objective, time_limit=60.0)
            if math.isinf(best):
                assert result.status is Status.INFEASIBLE
                continue
            assert result.status is Status.OPTIMAL, (name, objective, best, result)
            assert cost_of(instance, objective, result) == pytest.approx(best, rel=1e-6)
            assert result.bound is not None
            assert result.bound <= best * (1 + 1e-9)


# --- ticks -------------------------------------------------------------------------------------


def test_decimal_durations_are_exact_in_ticks() -> None:
    """18.522, 18.086, 9.337 and a hop of 0.601 are whole thousandths: nothing is rounded."""
    ticks = make_ticks(equal_stages(3, 4, 18.522, 18.086, 9.337, 0.601), "makespan")
    assert ticks.exact
    assert float(ticks.tick) == 0.001
    assert [ticks.steps(kind, 0) for kind in (F, B, W)] == [18522, 18086, 9337]
    assert ticks.hop_steps(0) == 601


def test_span_ticks_make_cycle_means_whole() -> None:
    """On 3 devices a least span may be a half or a third of a time unit: lcm(1, 2, 3) = 6 ticks each."""
    ticks = make_ticks(equal_stages(3, 2), "span")
    assert ticks.integral
    assert ticks.steps(F, 0) == 6
    assert ticks.to_bound(13.0) == pytest.approx(13 / 6)


def test_least_span_may_be_half_a_unit() -> None:
    """Two devices, one micro-batch, hop 0.25.

    Device 0's window is F0 1, hop 0.25, F1 1, B1 1, hop 0.25, B0 1, W0 1: 5.5.
    """
    instance = equal_stages(2, 1, t_comm=0.25)
    for solve in SOLVERS.values():
        result = solve(instance, "span", time_limit=30.0)
        assert result.status is Status.OPTIMAL
        assert result.bound == pytest.approx(5.5, rel=1e-6)


def test_measured_durations_lose_less_than_a_thousandth() -> None:
    """Incommensurable durations are rounded down by less than 0.1 %, and so are the short ones."""
    times = (0.0123456789012345, 17.98765432109876, 9.00000000000003)
    instance = equal_stages(4, 16, *times, 0.3333333333333333)
    ticks = make_ticks(instance, "makespan")
    assert not ticks.exact
    for kind, true in zip((F, B, W), times, strict=True):
        kept = float(ticks.tick) * ticks.steps(kind, 0) / ticks.fine
        assert 0.999 * true <= kept <= true


def test_zero_length_tasks_take_a_step_and_cost_nothing() -> None:
    """With T_W = 0 the clock has a step for each of the 4 * 4 W's, and the optimum is still 14.

    Makespan: F of 4 micro-batches and 3 stages down, 3 up: (4 + 3) * (T_F + T_B) = 14.
    """
    instance = equal_stages(4, 4, t_w=0.0)
    ticks = make_ticks(instance, "makespan")
    assert (ticks.zeros, ticks.fine, ticks.steps(W, 0), ticks.steps(F, 0)) == (16, 17, 1, 17)
    assert ticks.cost_of(14 * 17 + 16) == 14
    assert ticks.cost_of(14 * 17 + 17) == 15


def test_a_bound_is_rounded_up_only_where_that_is_proven() -> None:
    """Whole unit times: 12.3 means at least 13; incommensurable times: never more than was given."""
    exact = make_ticks(equal_stages(2, 2), "makespan")
    assert exact.to_bound(exact.from_bound(12.3)) == 13.0
    rounded = make_ticks(equal_stages(2, 2, 1.2345678901234567, math.pi, math.e), "makespan")
    assert rounded.to_bound(rounded.from_bound(12.3)) <= 12.3


def test_canonical_names_micro_batches_in_order() -> None:
    """Orders F1 F0 B0 BW1 W0 become F0 F1 B0 BW1 W0: names follow the order, kinds and places stay."""
    instance = make_instance(
        num_devices=1,
        num_microbatches=2,
        stages=[{"device": 0, "t_f": 1.0, "t_b": 1.0, "t_w": 1.0, "t_bw": 1.5}],
    )
    given_order = [Task(F, 0, 1), Task(F, 0, 0), Task(B, 0, 1), Task(BW, 0, 0), Task(W, 0, 1)]
    expected = (Task(F, 0, 0), Task(F, 0, 1), Task(B, 0, 0), Task(BW, 0, 1), Task(W, 0, 0))
    assert canonical(instance, [given_order]) == (expected,)


# --- rules by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOLVERS)
def test_a_fused_backward_is_taken_where_it_pays(name: str) -> None:
    """One device, t_b + t_w = 4 against t_bw = 3: both micro-batches fuse, 2 * (1 + 3) = 8.

    With t_bw = 5 none does: 2 * (1 + 4) = 10.
    """
    for t_bw, best, fused in ((3.0, 8.0, 2), (5.0, 10.0, 0)):
        instance = make_instance(
            num_devices=1,
            num_microbatches=2,
            stages=[{"device": 0, "t_f": 1.0, "t_b": 2.0, "t_w": 2.0, "t_bw": t_bw}],
        )
        result = SOLVERS[name](instance, "makespan", time_limit=30.0)
        assert result.orders is not None
        assert cost_of(instance, "makespan", result) == best
        assert sum(task.kind is BW for task in result.orders[0]) == fused


@pytest.mark.parametrize("name", SOLVERS)
def test_a_cap_of_a_float_multiple_holds_that_many(name: str) -> None:
    """mem_b = 0.1 and a cap of 3 * 0.1 (0.30000000000000004): three micro-batches fit, as with 3 of 1.

    p = 3, m = 3 without a binding cap: the head of device 2 (2 F) and its 3 * 3 of work, 11.
    """
    for cap in (3 * 0.1, 0.3):
        instance = equal_stages(3, 3, mem_b=0.1, mem_w=0.1, memory_cap=cap)
        result = SOLVERS[name](instance, "makespan", time_limit=30.0)
        assert result.status is Status.OPTIMAL
        assert cost_of(instance, "makespan", result) == 11.0


@pytest.mark.parametrize("name", SOLVERS)
def test_growth_in_b_counts_against_the_cap(name: str) -> None:
    """mem_w = 2 over mem_b = 1, cap 2, one device: the micro-batches run one after the other.

    Under a cap of 1.5 not even one B can start: infeasible.
    """
    fits = equal_stages(1, 2, mem_w=2.0, memory_cap=2.0)
    result = SOLVERS[name](fits, "makespan", time_limit=30.0)
    assert result.orders is not None
    assert [str(task) for task in result.orders[0]] == ["F0.0", "B0.0", "W0.0", "F0.1", "B0.1", "W0.1"]
    refused = SOLVERS[name](fits.with_changes(memory_cap=1.5), "makespan", time_limit=30.0)
    assert (refused.status, refused.orders) == (Status.INFEASIBLE, None)


# --- limits and honesty ------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("limit", [0.01, 0.3])
def test_a_limit_keeps_the_warm_start_and_is_kept(name: str, limit: float) -> None:
    """p = 4, m = 12, cap 3: a limit far too short leaves at least the warm start, never "infeasible"."""
    instance = equal_stages(4, 12, 1.0, 1.5, 0.7, memory_cap=3.0)
    warm = simulate(instance, serial_orders(instance))
    began = time.monotonic()
    result = SOLVERS[name](instance, "makespan", time_limit=limit, hint=warm)
    assert time.monotonic() - began < limit + 3.0
    assert result.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert cost_of(instance, "makespan", result) <= warm.makespan
    if result.bound is not None:
        assert result.bound <= cost_of(instance, "makespan", result)


@pytest.mark.parametrize("name", SOLVERS)
def test_a_limit_without_a_warm_start_is_unknown_or_better(name: str) -> None:
    """Without a warm start a limit of 0.01 s may leave nothing: then "unknown", never "infeasible"."""
    result = SOLVERS[name](equal_stages(4, 12, memory_cap=2.0), "makespan", time_limit=0.01)
    assert result.status is not Status.INFEASIBLE
    assert (result.orders is None) == (result.status is Status.UNKNOWN)


def test_cbc_at_its_limit_claims_nothing() -> None:
    """What CBC prints at a limit is no optimum and no infeasibility; its bound is kept, rounded down."""
    stopped = "Version: 2.10.3\nCbc0020I Exiting on maximum time\nResult - Stopped on time limit\n"
    native = milp._read_cbc_log(
        stopped + "\nObjective value:                58.80000000\nLower bound:                    10.000\n",
        in_time=False,
    )
    assert (native.infeasible, native.has_values) == (False, True)
    assert native.bound == pytest.approx(9.999)
    late = milp._read_cbc_log("Result - Problem proven infeasible\n", in_time=False)
    assert not late.infeasible
    optimal = milp._read_cbc_log(
        "Result - Optimal solution found\n\nObjective value:  58.8\nLower bound:  10.000\n", in_time=False
    )
    assert optimal.bound == pytest.approx(9.999)
    assert milp._read_cbc_log("Result - Problem proven infeasible\n", in_time=True).infeasible


def test_a_missing_or_unusable_cbc_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file, and a file that may not be executed: one line that names the binary and the way out."""
    plain = tmp_path / "cbc"
    plain.write_text("not a program")
    for path in (tmp_path / "absent", plain):
        monkeypatch.setattr("pulp.PULP_CBC_CMD.pulp_cbc_path", str(path))
        with pytest.raises(EnvironmentFailedError) as caught:
            SOLVERS["milp-cbc"](equal_stages(2, 2), "makespan", time_limit=5.0)
        message = str(caught.value)
        assert str(path) in message
        assert "choose cpsat" in message
        assert "\n" not in message


def test_improvements_are_reported_with_valid_bounds() -> None:
    """Each reported order is valid, the bound never above the optimum of 27 (p = 4, m = 8, cap 4)."""
    instance = equal_stages(4, 8, memory_cap=4.0)
    heard: list[tuple[float, float]] = []

    def note(orders: tuple[tuple[Task, ...], ...], bound: float) -> None:
        schedule = simulate(instance, orders)
        assert check(instance, schedule) == []
        heard.append((schedule.makespan, bound))

    result = solve_cpsat(instance, "makespan", time_limit=30.0, on_improvement=note)
    assert heard
    assert all(bound <= 27.0 <= cost for cost, bound in heard)
    assert (result.status, result.bound) == (Status.OPTIMAL, 27.0)


def test_deterministic_mode_repeats_itself() -> None:
    """Two deterministic runs that end at their limit give the same orders and bound."""
    instance = equal_stages(4, 8, 1.0, 1.5, 0.7, memory_cap=3.0)
    warm = simulate(instance, serial_orders(instance))
    first, second = (
        solve_cpsat(instance, "makespan", time_limit=0.2, hint=warm, seed=3, deterministic=True)
        for _ in range(2)
    )
    assert first.orders == second.orders
    assert first.bound == second.bound


def test_a_large_model_keeps_its_limit() -> None:
    """3,072 tasks of unequal stages: CP-SAT ends about at its limit of 2 s and keeps the warm start."""
    stages = [
        {"device": d, "t_f": 10.0 + d % 5, "t_b": 12.0 + d % 3, "t_w": 8.0 + d % 7, "mem_w": 0.75}
        for d in range(16)
    ]
    instance = make_instance(num_devices=16, num_microbatches=64, stages=stages, t_comm=0.5, memory_cap=12.0)
    warm = simulate(instance, serial_orders(instance))
    began = time.monotonic()
    result = solve_cpsat(instance, "span", time_limit=2.0, hint=warm, lower_bound=1000.0)
    assert time.monotonic() - began < 8.0
    assert result.bound is not None
    assert result.bound >= 1000.0  # what was proven before it is never lost
    assert cost_of(instance, "span", result) <= warm.span


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_an_interrupt_leaves_no_search_behind() -> None:
    """Ctrl-C in the midst of CP-SAT: the exception comes when its threads have ended."""
    stages = [{"device": d, "t_f": 10.0 + 3.7 * (d % 3), "t_b": 11.0 + d % 4, "t_w": 7.0} for d in range(8)]
    hard = equal_stages(8, 24).with_changes(stages=stages, t_comm=0.7).with_memory_cap("0.6p")
    before = set(os.listdir("/proc/self/task"))
    searching = threading.Event()

    def interrupt_once_searching() -> None:
        assert searching.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt_once_searching)
    interrupter.start()
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # as it is under nohup
    try:
        with pytest.raises(KeyboardInterrupt):
            solve_cpsat(hard, "makespan", time_limit=60, on_improvement=lambda *_: searching.set())
    finally:
        signal.signal(signal.SIGINT, ignored)
    interrupter.join()
    ended = time.monotonic()
    while set(os.listdir("/proc/self/task")) - before:
        assert time.monotonic() - ended < 1  # Python's own may still be closing
        time.sleep(0.05)
