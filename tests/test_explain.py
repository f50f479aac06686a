"""Why devices wait: slack, causes, critical path and the reason of every bubble, worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import small_instances
from zbsolve.model.graph import Task, predecessors
from zbsolve.model.instance import Instance, equal_stages
from zbsolve.model.kinds import B, F, W
from zbsolve.model.schedule import Schedule, TimedTask
from zbsolve.model.serial import require_feasible, serial_orders
from zbsolve.model.simulator import Links, simulate, simulate_least_span, topological_order
from zbsolve.report.explain import Bubble, Explanation, Reason, explain


def tasks(text: str) -> list[Task]:
    """``F0.1 B0.1`` as tasks."""
    kinds = {"F": F, "B": B, "W": W}
    found = []
    for word in text.split():
        stage, microbatch = word[1:].split(".")
        found.append(Task(kinds[word[0]], int(stage), int(microbatch)))
    return found


def explained(instance: Instance, *orders: str) -> Explanation:
    """The explanation of these orders at their earliest starts."""
    return explain(instance, simulate(instance, [tasks(order) for order in orders]))


def on(device: int, explanation: Explanation) -> list[tuple[str, float, float]]:
    """A device's bubbles as (reason, start, end)."""
    return [(b.reason.value, b.start, b.end) for b in explanation.bubbles if b.device == device]


def test_one_micro_batch_through_two_stages() -> None:
    """All ones, p = 2, m = 1: device 0 F 0-1, B 3-4, W 4-5; device 1 F 1-2, B 2-3, W 3-4."""
    found = explained(equal_stages(2, 1), "F0.0 B0.0 W0.0", "F1.0 B1.0 W1.0")
    assert on(0, found) == [("input", 1.0, 3.0)]
    assert on(1, found) == [("fill", 0.0, 1.0), ("drain", 4.0, 5.0)]
    # Only W1.0 has room: it ends at 4, the step at 5.
    assert {str(task): slack for task, slack in found.slack.items() if slack} == {"W1.0": 1.0}
    assert [str(task) for task in found.critical_path] == ["F0.0", "F1.0", "B1.0", "B0.0", "W0.0"]
    assert found.idle_by_reason(1) == {Reason.FILL: 1.0, Reason.DRAIN: 1.0}
    wait, fill, drain = found.bubbles
    assert wait.sentence == (
        "B0.0 waits for B1.0 on device 1, which ends at 3; device 0 has nothing else that is ready"
    )
    assert (wait.following, wait.waits_for) == (Task(B, 0, 0), Task(B, 1, 0))
    assert fill.sentence == (
        "nothing has reached device 1 yet: F1.0 waits for F0.0 on device 0, which ends at 1"
    )
    assert drain.sentence == "device 1 has done all its tasks; the step ends 1 ms later with W0.0 on device 0"


def test_a_hop_is_part_of_the_wait() -> None:
    """Hop 0.5: F1.0 starts at 1.5, and the sentence says that the result was on its way."""
    found = explained(equal_stages(2, 1, t_comm=0.5), "F0.0 B0.0 W0.0", "F1.0 B1.0 W1.0")
    assert on(1, found)[0] == ("fill", 0.0, 1.5)
    assert "which ends at 1, then the hop of 0.5 ms" in found.bubbles[1].sentence
    # F1.0 1.5-2.5, B1.0 2.5-3.5, B0.0 from 4: W1.0 ends at 4.5, the step at 6.
    assert found.slack[Task(W, 1, 0)] == pytest.approx(1.5)


ORDER_0 = "F0.0 F0.1 B0.0 B0.1 W0.0 W0.1"
ORDER_1 = "F1.0 B1.0 F1.1 B1.1 W1.0 W1.1"


@pytest.mark.parametrize(("t_w", "reason"), [(1.0, "order"), (2.0, "length")])
def test_a_ready_w_fits_into_the_gap_or_is_too_long(t_w: float, reason: str) -> None:
    """Device 0 runs B0.0 3-4 and B0.1 from 5: W0.0 is ready at 4 and the gap is 1 long."""
    # Device 1: F1.0 1-2, B1.0 2-3, F1.1 3-4, B1.1 4-5.
    found = explained(equal_stages(2, 2, t_w=t_w), ORDER_0, ORDER_1)
    assert on(0, found)[:2] == [("input", 2.0, 3.0), (reason, 4.0, 5.0)]
    sentence = found.bubbles[1].sentence
    if reason == "order":
        assert sentence.endswith("W0.0 was ready at 4 and fits; the order runs it later")
    else:
        assert sentence.endswith("W0.0 was ready at 4 but takes 2 ms: it would delay B0.1 by 1 ms")


