"""Layer profiles: measured one layer at a time, composed into stages, estimated by arithmetic."""

from __future__ import annotations

from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zbsolve.cli import app
from zbsolve.errors import InputError
from zbsolve.model.recompute import folded
from zbsolve.partition.arithmetic import RATE, SHIPPED, estimate_layers
from zbsolve.partition.estimate import Machine, Shape, estimate
from zbsolve.partition.layers import Host, Keep, Layer, LayerProfile, join_profiles, load_layers, stage_of

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


# --- stages of layers ----------------------------------------------------------------------------------

LAYERS = LayerProfile(
    layers=(
        Layer(t_f=1, t_b=2, t_w=1, t_bw=2.5, mem_b=4, mem_w=2, peak_f=1, peak_b=3, static_mem=5, mem_out=1),
        Layer(t_f=2, t_b=3, t_w=2, t_bw=4.0, mem_b=6, mem_w=5, peak_f=2, peak_b=1, peak_w=2, mem_out=1),
    )
)


def test_a_stage_is_the_sum_of_its_layers_and_the_peak_of_the_hungriest() -> None:
    """At speed 2, times halve and memory stays."""
    stage = stage_of(LAYERS, 0, 2, device=0, speed=2.0)
    assert (stage.t_f, stage.t_b, stage.t_w, stage.t_bw) == (1.5, 2.5, 1.5, 3.25)
    assert (stage.mem_b, stage.mem_w) == (10, 7)
    assert (stage.peak_f, stage.peak_b, stage.peak_w) == (2, 3, 2)


def test_recomputing_keeps_the_input_and_holds_everything_while_it_runs() -> None:
    """Layer 1 alone: R takes F's 2, and F keeps the 1 that layer 0 hands on; as part of B, 6 and B's 1."""
    apart = stage_of(LAYERS, 1, 2, device=0, keep=Keep.recompute)
    assert (apart.t_f, apart.t_r, apart.t_b, apart.t_w, apart.t_bw) == (2, 2, 3, 2, 4)
    assert (apart.mem_r, apart.mem_b, apart.mem_w) == (1, 6, 5)
    stage = folded(apart)
    assert (stage.t_f, stage.t_b, stage.t_w, stage.t_bw) == (2, 5, 2, 6)
    assert (stage.mem_b, stage.mem_w) == (1, 5)
    # Before B: 1. While it runs: growth to 5 is charged by the model, so 2 more make it 7 = 6 + 1.
    assert stage.mem_b + stage.growth + stage.peak_b == 7
    # A fused BW holds the 6 and the larger peak, 2.
    assert stage.mem_b + stage.peak_fused == 8


def test_checkpointing_goes_layer_by_layer() -> None:
    """Both layers: kept is layer 1's input, 1; anew they are 6, and 4 beside W's 5 of layer 1."""
    stage = stage_of(LAYERS, 0, 2, device=0, keep=Keep.checkpoint)
    assert (stage.t_f, stage.t_b, stage.t_bw, stage.mem_b, stage.mem_w) == (3, 5 + 3, 6.5 + 3, 1, 7)
    # Split: 4 + 5 = 9 while B is at layer 0, and B's peak of 3.
    assert stage.mem_b + stage.growth + stage.peak_b == 9 + 3
    # Fused nothing is left for W: at most 6, and the larger peak, 3.
    assert stage.mem_b + stage.peak_fused == 6 + 3


def test_offloading_moves_everything_and_waits_for_what_is_not_hidden() -> None:
    """Layer 1: 6 at bandwidth 2 take 3 each way; half of F's 2 and of B's 3 hide some of it."""
    stage = stage_of(LAYERS, 1, 2, device=0, keep=Keep.offload, host=Host(bandwidth=2.0, overlap=0.5))
    assert stage.mem_b == 0
    assert stage.t_f == 2 + (3 - 1)
    assert stage.t_b == 3 + (3 - 1.5)
    assert stage.peak_f == 2 + 6
    with pytest.raises(InputError, match="the cluster has no"):
        stage_of(LAYERS, 1, 2, device=0, keep=Keep.offload)


