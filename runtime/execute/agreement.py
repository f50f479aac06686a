"""What all ranks agree on before step 1.

One micro-batch of every distinct shape walks through all stages once. That tells every rank what each
boundary carries: how many tensors, their sizes and types, and which of them get a gradient. A boundary
without any gradient (everything before it is frozen) carries nothing backward: the plan's messages stay in
the program, empty on both sides. Side effects of that walk on buffers and random state are undone, and what
it shows about a stage's layers (:mod:`zbsolve.runtime.backward.traits`) is heeded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from zbsolve.errors import InputError
from zbsolve.runtime.backward.traits import StageTraits
from zbsolve.runtime.execute.boundary import Boundary, memory_of
from zbsolve.runtime.execute.data import data_digest, shapes_of, signature_of, step_data
from zbsolve.runtime.execute.transport import Shape, solid_of, wire_of
from zbsolve.runtime.execute.walk import Walk, Walked
from zbsolve.runtime.models.pipeline_model import MicroBatch
from zbsolve.runtime.status import Status
from zbsolve.runtime.values import flatten, unflatten

if TYPE_CHECKING:
    from zbsolve.runtime.execute.stages import RealStages

logger = logging.getLogger(__name__)


class Agreement:
    """The walk before step 1, on every rank alike.

    Parameters
    ----------
    stages : RealStages
        This rank's.
    store : Store
        What all ranks write to and read from.
    """

    def __init__(self, stages: RealStages, store: Store, status: Status) -> None:
        self._own, self._store, self._status = stages, store, status
        self._instance, self._chain = stages.instance, stages.chain
        self._boundaries: dict[str, dict[int, Boundary]] = {}

    def reach(self, steps: int) -> dict[str, dict[int, Boundary]]:
        """Walk one micro-batch of every distinct shape through all stages and share what it showed.

        Returns
        -------
        dict
            Signature of a micro-batch -> stage -> what goes into it.

        Raises
        ------
        InputError
            Data that change from call to call or from rank to rank, or a stage that is refused.
        """
        self._compare_data()
        for step in range(steps):
            for batch in step_data(self._own.model, step, self._own.total_microbatches, self._own.seed):
                signature = signature_of(batch)
                if signature not in self._boundaries:
                    number = len(self._boundaries)
                    self._boundaries[signature] = {}
                    self._walk(number, signature, batch)
        # Replicas of a stage, here or on another device, behave as the first one.
        for number in range(len(self._boundaries)):
            for s, split in self._own.stages.items():
                split.heed(
                    StageTraits.from_text(self._store.get(f"traits/{number}/{s % self._chain}").decode())
                )
        return self._boundaries

    def _compare_data(self) -> None:
        first, again = (
            data_digest(step_data(self._own.model, 0, self._own.total_microbatches, self._own.seed))
            for _ in range(2)
        )
        if first != again:
            raise InputError(
                "microbatches(0, ...) returned other data when it was called again: make them a function of "
                "the step, which may be asked for more than once"
            )
        self._store.set(f"data/{self._own.device_index}", first)
        if self._store.get("data/0").decode() != first:
            raise InputError(
                f"microbatches(0, ...) returns other data on device {self._own.device_index} than on "
                "device 0: make them a function of the step alone"
            )

    def _walk(self, number: int, signature: str, batch: MicroBatch) -> None:
        found = self._boundaries[signature]
        tensors, spec = flatten(batch.inputs, "microbatches(): inputs")
        found[0] = Boundary(spec, shapes_of(tensors), (False,) * len(tensors), memory_of(tensors))
        carried = [t.to(self._own.device) for t in tensors]
        for s in range(self._chain):
            here = self._instance.stages[s].device == self._own.device_index
            self._status.set("setup", -1, s, -1)
            if here and s > 0 and self._instance.stages[s - 1].device != self._own.device_index:
                carried = self._blocking(s, found[s].shapes, self._instance.stages[s - 1].device, None)
            key = f"boundary/{number}/{s + 1}"
            if here:
                walked = self._try_stage(s, found[s], carried, batch)
                self._store.set(f"traits/{number}/{s}", walked.traits.to_text())
                self._store.set(key, walked.boundary.to_text(f"the output of {self._called(s)}"))
                carried = walked.outputs
            if s + 1 < self._chain:
                found[s + 1] = Boundary.from_text(self._store.get(key).decode())
                target = self._instance.stages[s + 1].device
                if here and target != self._own.device_index:
                    self._blocking(s + 1, found[s + 1].shapes, target, carried)

    def _called(self, s: int) -> str:
        """A stage, for messages."""
        return f"stage {s} ({self._instance.stages[s].name or 'unnamed'})"

    def _blocking(
        self, stage: int, shapes: Sequence[Shape], peer: int, tensors: list[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Send (or receive, without tensors) what goes into a stage; only one such transfer is under way."""
        if tensors is None:
            received = [torch.empty(s.size, dtype=s.dtype, device=self._own.device) for s in shapes]
            for tensor in received:
                dist.recv(wire_of(tensor), group=self._own.pipeline, group_src=peer)
            return received
        for tensor in tensors:
            dist.send(wire_of(solid_of(tensor)), group=self._own.pipeline, group_dst=peer)
        return tensors

    def _try_stage(self, s: int, boundary: Boundary, inputs: list[torch.Tensor], batch: MicroBatch) -> Walked:
        finish: Callable[[Any], torch.Tensor] | None = None
        if s + 1 == self._chain:

            def finish(value: Any) -> torch.Tensor:
                # Copies: the walk changes nobody's data.
                tensors, spec = flatten(batch.targets, "microbatches(): targets")
                targets = unflatten([t.to(self._own.device, copy=True) for t in tensors], spec)
                return self._own.model.loss(value, targets)

        walked = Walk(self._own.stages[s], self._called(s), self._own.seed, boundary, inputs, finish).run()
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
            label = self._own.shared_buffers.get(s, {}).get(name)
            if label is not None:
                raise InputError(
                    f"stage {s} changes its buffer {name}, which is layer {label} of another stage, too: "
                    "give each layer a buffer of its own, or put both into one stage"
                )
        if self._own.total_microbatches > self._instance.num_microbatches:
            raise InputError(
                f"stage {s} changes its buffer {changed[0]} in its forward, and each of the pipelines side "
                "by side would have its own: run one pipeline, or leave running statistics out"
            )