@pytest.mark.parametrize(("cap", "reason"), [(2.0, "memory"), (3.0, "order")])
def test_the_cap_keeps_a_ready_forward_out(cap: float, reason: str) -> None:
    """m = 3: after two F's device 0 holds 2; F0.2 is ready at 2 and fits into 2-3, but would make it 3."""
    found = explain(
        equal_stages(2, 3, memory_cap=cap),
        simulate(
            equal_stages(2, 3),
            [
                tasks("F0.0 F0.1 B0.0 W0.0 F0.2 B0.1 W0.1 B0.2 W0.2"),
                tasks("F1.0 B1.0 F1.1 B1.1 W1.0 F1.2 B1.2 W1.1 W1.2"),
            ],
        ),
    )
    assert on(0, found)[0] == (reason, 2.0, 3.0)
    if reason == "memory":
        assert found.bubbles[0].sentence.endswith(
            "F0.2 was ready at 2 and fits, but device 0 would hold 3 MiB of 2"
        )


def test_memory_is_judged_until_the_moved_tasks_old_place() -> None:
    """A W whose stage grows at B: moved before other tasks it must fit all the way, not only at first."""
    # Device 0 after F0.0 F0.1 holds 2 of 3.5. B adds 1 (mem_w 2): during B0.0 it holds 3. Had F0.2 run before
    # it, B0.0 would need 4.
    instance = equal_stages(2, 3, mem_w=2.0, memory_cap=3.5)
    found = explained(
        instance,
        "F0.0 F0.1 B0.0 W0.0 F0.2 B0.1 W0.1 B0.2 W0.2",
        "F1.0 B1.0 W1.0 F1.1 B1.1 W1.1 F1.2 B1.2 W1.2",
    )
    assert found.bubbles[0].reason is Reason.MEMORY
    assert "would hold 4 MiB of 3.5" in found.bubbles[0].sentence


def test_a_start_held_back_for_the_span_is_late() -> None:
    """Least span of p = 2, m = 1: device 1 may begin at once; device 0's window of 5 is the cost."""
    instance = equal_stages(2, 1)
    orders = [tasks("F0.0 B0.0 W0.0"), tasks("F1.0 B1.0 W1.0")]
    schedule = simulate_least_span(instance, orders)
    found = explain(instance, schedule, "span")
    # Device 0's window is 0-5; device 1's is 1-4 and may become 1-6.
    assert found.slack[Task(W, 0, 0)] == 0
    assert found.slack[Task(W, 1, 0)] == pytest.approx(2.0)
    shifted = Schedule(
        (
            schedule.devices[0],
            tuple(t._replace(start=t.start + 2, end=t.end + 2) for t in schedule.devices[1]),
        )
    )
    late = [b for b in explain(instance, shifted).bubbles if b.device == 1 and b.start == 0]
    assert [b.reason for b in late] == [Reason.LATE]
    assert late[0].sentence == "F1.0 could start earlier: nothing that it needs is missing"


def test_a_busy_link_is_part_of_the_wait() -> None:
    """Each transfer occupies the link for 3: F0.1 ends at 2, its result leaves at 4 and arrives at 7."""
    # F0.0 ends at 1 and arrives at 4; the link is free at 4. Device 1: F1.0 4-5, F1.1 from 7.
    instance = equal_stages(2, 2).with_changes(t_transfer=3.0)
    found = explained(instance, "F0.0 F0.1 B0.0 W0.0 B0.1 W0.1", "F1.0 F1.1 B1.0 W1.0 B1.1 W1.1")
    assert on(1, found)[:2] == [("fill", 0.0, 4.0), ("order", 5.0, 7.0)]  # B1.0 could run from 5
    assert found.cause[Task(F, 1, 1)] == (Task(F, 0, 1), 3.0, 2.0)
    sentence = next(b.sentence for b in found.bubbles if b.device == 1 and b.start == 5.0)
    assert "which ends at 2, then 2 ms for its link, then the hop of 3 ms" in sentence
    # F0.0 has no slack: its transfer holds up that of F0.1, which holds up the rest.
    assert found.slack[Task(F, 0, 0)] == 0


