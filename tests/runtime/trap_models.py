"""Small models whose layers do what a pipeline easily gets wrong. Ranks import this module too."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from runtime_cases import Model
from torch import nn
from torch.utils.checkpoint import checkpoint

from zbsolve.runtime.models.pipeline_model import MicroBatch, cut_rows

WIDTH = 6


class Block(nn.Module):
    """A residual block; traps call :meth:`core`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def core(self, x: torch.Tensor) -> torch.Tensor:
        """X plus a function of it."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, value: Any) -> Any:
        return self.core(value)


class Trap(Model):
    """Four layers; the loss looks at the activation in whatever the last one returns."""

    def __init__(
        self, layers: Sequence[nn.Module], find: Callable[[Any], torch.Tensor] | None = None
    ) -> None:
        super().__init__(layers, WIDTH)
        self.find = find

    def loss(self, output: Any, targets: torch.Tensor) -> torch.Tensor:
        return super().loss(output if self.find is None else self.find(output), targets)


class FreesSaved(torch.autograd.Function):
    """x w; what it saved is gone after its backward, as in wrappers around fused kernels."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.saved = (x.detach(), w.detach())
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, w = ctx.saved
        ctx.saved = None
        return grads[0] * w, (grads[0] * x).sum(0)


class Once(Block):
    """Its backward can run once."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.core(FreesSaved.apply(value, self.scale))


def custom_once() -> Trap:
    """A custom function that frees what it saved, in every layer."""
    return Trap([Once() for _ in range(4)])


class Halved(Block):
    """Scales the gradient by a hook, which a backward in two parts would call twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        scaled = value * self.scale
        if scaled.requires_grad:
            scaled.register_hook(lambda gradient: gradient * 0.5)
        return self.core(scaled + self.shift)


def gradient_hooks() -> Trap:
    """A hook on an activation's gradient, in every layer."""
    return Trap([Halved() for _ in range(4)])


class WritesInput(Block):
    """Changes its input in place, twice, before anything else."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value += 1.0
        value.mul_(0.5)
        return self.core(value)


def inplace_start() -> Trap:
    """Layers that begin with in-place arithmetic."""
    return Trap([Block(), WritesInput(), WritesInput(), WritesInput()])


def inplace_everywhere() -> Trap:
    """The first layer does so, too: on the data."""
    return Trap([WritesInput() for _ in range(4)])


class ReluFirst(nn.Module):
    """nn.ReLU(inplace=True), then a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.relu = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.relu(x))


def relu_inplace_start() -> Trap:
    """Layers that begin with an in-place activation."""
    return Trap([nn.Linear(WIDTH, WIDTH), ReluFirst(), ReluFirst(), ReluFirst()])


class Normed(nn.Module):
    """A residual batch norm; ``again``: computed a second time in its backward."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.again = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), again

    def core(self, x: torch.Tensor) -> torch.Tensor:
        """X plus its normed projection."""
        return x + torch.relu(self.norm(self.linear(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.again:
            return self.core(x)
        result = checkpoint(self.core, x, use_reentrant=False)
        assert isinstance(result, torch.Tensor)
        return result


def batch_norm() -> Trap:
    """Running statistics."""
    return Trap([Normed(False) for _ in range(4)])


def batch_norm_under_checkpoint() -> Trap:
    """Running statistics that a recomputation would count twice."""
    return Trap([Normed(True) for _ in range(4)])


class Smoothed(Trap):
    """Targets with a Python number, another one for each micro-batch."""

    def loss(self, output: torch.Tensor, targets: dict[str, Any]) -> torch.Tensor:
        return super().loss(output, targets["y"]) * targets["smooth"]

    def microbatches(self, step: int, count: int) -> list[MicroBatch]:
        cut = super().microbatches(step, count)
        return [
            MicroBatch(b.inputs, {"y": b.targets, "smooth": 0.1 * (j + 1)}, b.weight)
            for j, b in enumerate(cut)
        ]


def number_among_targets() -> Smoothed:
    """A float beside the targets."""
    return Smoothed([Block() for _ in range(4)])


class Pair(NamedTuple):
    """An activation and a tensor without gradient."""

    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Registered:
    """The same as a dataclass that torch's pytree knows."""

    x: torch.Tensor
    y: torch.Tensor


