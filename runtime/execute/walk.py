"""One forward of a stage before step 1: what it hands on, how its layers behave, and what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch

from zbsolve.errors import InputError
from zbsolve.runtime.backward.refusals import refuse_graph
from zbsolve.runtime.backward.running_state import RunningState
from zbsolve.runtime.backward.split import SplitStage
from zbsolve.runtime.backward.traits import StageTraits
from zbsolve.runtime.execute.boundary import KEPT, Boundary, memory_of
from zbsolve.runtime.execute.transport import MAX_PARTS, Shape
from zbsolve.runtime.randomness import Generators, generators_undone, set_seed, step_seed
from zbsolve.runtime.values import Spec, flatten, unflatten

# How many draws a stage that uses random numbers is shown at least, and at most while an output has had no
# gradient yet.
_TRIALS, _TRIES = 8, 16
# The number under which the trial of a backward runs: no micro-batch has it.
_TRIAL = -1
# Relative to a gradient's largest entry: one backward and two partial ones of the same graph.
_TOLERANCE, _LOW_PRECISION_TOLERANCE = 1e-4, 5e-2


@dataclass
class Walked:
    """What a stage's forward gave: copies of its outputs, and what the ranks are told of it."""

    outputs: list[torch.Tensor]
    boundary: Boundary
    traits: StageTraits
    drew: bool  # random numbers


@dataclass
class _Tried:
    """One forward: its inputs as leaves of the graph, and what came out."""

    leaves: list[torch.Tensor]
    outputs: list[torch.Tensor]
    spec: Spec
    traits: StageTraits
    drew: bool


