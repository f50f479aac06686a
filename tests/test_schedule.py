"""The checker accepts what is right and names each rule that is broken."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.brute_force import all_orders
from tests.strategies import small_instances
from zbsolve.model.graph import Task
from zbsolve.model.instance import Instance, equal_stages, make_instance
from zbsolve.model.judge import check
from zbsolve.model.kinds import (
    BW,
    B,
    F,
    R,
    TaskKind,
    W,
)
from zbsolve.model.memory import peak_memory
from zbsolve.model.schedule import Schedule, TimedTask
from zbsolve.model.simulator import simulate


def timed(text: str) -> tuple[TimedTask, ...]:
    """``F0.0@0-1`` and so on."""
    result = []
    for word in text.split():
        name, times = word.split("@")
        start, end = times.split("-")
        kind = name.rstrip("0123456789.")
        s, j = name.removeprefix(kind).split(".")
        result.append(TimedTask(Task(TaskKind(kind), int(s), int(j)), float(start), float(end)))
    return tuple(result)


# Two devices, one micro-batch, hop 0.5: F0 0-1, F1 1.5-2.5, B1 2.5-3.5, B0 4-5, W0 5-6, W1 3.5-4.5.
PAIR = equal_stages(2, 1, t_comm=0.5, memory_cap=1.0)
GOOD = ("F0.0@0-1 B0.0@4-5 W0.0@5-6", "F1.0@1.5-2.5 B1.0@2.5-3.5 W1.0@3.5-4.5")


def rules(instance: Instance, *programs: str) -> list[str]:
    return [violation.rule for violation in check(instance, Schedule(tuple(map(timed, programs))))]


def test_a_valid_schedule_and_its_costs_by_hand() -> None:
    """Makespan 6 (0 to 6); windows 6 on device 0, 3 on device 1: span 6."""
    schedule = Schedule(tuple(map(timed, GOOD)))
    assert check(PAIR, schedule) == []
    assert (schedule.makespan, schedule.span) == (6.0, 6.0)
    assert schedule.cost("span") == schedule.span
    assert [str(t) for t in schedule.orders[1]] == ["F1.0", "B1.0", "W1.0"]
    assert Schedule(((), ())).makespan == Schedule(((),)).span == 0.0


def test_makespan_counts_from_the_first_start() -> None:
    """Shifted by 10, makespan is still 6; the windows 10-16 and 11.5-14.5 give span 6."""
    moved = Schedule(
        tuple(
            tuple(t._replace(start=t.start + 10, end=t.end + 10) for t in program)
            for program in Schedule(tuple(map(timed, GOOD))).devices
        )
    )
    assert check(PAIR, moved) == []
    assert (moved.makespan, moved.span) == (6.0, 6.0)


@pytest.mark.parametrize(
    ("programs", "rule", "says"),
    [
        (("F0.0@0-1 B0.0@4-5", GOOD[1]), "tasks", "stage 0 micro-batch 0 has F, B: needs F, B, W"),
        (("F0.0@0-1 BW0.0@4-5", GOOD[1]), "tasks", "stage 0 has no t_bw"),
        ((GOOD[0] + " W0.0@6-7", GOOD[1]), "tasks", "W0.0 appears 2 times"),
        ((GOOD[0] + " F0.1@6-7", GOOD[1]), "tasks", "F0.1 is not a task of this instance"),
        ((GOOD[0] + " W1.0@6-7", "F1.0@1.5-2.5 B1.0@2.5-3.5"), "placement", "its stage is on device 1"),
        ((GOOD[0],), "devices", "1 programs for 2 devices"),
        (("F0.0@0-1 B0.0@4-5 W0.0@5-5.5", GOOD[1]), "duration", "W0.0 runs from 5 to 5.5, should take 1"),
        (("F0.0@0-1 B0.0@4-5 W0.0@4.5-5.5", GOOD[1]), "one at a time", "W0.0 starts at 4.5 before B0.0"),
        (("F0.0@0-1 B0.0@3.5-4.5 W0.0@5-6", GOOD[1]), "dependency", "B0.0 starts at 3.5 before B1.0"),
        (("F0.0@0.2-1.2 B0.0@4-5 W0.0@5-6", GOOD[1]), "dependency", "plus hop 0.5"),
        (("F0.0@0-1 W0.0@2-3 B0.0@4-5", GOOD[1]), "dependency", "W0.0 starts at 2 before B0.0 ends at 5"),
        (("B0.0@4-5 F0.0@5-6 W0.0@6-7", GOOD[1]), "dependency", "B0.0 starts at 4 before F0.0 ends at 6"),
    ],
)
def test_each_broken_rule_is_named(programs: tuple[str, ...], rule: str, says: str) -> None:
    """One change to the valid schedule: the checker names the rule, the task and the numbers."""
    violations = check(PAIR, Schedule(tuple(map(timed, programs))))
    assert rule in [v.rule for v in violations]
    assert any(says in str(v) for v in violations), [str(v) for v in violations]


def test_nan_times_are_refused() -> None:
    """A comparison with NaN is false; the checker is written so that it counts as broken."""
    assert rules(PAIR, "F0.0@nan-nan B0.0@4-5 W0.0@5-6", GOOD[1])


def test_over_the_cap_is_named_at_the_first_task() -> None:
    """Two F's in flight under a cap of 1: over during the second, F0.1, with 2."""
    instance = equal_stages(1, 2, memory_cap=1.0)
    schedule = Schedule((timed("F0.0@0-1 F0.1@1-2 B0.0@2-3 B0.1@3-4 W0.0@4-5 W0.1@5-6"),))
    (violation,) = check(instance, schedule)
    assert violation.rule == "memory"
    assert "2 MiB during F0.1 is over the cap of 1" in violation.message
    assert check(instance.with_changes(memory_cap=2.0), schedule) == []


