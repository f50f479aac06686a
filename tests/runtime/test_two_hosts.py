"""Two hosts, as far as one machine can have them: network namespaces with a link, under torchrun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import runtime_cases as cases

from zbsolve.trace import load_trace

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


@pytest.mark.slow
@pytest.mark.usefixtures("two_hosts")
def test_two_hosts_under_torchrun(tmp_path: Path) -> None:
    """torchrun on two hosts, a rank on each: the GPT's gradients are the reference's to the last bit."""
    plan = cases.plan(cases.instance(2, 4), cases.zb_orders(2, 4))
    plan.save(tmp_path / "plan.json")
    trace_file = tmp_path / "trace.json"
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
        command += [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        command += ["--node-rank", str(number), "--master-addr", HOSTS["zbhost0"], "--master-port", "29531"]
        command += ["-m", "zbsolve.runtime.worker", str(tmp_path / "plan.json"), "--model", "gpt"]
        command += ["--steps", "2", "--trace-out", str(trace_file)]
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    outputs = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    trace = load_trace(trace_file)
    assert trace.plan_digest == plan.digest()
    assert trace.gradients is not None
    assert trace.gradients.bit_equal
    assert {event.device for event in trace.steps[0].events} == {0, 1}
