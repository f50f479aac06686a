"""One tolerance policy: no unit changes an answer, and what fits for one piece fits for all."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.extended_strategies import extended_instances
from tests.strategies import small_instances
from zbsolve.bounds.catalogue import all_bounds
from zbsolve.cli import app
from zbsolve.errors import InfeasibleError
from zbsolve.model.instance import Instance, equal_stages, make_instance
from zbsolve.model.judge import check
from zbsolve.model.kinds import F
from zbsolve.model.memory import peak_memory
from zbsolve.model.options import is_extended
from zbsolve.model.schedule import Schedule, TimedTask
from zbsolve.model.serial import serial_orders, serial_program
from zbsolve.model.simulator import simulate
from zbsolve.model.tolerances import MEMORY_RTOL
from zbsolve.plan.check import check_plan
from zbsolve.plan.plan import Plan, load_plan
from zbsolve.solver.portfolio import solve
from zbsolve.solver.verify import reverify

FEW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
TIMES = ("t_f", "t_b", "t_w", "t_bw", "t_r", "t_fb")
MEMORY = ("mem_b", "mem_w", "mem_r", "peak_f", "peak_b", "peak_w", "peak_bw")
POWERS_OF_TWO = [2.0**-40, 2.0**-7, 2.0**40]
POWERS_OF_TEN = [1e-12, 1e-10, 1e-3, 1e6, 1e12]


def scaled(instance: Instance, time: float, memory: float) -> Instance:
    """The same instance in other units."""

    def times(value: Any, factor: float) -> Any:
        if value is None:
            return None
        return tuple(v * factor for v in value) if isinstance(value, tuple) else value * factor

    stages = [
        stage.model_copy(
            update={name: times(getattr(stage, name), time) for name in TIMES}
            | {name: times(getattr(stage, name), memory) for name in MEMORY}
        )
        for stage in instance.stages
    ]
    return instance.with_changes(
        stages=stages,
        t_comm=times(instance.t_comm, time),
        t_transfer=times(instance.t_transfer, time),
        memory_cap=times(instance.memory_cap, memory),
        static_mem=times(instance.static_mem, memory),
    )


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    """Of every kind: placements, caps, growth, transients, fused, recomputation, pairs, replicas, links."""
    if draw(st.booleans()):
        return draw(small_instances(max_passes=6))
    instance = draw(extended_instances())
    if instance.recomputes:
        instance = instance.with_recomputation()
    if draw(st.booleans()):
        more = st.sampled_from([-0.5, 0.0, 0.5, 2.0])
        caps = [max(0.0, serial_program(instance, d)[0] + draw(more)) for d in range(instance.num_devices)]
        instance = instance.with_changes(memory_cap=caps)
    return instance


@st.composite
def irregular_instances(draw: st.DrawFn) -> Instance:
    """The same with amounts of memory whose sums round: their last digits depend on the order."""
    instance = draw(instances())
    random, unit = draw(st.randoms(use_true_random=False)), draw(st.sampled_from([1e-12, 1.0, 1e12]))

    def amount(value: float | None) -> float | None:
        return None if value is None else value * unit * random.uniform(0.8, 1.2)

    stages = []
    for stage in instance.stages:
        changes = {name: amount(getattr(stage, name)) for name in MEMORY}
        changes["mem_r"] = min(changes["mem_r"] or 0.0, changes["mem_b"] or 0.0)
        stages.append(stage.model_copy(update=changes))
    static = [amount(instance.static(d)) for d in range(instance.num_devices)]
    return instance.with_changes(stages=stages, static_mem=static, memory_cap=None)


def answer(instance: Instance, solver: str, objective: Any) -> Plan | None:
    try:
        found = solve(instance, objective=objective, solver=solver, time_limit=0.5, deterministic=True)
    except InfeasibleError:
        return None
    return found.plan


@FEW
@given(instances(), st.sampled_from(POWERS_OF_TWO), st.sampled_from(POWERS_OF_TWO), st.data())
def test_units_change_nothing_but_the_unit(
    instance: Instance, time: float, memory: float, data: st.DataObject
) -> None:
    """Powers of two are exact in float64: the same orders, status, proof; costs, bounds and peaks scaled."""
    objective = data.draw(st.sampled_from(["makespan", "span"]))
    solver = data.draw(st.sampled_from(["heuristic"] if is_extended(instance) else ["heuristic", "cpsat"]))
    other = scaled(instance, time, memory)
    ours, theirs = (answer(each, solver, objective) for each in (instance, other))
    assert (ours is None) == (theirs is None)
    if ours is None or theirs is None:
        return
    assert check_plan(ours) == check_plan(theirs) == []
    assert ours.schedule().orders == theirs.schedule().orders
    assert (ours.status, ours.gap, ours.bound_proof.method) == (
        theirs.status,
        theirs.gap,
        theirs.bound_proof.method,
    )
    assert (ours.cost * time, ours.lower_bound * time) == (theirs.cost, theirs.lower_bound)
    assert [peak * memory for peak in ours.peak_memory] == list(theirs.peak_memory)


@FEW
@given(instances(), st.sampled_from(POWERS_OF_TEN), st.sampled_from(POWERS_OF_TEN))
def test_decimal_units_change_no_bound_and_no_optimum(instance: Instance, time: float, memory: float) -> None:
    """Powers of ten round: figures agree to 1e-9, the exact model's optimum and its proof, too."""
    other = scaled(instance, time, memory)
    for objective in ("makespan", "span"):
        try:
            ours = [bound.value * time for bound in all_bounds(instance, objective)]
        except InfeasibleError:
            continue
        theirs = [bound.value for bound in all_bounds(other, objective)]
        assert theirs == pytest.approx(ours, rel=1e-9, abs=1e-9 * max(ours))
    if is_extended(instance):
        return
    plans = [answer(each, "cpsat", "makespan") for each in (instance, other)]
    assert (plans[0] is None) == (plans[1] is None)
    if plans[0] is not None and plans[1] is not None and plans[0].status == "optimal":
        assert plans[1].status == "optimal"
        assert plans[1].cost == pytest.approx(plans[0].cost * time, rel=1e-9)


