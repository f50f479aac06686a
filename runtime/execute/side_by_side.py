"""A plan's devices as parts of one: its programs as a single one, and what is measured told apart again.

All ops of all devices are issued by one process in the order of the plan's timeline; each device's ops run
in its own order on a lane of its own (:func:`zbsolve.runtime.execute.lanes.arrange_devices`). There are no
messages: what a stage hands on stays where it is, and whoever needs it waits for the op that makes it.
"""

from __future__ import annotations

import math
from typing import Any

from zbsolve.errors import InputError
from zbsolve.model.graph import Task, predecessors
from zbsolve.model.simulator import topological_order
from zbsolve.plan.actions import Action, Program, task_of
from zbsolve.plan.plan import Plan
from zbsolve.runtime.execute.executor import pairs_of


def on_one_device(plan: Plan) -> Plan:
    """The plan with all stages on device 0 and one program without messages. It is for running alone.

    Raises
    ------
    InputError
        The plan has F&B pairs: a part of a device has one lane.
    """
    for program in plan.programs:
        pair = next(iter(pairs_of(program)), None)
        if pair is not None:
            raise InputError(
                f"the plan runs {pair[0]} and {pair[1]} as a pair, and a part of a GPU runs one op at a "
                "time: solve an instance without t_fb, or leave green_contexts out"
            )
    instance = plan.instance
    stages = [stage.model_copy(update={"device": 0}) for stage in instance.stages]
    one = instance.with_changes(num_devices=1, stages=stages, memory_cap=None, static_mem=None)
    program = Program(device=0, actions=tuple(_by_time(plan)))
    return plan.model_copy(update={"instance": one, "programs": (program,)})


def _by_time(plan: Plan) -> list[Action]:
    """All compute actions by their start, each behind what it needs even where that is a rounding later."""
    actions = {
        task_of(action): action
        for program in plan.programs
        for action in program.actions
        if action.is_compute
    }
    ready: dict[Task, tuple[float, int]] = {}
    last_on: dict[int, float] = {}
    for place, (device, task) in enumerate(topological_order(plan.instance, plan.schedule().orders)):
        needed = [ready[e.before][0] for e in predecessors(plan.instance, task) if e.before in ready]
        start = max([actions[task].start, last_on.get(device, -math.inf), *needed])
        ready[task], last_on[device] = (start, place), start
    return [actions[task] for task in sorted(ready, key=lambda task: ready[task])]


def told_apart(part: dict[str, Any], plan: Plan, one: Plan) -> list[dict[str, Any]]:
    """What the one process measured (JSON data) as if each device of the plan had."""
    instance = plan.instance
    device_of = [stage.device for stage in instance.stages]
    homes = [device_of[action.stage] for action in one.programs[0].actions]
    parts = []
    for device in range(instance.num_devices):

        def of_stages(entries: list[list[Any]], device: int = device) -> list[list[Any]]:
            return [entry for entry in entries if device_of[entry[0]] == device]

        def of_ops(values: list[Any], device: int = device) -> list[Any]:
            return [value for value, home in zip(values, homes, strict=True) if home == device]

        parts.append(
            part
            | {
                "steps": [
                    step | {"ops": of_ops(step["ops"]), "loss": step["loss"] if device == 0 else None}
                    for step in part["steps"]
                ],
                "difference": part["difference"] if device == 0 else None,
                "held": [of_stages(entries) for entries in part["held"]],
                "rises": {op: of_stages(entries) for op, entries in part["rises"].items()},
                "split": of_stages(part["split"]),
                "static": part["static_of"][device],
                "levels": of_ops(part["levels"]),
                "highest": of_ops(part["highest"]),
            }
        )
    return parts
