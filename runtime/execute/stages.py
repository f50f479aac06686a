"""A device's real layers behind the executor's interface, and what all ranks agree on before step 1.

Before the first step one micro-batch of every distinct shape walks through all stages once. That tells
every rank what each boundary carries: how many tensors, their sizes and types, and which of them get
a gradient. A boundary without any gradient (everything before it is frozen) carries nothing backward:
the plan's messages stay in the program, empty on both sides. Side effects of that walk on buffers and
random state are undone, and what it shows about a stage's layers (:mod:`zbsolve.runtime.backward.traits`) is
heeded.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]

from zbsolve.errors import EnvironmentFailedError, InputError
from zbsolve.model.instance import Instance
from zbsolve.model.memory import Pairs
from zbsolve.plan.actions import Program
from zbsolve.runtime.backward.deferred import CHANGED
from zbsolve.runtime.backward.refusals import refuse_unsupported
from zbsolve.runtime.backward.split import Mechanism, SplitStage
from zbsolve.runtime.backward.sums import unique
from zbsolve.runtime.backward.traits import StageTraits
from zbsolve.runtime.execute.boundary import Boundary, memory_of
from zbsolve.runtime.execute.copies import Copies, Tie, find_ties
from zbsolve.runtime.execute.ledger import MemoryLedger, Noted
from zbsolve.runtime.execute.transients import measure_rise, watch_of
from zbsolve.runtime.execute.transport import Shape, solid_of, wire_of
from zbsolve.runtime.execute.walk import Walk, Walked
from zbsolve.runtime.models.pipeline_model import MicroBatch, PipelineModel, StageLayers, stage_ranges
from zbsolve.runtime.randomness import data_seed, set_seed, step_seed
from zbsolve.runtime.status import Status
from zbsolve.runtime.values import flatten, unflatten

logger = logging.getLogger(__name__)

_WEIGHT_TOLERANCE = 1e-6
# Micro-batches are made on the CPU.
_DATA_DEVICE = torch.device("cpu")


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


def step_data(model: PipelineModel, step: int, count: int, seed: int) -> list[MicroBatch]:
    """A step's micro-batches, checked: the right number, and weights that make their sum a mean.

    All global generators are seeded first, so that random data are a function of the step.
    """
    set_seed(data_seed(seed, step), _DATA_DEVICE, host=True)
    batches = list(model.microbatches(step, count))
    if len(batches) != count:
        raise InputError(f"microbatches({step}, {count}) returned {len(batches)}: return {count}")
    total = sum(batch.weight for batch in batches)
    if not abs(total - 1) <= _WEIGHT_TOLERANCE:
        raise InputError(
            f"the weights of step {step}'s micro-batches sum to {total:g}: weight each by its share of "
            "the rows, so that they sum to 1"
        )
    return batches


def data_digest(batches: Sequence[MicroBatch]) -> str:
    """Equal for the same data."""
    digest = hashlib.blake2b(digest_size=16)
    for batch in batches:
        for value, name in ((batch.inputs, "inputs"), (batch.targets, "targets")):
            tensors, spec = flatten(value, f"microbatches(): {name}")
            digest.update(repr((spec.nesting, spec.leaves, _shapes(tensors), batch.weight)).encode())
            for tensor in tensors:
                digest.update(solid_of(tensor.detach()).cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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
        # Per stage, names of buffers that another stage has, too -> how that one is called.
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
        """Walk one micro-batch of every distinct shape through all stages and share what it showed.

        Raises
        ------
        InputError
            Data that change from call to call or from rank to rank, or a stage that is refused.
        """
        self._compare_data(store)
        for step in range(steps):
            for batch in step_data(self.model, step, self.total_microbatches, self.seed):
                signature = signature_of(batch)
                if signature not in self._boundaries:
                    number = len(self._boundaries)
                    self._boundaries[signature] = {}
                    self._walk(store, number, signature, batch, status)
        # Replicas of a stage, here or on another device, behave as the first one.
        for number in range(len(self._boundaries)):
            for s, split in self.stages.items():
                split.heed(StageTraits.from_text(store.get(f"traits/{number}/{s % self.chain}").decode()))

    def _compare_data(self, store: Store) -> None:
        first, again = (
            data_digest(step_data(self.model, 0, self.total_microbatches, self.seed)) for _ in range(2)
        )
        if first != again:
            raise InputError(
                "microbatches(0, ...) returned other data when it was called again: make them a function of "
                "the step, which may be asked for more than once"
            )
        store.set(f"data/{self.device_index}", first)
        if store.get("data/0").decode() != first:
            raise InputError(
                f"microbatches(0, ...) returns other data on device {self.device_index} than on device 0: "
                "make them a function of the step alone"
            )

    def _walk(self, store: Store, number: int, signature: str, batch: MicroBatch, status: Status) -> None:
        found = self._boundaries[signature]
        tensors, spec = flatten(batch.inputs, "microbatches(): inputs")
        found[0] = Boundary(spec, _shapes(tensors), (False,) * len(tensors), memory_of(tensors))
        carried = [t.to(self.device) for t in tensors]
        for s in range(self.chain):
            here = self.instance.stages[s].device == self.device_index
            status.set("setup", -1, s, -1)
            if here and s > 0 and self.instance.stages[s - 1].device != self.device_index:
                carried = self._blocking(s, found[s].shapes, self.instance.stages[s - 1].device, None)
            key = f"boundary/{number}/{s + 1}"
            if here:
                walked = self._try_stage(s, found[s], carried, batch)
                store.set(f"traits/{number}/{s}", walked.traits.to_text())
                store.set(key, walked.boundary.to_text(f"the output of {self._called(s)}"))
                carried = walked.outputs
            if s + 1 < self.chain:
                found[s + 1] = Boundary.from_text(store.get(key).decode())
                target = self.instance.stages[s + 1].device
                if here and target != self.device_index:
                    self._blocking(s + 1, found[s + 1].shapes, target, carried)

    def _called(self, s: int) -> str:
        """A stage, for messages."""
        return f"stage {s} ({self.instance.stages[s].name or 'unnamed'})"

    def _blocking(
        self, stage: int, shapes: Sequence[Shape], peer: int, tensors: list[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Send (or receive, without tensors) what goes into a stage; only one such transfer is under way."""
        if tensors is None:
            received = [torch.empty(s.size, dtype=s.dtype, device=self.device) for s in shapes]
            for tensor in received:
                dist.recv(wire_of(tensor), group=self.pipeline, group_src=peer)
            return received
        for tensor in tensors:
            dist.send(wire_of(solid_of(tensor)), group=self.pipeline, group_dst=peer)
        return tensors

    def _try_stage(self, s: int, boundary: Boundary, inputs: list[torch.Tensor], batch: MicroBatch) -> Walked:
        finish: Callable[[Any], torch.Tensor] | None = None
        if s + 1 == self.chain:

            def finish(value: Any) -> torch.Tensor:
                # Copies: the walk changes nobody's data.
                tensors, spec = flatten(batch.targets, "microbatches(): targets")
                targets = unflatten([t.to(self.device, copy=True) for t in tensors], spec)
                return self.model.loss(value, targets)

        walked = Walk(self.stages[s], self._called(s), self.seed, boundary, inputs, finish).run()
        if walked.traits.changes_buffers:
            self._refuse_diverging(s, walked.traits.changes_buffers)
        if walked.traits.once:
            logger.warning(
                "%s: its backward cannot be split by running parts of it again (%s): it runs once, in B, and "
                "weight gradients wait for W",
                self._called(s),
                walked.traits.once,
            )
        return walked

    def _refuse_diverging(self, s: int, changed: Sequence[str]) -> None:
        """Refuse a buffer of several stages, or of several pipelines, that a forward changes.

        Stages and pipelines run side by side: its contents would depend on their order, or differ.
        """
        for name in changed:
            label = self.shared_buffers.get(s, {}).get(name)
            if label is not None:
                raise InputError(
                    f"stage {s} changes its buffer {name}, which is layer {label} of another stage, too: "
                    "give each layer a buffer of its own, or put both into one stage"
                )
        if self.total_microbatches > self.instance.num_microbatches:
            raise InputError(
                f"stage {s} changes its buffer {changed[0]} in its forward, and each of the pipelines side "
                "by side would have its own: run one pipeline, or leave running statistics out"
            )

    def check_order(self, program: Program) -> None:
        """Refuse forwards out of order on a stage whose buffers follow them.

        Raises
        ------
        InputError
            Names the stage and a buffer.
        """
        for s, split in self.stages.items():
            order = [a.microbatch for a in program.actions if a.op == "F" and a.stage == s]
            if split.traits.changes_buffers and order != sorted(order):
                raise InputError(
                    f"stage {s} changes its buffer {split.traits.changes_buffers[0]} in its forward, "
                    f"and the plan runs its F's in the order {order}: use a plan that takes them in order"
                )

    # --- a step ---------------------------------------------------------------------------------

    def begin(self, step: int, fused: Set[tuple[int, int]], pairs: Pairs) -> None:
        """Fetch the step's data."""
        self._step = step
        self._fused = fused
        self._data = step_data(self.model, step, self.total_microbatches, self.seed)
        self._unfinished = set(self.stages)
        if self.device.type == "cuda":
            self._allocated = torch.cuda.memory_allocated(self.device)
        self._signatures = [signature_of(batch) for batch in self._data]
        if not self._boundaries.keys() >= set(self._signatures):
            raise EnvironmentFailedError(
                f"microbatches({step}, ...) returned other shapes than before step 1: make them a function "
                "of the step"
            )
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
        try:
            return self._run(op, stage, microbatch, received)
        except RuntimeError as error:
            if CHANGED not in str(error):
                raise
            raise EnvironmentFailedError(
                f"{op} of stage {stage}: a tensor that micro-batch {microbatch} needs was changed in place "
                "since its F (a work buffer that the next micro-batch writes to): give each call its own"
            ) from error

    def _run(self, op: str, stage: int, microbatch: int, received: list[torch.Tensor]) -> list[torch.Tensor]:
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
            self._require_agreed(split, stage, microbatch)
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
        spec = boundary.spec
        if self.instance.is_first(stage):
            tensors, spec = flatten(batch.inputs, "inputs")
            received = [t.to(self.device) for t in tensors]
        finish: Callable[[Any], torch.Tensor] | None = None
        if last:
            targets = move(batch.targets, self.device)

            def finish(value: Any) -> torch.Tensor:
                return self.model.loss(value, targets) * (batch.weight * self.scale)

        seed = step_seed(self.seed, self._step, stage % self.chain, number)
        outputs, out_spec = split.forward(
            microbatch,
            seed,
            received,
            boundary.needs,
            spec,
            finish,
            fused=(stage, microbatch) in self._fused,
            recomputes=self.instance.stages[stage].t_r is not None,
        )
        if last:
            self.losses[number] = outputs[0]
            return []
        agreed = self._boundary(stage + 1, number)
        if out_spec != agreed.spec or not all(map(_has_shape, outputs, agreed.shapes)):
            raise EnvironmentFailedError(
                f"stage {stage} returned other shapes or constants than before step 1 for a micro-batch "
                "of the same shape: let both depend on its input's shape alone (pass a number that varies "
                "as a tensor)"
            )
        self._require_agreed(split, stage, microbatch)
        return outputs

    def _require_agreed(self, split: SplitStage, stage: int, microbatch: int) -> None:
        """Raise where a gradient would be lost: the next stage sends back only what was agreed on."""
        if self.instance.is_last(stage):
            return
        needs = self._boundary(stage + 1, self._number(stage, microbatch)).needs
        for place, (required, agreed) in enumerate(zip(split.requires(microbatch), needs, strict=False)):
            if required and not agreed:
                raise EnvironmentFailedError(
                    f"output {place} of stage {stage} needs a gradient in micro-batch {microbatch} and did "
                    "not before step 1: let whether it does depend on the input's shape alone"
                )

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


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[Shape, ...]:
    return tuple(Shape(tuple(t.shape), t.dtype) for t in tensors)


def _has_shape(tensor: torch.Tensor, shape: Shape) -> bool:
    return tensor.shape == shape.size and tensor.dtype == shape.dtype


def signature_of(batch: MicroBatch) -> str:
    """Equal for micro-batches whose tensors have the same nesting, shapes and types.

    Of constants among the inputs, which shapes may follow from, whole numbers and words count as well.
    """
    inputs, inputs_spec = flatten(batch.inputs, "microbatches(): inputs")
    targets, targets_spec = flatten(batch.targets, "microbatches(): targets")
    constants = [leaf.value for leaf in inputs_spec.leaves if leaf is not None]
    discrete = [value for value in constants if not isinstance(value, float | complex)]
    return repr((inputs_spec.nesting, discrete, _shapes(inputs), targets_spec.nesting, _shapes(targets)))


def distinct_shapes(model: PipelineModel, steps: Iterable[int], count: int, seed: int) -> int:
    """Of how many shapes the micro-batches of some steps are."""
    return len({signature_of(batch) for step in steps for batch in step_data(model, step, count, seed)})


def move(value: Any, device: torch.device) -> Any:
    """A nested value with its tensors on a device."""
    tensors, spec = flatten(value, "targets")
    return unflatten([t.to(device) for t in tensors], spec)
