"""Weights with several copies: found before step 1, begun equal, their gradients summed in every step.

A weight has copies where stages of different devices use it (an embedding that is the head as well), and
where the plan has several replicas of its stage. Every rank that holds one adds its own gradient to the sum
after its last W and before the optimizer's step, and every holder then steps alike, so that copies stay equal
to the last bit.

The sums are blocking collectives, one a weight, each over the holders alone. All ranks take the weights in
one total order (that of :func:`find_ties` and of the stages, the same everywhere), so no two can wait for
each other: of the sums that are not done the first in that order has no holder that waits elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from zbsolve.errors import EnvironmentFailedError, InputError
from zbsolve.model.instance import Instance
from zbsolve.runtime.backward.running_state import buffers_of
from zbsolve.runtime.backward.sums import unique
from zbsolve.runtime.models.pipeline_model import PipelineModel, stage_ranges


class Place(NamedTuple):
    """Where a layer has a parameter."""

    stage: int
    layer: int
    name: str

    @property
    def label(self) -> str:
        """As checkpoints name it."""
        return f"{self.layer}.{self.name}"


@dataclass(frozen=True)
class Tie:
    """One parameter under several names, in model order."""

    places: tuple[Place, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages that use it."""
        return tuple(sorted({place.stage for place in self.places}))

    def devices(self, instance: Instance) -> tuple[int, ...]:
        """Devices that hold it, over all replicas."""
        return tuple(sorted({d for stage in self.stages for d in homes(instance, stage)}))


def homes(instance: Instance, stage: int) -> tuple[int, ...]:
    """Devices of a stage of the model, one or more: each replica has it."""
    every = range(stage, instance.num_stages, instance.chain)
    return tuple(sorted({instance.stages[s].device for s in every}))


def find_ties(model: PipelineModel, split: Sequence[int], instance: Instance) -> tuple[Tie, ...]:
    """Parameters with more than one name. The same answer on every rank.

    Raises
    ------
    InputError
        Two parameters of different devices that share their memory: to an optimizer they are two, and no
        two devices can share memory.
    """
    # Layers that are built anew at each access must not all be kept alive here.
    found = cast("MutableMapping[nn.Parameter, list[Place]]", WeakIdKeyDictionary())
    owners: dict[int, tuple[ref[nn.Parameter], Place]] = {}
    for stage, held in enumerate(stage_ranges(split)):
        for index in held:
            layer = model.layers[index]
            for name, parameter in layer.named_parameters(remove_duplicate=False):
                place = Place(stage, index, name)
                found.setdefault(parameter, []).append(place)
                address = parameter.untyped_storage().data_ptr()
                other, first = owners.setdefault(address, (ref(parameter), place))
                alive = other()
                if alive is None:
                    owners[address] = ref(parameter), place
                elif address and alive is not parameter and parameter.numel() and alive.numel():
                    _refuse_apart(instance, place, first)
    return tuple(Tie(tuple(places)) for places in found.values() if len(places) > 1)


def _refuse_apart(instance: Instance, place: Place, first: Place) -> None:
    if len({*homes(instance, place.stage), *homes(instance, first.stage)}) > 1:
        raise InputError(
            f"layer {place.label} shares its memory with layer {first.label} on another device without being "
            "the same parameter: assign the parameter itself (head.weight = embedding.weight)"
        )


def shared_buffers(model: PipelineModel, split: Sequence[int]) -> dict[int, dict[str, str]]:
    """Per stage, its buffers that another stage has, too: name within the stage -> label there."""
    found = cast("MutableMapping[torch.Tensor, list[tuple[Place, str]]]", WeakIdKeyDictionary())
    for stage, held in enumerate(stage_ranges(split)):
        for number, index in enumerate(held):
            for name, buffer in buffers_of(model.layers[index]).items():
                entry = (Place(stage, index, name), f"layers.{number}.{name}")
                found.setdefault(buffer, []).append(entry)
    shared: dict[int, dict[str, str]] = {}
    for entries in found.values():
        for place, name in entries:
            for other, _ in entries:
                if other.stage != place.stage:
                    shared.setdefault(place.stage, {})[name] = other.label
    return shared


