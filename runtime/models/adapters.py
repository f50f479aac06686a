"""Models from elsewhere as lists of layers: ``nn.Sequential``, and causal language models of transformers.

A factory in your own module is two lines:

    def factory():
        return sequential(nn.Sequential(...), loss=nn.functional.mse_loss, batch=lambda step: (x, y))

    def factory():
        return causal_lm(LlamaForCausalLM(LlamaConfig(...)), batch=lambda step: ids)

transformers is imported only where :func:`causal_lm`'s model comes from; models are built from a
configuration with random weights or loaded by whoever writes the factory. A head tied to the embedding stays
tied, on one device or on two. A padding mask travels with the activations. Not modelled: caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from zbsolve.errors import InputError
from zbsolve.runtime.models.pipeline_model import MicroBatch, PipelineModel, cut_rows

Batch = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


class _Layers:
    """A list of layers with a loss and a source of batches."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        loss: Callable[[Any, Any], torch.Tensor],
        batch: Callable[[int], Any],
    ) -> None:
        self.layers: Sequence[nn.Module] = layers
        self._loss, self._batch = loss, batch

    def loss(self, output: Any, targets: Any) -> torch.Tensor:
        """Scalar loss of one micro-batch."""
        return self._loss(output, targets)

    def microbatches(self, step: int, count: int) -> list[MicroBatch]:
        """The step's batch, cut along its rows."""
        inputs, targets = self._batch(step)
        return cut_rows(inputs, targets, count)


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


# Activations (rows, T, d), or these and the mask of tokens that are not padding, (rows, T), true or false.
Activations = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

# As in transformers: what the loss leaves out.
IGNORED = -100

# Tokens of the row on which a model and its parts are compared, and how close their logits must be: both call
# the same kernels, so that what is apart further is a part left out.
_PROBED = 8
_SAME = 1e-2


def _apart(value: Activations) -> tuple[torch.Tensor, torch.Tensor | None]:
    return value if isinstance(value, tuple) else (value, None)


def _together(x: torch.Tensor, mask: torch.Tensor | None) -> Activations:
    return x if mask is None else (x, mask)


def _attended(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Who attends to whom, (rows, 1, T, T): to tokens up to one's own, padding left out.

    As in transformers, padding on the left attends to nothing: attention gives zeros there.
    """
    if mask is None:
        return None
    places = torch.arange(mask.shape[1], device=mask.device)
    causal = places[:, None] >= places[None, :]
    return (causal & mask[:, None, :]).unsqueeze(1)


class _Embed(nn.Module):
    """Token ids (rows, T), with a mask or without, to activations."""

    def __init__(self, embedding: nn.Module, positions: nn.Module | None) -> None:
        super().__init__()
        self.embedding, self.positions = embedding, positions

    def forward(self, value: Activations) -> Activations:
        ids, mask = _apart(value)
        x: torch.Tensor = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device).unsqueeze(0))
        return _together(x, mask)


class _RotaryBlock(nn.Module):
    """A decoder layer with rotary positions, which each stage computes for itself."""

    def __init__(self, block: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.block, self.rotary = block, rotary

    def forward(self, value: Activations) -> Activations:
        x, mask = _apart(value)
        places = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        around = self.rotary(x, position_ids=places)
        result = self.block(
            x, attention_mask=_attended(mask), position_ids=places, position_embeddings=around
        )
        return _together(_first(result), mask)


class _Block(nn.Module):
    """A decoder layer that needs its input alone."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, value: Activations) -> Activations:
        x, mask = _apart(value)
        return _together(_first(self.block(x, attention_mask=_attended(mask))), mask)


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

    def forward(self, value: Activations) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(_apart(value)[0]))
        return result


