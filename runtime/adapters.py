"""Models from elsewhere as lists of layers: ``nn.Sequential``, and causal language models of transformers.

A factory in your own module is two lines:

    def factory():
        return sequential(nn.Sequential(...), loss=nn.functional.mse_loss, batch=lambda step: (x, y))

    def factory():
        return causal_lm(LlamaForCausalLM(LlamaConfig(...)), batch=lambda step: ids)

transformers is imported only where :func:`causal_lm`'s model comes from; models are built from a
configuration with random weights or loaded by whoever writes the factory. A head tied to the embedding stays
tied, on one device or on two. Not modelled: padding masks and caches of causal language models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from zbsolve.errors import InputError
from zbsolve.runtime.models import MicroBatch, PipelineModel, cut_rows

Batch = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


class _Layers:
    """A list of layers with a loss and a source of batches."""

    def __init__(self, layers: Sequence[nn.Module], loss: Callable[[Any, Any], torch.Tensor], batch: Batch):
        self.layers: Sequence[nn.Module] = layers
        self._loss, self._batch = loss, batch

    def loss(self, output: Any, targets: Any) -> torch.Tensor:
        """Scalar loss of one micro-batch."""
        return self._loss(output, targets)

    def microbatches(self, step: int, count: int) -> list[MicroBatch]:
        """The step's batch, cut along its rows."""
        return cut_rows(*self._batch(step), count)


def sequential(
    module: nn.Sequential, loss: Callable[[Any, Any], torch.Tensor], batch: Batch
) -> PipelineModel:
    """An ``nn.Sequential``: every entry is a layer.

    Parameters
    ----------
    loss : callable
        ``loss(output, targets)``: a mean over rows.
    batch : callable
        ``batch(step)``: inputs and targets of a step, rows first. The same on every rank.
    """
    return _Layers(list(module), loss, batch)


# --- causal language models of transformers -------------------------------------------------------


class _Embed(nn.Module):
    """Token ids (rows, T) to activations (rows, T, d)."""

    def __init__(self, embedding: nn.Module, positions: nn.Module | None) -> None:
        super().__init__()
        self.embedding, self.positions = embedding, positions

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device).unsqueeze(0))
        return x


class _RotaryBlock(nn.Module):
    """A decoder layer with rotary positions, which each stage computes for itself."""

    def __init__(self, block: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.block, self.rotary = block, rotary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        around = self.rotary(x, position_ids=places)
        return _first(self.block(x, attention_mask=None, position_ids=places, position_embeddings=around))


class _Block(nn.Module):
    """A decoder layer that needs its input alone."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _first(self.block(x))


def _first(result: Any) -> torch.Tensor:
    # Some versions return a tuple.
    value = result[0] if isinstance(result, tuple) else result
    assert isinstance(value, torch.Tensor)
    return value


class _Head(nn.Module):
    """Final norm and the projection to logits."""

    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(x))
        return result


def _next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each next token, as transformers' own loss."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def causal_lm(model: Any, batch: Callable[[int], torch.Tensor]) -> PipelineModel:
    """A causal language model of transformers: embedding, one layer a block, norm and head.

    Parameters
    ----------
    model : LlamaForCausalLM and models built like it (Mistral, Qwen2), or GPT2LMHeadModel
        Whatever its weights are. Blocks must attend causally without a mask ("sdpa" attention does).
    batch : callable
        ``batch(step)``: token ids (rows, T), which are the targets as well.

    Raises
    ------
    InputError
        A model of another build.
    """
    inner = getattr(model, "model", None)
    if all(hasattr(inner, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb")):
        assert inner is not None
        layers: list[nn.Module] = [_Embed(inner.embed_tokens, None)]
        layers += [_RotaryBlock(block, inner.rotary_emb) for block in inner.layers]
        layers.append(_Head(inner.norm, model.lm_head))
    elif all(hasattr(getattr(model, "transformer", None), name) for name in ("wte", "wpe", "h", "ln_f")):
        inner = model.transformer
        layers = [_Embed(inner.wte, inner.wpe), *(_Block(block) for block in inner.h)]
        layers.append(_Head(inner.ln_f, model.lm_head))
    else:
        raise InputError(
            f"causal_lm: a {type(model).__name__} is built in another way than Llama and GPT-2: return a "
            "PipelineModel of your own"
        )
    implementation = getattr(model.config, "_attn_implementation", "sdpa")
    if implementation != "sdpa":
        raise InputError(f"causal_lm: attn_implementation is {implementation!r}: build the model with 'sdpa'")

    def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch(step)
        return ids, ids

    return _Layers(layers, _next_token_loss, rows)
