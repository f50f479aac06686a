"""What a stage takes and returns: nested values, flattened to tensors for the transport.

Containers are those that torch's pytree knows: tuples, lists, dicts, named tuples, ordered dicts, and what
is registered with it (transformers' model outputs are; a dataclass, once it has been given to
``torch.export.register_dataclass``). At the leaves stand tensors, and constants: None, numbers, strings,
types. A constant is part of the :class:`Spec`: both sides of a boundary agree on it before step 1, and a
micro-batch that brings another is told apart from those agreed on.
"""

from __future__ import annotations

import base64
import enum
import pickle
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from zbsolve.errors import InputError

_CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A leaf that is no tensor. Equal when of one type and written alike (a NaN is equal to itself)."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return NotImplemented
        return type(self.value) is type(other.value) and repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash(repr(self.value))


@dataclass(frozen=True, slots=True)
class Spec:
    """How a value is nested, and its constants: ``leaves`` has None where a tensor stands."""

    tree: pytree.TreeSpec
    leaves: tuple[Constant | None, ...]

    def to_text(self) -> str:
        """For the ranks' store.

        Raises
        ------
        TypeError, AttributeError, pickle.PicklingError
            A container's type that cannot be imported by its name.
        """
        return base64.b64encode(pickle.dumps((self.tree, self.leaves))).decode("ascii")

    @classmethod
    def from_text(cls, text: str) -> Spec:
        """What another rank of this job wrote."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about a class that torch's own specs are of
            return cls(*pickle.loads(base64.b64decode(text)))

    @property
    def nesting(self) -> str:
        """The containers and the constants' types, for telling micro-batches of unlike shape apart."""
        kinds = ["tensor" if leaf is None else type(leaf.value).__name__ for leaf in self.leaves]
        return f"{self.tree} {kinds}"


# A value that is one tensor: most are, and it is made once.
TENSOR = Spec(pytree.tree_structure(0), (None,))


def flatten(value: Any, where: str) -> tuple[list[torch.Tensor], Spec]:
    """Tensors of a nested value in a fixed order, and the spec from which :func:`unflatten` rebuilds it.

    Raises
    ------
    InputError
        A leaf that is neither a tensor nor a constant; ``where`` is what the value is called.
    """
    if isinstance(value, torch.Tensor):
        return [value], TENSOR
    found, tree = pytree.tree_flatten(value)
    tensors = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
    if len(tensors) == len(found):
        return tensors, Spec(tree, (None,) * len(found))
    leaves: list[Constant | None] = []
    for place, leaf in enumerate(found):
        if isinstance(leaf, torch.Tensor):
            leaves.append(None)
        elif leaf is None or isinstance(leaf, _CONSTANTS):
            leaves.append(Constant(leaf))
        else:
            raise InputError(
                f"{where}{_path(value, place)} is a {type(leaf).__name__}: pass tensors, numbers, strings or "
                "None in tuples, lists and dicts, or register the type (torch.export.register_dataclass for "
                "a dataclass)"
            )
    return tensors, Spec(tree, tuple(leaves))


def _path(value: Any, place: int) -> str:
    """Where a leaf stands within a value, as one would write it in Python."""
    try:
        path, _ = pytree.tree_flatten_with_path(value)[0][place]
    except ValueError:  # a registered type that cannot name its parts
        return f", leaf {place},"
    return pytree.keystr(path)


def unflatten(tensors: Iterable[torch.Tensor], spec: Spec) -> Any:
    """The nested value again."""
    rest = iter(tensors)
    if spec is TENSOR:
        value = next(rest)
    else:
        leaves = [next(rest) if leaf is None else leaf.value for leaf in spec.leaves]
        value = pytree.tree_unflatten(leaves, spec.tree)
    assert next(rest, None) is None  # the spec was made with exactly these tensors
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of any value, whatever else is in it."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def spread(prefix: Any, value: Any, where: str) -> list[Any]:
    """A leaf for each leaf of ``value``: those of ``prefix``, which stand for everything below them.

    Raises
    ------
    InputError
        ``prefix``, called ``where``, is nested in another way than the value.
    """
    leaves, tree = pytree.tree_flatten(value)
    # None is a leaf to torch's pytree, and so is a number: both stand for what is below them.
    filled = pytree._broadcast_to_and_flatten(prefix, tree)
    if filled is None:
        raise InputError(f"{where} is nested in another way than the value that it is for: nest both alike")
    assert len(filled) == len(leaves)
    return filled