class _CausalLM(_Layers):
    """Layers whose batches may be padded. ``window``: how far back attention looks, where it has a limit."""

    def __init__(self, layers: Sequence[nn.Module], batch: Callable[[int], Any], window: int | None) -> None:
        super().__init__(layers, _next_token_loss, batch)
        self._window = window

    def microbatches(self, step: int, count: int) -> list[MicroBatch]:
        """The step's batch, cut along its rows, each weighted by the tokens that it has to predict."""
        batch = self._batch(step)
        ids = batch if isinstance(batch, torch.Tensor) else batch[0]
        if self._window is not None and ids.shape[1] > self._window:
            raise InputError(
                f"causal_lm: rows of {ids.shape[1]} tokens are longer than the model's sliding window of "
                f"{self._window}, and layers attend to all: give shorter rows, or set sliding_window=None"
            )
        if isinstance(batch, torch.Tensor):
            return cut_rows(batch, batch, count)
        mask = batch[1].bool()
        if mask.shape != ids.shape:
            raise InputError(
                f"causal_lm: the mask has the shape {tuple(mask.shape)}, the ids {tuple(ids.shape)}: "
                "give one entry a token"
            )
        labels = ids.masked_fill(~mask, IGNORED)
        predicted = (labels[:, 1:] != IGNORED).sum(1)
        shares = [float(rows.sum() / predicted.sum()) for rows in predicted.tensor_split(count)]
        cut = [
            MicroBatch(own.inputs, own.targets, share)
            for own, share in zip(cut_rows((ids, mask), labels, count), shares, strict=True)
        ]
        for number, microbatch in enumerate(cut):
            if not microbatch.weight > 0:
                raise InputError(
                    f"causal_lm: micro-batch {number} of step {step} has no token to predict: give it a row "
                    "with two tokens that are not padding"
                )
        return cut


def _next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each next token that is not padding, as transformers' own loss."""
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED
    )


def causal_lm(
    model: Any, batch: Callable[[int], torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
) -> PipelineModel:
    """A causal language model of transformers: embedding, one layer a block, norm and head.

    Parameters
    ----------
    model : LlamaForCausalLM and models built like it (Mistral, Mixtral, Qwen2), or GPT2LMHeadModel
        Whatever its weights are. What its parts give one after the other is compared with what it gives
        itself, on one short row. Blocks must attend causally without a mask ("sdpa" attention does).
    batch : callable
        ``batch(step)``: token ids (rows, T), which are the targets as well; or ids and a mask of the same
        shape, 1 for tokens and 0 for padding on either side, as tokenizers of transformers give it. The
        step's loss is the mean over all tokens predicted, however the rows are cut.

    Raises
    ------
    InputError
        A model of another build, or one whose loss or attention its parts alone do not have.
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
    if getattr(model.config, "output_router_logits", False):
        raise InputError(
            "causal_lm: the loss would have a part of the router's logits, which layers do not hand on: set "
            "output_router_logits=False"
        )
    window = getattr(model.config, "sliding_window", None)
    if not getattr(model.config, "use_sliding_window", True):
        window = None
    _require_same_logits(model, layers, _PROBED if window is None else min(_PROBED, window))
    return _CausalLM(layers, batch, window)


def _require_same_logits(model: Any, layers: Sequence[nn.Module], length: int) -> None:
    """Refuse a model that does more between its parts than hand values on (Gemma scales its embedding)."""
    training = [part for part in model.modules() if part.training]
    length = min(length, getattr(model.config, "max_position_embeddings", length))
    device = next(model.parameters()).device
    if device.type == "meta":
        return
    ids = torch.arange(length, device=device).unsqueeze(0) % model.config.vocab_size
    model.eval()
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        value: Any = ids
        for layer in layers:
            value = layer.eval()(value)
    for part in training:
        part.training = True
    for layer in layers:
        layer.training = True
    if not torch.allclose(value, whole, rtol=_SAME, atol=_SAME * float(whole.abs().max())):
        raise InputError(
            f"causal_lm: a {type(model).__name__} gives other logits than its embedding, blocks, norm and "
            "head one after the other: return a PipelineModel of your own"
        )
