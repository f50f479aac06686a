"""B and W apart: the input gradient first, the weight gradient whenever the plan says.

Two mechanisms, both without change to the user's model code:

* **deferred**: during F every ``nn.Linear`` and plain ``nn.Embedding`` runs through a function whose
  backward returns the input gradient at once and puts (input, output gradient) aside; W turns those into
  weight gradients and frees them. Gradients of all other parameters (norms, biases of other modules) are
  small; B computes them and holds them until W. Any module is computed rightly; one that has most of its
  parameters elsewhere gains nothing, so "auto" picks the second mechanism there.
* **generic**: any autograd graph. B differentiates to the stage's inputs only, keeps the graph, and records
  the gradients that arrive at the nodes where a branch leaves for parameters alone. W starts from those
  nodes, so it repeats no input gradient. A parameter that several such nodes reach along one path
  (``x @ w @ w``) has no such start: its gradient is taken from the stage's outputs again, which is right and
  slower.

A fused BW is autograd's ordinary backward in both.

Both accumulate into ``Parameter.grad`` in W order, one sum a micro-batch. Not modelled: hooks on
parameters, reentrant checkpointing and compiled modules; :func:`refuse_unsupported` names them before
step 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as functional
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

from zbsolve.errors import InputError
from zbsolve.runtime.randomness import set_seed
from zbsolve.runtime.values import Spec, flatten, unflatten

Mechanism = Literal["auto", "deferred", "generic"]

# "auto" defers where at least this share of a stage's trainable parameters is in modules that can defer.
DEFERRED_SHARE = 0.9


# --- the deferred mechanism ---------------------------------------------------------------------


class _Call(NamedTuple):
    """One use of a module whose weight gradient is still to be computed."""

    parameters: tuple[nn.Parameter, ...]
    tensors: tuple[torch.Tensor, ...]
    gradients: Callable[..., tuple[torch.Tensor, ...]]


@dataclass
class _Store:
    """Put-aside calls of one stage and micro-batch. ``fused`` computes weight gradients at once instead."""

    calls: list[_Call] = field(default_factory=list)
    fused: bool = False


def _linear_gradients(x: torch.Tensor, grad: torch.Tensor, *, bias: bool) -> tuple[torch.Tensor, ...]:
    if x.dim() != 2:
        x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    weight = grad.t() @ x
    return (weight, grad.sum(0)) if bias else (weight,)


def _no_autocast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Types as given; nothing to enter where autocast is off anyway."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class _DeferredLinear(torch.autograd.Function):
    """``F.linear`` whose backward leaves the weight gradient to W.

    The weight is a differentiable argument although B returns no gradient for it: with an input that
    needs none (a frozen prefix, the first stage) the output must still require one. The Parameter object
    is kept on the context, not among the saved tensors: a checkpoint's recomputation hands out others.
    """

    @staticmethod
    def forward(
        ctx: Any, store: _Store, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None
    ) -> torch.Tensor:
        ctx.store, ctx.weight, ctx.bias = store, weight, bias
        ctx.save_for_backward(x)
        with _no_autocast(x):
            return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        (x,) = ctx.saved_tensors
        weight, bias, store = ctx.weight, ctx.bias, ctx.store
        with _no_autocast(x):  # autograd calls this without grad mode
            dx = None
            if ctx.needs_input_grad[1]:
                if x.dim() == 2:
                    dx = grad @ weight.to(grad.dtype)
                else:
                    flat = grad.reshape(-1, grad.shape[-1])
                    dx = (flat @ weight.to(grad.dtype)).reshape(x.shape)
            wants = weight.requires_grad, bias is not None and bias.requires_grad
            if store.fused:
                dw = db = None
                if any(wants):
                    dw, *rest = _linear_gradients(x.detach(), grad, bias=wants[1])
                    db = rest[0] if rest else None
                return None, dx, dw if wants[0] else None, db
            if wants[0]:
                owners = (weight, bias) if wants[1] else (weight,)
                pair = (x.detach(), grad.detach())
                store.calls.append(_Call(owners, pair, lambda a, b: _linear_gradients(a, b, bias=wants[1])))
                return None, dx, None, None
            return None, dx, None, grad.reshape(-1, grad.shape[-1]).sum(0) if wants[1] else None


class _DeferredEmbedding(torch.autograd.Function):
    """``F.embedding`` whose backward leaves everything to W (it has no input gradient)."""

    @staticmethod
    def forward(
        ctx: Any, store: _Store, ids: torch.Tensor, weight: nn.Parameter, padding: int
    ) -> torch.Tensor:
        ctx.store, ctx.weight, ctx.padding = store, weight, padding
        ctx.save_for_backward(ids)
        return functional.embedding(ids, weight, padding if padding >= 0 else None)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        rows, padding = ctx.weight.shape[0], ctx.padding

        def gradient(ids: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (torch.ops.aten.embedding_dense_backward(grad, ids, rows, padding, False),)

        pair = (ids, grads[0].detach())
        if ctx.store.fused:
            return None, None, gradient(*pair)[0], None
        ctx.store.calls.append(_Call((ctx.weight,), pair, gradient))
        return None, None, None, None


def _can_defer(module: nn.Module) -> bool:
    # Exact types: a subclass may compute something else in its forward.
    if type(module) is nn.Linear:
        return True
    plain = type(module) is nn.Embedding and module.max_norm is None
    return plain and not module.sparse and not module.scale_grad_by_freq


class _Deferral:
    """Routes the forwards of modules through the deferred functions while a store is set.

    One for the process, because stages on a device may share a module, and because autograd may run a
    checkpoint's recomputation on a thread of its own.
    """

    def __init__(self) -> None:
        self.store: _Store | None = None

    def install(self, module: nn.Module) -> None:
        for part in module.modules():
            if type(part) is nn.Linear:
                object.__setattr__(part, "forward", self._linear(part))
            elif _can_defer(part):
                assert isinstance(part, nn.Embedding)
                object.__setattr__(part, "forward", self._embedding(part))

    @contextmanager
    def into(self, store: _Store | None) -> Iterator[None]:
        self.store = store
        try:
            yield
        finally:
            self.store = None

    def _linear(self, module: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            weight, bias = module.weight, module.bias
            # A weight that something computed (old-style weight norm) is autograd's business.
            autocast = torch.is_autocast_enabled(x.device.type)
            if (
                self.store is None
                or not isinstance(weight, nn.Parameter)
                or not torch.is_grad_enabled()
                or (x.dtype != weight.dtype and not autocast)
            ):
                return functional.linear(x, weight, bias)
            if autocast:
                x = x.to(torch.get_autocast_dtype(x.device.type))
            return _apply(_DeferredLinear, self.store, x, weight, bias)

        return forward

    def _embedding(self, module: nn.Embedding) -> Callable[[torch.Tensor], torch.Tensor]:
        padding = -1 if module.padding_idx is None else module.padding_idx

        def forward(ids: torch.Tensor) -> torch.Tensor:
            weight = module.weight
            if self.store is None or not weight.requires_grad or not isinstance(weight, nn.Parameter):
                return functional.embedding(ids, weight, module.padding_idx)
            return _apply(_DeferredEmbedding, self.store, ids, weight, padding)

        return forward


_DEFERRAL = _Deferral()


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


# --- the generic mechanism ----------------------------------------------------------------------


class _Start(NamedTuple):
    """Where W may begin: a node, and the parameters that its own branches alone lead to."""

    node: Node
    parameters: tuple[int, ...]


@dataclass
class _Cut:
    """How a graph splits: nodes to record in B, output edges that lead to parameters only, and the rest."""

    starts: list[_Start]
    loose_roots: list[tuple[int, tuple[int, ...]]]
    entangled: tuple[int, ...]


def _cut_graph(
    roots: Sequence[GradientEdge], inputs: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]
) -> _Cut:
    """Find the starts of W in the graph below ``roots``.

    With R the nodes that lead to a stage input, a start is a node in R with a branch outside R that leads
    to parameters. Parameters that a start reaches both by such a branch and through R are entangled:
    starting there would count the paths through R as well.
    """
    sources = {get_gradient_edge(tensor).node for tensor in inputs}
    bit = {get_gradient_edge(parameter).node: 1 << i for i, parameter in enumerate(parameters)}
    order = _children_first([edge.node for edge in roots])
    leads: dict[Node, int] = {}  # parameters that a node reaches, as a bit mask
    in_r: set[Node] = set()
    own_bits: dict[Node, int] = {}
    entangled = 0
    for node in order:
        mask, through_r, own = bit.get(node, 0), 0, 0
        reaches = node in sources
        for child, _ in node.next_functions:
            if child is None:
                continue
            mask |= leads[child]
            if child in in_r:
                reaches = True
                through_r |= leads[child]
            else:
                own |= leads[child]
        leads[node] = mask
        if reaches:
            in_r.add(node)
            if own:
                own_bits[node] = own
                entangled |= own & through_r
    starts = [_Start(node, free) for node, own in own_bits.items() if (free := _bits(own & ~entangled))]
    loose = [
        (index, free)
        for index, edge in enumerate(roots)
        if edge.node not in in_r and (free := _bits(leads[edge.node] & ~entangled))
    ]
    return _Cut(starts, loose, _bits(entangled))


def _children_first(roots: Sequence[Node]) -> list[Node]:
    done: set[Node] = set()
    order: list[Node] = []
    stack: list[tuple[Node, bool]] = [(node, False) for node in roots]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in done:
            done.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return order


def _bits(mask: int) -> tuple[int, ...]:
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)


class _Recorder:
    """Keeps the gradients that arrive at a node."""

    def __init__(self, node: Node) -> None:
        self.gradients: tuple[torch.Tensor | None, ...] = ()
        self._handle = node.register_prehook(self._record)

    def _record(self, gradients: tuple[torch.Tensor, ...]) -> None:
        self.gradients = tuple(None if g is None else g.detach() for g in gradients)

    def close(self) -> None:
        self._handle.remove()


# --- one stage ----------------------------------------------------------------------------------


@dataclass
class _Pass:
    """What a stage holds for one micro-batch between its F and its W."""

    inputs: list[torch.Tensor]
    needs: tuple[bool, ...]
    edges: list[GradientEdge | None]
    store: _Store
    saved: dict[int, int]  # storage address -> bytes, when accounting
    held: list[tuple[nn.Parameter, torch.Tensor]] = field(default_factory=list)
    recorded: list[tuple[_Start, tuple[torch.Tensor | None, ...]]] = field(default_factory=list)
    again: list[tuple[GradientEdge, torch.Tensor, tuple[int, ...]]] = field(default_factory=list)
    b_done: bool = False


class SplitStage:
    """One stage's layers with F, B, W and BW as separate calls per micro-batch.

    Parameters
    ----------
    module : nn.Module
        The stage's layers, called with one value (nested tensors) and returning one.
    index : int
        The stage's number, for messages and seeds.
    mechanism : "auto", "deferred" or "generic"
        How the backward is split; "auto" decides by where the parameters are.
    """

    def __init__(self, module: nn.Module, index: int, mechanism: Mechanism = "auto") -> None:
        self.module = module
        self.index = index
        self.parameters = unique(p for p in module.parameters() if p.requires_grad)
        self.mechanism = _choose(module) if mechanism == "auto" else mechanism
        if self.mechanism == "deferred":
            _DEFERRAL.install(module)
        self._passes: dict[int, _Pass] = {}
        self.accounting = False
        first = next(module.parameters(), None)
        self.device = torch.device("cpu") if first is None else first.device
        self._static = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}

    # --- passes ---------------------------------------------------------------------------------

    def forward(
        self,
        microbatch: int,
        seed: int,
        inputs: Sequence[torch.Tensor],
        needs: Sequence[bool],
        spec: Spec,
        finish: Callable[[Any], torch.Tensor] | None = None,
    ) -> tuple[list[torch.Tensor], Spec]:
        """F: run the layers on one micro-batch.

        ``needs`` says which inputs must get a gradient; ``finish`` turns the last stage's output into its
        loss. Random numbers depend on ``seed`` alone. Returns the outputs, detached, and their spec.
        """
        leaves = [
            t.detach().requires_grad_(need) if need else t.detach()
            for t, need in zip(inputs, needs, strict=True)
        ]
        record = _Pass(leaves, tuple(needs), [], _Store(), {})
        set_seed(seed, self.device)
        counting = (
            saved_tensors_hooks(lambda t: self._count(record.saved, t), lambda t: t)
            if self.accounting
            else nullcontext()
        )
        with counting, self._deferring(record):
            outputs, out_spec = self._call(leaves, spec, finish)
        record.edges = [get_gradient_edge(t) if t.requires_grad else None for t in outputs]
        self._passes[microbatch] = record
        return [t.detach() for t in outputs], out_spec

    def _call(
        self, leaves: list[torch.Tensor], spec: Spec, finish: Callable[[Any], torch.Tensor] | None
    ) -> tuple[list[torch.Tensor], Spec]:
        with torch.enable_grad():
            value = self.module(unflatten(leaves, spec))
            if finish is not None:
                value = finish(value)
        return flatten(value, f"the output of stage {self.index}")

    def backward_input(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """B: gradients of the inputs that need one (None for the others)."""
        record = self._passes[microbatch]
        roots, root_gradients = _pairs(record.edges, gradients)
        wanted = [t for t, need in zip(record.inputs, record.needs, strict=True) if need]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if roots and (wanted or self.parameters):
            if self.mechanism == "deferred":
                found = self._deferred_b(record, roots, root_gradients, wanted)
            else:
                found = self._generic_b(record, roots, root_gradients, wanted)
        result = self._input_gradients(record, found)
        record.b_done = True
        record.edges = []
        record.inputs = []
        if not (record.recorded or record.again):
            record.saved = {}  # no graph is kept
        return result

    def _deferring(self, record: _Pass) -> AbstractContextManager[None]:
        """Layers run in here (again, where a checkpoint does) put their weight gradients aside."""
        return _DEFERRAL.into(record.store if self.mechanism == "deferred" else None)

    def _deferred_b(
        self,
        record: _Pass,
        roots: list[GradientEdge],
        gradients: list[torch.Tensor],
        wanted: list[torch.Tensor],
    ) -> Sequence[torch.Tensor | None]:
        with self._deferring(record):
            found = _grad(roots, [*wanted, *self.parameters], gradients)
        for parameter, gradient in zip(self.parameters, found[len(wanted) :], strict=True):
            if gradient is not None:
                record.held.append((parameter, gradient))
        return found[: len(wanted)]

    def _generic_b(
        self,
        record: _Pass,
        roots: list[GradientEdge],
        gradients: list[torch.Tensor],
        wanted: list[torch.Tensor],
    ) -> Sequence[torch.Tensor | None]:
        if not wanted:
            every = tuple(range(len(self.parameters)))
            record.again = [(r, g, every) for r, g in zip(roots, gradients, strict=True)]
            return []
        cut = _cut_graph(roots, wanted, self.parameters)
        recorders = [_Recorder(start.node) for start in cut.starts]
        try:
            found = _grad(roots, wanted, gradients, retain_graph=True)
        finally:
            for recorder in recorders:
                recorder.close()
        record.recorded = [
            (start, recorder.gradients)
            for start, recorder in zip(cut.starts, recorders, strict=True)
            if any(g is not None for g in recorder.gradients)
        ]
        record.again = [(roots[index], gradients[index], free) for index, free in cut.loose_roots]
        if cut.entangled:
            record.again += [(r, g, cut.entangled) for r, g in zip(roots, gradients, strict=True)]
        return found

    def backward_weight(self, microbatch: int) -> None:
        """W: add the micro-batch's weight gradients to ``Parameter.grad`` and free what it held."""
        record = self._passes.pop(microbatch)
        assert record.b_done  # the plan was checked: W comes after B
        sums = _Sums()
        with torch.no_grad():
            calls = record.store.calls
            uses = Counter(p for call in calls for p in call.parameters)
            uses.update(p for p, _ in record.held)
            while calls:
                call = calls.pop(0)
                for parameter, gradient in zip(call.parameters, call.gradients(*call.tensors), strict=True):
                    sums.add(parameter, gradient.to(parameter.dtype))
                    uses[parameter] -= 1
                    if not uses[parameter]:
                        sums.flush(parameter)
        for parameter, gradient in record.held:
            sums.add(parameter, gradient)
        for start, arrived in record.recorded:
            edges = [GradientEdge(start.node, i) for i, g in enumerate(arrived) if g is not None]
            self._add(sums, edges, [g for g in arrived if g is not None], start.parameters)
        by_set: dict[tuple[int, ...], list[tuple[GradientEdge, torch.Tensor]]] = {}
        for edge, gradient, indices in record.again:
            by_set.setdefault(indices, []).append((edge, gradient))
        for indices, pairs in by_set.items():
            self._add(sums, [e for e, _ in pairs], [g for _, g in pairs], indices)
        sums.flush_all()

    def _add(
        self,
        sums: _Sums,
        edges: list[GradientEdge],
        gradients: list[torch.Tensor],
        indices: tuple[int, ...],
    ) -> None:
        parameters = [self.parameters[i] for i in indices]
        if parameters:
            found = _grad(edges, parameters, gradients, retain_graph=True)
            for parameter, gradient in zip(parameters, found, strict=True):
                if gradient is not None:
                    sums.add(parameter, gradient)

    def backward_fused(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """BW: autograd's ordinary backward; input gradients returned, weight gradients accumulated."""
        record = self._passes.pop(microbatch)
        record.store.fused = True
        roots, root_gradients = _pairs(record.edges, gradients)
        wanted = [t for t, need in zip(record.inputs, record.needs, strict=True) if need]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if roots and (wanted or self.parameters):
            with self._deferring(record):
                both = _grad(roots, [*wanted, *self.parameters], root_gradients)
            found = both[: len(wanted)]
            for parameter, gradient in zip(self.parameters, both[len(wanted) :], strict=True):
                if gradient is not None:
                    accumulate(parameter, gradient)
        return self._input_gradients(record, found)

    @staticmethod
    def _input_gradients(record: _Pass, found: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        rest = iter(found)
        result: list[torch.Tensor | None] = []
        for tensor, need in zip(record.inputs, record.needs, strict=True):
            gradient = next(rest) if need else None
            # An input that the stage did not use: the sender of that input waits for zeros.
            result.append(torch.zeros_like(tensor) if need and gradient is None else gradient)
        return result

    # --- memory ---------------------------------------------------------------------------------

    def _count(self, saved: dict[int, int], tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._static:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def held_bytes(self, microbatch: int) -> int:
        """Bytes that a micro-batch holds now: saved tensors, inputs, put-aside gradients.

        Each storage counts once; parameters do not count. Needs ``accounting`` during its F.
        """
        record = self._passes.get(microbatch)
        if record is None:
            return 0
        storages = dict(record.saved)
        tensors = [*record.inputs, *(t for call in record.store.calls for t in call.tensors)]
        tensors += [g for _, g in record.held]
        tensors += [g for _, arrived in record.recorded for g in arrived if g is not None]
        tensors += [g for _, g, _ in record.again]
        for tensor in tensors:
            self._count(storages, tensor)
        return sum(storages.values())

    def all_held_bytes(self) -> int:
        """Bytes of every micro-batch in flight on this stage."""
        return sum(self.held_bytes(microbatch) for microbatch in self._passes)


class _Sums:
    """Sums the gradients of one micro-batch per parameter before they are accumulated.

    Autograd adds one sum a micro-batch to ``.grad``; adding each use of a shared weight on its own
    would round differently.
    """

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, torch.Tensor] = {}

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        known = self._sums.get(parameter)
        self._sums[parameter] = gradient if known is None else known + gradient

    def flush(self, parameter: nn.Parameter) -> None:
        accumulate(parameter, self._sums.pop(parameter))

    def flush_all(self) -> None:
        for parameter, gradient in self._sums.items():
            accumulate(parameter, gradient)
        self._sums.clear()


def accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Add to ``Parameter.grad``, always into a buffer of its own (autograd may hand out shared tensors)."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad.add_(gradient.detach())


def _grad(
    roots: Sequence[GradientEdge],
    inputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    *,
    retain_graph: bool = False,
) -> Sequence[torch.Tensor | None]:
    return torch.autograd.grad(roots, inputs, gradients, retain_graph=retain_graph, allow_unused=True)


def _pairs(
    edges: Sequence[GradientEdge | None], gradients: Sequence[torch.Tensor | None]
) -> tuple[list[GradientEdge], list[torch.Tensor]]:
    kept = [(e, g) for e, g in zip(edges, gradients, strict=True) if e is not None and g is not None]
    return [e for e, _ in kept], [g for _, g in kept]


def unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters in order, each object once."""
    return list(dict.fromkeys(parameters))


def _choose(module: nn.Module) -> Literal["deferred", "generic"]:
    trainable = sum(p.numel() for p in unique(module.parameters()) if p.requires_grad)
    inside = {p for part in module.modules() if _can_defer(part) for p in part.parameters(recurse=False)}
    deferrable = sum(p.numel() for p in inside if p.requires_grad)
    return "deferred" if deferrable >= DEFERRED_SHARE * trainable else "generic"


def refuse_unsupported(module: nn.Module, where: str) -> None:
    """Raise ``InputError`` naming a module or parameter whose gradients would be silently wrong."""
    for name, part in module.named_modules():
        place = f"{where}{'.' + name if name else ''}"
        kind = type(part).__name__
        if isinstance(part, nn.parallel.DistributedDataParallel) or "FullyShardedDataParallel" in kind:
            raise InputError(f"{place} is a {kind}: pass the bare module, data parallelism is not supported")
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
    for node in _children_first(nodes):
        reason = _REFUSED_NODES.get(node.name())
        if reason is not None:
            raise InputError(f"{where} {reason}")
