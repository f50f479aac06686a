"""The machines: devices with their speed and memory, and the links between them.

A cluster file says what a layer profile cannot: how much slower or faster than the profiled device each
device is, how much memory it has, and what a hop costs between each pair. A hop is a latency plus the size
of what is sent over the link's bandwidth. Links that several messages share at once are not modelled.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator

from zbsolve.files.documents import raise_first, read_document
from zbsolve.files.models import FileModel, JsonTuple
from zbsolve.model.instance import NonNegative

SCHEMA = "zbsolve.cluster/1"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DeviceGroup(FileModel):
    """``count`` equal devices of one node.

    Attributes
    ----------
    speed : float
        Relative to the device that was profiled: times are divided by it.
    memory : float, optional
        What each of them may use, in ``memory_unit``; none: no limit.
    """

    name: str = "device"
    count: Annotated[int, Field(ge=1, le=4096)] = 1
    speed: Positive = 1.0
    memory: NonNegative | None = None
    node: Annotated[int, Field(ge=0)] = 0


class Link(FileModel):
    """A hop takes ``latency + size / bandwidth`` (``time_unit``; ``memory_unit`` per ``time_unit``)."""

    latency: NonNegative = 0.0
    bandwidth: Positive | None = None

    def hop(self, size: float) -> float:
        """Time to hand ``size`` over."""
        return self.latency + (0.0 if self.bandwidth is None else size / self.bandwidth)


class Host(FileModel):
    """Where activations can be offloaded to.

    ``bandwidth`` holds per device and direction. ``overlap`` is the share of a pass's own time behind
    which its transfer hides (0: the device waits for all of it).
    """

    bandwidth: Positive
    overlap: Annotated[float, Field(ge=0, le=1)] = 0.0


class Device(NamedTuple):
    """One device of a cluster. ``memory`` is infinite when there is no limit."""

    name: str
    speed: float
    memory: float
    node: int


class Cluster(FileModel):
    """Devices and links. ``latency`` (device by device, symmetric) replaces the links' own latencies."""

    schema_: Literal["zbsolve.cluster/1"] = Field(default="zbsolve.cluster/1", alias="schema")
    name: str = "cluster"
    time_unit: str = "ms"
    memory_unit: str = "MiB"
    devices: Annotated[JsonTuple[DeviceGroup], Field(min_length=1)]
    same_node: Link = Link()
    other_node: Link | None = None
    latency: JsonTuple[JsonTuple[NonNegative]] | None = None
    host: Host | None = None

    @model_validator(mode="after")
    def _check_latency(self) -> Cluster:
        rows, n = self.latency, sum(group.count for group in self.devices)
        if rows is None:
            return self
        if len(rows) != n or any(len(row) != n for row in rows):
            raise ValueError(f"latency is no {n} by {n} table: give one row and one entry for each device")
        for i in range(n):
            for j in range(i):
                if rows[i][j] != rows[j][i]:
                    raise ValueError(
                        f"latency[{i}][{j}] is {rows[i][j]:g} and latency[{j}][{i}] is {rows[j][i]:g}: "
                        "a hop takes equally long both ways, give one figure"
                    )
        return self

    @cached_property
    def each(self) -> tuple[Device, ...]:
        """Every device, in the order of the file."""
        return tuple(
            Device(
                group.name if group.count == 1 else f"{group.name} #{number}",
                group.speed,
                float("inf") if group.memory is None else group.memory,
                group.node,
            )
            for group in self.devices
            for number in range(group.count)
        )

    @property
    def num_devices(self) -> int:
        return len(self.each)

    def link(self, a: int, b: int) -> Link:
        """The link between two devices."""
        same = self.each[a].node == self.each[b].node or self.other_node is None
        link = self.same_node if same else self.other_node
        assert link is not None
        if self.latency is None:
            return link
        return Link(latency=self.latency[a][b], bandwidth=link.bandwidth)

    def part(self, first: int, count: int) -> Cluster:
        """The cluster of ``count`` devices from the ``first`` on, in the order of the file."""
        chosen = range(first, first + count)
        groups = tuple(
            DeviceGroup(
                name=device.name.partition(" #")[0],
                speed=device.speed,
                memory=None if device.memory == float("inf") else device.memory,
                node=device.node,
            )
            for device in self.each[first : first + count]
        )
        rows = self.latency and tuple(tuple(self.latency[a][b] for b in chosen) for a in chosen)
        return _rebuilt(self, devices=groups, latency=rows)

    def with_memory(self, factor: float) -> Cluster:
        """A copy whose devices have ``factor`` times the memory."""
        groups = tuple(
            group if group.memory is None else group.model_copy(update={"memory": group.memory * factor})
            for group in self.devices
        )
        return _rebuilt(self, devices=groups)

    def with_links(self, factor: float) -> Cluster:
        """A copy whose hops take ``factor`` times as long."""

        def slower(link: Link) -> Link:
            bandwidth = None if link.bandwidth is None else link.bandwidth / factor
            return Link(latency=link.latency * factor, bandwidth=bandwidth)

        other = None if self.other_node is None else slower(self.other_node)
        rows = self.latency and tuple(tuple(value * factor for value in row) for row in self.latency)
        return _rebuilt(self, same_node=slower(self.same_node), other_node=other, latency=rows)


def _rebuilt(cluster: Cluster, **changes: Any) -> Cluster:
    fields = {name: getattr(cluster, name) for name in Cluster.model_fields if name != "schema_"}
    return Cluster(**{**fields, **changes})


class DeviceClass(NamedTuple):
    """Devices that can be exchanged for each other without changing anything."""

    members: tuple[int, ...]
    speed: float
    memory: float


def device_classes(cluster: Cluster) -> tuple[DeviceClass, ...]:
    """The fewest classes such that any two devices of one class can change places.

    Two devices can when they are equally fast and large and every third device is linked alike to both.
    That is an equivalence: exchanging a and b, then b and c, then a and b again exchanges a and c.
    """
    n, each = cluster.num_devices, cluster.each
    links = [[cluster.link(a, b) for b in range(n)] for a in range(n)]
    classes: list[list[int]] = []
    for d in range(n):
        for members in classes:
            other = members[0]
            alike = each[d].speed == each[other].speed and each[d].memory == each[other].memory
            if alike and all(links[d][k] == links[other][k] for k in range(n) if k not in (d, other)):
                members.append(d)
                break
        else:
            classes.append([d])
    return tuple(
        DeviceClass(tuple(members), each[members[0]].speed, each[members[0]].memory) for members in classes
    )


def equal_cluster(
    p: int, *, memory: float | None = None, hop: float = 0.0, time_unit: str = "ms", memory_unit: str = "MiB"
) -> Cluster:
    """``p`` devices like the profiled one, in one node."""
    return Cluster(
        name=f"{p} equal devices",
        time_unit=time_unit,
        memory_unit=memory_unit,
        devices=(DeviceGroup(count=p, memory=memory),),
        same_node=Link(latency=hop),
    )


def load_cluster(path: str | Path) -> Cluster:
    """Read and validate a cluster file."""
    data = read_document(path, SCHEMA)
    try:
        return Cluster.model_validate(data)
    except ValidationError as error:
        raise_first(error, str(path))
