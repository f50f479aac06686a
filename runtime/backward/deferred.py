"""Weight gradients put aside: layers whose backward leaves the weight's part to W.

While a store is set, every ``nn.Linear``, plain ``nn.Embedding`` and zero-padded convolution computes its
output with stand-ins for its parameters, which B asks no gradient of: autograd then computes the input
gradient and nothing else. The layer's input, and the gradient of its output when B reaches it, are put
aside as a :class:`Call`; W makes the weight gradient of them, by the kernels that autograd itself would
use, and frees them.

Two ways of learning the output's gradient: a hook on the output's node (the quick one), and, where a
hook will not do, a function of its own behind the layer: when the input needs no gradient (the first stage,
a frozen prefix), the output must still require one; and under a checkpoint the input must not be kept.
Norms are left to autograd: their weight gradients are small, and putting them aside would keep two
activations each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import nn

Gradients = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
Pack = Callable[[torch.Tensor], Any]

# As torch says it of its own saved tensors.
CHANGED = "needed for gradient computation has been modified by an inplace operation"


class Call(NamedTuple):
    """One use of a layer whose weight gradient is still to be computed, by ``gradients(x, grad)``."""

    parameters: tuple[nn.Parameter, ...]
    x: torch.Tensor
    grad: torch.Tensor
    gradients: Gradients


@dataclass(slots=True)
class Store:
    """Calls put aside for one stage and micro-batch. ``pack`` counts saved memory, when accounting."""

    calls: list[Call] = field(default_factory=list)
    pack: Pack | None = None


def _no_autocast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Types as given; nothing to enter where autocast is off anyway."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class _Aside(torch.autograd.Function):
    """Hands ``y`` through; its backward puts ``x`` and the gradient aside.

    The weight is an argument so that the output requires a gradient whether or not ``x`` does; B gets
    none for it from here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        store: Store,
        parameters: tuple[nn.Parameter, ...],
        gradients: Gradients,
        x: torch.Tensor,
        y: torch.Tensor,
        weight: nn.Parameter,
    ) -> torch.Tensor:
        ctx.store, ctx.parameters, ctx.gradients = store, parameters, gradients
        ctx.save_for_backward(x)
        ctx.mark_dirty(y)  # handed through as it is: a view of it could not be changed in place later
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.store.calls.append(Call(ctx.parameters, x.detach(), grads[0].detach(), ctx.gradients))
        return None, None, None, None, grads[0] if ctx.needs_input_grad[4] else None, None


