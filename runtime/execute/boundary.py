"""What ranks agree on before step 1: what each boundary between stages carries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pickle import PicklingError

import torch

from zbsolve.errors import InputError
from zbsolve.runtime.execute.transport import Shape
from zbsolve.runtime.values import Spec

# In :attr:`Boundary.memory`: the stage that returned the tensor keeps its memory for later calls.
KEPT = -1


@dataclass(frozen=True)
class Boundary:
    """What a stage receives going forward, and which of it gets a gradient.

    ``memory`` says whose memory each tensor was: the place of the first tensor with the same memory, or
    :data:`KEPT`.
    """

    spec: Spec
    shapes: tuple[Shape, ...]
    needs: tuple[bool, ...]
    memory: tuple[int, ...]

    @cached_property
    def gradient_shapes(self) -> tuple[Shape, ...]:
        """What goes back over it."""
        return tuple(shape for shape, need in zip(self.shapes, self.needs, strict=True) if need)

    def alone(self, place: int) -> bool:
        """Whether nothing else that lives on has a tensor's memory."""
        return self.memory[place] != KEPT and self.memory.count(self.memory[place]) == 1

    def to_text(self, where: str) -> str:
        """For the store.

        Raises
        ------
        InputError
            A container of a type that other ranks cannot import; ``where`` is what the value is called.
        """
        shapes = [[list(s.size), str(s.dtype).removeprefix("torch.")] for s in self.shapes]
        try:
            spec = self.spec.to_text()
        except (TypeError, AttributeError, PicklingError) as error:
            raise InputError(
                f"{where} has a type that other ranks cannot import ({error}): define it at the top of a "
                "module"
            ) from None
        return json.dumps([spec, shapes, self.needs, self.memory])

    @classmethod
    def from_text(cls, text: str) -> Boundary:
        """From the store."""
        spec, shapes, needs, memory = json.loads(text)
        sizes = tuple(Shape(tuple(s), getattr(torch, d)) for s, d in shapes)
        return cls(Spec.from_text(spec), sizes, tuple(needs), tuple(memory))


def memory_of(tensors: Sequence[torch.Tensor], kept: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """Whose memory each tensor is, where those at ``kept`` are the stage's."""
    first: dict[int, int] = {}
    return tuple(
        KEPT if place in kept else first.setdefault(tensor.untyped_storage()._cdata, place)
        for place, tensor in enumerate(tensors)
    )
