"""Gradients of one micro-batch summed per parameter, and accumulated the way autograd does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn


class Sums:
    """Sums the gradients of one micro-batch per parameter before they are accumulated.

    Autograd adds one sum a micro-batch to ``.grad``; adding each use of a shared weight on its own
    would round differently. A parameter with one use is added at once.
    """

    def __init__(self, used: Sequence[nn.Parameter], again: bool) -> None:
        """``used``: a parameter for each gradient to come; ``again``: more of any of them may come."""
        self._once = not again and len(set(map(id, used))) == len(used)
        self._sums: dict[nn.Parameter, torch.Tensor] = {}

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """One gradient."""
        if self._once:
            accumulate(parameter, gradient)
            return
        known = self._sums.get(parameter)
        self._sums[parameter] = gradient if known is None else known + gradient

    def flush_all(self) -> None:
        """Accumulate what is not yet."""
        for parameter, gradient in self._sums.items():
            accumulate(parameter, gradient)
        self._sums.clear()


def accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Add to ``Parameter.grad``, always into a buffer of its own (autograd may hand out shared tensors)."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad.add_(gradient)


def unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters in order, each object once."""
    return list(dict.fromkeys(parameters))
