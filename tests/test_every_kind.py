"""Every report over every kind of task: what each shows equals the plan's own figures, computed another way.

Programs hold F, R, B, W, BW, F&B pairs, several replicas, zero lengths and contended links. Times come from a
fixpoint over the definitions, memory from the judge's intervals, busy time from unions of intervals.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.extended_strategies import earliest_ends, inputs, programs
from tests.test_report import rendered
from zbsolve.baselines import BASELINES
from zbsolve.baselines.comparison import make_row
from zbsolve.model.bubble import bubble_rate, busy_times
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance, equal_stages
from zbsolve.model.judge import _memory_by_definition
from zbsolve.model.kinds import BW, B, F, R, W
from zbsolve.model.schedule import Schedule
from zbsolve.model.simulator import _propagate, simulate
from zbsolve.plan.certificate import Proof, SolverInfo
from zbsolve.plan.make import make_plan
from zbsolve.plan.plan import Plan
from zbsolve.report.chrome_trace import MEASURED, PREDICTED, chrome_trace
from zbsolve.report.curves import save_memory_figure
from zbsolve.report.explain import explain
from zbsolve.report.figures import _measured_lane, save_plan_figure, save_trace_figure
from zbsolve.report.gantt_text import gantt
from zbsolve.report.run_text import prediction_table
from zbsolve.report.text import memory_table
from zbsolve.report.timeline import drawn, instance_of_trace, measured_schedule, memory_boxes, memory_corners
from zbsolve.report.viewer_data import KINDS, measured_lane, plan_lane
from zbsolve.trace.compare import compare, measured_hops, recalibrate
from zbsolve.trace.trace import Event, Step, Trace


def planned(instance: Instance, schedule: Schedule) -> Plan:
    """A plan that proves nothing."""
    return make_plan(
        instance,
        schedule,
        objective="makespan",
        lower_bound=0.0,
        proof=Proof(method="none", statement="by hand"),
        solver=SolverInfo(name="hand", version="1"),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A random plan of every kind of task."""
    instance, orders, pairs = draw(programs())
    return planned(instance, simulate(instance, orders, pairs))


def paired_plan() -> Plan:
    """DualPipeV on two devices, with transients that only a pair holds together."""
    v = equal_stages(2, 4, placement="v")
    stages = [
        s.model_copy(update={"t_bw": 2.0, "t_fb": 2.0, "peak_f": 1.0, "peak_bw": 2.0}) for s in v.stages
    ]
    return planned(*BASELINES["dualpipe-v"].schedule(v.with_changes(stages=stages)))


def replicated_plan() -> Plan:
    """DualPipe on two devices with hops, contended links and stages that differ."""
    stages = [
        {"device": d, "t_f": 1.0 + d, "t_b": 1.0, "t_w": 1.0, "t_bw": 2.0, "t_fb": 2.5 + d} for d in range(2)
    ]
    instance = equal_stages(2, 8).with_changes(stages=stages, t_comm=0.25, t_transfer=0.5)
    return planned(*BASELINES["dualpipe"].schedule(instance))


def every_kind(test: Callable[[Plan], None]) -> Callable[[], None]:
    """The test over random plans, and always over two with many pairs, which random ones have few of."""
    always = example(paired_plan())(example(replicated_plan())(test))
    found: Callable[[], None] = given(plans())(always)
    return found


def as_planned(plan: Plan, steps: int = 1) -> Trace:
    """A run to the letter: ops that need another device's result wait for it as long as theirs is idle."""
    schedule = plan.schedule()
    present = {timed.task for timed in schedule}
    begin = min((timed.start for timed in schedule), default=0.0)
    events = []
    for device, program in enumerate(schedule.devices):
        free = begin
        for task, start, end in program:
            sources = inputs(plan.instance, task, present)
            receives = any(plan.instance.stages[source.stage].device != device for source in sources)
            wait = max(0.0, start - free) if receives else 0.0
            op: Any = task.kind.value
            place = {"device": device, "stage": task.stage, "microbatch": task.microbatch}
            events.append(Event(op=op, start=start, end=end, wait=wait, **place))
            free = max(free, end)
    return Trace(
        plan_digest=plan.digest(),
        mode="real",
        hardware="a test",
        backend="gloo",
        model="none",
        time_unit=plan.instance.time_unit,
        memory_unit=plan.instance.memory_unit,
        split=("deferred",) * plan.instance.num_stages,
        steps=(Step(events=tuple(events), makespan=plan.makespan),) * steps,
    )


def covered(intervals: list[tuple[float, float]]) -> float:
    """Length of a union: between neighbouring ends, whether any interval lies there."""
    points = sorted({point for interval in intervals for point in interval})
    return sum(b - a for a, b in pairwise(points) if any(x <= a and b <= y for x, y in intervals))


