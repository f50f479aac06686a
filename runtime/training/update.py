"""The optimizer's step across ranks, with a global barrier or verified afterwards.

Every rank must take the same decision (step, skip, by how much to clip), and it depends on the gradients of
all: their joint norm, and whether all are finite. Two ways:

* **barrier**: all ranks sum their parts first, then step.
* **post-validation** (Qi et al., arXiv 2401.10241, section 4): rank r gets the sum over ranks 0..r-1, adds
  its own, passes it on, and steps on what it knows. The last rank's sum is everything; it goes to all
  while the next step runs. After that step each rank compares: where the decision was wrong on any rank, all
  ranks put parameters and optimizer state back, step again as the whole sum says, and repeat the step
  that ran on wrong weights. So no rank waits for all others between two steps, and the result is that of
  the barrier, to the last bit.

Putting back is a copy of parameters, optimizer state and gradients, kept from one step to the next: exact
for every optimizer, and it costs that memory. The control messages are a few numbers over gloo.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

logger = logging.getLogger(__name__)

# torch.amp.GradScaler's rules.
_FIRST_SCALE, _GROWTH, _BACKOFF, _GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000


@dataclass(frozen=True)
class Sums:
    """Of the gradients of some ranks: the sum of squares, infinite when any is not finite."""

    squares: float

    @property
    def finite(self) -> bool:
        """Whether every gradient is a finite number."""
        return math.isfinite(self.squares)


@dataclass(frozen=True)
class Decision:
    """What the optimizer does: nothing when ``factor`` is None, else step on gradients times it."""

    factor: float | None


def decide(sums: Sums, clip: float | None, scale: float) -> Decision:
    """The decision that sums of (scaled) gradients ask for."""
    if not sums.finite:
        return Decision(None)
    norm = math.sqrt(sums.squares) / scale
    clipped = 1.0 if clip is None or norm <= clip else clip / norm
    return Decision(clipped / scale)


class LossScale:
    """Dynamic loss scale for float16; 1 for everything else. Every rank computes the same."""

    def __init__(self, active: bool) -> None:
        self.active = active
        self.value = _FIRST_SCALE if active else 1.0
        self._good = 0

    def after(self, stepped: bool) -> None:
        """Grow after many good steps, back off after a bad one."""
        if not self.active:
            return
        if not stepped:
            self.value, self._good = self.value * _BACKOFF, 0
            return
        self._good += 1
        if self._good == _GROWTH_INTERVAL:
            self.value, self._good = self.value * _GROWTH, 0


class Updater:
    """One rank's optimizer, and its part in the common decision.

    Parameters
    ----------
    parameters : sequence of nn.Parameter
        This rank's trainable parameters, each once (a weight tied within the rank counts once in the norm).
    name : "adam", "sgd" or "none"
        The optimizer.
    group : process group
        Gloo, over the ranks of one pipeline in device order: it carries the control messages.
    buffers : sequence of torch.Tensor
        What a step changes besides parameters (running means of norms): put back with them.
    counted : sequence of nn.Parameter, optional
        Those whose gradients this rank adds to the norm (default: all): not the second copy of a weight.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        name: str,
        learning_rate: float,
        *,
        clip: float | None,
        float16: bool,
        group: dist.ProcessGroup,
        buffers: Sequence[torch.Tensor] = (),
        counted: Sequence[nn.Parameter] | None = None,
    ) -> None:
        self.parameters, self.buffers = list(parameters), list(buffers)
        self.counted = self.parameters if counted is None else list(counted)
        self.clip = clip
        self.scale = LossScale(float16)
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.optimizer = _make_optimizer(name, self.parameters, learning_rate)
        self.rollbacks = 0
        self.skipped = 0
        self._pending: _Pending | None = None

    def sums(self) -> Sums:
        """This rank's part."""
        norms = [p.grad.double().square().sum() for p in self.counted if p.grad is not None]
        total = float(torch.stack(norms).sum()) if norms else 0.0
        return Sums(total if math.isfinite(total) else math.inf)

    # --- with a barrier -------------------------------------------------------------------------

    def step_together(self) -> bool:
        """Sum over all ranks, then the same decision everywhere; returns whether it stepped."""
        # Rank by rank, so that the sum is that of the other way to the last bit.
        parts = torch.zeros(self.size, dtype=torch.float64)
        parts[self.rank] = self.sums().squares
        dist.all_reduce(parts, group=self.group)
        total = 0.0
        for part in parts.tolist():
            total += part
        return self._apply(decide(Sums(total), self.clip, self.scale.value))

    def _apply(self, decision: Decision) -> bool:
        stepped = decision.factor is not None
        if decision.factor is not None and self.optimizer is not None:
            if decision.factor != 1.0:
                for parameter in self.parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(decision.factor)
            self.optimizer.step()
        if not stepped:
            self.skipped += 1
            if self.rank == 0:
                logger.warning("the gradients of a step are not finite: every rank skips it")
        self.scale.after(stepped)
        self.clear()
        return stepped

    def clear(self) -> None:
        """Gradients to zero, in place, so that no step pays for new buffers."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()

    # --- verified afterwards --------------------------------------------------------------------

    def step_ahead(self) -> None:
        """Step on the sum of the ranks up to this one; :meth:`verify` says later whether that was right."""
        before = self._snapshot()
        known = self._partial(self.sums().squares)
        decision = decide(Sums(known), self.clip, self.scale.value)
        self._pending = _Pending(before, decision, self._start_return(known))
        self._apply(decision)

    def _partial(self, own: float) -> float:
        """Sum over ranks 0 to this one; passes it on to the next."""
        known = torch.zeros(1, dtype=torch.float64)
        if self.rank > 0:
            dist.recv(known, group=self.group, group_src=self.rank - 1, tag=0)
        known += own
        if self.rank + 1 < self.size:
            dist.send(known, group=self.group, group_dst=self.rank + 1, tag=0)
        return float(known)

    def _start_return(self, known: float) -> tuple[torch.Tensor, dist.Work | None]:
        """Begin the whole sum's way back: the last rank has it."""
        total = torch.tensor([known], dtype=torch.float64)
        if self.size == 1:
            return total, None
        return total, dist.broadcast(total, group=self.group, group_src=self.size - 1, async_op=True)

    def verify(self) -> bool:
        """Whether the last step ahead was right on every rank; if not, this one has put it right.

        Every rank gets the same answer. After False the step that ran since must run again.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return True
        total, arriving = pending.total
        if arriving is not None:
            arriving.wait()
        due = decide(Sums(float(total)), self.clip, pending.before.scale)
        # All ranks ask whether any was wrong, which each can tell from the whole: partial sums only grow, so
        # the first rank's was the smallest, and it is right when the whole neither clips nor overflows.
        if self.size == 1 or due == Decision(1.0 / pending.before.scale):
            return True
        self._restore(pending.before)
        self._apply(due)
        self.rollbacks += 1
        return False

    def _snapshot(self) -> _Snapshot:
        state = None if self.optimizer is None else copy.deepcopy(self.optimizer.state_dict())
        return _Snapshot(
            [p.detach().clone() for p in self.parameters],
            [None if p.grad is None else p.grad.clone() for p in self.parameters],
            [b.clone() for b in self.buffers],
            state,
            self.scale.value,
            self.scale._good,
            self.skipped,
        )

    def _restore(self, snapshot: _Snapshot) -> None:
        with torch.no_grad():
            for parameter, value, gradient in zip(
                self.parameters, snapshot.values, snapshot.gradients, strict=True
            ):
                parameter.copy_(value)
                if gradient is not None:
                    assert parameter.grad is not None
                    parameter.grad.copy_(gradient)
            for buffer, content in zip(self.buffers, snapshot.buffers, strict=True):
                buffer.copy_(content)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(snapshot.state)
        self.scale.value, self.scale._good = snapshot.scale, snapshot.good
        self.skipped = snapshot.skipped


@dataclass(frozen=True)
class _Snapshot:
    """Everything that a step changes."""

    values: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    buffers: list[torch.Tensor]
    state: Any
    scale: float
    good: int
    skipped: int


@dataclass(frozen=True)
class _Pending:
    """A step ahead that is still to be verified."""

    before: _Snapshot
    decision: Decision
    total: tuple[torch.Tensor, dist.Work | None]


def _make_optimizer(
    name: str, parameters: list[nn.Parameter], learning_rate: float
) -> torch.optim.Optimizer | None:
    if name == "none" or not parameters:
        return None
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=learning_rate)
    return torch.optim.Adam(parameters, lr=learning_rate)
