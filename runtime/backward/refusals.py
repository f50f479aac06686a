"""Modules and graphs whose backward cannot be split, refused by name before step 1."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from zbsolve.errors import InputError
from zbsolve.runtime.backward.graph_cut import children_first


def refuse_unsupported(module: nn.Module, where: str) -> None:
    """Raise ``InputError`` naming a module or parameter whose gradients would be silently wrong."""
    for name, part in module.named_modules():
        place = f"{where}{'.' + name if name else ''}"
        kind = type(part).__name__
        if isinstance(part, nn.parallel.DistributedDataParallel) or "FullyShardedDataParallel" in kind:
            raise InputError(
                f"{place} is a {kind}: pass the bare module, and run pipelines side by side (--data-parallel)"
            )
        if kind == "OptimizedModule":
            raise InputError(f"{place} is compiled: pass the module without torch.compile")
    for name, parameter in module.named_parameters():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or parameter._backward_hooks
        if hooks:
            raise InputError(f"{where}.{name} has a gradient hook: remove it, W would not call it")


# Graph nodes whose backward cannot be split or repeated, with what to do instead.
_REFUSED_NODES = {
    "CheckpointFunctionBackward": "uses reentrant checkpointing: pass use_reentrant=False",
    "CompiledFunctionBackward": "is compiled: use it without torch.compile",
}


def refuse_graph(outputs: Iterable[torch.Tensor], where: str) -> None:
    """Raise ``InputError`` when a graph holds a node whose backward cannot be split."""
    nodes = [get_gradient_edge(t).node for t in outputs if t.requires_grad]
    for node in children_first(nodes):
        reason = _REFUSED_NODES.get(node.name())
        if reason is not None:
            raise InputError(f"{where} {reason}")
