"""The acceptance test of a run: every gradient against the unpipelined model.

The reference is a fresh copy of the model, run whole, micro-batch by micro-batch, with autograd's ordinary
backward and none of this package's functions in it. It sums each stage's gradients in the order in which
the plan runs that stage's W's, so that a right run is equal to the last bit; what differs only by the order
of a sum (a weight used by two stages of a device) stays within ``TOLERANCE``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zbsolve.model.kinds import GRADIENT_KINDS
from zbsolve.plan.actions import Program
from zbsolve.runtime.backward.split import autocasting
from zbsolve.runtime.backward.sums import accumulate, unique
from zbsolve.runtime.execute.data import move, step_data
from zbsolve.runtime.execute.stages import RealStages
from zbsolve.runtime.models.pipeline_model import PipelineModel, StageLayers, stage_ranges
from zbsolve.runtime.randomness import set_seed, step_seed
from zbsolve.runtime.values import flatten, unflatten

# Relative to the largest entry of the gradient; sums in float32 taken in another order differ by 1e-7.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Difference:
    """The worst parameter of one device: relative difference, whether all bits agree, and its name."""

    worst: float
    bit_equal: bool
    where: str


def weight_orders(program: Program) -> dict[int, list[int]]:
    """Micro-batches of each stage in the order in which their weight gradients are added."""
    orders: dict[int, list[int]] = {}
    for action in program.actions:
        if action.op in GRADIENT_KINDS:
            orders.setdefault(action.stage, []).append(action.microbatch)
    return orders


def reference_gradients(
    model: PipelineModel,
    split: Sequence[int],
    orders: dict[int, list[int]],
    *,
    seed: int,
    step: int,
    count: int,
    device: torch.device,
    autocast: torch.dtype | None = None,
    scale: float = 1.0,
) -> dict[int, list[torch.Tensor | None]]:
    """Gradients of the stages named in ``orders``, parameters in ``named_parameters`` order.

    ``count`` micro-batches make the step; ``autocast`` and ``scale`` are what the run has.
    """
    stages = [StageLayers([model.layers[i] for i in held]).to(device).train() for held in stage_ranges(split)]
    wanted = unique(p for s in orders for p in stages[s].parameters() if p.requires_grad)
    per_microbatch: list[dict[nn.Parameter, torch.Tensor]] = []
    for j, batch in enumerate(step_data(model, step, count, seed)):
        value = move(batch.inputs, device)
        for s, stage in enumerate(stages):
            set_seed(step_seed(seed, step, s, j), device, host=True)
            with autocasting(device, autocast):  # a context a stage, as each rank has its own
                value = _copied(stage(value))
        with autocasting(device, autocast):
            loss = model.loss(value, move(batch.targets, device)) * (batch.weight * scale)
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if wanted and loss.requires_grad:
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
        per_microbatch.append({p: g for p, g in zip(wanted, found, strict=True) if g is not None})
    order_of: dict[nn.Parameter, list[int]] = {}
    for s, order in orders.items():
        for parameter in stages[s].parameters():
            order_of.setdefault(parameter, order)
    for parameter in wanted:
        for j in order_of[parameter]:
            if parameter in per_microbatch[j]:
                accumulate(parameter, per_microbatch[j][parameter])
    return {s: [p.grad for p in stages[s].parameters()] for s in orders}


def _copied(value: Any) -> Any:
    """A value in memory of its own, as the next stage gets it."""
    tensors, spec = flatten(value, "a stage's output")
    return unflatten([t.clone(memory_format=torch.contiguous_format) for t in tensors], spec)


def compare_gradients(stages: RealStages, reference: dict[int, list[torch.Tensor | None]]) -> Difference:
    """Every parameter of a device against the reference. A missing or superfluous gradient is infinite."""
    worst, bit_equal, where = 0.0, True, ""
    for s, expected in reference.items():
        named = stages.stages[s].module.named_parameters(prefix=f"stage {s}")
        for (name, parameter), wanted in zip(named, expected, strict=True):
            got = parameter.grad
            if got is None or wanted is None:
                one = got if wanted is None else wanted
                # No gradient and a gradient of zeros are the same to an optimizer step of plain SGD.
                difference = 0.0 if one is None or not bool(one.count_nonzero()) else float("inf")
            elif torch.equal(got, wanted):
                difference = 0.0
            else:
                bit_equal = False
                scale = max(float(wanted.abs().max()), torch.finfo(wanted.dtype).tiny)
                difference = float((got.double() - wanted.double()).abs().max()) / scale
                difference = float("inf") if difference != difference else difference
            bit_equal = bit_equal and difference == 0.0
            if difference > worst or not where:
                worst, where = max(worst, difference), name
    return Difference(worst, bit_equal, where)
