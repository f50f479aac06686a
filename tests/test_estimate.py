"""The planning arithmetic against published examples and hand-worked numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from zbsolve.cli import app
from zbsolve.errors import InputError
from zbsolve.model.instance import load_instance
from zbsolve.partition.estimate import (
    MACHINES,
    MIB,
    Machine,
    Shape,
    communication_share,
    estimate,
    state_bytes,
)
from zbsolve.solver.portfolio import solve

S, H, A = 4096, 8192, 64
DENSE = Shape(layers=80, hidden=H, heads=A, vocabulary=32000, sequence=S)
LLAMA_70B = Shape(
    layers=80, hidden=H, heads=A, vocabulary=32000, sequence=S, kv_heads=8, ffn=28672, gated=True
)


def test_states_of_70_billion_parameters() -> None:
    """16 bytes each: 1.12 TB; a 70B model's shape has 68.98 billion, 1.104 TB."""
    assert state_bytes(70e9) == pytest.approx(1.12e12)
    assert LLAMA_70B.parameters == pytest.approx(68.98e9, rel=1e-4)
    assert state_bytes(LLAMA_70B.parameters) == pytest.approx(1.12e12, rel=0.02)


def test_activations_of_ten_layers() -> None:
    """34 s b h with flash attention: 34 * 4096 * 8192 * 10 = 11.4 GB per micro-batch."""
    assert 10 * DENSE.layer_mem_b == 34 * S * H * 10
    assert round(10 * DENSE.layer_mem_b / 1e9, 1) == 11.4


def test_dense_layers_have_the_published_flops_and_memory() -> None:
    """F sbh(24h + 4s), B sbh(24h + 8s), W 24 sbh^2; M_B sb(34h + 5as), M_W 32 sbh and their ratio."""
    assert DENSE.layer_flops == (S * H * (24 * H + 4 * S), S * H * (24 * H + 8 * S), S * H * 24 * H)
    kept = Shape(layers=1, hidden=H, heads=A, vocabulary=1, sequence=S, flash=False)
    assert kept.layer_mem_b == S * (34 * H + 5 * A * S)
    assert kept.layer_mem_w == 32 * S * H
    assert kept.layer_mem_w / kept.layer_mem_b == pytest.approx(32 / (34 + 5 * A * S / H))


def test_communication_over_computation() -> None:
    """H100, 10 layers a stage, 50 GB/s: F / (12 h l BW) = 989e12 / (12 * 8192 * 10 * 50e9) = 2.0 %."""
    share = communication_share(DENSE, MACHINES["h100-80g"], 10)
    rule = 989e12 / (12 * H * 10 * 50e9)
    assert round(rule, 3) == 0.02
    assert share == pytest.approx(rule, rel=0.1)  # the rule leaves out attention's 4 s of 24 h + 4 s
    assert share * (24 * H + 4 * S) / (24 * H) == pytest.approx(rule)
    assert DENSE.boundary_bytes * 2 == 4 * S * H  # 4 b s h a boundary and micro-batch


def test_options_change_what_they_should() -> None:
    """Grouped queries, gates, experts, sharing, by hand for a layer of h = 8, a = 4, s = 2, ffn 32."""

    def shape(**changes: Any) -> Shape:
        return Shape(layers=1, hidden=8, heads=4, vocabulary=10, sequence=2, **changes)

    plain = shape()
    assert plain.layer_parameters == 12 * 64
    # One of four key heads: keys and values are a quarter, 2 * 64 * 3/4 less; 4 h * 3/4 bytes a token less.
    assert plain.layer_parameters - shape(kv_heads=1).layer_parameters == 96
    assert plain.layer_mem_b - shape(kv_heads=1).layer_mem_b == 2 * 24
    # A third matrix of 8 * 32; gate and product in place of one activation: 6 instead of 4 bytes of 32.
    assert shape(gated=True).layer_parameters - plain.layer_parameters == 256
    assert shape(gated=True).layer_mem_b - plain.layer_mem_b == 2 * 2 * 32
    # 4 experts hold four MLPs; a token passes through 2.
    moe = shape(experts=4, experts_per_token=2)
    assert moe.layer_parameters - plain.layer_parameters == 3 * 512
    assert moe.active_parameters - plain.active_parameters == 512
    # t = 2 with sequence parallel halves everything, without it leaves 10 s b h whole.
    assert shape(tensor_parallel=2).layer_mem_b == plain.layer_mem_b / 2
    split = shape(tensor_parallel=2, sequence_parallel=False)
    assert split.layer_mem_b == 2 * (10 * 8 + 24 * 8 / 2)
    assert shape(tied=True).parameters == plain.parameters - 80


