"""The small GPT that ships: embedding, blocks, head, and text to train on."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import torch
import torch.nn.functional as functional
from torch import nn

from zbsolve.runtime.models.pipeline_model import MicroBatch, cut_rows

# --- the built-in GPT ---------------------------------------------------------------------------


class Embed(nn.Module):
    """Token and position embedding: ids (rows, T) to activations (rows, T, d)."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        result: torch.Tensor = self.token(ids) + self.position(places)
        return result


class Block(nn.Module):
    """Causal self-attention and a 4 d MLP, each behind a LayerNorm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(rows, length, width))
        result: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return result


class Head(nn.Module):
    """Final norm and the projection to logits."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.project(self.norm(x))
        return result


class GPT:
    """A character-level GPT of ten layers (embedding, eight blocks, head); 6.4 M parameters.

    Sized so that one F of half the model takes 10-30 ms on one CPU core.
    """

    def __init__(
        self, width: int = 256, blocks: int = 8, heads: int = 4, context: int = 128, rows: int = 2
    ) -> None:
        text = resources.files("zbsolve.runtime").joinpath("corpus.txt").read_text(encoding="utf-8")
        alphabet = sorted(set(text))
        number = {character: i for i, character in enumerate(alphabet)}
        self.text = torch.tensor([number[character] for character in text])
        self.context, self.rows = context, rows
        self.layers: Sequence[nn.Module] = [
            Embed(len(alphabet), context, width),
            *(Block(width, heads) for _ in range(blocks)),
            Head(width, len(alphabet)),
        ]

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross entropy of the next character, mean over all positions."""
        return functional.cross_entropy(output.flatten(0, 1), targets.flatten())

    def microbatches(self, step: int, count: int) -> list[MicroBatch]:
        """``rows`` windows of the text per micro-batch, drawn anew each step."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(
            len(self.text) - self.context, (count * self.rows,), generator=generator
        ).tolist()
        windows = torch.stack([self.text[s : s + self.context + 1] for s in starts])
        return cut_rows(windows[:, :-1], windows[:, 1:], count)