@st.composite
def near(draw: st.DrawFn, exact: float) -> float:
    """A cap within a few ulps of the amount, or of where the tolerance ends, or up to 2e-9 of it beside."""
    shares = st.sampled_from([0.0, -MEMORY_RTOL, MEMORY_RTOL]) | st.floats(-2e-9, 2e-9)
    cap = exact / (1 + draw(shares))
    for _ in range(draw(st.integers(0, 3))):
        cap = math.nextafter(cap, math.inf if draw(st.booleans()) else 0.0)
    return cap


@FEW
@given(irregular_instances(), st.data())
def test_what_fits_for_one_fits_for_all(free: Instance, data: st.DataObject) -> None:
    """Caps at the very edge of what some programs need: a plan that the judge accepts, or infeasible.

    Infeasible exactly where the programs that need least do not fit, whatever solver is asked.
    """
    solvers = ["heuristic"] if is_extended(free) else ["heuristic", "cpsat", "milp-highs", "milp-cbc"]
    least = [serial_program(free, d)[0] for d in range(free.num_devices)]
    easy = answer(free, "heuristic", "makespan")
    assert easy is not None
    wanted = [list(easy.peak_memory), least][data.draw(st.integers(0, 1))]
    capped = free.with_changes(memory_cap=[data.draw(near(each)) for each in wanted])
    fits = all(capped.fits(d, need) for d, need in enumerate(least))
    plan = answer(
        capped, data.draw(st.sampled_from(solvers)), data.draw(st.sampled_from(["makespan", "span"]))
    )
    assert (plan is not None) == fits
    if plan is not None:
        assert check_plan(plan) == []
        assert all(capped.fits(d, peak) for d, peak in enumerate(plan.peak_memory))


@FEW
@given(irregular_instances(), st.integers(1, 9), st.data())
def test_judge_and_planner_add_up_alike(free: Instance, m: int, data: st.DataObject) -> None:
    """Programs under caps at the edge of their peaks: the judge refuses exactly what the planner does."""
    free = free.with_changes(num_microbatches=m)
    serial = serial_orders(free)
    # All F's first hold the most; one micro-batch after the other gives back and takes the same again.
    forwards_first = tuple(tuple(sorted(order, key=lambda task: task.kind != F)) for order in serial)
    orders = data.draw(st.sampled_from([serial, forwards_first]))
    peaks = [peak_memory(free, d, order) for d, order in enumerate(orders)]
    capped = free.with_changes(memory_cap=[data.draw(near(peak)) for peak in peaks])
    schedule = simulate(capped, orders)
    refused = {v.message.split(":")[0] for v in check(capped, schedule) if v.rule == "memory"}
    assert refused == {f"device {d}" for d, peak in enumerate(peaks) if not capped.fits(d, peak)}


