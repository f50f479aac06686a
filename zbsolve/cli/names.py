"""Names that people type: what ships, schedules, solvers, suites; and how a shell completes them."""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Callable, Collection
from enum import StrEnum
from pathlib import Path
from typing import Any

from zbsolve.errors import InputError
from zbsolve.words import alike, pick, spelled

Completion = Callable[[str], list[str]]


class Kind(StrEnum):
    """What there are names of."""

    schedules = "schedules"
    instances = "instances"
    models = "models"
    clusters = "clusters"
    suites = "suites"


def shipped_files(kind: str = "instance") -> dict[str, Any]:
    """What ships with the package, by name: instances, models (``model-…``) or clusters (``cluster-…``)."""
    from importlib.resources import files

    found = {}
    for entry in files("zbsolve.instances").iterdir():
        prefix = entry.name.partition("-")[0]
        of_kind = prefix == kind if kind != "instance" else prefix not in ("model", "cluster")
        if entry.name.endswith(".json") and entry.name != "known.json" and of_kind:
            found[entry.name.removesuffix(".json")] = entry
    return dict(sorted(found.items()))


def shipped_or_file(name: str, kind: str = "instance") -> Path:
    """A file (``-``: standard input), or one that ships with the package, by its name."""
    if name == "-" or (name and (Path(name).exists() or "/" in name or name.endswith(".json"))):
        return Path(name)
    shipped = shipped_files(kind)
    found = spelled(name, shipped)
    if found is None:
        close = alike(name, shipped)
        hint = f"did you mean {close}?" if close else f"one of: {', '.join(shipped)}"
        raise InputError(f"{name!r}: no such file and no shipped {kind}: give a file, or {hint}")
    return Path(str(shipped[found]))


def solvers() -> Collection[str]:
    """Solvers, then baselines, among them every ``interleaved:N``."""
    from zbsolve.baselines import BASELINES
    from zbsolve.solver.portfolio import SOLVERS

    return ChainMap[str, Any](BASELINES, SOLVERS)  # the last one's names come first


def solver_named(name: str) -> str:
    """The solver or baseline that is meant, in any case."""
    return pick(name, solvers(), "solver")


def listed(kind: Kind) -> dict[str, str]:
    """Every name of a kind, with a few words about it."""
    if kind is Kind.schedules:
        from zbsolve.baselines import BASELINES

        return {name: baseline.summary for name, baseline in BASELINES.items()}
    if kind is Kind.suites:
        from zbsolve.benchmark.suites import SUITES

        return {name: suite.summary for name, suite in SUITES.items()}
    about = {Kind.instances: _about_instance, Kind.models: _about_model, Kind.clusters: _about_cluster}[kind]
    files = shipped_files(kind.removesuffix("s"))
    return {name: about(json.loads(file.read_text(encoding="utf-8"))) for name, file in files.items()}


def _about_instance(data: dict[str, Any]) -> str:
    cap = data.get("memory_cap")
    unit = data["memory_unit"]
    capped = "no cap" if cap is None else "a cap each" if isinstance(cap, list) else f"cap {cap:g} {unit}"
    stages = f"{len(data['stages'])} stages on {data['num_devices']} devices"
    return f"{stages}, {data['num_microbatches']} micro-batches, {capped}"


def _about_model(data: dict[str, Any]) -> str:
    return f"{data['name']}: {len(data['layers'])} layers"


def _about_cluster(data: dict[str, Any]) -> str:
    groups = (f"{group.get('count', 1)} x {group.get('name', 'device')}" for group in data["devices"])
    return ", ".join(groups)


# --- completion ------------------------------------------------------------------------------------


def shipped(kind: str) -> Completion:
    """Completes the name of what ships, or a file's path."""

    def complete(incomplete: str) -> list[str]:
        names = [name for name in shipped_files(kind) if name.startswith(incomplete)]
        return names + json_files(incomplete)

    return complete


def json_files(incomplete: str) -> list[str]:
    """JSON files, and folders on the way to them."""
    folder, _, start = incomplete.rpartition("/")
    root = f"{folder}/" if "/" in incomplete else ""
    try:
        entries = sorted(Path(root or ".").iterdir())
    except OSError:
        return []
    return [
        f"{root}{entry.name}" + ("/" if entry.is_dir() else "")
        for entry in entries
        if entry.name.startswith(start) and (start or not entry.name.startswith("."))
        if entry.suffix == ".json" or entry.is_dir()
    ]


def one_of(names: Callable[[], Collection[str]]) -> Completion:
    """Completes one of the names, which are asked for only then."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete
