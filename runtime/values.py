"""What a stage takes and returns: nested tuples, lists and dicts of tensors, flattened for the transport.

Only tensors and None may stand at the leaves. A Python number or string would have to be equal for every
micro-batch on both sides of a boundary, and nothing could check that; it is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zbsolve.errors import InputError

# "tensor", None, or [container, ...]: JSON data, so that a boundary's shape can travel as text.
Spec = Any


def flatten(value: Any, where: str) -> tuple[list[torch.Tensor], Spec]:
    """Tensors of a nested value in a fixed order, and the spec from which :func:`unflatten` rebuilds it."""
    if isinstance(value, torch.Tensor):
        return [value], "tensor"
    if value is None:
        return [], None
    if type(value) in (tuple, list):
        parts = [flatten(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return [t for tensors, _ in parts for t in tensors], [type(value).__name__, *(s for _, s in parts)]
    if type(value) is dict:
        tensors: list[torch.Tensor] = []
        entries = []
        for key, item in value.items():
            if not isinstance(key, str):
                raise InputError(f"{where} has the key {key!r}: use strings as keys")
            found, spec = flatten(item, f"{where}[{key!r}]")
            tensors += found
            entries.append([key, spec])
        return tensors, ["dict", *entries]
    raise InputError(
        f"{where} is a {type(value).__name__}: pass tensors, None, tuples, lists or dicts between layers"
    )


def unflatten(tensors: list[torch.Tensor], spec: Spec) -> Any:
    """The nested value again."""
    rest = iter(tensors)
    value = _build(rest, spec)
    assert next(rest, None) is None  # the spec was made with exactly these tensors
    return value


def _build(tensors: Iterator[torch.Tensor], spec: Spec) -> Any:
    if spec == "tensor":
        return next(tensors)
    if spec is None:
        return None
    kind, *items = spec
    if kind == "dict":
        return {key: _build(tensors, item) for key, item in items}
    built = [_build(tensors, item) for item in items]
    return tuple(built) if kind == "tuple" else built
