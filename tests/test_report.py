"""Reports: the terminal Gantt to scale, figures of comparison, pictures, and the Chrome trace."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from zbsolve.baselines.comparison import compare_with_baselines, gain_text, one_f_one_b_cost
from zbsolve.errors import InputError
from zbsolve.model.bubble import bubble_rate
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance, equal_stages
from zbsolve.model.kinds import B, F, W
from zbsolve.model.simulator import simulate
from zbsolve.plan.plan import Plan
from zbsolve.report.chrome_trace import chrome_trace, chrome_trace_of_measurement, save_chrome_trace
from zbsolve.report.figures import save_instance_figure, save_plan_figure, save_trace_figure
from zbsolve.report.gantt_text import gantt
from zbsolve.report.run_text import gradients_text, prediction_table, run_lines
from zbsolve.report.text import certificate_table, comparison_memory_table, comparison_table, memory_table
from zbsolve.report.timeline import instance_of_trace, measured_schedule, measured_waits
from zbsolve.solver.portfolio import certify, solve
from zbsolve.trace.compare import compare
from zbsolve.trace.trace import Event, GradientCheck, Step, Trace


def one_f_one_b_split(instance: Instance) -> list[list[Task]]:
    """1F1B orders with W right after B."""
    p, m = instance.num_devices, instance.num_microbatches
    orders = []
    for d in range(p):
        warmup = min(m, p - d)
        order = [Task(F, d, j) for j in range(warmup)]
        for j in range(m):
            order += [Task(B, d, j), Task(W, d, j)]
            if warmup + j < m:
                order.append(Task(F, d, warmup + j))
        orders.append(order)
    return orders


def plan_of(instance: Instance) -> Plan:
    """A certified plan of the orders above."""
    return certify(instance, simulate(instance, one_f_one_b_split(instance)), "makespan", "by hand")


def trace_of(plan: Plan, *, late: float = 0.0) -> Trace:
    """A run in which everything took as long as planned, but device 1 began ``late`` and waited for it."""
    events = []
    for device, program in enumerate(plan.schedule().devices):
        shift = 5.0 + (late if device == 1 else 0.0)
        for task, start, end in program:
            wait = late if device == 1 and task == program[0].task else 0.0
            events.append(
                Event(
                    device=device,
                    op=task.kind.value,
                    stage=task.stage,
                    microbatch=task.microbatch,
                    start=start + shift,
                    end=end + shift,
                    wait=wait,
                )
            )
    return Trace(
        plan_digest=plan.digest(),
        mode="real",
        hardware="a test",
        backend="gloo",
        model="by hand",
        time_unit="ms",
        memory_unit="MiB",
        split=("deferred",) * plan.instance.num_stages,
        steps=(Step(events=tuple(events), makespan=plan.makespan + late),),
        peak_memory=plan.peak_memory,
        gradients=GradientCheck(
            checked=True,
            equal=False,
            bit_equal=False,
            worst_relative_difference=0.25,
            tolerance=1e-6,
            where="stage 1 weight",
        ),
    )


def rendered(*renderables: object) -> str:
    """What a 200-column terminal without colour shows."""
    stream = StringIO()
    console = Console(file=stream, width=200, no_color=True, highlight=False)
    for renderable in renderables:
        console.print(renderable)
    return stream.getvalue()


def test_text_gantt_is_to_scale() -> None:
    """p = 2, m = 1, all ones: 6 time units on 60 columns, so that each box is 10 columns wide."""
    instance = equal_stages(2, 1)
    # Device 0: F 0-1, idle 1-3, B 3-4, W 4-5. Device 1: idle, F 1-2, B 2-3, W 3-4. The makespan is 5.
    # 50 columns for 5 units: each box takes 10.
    lines = gantt(instance, [("predicted", simulate(instance, one_f_one_b_split(instance)))], 54)
    f, b, w = "F0" + "f" * 8, "B0" + "b" * 8, "W0" + "w" * 8
    assert lines[0].plain == "0 |" + f + "." * 20 + b + w + "|"
    assert lines[1].plain == "1 |" + "." * 10 + f + b + w + "." * 10 + "|"
    assert "one column = 0.1 ms" in lines[2].plain


def test_text_gantt_names_the_stage_where_a_device_holds_several() -> None:
    """With two chunks a label is kind, stage and micro-batch."""
    instance = equal_stages(1, 1, placement="loop", chunks=2)
    order = [Task(F, 0, 0), Task(F, 1, 0), Task(B, 1, 0), Task(W, 1, 0), Task(B, 0, 0), Task(W, 0, 0)]
    line = gantt(instance, [("predicted", simulate(instance, [order]))], 64)[0].plain
    assert [name in line for name in ("F0.0", "F1.0", "B1.0", "W0.0")] == [True] * 4


def test_text_gantt_fills_a_wide_chart_of_many_tiny_tasks() -> None:
    """Boxes narrower than a column still leave every line as long as the others."""
    instance = equal_stages(4, 64)
    lines = gantt(instance, [("predicted", plan_of(instance).schedule())], 80)
    assert {len(line.plain) for line in lines[:4]} == {80}
    # About 195 units on 76 columns of 2.6. Device 0 runs F until 4, idles until 7: column 1 (2.6 to 5.1) is
    # busy for more than half of it, column 2 (5.1 to 7.7) idle for more than half.
    assert lines[0].plain.startswith("0 |ff.")


def test_bubble_rates_name_their_cost() -> None:
    """p = 2, m = 1: work 3 per device, makespan 5, span 5 (device 0): both rates are 1 - 3/5."""
    schedule = plan_of(equal_stages(2, 1)).schedule()
    assert bubble_rate(schedule, schedule.makespan) == pytest.approx(0.4)
    assert bubble_rate(schedule, schedule.span) == pytest.approx(0.4)


def test_gain_is_a_share_of_the_step() -> None:
    """p = 4, m = 64, all ones: 1F1B takes (64 + 3) * 3 = 201, the optimum 64 * 3 + 3 = 195: 3.0 %."""
    result = solve(equal_stages(4, 64), time_limit=10)
    assert result.plan.makespan == pytest.approx(195)
    table = compare_with_baselines(result.plan)
    by_name = {row.name: row for row in table.rows}
    assert by_name["1f1b"].makespan == pytest.approx(201)
    assert by_name["1f1b"].gain_text == "no gain"
    assert table.rows[-1].gain_text == "3.0% of the step"


def test_no_gain_and_loss_are_said_plainly() -> None:
    """A zero gain, a rounding-size gain and a negative gain have their own words."""
    assert gain_text(0.0) == gain_text(1e-9) == "no gain"
    assert gain_text(-0.071) == "7.1% slower"
    assert gain_text(None) == "-"


def test_comparison_lists_what_does_not_apply_and_what_does_not_fit() -> None:
    """Under a cap of 2 at p = 4, 1F1B (peak 4) is listed as not fitting, and no gain over it is stated."""
    plan = solve(equal_stages(4, 4, memory_cap=2.0), time_limit=5).plan
    table = compare_with_baselines(plan)
    by_name = {row.name: row for row in table.rows}
    assert by_name["1f1b"].fits_cap is False
    assert by_name["1f1b"].peak_memory == pytest.approx(4)
    assert table.rows[-1].fits_cap
    assert table.rows[-1].gain is None
    assert "does not fit the cap: device 0 would need 4" in table.one_f_one_b
    assert dict(table.not_applicable)["dualpipe"] == "dualpipe needs m >= 2p: m is 4, p is 4"
    assert "dualpipe" not in by_name


def test_other_placements_are_compared_at_equal_devices() -> None:
    """Stages halved into a V: ZB-V's span is the work, 48 at p = 4, m = 16; the row says what it runs on."""
    table = compare_with_baselines(solve(equal_stages(4, 16), time_limit=2).plan)
    by_name = {row.name: row for row in table.rows}
    zb_v = by_name["zb-v"]
    # 16 * 3 of work; the last device waits for F on three halves of 1/2 each.
    assert (zb_v.makespan, zb_v.span) == (48 + 1.5, 48)
    assert zb_v.runs_on == "two chunks per device in a V"
    assert (zb_v.hops, by_name["interleaved"].hops, by_name["1f1b"].hops) == (6, 7, 3)
    assert by_name["1f1b"].runs_on == ""
    assert (by_name["dualpipe"].parameters, by_name["dualpipe"].runs_on) == (2, "two replicas")
    # 1F1B: bubble 9 over 48.
    assert by_name["1f1b"].r_bubble_makespan == pytest.approx(9 / 48)
    assert by_name["1f1b"].bubble_rate_makespan == pytest.approx(9 / 57)