def busy_by_definition(schedule: Schedule) -> list[float]:
    """Busy time of each device."""
    return [covered([(start, end) for _, start, end in program]) for program in schedule.devices]


def memory_by_definition(plan: Plan, device: int) -> dict[Task, float]:
    """Memory while each task of a device runs, by the judge's intervals."""
    schedule = plan.schedule()
    program = schedule.devices[device]
    levels = _memory_by_definition(plan.instance, device, program, schedule.pairs)
    found = {timed.task: level for timed, level in zip(program, levels, strict=True)}
    for pair in schedule.pairs:
        if pair[0] in found:
            found.update(dict.fromkeys(pair, max(found[task] for task in pair)))
    return found


def peak_by_definition(plan: Plan, device: int) -> float:
    """Highest memory of a device."""
    return max(memory_by_definition(plan, device).values(), default=plan.instance.static(device))


@every_kind
def test_memory_curves(plan: Plan) -> None:
    """Stated peak, boxes and corners are the judge's levels, and no curve runs back in time."""
    schedule = plan.schedule()
    for device in range(plan.instance.num_devices):
        levels = memory_by_definition(plan, device)
        assert plan.peak_memory[device] == pytest.approx(peak_by_definition(plan, device))
        boxes = memory_boxes(plan.instance, schedule, device)
        halves = {second for _, second in schedule.pairs}
        expected = [levels[timed.task] for timed in schedule.devices[device] if timed.task not in halves]
        assert [box.during for box in boxes] == pytest.approx(expected)
        assert all(a.end <= b.start and a.after == b.before for a, b in pairwise(boxes))
        times, heights = memory_corners(plan.instance, schedule, device)
        assert times == sorted(times)
        assert max(heights) == pytest.approx(
            max(peak_by_definition(plan, device), plan.instance.static(device))
        )


@every_kind
def test_page(plan: Plan) -> None:
    """The page's lane: peaks, memory while each task runs, busy and idle time, causes, bubbles."""
    schedule = plan.schedule()
    lane = plan_lane(plan, "plan")
    tasks = list(schedule)
    busy = busy_by_definition(schedule)
    assert lane["memory"]["peak"] == pytest.approx(
        [peak_by_definition(plan, d) for d in range(plan.instance.num_devices)]
    )
    levels: dict[Task, float] = {}
    for device in range(plan.instance.num_devices):
        levels |= memory_by_definition(plan, device)
    assert lane["memory"]["during"] == pytest.approx([levels[timed.task] for timed in tasks])
    for device, row in enumerate(lane["devices"]):
        assert row["busy"] == pytest.approx(busy[device])
        assert sum(row["idle"].values()) == pytest.approx(schedule.makespan - busy[device])
    if schedule.makespan > 0:
        rate = 1 - sum(busy) / (len(busy) * schedule.makespan)
        assert lane["figures"]["bubbleRateMakespan"] == pytest.approx(max(0.0, rate))
    columns = lane["tasks"]
    assert [
        Task(KINDS[k], s, j)
        for k, s, j in zip(columns["kind"], columns["stage"], columns["microbatch"], strict=True)
    ] == [timed.task for timed in tasks]
    run = measured_lane(plan.instance, as_planned(plan))
    assert run["tasks"]["start"] == columns["start"]
    assert run["tasks"]["end"] == columns["end"]


@every_kind
def test_causes_and_bubbles(plan: Plan) -> None:
    """A start is its cause's end plus its wait for a link plus its hop; bubbles fill what no task covers."""
    instance, schedule = plan.instance, plan.schedule()
    found = explain(instance, schedule)
    ends = earliest_ends(instance, schedule.orders, schedule.pairs)
    starts = {timed.task: timed.start for timed in schedule}
    assert {timed.task: timed.end for timed in schedule} == pytest.approx(ends)
    for task, (before, hop, queue) in found.cause.items():
        if before is None:
            assert starts[task] == 0  # all start as early as they can
        else:
            assert starts[task] == pytest.approx(ends[before] + queue + hop)
    busy = busy_by_definition(schedule)
    for device, program in enumerate(schedule.devices):
        bubbles = [(bubble.start, bubble.end) for bubble in found.bubbles if bubble.device == device]
        assert covered(bubbles) == pytest.approx(schedule.makespan - busy[device])
        whole = [*bubbles, *((start, end) for _, start, end in program)]
        assert covered(whole) == pytest.approx(schedule.makespan)


@every_kind
def test_slack(plan: Plan) -> None:
    """Later by its slack leaves the makespan; later by a little more raises it by that much."""
    schedule = plan.schedule()
    slack = explain(plan.instance, schedule).slack
    for task, start, _ in schedule:
        for more in (0.0, 0.25):
            late = _propagate(
                plan.instance, schedule.orders, {task: start + slack[task] + more}, schedule.pairs
            )
            assert max(late.ends.values()) == pytest.approx(plan.makespan + more)


