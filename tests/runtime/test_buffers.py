"""Pooled receive buffers: used again once nobody refers to them, and not a moment earlier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import runtime_cases as cases
import torch
from torch import nn

from zbsolve.runtime.api import RunOptions, run_plan
from zbsolve.runtime.backward.split import Mechanism, SplitStage
from zbsolve.runtime.execute.buffers import BufferPool
from zbsolve.runtime.values import TENSOR

SIZE = 6 * 10 * 4  # bytes of the inputs below
both = pytest.mark.parametrize("mechanism", ["deferred", "generic"])


def filled(pool: BufferPool, value: float) -> torch.Tensor:
    """A buffer with something in it."""
    return pool.empty((10, 6), torch.float32).fill_(value)


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda x: x[3:].t(),
    "array": lambda x: x.numpy(),
    "saved for a backward": lambda x: (x.requires_grad_() ** 2).sum(),
    "detached": lambda x: x.detach(),
    "storage": lambda x: x.untyped_storage(),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS.keys())
def test_memory_comes_back_with_the_last_reference(hold: Callable[[torch.Tensor], Any]) -> None:
    """Whatever refers to a buffer holds it; without any it is the next one of its size."""
    pool = BufferPool(pooled_from=1)
    buffer = filled(pool, 1.0)
    address = buffer.data_ptr()
    holder = hold(buffer)
    del buffer
    assert pool.idle_bytes == 0
    other = filled(pool, 2.0)
    assert other.data_ptr() != address
    del holder
    assert pool.idle_bytes == SIZE
    assert filled(pool, 3.0).data_ptr() == address


class KeepsInput(nn.Module):
    """Saves its input for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class ViewsInput(nn.Module):
    """Returns a view of its input, and saves nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 1:].t()


@both
def test_a_stage_that_saves_its_input(mechanism: Mechanism) -> None:
    """The input of a Linear is held until W, whose gradient is right although buffers come and go."""
    pool = BufferPool(pooled_from=1)
    stage = SplitStage(KeepsInput(), 0, mechanism)
    stage.forward(0, 0, [filled(pool, 1.0)], [True], TENSOR)
    filled(pool, 7.0)  # written over at once where it was free
    assert pool.idle_bytes == SIZE
    dy = filled(pool, 2.0)
    stage.backward_input(0, [dy])
    del dy
    filled(pool, 8.0)
    # The deferred split holds x and dy until W; the generic one's graph holds x, and its recorder dy.
    stage.backward_weight(0)
    # dW = dy^T x: 10 rows of 2 times 1.
    assert stage.parameters[0].grad is not None
    assert stage.parameters[0].grad.tolist() == [[20.0] * 6] * 6
    # All came back: x, dy and the one that was written over.
    assert pool.idle_bytes == 3 * SIZE


@both
def test_a_stage_that_returns_a_view_of_its_input(mechanism: Mechanism) -> None:
    """The buffer is held as long as the view, which another stage or a send may have."""
    pool = BufferPool(pooled_from=1)
    stage = SplitStage(ViewsInput(), 0, mechanism)
    (out,), _ = stage.forward(0, 0, [filled(pool, 1.0)], [True], TENSOR)
    stage.backward_input(0, [torch.ones_like(out)])
    stage.backward_weight(0)
    filled(pool, 7.0)
    assert out.eq(1.0).all()
    assert pool.idle_bytes == SIZE
    del out
    assert pool.idle_bytes == 2 * SIZE


def test_small_tensors_and_sizes_out_of_use() -> None:
    """Below the limit nothing is pooled; sizes that a step has not asked for are given up."""
    pool = BufferPool(pooled_from=100)
    pool.empty((24,), torch.float32)
    assert pool.idle_bytes == 0
    pool.empty((25,), torch.float32)
    pool.empty((), torch.float32)
    assert pool.idle_bytes == 100
    pool.trim()
    assert pool.idle_bytes == 100
    pool.empty((50,), torch.bool)
    pool.empty((60,), torch.bfloat16)
    pool.trim()
    assert pool.idle_bytes == 120


@both
def test_gradients_through_reused_buffers(mechanism: Mechanism) -> None:
    """Messages of 1 MiB that stages save, view and pass on, six micro-batches: every gradient is right."""
    plan = cases.plan(cases.instance(2, 6), cases.zb_orders(2, 6))
    options = RunOptions(model="runtime_cases:wide", steps=2, warmup=0, timeout=60.0, split=mechanism)
    trace = run_plan(plan, options)
    assert trace.gradients is not None
    assert trace.gradients.bit_equal, trace.gradients