def test_tasks_that_overlap_start_and_slip_together() -> None:
    """F0.1 runs beside B0.0 from 3 to 5: both wait for B1.0, which ends at 3, and hold what follows."""
    # Device 0: F0.0 0-1, the pair 3-5, W0.0 5-6, B0.1 from 7. Device 1: F1.0, B1.0 1-3, F1.1, B1.1 5-7.
    rows = (
        "F0.0 0 1,F0.1 3 5,B0.0 3 5,W0.0 5 6,B0.1 7 8,W0.1 8 9",
        "F1.0 1 2,B1.0 2 3,W1.0 3 4,F1.1 5 6,B1.1 6 7,W1.1 7 8",
    )
    schedule = Schedule(
        tuple(
            tuple(
                TimedTask(tasks(name)[0], float(start), float(end))
                for name, start, end in (entry.split() for entry in row.split(","))
            )
            for row in rows
        )
    )
    found = explain(equal_stages(2, 2), schedule)
    assert found.cause[Task(F, 0, 1)].task == found.cause[Task(B, 0, 0)].task == Task(B, 1, 0)
    assert on(0, found)[0] == ("input", 1.0, 3.0)
    assert found.bubbles[0].sentence.startswith("F0.1 beside B0.0 waits for B1.0 on device 1")
    # F0.1 has none: F1.1 waits for it, and from there the path is tight. So its mate has none either,
    # though what waits for B0.0, W0.0, could run one later.
    assert found.slack[Task(F, 0, 1)] == found.slack[Task(B, 0, 0)] == 0
    assert found.slack[Task(W, 0, 0)] == 1


def test_tasks_without_length_have_no_bubble_of_their_own() -> None:
    """A frozen stage (W = 0): no idle stretch of length 0 is reported."""
    found = explained(equal_stages(1, 2, t_w=0.0), "F0.0 B0.0 W0.0 F0.1 B0.1 W0.1")
    assert found.bubbles == ()
    assert len(found.critical_path) == 6


def delayed_makespan(instance: Instance, schedule: Schedule, late: Task, by: float) -> float:
    """Makespan when one task starts ``by`` later and everything else as early as it can."""
    previous = {b: a for order in schedule.orders for a, b in pairwise(order)}
    times = {timed.task: timed for timed in schedule}
    ends: dict[Task, float] = {}
    sent: dict[Task, float] = {}
    links = Links(instance)
    for _, task in topological_order(instance, schedule.orders):
        limits = [
            (ends if edge.before.stage == task.stage else sent)[edge.before] + edge.lag
            for edge in predecessors(instance, task)
            if edge.before in sent
        ]
        if task in previous:
            limits.append(ends[previous[task]])
        start = max([0.0, *limits])
        if task == late:
            start = max(start, times[task].start + by)
        ends[task] = start + times[task].end - times[task].start
        sent[task] = links.leaves(task, ends[task])
    return max(ends.values())


def bubbles_of(found: Explanation, device: int) -> list[Bubble]:
    """The bubbles of one device."""
    return [bubble for bubble in found.bubbles if bubble.device == device]


@given(small_instances(capped=False), st.sampled_from([None, 0.5, 2.0]))
def test_slack_is_exactly_what_a_task_may_slip(instance: Instance, t_transfer: float | None) -> None:
    """Later by its slack leaves the makespan; later by a little more raises it by that much. Links, too."""
    instance = instance.with_changes(t_transfer=t_transfer)
    require_feasible(instance)
    schedule = simulate(instance, serial_orders(instance))
    found = explain(instance, schedule)
    for task, slack in found.slack.items():
        assert delayed_makespan(instance, schedule, task, slack) == pytest.approx(schedule.makespan)
        assert delayed_makespan(instance, schedule, task, slack + 0.25) == pytest.approx(
            schedule.makespan + 0.25
        )


@given(small_instances(capped=False), st.sampled_from([None, 0.5, 2.0]))
def test_work_and_bubbles_fill_the_step(instance: Instance, t_transfer: float | None) -> None:
    """Per device the lengths of tasks and bubbles add up to the makespan, and the path has no slack."""
    instance = instance.with_changes(t_transfer=t_transfer)
    schedule = simulate(instance, serial_orders(instance))
    found = explain(instance, schedule)
    for device, program in enumerate(schedule.devices):
        busy = sum(timed.end - timed.start for timed in program)
        idle = sum(bubble.length for bubble in bubbles_of(found, device))
        assert busy + idle == pytest.approx(schedule.makespan)
        assert sum(found.idle_by_reason(device).values()) == pytest.approx(idle)
    times = {timed.task: timed for timed in schedule}
    assert all(found.slack[task] == pytest.approx(0) for task in found.critical_path)
    assert times[found.critical_path[-1]].end == pytest.approx(schedule.makespan)
    assert times[found.critical_path[0]].start == 0
