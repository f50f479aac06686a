"""Models from elsewhere run in a pipeline: transformers' own logits and losses, and every gradient."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runtime_cases as cases
import torch
from torch import nn

from zbsolve.errors import InputError
from zbsolve.runtime.api import ProfileOptions, RunOptions, profile_model, run_plan
from zbsolve.runtime.models.adapters import causal_lm, sequential
from zbsolve.runtime.models.pipeline_model import PipelineModel
from zbsolve.trace.trace import load_trace

pytest.importorskip("transformers")


def built(kind: str) -> Any:
    """A small model of transformers with random weights."""
    torch.manual_seed(0)
    if kind == "llama":
        return cases.llama_of_transformers()
    if kind == "mixtral":
        return cases.mixtral_of_transformers()
    return cases.gpt2_of_transformers(kind == "tied gpt2")


def through(pipeline: PipelineModel, value: Any) -> Any:
    """What all layers, one after the other, make of an input."""
    for layer in pipeline.layers:
        value = layer(value)
    return value


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt2", "tied gpt2"])
def test_layers_are_the_model(kind: str) -> None:
    """Called one after the other, the layers give the model's own logits and loss."""
    model = built(kind).train()
    ids = torch.randint(0, 40, (3, 8), generator=torch.Generator().manual_seed(1))
    pipeline = causal_lm(model, lambda step: ids)
    assert len(pipeline.layers) == cases.BLOCKS + 2  # embedding, blocks, head
    value = through(pipeline, ids)
    whole = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(value, whole.logits)
    torch.testing.assert_close(pipeline.loss(value, ids), whole.loss)


SMALL = ("small_llama", "small_mixtral", "tied_gpt2", "padded_llama", "small_sequential")


@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("model", SMALL)
def test_several_blocks_on_each_device(model: str, devices: int) -> None:
    """Nine layers over two and three ranks: every gradient is the unpipelined model's."""
    # Over two, stages have 5 and 4 layers; over three, 3 each: two blocks at least, which share a rotary.
    plan = cases.plan(cases.instance(devices, 3), cases.zb_orders(devices, 3))
    options = RunOptions(model=f"runtime_cases:{model}", steps=1, warmup=0, timeout=60.0)
    trace = run_plan(plan, options)
    assert trace.gradients is not None
    # A tied weight's sum over ranks is taken in another order; all others agree to the last bit.
    assert trace.gradients.equal if model == "tied_gpt2" else trace.gradients.bit_equal, trace.gradients


