"""What ranks agree on before step 1: what each boundary between stages carries."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property

import torch

from zbsolve.runtime.transport import Shape
from zbsolve.runtime.values import Spec


@dataclass(frozen=True)
class Boundary:
    """What a stage receives going forward, and which of it gets a gradient."""

    spec: Spec
    shapes: tuple[Shape, ...]
    needs: tuple[bool, ...]

    @cached_property
    def gradient_shapes(self) -> tuple[Shape, ...]:
        """What goes back over it."""
        return tuple(shape for shape, need in zip(self.shapes, self.needs, strict=True) if need)

    def to_text(self) -> str:
        """For the store."""
        shapes = [[list(s.size), str(s.dtype).removeprefix("torch.")] for s in self.shapes]
        return json.dumps([self.spec, shapes, list(self.needs)])

    @classmethod
    def from_text(cls, text: str) -> Boundary:
        """From the store."""
        spec, shapes, needs = json.loads(text)
        return cls(spec, tuple(Shape(tuple(s), getattr(torch, d)) for s, d in shapes), tuple(needs))
