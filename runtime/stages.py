"""A device's real layers behind the executor's interface, and what all ranks agree on before step 1.

Before the first step one micro-batch of every distinct shape walks through all stages once. That tells
every rank what each boundary carries: how many tensors, their sizes and types, and which of them get
a gradient. A boundary without any gradient (everything before it is frozen) carries nothing backward:
the plan's messages stay in the program, empty on both sides. Side effects of that walk on buffers and
random state are undone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]

from zbsolve.errors import EnvironmentFailedError, InputError
from zbsolve.instance import Instance
from zbsolve.memory import Pairs
from zbsolve.runtime.boundary import Boundary
from zbsolve.runtime.copies import Copies, Tie, find_ties
from zbsolve.runtime.gradient_sums import unique
from zbsolve.runtime.ledger import MemoryLedger, Noted
from zbsolve.runtime.models import MicroBatch, PipelineModel, StageLayers, stage_ranges
from zbsolve.runtime.randomness import step_seed
from zbsolve.runtime.refusals import refuse_graph, refuse_unsupported
from zbsolve.runtime.split_backward import Mechanism, SplitStage
from zbsolve.runtime.status import Status
from zbsolve.runtime.transients import measure_rise, watch_of
from zbsolve.runtime.transport import MAX_PARTS, Shape
from zbsolve.runtime.values import flatten, unflatten

_WEIGHT_TOLERANCE = 1e-6


def check_model(model: PipelineModel, instance: Instance, split: Sequence[int]) -> tuple[Tie, ...]:
    """Refuse, by name, what would give wrong gradients; the weights under several names of the rest.

    The same answer on every rank.

    Raises
    ------
    InputError
        Compiled or data-parallel layers, gradient hooks, or memory shared by parameters of two devices.
    """
    for index in range(len(model.layers)):
        refuse_unsupported(model.layers[index], f"layer {index}")
    return find_ties(model, split, instance)


def step_data(model: PipelineModel, step: int, count: int) -> list[MicroBatch]:
    """A step's micro-batches, checked: the right number, and weights that make their sum a mean."""
    batches = list(model.microbatches(step, count))
    if len(batches) != count:
        raise InputError(f"microbatches({step}, {count}) returned {len(batches)}: return {count}")
    total = sum(batch.weight for batch in batches)
    if abs(total - 1) > _WEIGHT_TOLERANCE:
        raise InputError(
            f"the weights of step {step}'s micro-batches sum to {total:g}: weight each by its share of "
            "the rows, so that they sum to 1"
        )
    return batches


