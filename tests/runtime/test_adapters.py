"""Models from elsewhere run in a pipeline: transformers' own logits and losses, and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import runtime_cases as cases
import torch
from torch import nn

from zbsolve.errors import InputError
from zbsolve.runtime.adapters import causal_lm, sequential
from zbsolve.runtime.api import RunOptions, run_plan
from zbsolve.runtime.models import PipelineModel

pytest.importorskip("transformers")


def built(kind: str) -> Any:
    """A small model of transformers with random weights."""
    torch.manual_seed(0)
    if kind == "llama":
        return cases.llama_of_transformers()
    return cases.gpt2_of_transformers(kind == "tied gpt2")


def through(pipeline: PipelineModel, value: Any) -> Any:
    """What all layers, one after the other, make of an input."""
    for layer in pipeline.layers:
        value = layer(value)
    return value


@pytest.mark.parametrize("kind", ["llama", "gpt2", "tied gpt2"])
def test_layers_are_the_model(kind: str) -> None:
    """Called one after the other, the layers give the model's own logits and loss."""
    model = built(kind).train()
    ids = torch.randint(0, 40, (3, 8), generator=torch.Generator().manual_seed(1))
    pipeline = causal_lm(model, lambda step: ids)
    assert len(pipeline.layers) == 4  # embedding, two blocks, head
    value = through(pipeline, ids)
    whole = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(value, whole.logits)
    torch.testing.assert_close(pipeline.loss(value, ids), whole.loss)


def test_a_llama_runs_in_a_pipeline() -> None:
    """Two ranks, blocks split over them: every gradient is the unpipelined model's to the last bit."""
    plan = cases.plan(cases.instance(2, 3), cases.zb_orders(2, 3))
    options = RunOptions(model="runtime_cases:small_llama", steps=1, warmup=0, timeout=60.0)
    trace = run_plan(plan, options)
    assert trace.gradients is not None
    assert trace.gradients.bit_equal, trace.gradients
    assert trace.split == ("deferred", "deferred")


def test_a_gpt2_with_a_tied_head_runs_in_a_pipeline() -> None:
    """Embedding and head are one weight on two ranks: its gradient is the unpipelined model's."""
    plan = cases.plan(cases.instance(2, 3), cases.zb_orders(2, 3))
    options = RunOptions(model="runtime_cases:tied_gpt2", steps=2, warmup=0, timeout=60.0)
    trace = run_plan(plan, options)
    assert trace.gradients is not None
    assert trace.gradients.equal, trace.gradients
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


def test_a_padded_llama_runs_in_a_pipeline() -> None:
    """The mask travels from rank to rank: gradients are the unpipelined model's to the last bit."""
    plan = cases.plan(cases.instance(2, 3), cases.zb_orders(2, 3))
    options = RunOptions(model="runtime_cases:padded_llama", steps=2, warmup=0, timeout=60.0)
    trace = run_plan(plan, options)
    assert trace.gradients is not None
    assert trace.gradients.bit_equal, trace.gradients


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
