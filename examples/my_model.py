"""A model of one's own for the pipeline: layers in a row, a loss, and the micro-batches of a step.

Use: ``PYTHONPATH=examples zbsolve profile my_model:build -p 2 -m 8 -o instance.json``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zbsolve.runtime.models import MicroBatch, cut_rows

FEATURES, HIDDEN, CLASSES, ROWS = 32, 256, 10, 64


class Block(nn.Module):
    """A residual block: what a later layer needs goes along in the one value that is passed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Add what the block computes."""
        return value + self.inner(value)


class MyModel:
    """Six blocks between an embedding and a head; any layer boundary can become a stage boundary."""

    def __init__(self) -> None:
        self.layers: Sequence[nn.Module] = [
            nn.Linear(FEATURES, HIDDEN),
            *(Block() for _ in range(6)),
            nn.Linear(HIDDEN, CLASSES),
        ]

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean over the rows of one micro-batch."""
        return nn.functional.cross_entropy(output, targets)

    def microbatches(self, step: int, count: int) -> Sequence[MicroBatch]:
        """The data of a step, the same on every rank."""
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(ROWS, FEATURES, generator=generator)
        targets = torch.randint(CLASSES, (ROWS,), generator=generator)
        return cut_rows(inputs, targets, count)


def build() -> MyModel:
    """What ``my_model:build`` names; weights come from the seed that the caller has set."""
    return MyModel()
