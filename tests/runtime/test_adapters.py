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

pytest.importorskip("transformers")


def built(kind: str) -> Any:
    """A small model of transformers with random weights."""
    torch.manual_seed(0)
    if kind == "llama":
        return cases.llama_of_transformers()
    return cases.gpt2_of_transformers(kind == "tied gpt2")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "tied gpt2"])
def test_layers_are_the_model(kind: str) -> None:
    """Called one after the other, the layers give the model's own logits and loss."""
    model = built(kind).train()
    ids = torch.randint(0, 40, (3, 8), generator=torch.Generator().manual_seed(1))
    pipeline = causal_lm(model, lambda step: ids)
    assert len(pipeline.layers) == 4  # embedding, two blocks, head
    value: Any = ids
    for layer in pipeline.layers:
        value = layer(value)
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


def test_other_builds_are_refused() -> None:
    """A model whose parts are not known by name is refused in one line."""
    with pytest.raises(InputError, match="a Linear is built in another way"):
        causal_lm(nn.Linear(2, 2), lambda step: torch.zeros(1, 2))
