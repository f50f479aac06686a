"""Random stages that mix what users' layers do: gradients, buffers and losses are those of one at a time.

As in a run, each stage is walked first and what that shows is heeded; then all F's run before any backward.
Values are handed over as they are, in one process: whatever two stages or micro-batches share shows.
"""

from __future__ import annotations

import gc
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from trap_models import (
    WIDTH,
    Block,
    Dropped,
    Halved,
    Normed,
    Once,
    Pair,
    Registered,
    ReluFirst,
    WorkBuffer,
    WritesInput,
)

from zbsolve.runtime.backward.split import Mechanism, SplitStage
from zbsolve.runtime.execute.boundary import Boundary, memory_of
from zbsolve.runtime.execute.transport import Shape
from zbsolve.runtime.execute.walk import Walk
from zbsolve.runtime.randomness import set_seed, step_seed
from zbsolve.runtime.values import flatten

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "block": Block,
    "once": Once,
    "hook": Halved,
    "writes its input": WritesInput,
    "relu in place": ReluFirst,
    "norm": lambda: Normed(False),
    "dropped": lambda: Dropped(lambda: float(torch.rand(()))),
    "dropped by Python": lambda: Dropped(random.random),
    "dropout in place": lambda: nn.Dropout(0.3, inplace=True),
    "identity": nn.Identity,
    "frozen": lambda: Block().requires_grad_(False),
}
PACKS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "named tuple": Pair,
    "dataclass": Registered,
    "ordered dict": lambda x, y: OrderedDict(y=y, x=x),
    "constants": lambda x, y: {"x": x, "y": y, "rate": 0.5, "none": None, "word": "a"},
}
COUNT = 3


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """One thread for tensors this small; what exists already is no business of the walks' collections."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


class Stage(nn.Module):
    """Layers one after the other; hands on a container or, with a work buffer, two tensors."""

    def __init__(self, layers: list[str], hands: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LAYERS[name]() for name in layers)
        self.hands = hands
        self.work = WorkBuffer() if hands == "work buffer" else None

    def forward(self, value: Any) -> Any:
        x = value
        if not isinstance(value, torch.Tensor):
            x, y = value if isinstance(value, tuple) else _parts(value)
            x = x / (1 + y.abs())
        for layer in self.layers:
            x = layer(x)
        if self.work is not None:
            return self.work(x)
        return x if self.hands == "tensor" else PACKS[self.hands](x, x.detach() * 0.1)


def _parts(value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return (value["x"], value["y"]) if isinstance(value, dict) else (value.x, value.y)


def loss_of(value: Any) -> torch.Tensor:
    """A mean square of whatever the last stage returns."""
    x = (
        value
        if isinstance(value, torch.Tensor)
        else value[0]
        if isinstance(value, tuple)
        else _parts(value)[0]
    )
    result: torch.Tensor = x.square().mean()
    return result


descriptions = st.lists(
    st.tuples(
        st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=3),
        st.sampled_from(["tensor", "tensor", "work buffer", *PACKS]),
    ),
    min_size=1,
    max_size=3,
)


def build(description: list[tuple[list[str], str]]) -> list[nn.Module]:
    """The stages, in float64, always with the same weights."""
    torch.manual_seed(5)
    return [Stage(layers, hands).double().train() for layers, hands in description]


def batches() -> list[torch.Tensor]:
    """Micro-batches of one shape, so that work buffers are used again."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, WIDTH, generator=generator, dtype=torch.float64) for _ in range(COUNT)]