def test_a_small_cap_binds() -> None:
    """Cap 1e-10 for micro-batches of 1e-10: one at a time on each device, 4 times 1 + 1 + 1 + 1 + 1 = 20."""
    instance = equal_stages(2, 4, mem_b=1e-10, mem_w=1e-10, memory_cap=1e-10)
    for solver in ("heuristic", "cpsat", "milp"):
        plan = solve(instance, solver=solver, time_limit=10.0).plan
        assert (plan.cost, plan.status, plan.peak_memory) == (20.0, "optimal", (1e-10, 1e-10)), solver


def test_a_cap_at_the_edge_of_the_tolerance() -> None:
    """A need of 2.1634793116314774 under a cap of 1e-9 less: to the last digit within the tolerance."""
    stage = {"device": 0, "t_f": 4.0, "t_b": 1.0, "t_w": 1.0, "mem_b": 0.2139787841000193}
    stage |= {"mem_w": 0.2139787841000193, "peak_f": 0.8274513967743451}
    stage |= {"peak_b": 1.9495005275315576, "peak_w": 1.5279689435769808}
    instance = make_instance(
        num_devices=1, num_microbatches=1, stages=[stage], memory_cap=[2.1634793094680975]
    )
    plan = solve(instance, time_limit=5.0).plan
    assert (plan.cost, check_plan(plan)) == (6.0, [])


def test_a_cap_of_nothing() -> None:
    """Cap 0: fine where nothing is held, infeasible where anything is, however little."""
    nothing = equal_stages(2, 3, mem_b=0.0, mem_w=0.0, memory_cap=0.0)
    for solver in ("heuristic", "cpsat", "milp", "auto"):
        assert check_plan(solve(nothing, solver=solver, time_limit=2.0).plan) == []
        with pytest.raises(InfeasibleError, match="device"):
            solve(equal_stages(2, 3, mem_b=1e-300, mem_w=0.0, memory_cap=0.0), solver=solver)


def test_static_memory_leaves_a_sliver() -> None:
    """Static 1e6 and a cap 3 above it: three micro-batches of 1, not four, whatever the rounding of 1e6."""
    plan = solve(
        equal_stages(1, 8, mem_b=1.0, mem_w=0.0, memory_cap=1e6 + 3.0).with_changes(static_mem=[1e6]),
        time_limit=2.0,
    ).plan
    assert max(plan.peak_memory) <= 1e6 + 3.0


# --- what check refuses --------------------------------------------------------------------------


def forged(plan: Plan, change: float) -> Plan:
    """The plan with all times of its schedule drawn together to a share of them, its figures to match."""
    schedule = Schedule(
        tuple(
            tuple(TimedTask(t.task, t.start * change, t.start * change + t.end - t.start) for t in device)
            for device in plan.schedule().devices
        )
    )
    programs = tuple(
        program.model_copy(
            update={
                "actions": tuple(
                    a.model_copy(
                        update={"start": a.start * change, "end": a.start * change + a.end - a.start}
                    )
                    for a in program.actions
                )
            }
        )
        for program in plan.programs
    )
    return plan.model_copy(
        update={
            "programs": programs,
            "makespan": schedule.makespan,
            "span": schedule.span,
            "lower_bound": schedule.cost(plan.objective),
            "gap": 0.0,
            "status": "optimal",
        }
    )


@pytest.mark.parametrize("unit", [1e-10, 2.0**-60, 1.0, 1e10])
@pytest.mark.parametrize("share", [0.25, 0.9, 1 - 1e-6])
def test_a_forged_plan_is_invalid_in_every_unit(unit: float, share: float) -> None:
    """Times drawn together, bound and figures to match: overlaps are seen at 1e-10 as at 1."""
    plan = solve(scaled(equal_stages(2, 4, memory_cap=2.0), unit, unit), time_limit=2.0).plan
    assert check_plan(plan) == []
    assert reverify(plan).violation is None
    assert check_plan(forged(plan, share)) != []


