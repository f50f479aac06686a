"""Two hosts, as far as one machine can have them: network namespaces with a link, under torchrun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zbsolve.endtoend.demo import emulated_instance
from zbsolve.plan.plan import Plan
from zbsolve.runtime.api import ProfileOptions, profile_model
from zbsolve.solver.portfolio import solve
from zbsolve.trace.compare import compare
from zbsolve.trace.trace import Trace, load_trace

HOSTS = {"zbhost0": "10.77.31.1", "zbhost1": "10.77.31.2"}


def ip(*words: str) -> None:
    """Run Debian's ip."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def two_hosts() -> Iterator[None]:
    """Namespaces zbhost0 and zbhost1, joined by a virtual cable; skipped where that needs more rights."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    try:
        for name in HOSTS:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    try:
        ip(
            "link",
            "add",
            "zbveth0",
            "netns",
            "zbhost0",
            "type",
            "veth",
            "peer",
            "zbveth1",
            "netns",
            "zbhost1",
        )
        for number, (name, address) in enumerate(HOSTS.items()):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", f"zbveth{number}")
            ip("-n", name, "link", "set", f"zbveth{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in HOSTS:
            ip("netns", "del", name)


def run_on_two_hosts(plan: Plan, folder: Path, *options: str) -> Trace:
    """Run a plan under torchrun, its ranks spread evenly over both hosts."""
    folder.mkdir()
    plan.save(folder / "plan.json")
    trace_file = folder / "trace.json"
    processes = []
    for number, name in enumerate(HOSTS):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            "GLOO_SOCKET_IFNAME": f"zbveth{number}",
            "TP_SOCKET_IFNAME": f"zbveth{number}",
            "OMP_NUM_THREADS": "1",
        }
        # A host name of its own, so that ranks do not take each other's clock for theirs.
        command = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c"]
        command += [f'hostname {name} && exec "$@"', "sh"]
        command += [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        command += ["--nproc-per-node", str(plan.instance.num_devices // 2)]
        command += ["--node-rank", str(number), "--master-addr", HOSTS["zbhost0"], "--master-port", "29531"]
        command += ["-m", "zbsolve.runtime.worker", str(folder / "plan.json"), *options]
        command += ["--trace-out", str(trace_file)]
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    outputs = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    trace = load_trace(trace_file)
    assert trace.plan_digest == plan.digest()
    assert {event.device for event in trace.steps[0].events} == set(range(plan.instance.num_devices))
    ratio = compare(plan, trace).ratio
    print(f"{plan.instance.name}, {plan.solver.name}: measured / predicted {ratio:.3f}")
    return trace


@pytest.mark.slow
@pytest.mark.usefixtures("two_hosts")
def test_the_demo_on_two_hosts(tmp_path: Path) -> None:
    """The demo's plans under torchrun on two hosts, the emulated one with two ranks on each.

    For a profile made here, solved and 1F1B: the GPT's gradients are the reference's to the last bit.
    """
    made_here = profile_model(ProfileOptions(num_devices=2, num_microbatches=8, repeats=3))
    profile = made_here.with_memory_cap("2p")
    for name, plan in (
        ("solved", solve(profile, time_limit=5).plan),
        ("1f1b", solve(profile, solver="1f1b").plan),
    ):
        trace = run_on_two_hosts(plan, tmp_path / name, "--model", "gpt", "--steps", "3")
        assert trace.gradients is not None
        assert trace.gradients.bit_equal
    emulated = solve(emulated_instance(), time_limit=5).plan
    trace = run_on_two_hosts(emulated, tmp_path / "emulated", "--emulate", "--no-check-gradients")
    assert len({event.device for event in trace.steps[-1].events}) == 4