torch.export.register_dataclass(Registered)


@dataclass
class Unregistered:
    """The same as one that it does not know."""

    x: torch.Tensor
    y: torch.Tensor


class Packs(Block):
    """Hands a container on: ``pack`` makes it, ``find`` finds the activation in one."""

    def __init__(self, pack: Callable[..., Any], find: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.pack, self.find = pack, find

    def forward(self, value: Any) -> Any:
        x = value if isinstance(value, torch.Tensor) else self.find(value)
        return self.pack(x=self.core(x), y=x.detach())


def _packed(pack: Callable[..., Any], find: Callable[[Any], torch.Tensor]) -> Trap:
    return Trap([Packs(pack, find) for _ in range(4)], find)


def named_tuples() -> Trap:
    """Named tuples between layers."""
    return _packed(Pair, lambda value: value.x)


def ordered_dicts() -> Trap:
    """Ordered dicts between layers."""
    return _packed(OrderedDict, lambda value: value["x"])


def dataclasses() -> Trap:
    """Registered dataclasses between layers."""
    return _packed(Registered, lambda value: value.x)


def unknown_dataclasses() -> Trap:
    """Dataclasses that nobody registered."""
    return _packed(Unregistered, lambda value: value.x)


def model_outputs() -> Trap:
    """Model outputs of transformers between layers."""
    from transformers.modeling_outputs import BaseModelOutput

    def pack(x: torch.Tensor, y: torch.Tensor) -> Any:
        return BaseModelOutput(last_hidden_state=x, hidden_states=(y,))

    return _packed(pack, lambda value: value.last_hidden_state)


class Dropped(Block):
    """Left out for half of the micro-batches, as ``draw`` has it."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value if self.draw() < 0.5 else self.core(value)


def layer_drop() -> Trap:
    """Layers left out by torch's generator."""
    return Trap([Dropped(lambda: float(torch.rand(()))) for _ in range(4)])


def layer_drop_by_others() -> Trap:
    """Layers left out by Python's generator and by numpy's."""
    draws: list[Callable[[], float]] = [random.random, np.random.rand]
    return Trap([Dropped(draws[place % 2]) for place in range(4)])


class WorkBuffer(Block):
    """Hands on, beside its result, a buffer that the next micro-batch of the same shape writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.work: torch.Tensor | None = None

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.work is None or self.work.shape != value.shape:
            self.work = torch.empty_like(value)
        torch.abs(value.detach(), out=self.work)
        return self.core(value), self.work


class UsesBuffer(Block):
    """Reads what comes beside the activation, and hands it on."""

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, beside = value
        return self.core(x / (1 + beside)), beside


def work_buffer() -> Trap:
    """A preallocated buffer handed on as an output."""
    layers: list[nn.Module] = [WorkBuffer(), *(UsesBuffer() for _ in range(3))]
    return Trap(layers, lambda value: value[0])


class SavesBuffer(Block):
    """Keeps its work buffer for its own backward, where the next micro-batch has written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("work", torch.zeros(1), persistent=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.work.shape != value.shape:
            self.work = torch.empty_like(value)
        torch.abs(value.detach(), out=self.work)
        return self.core(value * self.work)


def saved_work_buffer() -> Trap:
    """A preallocated buffer that autograd saves."""
    return Trap([SavesBuffer() for _ in range(4)])


class Odd(Block):
    """Hands everything odd on: strided, empty and bool tensors, ints, words, None, its parameter's view."""

    def forward(self, value: Any) -> dict[str, Any]:
        x = value if isinstance(value, torch.Tensor) else value["x"].t() + value["weight"].sum()
        result = self.core(x)
        return {
            "x": result.t(),
            "weight": self.norm.weight[1:],
            "mask": result > 0,
            "empty": result[:0],
            "detached": x.detach()[:, ::2],
            "depth": 3,
            "word": "pre",
            "nothing": None,
            "conjugate": torch.view_as_complex(x.detach().reshape(-1, 3, 2).contiguous()).conj(),
        }


def odd_outputs() -> Trap:
    """Every odd kind of output at once."""
    return Trap([Odd() for _ in range(4)], lambda value: value["x"].t())


class Counts(nn.Module):
    """An integer stage: ids in, shifted ids out."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids + 1) % 5


class Ids(Trap):
    """Random ids as inputs."""

    def microbatches(self, step: int, count: int) -> list[MicroBatch]:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 5, (self.rows,), generator=generator)
        return cut_rows(ids, torch.randn(self.rows, WIDTH, generator=generator), count)


def integer_inputs() -> Ids:
    """Two stages that pass nothing but integers."""
    return Ids([Counts(), Counts(), nn.Embedding(5, WIDTH), Block()])


class Unlike(Trap):
    """Micro-batches of (rows, length) with another length each, position ids of (3, rows, length) beside."""

    def microbatches(self, step: int, count: int) -> list[MicroBatch]:
        generator = torch.Generator().manual_seed(step)
        made = []
        for j in range(count):
            x = torch.randn(2, 2 + j % 3, WIDTH, generator=generator)
            places = torch.arange(2 + j % 3).expand(3, 2, -1)
            (batch,) = cut_rows((x, places), x, 1, input_axes=(0, 1))
            made.append(MicroBatch(batch.inputs, batch.targets, 1 / count))
        return made


class Placed(Block):
    """Adds positions to the activation, and hands both on."""

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, places = value
        return self.core(x + places.sum(0).unsqueeze(-1)), places


def unlike_shapes() -> Unlike:
    """A shape of its own for each micro-batch, a batch axis that is not the first."""
    return Unlike([Placed() for _ in range(4)], lambda value: value[0])


class Restless(Trap):
    """Data that are others at each call."""

    calls = 0

    def microbatches(self, step: int, count: int) -> list[MicroBatch]:
        Restless.calls += 1
        return super().microbatches(Restless.calls, count)


def restless_data() -> Restless:
    """An iterator in place of a function of the step."""
    return Restless([Block() for _ in range(4)])


class RandomData(Trap):
    """Data drawn from the global generators."""

    def microbatches(self, step: int, count: int) -> list[MicroBatch]:
        x = torch.randn(self.rows, WIDTH) * random.random()
        return cut_rows(x, x.flip(0).contiguous(), count)


def random_data() -> RandomData:
    """Data that follow from whatever the generators' states are."""
    return RandomData([Block() for _ in range(4)])


class Aliased(Block):
    """Hands the same memory on twice."""

    def forward(self, value: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.core(value)
        return x, x.detach()


class WritesAliased(Block):
    """Changes one of two tensors of the same memory, and reads the other."""

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, same = value
        x += 1
        return self.core(x * same)


def aliased_outputs() -> Trap:
    """Two outputs in one memory, one of which the next stage changes."""
    return Trap([Block(), Aliased(), WritesAliased(), Block()])


class ClampsWeight(Block):
    """Changes its own weight in its forward."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return self.core(value)


def changing_weights() -> Trap:
    """Weights that a forward changes."""
    return Trap([ClampsWeight() for _ in range(4)])


def compiled_in_place() -> Trap:
    """A layer compiled by its own method."""
    layer = Block()
    layer.compile(backend="aot_eager")
    return Trap([Block(), layer, Block(), Block()])


def replaced_forward() -> Trap:
    """A Linear whose forward somebody has replaced on the object, as wrappers for adapters do."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    for layer in layers:
        plain = layer.forward
        layer.forward = lambda x, plain=plain: torch.tanh(plain(x))  # type: ignore[method-assign]
    return Trap(layers)
