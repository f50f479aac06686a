"""One stage's F, B, W and BW as separate calls: the weight gradient when the plan says.

Two mechanisms, both without change to the user's model code:

* **deferred** (:mod:`zbsolve.runtime.backward.deferred`): layers put (input, output gradient) aside during B;
  W turns those into weight gradients and frees them layer by layer. Gradients of all other parameters (norms,
  biases of other modules) are small; B computes them and holds them until W. Any module is computed
  rightly; one that has most of its parameters elsewhere gains nothing, so "auto" picks the second there.
* **generic** (:mod:`zbsolve.runtime.backward.graph_cut`): any autograd graph, cut where branches leave for
  parameters alone.

A fused BW is autograd's ordinary backward in both: its F runs the layers as they are.

Both accumulate into ``Parameter.grad`` in W order, one sum a micro-batch. Not modelled: hooks on
parameters, reentrant checkpointing and compiled modules; :mod:`zbsolve.runtime.backward.refusals` names them
before step 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from zbsolve.runtime.backward.deferred import CHANGED, DEFERRAL, Store, can_defer
from zbsolve.runtime.backward.graph_cut import Recorder, Start, cut_graph, deepest
from zbsolve.runtime.backward.running_state import RunningState
from zbsolve.runtime.backward.sums import Sums, unique
from zbsolve.runtime.backward.traits import StageTraits
from zbsolve.runtime.randomness import set_seed
from zbsolve.runtime.values import Spec, flatten, unflatten

Mechanism = Literal["auto", "deferred", "generic"]

# What torch.autograd.grad and backward call after looking at every gradient's shape in Python (8 us an op);
# the engine itself checks them again.
_ENGINE = torch.autograd.Variable._execution_engine

# "auto" defers where at least this share of a stage's trainable parameters is in modules that can defer.
DEFERRED_SHARE = 0.9


@dataclass(slots=True)
class _Pass:
    """What a stage holds for one micro-batch between its F and its W."""

    inputs: list[torch.Tensor]
    needs: Sequence[bool]
    fused: bool
    store: Store = field(default_factory=Store)
    edges: list[GradientEdge | None] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)  # storage address -> bytes, when accounting
    held: list[tuple[nn.Parameter, torch.Tensor]] = field(default_factory=list)
    recorded: list[tuple[Start, tuple[torch.Tensor | None, ...]]] = field(default_factory=list)
    again: list[tuple[GradientEdge, torch.Tensor, tuple[int, ...]]] = field(default_factory=list)
    b_done: bool = False
    rerun: Callable[[], Any] | None = None  # a recomputing stage's forward, with a graph


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
    autocast : torch.dtype, optional
        Type under which F runs.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        mechanism: Mechanism = "auto",
        autocast: torch.dtype | None = None,
    ) -> None:
        self.module = module
        self.index = index
        self._place = f"the output of stage {index}"
        self._autocast = autocast
        self.parameters = unique(p for p in module.parameters() if p.requires_grad)
        self.mechanism = _choose(module) if mechanism == "auto" else mechanism
        if self.mechanism == "deferred":
            self.put_gradients_aside()
        self._passes: dict[int, _Pass] = {}
        self.accounting = False
        self.traits = StageTraits()
        first = next(module.parameters(), None)
        self.device = torch.device("cpu") if first is None else first.device
        self._static = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}

    def put_gradients_aside(self) -> None:
        """Split by the deferred mechanism from now on: it runs each node of a graph once."""
        self.mechanism = "deferred"
        DEFERRAL.install(self.module)

    def heed(self, traits: StageTraits) -> None:
        """Take account of how the layers behave."""
        self.traits |= traits
        if self.traits.once and self.mechanism == "generic":
            self.put_gradients_aside()

    def forget(self) -> None:
        """Drop whatever is held of any micro-batch."""
        self._passes.clear()

    # --- passes ---------------------------------------------------------------------------------

    def forward(
        self,
        microbatch: int,
        seed: int,
        inputs: Sequence[torch.Tensor],
        needs: Sequence[bool],
        spec: Spec,
        finish: Callable[[Any], torch.Tensor] | None = None,
        *,
        fused: bool = False,
        recomputes: bool = False,
    ) -> tuple[list[torch.Tensor], Spec]:
        """F: run the layers on one micro-batch.

        ``needs`` says which inputs must get a gradient; ``finish`` turns the last stage's output into its
        loss; ``fused`` that BW will follow, not B and W; ``recomputes`` that R will, so that F keeps its
        inputs alone. Random numbers depend on ``seed`` alone. Returns the outputs, detached, and their spec.
        """
        leaves = [
            t.detach().requires_grad_() if need else t.detach() for t, need in zip(inputs, needs, strict=True)
        ]
        record = _Pass(leaves, needs, fused)
        self._passes[microbatch] = record
        if recomputes:
            record.rerun = partial(self._run, record, seed, spec, finish)
            set_seed(seed, self.device, host=self.traits.draws_host)
            versions = [t._version for t in leaves]
            with torch.no_grad(), self.casting():
                value = self.module(self._given(leaves, spec))
                outputs, out_spec = flatten(value if finish is None else finish(value), self._place)
            if versions != [t._version for t in leaves]:
                raise RuntimeError("an input was changed in place, and R needs it as it was: clone it first")
        else:
            outputs, out_spec = self._run(record, seed, spec, finish)
        if not self.traits.kept_outputs:
            return [t.detach() for t in outputs], out_spec
        return [
            t.detach().clone() if place in self.traits.kept_outputs else t.detach()
            for place, t in enumerate(outputs)
        ], out_spec

    def requires(self, microbatch: int) -> list[bool]:
        """Which outputs of a micro-batch's F need a gradient."""
        return [edge is not None for edge in self._passes[microbatch].edges]

    def _given(self, leaves: list[torch.Tensor], spec: Spec) -> Any:
        """The value that the layers get."""
        return unflatten([t.clone() for t in leaves] if self.traits.changes_inputs else leaves, spec)

    def recompute(self, microbatch: int) -> None:
        """R: run the layers again, with the same random numbers, and keep what the backward needs."""
        record = self._passes[microbatch]
        assert record.rerun is not None  # the plan was checked: R only where the stage recomputes
        before = RunningState(self.module)
        record.rerun()
        record.rerun = None
        before.restore()  # running means count each micro-batch once

    def _run(
        self, record: _Pass, seed: int, spec: Spec, finish: Callable[[Any], torch.Tensor] | None
    ) -> tuple[list[torch.Tensor], Spec]:
        set_seed(seed, self.device, host=self.traits.draws_host)
        with self._counting(record), self._deferring(record):
            outputs, out_spec = self._call(record.inputs, spec, finish)
        record.edges = [get_gradient_edge(t) if t.requires_grad else None for t in outputs]
        return outputs, out_spec

    def _counting(self, record: _Pass) -> AbstractContextManager[Any]:
        if not self.accounting:
            return nullcontext()

        saved = record.saved

        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
            self._count(saved, tensor)
            # Detached: a node that kept its own output as it is would keep itself.
            return tensor.detach(), tensor._version

        def unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
            tensor, version = packed
            if tensor._version != version:  # torch looks only where no hook stands between
                raise RuntimeError(f"a tensor {CHANGED}")
            return tensor

        record.store.pack = pack
        return saved_tensors_hooks(pack, unpack)

    def _call(
        self, leaves: list[torch.Tensor], spec: Spec, finish: Callable[[Any], torch.Tensor] | None
    ) -> tuple[list[torch.Tensor], Spec]:
        with torch.enable_grad(), self.casting():
            value = self.module(self._given(leaves, spec))
            if finish is not None:
                value = finish(value)
        return flatten(value, self._place)

    def casting(self) -> AbstractContextManager[Any]:
        """The context of a forward: autocast, where the run asks for it."""
        return autocasting(self.device, self._autocast)

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
        if record.fused or self.mechanism != "deferred":
            return nullcontext()
        return DEFERRAL.into(record.store)

    def _deferred_b(
        self,
        record: _Pass,
        roots: tuple[GradientEdge, ...],
        gradients: tuple[torch.Tensor, ...],
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
        roots: tuple[GradientEdge, ...],
        gradients: tuple[torch.Tensor, ...],
        wanted: list[torch.Tensor],
    ) -> Sequence[torch.Tensor | None]:
        lowest = None if wanted else deepest(roots, self.parameters)
        if lowest is not None:
            wanted = [self.parameters[lowest]]
        cut = cut_graph(roots, wanted, self.parameters)
        recorders = [Recorder(start.node) for start in cut.starts]
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
        if lowest is None:
            return found
        if found[0] is not None:
            record.held.append((self.parameters[lowest], found[0]))
        return []

    def put_aside(self, microbatch: int) -> list[torch.Tensor]:
        """Tensors that the deferred W of a micro-batch will read."""
        record = self._passes[microbatch]
        tensors = [t for call in record.store.calls for t in (call.x, call.grad)]
        return tensors + [gradient for _, gradient in record.held]

    def backward_weight(self, microbatch: int) -> None:
        """W: add the micro-batch's weight gradients to ``Parameter.grad`` and free what it held."""
        record = self._passes.pop(microbatch)
        assert record.b_done  # the plan was checked: W comes after B
        used = [p for call in record.store.calls for p in call.parameters] + [p for p, _ in record.held]
        sums = Sums(used, again=bool(record.recorded or record.again))
        with torch.no_grad():
            calls = record.store.calls
            calls.reverse()
            while calls:
                call = calls.pop()  # freed layer by layer
                found = call.gradients(call.x, call.grad)
                for parameter, gradient in zip(call.parameters, found, strict=True):
                    sums.add(parameter, gradient)
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
        sums: Sums,
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
        assert record.fused  # its F ran with nothing put aside
        roots, root_gradients = _pairs(record.edges, gradients)
        wanted = [t for t, need in zip(record.inputs, record.needs, strict=True) if need]
        if roots:
            _ENGINE.run_backward(
                roots, root_gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        return self._input_gradients(record, [t.grad for t in wanted])

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

    def _count(self, saved: dict[int, int], tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._static:
            saved[storage.data_ptr()] = storage.nbytes()

    def storages(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """Address and bytes of each storage of some tensors; parameters and buffers do not count."""
        found: dict[int, int] = {}
        for tensor in tensors:
            self._count(found, tensor)
        return found

    def held_storages(self, microbatch: int) -> dict[int, int]:
        """Address and bytes of what a micro-batch holds now: saved tensors, inputs, put-aside gradients.

        Needs ``accounting`` during its F.
        """
        record = self._passes.get(microbatch)
        if record is None:
            return {}
        tensors = [*record.inputs, *(t for call in record.store.calls for t in (call.x, call.grad))]
        tensors += [g for _, g in record.held]
        tensors += [g for _, arrived in record.recorded for g in arrived if g is not None]
        tensors += [g for _, g, _ in record.again]
        return record.saved | self.storages(tensors)

    def held_bytes(self, microbatch: int) -> int:
        """Bytes that a micro-batch holds now, each storage once."""
        return sum(self.held_storages(microbatch).values())

    def all_held_bytes(self) -> int:
        """Bytes of every micro-batch in flight on this stage."""
        return sum(self.held_bytes(microbatch) for microbatch in self._passes)


def autocasting(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast to ``dtype``, nothing without one."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def _grad(
    roots: Sequence[GradientEdge],
    inputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    *,
    retain_graph: bool = False,
) -> Sequence[torch.Tensor | None]:
    found: Sequence[torch.Tensor | None] = _ENGINE.run_backward(
        tuple(roots),
        tuple(gradients),
        retain_graph,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def _pairs(
    edges: Sequence[GradientEdge | None], gradients: Sequence[torch.Tensor | None]
) -> tuple[tuple[GradientEdge, ...], tuple[torch.Tensor, ...]]:
    kept = [(e, g) for e, g in zip(edges, gradients, strict=True) if e is not None and g is not None]
    return tuple(e for e, _ in kept), tuple(g for _, g in kept)


def _choose(module: nn.Module) -> Literal["deferred", "generic"]:
    trainable = sum(p.numel() for p in unique(module.parameters()) if p.requires_grad)
    inside = {p for part in module.modules() if can_defer(part) for p in part.parameters(recurse=False)}
    deferrable = sum(p.numel() for p in inside if p.requires_grad)
    return "deferred" if deferrable >= DEFERRED_SHARE * trainable else "generic"