@every_kind
def test_chrome_trace(plan: Plan) -> None:
    """Counts, durations, counters and arrows: an arrow begins and ends in the boxes that it joins."""
    instance, schedule = plan.instance, plan.schedule()
    events = chrome_trace(plan, as_planned(plan))["traceEvents"]
    busy = busy_by_definition(schedule)
    for pid in (PREDICTED, MEASURED):
        boxes = [e for e in events if e["ph"] == "X" and e["pid"] == pid and e["cat"] != "wait"]
        assert sorted(e["name"] for e in boxes) == sorted(str(timed.task) for timed in schedule)
        for device in range(instance.num_devices):
            mine = [e for e in boxes if e["tid"] == device]
            assert sum(e["dur"] for e in mine) == pytest.approx(1000 * busy[device])
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-9 for a, b in pairwise(mine))
    counters: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counters[event["name"]].append(event["args"][instance.memory_unit])
    for device in range(instance.num_devices):
        assert max(counters[f"memory of device {device}"]) == pytest.approx(peak_by_definition(plan, device))
    at = {e["name"]: e for e in events if e["ph"] == "X" and e["pid"] == PREDICTED}
    arrows = [e for e in events if e["ph"] in "sf"]
    present = {timed.task for timed in schedule}
    wanted = sorted(
        (str(source), str(timed.task))
        for timed in schedule
        for source in inputs(instance, timed.task, present)
        if instance.stages[source.stage].device != instance.stages[timed.task.stage].device
    )
    assert len(arrows) == 2 * len(wanted)
    for source, target in wanted:
        middles = [at[name]["ts"] + at[name]["dur"] / 2 for name in (source, target)]
        joined = [(a["ts"], b["ts"]) for a, b in pairwise(arrows) if a["ph"] == "s" and a["id"] == b["id"]]
        assert any(ends == pytest.approx(middles) for ends in joined)


@every_kind
def test_text(plan: Plan) -> None:
    """The Gantt's columns that are not idle are the busy time; the memory table states the plan's peaks."""
    schedule = plan.schedule()
    if schedule.makespan == 0:
        return
    columns = round(schedule.makespan / 0.125)  # all times are multiples of 1/4
    while columns < 20:
        columns *= 2
    lines = gantt(plan.instance, [("plan", schedule)], columns + 4)
    unit = schedule.makespan / columns
    for device, busy in enumerate(busy_by_definition(schedule)):
        row = lines[device].plain.partition("|")[2].removesuffix("|")
        assert len(row) == columns
        idle = re.sub(r"(?<=\d)\.(?=\d)", "_", row).count(".")  # not the dot of F2.3
        assert (columns - idle) * unit == pytest.approx(busy)
    table = rendered(memory_table(plan))
    for device in range(plan.instance.num_devices):
        assert re.search(rf"│ {device} +│ +{peak_by_definition(plan, device):g} ", table)


@every_kind
def test_shared_figures(plan: Plan) -> None:
    """Busy time and bubble rates; boxes as drawn never overlap and cover what the tasks do."""
    schedule = plan.schedule()
    busy = busy_by_definition(schedule)
    assert busy_times(schedule) == pytest.approx(busy)
    shown = drawn(plan.instance, schedule)
    assert busy_by_definition(shown) == pytest.approx(busy)
    assert all(a.end <= b.start + 1e-9 for program in shown.devices for a, b in pairwise(program))
    row = make_row("x", plan.instance, "makespan", plan.instance, schedule, None)
    assert row.peak_memory == pytest.approx(
        max(map(peak_by_definition, [plan] * len(busy), range(len(busy))))
    )
    assert [sum(peak) for peak in row.peaks] == pytest.approx(plan.peak_memory)
    assert row.bubble_rate_span == bubble_rate(schedule, plan.span)


@every_kind
def test_a_run_as_planned_is_measured_as_planned(plan: Plan) -> None:
    """Ratio 1 everywhere, no slow op, no excess wait; every op counted once, a pair as one op."""
    schedule = plan.schedule()
    busy = busy_by_definition(schedule)
    result = compare(plan, as_planned(plan, steps=2))
    assert all(row.predicted == row.fastest == row.slowest for row in result.ops)
    assert sum(row.count for row in result.ops) == 2 * (sum(1 for _ in schedule) - len(schedule.pairs))
    assert sum(row.count for row in result.ops if row.op == "F&B") == 2 * len(schedule.pairs)
    for row, own in zip(result.devices, busy, strict=True):
        assert (row.busy, row.busy_predicted) == pytest.approx((own, own))
        assert (row.bubble, row.bubble_predicted) == pytest.approx((plan.makespan - own,) * 2)
        assert (row.slow, row.excess_wait) == (0, 0)
    table = rendered(prediction_table(result, "ms"))
    assert table.count("1.000") >= len(result.ops)


