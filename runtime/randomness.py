"""Random state of one F: a function of its place alone, so that any order draws the same numbers.

Python's and numpy's generators are seeded along with torch's where something draws from them: seeding both
takes 40 us, seeding torch's takes one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


def step_seed(seed: int, step: int, stage: int, microbatch: int) -> int:
    """The seed of one stage's F of one micro-batch in one step."""
    mixed = seed
    for part in (step, stage, microbatch):
        mixed = (mixed * 1_000_003 + part + 1) % (2**63 - 1)
    return mixed


def data_seed(seed: int, step: int) -> int:
    """The seed under which a step's micro-batches are made."""
    return step_seed(seed, step, -2, 0)


def set_seed(seed: int, device: torch.device, *, host: bool = False) -> None:
    """Seed the generators that layers on ``device`` draw from; with ``host`` Python's and numpy's, too.

    ``torch.manual_seed`` would do the same and seed every other kind of device too; without one, torch
    2.13 writes a stack trace each time for when there should be one: 0.6 ms a call.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    if host:
        random.seed(seed)
        np.random.seed(seed % 2**32)


@dataclass(frozen=True)
class Generators:
    """The state of each global generator: torch's on the CPU, Python's, numpy's."""

    torch: torch.Tensor
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> Generators:
        """As they are."""
        return cls(torch.get_rng_state(), random.getstate(), np.random.get_state())

    def draws_torch(self, later: Generators) -> bool:
        """Whether torch's was drawn from until ``later``."""
        return not torch.equal(self.torch, later.torch)

    def draws_host(self, later: Generators) -> bool:
        """Whether Python's or numpy's was."""
        # 624 words: numpy writes arrays of up to 1000 out in full.
        return self.python != later.python or repr(self.numpy) != repr(later.numpy)


@contextmanager
def generators_undone() -> Iterator[None]:
    """Put all global generators back afterwards."""
    before = Generators.now()
    with torch.random.fork_rng():
        yield
    random.setstate(before.python)
    np.random.set_state(before.numpy)