def _foreign_hooks(store: Store) -> bool:
    """Whether somebody (a checkpoint) wants to decide how tensors are kept for the backward."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and top[0] is not store.pack


def _put_aside(
    store: Store,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    gradients: Gradients,
    x: torch.Tensor,
    y: torch.Tensor,
) -> torch.Tensor:
    """``y``, with the arrival of its gradient arranged for."""
    parameters = (weight,) if bias is None or not bias.requires_grad else (weight, bias)
    kept = x.detach()
    # A view that is changed in place gets another node; its base's node stays in the graph.
    whole = y._base if y._is_view() else y
    node = None if whole is None else whole.grad_fn
    if (
        not x.requires_grad
        or node is None
        or whole is None
        or whole.numel() != y.numel()
        or _foreign_hooks(store)
    ):
        through = y.detach() if not x.requires_grad else y.clone() if y._is_view() else y
        result: torch.Tensor = _Aside.apply(  # type: ignore[no-untyped-call]
            store, parameters, gradients, kept, through, weight
        )
        return result
    calls, version, shape, as_it_is = store.calls, kept._version, y.shape, whole is y

    # It must not refer to ``y``: the node keeps it, and ``y`` keeps the node.
    def arrived(grads: tuple[torch.Tensor, ...]) -> None:
        if grads[0] is not None:
            if kept._version != version:
                raise RuntimeError(f"a tensor {CHANGED}")
            grad = grads[0] if as_it_is else grads[0].reshape(shape)
            calls.append(Call(parameters, kept, grad, gradients))

    node.register_prehook(arrived)
    return y


def _stand_in(parameter: nn.Parameter | None) -> torch.Tensor | None:
    """Another leaf with the same data. It requires a gradient because some kernels are chosen by that."""
    return None if parameter is None else parameter.detach().requires_grad_(parameter.requires_grad)


# --- the layers ---------------------------------------------------------------------------------


def _linear_gradients(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if x.dim() != 2:
        x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    with _no_autocast(x):
        return (grad.t() @ x,)


def _linear_gradients_with_bias(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if x.dim() != 2:
        x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    with _no_autocast(x):
        return grad.t() @ x, grad.sum(0)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def can_defer(module: nn.Module) -> bool:
    """Whether a module's weight gradient can be put aside.

    Exact types with their class's forward only: a subclass, or a forward that somebody has put on the
    module itself, may compute something else.
    """
    own = module.__dict__.get("forward")
    if own is not None and getattr(own, "__module__", None) != __name__:
        return False
    if type(module) is nn.Linear:
        return True
    if type(module) in _CONVOLUTIONS:
        assert isinstance(module, _CONVOLUTIONS)
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    plain = type(module) is nn.Embedding and module.max_norm is None
    return plain and not module.sparse and not module.scale_grad_by_freq


class Deferral:
    """Routes the forwards of layers through :func:`_put_aside` while a store is set.

    One for the process, because stages on a device may share a module, and because autograd may run a
    checkpoint's recomputation on a thread of its own.
    """

    def __init__(self) -> None:
        self.store: Store | None = None

    def install(self, module: nn.Module) -> None:
        """Prepare every layer of a stage that can defer."""
        for part in module.modules():
            if not can_defer(part):
                continue
            if isinstance(part, nn.Linear):
                forward = self._linear(part)
            elif isinstance(part, nn.Embedding):
                forward = self._embedding(part)
            else:
                assert isinstance(part, _CONVOLUTIONS)
                forward = self._convolution(part)
            object.__setattr__(part, "forward", forward)

    @contextmanager
    def into(self, store: Store | None) -> Iterator[None]:
        """Layers that run in here put their weight gradients into ``store``."""
        self.store = store
        try:
            yield
        finally:
            self.store = None

    def _open(self, weight: Any, x: torch.Tensor) -> Store | None:
        """The store, when this call of a layer can use it."""
        if (
            self.store is None
            or weight is None  # something computes it (old-style weight norm): autograd's business
            or not weight.requires_grad
            or not torch.is_grad_enabled()
        ):
            return None
        return self.store

    def _linear(self, module: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        parameters = module._parameters

        def forward(x: torch.Tensor) -> torch.Tensor:
            weight, bias = parameters.get("weight"), parameters.get("bias")
            store = self._open(weight, x)
            if store is None:
                return functional.linear(x, module.weight, module.bias)
            assert isinstance(weight, nn.Parameter)
            kind = x.device.type
            if torch.is_autocast_enabled(kind):
                x = x.to(torch.get_autocast_dtype(kind))
            y = functional.linear(x, _stand_in(weight), _stand_in(bias))  # type: ignore[arg-type]
            with_bias = bias is not None and bias.requires_grad
            gradients = _linear_gradients_with_bias if with_bias else _linear_gradients
            return _put_aside(store, weight, bias, gradients, x, y)

        return forward

    def _embedding(self, module: nn.Embedding) -> Callable[[torch.Tensor], torch.Tensor]:
        rows = module.num_embeddings
        padding = -1 if module.padding_idx is None else module.padding_idx

        def gradients(ids: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (torch.ops.aten.embedding_dense_backward(grad, ids, rows, padding, False),)

        def forward(ids: torch.Tensor) -> torch.Tensor:
            weight = module._parameters.get("weight")
            store = self._open(weight, ids)
            if store is None:
                return functional.embedding(ids, module.weight, module.padding_idx)
            assert isinstance(weight, nn.Parameter)
            y = functional.embedding(ids, weight.detach(), module.padding_idx)
            return _put_aside(store, weight, None, gradients, ids, y)

        return forward

    def _convolution(self, module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        parameters = module._parameters
        spatial = len(module.kernel_size)
        fixed = (module.stride, module.padding, module.dilation, False, (0,) * spatial, module.groups)

        def make_gradients(weight: nn.Parameter, bias: nn.Parameter | None) -> Gradients:
            sizes = [weight.shape[0]] if bias is not None and bias.requires_grad else None

            def gradients(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
                wanted = [False, True, sizes is not None]
                with _no_autocast(x):
                    _, dw, db = torch.ops.aten.convolution_backward(
                        grad, x, weight.detach().to(x.dtype), sizes, *fixed, wanted
                    )
                return (dw,) if sizes is None else (dw, db)

            return gradients

        def forward(x: torch.Tensor) -> torch.Tensor:
            weight, bias = parameters.get("weight"), parameters.get("bias")
            store = self._open(weight, x)
            if store is None or x.dim() != spatial + 2:
                plain: torch.Tensor = module._conv_forward(x, module.weight, module.bias)
                return plain
            assert isinstance(weight, nn.Parameter)
            kind = x.device.type
            if torch.is_autocast_enabled(kind):
                x = x.to(torch.get_autocast_dtype(kind))
            y = module._conv_forward(x, _stand_in(weight), _stand_in(bias))
            return _put_aside(store, weight, bias, make_gradients(weight, bias), x, y)

        return forward


DEFERRAL = Deferral()