def test_a_step_without_work_is_compared_too() -> None:
    """Only hops: every bubble rate is 1, and bubble over work is not stated."""
    plan = plan_of(equal_stages(2, 1, 0.0, 0.0, 0.0, t_comm=1.0))
    row = compare_with_baselines(plan).rows[-1]
    assert (row.bubble_rate_makespan, row.r_bubble_makespan) == (1.0, None)
    assert "-" in rendered(comparison_memory_table(compare_with_baselines(plan), plan))


def test_v_placement_is_set_beside_1f1b_at_equal_devices() -> None:
    """Two chunks joined into one stage: 1F1B takes (8 + 1) * 6 at p = 2, and gains are over that."""
    plan = solve(equal_stages(2, 8, placement="v"), time_limit=2).plan
    table = compare_with_baselines(plan)
    by_name = {row.name: row for row in table.rows}
    assert by_name["1f1b"].makespan == pytest.approx(54)
    assert by_name["1f1b"].gain_text == "no gain"
    assert table.one_f_one_b == "gains are over 1F1B with one chunk per device in a line"


def test_peaks_are_broken_down() -> None:
    """ZB-H1, p = 4, m = 8, static 2: device 3 holds one activation and three pending W's of 0.5."""
    instance = equal_stages(4, 8, mem_w=0.5).with_changes(static_mem=[2.0] * 4)
    plan = solve(instance, solver="zb-h1").plan
    rows = {row.name: row for row in compare_with_baselines(plan).rows}
    row = rows["zb-h1"]
    assert row.peaks[0] == (2.0, 4.0, 0.0, 0.0)
    assert row.peaks[3] == (2.0, 1.0, 1.5, 0.0)
    assert [sum(peak) for peak in row.peaks] == list(plan.peak_memory)
    assert row.peak_memory == 6.0