def pipelined(stages: list[nn.Module], mechanism: Mechanism, fused: bool) -> list[torch.Tensor]:
    """Losses; gradients and buffers are the stages' afterwards."""
    split = [SplitStage(stage, s, mechanism) for s, stage in enumerate(stages)]
    data = batches()
    tensors, spec = flatten(data[0], "inputs")
    shapes = tuple(Shape(tuple(t.shape), t.dtype) for t in tensors)
    boundaries = [Boundary(spec, shapes, (False,), memory_of(tensors))]
    finishes = [None] * (len(split) - 1) + [loss_of]
    for stage, finish in zip(split, finishes, strict=True):
        walked = Walk(stage, f"stage {stage.index}", 0, boundaries[-1], tensors, finish).run()
        stage.heed(walked.traits)
        boundaries.append(walked.boundary)
        tensors = walked.outputs
    # Stage by stage: every output waits while its stage runs the other micro-batches.
    waiting: list[list[torch.Tensor]] = [[batch] for batch in data]
    for stage, boundary, finish in zip(split, boundaries, finishes, strict=False):
        agreed = boundaries[stage.index + 1]
        for j in range(COUNT):
            seed = step_seed(0, 0, stage.index, j)
            waiting[j], given_spec = stage.forward(
                j, seed, waiting[j], boundary.needs, boundary.spec, finish, fused=fused
            )
            assert given_spec == agreed.spec
            # No output needs a gradient that the walk has not announced: it would be lost.
            assert all(not r or n for r, n in zip(stage.requires(j), agreed.needs, strict=True))
    losses = [values[0] for values in waiting]
    back: list[Any] = []
    for j in range(COUNT):
        back.append([torch.ones_like(losses[j])])
        for stage in reversed(split):
            needs = boundaries[stage.index + 1].needs
            sent = [g if need else None for g, need in zip(back[j], needs, strict=True)]
            back[j] = (stage.backward_fused if fused else stage.backward_input)(j, sent)
    for stage in [] if fused else split:
        for j in range(COUNT):
            stage.backward_weight(j)
    return losses


def one_at_a_time(stages: list[nn.Module]) -> list[torch.Tensor]:
    """The same by autograd alone, micro-batch by micro-batch."""
    losses = []
    for j, batch in enumerate(batches()):
        value: Any = batch
        for s, stage in enumerate(stages):
            set_seed(step_seed(0, 0, s, j), torch.device("cpu"), host=True)
            value = stage(value)
        loss = loss_of(value)
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.detach())
    return losses


def compare(mechanism: Mechanism, fused: bool, description: list[tuple[list[str], str]]) -> None:
    """Losses and buffers to the last bit; gradients up to the order in which a generic W adds its parts."""
    ours, theirs = build(description), build(description)
    assert all(map(torch.equal, pipelined(ours, mechanism, fused), one_at_a_time(theirs)))
    for stage, twin in zip(ours, theirs, strict=True):
        for (name, got), (_, wanted) in zip(stage.named_buffers(), twin.named_buffers(), strict=True):
            assert torch.equal(got, wanted), name
        for (name, one), (_, other) in zip(stage.named_parameters(), twin.named_parameters(), strict=True):
            found = torch.zeros_like(one) if one.grad is None else one.grad
            expected = torch.zeros_like(one) if other.grad is None else other.grad
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14, msg=name)


every_way = pytest.mark.parametrize(
    ("mechanism", "fused"),
    [("deferred", False), ("generic", False), ("deferred", True)],
    ids=["deferred", "generic", "fused"],
)


@every_way
@settings(derandomize=True, deadline=None, max_examples=20)
@given(description=descriptions)
@example(description=[(["block"], "work buffer"), (["block"], "tensor")])
@example(
    description=[(["block"], "constants"), (["dropped by Python", "writes its input", "once"], "tensor")]
)
def test_mixed_traits(mechanism: Mechanism, fused: bool, description: list[tuple[list[str], str]]) -> None:
    """In-place layers, hooks, dropped layers, norms, work buffers and containers in any mix are right."""
    compare(mechanism, fused, description)


@pytest.mark.slow
@every_way
@settings(deadline=None, max_examples=400)
@given(description=descriptions)
def test_many_mixed_traits(
    mechanism: Mechanism, fused: bool, description: list[tuple[list[str], str]]
) -> None:
    """The same, over hundreds of mixes that differ from run to run."""
    compare(mechanism, fused, description)
