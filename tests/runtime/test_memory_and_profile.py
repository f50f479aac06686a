"""What a profile says of memory and time, held against what a run then holds and takes."""

from __future__ import annotations

import logging

import pytest
import runtime_cases as cases
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zbsolve.model.instance import equal_stages
from zbsolve.plan.plan import Plan
from zbsolve.runtime.api import ProfileOptions, RunOptions, profile_model, run_plan
from zbsolve.runtime.backward.split import Mechanism, SplitStage
from zbsolve.runtime.measure.profiler import build_instance
from zbsolve.runtime.ranks.outcome import Outcome
from zbsolve.runtime.values import TENSOR
from zbsolve.trace.memory_check import compare_memory
from zbsolve.trace.trace import Event, Step, Trace


def profiled_plan(split: Mechanism) -> Plan:
    """A plan with W's delayed, on the profile of a small model."""
    instance = profile_model(
        ProfileOptions(
            model="runtime_cases:trainable",
            num_microbatches=4,
            repeats=2,
            warmup=1,
            split=split,
            timeout=30.0,
        )
    )
    return cases.plan(instance, cases.zb_orders(2, 4))


@pytest.mark.parametrize("split", ["deferred", "generic"])
def test_memory_follows_the_plan_op_by_op(split: Mechanism) -> None:
    """After every op of a run, each device holds what the profile's plan says; a cap below that alarms."""
    plan = profiled_plan(split)
    trace = run_plan(
        plan, RunOptions(model="runtime_cases:trainable", steps=1, warmup=0, split=split, timeout=30.0)
    )
    rows = compare_memory(plan, trace)
    assert [row.device for row in rows] == [0, 1]
    for row in rows:
        # Every micro-batch has two rows: the plan's levels are exact, but for storages that two
        # micro-batches share.
        assert row.excess == pytest.approx(0.0, abs=0.02 * row.planned)
        # What is left out of the plan while an op runs is at most 2 % of a micro-batch.
        assert row.measured == pytest.approx(row.planned, rel=0.02)
        assert not row.alarm
    assert all(stage.peak_b > 0 for stage in plan.instance.stages)
    assert trace.memory is not None
    assert trace.memory_during is not None
    for after, during in zip(trace.memory, trace.memory_during, strict=True):
        assert max(during) > max(after)
    tight = plan.instance.with_changes(memory_cap=[rows[0].measured / 2, rows[1].measured * 2])
    alarms = [row.alarm for row in compare_memory(plan.model_copy(update={"instance": tight}), trace)]
    assert alarms == [True, False]


class CountedBlock(nn.Module):
    """Three Linears under one checkpoint; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
        self.calls = 0

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(self.layers(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = checkpoint(self.inner, x, use_reentrant=False)
        assert isinstance(result, torch.Tensor)
        return result


@pytest.mark.parametrize(("mechanism", "in_b", "in_w"), [("deferred", 1, 0), ("generic", 1, 3)])
def test_a_checkpoint_recomputes(mechanism: Mechanism, in_b: int, in_w: int) -> None:
    """A checkpointed block of 3 Linears runs again in B, and once a Linear in W by the generic split."""
    block = CountedBlock()
    stage = SplitStage(block, 0, mechanism)
    (out,), _ = stage.forward(0, 0, [torch.randn(4, 6)], [True], TENSOR)
    assert block.calls == 1
    stage.backward_input(0, [torch.ones_like(out)])
    assert block.calls == 1 + in_b
    stage.backward_weight(0)
    assert block.calls == 1 + in_b + in_w


def outcome(plan: Plan, times: dict[str, float]) -> Outcome:
    """A made-up measurement in which every op of a kind takes the same time."""
    events = []
    for program in plan.programs:
        now = 0.0
        for action in program.actions:
            if action.is_compute:
                end = now + times[action.op]
                events.append(
                    Event(
                        device=program.device,
                        op=action.op,
                        stage=action.stage,  # type: ignore[arg-type]
                        microbatch=action.microbatch,
                        start=now,
                        end=end,
                    )
                )
                now = end
    trace = Trace(
        plan_digest=plan.digest(),
        mode="real",
        hardware="none",
        backend="gloo",
        model="made up",
        time_unit="ms",
        memory_unit="MiB",
        split=("generic",) * 2,
        steps=(Step(events=tuple(events), makespan=now),),
    )
    return Outcome(trace, {0: 1, 1: 1}, {0: 1, 1: 1}, (0, 0))


def test_a_dear_split_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """B + W of 2.8 ms beside a BW of 2: more than 1.3 times, and the profile says that plans will fuse."""
    given = cases.instance(2, 2)
    split_plan = cases.plan(given, cases.zb_orders(2, 2))
    fused = [
        [t for j in range(2) for t in (cases.Task(cases.F, d, j), cases.Task(cases.BW, d, j))]
        for d in range(2)
    ]
    fused_plan = cases.plan(given, fused)
    said: list[str] = []
    with caplog.at_level(logging.INFO):
        instance = build_instance(
            equal_stages(2, 2),
            outcome(split_plan, {"F": 1.0, "B": 1.4, "W": 1.4}),
            outcome(fused_plan, {"F": 1.0, "BW": 2.0}),
            said.append,
        )
    assert any("stage 0: B + W take 2.8 ms, a fused BW 2.0 ms: plans will fuse it" in line for line in said)
    assert [stage.t_bw for stage in instance.stages] == [2.0, 2.0]
