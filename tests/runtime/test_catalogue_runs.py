"""Every schedule of the catalogue that the runtime executes, with every gradient compared."""

from __future__ import annotations

import pytest

from zbsolve.baselines import BASELINES
from zbsolve.errors import InputError
from zbsolve.formulas import Sizes, instance_for
from zbsolve.plan import Plan
from zbsolve.runtime.api import RunOptions, run_plan
from zbsolve.solver import certify

QUICK = ("zb-v",)  # starting ranks takes seconds: the others are slow tests
REFUSED = ("gpipe-r", "dualpipe")


def plan_of(name: str, p: int, m: int) -> Plan:
    """The plan of a schedule at equal times; two chunks per device in a loop."""
    sizes = Sizes(p, m, 2 if BASELINES[name].placement == "loop" else 1)
    instance, schedule = BASELINES[name].schedule(instance_for(name, sizes))
    return certify(instance, schedule, "makespan", name)


def run(plan: Plan) -> None:
    """Two steps of eight residual blocks; every gradient equals the unpipelined model's."""
    options = RunOptions(
        model="runtime_cases:eight_blocks", steps=2, warmup=0, timeout=60.0, optimizer="none"
    )
    trace = run_plan(plan, options)
    assert trace.gradients is not None
    assert trace.gradients.bit_equal, trace.gradients


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in BASELINES
        if name not in REFUSED
    ],
)
def test_gradients_of_each_schedule_on_two_ranks(name: str) -> None:
    """p = 2, m = 4: split and fused backwards, chunks in a loop and a V, F&B pairs one after the other."""
    run(plan_of(name, 2, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zb-h2", "v-min", "dualpipe-v"])
def test_gradients_on_four_ranks(name: str) -> None:
    """p = 4, m = 8."""
    run(plan_of(name, 4, 8))


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_runtime_does_not_execute_is_refused(name: str) -> None:
    """One line, before anything starts."""
    with pytest.raises(InputError, match="the runtime does not execute"):
        run_plan(plan_of(name, 2, 4), RunOptions())