class RealStages:
    """The stages of one device with their layers, data and agreed boundaries.

    Parameters
    ----------
    replica, replicas : int
        Which of several pipelines side by side this is: it takes its share of every step's micro-batches.
    pipeline, siblings : process group, optional
        The ranks of this pipeline in device order (default: all ranks), and those of the same device in
        every pipeline, which sum their gradients.
    autocast : torch.dtype, optional
        Type that every F runs under; ``scale`` multiplies every loss.
    homes : sequence of int, optional
        Where this device stands for several: which of them each stage belongs to, for memory's sake.
    """

    def __init__(
        self,
        model: PipelineModel,
        instance: Instance,
        device_index: int,
        split: Sequence[int],
        mechanism: Mechanism,
        seed: int,
        device: torch.device,
        *,
        replica: int = 0,
        replicas: int = 1,
        pipeline: dist.ProcessGroup | None = None,
        siblings: dist.ProcessGroup | None = None,
        autocast: torch.dtype | None = None,
        homes: Sequence[int] | None = None,
    ) -> None:
        self.homes = homes
        self.model, self.instance, self.seed = model, instance, seed
        self.device_index, self.device = device_index, device
        self.first_microbatch = replica * instance.total_microbatches
        self.total_microbatches = replicas * instance.total_microbatches
        self.pipeline, self.siblings = pipeline, siblings
        self.autocast = autocast
        self.scale = 1.0
        # Weights with more than one copy, in the order that all ranks have; summed by :meth:`end`.
        self.copies: list[Copies] = []
        # Per stage, names of buffers that another device has, too -> how that one is called.
        self.shared_buffers: dict[int, dict[str, str]] = {}
        self.reduces = True
        self._reducing: list[dist.Work] = []
        self._unfinished: set[int] = set()
        self.chain = instance.chain
        ranges = stage_ranges(split)
        self.stages: dict[int, SplitStage] = {}
        copied: dict[int, dict[int, Any]] = {}  # replica -> what copy.deepcopy has copied of it
        for s in instance.stages_on(device_index):
            held = [model.layers[i] for i in ranges[s % self.chain]]
            if s >= self.chain:
                # Another replica has weights of its own, equal at the start and tied as the first one's.
                held = copy.deepcopy(held, copied.setdefault(s // self.chain, {}))
            layers = StageLayers(held).to(device).train()
            self.stages[s] = SplitStage(layers, s, mechanism, autocast)
        self.losses: dict[int, torch.Tensor] = {}
        self.memory = MemoryLedger()
        self._watch = watch_of(device)
        self._boundaries: dict[str, dict[int, Boundary]] = {}
        self._step = 0
        self._data: list[MicroBatch] = []
        self._signatures: list[str] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Trainable parameters of this device, each once."""
        return unique(p for stage in self.stages.values() for p in stage.parameters)

    def static_bytes(self, home: int | None = None) -> int:
        """Parameters, their gradients, and two optimizer states for each trainable one (of one home)."""
        held = [stage for s, stage in self.stages.items() if self.homes is None or self.homes[s] == home]
        every = unique(p for stage in held for p in stage.module.parameters())
        return sum(p.nbytes * (4 if p.requires_grad else 1) for p in every)

    # --- before step 1 --------------------------------------------------------------------------

    def agree(self, store: Store, steps: int, status: Status) -> None:
        """Walk one micro-batch of every distinct shape through all stages and share what it showed."""
        for step in range(steps):
            for batch in step_data(self.model, step, self.total_microbatches):
                signature = _signature(batch)
                if signature not in self._boundaries:
                    number = len(self._boundaries)
                    self._boundaries[signature] = {}
                    self._walk(store, number, signature, batch, status)

    def _walk(self, store: Store, number: int, signature: str, batch: MicroBatch, status: Status) -> None:
        found = self._boundaries[signature]
        tensors, spec = flatten(batch.inputs, "microbatches(): inputs")
        found[0] = Boundary(spec, _shapes(tensors), (False,) * len(tensors))
        carried = [t.to(self.device) for t in tensors]
        for s in range(self.chain):
            here = self.instance.stages[s].device == self.device_index
            status.set("setup", -1, s, -1)
            if here and s > 0 and self.instance.stages[s - 1].device != self.device_index:
                carried = self._blocking(s, found[s].shapes, self.instance.stages[s - 1].device, None)
            key = f"boundary/{number}/{s + 1}"
            if here:
                outputs, text = self._try_stage(s, found[s], carried, batch)
                store.set(key, text)
                carried = outputs
            if s + 1 < self.chain:
                found[s + 1] = Boundary.from_text(store.get(key).decode())
                target = self.instance.stages[s + 1].device
                if here and target != self.device_index:
                    self._blocking(s + 1, found[s + 1].shapes, target, carried)

    def _blocking(
        self, stage: int, shapes: Sequence[Shape], peer: int, tensors: list[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Send (or receive, without tensors) what goes into a stage; only one such transfer is under way."""
        if tensors is None:
            received = [torch.empty(s.size, dtype=s.dtype, device=self.device) for s in shapes]
            for tensor in received:
                wire = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
                dist.recv(wire, group=self.pipeline, group_src=peer)
            return received
        for tensor in tensors:
            solid = tensor.contiguous()
            wire = solid.view(torch.uint8) if solid.dtype == torch.bool else solid
            dist.send(wire, group=self.pipeline, group_dst=peer)
        return tensors

    def _try_stage(
        self, s: int, boundary: Boundary, inputs: list[torch.Tensor], batch: MicroBatch
    ) -> tuple[list[torch.Tensor], str]:
        module = self.stages[s].module
        with _undone(module) as buffers, torch.enable_grad(), self.stages[s].casting():
            leaves = [
                t.detach().requires_grad_(n) if n else t.detach()
                for t, n in zip(inputs, boundary.needs, strict=True)
            ]
            value = module(unflatten(leaves, boundary.spec))
            if s + 1 == self.chain:
                loss = self.model.loss(value, move(batch.targets, self.device))
                if loss.dim() != 0 or not loss.is_floating_point():
                    raise InputError(f"loss() returned shape {tuple(loss.shape)}: return one floating number")
                value = loss
            outputs, spec = flatten(value, f"the output of stage {s}")
            if len(outputs) > MAX_PARTS:
                raise InputError(f"stage {s} passes {len(outputs)} tensors on: pass at most {MAX_PARTS}")
            refuse_graph(outputs, f"stage {s} ({self.instance.stages[s].name or 'unnamed'})")
            needs = tuple(t.requires_grad for t in outputs)
            self._refuse_diverging(s, buffers)
        outputs = [t.detach() for t in outputs]
        return outputs, Boundary(spec, _shapes(outputs), needs).to_text()

    def _refuse_diverging(self, s: int, before: Mapping[str, torch.Tensor]) -> None:
        """Refuse a buffer of several devices that a forward changes: each would follow its own stages."""
        current = dict(self.stages[s].module.named_buffers())
        for name, label in self.shared_buffers.get(s, {}).items():
            if not torch.equal(current[name], before[name]):
                raise InputError(
                    f"stage {s} changes its buffer {name}, which is layer {label} of another device, too: "
                    "give each layer a buffer of its own, or put both on one device"
                )

    # --- a step ---------------------------------------------------------------------------------

    def begin(self, step: int, fused: Set[tuple[int, int]], pairs: Pairs) -> None:
        """Fetch the step's data."""
        self._step = step
        self._fused = fused
        self._data = step_data(self.model, step, self.total_microbatches)
        self._unfinished = set(self.stages)
        if self.device.type == "cuda":
            self._allocated = torch.cuda.memory_allocated(self.device)
        self._signatures = [_signature(batch) for batch in self._data]
        self.losses = {}

    def shapes(self, direction: str, stage: int, microbatch: int) -> Sequence[Shape]:
        """As agreed for the micro-batch's shape."""
        boundary = self._boundary(stage if direction == "F" else stage + 1, self._number(stage, microbatch))
        return boundary.shapes if direction == "F" else boundary.gradient_shapes

    def _number(self, stage: int, microbatch: int) -> int:
        """A replica's micro-batch among all of the step."""
        return self.first_microbatch + stage // self.chain * self.instance.num_microbatches + microbatch

    def _boundary(self, stage: int, number: int) -> Boundary:
        """What goes into a stage."""
        return self._boundaries[self._signatures[number]][stage % self.chain]

    def run(self, op: str, stage: int, microbatch: int, received: list[torch.Tensor]) -> list[torch.Tensor]:
        """Compute one op on the stage's layers."""
        split = self.stages[stage]
        if not split.accounting:
            return self._compute(split, op, stage, microbatch, received)
        before = self._held(stage)
        result, rise = measure_rise(
            split,
            microbatch,
            received,
            self._watch,
            lambda: self._compute(split, op, stage, microbatch, received),
        )
        # The allocator's level has what an op takes over from the moment it was received.
        highest = before + (self._watch.rise if self._asks_allocator else rise)
        self.memory.note(op, stage, Noted(split.held_bytes(microbatch), rise, self._held(stage), highest))
        return result

    def _compute(
        self, split: SplitStage, op: str, stage: int, microbatch: int, received: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        if op == "F":
            return self._forward(split, stage, microbatch, received)
        if op == "W":
            split.backward_weight(microbatch)
            return []
        if op == "R":
            split.recompute(microbatch)
            return []
        gradients = self._output_gradients(stage, microbatch, received)
        back = split.backward_input if op == "B" else split.backward_fused
        return [g for g in back(microbatch, gradients) if g is not None]

    def _forward(
        self, split: SplitStage, stage: int, microbatch: int, received: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        number = self._number(stage, microbatch)
        batch = self._data[number]
        boundary = self._boundary(stage, number)
        last = self.instance.is_last(stage)
        if self.instance.is_first(stage):
            received = [t.to(self.device) for t in flatten(batch.inputs, "inputs")[0]]
        finish: Callable[[Any], torch.Tensor] | None = None
        if last:
            targets = move(batch.targets, self.device)

            def finish(value: Any) -> torch.Tensor:
                return self.model.loss(value, targets) * (batch.weight * self.scale)

        seed = step_seed(self.seed, self._step, stage % self.chain, number)
        outputs, spec = split.forward(
            microbatch,
            seed,
            received,
            boundary.needs,
            boundary.spec,
            finish,
            fused=(stage, microbatch) in self._fused,
            recomputes=self.instance.stages[stage].t_r is not None,
        )
        if last:
            self.losses[number] = outputs[0]
            return []
        agreed = self._boundary(stage + 1, number)
        if spec != agreed.spec or not all(map(_has_shape, outputs, agreed.shapes)):
            raise EnvironmentFailedError(
                f"stage {stage} returned other shapes than before step 1 for a micro-batch of the same "
                "shape: make its output depend on the input's shape alone"
            )
        return outputs

    def _output_gradients(
        self, stage: int, microbatch: int, received: list[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        number = self._number(stage, microbatch)
        if self.instance.is_last(stage):
            return [torch.ones_like(self.losses[number])]
        needs = self._boundary(stage + 1, number).needs
        if len(received) == len(needs):
            return received  # every output gets a gradient
        rest = iter(received)
        return [next(rest) if need else None for need in needs]

    def put_aside(self, stage: int, microbatch: int) -> Sequence[torch.Tensor]:
        """What the W of a micro-batch will read, and then free."""
        return self.stages[stage].put_aside(microbatch)

    def complete(self, stage: int) -> None:
        """Begin to sum a stage's gradients over the pipelines, while other stages still compute.

        A parameter that several stages of this device use waits for the last of them.
        """
        self._unfinished.discard(stage)
        if not self.reduces or self.siblings is None:
            return
        apart = {p for s in self._unfinished for p in self.stages[s].parameters}
        apart.update(p for copies in self.copies for p in copies.parameters)  # their sum is over more ranks
        for parameter in self.stages[stage].parameters:
            if parameter not in apart:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)  # the others may have one
                work = dist.all_reduce(parameter.grad, group=self.siblings, async_op=True)
                assert work is not None
                self._reducing.append(work)

    def end(self) -> None:
        """Wait for the sums that :meth:`complete` began, and sum over the copies of each weight."""
        for work in self._reducing:
            work.wait()
        self._reducing.clear()
        if self.reduces:
            for copies in self.copies:
                copies.sum_gradients()

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Gradients as they would be summed over the ranks, where the step's end has not done it."""
        if self.reduces:
            yield
            return
        own = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        self.reduces = True
        self._unfinished = set(self.stages)
        for stage in self.stages:
            self.complete(stage)
        self.end()
        yield
        for parameter, gradient in zip(self.parameters, own, strict=True):
            parameter.grad = gradient
        self.reduces = False

    def step_loss(self) -> float | None:
        """What this device's micro-batches add to the step's loss; None where no last stage is."""
        if not any(self.instance.is_last(s) for s in self.stages):
            return None
        return float(sum(self.losses[j].item() for j in sorted(self.losses))) / self.scale

    # --- memory ---------------------------------------------------------------------------------

    @contextmanager
    def accounting(self) -> Iterator[None]:
        """Count what every stage holds around each op (too slow for a timed step)."""
        self.memory = MemoryLedger()
        self._watch = watch_of(self.device)
        # Gradients are static memory, and no op's.
        made = [p for p in self.parameters if p.grad is None]
        for parameter in made:
            parameter.grad = torch.zeros_like(parameter)
        for stage in self.stages.values():
            stage.accounting = True
        try:
            yield
        finally:
            for stage in self.stages.values():
                stage.accounting = False
            for parameter in made:
                if parameter.grad is not None and not bool(parameter.grad.count_nonzero()):
                    parameter.grad = None

    @property
    def _asks_allocator(self) -> bool:
        """Whether what the device holds is what its allocator handed out: not for a part of a device."""
        return self.device.type == "cuda" and self.homes is None

    def _held(self, stage: int) -> int:
        """What a stage's device holds: by the allocator since the step began, or as stages account for."""
        if self._asks_allocator:
            return torch.cuda.memory_allocated(self.device) - self._allocated
        homes = self.homes
        own = [split for s, split in self.stages.items() if homes is None or homes[s] == homes[stage]]
        return sum(split.all_held_bytes() for split in own)


@contextmanager
def _undone(module: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Undo what a forward does to buffers and random state; yields the buffers as they were."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.random.fork_rng():
        yield before
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in before:
                buffer.copy_(before[name])


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[Shape, ...]:
    return tuple(Shape(tuple(t.shape), t.dtype) for t in tensors)


def _has_shape(tensor: torch.Tensor, shape: Shape) -> bool:
    return tensor.shape == shape.size and tensor.dtype == shape.dtype


def _signature(batch: MicroBatch) -> str:
    """Equal for micro-batches of the same nesting, shapes and types."""
    inputs, inputs_spec = flatten(batch.inputs, "microbatches(): inputs")
    targets, targets_spec = flatten(batch.targets, "microbatches(): targets")
    return repr((inputs_spec, _shapes(inputs), targets_spec, _shapes(targets)))


def move(value: Any, device: torch.device) -> Any:
    """A nested value with its tensors on a device."""
    tensors, spec = flatten(value, "targets")
    return unflatten([t.to(device) for t in tensors], spec)