@every_kind
def test_a_run_as_planned_recalibrates_to_the_plans_own_times(plan: Plan) -> None:
    """Every time, hop and pair that the run shows is the instance's own, and the orders cost the same."""
    instance, schedule, trace = plan.instance, plan.schedule(), as_planned(plan)
    for boundary, hop in enumerate(measured_hops(instance, trace)):
        assert hop is None or hop == pytest.approx(instance.hop(boundary))
    again = recalibrate(instance, trace)
    for stage, own in zip(again.stages, instance.stages, strict=True):
        for name in ("t_f", "t_r", "t_b", "t_w", "t_bw"):
            assert getattr(stage, name) == getattr(own, name)
        if stage.t_fb is not None:
            assert type(stage).model_validate(stage.model_dump()) == stage  # its rules hold
    retimed = simulate(again, schedule.orders, schedule.pairs)
    assert retimed.makespan == pytest.approx(plan.makespan)
    assert retimed.pairs == schedule.pairs

    # Without any times of its own, too, where the trace shows every kind and hop.
    bare = instance.with_changes(
        stages=[
            stage.model_copy(
                update={"t_f": 9.0, "t_b": 9.0, "t_w": 9.0, "t_r": None if stage.t_r is None else 9.0}
                | ({} if stage.t_fb is None else {"t_bw": 9.0, "t_fb": 9.0})
            )
            for stage in instance.stages
        ]
    )
    from_trace = recalibrate(bare, trace)
    alone = {timed.task for timed in schedule} - {task for pair in schedule.pairs for task in pair}
    for kind, name in ((F, "t_f"), (R, "t_r"), (B, "t_b"), (W, "t_w"), (BW, "t_bw")):
        for s in {task.stage for task in alone if task.kind is kind}:
            assert getattr(from_trace.stages[s], name) == getattr(instance.stages[s], name)


@every_kind
def test_a_trace_alone_is_drawn_as_it_ran(plan: Plan) -> None:
    """Without its plan a run keeps its busy times and its recomputations."""
    trace = as_planned(plan)
    instance = instance_of_trace(trace)
    shown = drawn(instance, measured_schedule(instance, trace.median_step))
    assert busy_by_definition(shown) == pytest.approx(
        [
            b
            for b, program in zip(busy_by_definition(plan.schedule()), plan.schedule().devices, strict=True)
            if program
        ]
    )
    for s, stage in enumerate(instance.stages):
        assert (stage.t_r is None) == (plan.instance.stages[s].t_r is None)


def test_a_recomputation_is_no_sample_of_a_hop() -> None:
    """R runs while its device waits for the gradient: only B's start tells of the hop of 0.5."""
    stages = [{"device": d, "t_f": 1.0, "t_b": 1.0, "t_w": 1.0, "t_r": 1.0, "mem_r": 0.5} for d in range(2)]
    instance = equal_stages(2, 1).with_changes(stages=stages, t_comm=0.5)
    orders = [[Task(kind, d, 0) for kind in (F, R, B, W)] for d in range(2)]
    trace = as_planned(planned(instance, simulate(instance, orders)))
    # Of all ops only B0 waited for a message. A wait of R's, if any was recorded, would be for none.
    waits = {"R0.0": 0.25, "B0.0": 2.0}
    waiting = [e.model_copy(update={"wait": waits.get(str(e), 0.0)}) for e in trace.steps[0].events]
    trace = trace.model_copy(
        update={"steps": (trace.steps[0].model_copy(update={"events": tuple(waiting)}),)}
    )
    assert measured_hops(instance, trace) == (0.5,)


def test_pictures_label_a_pairs_peak(tmp_path: Path) -> None:
    """Each device's label states the plan's peak; measured pairs are drawn as predicted ones are."""
    plan = paired_plan()
    trace = as_planned(plan)
    save_plan_figure(tmp_path / "x.svg", plan, trace)
    text = (tmp_path / "x.svg").read_text()
    shown = re.findall(r"peak ([0-9.]+) MiB", text)
    assert [float(peak) for peak in shown] == [peak_by_definition(plan, d) for d in range(2)]
    # The label is more than what either half needs by itself.
    assert max(plan.peak_memory) > max(
        max(_memory_by_definition(plan.instance, d, program, frozenset()))
        for d, program in enumerate(plan.schedule().devices)
    )
    save_memory_figure(tmp_path / "m.svg", plan)
    save_trace_figure(tmp_path / "t.svg", plan.instance, trace)
    for program in _measured_lane(plan.instance, trace).schedule.devices:
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(program))
