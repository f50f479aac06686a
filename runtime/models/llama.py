"""A LLaMA-like decoder whose layers are built one at a time, for profiles of models that do not fit whole.

Root-mean-square norms, rotary positions, grouped key and value heads, gated feed-forward layers, no biases.
:class:`LazyLayers` builds a layer when it is asked for and keeps none: a layer profile holds one at a time,
a pipeline's rank only its own. Data are random token ids: the profile wants their shapes, not their sense.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch
import torch.nn.functional as functional
from torch import nn

from zbsolve.runtime.models.pipeline_model import MicroBatch, cut_rows


class LazyLayers(Sequence[nn.Module]):
    """Layers that are built anew at each access, always with the same weights.

    Parameters
    ----------
    builders : sequence of callables
        One a layer.
    seed : int
        Weights are drawn after seeding torch with ``seed + index``.
    """

    def __init__(self, builders: Sequence[Callable[[], nn.Module]], seed: int) -> None:
        self._builders, self._seed = tuple(builders), seed

    def __len__(self) -> int:
        return len(self._builders)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> list[nn.Module]: ...

    def __getitem__(self, index: int | slice) -> nn.Module | list[nn.Module]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        with torch.random.fork_rng():
            torch.manual_seed(self._seed + index % len(self))
            return self._builders[index]()


class TokenEmbedding(nn.Module):
    """Token ids (rows, T) to activations (rows, T, h)."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.token(ids)
        return result


class RMSNorm(nn.Module):
    """Activations divided by their root mean square, times a weight."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions on (rows, heads, T, d): each pair of coordinates turns with its position."""
    length, half = x.shape[-2], x.shape[-1] // 2
    speeds = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(length, device=x.device, dtype=torch.float32), speeds)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class DecoderBlock(nn.Module):
    """Attention with grouped key and value heads, then a gated feed-forward layer, both residual."""

    def __init__(self, hidden: int, heads: int, groups: int, feed_forward: int) -> None:
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, hidden // heads
        self.norm1, self.norm2 = RMSNorm(hidden), RMSNorm(hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, groups * self.width, bias=False)
        self.value = nn.Linear(hidden, groups * self.width, bias=False)
        self.merge = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, feed_forward, bias=False)
        self.up = nn.Linear(hidden, feed_forward, bias=False)
        self.down = nn.Linear(feed_forward, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, hidden = x.shape
        y = self.norm1(x)

        def heads(projected: torch.Tensor, number: int) -> torch.Tensor:
            return projected.view(rows, length, number, self.width).transpose(1, 2)

        q, k = rotated(heads(self.query(y), self.heads)), rotated(heads(self.key(y), self.groups))
        v = heads(self.value(y), self.groups)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(rows, length, hidden))
        y = self.norm2(x)
        result: torch.Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return result


class LanguageHead(nn.Module):
    """Final norm and the projection to a large vocabulary."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden)
        self.project = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.project(self.norm(x))
        return result


class Llama:
    """Embedding, blocks, and a head over a large vocabulary: the last layer is worth many blocks."""

    def __init__(
        self,
        hidden: int = 256,
        blocks: int = 10,
        heads: int = 8,
        groups: int = 2,
        feed_forward: int = 704,
        vocabulary: int = 12_000,
        context: int = 128,
        rows: int = 2,
        seed: int = 0,
    ) -> None:
        self.vocabulary, self.context, self.rows = vocabulary, context, rows

        def block() -> nn.Module:
            return DecoderBlock(hidden, heads, groups, feed_forward)

        builders: list[Callable[[], nn.Module]] = [
            lambda: TokenEmbedding(vocabulary, hidden),
            *[block] * blocks,
            lambda: LanguageHead(hidden, vocabulary),
        ]
        self.layers: Sequence[nn.Module] = LazyLayers(builders, seed)

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross entropy of the next token, mean over all positions."""
        return functional.cross_entropy(output.flatten(0, 1), targets.flatten())

    def microbatches(self, step: int, count: int) -> list[MicroBatch]:
        """Random ids, drawn anew each step."""
        generator = torch.Generator().manual_seed(step)
        size = (count * self.rows, self.context + 1)
        ids = torch.randint(self.vocabulary, size, generator=generator)
        return cut_rows(ids[:, :-1], ids[:, 1:], count)


def small() -> Llama:
    """Ten blocks and a head worth about six of them: small enough for two CPU processes."""
    return Llama()