def test_parts_of_a_model_join_into_one_profile() -> None:
    """Layers in order; other units are refused."""
    assert join_profiles([LAYERS, LAYERS]).layers == LAYERS.layers * 2
    with pytest.raises(InputError, match="time_unit is ms and s"):
        join_profiles([LAYERS, LAYERS.model_copy(update={"time_unit": "s"})])


def test_a_profile_file_reads_back_the_same(tmp_path: Path) -> None:
    """What is left out has its default."""
    path = tmp_path / "l.json"
    path.write_text(LAYERS.to_json())
    assert load_layers(path) == LAYERS


# --- arithmetic ----------------------------------------------------------------------------------------


def test_estimate_by_hand() -> None:
    """h=4, 2 heads of 2, one for keys and values, gated MLP of 8, one layer, V=16, 3 tokens, 1 FLOP/ms."""
    shape = Shape(
        layers=1, hidden=4, heads=2, kv_heads=1, ffn=8, gated=True, vocabulary=16, sequence=3, microbatch=1
    )
    _, layer, head = estimate_layers(shape, "tiny", rate=1e3).layers
    # P = 16 + 16 + 2 * 4 * 2 + 3 * 32 = 144; F: 3 tokens * (2 * 144 + 4 * 3 * 4) = 1008 operations.
    assert layer.t_f == pytest.approx(1008)
    assert layer.t_b == pytest.approx(3 * (288 + 2 * 48))
    assert layer.t_w == pytest.approx(3 * 288)
    # 2 * 4 * 16 * 3 tokens.
    assert head.t_f == pytest.approx(384)
    # 16 bytes a parameter of 4096 x 128256 are 8016 MiB; 4096 tokens of 4096 numbers in 16 bit are 32.
    large = estimate_layers(SHIPPED["llama-8b-128k"], "8b").layers
    assert large[-1].static_mem == pytest.approx(8016)
    assert large[1].mem_out == 32


def test_layers_add_up_to_the_estimated_stage() -> None:
    """Composed into one stage, the layers are what the estimate of one stage says, to its rounding."""
    shape = SHIPPED["small-1b"]
    machine = Machine(peak=2 * RATE, memory=80e9, bandwidth=50e9, efficiency=0.5)
    whole = estimate(shape, machine, devices=1, microbatches=1).instance.stages[0]
    profile = estimate_layers(shape, "small-1b")
    stage = stage_of(profile, 1, len(profile.layers), device=0)
    for field in ("t_f", "t_b", "t_w", "mem_w"):
        assert getattr(stage, field) == pytest.approx(getattr(whole, field), rel=1e-4)
    assert stage.mem_b == pytest.approx(whole.mem_b, rel=2e-3)  # but for the embedding's dropout mask


def test_shipped_models_are_what_the_arithmetic_gives() -> None:
    """Each file is the estimate of the model of that name."""
    folder = resources.files("zbsolve.instances")
    shipped = {entry.name for entry in folder.iterdir() if entry.name.startswith("model-")}
    assert shipped == {f"model-{name}.json" for name in SHIPPED}
    for name, shape in SHIPPED.items():
        assert (folder / f"model-{name}.json").read_text() == estimate_layers(shape, name).to_json()


# --- measured ------------------------------------------------------------------------------------------


