"""What this installation can do here: versions, solvers tried, torch, GPUs, and what will not work.

Every solver is tried on a tiny instance with a known optimum; torch is asked in a process of its own. Nothing
is measured: how fast a machine is, ``zbsolve profile`` says.
"""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version

from zbsolve import __version__
from zbsolve.errors import ZbsolveError
from zbsolve.formulations.backend import Backend, Question
from zbsolve.formulations.backends import BACKENDS
from zbsolve.formulations.common import Status
from zbsolve.model.instance import equal_stages
from zbsolve.model.simulator import simulate
from zbsolve.model.tolerances import same_figure

TORCH_PATIENCE = 120.0


class State(StrEnum):
    """How a part is: there and working, not there, or there and not working."""

    OK = "ok"
    ABSENT = "absent"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """One part: what was found, and what does not work without it (empty where nothing is amiss)."""

    part: str
    state: State
    found: str
    consequence: str = ""


def examine() -> Iterator[Finding]:
    """Every part in turn; each can take a second or two."""
    yield Finding("zbsolve", State.OK, f"{__version__}, Python {platform.python_version()}")
    yield Finding("machine", State.OK, f"{platform.system()} {platform.machine()}, {_cores()} cores to use")
    yield from map(_solver, _solvers())
    yield _package("numba", "long searches run as plain Python, some 50 times slower")
    yield _package("matplotlib", "pictures (show -o x.png) do not work")
    yield _package("starlette", "playground does not work", 'pip install "zbsolve[playground]"')
    yield from _torch()
    yield _loopback()


def can_plan(findings: list[Finding]) -> bool:
    """Whether at least one exact solver works: without any, plans have weaker certificates."""
    solvers = {backend.title for backend in _solvers()}
    return any(finding.part in solvers and finding.state is State.OK for finding in findings)


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _package(name: str, consequence: str, mend: str = "") -> Finding:
    try:
        return Finding(name, State.OK, version(name))
    except PackageNotFoundError:
        return Finding(name, State.ABSENT, "not installed", f"{consequence}: {mend or f'pip install {name}'}")


# --- solvers -------------------------------------------------------------------------------------

# Two stages, two micro-batches, all ones: device 1 has 6 of work and starts after one F: 7.
TINY = equal_stages(2, 2)
KNOWN_OPTIMUM = 7.0


def _solvers() -> list[Backend]:
    """The exact models that know the tiny instance: those with options need no library of their own."""
    return [backend for backend in BACKENDS if backend.models(TINY)]


def _solver(backend: Backend) -> Finding:
    """A solver is found when it proves the known optimum, not when it can be imported."""
    part, package, consequence = backend.title, backend.package, backend.without
    try:
        release = version(package)
    except PackageNotFoundError:
        return Finding(part, State.ABSENT, "not installed", f"{consequence}: pip install {package}")
    try:
        result = backend.solve(Question(instance=TINY, objective="makespan", time_limit=20.0))
    except (ImportError, ZbsolveError) as error:
        reason = " ".join(str(error).split())
        return Finding(part, State.BROKEN, f"{package} {release}", f"{consequence}: {reason}")
    cost = simulate(TINY, result.orders).makespan if result.orders is not None else math.inf
    if result.status is not Status.OPTIMAL or not same_figure(cost, KNOWN_OPTIMUM):
        reason = f"says {result.native_status} of {cost:g}, the optimum is {KNOWN_OPTIMUM:g}"
        return Finding(part, State.BROKEN, f"{package} {release}", f"{consequence}: {reason}")
    return Finding(part, State.OK, f"{package} {release}, solved a test instance ({result.native_status})")


# --- torch and the network -----------------------------------------------------------------------


def _torch() -> Iterator[Finding]:
    """Torch, its transports and GPUs, as a process of its own sees them."""
    without = "profile, run and demo do not work"
    try:
        release = version("torch")
    except PackageNotFoundError:
        yield Finding("torch", State.ABSENT, "not installed", f'{without}: pip install "zbsolve[runtime]"')
        return
    command = [sys.executable, "-m", "zbsolve.runtime.measure.describe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TORCH_PATIENCE)
        seen = json.loads(done.stdout) if done.returncode == 0 else None
        reason = done.stderr.strip().rsplit("\n", 1)[-1][:200]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        seen, reason = None, str(error)
    if seen is None:
        yield Finding("torch", State.BROKEN, release, f"{without}: {reason}: reinstall torch")
        return
    cuda = f", CUDA {seen['cuda']}" if seen["cuda"] else ", CPU only"
    yield Finding("torch", State.OK, f"{seen['torch']}{cuda}")
    yield _transport("gloo", seen["gloo"], "run on CPUs does not work: install another build of torch")
    yield _transport("nccl", seen["nccl"], "run on GPUs does not work: install a CUDA build of torch")
    gpus = seen["gpus"]
    yield Finding(
        "GPUs",
        State.OK if gpus else State.ABSENT,
        "; ".join(gpus) or "none",
        "" if gpus else "profile and run measure this machine's CPU",
    )


def _transport(name: str, there: bool, consequence: str) -> Finding:
    return Finding(
        name,
        State.OK if there else State.ABSENT,
        "in torch" if there else "not in torch",
        "" if there else consequence,
    )


def _loopback() -> Finding:
    """Whether processes of this machine can reach each other, as ``run`` and ``playground`` need."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5.0)
            with socket.create_connection(server.getsockname(), timeout=5.0):
                server.accept()[0].close()
    except OSError as error:
        return Finding(
            "loopback",
            State.BROKEN,
            str(error.strerror or error),
            "profile, run and playground do not work: allow 127.0.0.1",
        )
    return Finding("loopback", State.OK, "127.0.0.1 answers")