def test_the_growth_in_b_counts_from_its_start() -> None:
    """mem_b 1, mem_w 2, cap 2: while B0.0 runs beside F0.1's 1 it holds 2: 3 is over."""
    instance = equal_stages(1, 2, mem_w=2.0, memory_cap=2.0)
    schedule = Schedule((timed("F0.0@0-1 F0.1@1-2 B0.0@2-3 W0.0@3-4 B0.1@4-5 W0.1@5-6"),))
    (violation,) = check(instance, schedule)
    assert "3 MiB during B0.0" in violation.message


def test_a_zero_length_task_frees_before_its_neighbour_starts() -> None:
    """T_W = 0: W0.0 at the instant at which F0.1 starts, listed before it, makes room; listed after, not."""
    instance = equal_stages(1, 2, t_w=0.0, memory_cap=1.0)
    tail = "B0.1@3-4 W0.1@4-4"
    assert rules(instance, f"F0.0@0-1 B0.0@1-2 W0.0@2-2 F0.1@2-3 {tail}") == []
    assert rules(instance, f"F0.0@0-1 B0.0@1-2 F0.1@2-3 W0.0@3-3 {tail}") == ["memory"]


def test_a_fused_backward_passes_the_gradient_on() -> None:
    """Stage 1 fuses (t_bw 1.5): B0 waits for BW1 and the hop; the checker sees it when it does not."""
    stages = [
        {"device": 0, "t_f": 1.0, "t_b": 1.0, "t_w": 1.0},
        {"device": 1, "t_f": 1.0, "t_b": 1.0, "t_w": 1.0, "t_bw": 1.5},
    ]
    instance = make_instance(num_devices=2, num_microbatches=1, stages=stages, t_comm=0.5)
    fused = "F1.0@1.5-2.5 BW1.0@2.5-4"
    assert rules(instance, "F0.0@0-1 B0.0@4.5-5.5 W0.0@5.5-6.5", fused) == []
    assert rules(instance, "F0.0@0-1 B0.0@4-5 W0.0@5-6", fused) == ["dependency"]
    assert rules(instance, "F0.0@0-1 B0.0@4.5-5.5 W0.0@5.5-6.5", fused + " W1.0@4-5") == ["tasks"]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Instance, Schedule]:
    """A random small instance without a cap and one of its schedules of earliest starts."""
    instance = draw(small_instances(max_passes=3, capped=False))
    every = all_orders(instance)
    orders, _ = next(every)
    for _ in range(draw(st.integers(0, 30))):
        orders, _ = next(every, (orders, None))
    tasks = [[Task(TaskKind(k), s, j) for k, s, j in order] for order in orders]
    return instance, simulate(instance, tasks)


MUTATIONS = ("drop", "double", "shift", "stretch", "swap", "move", "cap")


@settings(derandomize=True, deadline=None, max_examples=150)
@given(schedules(), st.sampled_from(MUTATIONS), st.data())
def test_mutated_schedules_are_rejected(
    pair: tuple[Instance, Schedule], mutation: str, data: st.DataObject
) -> None:
    """Drop, double, shift before a predecessor, stretch, swap, move to another device, lower the cap."""
    instance, schedule = pair
    assert check(instance, schedule) == []
    programs = [list(program) for program in schedule.devices]
    device = data.draw(st.integers(0, len(programs) - 1))
    program = programs[device]
    place = data.draw(st.integers(0, len(program) - 1))
    victim = program[place]
    if mutation == "drop":
        del program[place]
    elif mutation == "double":
        program.insert(place, victim)
    elif mutation == "shift":
        # Earliest starts: anything above 0 is held by a predecessor, so earlier breaks a rule.
        if victim.start == 0:
            return
        program[place] = victim._replace(start=victim.start - 0.25, end=victim.end - 0.25)
    elif mutation == "stretch":
        program[place] = victim._replace(end=victim.end + 0.25)
    elif mutation == "swap":
        other = (place + 1) % len(program)
        program[place], program[other] = program[other], program[place]
        if program[place].start == program[other].start:
            return  # zero-length tasks share an instant: they may stand either way
    elif mutation == "move":
        if len(programs) == 1:
            return
        programs[(device + 1) % len(programs)].append(program.pop(place))
    else:
        orders = [[t.task for t in p] for p in programs]
        peaks = [peak_memory(instance, d, order) for d, order in enumerate(orders)]
        if peaks[device] <= 0:
            return
        caps = [p if d != device else 0.99 * p for d, p in enumerate(peaks)]
        instance = instance.with_changes(memory_cap=caps)
    assert check(instance, Schedule(tuple(tuple(p) for p in programs))) != []


def test_swapped_fused_names_are_told_apart() -> None:
    """A BW where the instance has none of that stage is refused as a task, whatever its times."""
    assert rules(equal_stages(1, 1), "F0.0@0-1 BW0.0@1-3") == ["tasks"]
    assert {F, R, B, W, BW} == set(TaskKind)


def test_order_against_a_dependency_between_tasks_of_no_length() -> None:
    """All at time 0, B before its own F on the device: no time is violated, yet no device can run it."""
    instance = equal_stages(1, 2, t_f=0.0, t_b=0.0, t_w=0.0, memory_cap=0.5)
    kinds = (B, W, F)
    program = tuple(TimedTask(Task(kind, 0, j), 0.0, 0.0) for j in range(2) for kind in kinds)
    assert [violation.rule for violation in check(instance, Schedule((program,)))] == ["order"]
