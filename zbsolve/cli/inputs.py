"""What several commands read: options, files, and the checks made before any work."""

from __future__ import annotations

import math
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, overload

import typer

from zbsolve import options
from zbsolve.cli.names import json_files, one_of, shipped, shipped_or_file, solvers
from zbsolve.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from zbsolve.model.instance import Instance
    from zbsolve.partition.problem import Placement as PlacementName
    from zbsolve.plan.plan import Plan
    from zbsolve.sweep.grid import Inputs
    from zbsolve.trace.trace import Trace


class Objective(StrEnum):
    """What a solver minimises."""

    makespan = "makespan"
    span = "span"


class Placement(StrEnum):
    """Which device holds which stage."""

    linear = "linear"
    loop = "loop"
    v = "v"


class ExportFormat(StrEnum):
    """Formats of other stacks."""

    torch_csv = "torch-csv"
    torch_csv_comms = "torch-csv-comms"


def load_instance(name: str, memory_cap: str | None = None) -> Instance:
    """An instance file or a shipped instance's name; under another cap where one is given."""
    from zbsolve.model.instance import load_instance

    instance = load_instance(shipped_or_file(name))
    return instance if memory_cap is None else instance.with_memory_cap(memory_cap)


@overload
def load_any(name: str) -> Instance | Plan: ...


@overload
def load_any(name: str, *, traces: Literal[True]) -> Instance | Plan | Trace: ...


def load_any(name: str, *, traces: bool = False) -> Instance | Plan | Trace:
    """An instance or a plan, or a trace where ``traces`` says so, whichever it is; read once (a pipe)."""
    from zbsolve.files.documents import read_json, require_schema
    from zbsolve.model import instance
    from zbsolve.plan import plan
    from zbsolve.trace import trace

    parsers: dict[str, Callable[[Any, str], Instance | Plan | Trace]] = {
        plan.SCHEMA: plan.parse_plan,
        instance.SCHEMA: instance.parse_instance,
    }
    if traces:
        parsers[trace.SCHEMA] = trace.parse_trace
    path = shipped_or_file(name)
    data = read_json(path)
    return parsers[require_schema(data, str(path), *parsers)](data, str(path))


def load_valid_plan(path: str) -> Plan:
    """A plan file that breaks no rule."""
    from zbsolve.plan.plan import load_plan

    plan = load_plan(path)
    require_valid(plan, path)
    return plan


def check_writable(path: Path | None) -> None:
    """Refuse an output that cannot be written before the work is done, not after."""
    from zbsolve.files.atomic import is_special

    if path is None:
        return
    if is_special(path):
        if not os.access(path, os.W_OK):
            raise InputError(f"{path}: cannot be written: choose another place")
        return
    if path.is_dir():
        raise InputError(f"{path}: is a folder: give a file name")
    folder = path.resolve().parent if path.is_symlink() else path.parent
    if not folder.is_dir():
        raise InputError(f"{path}: there is no folder {folder}: create it or choose another place")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{path}: the folder {folder} cannot be written: choose another place")


def check_folder(path: Path | None) -> None:
    """Refuse a folder to write into that can neither be used nor made."""
    if path is None:
        return
    place = path.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise InputError(f"{path}: {place} is a file, not a folder: choose another place")
    if not os.access(place, os.W_OK):
        raise InputError(f"{path}: the folder {place} cannot be written: choose another place")


PICTURES = (".png", ".svg", ".pdf")


def is_picture(path: Path) -> bool:
    """Whether a name ends as a picture's."""
    return path.suffix.lower() in PICTURES


def check_picture(path: Path | None) -> None:
    """Refuse a picture that cannot be written or whose format is unknown."""
    check_writable(path)
    if path is not None and not is_picture(path):
        raise InputError(f"{path}: unknown picture format: use {', '.join(PICTURES)}")


def require_positive(value: float, option: str) -> None:
    """Refuse seconds that are none, or never end."""
    if not 0 < value < math.inf:
        raise InputError(f"{option} {value:g}: give a positive number of seconds")


def load_profiles(layers: list[str], cluster: str) -> Inputs:
    """Layer profiles of one model and a cluster, each a file or a shipped name."""
    from zbsolve.partition.cluster import load_cluster
    from zbsolve.partition.layers import load_layers
    from zbsolve.sweep.grid import Inputs

    inputs = Inputs(
        tuple(load_layers(shipped_or_file(name, "model")) for name in layers),
        load_cluster(shipped_or_file(cluster, "cluster")),
    )
    inputs.require_one_kind()
    return inputs


def placement_names(chosen: list[Placement] | None, *default: PlacementName) -> tuple[PlacementName, ...]:
    """The placements of a repeatable option, each once; ``default`` where it is not given."""
    names = dict.fromkeys(choice.value for choice in chosen or ())
    return tuple(cast("PlacementName", name) for name in names) or default


def integers(text: str | None, option: str) -> tuple[int, ...] | None:
    """Whole numbers from 1, separated by commas; None where the option is not given."""
    return None if text is None else options.integers(text, option)


InstanceArgument = Annotated[
    str,
    typer.Argument(
        metavar="I.json", help="Instance file or shipped name.", autocompletion=shipped("instance")
    ),
]
PlanArgument = Annotated[str, typer.Argument(metavar="P.json", help="Plan file.", autocompletion=json_files)]
ObjectiveOption = Annotated[Objective, typer.Option(help="Cost to minimise.")]
CapOption = Annotated[
    str | None,
    typer.Option(metavar="X|1p|2p|none", help="Replace the instance's memory cap on every device."),
]
SolverOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto, cpsat, milp, heuristic, or a baseline's name such as 1f1b.",
        autocompletion=one_of(solvers),
    ),
]
# Solvers take seeds of 32 bits, and some count on from the one given.
SeedOption = Annotated[int, typer.Option(min=0, max=2_000_000_000, help="Random seed.")]
GapOption = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Stop when (cost - bound) / cost is this small.")
]
PlanOutput = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="P.json", help="Write the plan here.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]
LimitOption = Annotated[float, typer.Option(metavar="S", help="Seconds, kept up to 65,536 tasks.")]


def require_valid(plan: Plan, where: str) -> None:
    """Refuse a plan that breaks a rule; ``where`` (a file name) begins the error line."""
    from zbsolve.plan.check import check_plan

    violations = check_plan(plan)
    if violations:
        raise InfeasibleError(f"{where}: not valid: {violations[0]} (zbsolve check lists every violation)")