@pytest.mark.parametrize("unit", [1e-10, 1.0])
def test_a_plan_below_the_derived_bound_is_invalid(unit: float) -> None:
    """A chain of 600 tasks, each 0.99e-9 of the makespan early: each time passes, the sum does not."""
    plan = solve(scaled(equal_stages(1, 200), unit, 1.0), time_limit=1.0).plan
    early = 0.99e-9 * plan.makespan
    moved = tuple(
        a.model_copy(update={"start": a.start - n * early, "end": a.end - n * early})
        for n, a in enumerate(plan.programs[0].actions)
    )
    cost = moved[-1].end - moved[0].start
    changes = {"makespan": cost, "span": cost, "lower_bound": cost}
    cheap = plan.model_copy(update={"programs": (plan.programs[0].model_copy(update={"actions": moved}),)})
    cheap = cheap.model_copy(update=changes)
    assert check(cheap.instance, cheap.schedule()) == []
    assert ["the least that these orders take" in v.message for v in check_plan(cheap)] == [True]
    violation = reverify(cheap).violation
    assert violation is not None
    assert "which no schedule of this instance is below" in violation.message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gap": -1e-9}, "gap is stated as -1e-09"),
        ({"gap": 1e-5}, "gap is stated as 1e-05"),
        ({"lower_bound": 13e-10}, "is above the plan's own cost"),
        ({"lower_bound": 6e-10, "gap": 0.5}, "status is optimal but the gap is 50%"),
        ({"makespan": 6e-10}, "makespan is stated as 6e-10, the programs give 1.2e-09"),
        ({"peak_memory": (1e-10, 0.0)}, "peak_memory[1] is stated as 0, the programs give 1e-10"),
    ],
)
def test_small_figures_are_compared_as_large_ones(change: dict[str, Any], says: str) -> None:
    """Two devices, two micro-batches one at a time: 2 times 6 units of 1e-10."""
    stages = [{"device": d, "t_f": 1e-10, "t_b": 1e-10, "t_w": 1e-10, "mem_b": 1e-10} for d in range(2)]
    instance = make_instance(
        num_devices=2,
        num_microbatches=2,
        stages=[{**stage, "mem_w": 1e-10} for stage in stages],
        t_comm=0.5e-10,
        memory_cap=1e-10,
    )
    plan = solve(instance, time_limit=5.0).plan
    assert (plan.status, check_plan(plan)) == ("optimal", [])
    assert plan.makespan == pytest.approx(1.2e-9)
    messages = [v.message for v in check_plan(plan.model_copy(update=change))]
    assert any(says in message for message in messages), messages


def test_the_command_line_shows_and_judges_small_figures(tmp_path: Path) -> None:
    """20 steps of 1e-10 under a cap of 1e-10, shown with their digits; a forged file is refused."""
    instance = tmp_path / "i.json"
    one = equal_stages(2, 4, 1e-10, 1e-10, 1e-10, mem_b=1e-10, mem_w=1e-10, memory_cap=1e-10)
    instance.write_text(json.dumps(one.to_json_dict()))
    plan = tmp_path / "p.json"
    runner = CliRunner()
    shown = runner.invoke(app, ["solve", str(instance), "--time-limit", "5", "-o", str(plan)])
    assert shown.exit_code == 0
    assert "2e-09 ms" in shown.output
    assert shown.output.count("1e-10") >= 4  # peak and cap of both devices
    assert runner.invoke(app, ["check", str(plan)]).exit_code == 0
    forged(load_plan(plan), 0.65).save(plan)
    refused = runner.invoke(app, ["check", str(plan)])
    assert refused.exit_code == 1
    assert "one at a time" in refused.output + refused.stderr


def test_a_pair_may_take_the_rounded_sum() -> None:
    """0.1 + 0.7 is 0.7999999999999999 in float64: t_fb of 0.8 saves nothing, and is no error."""
    stage = {"device": 0, "t_f": 0.1, "t_b": 0.4, "t_w": 0.3, "t_bw": 0.7, "t_fb": 0.8}
    instance = make_instance(num_devices=1, num_microbatches=1, stages=[stage])
    assert instance.stages[0].pair_saving == 0.0


def test_a_solvers_bound_says_what_it_is() -> None:
    """Stopped early it is the bound of its search; only where the plan meets it is "optimal" said."""
    times = (10.0, 7.0, 12.0), (18.0, 5.0, 1.0), (18.0, 11.0, 18.0), (10.0, 9.0, 16.0)
    stages = [{"device": d, "t_f": f, "t_b": b, "t_w": w, "mem_w": 0.5} for d, (f, b, w) in enumerate(times)]

    def proof(m: int, cap: float, seconds: float) -> tuple[str, str, str]:
        instance = make_instance(num_devices=4, num_microbatches=m, stages=stages, memory_cap=cap)
        plan = solve(instance, solver="cpsat", time_limit=seconds, deterministic=True).plan
        least, rest = plan.bound_proof.statement.split(": ")
        assert least == f"no schedule costs less than {plan.lower_bound:.9g} ms"
        return plan.status, plan.bound_proof.method, rest

    status, method, rest = proof(8, 2.0, 1.0)
    assert (status, method) == ("optimal", "cpsat model")
    assert rest.endswith("proved it optimal on the exact model")
    status, method, rest = proof(10, 2.5, 0.1)
    assert (status, method) == ("feasible", "cpsat model")
    assert rest.endswith("had when its search ended")
