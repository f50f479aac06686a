"""Queue models of the transport: worked by hand, over the catalogue, and under blocking sends."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.test_plan import plan_of
from tests.test_simulator import one_f_one_b
from zbsolve.baselines import BASELINES
from zbsolve.baselines.formulas import Sizes, instance_for, placement_of
from zbsolve.errors import InfeasibleError
from zbsolve.model.graph import Task, predecessors
from zbsolve.model.instance import Instance, equal_stages, make_instance
from zbsolve.model.judge import check
from zbsolve.model.kinds import BW, B, F, W
from zbsolve.model.simulator import simulate
from zbsolve.plan.actions import Program
from zbsolve.plan.check import check_plan
from zbsolve.plan.lowering import dry_run, lower
from zbsolve.plan.make import assume_queue
from zbsolve.plan.plan import Plan
from zbsolve.plan.queues import QUEUES, Queue, time_on_queues


def test_a_chain_needs_one_queue_by_hand() -> None:
    """p = 3, m = 2, hop 1: transfers 0, 1, 2 are on the wire at 1-2, 2-3, 3-4, whatever the queue.

    F0.0 0-1 and F0.1 1-2 are sent at once; F1.0 runs 2-3 and leaves at 3. Device 1 has one transfer at a
    time, so that one queue for all costs nothing.
    """
    instance = equal_stages(3, 2, t_comm=1.0)
    orders = [
        [Task(F, 0, 0), Task(F, 0, 1), Task(B, 0, 0), Task(W, 0, 0), Task(B, 0, 1), Task(W, 0, 1)],
        [Task(F, 1, 0), Task(F, 1, 1), Task(B, 1, 0), Task(W, 1, 0), Task(B, 1, 1), Task(W, 1, 1)],
        [Task(F, 2, 0), Task(B, 2, 0), Task(W, 2, 0), Task(F, 2, 1), Task(B, 2, 1), Task(W, 2, 1)],
    ]
    schedule = simulate(instance, orders)
    programs = lower(instance, schedule)
    assert time_on_queues(instance, programs, "unlimited").makespan == schedule.makespan
    timing = time_on_queues(instance, programs, "shared")
    assert [(t.start, t.end) for t in timing.transfers[:3]] == [(1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]
    assert timing.makespan == schedule.makespan


def test_a_shared_queue_serialises_by_hand() -> None:
    """One device feeds two others at the same moment: one queue sends one after the other.

    Device 0 holds stages 0 and 2, device 1 stages 1 and 3 (loop), hop 2, one micro-batch; F takes 1.
    Messages: F0 (0-1), on the wire 1-3; F1 3-4, wire 4-6; F2 6-7, wire 7-9; F3 9-10, back B3 10-11, wire
    11-13, ... one micro-batch never has two messages at once. With two micro-batches F0.1 ends at 2: its
    transfer is 2-4 unhindered, and 3-5 behind the first in any queue of that pair and direction. So
    F1.1 starts at 5 instead of 4.
    """
    instance = equal_stages(2, 2, t_comm=2.0)
    orders = [[Task(kind, d, j) for kind in (F, B, W) for j in range(2)] for d in range(2)]
    programs = lower(instance, simulate(instance, orders))
    starts = {}
    for queue in QUEUES:
        timing = time_on_queues(instance, programs, queue)
        assert check(instance, timing.schedule) == []
        starts[queue] = next(t.start for t in timing.schedule.devices[1] if t.task == Task(F, 1, 1))
    assert starts == {"unlimited": 4.0, "direction": 5.0, "pair": 5.0, "shared": 5.0}


def plan_on_hops(name: str, p: int, hop: float) -> Plan:
    """A schedule of the catalogue at unit times (a loop has two chunks per device), 2 p micro-batches."""
    sizes = Sizes(p, 2 * p, 2 if placement_of(name) == "loop" else 1)
    instance, schedule = BASELINES[name].schedule(instance_for(name, sizes).with_changes(t_comm=hop))
    return plan_of(instance, schedule)


@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize("name", BASELINES)
def test_catalogue_keeps_its_makespan_on_queues(name: str, p: int) -> None:
    """Every schedule of the catalogue stays within 1.03 of its ideal makespan under every queue model."""
    plan = plan_on_hops(name, p, 0.1)
    for queue in QUEUES:
        timing = time_on_queues(plan.instance, plan.programs, queue)
        assert timing.makespan <= 1.03 * plan.makespan + 1e-9, queue
        assert timing.makespan >= plan.makespan - 1e-9, queue
    assert time_on_queues(plan.instance, plan.programs, "unlimited").makespan == pytest.approx(plan.makespan)


def test_a_plan_says_which_queue_it_assumes(tmp_path: Path) -> None:
    """Times on queues are a valid plan of their own that passes every check and survives its file."""
    instance = equal_stages(2, 2, t_comm=2.0)
    orders = [[Task(kind, d, j) for kind in (F, B, W) for j in range(2)] for d in range(2)]
    plan = plan_of(instance, simulate(instance, orders))
    assert plan.queue == "unlimited"
    longer = assume_queue(plan, "shared")
    assert longer.queue == "shared"
    assert longer.makespan > plan.makespan
    assert check_plan(longer) == []
    again = Plan.model_validate(
        longer.to_json_dict() | {"instance": longer.instance, "programs": longer.programs}
    )
    assert again.queue == "shared"
    # The unhindered message times do not fit the stated assumption, and the other way round.
    assert {v.rule for v in check_plan(plan.model_copy(update={"queue": "shared"}))} == {"messages"}
    assert "messages" in {v.rule for v in check_plan(longer.model_copy(update={"queue": "unlimited"}))}


# --- random plans under blocking sends ------------------------------------------------------------


def random_plan_programs(rng: random.Random) -> tuple[Instance, tuple[Program, ...]]:
    """A random valid plan: any placement, times, hops and order; some backwards fused."""
    p, m = rng.randint(2, 5), rng.randint(1, 6)
    count = rng.randint(p, 2 * p + 1)
    homes = [*range(p), *(rng.randrange(p) for _ in range(count - p))]
    rng.shuffle(homes)
    stages = []
    for device in homes:
        f, b, w = (rng.choice([0.0, 0.5, 1.0, 1.0, 2.0]) for _ in range(3))
        stages.append({"device": device, "t_f": f, "t_b": b, "t_w": w, "t_bw": b + w})
    hops = [rng.choice([0.0, 0.1, 0.5, 2.0]) for _ in homes[1:]]
    instance = make_instance(num_devices=p, num_microbatches=m, stages=stages, t_comm=hops)
    left: dict[Task, int] = {}
    after: dict[Task, list[Task]] = {}
    for s in range(count):
        for j in range(m):
            for kind in (F, BW) if rng.random() < 0.3 else (F, B, W):
                left[Task(kind, s, j)] = 0
    for task in left:
        for edge in predecessors(instance, task):
            if edge.before in left:
                left[task] += 1
                after.setdefault(edge.before, []).append(task)
    ready = [task for task, waits in left.items() if not waits]
    orders: list[list[Task]] = [[] for _ in range(p)]
    while ready:
        task = ready.pop(rng.randrange(len(ready)))
        orders[instance.stages[task.stage].device].append(task)
        for follower in after.get(task, ()):
            left[follower] -= 1
            if not left[follower]:
                ready.append(follower)
    return instance, lower(instance, simulate(instance, orders))


def test_a_thousand_random_plans_never_deadlock() -> None:
    """1,000 random valid plans end with blocking sends, and on every queue model."""
    rng = random.Random(4)
    messages, ops = 0, set()
    for _ in range(1000):
        instance, programs = random_plan_programs(rng)
        stuck = dry_run(instance, programs)
        assert stuck is None, stuck
        queue: Queue = rng.choice(QUEUES)
        timing = time_on_queues(instance, programs, queue)
        messages += len(timing.transfers)
        ops |= {action.op for program in programs for action in program.actions}
    assert messages > 20_000  # so that there was something to block
    assert {"B", "BW", "W"} <= ops


def test_a_circle_of_queues_is_refused() -> None:
    """Receives in another order than the sends, on one queue: a circle, refused in one line."""
    instance = equal_stages(2, 2, t_comm=0.5)
    programs = lower(instance, simulate(instance, one_f_one_b(instance)))
    actions = list(programs[1].actions)
    first, second = (i for i, a in enumerate(actions) if a.op == "RECV_F")
    actions[first], actions[second] = actions[second], actions[first]
    swapped = programs[1].model_copy(update={"actions": tuple(actions)})
    with pytest.raises(InfeasibleError, match="the message order deadlocks"):
        time_on_queues(instance, (programs[0], swapped), "shared")
