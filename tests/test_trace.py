"""Predicted against measured: slow ops, waits in receives and bubbles told apart; recalibration."""

from __future__ import annotations

from pathlib import Path

import pytest

from zbsolve.errors import InputError
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance, equal_stages
from zbsolve.model.kinds import B, F, W
from zbsolve.model.simulator import simulate
from zbsolve.plan.certificate import Proof, SolverInfo
from zbsolve.plan.make import make_plan
from zbsolve.plan.plan import Plan
from zbsolve.trace.compare import compare, recalibrate
from zbsolve.trace.trace import Event, Step, Trace, load_trace, step_makespan

# p=2, m=1: F0 [0,1], F1 [1,2], B1 [2,3], W1 [3,4], B0 [3,4], W0 [4,5]: makespan 5.
ORDERS = [[Task(k, d, 0) for k in (F, B, W)] for d in range(2)]


def build(instance: Instance) -> Plan:
    """A plan with the orders above."""
    return make_plan(
        instance,
        simulate(instance, ORDERS),
        objective="makespan",
        lower_bound=0.0,
        proof=Proof(method="none", statement="hand-written"),
        solver=SolverInfo(name="hand", version="1"),
    )


def trace_of(plan: Plan, times: dict[str, tuple[float, float, float]], steps: int = 1) -> Trace:
    """A trace from (start, end, wait) per op name such as ``F0``."""
    events = tuple(
        Event(
            device=int(name[-1]),
            op=name[:-1],  # type: ignore[arg-type]
            stage=int(name[-1]),
            microbatch=0,
            start=start,
            end=end,
            wait=wait,
        )
        for name, (start, end, wait) in times.items()
    )
    return Trace(
        plan_digest=plan.digest(),
        mode="real",
        hardware="a test",
        backend="gloo",
        model="none",
        time_unit="ms",
        memory_unit="MiB",
        split=("deferred", "deferred"),
        steps=(Step(events=events, makespan=step_makespan(events), loss=1.5),) * steps,
    )


AS_PLANNED = {
    "F0": (0.0, 1.0, 0.0),
    "B0": (3.0, 4.0, 2.0),
    "W0": (4.0, 5.0, 0.0),
    "F1": (1.0, 2.0, 1.0),
    "B1": (2.0, 3.0, 0.0),
    "W1": (3.0, 4.0, 0.0),
}


def test_run_as_planned() -> None:
    """A run to the letter has ratio 1, no slow op, no excess wait, and the plan's own bubbles."""
    plan = build(equal_stages(2, 1))
    result = compare(plan, trace_of(plan, AS_PLANNED, steps=3))
    assert (result.predicted_makespan, result.measured_makespan, result.ratio) == (5.0, 5.0, 1.0)
    assert result.steps == 3
    assert all(row.ratio == 1.0 for row in result.ops)
    first, second = result.devices
    assert (first.busy, first.bubble, first.wait, first.slow, first.excess_wait) == (3.0, 2.0, 2.0, 0.0, 0.0)
    # Device 1: waits 1 for its first input, idles 1 after its last op.
    assert (second.bubble, second.wait, second.excess_wait) == (2.0, 1.0, 0.0)


def test_late_message_grows_only_the_wait() -> None:
    """A link 20 late shows as 20 in the receive-wait column and nowhere else on that device."""
    plan = build(equal_stages(2, 1))
    late = {
        name: (start + 20, end + 20, wait) if name != "F0" else (start, end, wait)
        for name, (start, end, wait) in AS_PLANNED.items()
    }
    late["F1"] = (21.0, 22.0, 21.0)
    late["B0"] = (23.0, 24.0, 22.0)
    result = compare(plan, trace_of(plan, late))
    assert result.measured_makespan == 25.0
    assert [d.slow for d in result.devices] == [0.0, 0.0]
    assert [d.excess_wait for d in result.devices] == [20.0, 20.0]
    # A boundary has one figure for both directions: F1 came 20 after F0 ended, B0 at once; median 10.
    assert result.hops == (10.0,)


def test_slow_op_is_named() -> None:
    """W1 three times as long is the worst op, and its device is 2 slow without any wait."""
    plan = build(equal_stages(2, 1))
    result = compare(plan, trace_of(plan, {**AS_PLANNED, "W1": (3.0, 6.0, 0.0)}))
    assert result.worst.where == "W of stage 1 on device 1"
    assert result.worst.ratio == 3.0
    assert result.devices[1].slow == 2.0
    assert result.devices[1].excess_wait == 0.0


def test_recalibrated_orders_predict_the_run() -> None:
    """Times taken from a trace re-time the same orders to the measured makespan."""
    plan = build(equal_stages(2, 1, t_comm=0.0))
    # F0 takes 2, its message 0.5, F1 1, B1 2, hop 0.5, B0 1, W0 1: 2 + .5 + 1 + 2 + .5 + 1 + 1 = 8.
    times = {
        "F0": (0.0, 2.0, 0.0),
        "F1": (2.5, 3.5, 2.5),
        "B1": (3.5, 5.5, 0.0),
        "W1": (5.5, 6.0, 0.0),
        "B0": (6.0, 7.0, 4.0),
        "W0": (7.0, 8.0, 0.0),
    }
    trace = trace_of(plan, times)
    again = recalibrate(plan.instance, trace)
    assert [stage.t_f for stage in again.stages] == [2.0, 1.0]
    assert [stage.t_b for stage in again.stages] == [1.0, 2.0]
    assert [stage.t_w for stage in again.stages] == [1.0, 0.5]
    assert again.t_comm == (0.5,)
    assert simulate(again, ORDERS).makespan == trace.makespan == 8.0


def test_hop_is_kept_where_nobody_waited() -> None:
    """An input that lay ready says nothing about the hop: the instance's value stays."""
    plan = build(equal_stages(2, 1, t_comm=0.25))
    ready = {name: (start, end, 0.0) for name, (start, end, _) in AS_PLANNED.items()}
    ready["F1"] = (1.5, 2.0, 0.0)
    ready["B0"] = (3.5, 4.0, 0.0)
    assert recalibrate(plan.instance, trace_of(plan, ready)).t_comm == (0.25,)


def test_file_round_trip_and_refusals(tmp_path: Path) -> None:
    """A saved trace loads equal; another plan's trace, and an unknown field, are refused by name."""
    plan = build(equal_stages(2, 1))
    trace = trace_of(plan, AS_PLANNED)
    path = tmp_path / "trace.json"
    trace.save(path)
    assert load_trace(path) == trace
    assert trace.losses == (1.5,)
    other = build(equal_stages(2, 1, t_w=2.0))
    with pytest.raises(InputError, match="another plan"):
        compare(other, trace)
    path.write_text(path.read_text().replace('"backend"', '"back"'))
    with pytest.raises(InputError, match=r"trace\.json: back: unknown field|backend: missing"):
        load_trace(path)


def test_missing_op_is_named() -> None:
    """A trace without one of the plan's ops cannot be compared, and says which is missing."""
    plan = build(equal_stages(2, 1))
    partial = {name: times for name, times in AS_PLANNED.items() if name != "W1"}
    with pytest.raises(InputError, match=r"step 0 .* W1\.0"):
        compare(plan, trace_of(plan, partial))
