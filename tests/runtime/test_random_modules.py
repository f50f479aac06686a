"""Random module trees through both ways of splitting a backward: gradients equal autograd's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_split_backward import pipeline, reference
from torch import nn
from torch.utils.checkpoint import checkpoint

from zbsolve.runtime.backward.split import Mechanism

WIDTH = 4


class Residual(nn.Module):
    """x + inner(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Checkpointed(nn.Module):
    """The inner module, recomputed in its backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = checkpoint(self.inner, x, use_reentrant=False)
        assert isinstance(result, torch.Tensor)
        return result


class Fork(nn.Module):
    """Two branches, one of them used through a view and in part; another leaves without a gradient."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.left(x), self.right(x).transpose(0, 1)
        with torch.no_grad():
            fixed = self.left(x)
        return a * 0.5 + b.transpose(0, 1)[:, :, [2, 0, 3, 1]] + fixed


class Raw(nn.Module):
    """Weights used bare: once, twice along one path, and one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.w) @ self.w * self.scale


class InPlace(nn.Module):
    """A Linear whose output is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).mul_(2.0).tanh_()


class AcrossRows(nn.Module):
    """A convolution along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Carry(nn.Module):
    """Passes a dict on: the activation, a float without gradient, an int mask; unpacks what it gets."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: Any) -> dict[str, Any]:
        x = value if isinstance(value, torch.Tensor) else value["x"] * value["mask"] + value["plain"]
        out = self.inner(x)
        return {"x": out, "plain": out.detach() * 0.1, "mask": (out > 0).long()}


LEAVES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "gelu": nn.GELU,
    "dropout": lambda: nn.Dropout(0.3),
    "raw": Raw,
    "in place": InPlace,
    "conv": AcrossRows,
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
}

# A tree is a leaf's name, "shared", or (kind, subtrees).
leaf = st.sampled_from([*LEAVES, "shared", "linear", "shared"])
trees = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.tuples(st.just("sequence"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("residual"), st.lists(inner, min_size=1, max_size=1)),
        st.tuples(st.just("checkpoint"), st.lists(inner, min_size=1, max_size=1)),
        st.tuples(st.just("fork"), st.lists(inner, min_size=2, max_size=2)),
    ),
    max_leaves=6,
)
stage_lists = st.lists(st.tuples(trees, st.booleans(), st.booleans()), min_size=1, max_size=3)


def build(tree: Any, shared: nn.Module) -> nn.Module:
    """The module that a tree describes; "shared" is one Linear wherever it stands in a stage."""
    if tree == "shared":
        return shared
    if isinstance(tree, str):
        return LEAVES[tree]()
    kind, children = tree
    parts = [build(child, shared) for child in children]
    if kind == "sequence":
        return nn.Sequential(*parts)
    if kind == "residual":
        return Residual(parts[0])
    return Checkpointed(parts[0]) if kind == "checkpoint" else Fork(*parts)


def build_stages(description: list[tuple[Any, bool, bool]]) -> list[nn.Module]:
    """Stages in float64; each may be frozen whole and may pass a dict on."""
    torch.manual_seed(1)
    stages = []
    for place, (tree, frozen, structured) in enumerate(description):
        module = build(tree, nn.Linear(WIDTH, WIDTH))
        receives_dict = place > 0 and description[place - 1][2]
        if structured or receives_dict:
            module = Carry(module)
        stages.append(module.requires_grad_(False) if frozen else module)
    return [stage.double() for stage in stages]


def loss(value: Any) -> torch.Tensor:
    """A mean square of whatever the last stage returns."""
    result: torch.Tensor = (value if isinstance(value, torch.Tensor) else value["x"]).square().mean()
    return result


def compare(mechanism: Mechanism, fused: bool, description: list[tuple[Any, bool, bool]]) -> None:
    """Run the stages and autograd on twins, and compare every gradient."""
    # A stage behind one that passes a dict on is Carry in any case, so that it can read it.
    fixed: list[tuple[Any, bool, bool]] = []
    for place, (tree, frozen, structured) in enumerate(description):
        fixed.append((tree, frozen, structured or (place > 0 and fixed[place - 1][2])))
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(2, 3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]
    ours, expected = build_stages(fixed), build_stages(fixed)
    pipeline(ours, batches, loss, mechanism, fused)
    reference(expected, batches, loss)
    for stage, twin in zip(ours, expected, strict=True):
        for (name, got), (_, wanted) in zip(stage.named_parameters(), twin.named_parameters(), strict=True):
            if wanted.grad is None:
                assert got.grad is None or not bool(got.grad.count_nonzero()), name
            else:
                assert got.grad is not None, name
                torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-9, atol=1e-12)


every_way = pytest.mark.parametrize(
    ("mechanism", "fused"),
    [("deferred", False), ("generic", False), ("deferred", True)],
    ids=["deferred", "generic", "fused"],
)


@every_way
@settings(derandomize=True, deadline=None, max_examples=30)
@given(description=stage_lists)
def test_gradients_of_random_trees(
    mechanism: Mechanism, fused: bool, description: list[tuple[Any, bool, bool]]
) -> None:
    """Shared and frozen weights, views, in-place ops, checkpoints, dicts: every gradient is autograd's."""
    compare(mechanism, fused, description)


@pytest.mark.slow
@every_way
@settings(deadline=None, max_examples=400)
@given(description=stage_lists)
def test_gradients_of_many_random_trees(
    mechanism: Mechanism, fused: bool, description: list[tuple[Any, bool, bool]]
) -> None:
    """The same, over hundreds of trees that differ from run to run."""
    compare(mechanism, fused, description)
