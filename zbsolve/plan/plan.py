"""The plan: one program per device with its sends and receives, and a certificate of how good it is.

Lowering adds the messages that a schedule implies. One total order of messages, consistent with the
plan's own timeline, is fixed for all devices: each device enqueues its sends and receives in that order.
That is what makes the programs safe on transports that pair messages by order and may block a sender
(proof in :func:`order_messages`; :func:`dry_run` shows it for each plan before anything is launched).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    ValidationError,
    model_validator,
)

from zbsolve.files.atomic import write_text_atomically
from zbsolve.files.documents import raise_first, read_document
from zbsolve.files.models import FileModel, JsonTuple
from zbsolve.model.instance import Instance, parse_instance
from zbsolve.model.objective import Objective, is_span
from zbsolve.model.schedule import Schedule, TimedTask
from zbsolve.plan.actions import Action, Finite, Program, task_of
from zbsolve.plan.certificate import Proof, SolverInfo
from zbsolve.plan.queues import Queue

SCHEMA = "zbsolve.plan/1"


class Plan(FileModel):
    """A schedule for an instance, lowered and certified. Times in the instance's unit.

    ``gap`` is (cost - lower bound) / cost for the stated objective; ``status`` is "optimal" only
    when the proof closed it. ``queue`` names the queue model whose waits the times contain
    (:mod:`zbsolve.plan.queues`); "unlimited" has none.
    """

    schema_: Literal["zbsolve.plan/1"] = Field(default="zbsolve.plan/1", alias="schema")
    instance: Instance
    objective: Objective
    status: Literal["optimal", "feasible"]
    makespan: Finite
    span: Finite
    lower_bound: Finite
    gap: Finite
    bound_proof: Proof
    solver: SolverInfo
    peak_memory: JsonTuple[Finite]
    programs: JsonTuple[Program]
    queue: Queue = "unlimited"

    @model_validator(mode="after")
    def _one_program_per_device(self) -> Plan:
        p = self.instance.num_devices
        if [program.device for program in self.programs] != list(range(p)):
            raise ValueError(f"programs: give one program for each device 0 to {p - 1}, in order")
        if len(self.peak_memory) != p:
            raise ValueError(f"peak_memory has {len(self.peak_memory)} entries: give {p} (one per device)")
        return self

    @property
    def cost(self) -> float:
        """Value of the plan's own objective."""
        return self.span if is_span(self.objective) else self.makespan

    def schedule(self) -> Schedule:
        """The timed compute tasks, without messages."""
        return Schedule(
            tuple(
                tuple(TimedTask(task_of(a), a.start, a.end) for a in program.actions if a.is_compute)
                for program in self.programs
            )
        )

    def to_json_dict(self) -> dict[str, Any]:
        """JSON data in the file format's field order."""
        return {
            "schema": SCHEMA,
            "instance": self.instance.to_json_dict(),
            "objective": self.objective,
            "status": self.status,
            "makespan": self.makespan,
            "span": self.span,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "bound_proof": self.bound_proof.model_dump(mode="json", exclude_none=True),
            "solver": self.solver.model_dump(exclude_none=True),
            "peak_memory": list(self.peak_memory),
            "queue": self.queue,
            "programs": [
                {"device": program.device, "actions": [_action_json(a) for a in program.actions]}
                for program in self.programs
            ],
        }

    def to_json(self) -> str:
        """The plan file's text: one action a line, so that plans can be read and compared."""
        data = self.to_json_dict()
        programs = data.pop("programs")
        head = json.dumps(data, indent=1)[:-2]
        blocks = [
            f'  {{"device": {program["device"]}, "actions": [\n'
            + ",\n".join("   " + json.dumps(action) for action in program["actions"])
            + "\n  ]}"
            for program in programs
        ]
        return head + ',\n "programs": [\n' + ",\n".join(blocks) + "\n ]\n}\n"

    def save(self, path: str | Path) -> None:
        """Write the plan file, whole or not at all."""
        write_text_atomically(path, self.to_json())

    def digest(self) -> str:
        """SHA-256 of programs and instance: ranks compare it before they start."""
        data = self.to_json_dict()
        text = json.dumps({"instance": data["instance"], "programs": data["programs"]}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _action_json(action: Action) -> dict[str, Any]:
    data: dict[str, Any] = {
        "op": action.op,
        "stage": action.stage,
        "microbatch": action.microbatch,
        "start": action.start,
        "end": action.end,
    }
    if action.peer is not None:
        data["peer"] = action.peer
        data["message"] = action.message
    return data


def load_plan(path: str | Path) -> Plan:
    """Read a plan file; the format is validated here, the rules by :func:`check_plan`."""
    return parse_plan(read_document(path, SCHEMA), str(path))


def parse_plan(data: Any, where: str) -> Plan:
    """Validate JSON data. ``where`` (a file name) begins the error line."""
    if isinstance(data, dict) and isinstance(data.get("instance"), dict):
        data = {**data, "instance": parse_instance(data["instance"], f"{where}: instance")}
    try:
        return Plan.model_validate(data)
    except ValidationError as error:
        raise_first(error, where)


# By whether it sends, and the direction.
