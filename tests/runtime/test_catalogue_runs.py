"""Every schedule of the catalogue that the runtime executes, with every gradient compared."""

from __future__ import annotations

import pytest

from zbsolve.baselines import BASELINES
from zbsolve.baselines.formulas import Sizes, instance_for
from zbsolve.plan.plan import Plan
from zbsolve.runtime.api import RunOptions, run_plan, train
from zbsolve.solver.portfolio import certify


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
    assert trace.gradients.equal, trace.gradients
    assert trace.gradients.bit_equal or plan.instance.replicas > 1, trace.gradients


@pytest.mark.parametrize("name", BASELINES)
def test_gradients_of_each_schedule_on_two_ranks(name: str) -> None:
    """p = 2, m = 4: split, fused, recomputed backwards, loops, Vs, two replicas, F&B pairs in turn."""
    run(plan_of(name, 2, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zb-h2", "v-min", "dualpipe-v"])
def test_gradients_on_four_ranks(name: str) -> None:
    """p = 4, m = 8."""
    run(plan_of(name, 4, 8))


def test_a_bidirectional_run_trains_like_one_pipeline() -> None:
    """DualPipe's two copies of each stage keep equal weights: losses follow those of one copy on all rows."""
    settings = {"model": "runtime_cases:trainable_two", "steps": 6, "warmup": 0, "timeout": 60.0}
    options = RunOptions(**settings, learning_rate=0.05, clip=0.3)  # type: ignore[arg-type]
    twice = plan_of("dualpipe", 2, 4)
    losses = train(twice, options).trace.losses
    # The same four micro-batches, two through each copy, through one copy of the two stages.
    once = plan_of("1f1b", 2, 4)
    assert (twice.instance.replicas, twice.instance.total_microbatches) == (2, 4)
    assert losses == pytest.approx(train(once, options).trace.losses, rel=1e-5)
