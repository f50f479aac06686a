"""A device's real layers behind the executor's interface.

It brings together what a step needs of many modules, hence its many imports: the layers' split backward, what
was agreed on before step 1 (:mod:`zbsolve.runtime.execute.agreement`), copies of weights, and the accounts of
memory.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence, Set
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
from zbsolve.runtime.execute.agreement import Agreement
from zbsolve.runtime.execute.boundary import Boundary
from zbsolve.runtime.execute.copies import Copies, Tie, find_ties
from zbsolve.runtime.execute.data import move, signature_of, step_data
from zbsolve.runtime.execute.ledger import MemoryLedger, Noted
from zbsolve.runtime.execute.transients import measure_rise, watch_of
from zbsolve.runtime.execute.transport import Shape
from zbsolve.runtime.models.pipeline_model import MicroBatch, PipelineModel, StageLayers, stage_ranges
from zbsolve.runtime.randomness import step_seed
from zbsolve.runtime.status import Status
from zbsolve.runtime.values import flatten

logger = logging.getLogger(__name__)


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
        """Learn from one micro-batch of every distinct shape what boundaries carry and how stages behave.

        Raises
        ------
        InputError
            Data that change from call to call or from rank to rank, or a stage that is refused.
        """
        self._boundaries = Agreement(self, store, status).reach(steps)

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


def _has_shape(tensor: torch.Tensor, shape: Shape) -> bool:
    return tensor.shape == shape.size and tensor.dtype == shape.dtype