class Copies:
    """This rank's copies of one weight, and the ranks that hold one.

    Parameters
    ----------
    label : str
        The weight, for messages.
    parameters : sequence of nn.Parameter
        This rank's, each object once.
    group : process group, optional
        All ranks that hold a copy (None: only this one).
    """

    def __init__(
        self, label: str, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None
    ) -> None:
        self.label = label
        self.parameters = unique(parameters)
        self.group = group

    def begin_equal(self) -> None:
        """Give every copy the values of the first holder's."""
        first, *others = (parameter.data for parameter in self.parameters)
        if self.group is not None:
            dist.broadcast(first, group=self.group, group_src=0)
        for other in others:
            other.copy_(first)

    def sum_gradients(self) -> None:
        """Give every copy's gradient the sum over all."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # other holders may have one
        total, *others = (parameter.grad for parameter in self.parameters)
        assert total is not None
        for other in others:
            assert other is not None
            total.add_(other)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        for other in others:
            assert other is not None
            other.copy_(total)

    def require_equal(self) -> None:
        """Raise ``EnvironmentFailedError`` when a copy differs from the first holder's in any bit."""
        first = self.parameters[0].detach().clone()
        if self.group is not None:
            dist.broadcast(first, group=self.group, group_src=0)
        for parameter in self.parameters:
            if not torch.equal(_bits(parameter.detach()), _bits(first)):
                raise EnvironmentFailedError(
                    f"copies of {self.label} differ between devices: run on devices of one kind"
                )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # A NaN is not equal to itself; its bits are.
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# --- on one device ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """The stages that a device holds, by number, of a model split over an instance."""

    instance: Instance
    split: Sequence[int]
    modules: Mapping[int, nn.Module]

    def copies_of(self, tie: Tie) -> list[nn.Parameter]:
        """This device's copies of a tied weight."""
        ranges = stage_ranges(self.split)
        return [
            self.modules[s].get_parameter(f"layers.{place.layer - ranges[place.stage].start}.{place.name}")
            for place in tie.places
            for s in range(place.stage, self.instance.num_stages, self.instance.chain)
            if s in self.modules
        ]

    def find_copies(
        self, ties: Sequence[Tie], group_of: Callable[[Sequence[int]], dist.ProcessGroup | None]
    ) -> list[Copies]:
        """Weights of this device with more than one copy, in an order that all ranks share.

        ``group_of`` gives the group of the ranks of some devices; it is called alike on every rank.
        """
        instance = self.instance
        every = [(tie, tie.devices(instance)) for tie in ties]
        every = [(tie, devices) for tie, devices in every if len(devices) > 1 or instance.replicas > 1]
        tied = {id(p) for tie, _ in every for p in self.copies_of(tie)}
        found: list[Copies] = []
        for stage in range(instance.chain) if instance.replicas > 1 else ():
            group = group_of(homes(instance, stage))
            modules = [m for s, m in self.modules.items() if s % instance.chain == stage]
            for same in zip(*(module.named_parameters() for module in modules), strict=True):
                name, first = same[0]
                if first.requires_grad and id(first) not in tied:
                    found.append(Copies(f"stage {stage}, {name}", [p for _, p in same], group))
        for tie, devices in every:
            group = group_of(devices)
            own = self.copies_of(tie)
            if own and own[0].requires_grad:
                found.append(Copies(f"layer {tie.places[0].label}", own, group))
        return found

    def counted(self, ties: Sequence[Tie], device: int) -> list[nn.Parameter]:
        """Parameters whose gradients this device adds to the norm: of copies, the first holder's alone."""
        stages = self.instance.stages
        elsewhere = {
            id(p) for tie in ties if stages[tie.places[0].stage].device != device for p in self.copies_of(tie)
        }
        first = [module for s, module in self.modules.items() if s < self.instance.chain]
        every = unique(p for module in first for p in module.parameters())
        return [p for p in every if p.requires_grad and id(p) not in elsewhere]


def aliases(ties: Iterable[Tie]) -> dict[str, str]:
    """Further names of a parameter -> its first one."""
    return {place.label: tie.places[0].label for tie in ties for place in tie.places[1:]}
