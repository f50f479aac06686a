"""Plans: lowering to messages, the deadlock dry run, the file, and the judge of all its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_simulator import Names, one_f_one_b, random_orders, tasks_of
from zbsolve.errors import InfeasibleError, InputError
from zbsolve.model.instance import Instance, equal_stages, make_instance
from zbsolve.model.schedule import Schedule
from zbsolve.model.simulator import simulate
from zbsolve.plan.actions import Action, Program
from zbsolve.plan.certificate import Proof, SolverInfo
from zbsolve.plan.check import check_plan
from zbsolve.plan.lowering import dry_run, lower, order_messages
from zbsolve.plan.make import make_plan
from zbsolve.plan.plan import Plan, load_plan


def plan_of(instance: Instance, schedule: Schedule, **changes: Any) -> Plan:
    """A plan with a bound of nothing proven."""
    fields: dict[str, Any] = {
        "objective": "makespan",
        "lower_bound": 0.0,
        "proof": Proof(method="none", statement="nothing proven"),
        "solver": SolverInfo(name="test", version="0"),
    }
    return make_plan(instance, schedule, **{**fields, **changes})


def small_plan(**changes: Any) -> Plan:
    """1F1B of p = 2, m = 2 with a hop of 0.5."""
    instance = equal_stages(2, 2, t_comm=0.5)
    return plan_of(instance, simulate(instance, one_f_one_b(instance)), **changes)


def changed(plan: Plan, device: int, actions: list[Action]) -> Plan:
    """The plan with another program on one device."""
    programs = list(plan.programs)
    programs[device] = Program(device=device, actions=tuple(actions))
    return plan.model_copy(update={"programs": tuple(programs)})


def rules(plan: Plan) -> set[str]:
    return {violation.rule for violation in check_plan(plan)}


def test_lowering_by_hand() -> None:
    """p = 2, m = 1: F0, send; receive first, F1, B1, send; receive, B0; message 0 goes down, 1 comes back."""
    instance = equal_stages(2, 1, t_comm=0.5)
    programs = lower(instance, simulate(instance, one_f_one_b(instance)))
    names = [[str(action) for action in program.actions] for program in programs]
    assert names == [
        ["F0.0", "SEND_F0.0", "RECV_B0.0", "B0.0", "W0.0"],
        ["RECV_F1.0", "F1.0", "B1.0", "SEND_B1.0", "W1.0"],
    ]
    messages = [(a.op, a.peer, a.message) for p in programs for a in p.actions if not a.is_compute]
    assert messages == [("SEND_F", 1, 0), ("RECV_B", 1, 1), ("RECV_F", 0, 0), ("SEND_B", 0, 1)]
    send = programs[0].actions[1]
    assert (send.start, send.end) == (1.0, 1.5)


def test_a_hop_within_a_device_sends_nothing() -> None:
    """V on 2 devices, one micro-batch: messages cross boundaries 0 and 2 only, down and up: 4."""
    instance = equal_stages(2, 1, placement="v")
    order = [
        [("F", 0, 0), ("F", 3, 0), ("B", 3, 0), ("W", 3, 0), ("B", 0, 0), ("W", 0, 0)],
        [("F", 1, 0), ("F", 2, 0), ("B", 2, 0), ("W", 2, 0), ("B", 1, 0), ("W", 1, 0)],
    ]
    schedule = simulate(instance, tasks_of(tuple(map(tuple, order))))
    messages = order_messages(instance, schedule)
    assert [(str(m.producer), str(m.consumer)) for m in messages] == [
        ("F0.0", "F1.0"),
        ("F2.0", "F3.0"),
        ("B3.0", "B2.0"),
        ("B1.0", "B0.0"),
    ]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(random_orders())
def test_every_plan_is_free_of_deadlock_and_right(pair: tuple[Instance, Names]) -> None:
    """Random orders, placements, hops and fused backwards: valid, no deadlock, a faithful file."""
    instance, names = pair
    plan = plan_of(instance, simulate(instance, tasks_of(names)))
    assert check_plan(plan) == []
    assert dry_run(instance, plan.programs) is None
    assert plan.schedule().orders == tuple(map(tuple, tasks_of(names)))
    again = Plan.model_validate(json.loads(plan.to_json()))
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert again.digest() == plan.digest()


@settings(derandomize=True, deadline=None, max_examples=60)
@given(random_orders(), st.data())
def test_a_lost_message_never_passes(pair: tuple[Instance, Names], data: st.DataObject) -> None:
    """Drop any one send or receive: the check fails, and the dry run stops instead of pretending."""
    instance, names = pair
    plan = plan_of(instance, simulate(instance, tasks_of(names)))
    places = [
        (p.device, i) for p in plan.programs for i, action in enumerate(p.actions) if not action.is_compute
    ]
    if not places:
        return
    device, index = data.draw(st.sampled_from(places))
    actions = list(plan.programs[device].actions)
    del actions[index]
    broken = changed(plan, device, actions)
    assert rules(broken) >= {"messages", "deadlock"}


def test_both_sending_first_is_a_deadlock() -> None:
    """The textbook circle: each device sends before it receives, on a transport that blocks.

    Device 0 holds stages 0 and 2, device 1 stage 1: F0.1 goes down while F1.0's result comes back.
    """
    stages = [{"device": d, "t_f": 1.0, "t_b": 1.0, "t_w": 1.0} for d in (0, 1, 0)]
    instance = make_instance(num_devices=2, num_microbatches=2, stages=stages)

    def act(
        op: Any, stage: int, microbatch: int, peer: int | None = None, message: int | None = None
    ) -> Action:
        return Action(
            op=op, stage=stage, microbatch=microbatch, start=0.0, end=0.0, peer=peer, message=message
        )

    start = [act("F", 0, 0), act("SEND_F", 0, 0, 1, 0), act("F", 0, 1)]
    other = [act("RECV_F", 1, 0, 0, 0), act("F", 1, 0)]
    send, receive = act("SEND_F", 0, 1, 1, 1), act("RECV_F", 2, 0, 1, 2)
    back, take = act("SEND_F", 1, 0, 0, 2), act("RECV_F", 1, 1, 0, 1)
    bad = (
        Program(device=0, actions=(*start, send, receive)),
        Program(device=1, actions=(*other, back, take)),
    )
    stuck = dry_run(instance, bad)
    assert stuck is not None
    assert str(stuck) == (
        "device 0 waits in SEND_F0.1 for device 1; device 1 waits in SEND_F1.0 for device 0"
    )
    good = (bad[0], Program(device=1, actions=(*other, take, back)))
    assert dry_run(instance, good) is None


def test_messages_in_another_order_are_caught() -> None:
    """Device 1 receives micro-batch 1 before 0: a transport that pairs by order would swap the data."""
    plan = small_plan()
    actions = list(plan.programs[1].actions)
    first, second = (i for i, a in enumerate(actions) if a.op == "RECV_F")
    actions[first], actions[second] = actions[second], actions[first]
    assert "deadlock" in rules(changed(plan, 1, actions))


def test_a_receive_behind_its_consumer_is_caught() -> None:
    """F1.0 before its RECV_F: device 1 waits in F1.0."""
    plan = small_plan()
    actions = list(plan.programs[1].actions)
    actions.sort(key=lambda action: str(action) != "F1.0")  # to the front, all else as it was
    assert [str(a) for a in actions[:2]] == ["F1.0", "RECV_F1.0"]
    stuck = dry_run(plan.instance, changed(plan, 1, actions).programs)
    assert stuck is not None
    assert "device 1 waits in F1.0" in str(stuck)


def test_message_errors_are_named() -> None:
    """A message twice, one too many, one on the wrong device: each is a violation that names it."""
    plan = small_plan()
    actions = list(plan.programs[0].actions)
    send = next(a for a in actions if a.op == "SEND_F")
    twice = check_plan(changed(plan, 0, [*actions, send]))
    assert "messages: device 0: SEND_F0.0 appears twice" in [str(v) for v in twice]
    extra = send.model_copy(update={"microbatch": 5})
    needless = check_plan(changed(plan, 0, [*actions, extra]))
    assert "messages: device 0: SEND_F0.5 is not needed there" in [str(v) for v in needless]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"makespan": 1.0}, "makespan is stated as 1"),
        ({"span": 1.0}, "span is stated as 1"),
        ({"gap": 0.5}, "gap is stated as 0.5"),
        ({"peak_memory": (0.0, 1.0)}, "peak_memory[0] is stated as 0, the programs give 2"),
        ({"lower_bound": 99.0, "gap": 0.0}, "lower_bound 99 is above"),
        ({"status": "optimal"}, "status is optimal but the gap is 100%"),
        ({"makespan": float("nan")}, "makespan is stated as nan"),
    ],
)
def test_wrong_figures_are_named(change: dict[str, Any], says: str) -> None:
    """Every figure of the file is recomputed: makespan, span, gap, peaks, bound and status."""
    plan = small_plan()
    assert check_plan(plan) == []
    messages = [v.message for v in check_plan(plan.model_copy(update=change))]
    assert any(says in message for message in messages), messages


def test_status_follows_from_the_bound() -> None:
    """p = 2, m = 2, hop 0.5: 1F1B takes 2 * 3 + 2 + 2 * 0.5 = 9: optimal with that bound, else feasible."""
    assert small_plan().makespan == 9.0
    assert small_plan(lower_bound=9.0).status == "optimal"
    assert small_plan(lower_bound=9.0 * (1 + 1e-12)).lower_bound == 9.0
    plan = small_plan(lower_bound=7.2)
    assert (plan.status, plan.gap) == ("feasible", pytest.approx(0.2))


def test_an_invalid_schedule_makes_no_plan() -> None:
    """A schedule over its cap is refused with the rule that it breaks."""
    instance = equal_stages(2, 2, t_comm=0.5)
    schedule = simulate(instance, one_f_one_b(instance))
    with pytest.raises(InfeasibleError, match="not valid: memory: device 0: 2 MiB"):
        plan_of(instance.with_changes(memory_cap=1.0), schedule)


def test_a_plan_file_reads_back(tmp_path: Path) -> None:
    """Save and load: the same plan, one action a line."""
    plan = small_plan()
    path = tmp_path / "plan.json"
    plan.save(path)
    assert load_plan(path) == plan
    lines = path.read_text().splitlines()
    assert sum('"op"' in line for line in lines) == sum(len(p.actions) for p in plan.programs)


def test_a_bad_plan_file_is_refused_in_one_line(tmp_path: Path) -> None:
    """Unknown field, unknown op, wrong programs, bad instance: the line names file and field."""
    path = tmp_path / "plan.json"

    def refuse(data: dict[str, Any]) -> str:
        path.write_text(json.dumps(data))
        with pytest.raises(InputError) as caught:
            load_plan(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: ")
        assert "\n" not in message
        return message.removeprefix(f"{path}: ")

    good = small_plan().to_json_dict()
    assert refuse({**good, "colour": 1}) == "colour: unknown field: remove it or correct its spelling"
    assert "schema" in refuse({**good, "schema": "zbsolve.plan/9"})
    assert refuse({k: v for k, v in good.items() if k != "span"}) == "span: missing: add it"
    assert "give one program for each device 0 to 1" in refuse({**good, "programs": good["programs"][:1]})
    assert "peak_memory has 1 entries: give 2" in refuse({**good, "peak_memory": [1.0]})
    bad_op = json.loads(json.dumps(good))
    bad_op["programs"][1]["actions"][2]["op"] = "X"
    line = refuse(bad_op)
    assert line.startswith("programs[1].actions[2].op: Input should be 'F', 'R', 'B', 'W', 'BW', 'SEND_F', ")
    assert line.endswith("(given 'X')")
    bad_stage = json.loads(json.dumps(good))
    bad_stage["instance"]["stages"][1]["t_f"] = -1
    assert refuse(bad_stage).startswith("instance: stages[1].t_f: ")
    assert refuse({**good, "lower_bound": float("nan")}).startswith("lower_bound: ")
    assert refuse({"schema": "zbsolve.instance/1"}) == ("is an instance, not a plan: give a plan")


def test_tampering_is_found() -> None:
    """A start moved by hand breaks a rule; digests of different programs differ."""
    plan = small_plan()
    actions = list(plan.programs[1].actions)
    place = next(i for i, a in enumerate(actions) if a.op == "F")
    moved = actions[place]
    actions[place] = moved.model_copy(update={"start": moved.start - 0.5, "end": moved.end - 0.5})
    broken = changed(plan, 1, actions)
    assert rules(broken) == {"dependency"}
    assert broken.digest() != plan.digest()


def test_a_message_time_changed_by_hand_is_found() -> None:
    """A send that is stated to leave before its producer ends breaks a rule, and the rule is named once."""
    plan = small_plan()
    actions = list(plan.programs[0].actions)
    place = next(i for i, a in enumerate(actions) if a.op == "SEND_F")
    actions[place] = actions[place].model_copy(update={"start": actions[place].start - 0.5})
    (violation,) = check_plan(changed(plan, 0, actions))
    assert violation.rule == "messages"
    assert "SEND_F0.0 is stated from " in violation.message


def test_a_deadlock_is_named_once() -> None:
    """A missing send: the line begins with the rule, and does not repeat it."""
    plan = small_plan()
    actions = [a for a in plan.programs[0].actions if str(a) != "SEND_F0.0"]
    (line,) = [str(v) for v in check_plan(changed(plan, 0, actions)) if v.rule == "deadlock"]
    assert line.startswith("deadlock: device 0 waits in ")
