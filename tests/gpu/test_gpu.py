"""What only a GPU can show: `make gpu-check` runs these and writes gpu-results.xml. Skipped without one."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import runtime_cases as cases
import torch

from zbsolve.baselines import BASELINES
from zbsolve.runtime.api import ProfileOptions, RunOptions, profile_model, run_plan
from zbsolve.runtime.execute.executor import CudaClock
from zbsolve.runtime.execute.green import GreenStreams
from zbsolve.runtime.execute.lanes import CudaStreams, Issued, Lanes, arrange
from zbsolve.solver.portfolio import certify, solve
from zbsolve.trace.compare import compare
from zbsolve.trace.memory_check import compare_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: not run on a GPU"),
]
DEVICE = torch.device("cuda", 0)
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")


def test_events_measure_the_stream() -> None:
    """A chain of matrix products takes as long by events as by the host's clock around a synchronisation."""
    a = torch.randn(4096, 4096, device="cuda")
    clock = CudaClock()
    for _ in range(3):
        a @ a
    clock.open()
    begun = time.perf_counter()
    start = clock.mark()
    for _ in range(20):
        a @ a
    end = clock.mark()
    torch.cuda.synchronize()
    wall = time.perf_counter() - begun
    assert clock.seconds(end) - clock.seconds(start) == pytest.approx(wall, rel=0.1)


@pytest.mark.parametrize("split", ["deferred", "generic"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_one_gpu_has_the_reference_gradients(split: str, precision: str) -> None:
    """p = 1 on CUDA: B and W apart and fused; gradients equal the unpipelined model's."""
    orders = [
        [
            cases.Task(kind, 0, j)
            for j, kinds in enumerate(([cases.F, cases.BW], [cases.F, cases.B, cases.W]))
            for kind in kinds
        ]
    ]
    plan = cases.plan(cases.instance(1, 2), orders)
    options = RunOptions(
        model="runtime_cases:trainable",
        steps=2,
        warmup=0,
        timeout=120.0,
        backend="nccl",
        split=split,
        precision=precision,  # type: ignore[arg-type]
    )
    trace = run_plan(plan, options)
    assert trace.gradients is not None
    assert trace.gradients.equal, trace.gradients


def test_profile_of_one_gpu_adds_up() -> None:
    """F + B + W of the GPT on one GPU is within a tenth of F + BW; memory and transients are there."""
    instance = profile_model(ProfileOptions(num_devices=1, num_microbatches=4, timeout=120.0))
    (stage,) = instance.stages
    assert stage.t_bw is not None
    assert stage.t_f + stage.t_b + stage.t_w == pytest.approx(stage.t_f + stage.t_bw, rel=0.1)
    assert stage.mem_b > 0
    assert stage.peak_b > 0  # dx of the widest layer alone is more than the floor


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("split", ["deferred", "generic"])
def test_lanes_have_the_reference_gradients(split: str, aside: bool) -> None:
    """F&B pairs on two streams, W's on a third: gradients and 4 losses as on one stream."""
    options = RunOptions(
        model="runtime_cases:residual",
        steps=4,
        warmup=0,
        timeout=120.0,
        backend="nccl",
        split=split,  # type: ignore[arg-type]
        async_weights=aside,
    )
    trace = run_plan(cases.paired_plan(), options)
    assert trace.gradients is not None
    assert trace.gradients.equal, trace.gradients
    plan = cases.paired_plan()
    in_turn = cases.plan(plan.instance, plan.schedule().orders)  # the same order without pairs
    alone = run_plan(in_turn, replace(options, async_weights=False))
    assert trace.losses == pytest.approx(alone.losses, rel=1e-5)


def test_a_pair_overlaps() -> None:
    """Three kernels that wait on an SM each: as F, then an F&B pair, they take two lengths, not three."""
    chain = [Issued("F", 0, 0), Issued("F", 0, 1, True), Issued("BW", 0, 0)]
    lanes = Lanes(arrange(chain), CudaStreams(DEVICE))
    cycles = 100_000_000  # tens of milliseconds

    def seconds(together: bool) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        if together:
            lanes.begin()
        for place in range(3):
            if together:
                lanes.enter(place)
            torch.cuda._sleep(cycles)
            if together:
                lanes.leave(place)
        if together:
            lanes.end()
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    seconds(True), seconds(False)
    assert seconds(True) == pytest.approx(2 / 3 * seconds(False), rel=0.1)


def test_parts_of_a_gpu_are_disjoint() -> None:
    """Two parts at once take as long as one alone: neither has a multiprocessor of the other."""
    streams = GreenStreams(DEVICE, 2)
    assert streams.multiprocessors >= 1
    lanes = [streams.create(part) for part in range(2)]
    a = torch.randn(4096, 4096, device=DEVICE)

    def seconds(used: list[torch.cuda.Stream]) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for stream in used:
            with torch.cuda.stream(stream):
                for _ in range(20):
                    a @ a
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    seconds(lanes)
    # One stream of the whole GPU twice over would take twice as long.
    assert seconds(lanes) < 1.3 * seconds(lanes[:1])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "solved"])
def test_one_gpu_cut_into_two(schedule: str) -> None:
    """The GPT on two parts of one GPU, profiled there: right gradients, measured as predicted to a tenth."""
    instance = profile_model(
        ProfileOptions(num_devices=2, num_microbatches=8, timeout=120.0, green_contexts=True)
    )
    if schedule == "solved":
        plan = solve(instance.with_memory_cap("2p"), time_limit=10.0).plan
    else:
        plan = certify(*BASELINES[schedule].schedule(instance), "makespan", schedule)
    trace = run_plan(plan, RunOptions(steps=10, timeout=120.0, green_contexts=True))
    assert trace.gradients is not None
    assert trace.gradients.equal, trace.gradients
    assert compare(plan, trace).ratio == pytest.approx(1.0, abs=0.1)


@several
@pytest.mark.parametrize("schedule", ["1f1b", "solved"])
def test_two_gpus_over_nccl(schedule: str) -> None:
    """The GPT on two GPUs: right gradients, measured within a tenth of predicted, memory as planned."""
    instance = profile_model(ProfileOptions(num_devices=2, num_microbatches=8, timeout=120.0))
    if schedule == "solved":
        plan = solve(instance.with_memory_cap("2p"), time_limit=10.0).plan
    else:
        plan = cases.plan(instance, cases.zb_orders(2, 8))
    trace = run_plan(plan, RunOptions(steps=10, backend="nccl", timeout=120.0))
    assert trace.gradients is not None
    assert trace.gradients.equal, trace.gradients
    assert compare(plan, trace).ratio == pytest.approx(1.0, abs=0.1)
    assert not any(row.alarm for row in compare_memory(plan, trace))


@several
def test_a_tied_weight_over_nccl() -> None:
    """One Linear first and last on two GPUs: gradients are the reference's, copies stay equal bit by bit."""
    plan = cases.plan(cases.instance(2, 4), cases.zb_orders(2, 4))
    options = RunOptions(
        model="runtime_cases:tied_training",
        steps=4,
        backend="nccl",
        layers_per_stage=(2, 3),
        clip=0.05,
        timeout=120.0,
    )
    trace = run_plan(plan, options)
    assert trace.gradients is not None
    assert trace.gradients.equal, trace.gradients
