"""The exported CSV in torch's own pipelining runtime: the same gradients as in this package's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import runtime_cases as cases
import torch

from zbsolve.baselines import BASELINES
from zbsolve.baselines.formulas import Sizes, instance_for
from zbsolve.plan.torch_csv import Grammar, export_torch_csv
from zbsolve.runtime.api import RunOptions, run_plan
from zbsolve.runtime.training.gradients import reference_gradients, weight_orders
from zbsolve.solver.portfolio import certify


@pytest.mark.parametrize(
    ("name", "grammar"),
    [("zb-h1", "compute_only"), ("zb-v", "compute_comms"), ("dualpipe-v", "compute_comms")],
)
def test_torch_runs_the_exported_schedule(name: str, grammar: Grammar, tmp_path: Path) -> None:
    """Linear, V and paired schedules of p = 2, m = 4: torch's gradients are the reference's, and ours are.

    Lowered files run with our messages, in our order.
    """
    instance, schedule = BASELINES[name].schedule(instance_for(name, Sizes(2, 4)))
    plan = certify(instance, schedule, "makespan", name)
    (tmp_path / "plan.csv").write_text(export_torch_csv(instance, schedule, grammar=grammar).text)
    layout = ";".join(",".join(map(str, instance.stages_on(d))) for d in range(2))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    script = Path(__file__).parent / "torch_ranks.py"
    command = [sys.executable, str(script), str(tmp_path / "plan.csv"), grammar, layout, "4", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr

    trace = run_plan(plan, RunOptions(model="runtime_cases:eight_linear", steps=1, warmup=0, timeout=60.0))
    assert trace.gradients is not None
    assert trace.gradients.bit_equal
    for program in plan.programs:
        torch.manual_seed(0)
        expected = reference_gradients(
            cases.eight_linear(),
            (8 // instance.num_stages,) * instance.num_stages,
            weight_orders(program),
            seed=0,
            step=0,
            count=4,
            device=torch.device("cpu"),
        )
        for stage, gradients in expected.items():
            for ours, theirs in zip(gradients, torch.load(tmp_path / f"{stage}.pt"), strict=True):
                assert ours is not None
                torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-8)