@dataclass(frozen=True)
class Walk:
    """One micro-batch's way through one stage. ``name`` is the stage's, for messages; ``seed`` the run's.

    ``finish`` turns the last stage's output into its loss (None for the others).
    """

    stage: SplitStage
    name: str
    seed: int
    boundary: Boundary
    inputs: Sequence[torch.Tensor]
    finish: Callable[[Any], torch.Tensor] | None

    def run(self) -> Walked:
        """Walk, and leave buffers and random states as they were.

        Raises
        ------
        InputError
            Something that would make a pipeline's results other than the unpipelined model's.
        """
        module = self.stage.module
        state = RunningState(module)
        versions = [(name, p, p._version) for name, p in module.named_parameters()]
        with generators_undone(), torch.enable_grad():
            try:
                walked = self._draw(state, 0)
                for name, parameter, version in versions:
                    if parameter._version != version:
                        raise InputError(
                            f"{self.name} changes its parameter {name} in its forward, while micro-batches "
                            "in flight need it as it was: change it between steps"
                        )
                self._ask_again(walked, state)
                if self.stage.mechanism == "generic":
                    state.restore()
                    self.stage.heed(walked.traits)
                    # Where random numbers decide which layers run, each draw is another graph.
                    for number in range(_TRIALS if walked.drew else 1):
                        walked.traits |= StageTraits(once=self._why_not_twice(number))
            finally:
                state.restore()
        return walked

    def _forward(self, number: int) -> _Tried:
        """One forward, with the random numbers of a micro-batch."""
        boundary = self.boundary
        leaves = [
            t.detach().requires_grad_(need) for t, need in zip(self.inputs, boundary.needs, strict=True)
        ]
        given = [t.clone() for t in leaves]
        set_seed(step_seed(self.seed, 0, self.stage.index, number), self.stage.device, host=True)
        before = Generators.now()
        with self.stage.casting():
            value = self.stage.module(unflatten(given, boundary.spec))
            if self.finish is not None:
                value = self.finish(value)
        later = Generators.now()
        changed = [place for place, t in enumerate(given) if t._version]
        for place in changed:
            if not boundary.alone(place):
                raise InputError(
                    f"{self.name} changes tensor {place} of its input in place, whose memory is also "
                    "another's of the stage before: clone it first"
                )
        outputs, spec = flatten(value, f"the output of {self.name}")
        traits = StageTraits(bool(changed), draws_host=before.draws_host(later))
        return _Tried(leaves, outputs, spec, traits, traits.draws_host or before.draws_torch(later))

    def _draw(self, state: RunningState, number: int) -> Walked:
        """One draw's forward, and all that it shows."""
        tried = self._forward(number)
        self._refuse_outputs(tried.outputs)
        changed = state.changed()
        traits = tried.traits | StageTraits(changes_buffers=tuple(changed))
        if changed:
            self._refuse_changing_backward(tried)
        shapes = tuple(Shape(tuple(t.shape), t.dtype) for t in tried.outputs)
        needs = tuple(t.requires_grad for t in tried.outputs)
        copies = [t.detach().clone() for t in tried.outputs]
        first = memory_of(tried.outputs)
        storages = [ref(t.untyped_storage()) for t in tried.outputs]
        spec, drew = tried.spec, tried.drew
        del tried
        kept = _still_there(storages)
        memory = tuple(KEPT if place in kept else own for place, own in enumerate(first))
        traits |= StageTraits(kept_outputs=tuple(sorted(kept)))
        return Walked(copies, Boundary(spec, shapes, needs, memory), traits, drew)

    def _refuse_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        if self.finish is not None:
            loss = outputs[0] if len(outputs) == 1 else None
            if loss is None or loss.dim() != 0 or not loss.is_floating_point():
                shape = "no tensor" if loss is None else f"shape {tuple(loss.shape)}"
                raise InputError(f"loss() returned {shape}: return one floating number")
        if len(outputs) > MAX_PARTS:
            raise InputError(f"{self.name} passes {len(outputs)} tensors on: pass at most {MAX_PARTS}")
        for tensor in outputs:
            if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
                raise InputError(
                    f"{self.name} passes a sparse, nested or quantized tensor on: pass a dense one"
                )
        refuse_graph(outputs, self.name)

    def _refuse_changing_backward(self, tried: _Tried) -> None:
        """Refuse buffers that the backward changes again: a checkpoint's recomputation of a norm does."""
        roots = [t for t in tried.outputs if t.requires_grad]
        wanted = [t for t in (*tried.leaves, *self.stage.parameters) if t.requires_grad]
        if not roots or not wanted:
            return
        before = RunningState(self.stage.module)
        torch.autograd.grad(roots, wanted, [torch.ones_like(t) for t in roots], allow_unused=True)
        for name in before.changed():
            raise InputError(
                f"{self.name} changes its buffer {name} in its forward and, under a checkpoint, once more "
                "in its backward, in another order than without a pipeline: leave layers with running "
                "statistics out of the checkpoint"
            )

    def _ask_again(self, walked: Walked, state: RunningState) -> None:
        """What other random numbers show, where any are drawn: a layer may have been left out."""
        agreed = walked.boundary
        able = [shape.dtype.is_floating_point or shape.dtype.is_complex for shape in agreed.shapes]
        needs, kept = list(agreed.needs), set(walked.traits.kept_outputs)
        trainable = any(self.boundary.needs) or bool(self.stage.parameters)
        for number in range(1, _TRIES if walked.drew else 1):
            settled = not trainable or all(need or not can for need, can in zip(needs, able, strict=True))
            if number >= _TRIALS and settled:
                break
            state.restore()
            tried = self._draw(state, number)
            if tried.boundary.spec != agreed.spec:
                raise InputError(
                    f"{self.name} returns another kind of value from call to call: return the same for every "
                    "micro-batch of one shape"
                )
            needs = [one or other for one, other in zip(needs, tried.boundary.needs, strict=True)]
            kept.update(tried.traits.kept_outputs)
            walked.traits |= tried.traits
        memory = tuple(KEPT if place in kept else own for place, own in enumerate(agreed.memory))
        walked.boundary = replace(agreed, needs=tuple(needs), memory=memory)

    def _why_not_twice(self, number: int) -> str:
        """Why the generic split gets other gradients than one backward; empty where it gets the same.

        It runs parts of a graph again: a function that frees what it saved fails then, and a hook is called
        twice.
        """
        stage = self.stage
        once = self._gradients(number, fused=True)
        try:
            twice = self._gradients(number, fused=False)
        except Exception as error:  # noqa: BLE001 - whatever a user's backward raises
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        finally:
            stage.forget()
            for parameter in stage.parameters:
                parameter.grad = None
        for name, one in once.items():
            if not _close(one, twice.get(name)):
                return f"the gradient of {name} differs"
        return ""

    def _gradients(self, number: int, *, fused: bool) -> dict[str, torch.Tensor]:
        """Gradients of inputs and parameters for arbitrary gradients of the outputs."""
        stage = self.stage
        for parameter in stage.parameters:
            parameter.grad = None
        inputs = [t.clone() for t in self.inputs]
        seed = step_seed(self.seed, 0, stage.index, number)
        needs = self.boundary.needs
        outputs, _ = stage.forward(_TRIAL, seed, inputs, needs, self.boundary.spec, self.finish, fused=fused)
        generator = torch.Generator().manual_seed(0)
        gradients = [
            torch.randn(t.shape, generator=generator).to(t) if required else None
            for t, required in zip(outputs, stage.requires(_TRIAL), strict=True)
        ]
        if fused:
            back = stage.backward_fused(_TRIAL, gradients)
        else:
            back = stage.backward_input(_TRIAL, gradients)
            stage.backward_weight(_TRIAL)
        found = {f"input {place}": g for place, g in enumerate(back) if g is not None}
        named = stage.module.named_parameters()
        return found | {name: p.grad for name, p in named if p.grad is not None}


def _still_there(storages: Sequence[ref[Any]]) -> set[int]:
    """Which of the outputs' memories outlive the forward that gave them."""

    def alive() -> set[int]:
        return {place for place, storage in enumerate(storages) if storage() is not None}

    found = alive()
    if found:
        gc.collect()  # a function's context may refer to its own output
        found = alive()
    return found


def _close(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    if other is None:
        return not bool(one.count_nonzero())
    tolerance = _TOLERANCE if one.dtype in (torch.float32, torch.float64) else _LOW_PRECISION_TOLERANCE
    if one.numel() == 0:
        return True
    scale = float(one.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