def test_one_f_one_b_says_why_it_does_not_apply() -> None:
    """On a V placement there is no 1F1B, and the reason is the rule."""
    cost, reason = one_f_one_b_cost(equal_stages(2, 2, placement="v"), "makespan")
    assert cost is None
    assert reason.startswith("1F1B does not apply: ")


def test_tables_show_certificate_memory_and_markup_literally() -> None:
    """User text in square brackets is shown, not interpreted."""
    instance = equal_stages(2, 2, memory_cap=2.0).with_changes(memory_unit="[red]MiB")
    plan = plan_of(instance)
    text = rendered(
        certificate_table(plan), memory_table(plan), comparison_table(compare_with_baselines(plan), plan)
    )
    assert "[red]MiB" in text
    assert "<- objective" in text
    assert plan.bound_proof.method in text
    assert "100.0%" in text  # device 0 holds 2 of 2


def test_run_report_names_the_worst_op_and_the_gradient() -> None:
    """A slow W of stage 1 (twice the plan) and a differing gradient are named."""
    plan = plan_of(equal_stages(2, 2))
    trace = trace_of(plan)
    slow = [
        event.model_copy(update={"end": event.end + 1.0}) if event.op == "W" and event.stage == 1 else event
        for event in trace.steps[0].events
    ]
    trace = trace.model_copy(update={"steps": (trace.steps[0].model_copy(update={"events": tuple(slow)}),)})
    comparison = compare(plan, trace)
    lines = "\n".join(run_lines(comparison, trace, plan))
    assert "worst op: W of stage 1 on device 1: ratio 2.000" in lines
    assert "DIFFER from the unpipelined model: worst relative difference 0.25 in stage 1 weight" in lines
    assert "2.000" in rendered(prediction_table(comparison, "ms"))
    assert gradients_text(trace.model_copy(update={"gradients": None})) == "not checked"


def test_a_measured_step_starts_at_zero_and_keeps_its_waits() -> None:
    """Events of a clock that began at 5 are drawn from 0; a wait of 2 before F1.0 is a box of 2."""
    plan = plan_of(equal_stages(2, 1))
    step = trace_of(plan, late=2.0).steps[0]
    schedule = measured_schedule(plan.instance, step)
    # Planned F1.0: 1 to 2; it ran 2 later.
    assert schedule.devices[1][0] == (Task(F, 1, 0), 3.0, 4.0)
    assert [(wait.device, wait.start, wait.end) for wait in measured_waits(step)] == [(1, 1.0, 3.0)]


def test_a_trace_alone_gives_its_placement() -> None:
    """V placement of p = 2: stages 0 and 3 on device 0, 1 and 2 on device 1."""
    plan = solve(equal_stages(2, 2, placement="v"), time_limit=5).plan
    instance = instance_of_trace(trace_of(plan))
    assert [stage.device for stage in instance.stages] == [0, 1, 1, 0]
    assert instance.num_microbatches == 2


MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", MAGIC)
def test_pictures_are_written_in_their_format(tmp_path: Path, suffix: str) -> None:
    """Each picture begins with its format's signature."""
    plan = plan_of(equal_stages(2, 2, memory_cap=2.0))
    save_plan_figure(tmp_path / f"plan{suffix}", plan, trace_of(plan, late=1.0))
    save_trace_figure(tmp_path / f"trace{suffix}", plan.instance, trace_of(plan))
    save_instance_figure(tmp_path / f"instance{suffix}", plan.instance)
    for name in ("plan", "trace", "instance"):
        assert (tmp_path / f"{name}{suffix}").read_bytes().startswith(MAGIC[suffix])


def test_svg_holds_labels_and_is_reproducible(tmp_path: Path) -> None:
    """Boxes are labelled with kind and micro-batch, and equal plans give equal bytes."""
    plan = plan_of(equal_stages(2, 2, memory_cap=2.0))
    save_plan_figure(tmp_path / "a.svg", plan)
    save_plan_figure(tmp_path / "b.svg", plan)
    text = (tmp_path / "a.svg").read_text()
    assert all(f">{name}<" in text for name in ("F0", "F1", "B0", "W1", "memory cap"))
    assert "waiting in a receive" not in text
    assert (tmp_path / "b.svg").read_text() == text


def test_picture_of_many_devices(tmp_path: Path) -> None:
    """p = 32, m = 64: 6,144 boxes are drawn, and unlabelled where labels would not fit."""
    instance = equal_stages(32, 64, 1.0, 1.0, 0.5)
    save_plan_figure(tmp_path / "x.svg", plan_of(instance))
    text = (tmp_path / "x.svg").read_text()
    assert ">31: peak 1 MiB<" in text  # stage 31 of 1F1B holds one micro-batch
    assert ">F63<" not in text


def test_unknown_picture_format_is_refused(tmp_path: Path) -> None:
    """One line names the formats, and nothing is written."""
    with pytest.raises(InputError, match=r"use \.png, \.svg, \.pdf"):
        save_plan_figure(tmp_path / "x.bmp", plan_of(equal_stages(1, 1)))
    assert list(tmp_path.iterdir()) == []


def test_chrome_trace_has_both_lanes_in_microseconds(tmp_path: Path) -> None:
    """1 ms is 1000 us; p = 2, m = 1 has 6 boxes a lane, one message each way, and the measured wait."""
    plan = plan_of(equal_stages(2, 1))
    data = chrome_trace(plan, trace_of(plan, late=2.0))
    boxes = [event for event in data["traceEvents"] if event["ph"] == "X"]
    predicted = {e["name"]: e for e in boxes if e["pid"] == 0}
    assert (predicted["F1.0"]["ts"], predicted["F1.0"]["dur"], predicted["F1.0"]["tid"]) == (
        1000.0,
        1000.0,
        1,
    )
    measured = [e for e in boxes if e["pid"] == 1]
    assert len(predicted) == 6
    assert len(measured) == 7
    assert [e["dur"] for e in measured if e["name"] == "wait in receive"] == [2000.0]
    phases = [event["ph"] for event in data["traceEvents"]]
    assert (phases.count("s"), phases.count("f")) == (2, 2)
    counters = [e["args"]["MiB"] for e in data["traceEvents"] if e["ph"] == "C" and "device 0" in e["name"]]
    assert max(counters) == pytest.approx(1.0)
    assert counters[-1] == pytest.approx(0.0)
    save_chrome_trace(tmp_path / "x.trace.json", data)
    assert json.loads((tmp_path / "x.trace.json").read_text()) == data


def test_chrome_trace_arrows_lie_inside_their_boxes() -> None:
    """Viewers bind an arrow to the box around its time: every end must lie in producer or consumer."""
    plan = plan_of(equal_stages(3, 2, t_comm=0.25))
    events = chrome_trace(plan)["traceEvents"]
    boxes = [e for e in events if e["ph"] == "X"]
    for arrow in (e for e in events if e["ph"] in "sf"):
        assert any(b["tid"] == arrow["tid"] and b["ts"] < arrow["ts"] < b["ts"] + b["dur"] for b in boxes)


def test_chrome_trace_of_a_measurement_alone() -> None:
    """Without a plan only the measured lane is there."""
    plan = plan_of(equal_stages(2, 1))
    data = chrome_trace_of_measurement(plan.instance, trace_of(plan))
    assert {event["pid"] for event in data["traceEvents"]} == {1}