@pytest.mark.parametrize(
    "model",
    [
        "small_mixtral",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SMALL if name != "small_mixtral"),
    ],
)
def test_several_blocks_are_profiled(model: str) -> None:
    """The same models through the profile, three devices with three layers each."""
    options = ProfileOptions(
        model=f"runtime_cases:{model}", num_devices=3, num_microbatches=2, repeats=1, warmup=0, timeout=60.0
    )
    instance = profile_model(options)
    assert all(stage.t_f > 0 and stage.t_bw for stage in instance.stages)
    assert [(stage.name or "").partition(":")[0] for stage in instance.stages] == [
        "layers 0-2",
        "layers 3-5",
        "layers 6-8",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("model", SMALL)
def test_several_blocks_under_torchrun(model: str, tmp_path: Path) -> None:
    """The same models by the worker under torchrun, three ranks."""
    plan = cases.plan(cases.instance(3, 3), cases.zb_orders(3, 3))
    plan.save(tmp_path / "plan.json")
    trace_file = tmp_path / "trace.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone"]
    command += ["-m", "zbsolve.runtime.worker", str(tmp_path / "plan.json")]
    command += ["--model", f"runtime_cases:{model}", "--steps", "1", "--trace-out", str(trace_file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    trace = load_trace(trace_file)
    assert trace.gradients is not None
    assert trace.gradients.equal, trace.gradients


def test_a_tied_head_stays_tied() -> None:
    """Embedding and head of the layers are one weight, as in the model."""
    model = cases.tied_gpt2()
    assert model.layers[0].embedding.weight is model.layers[-1].head.weight


def test_sequential() -> None:
    """An nn.Sequential's entries are its layers, and its batch is cut into weighted micro-batches."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    model = sequential(module, nn.functional.mse_loss, lambda step: (torch.ones(5, 2), torch.zeros(5, 3)))
    assert list(model.layers) == list(module)
    assert [batch.weight for batch in model.microbatches(0, 2)] == [0.6, 0.4]


def padded(rows: int, length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and a mask: row r has r tokens of padding, on the right and on the left by turns."""
    ids = torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(rows, length, dtype=torch.long)
    for r in range(rows):
        mask[r, length - r :] = 0
        if r % 2:
            mask[r] = mask[r].flip(0)
    return ids, mask


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_padding_is_masked_as_by_the_model(kind: str) -> None:
    """With the tokenizer's mask the layers give the model's loss and gradients, however the rows are cut.

    5 rows in 2 micro-batches. Rows of 8, 6 and 4 tokens, then padding, have 7, 5 and 3 to predict; rows of 7
    and 5 after padding all of theirs, as transformers counts: 27, of which the first three rows have 19.
    """
    model = built(kind).train()
    batch = padded(5)
    ids, mask = batch
    pipeline = causal_lm(model, lambda step: batch)
    cut = pipeline.microbatches(0, 2)
    assert [part.weight for part in cut] == pytest.approx([19 / 27, 8 / 27])
    total = torch.zeros(())
    for part in cut:
        total = total + part.weight * pipeline.loss(through(pipeline, part.inputs), part.targets)
    total.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    whole = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    torch.testing.assert_close(total, whole.loss)
    whole.loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, msg=name)


def test_wrong_masks_are_refused() -> None:
    """A mask of another shape, and a micro-batch with nothing to predict, in one line."""
    model = built("gpt2")
    ids = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(InputError, match=r"mask has the shape \(2, 3\), the ids \(2, 4\)"):
        causal_lm(model, lambda step: (ids, torch.ones(2, 3))).microbatches(0, 1)
    nothing = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    with pytest.raises(InputError, match="micro-batch 1 of step 0 has no token to predict"):
        causal_lm(model, lambda step: (ids, nothing)).microbatches(0, 2)


def test_other_builds_are_refused() -> None:
    """A model whose parts are not known by name is refused in one line."""
    with pytest.raises(InputError, match="a Linear is built in another way"):
        causal_lm(nn.Linear(2, 2), lambda step: torch.zeros(1, 2))


def test_models_that_do_more_than_their_parts_are_refused() -> None:
    """An embedding that is scaled on its way, and a router's part of the loss, in one line each."""
    scaled = built("llama")
    scaled.model.embed_tokens.register_forward_hook(lambda *args: args[-1])  # harmless: layers call it, too
    causal_lm(scaled, lambda step: torch.zeros(1, 2))
    plain = scaled.model.forward
    scaled.model.forward = lambda **given: plain(
        **given | {"input_ids": None, "inputs_embeds": scaled.model.embed_tokens(given["input_ids"]) * 4}
    )
    with pytest.raises(InputError, match="a LlamaForCausalLM gives other logits than its embedding"):
        causal_lm(scaled, lambda step: torch.zeros(1, 2))
    routed = cases.mixtral_of_transformers(output_router_logits=True)
    with pytest.raises(InputError, match="set output_router_logits=False"):
        causal_lm(routed, lambda step: torch.zeros(1, 2))


def test_rows_longer_than_a_sliding_window_are_refused() -> None:
    """Layers attend to all tokens: rows of 8 are refused under a window of 4, rows of 4 are not."""
    model = cases.mixtral_of_transformers(sliding_window=4)
    rows = {0: torch.zeros(2, 4, dtype=torch.long), 1: torch.zeros(2, 8, dtype=torch.long)}
    pipeline = causal_lm(model, rows.__getitem__)
    assert len(pipeline.microbatches(0, 2)) == 2
    with pytest.raises(InputError, match="rows of 8 tokens are longer than the model's sliding window of 4"):
        pipeline.microbatches(1, 2)
