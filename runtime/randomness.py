"""Random state of one F: a function of its place alone, so that any order draws the same numbers."""

from __future__ import annotations

import torch


def step_seed(seed: int, step: int, stage: int, microbatch: int) -> int:
    """The seed of one stage's F of one micro-batch in one step."""
    mixed = seed
    for part in (step, stage, microbatch):
        mixed = (mixed * 1_000_003 + part + 1) % (2**63 - 1)
    return mixed


def set_seed(seed: int, device: torch.device) -> None:
    """Seed the generators that layers on ``device`` draw from.

    ``torch.manual_seed`` would do the same and seed every other kind of device too; without one, torch
    2.13 writes a stack trace each time for when there should be one: 0.6 ms a call.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
