"""Models for the layer profile's tests."""

from __future__ import annotations

from zbsolve.runtime.models.llama import Llama


def tiny() -> Llama:
    """Two blocks of width 32 and a small vocabulary."""
    return Llama(hidden=32, blocks=2, heads=4, groups=1, feed_forward=64, vocabulary=50, context=16, rows=2)