@pytest.mark.parametrize(("zero", "bytes_each"), [(0, 16.0), (1, 5.5), (2, 3.75), (3, 2.0)])
def test_zero_stages(zero: int, bytes_each: float) -> None:
    """d = 8: 16; 4 + 12/8; 2 + 14/8; 16/8 bytes a parameter."""
    assert state_bytes(100, zero, 8) == 100 * bytes_each


def test_instance_of_an_estimate() -> None:
    """Two stages of one layer: times in ms, memory in MiB, head on the last, hop with its transfer."""
    shape = Shape(layers=2, hidden=1024, heads=8, vocabulary=1000, sequence=1024)
    machine = Machine(peak=1e12, memory=2**30, bandwidth=2**31, efficiency=0.5, latency=1e-3)
    found = estimate(shape, machine, devices=2, microbatches=4)
    first, last = found.instance.stages
    assert found.layers == (1, 1)
    flops = 1024 * 1024 * (24 * 1024 + 4 * 1024)
    assert first.t_f == pytest.approx(flops / 0.5e12 * 1e3)
    assert last.t_f - first.t_f == pytest.approx(2 * 1024 * 1000 * 1024 / 0.5e12 * 1e3)
    assert first.mem_b == pytest.approx((34 + 1) * 1024 * 1024 / MIB)
    # 2 MiB at 2 GiB/s take 2^-10 s, and 1 ms of latency comes on top.
    assert found.instance.t_comm == pytest.approx(1.0 + 1e3 / 1024)
    assert found.instance.memory_cap == 1024
    assert found.instance.static(0) == pytest.approx(16 * (12 * 1024**2 + 1000 * 1024) / MIB)
    contended = estimate(shape, machine, devices=2, microbatches=4, contended=True).instance
    assert (contended.t_comm, contended.t_transfer) == (1.0, pytest.approx(1e3 / 1024))
    assert solve(found.instance, time_limit=1).plan.status == "optimal"


def test_recomputing_layers_keep_their_inputs() -> None:
    """2 s b h bytes a layer from F to R, one layer's activations beside them while R and B run."""
    shape = Shape(layers=4, hidden=1024, heads=8, vocabulary=1000, sequence=1024, recompute=True)
    stage = estimate(shape, MACHINES["h100-80g"], devices=2, microbatches=4).instance.stages[0]
    assert stage.mem_r == 2 * 2 * 1024 * 1024 / MIB
    assert stage.mem_b == stage.mem_r + 34
    assert stage.t_r == stage.t_f


def test_surplus_layers_and_v_placement() -> None:
    """10 layers on 2 devices in a V: 2 3 3 2, both ends of the model on device 0."""
    shape = Shape(layers=10, hidden=64, heads=8, vocabulary=100, sequence=64)
    found = estimate(shape, MACHINES["a100-80g"], devices=2, microbatches=4, placement="v")
    assert found.layers == (2, 3, 3, 2)
    assert [stage.device for stage in found.instance.stages] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hidden", "100"], "hidden is 100: give a multiple of the 32 heads"),
        (["--kv-heads", "5"], "kv-heads is 5"),
        (["--experts-per-token", "2"], "experts-per-token is 2"),
        (["--tensor-parallel", "3"], "tensor-parallel is 3"),
        (["--layers", "4"], "4 layers for 8 stages"),
        (["--machine", "abacus"], "machine 'abacus' is not known"),
        (["--efficiency", "2"], "efficiency is 2"),
        (["--tflops", "0"], "--tflops 0: give a positive number"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(options: list[str], words: str) -> None:
    """Exit 2 with the option and the fix."""
    result = CliRunner().invoke(app, ["estimate", *options])
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_estimate_command_writes_an_instance(tmp_path: Path) -> None:
    """The file loads, and what is left out is said."""
    path = tmp_path / "i.json"
    result = CliRunner().invoke(app, ["estimate", "-p", "4", "-m", "8", "-o", str(path)])
    assert result.exit_code == 0, result.output
    assert "left out: " in result.stdout
    assert "t_comm / t_comp" in result.stdout
    assert load_instance(path).num_stages == 4
    assert json.loads(path.read_text())["num_microbatches"] == 8


def test_bad_states_are_refused() -> None:
    """ZeRO stage and copies out of range."""
    with pytest.raises(InputError, match="zero is 4"):
        state_bytes(1, zero=4)
    with pytest.raises(InputError, match="data-parallel is 0"):
        state_bytes(1, data_parallel=0)
