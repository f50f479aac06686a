"""A step's micro-batches: made the same wherever they are asked for, and told apart by their shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zbsolve.errors import InputError
from zbsolve.runtime.execute.transport import Shape, solid_of
from zbsolve.runtime.models.pipeline_model import MicroBatch, PipelineModel
from zbsolve.runtime.randomness import data_seed, set_seed
from zbsolve.runtime.values import flatten, unflatten

_WEIGHT_TOLERANCE = 1e-6
# Micro-batches are made on the CPU.
_DATA_DEVICE = torch.device("cpu")


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
            digest.update(repr((spec.nesting, spec.leaves, shapes_of(tensors), batch.weight)).encode())
            for tensor in tensors:
                digest.update(solid_of(tensor.detach()).cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def shapes_of(tensors: Sequence[torch.Tensor]) -> tuple[Shape, ...]:
    """Sizes and types."""
    return tuple(Shape(tuple(t.shape), t.dtype) for t in tensors)


def signature_of(batch: MicroBatch) -> str:
    """Equal for micro-batches whose tensors have the same nesting, shapes and types.

    Of constants among the inputs, which shapes may follow from, whole numbers and words count as well.
    """
    inputs, inputs_spec = flatten(batch.inputs, "microbatches(): inputs")
    targets, targets_spec = flatten(batch.targets, "microbatches(): targets")
    constants = [leaf.value for leaf in inputs_spec.leaves if leaf is not None]
    discrete = [value for value in constants if not isinstance(value, float | complex)]
    return repr((inputs_spec.nesting, discrete, shapes_of(inputs), targets_spec.nesting, shapes_of(targets)))


def distinct_shapes(model: PipelineModel, steps: Iterable[int], count: int, seed: int) -> int:
    """Of how many shapes the micro-batches of some steps are."""
    return len({signature_of(batch) for step in steps for batch in step_data(model, step, count, seed)})


def move(value: Any, device: torch.device) -> Any:
    """A nested value with its tensors on a device."""
    tensors, spec = flatten(value, "targets")
    return unflatten([t.to(device) for t in tensors], spec)