@needs_torch
def test_layers_of_a_model_are_measured_and_compose(tmp_path: Path) -> None:
    """Two blocks and the head: memory of the composed stage is within 10 % of that stage measured whole."""
    from zbsolve.runtime.backward.split import SplitStage
    from zbsolve.runtime.measure.layer_profiler import LayerOptions, measure_layers
    from zbsolve.runtime.models.llama import Llama
    from zbsolve.runtime.models.pipeline_model import StageLayers
    from zbsolve.runtime.values import flatten

    profile = measure_layers(LayerOptions("tests.layer_models:tiny", 2, repeats=2, warmup=1), lambda _: None)
    assert [layer.name for layer in profile.layers] == [
        "TokenEmbedding",
        *["DecoderBlock"] * 2,
        "LanguageHead",
    ]
    assert profile.microbatch_size == 2
    assert all(layer.t_f > 0 and layer.t_bw is not None for layer in profile.layers)
    # The embedding hands on 2 rows x 16 tokens x 32 numbers of 4 bytes.
    assert profile.layers[0].mem_out == pytest.approx(2 * 16 * 32 * 4 / 2**20, abs=1e-6)
    # A block's parameters: 32 x (32 + 2 x 8) + 32 x 32 + 3 x 32 x 64 + two norms of 32; 4 copies of 4 bytes.
    assert profile.layers[1].static_mem == pytest.approx((32 * 48 + 1024 + 6144 + 64) * 16 / 2**20, abs=1e-6)
    model: Llama = __import__("tests.layer_models", fromlist=["tiny"]).tiny()
    stage = SplitStage(StageLayers(list(model.layers[1:3])), 0)
    stage.accounting = True
    import torch

    x = torch.randn(2, 16, 32)
    stage.forward(0, 0, [x], [True], flatten(x, "x")[1])
    whole = stage.held_bytes(0) / 2**20
    composed = stage_of(profile, 1, 3, device=0)
    assert composed.mem_b == pytest.approx(whole, rel=0.1)


@needs_torch
def test_a_lazy_model_holds_one_layer_at_a_time() -> None:
    """Each access builds the layer anew, with equal weights; none is kept."""
    import gc
    import weakref

    import torch

    from zbsolve.runtime.models.llama import Llama

    layers = Llama(hidden=16, blocks=2, heads=2, groups=1, feed_forward=16, vocabulary=20).layers
    first, second = layers[1], layers[1]
    assert first is not second
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None


@needs_torch
def test_command_writes_a_layer_profile_and_refuses_in_one_line(tmp_path: Path) -> None:
    """The file loads; a model that cannot be split is refused with its reason."""
    out = tmp_path / "layers.json"
    arguments = [
        "profile",
        "tests.layer_models:tiny",
        "--layers",
        "-o",
        str(out),
        "--repeats",
        "1",
        "--warmup",
        "1",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert len(load_layers(out).layers) == 4
    refused = CliRunner().invoke(app, ["profile", "tests.layer_models:nothing", "--layers", "-o", str(out)])
    assert refused.exit_code == 2
    assert "tests.layer_models:nothing" in refused.stderr


@needs_torch
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_joint_plan_beats_the_even_split_when_run() -> None:
    """Small LLaMA on 2 processes, turn and turn about: the measured gain has the predicted one's sign.

    Prints predicted and measured makespans: medians of 5 steps, the best of 3 turns of each plan.
    """
    from zbsolve.partition.cluster import equal_cluster
    from zbsolve.partition.outcome import even_plan
    from zbsolve.partition.problem import DecisionProblem
    from zbsolve.partition.search import decide
    from zbsolve.runtime.api import RunOptions, run_plan
    from zbsolve.runtime.measure.layer_profiler import LayerOptions, profile_layers

    name = "zbsolve.runtime.models.llama:small"
    problem = DecisionProblem(profile_layers(LayerOptions(name)), equal_cluster(2), 2, 8)
    joint, even = decide(problem, time_limit=20).plan, even_plan(problem, 20)
    assert even is not None
    measured: dict[str, list[float]] = {"even": [], "joint": []}
    for _ in range(3):
        for label, plan in (("even", even), ("joint", joint)):
            trace = run_plan(plan, RunOptions(model=name, steps=5, check_gradients=False))
            measured[label].append(trace.makespan)
    predicted_gain = 1 - joint.makespan / even.makespan
    best = {label: min(times) for label, times in measured.items()}
    gain = 1 - best["joint"] / best["even"]
    splits = [
        "/".join((s.name or "").removeprefix("layers ") for s in p.instance.stages) for p in (even, joint)
    ]
    print(
        f"even {splits[0]}: predicted {even.makespan:.1f} ms, measured {best['even']:.1f} ms; "
        f"joint {splits[1]}: {joint.makespan:.1f}, {best['joint']:.1f}; "
        f"gain predicted {predicted_gain:.1%}, measured {gain:.1%}"
    )
    assert predicted_gain > 0.05
    assert gain > 0
