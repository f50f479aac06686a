"""The suites of instances that the benchmark runs, by name."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import NamedTuple

from zbsolve.baselines import BASELINES
from zbsolve.benchmark.random_instances import SEEDS, random_instance
from zbsolve.errors import InputError
from zbsolve.model.instance import Instance, equal_stages, load_instance
from zbsolve.model.memory import peak_memory
from zbsolve.model.objective import OBJECTIVES, Objective
from zbsolve.words import pick


@dataclass(frozen=True, slots=True)
class Case:
    """One instance and objective of a suite."""

    suite: str
    instance: Instance
    objective: Objective


def _shipped(prefix: str) -> Iterator[Instance]:
    """Instances that ship with the package, by the beginning of their names, numbers in numeric order."""
    found = [entry for entry in files("zbsolve.instances").iterdir() if entry.name.startswith(prefix)]
    for entry in sorted(found, key=lambda entry: _natural(entry.name)):
        with as_file(entry) as path:
            yield load_instance(path)


def _natural(name: str) -> list[float | str]:
    return [float(part) if part[:1].isdigit() else part for part in re.split(r"(\d+(?:\.\d+)?)", name)]


def _v_memory() -> Iterator[Instance]:
    """The ZB-V cells under less memory: shares of 1F1B's p M_B, and what V-Half and V-Min themselves hold.

    V-Half's and V-Min's own peaks differ by device: the cap is the highest.
    """
    for instance in _shipped("zbv-"):
        caps = {f"{share:g}p": share * instance.cap(0) for share in (0.5, 0.75)}
        for name in ("v-half", "v-min"):
            orders = BASELINES[name].orders(instance.with_memory_cap(None))
            caps[name] = max(peak_memory(instance, d, order) for d, order in enumerate(orders))
        for suffix, cap in caps.items():
            yield instance.with_changes(name=f"{instance.name}-{suffix}", memory_cap=cap)


def _large() -> Iterator[Instance]:
    """Steps of up to 60,000 tasks, where a time limit is hardest to keep: linear, loop and V."""
    yield equal_stages(4, 5_000, 1.0, 1.1, 0.9, 0.1, memory_cap=6.0, name="large-linear-p4-m5000")
    loop = equal_stages(32, 512, 1.0, 1.1, 0.9, 0.1)
    stages = [stage.model_copy(update={"device": s % 8}) for s, stage in enumerate(loop.stages)]
    loop = loop.with_changes(stages=stages, num_devices=8)
    for cap in (40.0, 9.0):
        yield loop.with_changes(name=f"large-loop-p8-m512-{cap:g}", memory_cap=cap)
    for name in ("zbv-p32-m256", "zb-28.3B-m256-2p", "unequal-8-m64-1p"):
        (instance,) = _shipped(f"{name}.json")
        yield instance


class Suite(NamedTuple):
    """Instances that belong together, made when they are asked for."""

    summary: str
    instances: Callable[[], Iterator[Instance]]


SUITES: dict[str, Suite] = {
    "published": Suite("the Zero Bubble paper's cells, caps of 1 and 2 p M_B", lambda: _shipped("zb-")),
    "published-v": Suite("its cells of the V placement, cap p M_B", lambda: _shipped("zbv-")),
    "v-memory": Suite("the same under less memory: shares of it, V-Half's and V-Min's own", _v_memory),
    "unequal": Suite("a profile of 8 unequal stages, caps of 0.75 to 2 p M_B", lambda: _shipped("unequal-")),
    "random": Suite(
        "random instances of unequal stages, placements and caps", lambda: map(random_instance, SEEDS)
    ),
    "large": Suite("up to 60,000 tasks, where a time limit is hardest to keep", _large),
}


def make_cases(
    suite: str, only: Sequence[str] = (), objectives: Sequence[Objective] = OBJECTIVES
) -> list[Case]:
    """The cases of a suite ("all" for every one), restricted to names or patterns such as ``zb-1.5B-*``.

    Raises
    ------
    InputError
        Unknown suite, or a name that is not in it.
    """
    suite = pick(suite, (*SUITES, "all"), "suite")
    names = list(SUITES) if suite == "all" else [suite]
    instances = [(name, instance) for name in names for instance in SUITES[name].instances()]
    for pattern in only:
        if not any(fnmatch.fnmatchcase(instance.name, pattern) for _, instance in instances):
            raise InputError(
                f"--only {pattern}: the suite {suite!r} has no such instance: "
                f"it has {', '.join(instance.name for _, instance in instances[:3])}, …"
            )
    return [
        Case(name, instance, objective)
        for name, instance in instances
        if not only or any(fnmatch.fnmatchcase(instance.name, pattern) for pattern in only)
        for objective in objectives
    ]
