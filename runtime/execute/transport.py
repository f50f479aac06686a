"""Messages between ranks, exactly those of the plan and in its order.

A receive is posted where the plan has its RECV action, a send is started where it has its SEND action,
and nothing waits but the op that needs a message. On gloo, messages pair by (peer, tag) with the tag made
from the plan's message number. NCCL ignores tags and pairs by order, which the plan makes equal on both
sides of every pair. The NCCL path was not run on a GPU.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from zbsolve.runtime.execute.buffers import BufferPool

# Tensors that one message may consist of; tags are message number times this, plus the tensor's place.
MAX_PARTS = 64


class Shape(NamedTuple):
    """Size and type of one tensor of a message."""

    size: tuple[int, ...]
    dtype: torch.dtype


class Incoming:
    """A posted receive."""

    __slots__ = ("_buffers", "_works")

    def __init__(self, works: list[dist.Work], buffers: list[torch.Tensor]) -> None:
        self._works = works
        self._buffers = buffers

    def wait(self) -> list[torch.Tensor]:
        """Block until everything is there (on NCCL: make the current stream wait)."""
        for work in self._works:
            work.wait()
        return self._buffers


class Transport:
    """Sends and receives of one rank over a process group whose ranks are the plan's devices."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.device = device
        # The group's own methods: what dist.isend and dist.irecv call after looking everything up again.
        self._group = dist.distributed_c10d._get_default_group() if group is None else group
        self._tagged = dist.get_backend(self._group) != "nccl"
        self._sends: dict[int, list[tuple[dist.Work, torch.Tensor]]] = {}
        self._pool = BufferPool() if device.type == "cpu" else None

    def receive(self, message: int, peer: int, shapes: Sequence[Shape]) -> Incoming:
        """Post the receive of a message; ``shapes`` were agreed before the first step."""
        tag = message * MAX_PARTS if self._tagged else 0
        works, buffers = [], []
        for size, dtype in shapes:
            if self._pool is None:
                buffer = torch.empty(size, dtype=dtype, device=self.device)
            else:
                buffer = self._pool.empty(size, dtype)
            works.append(self._group.recv([wire_of(buffer)], peer, tag))
            buffers.append(buffer)
            tag += self._tagged
        return Incoming(works, buffers)

    def send(self, message: int, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        """Start sending; the tensors stay alive until :meth:`release` or :meth:`finish`."""
        tag = message * MAX_PARTS if self._tagged else 0
        started = []
        for tensor in tensors:
            solid = solid_of(tensor)
            started.append((self._group.send([wire_of(solid)], peer, tag), solid))
            tag += self._tagged
        self._sends[message] = started

    def release(self, message: int) -> None:
        """Let go of a send whose consumer is known to have run (waiting earlier could block)."""
        for work, _ in self._sends.pop(message, ()):
            work.wait()

    def finish(self) -> None:
        """Wait for all sends. Every peer posts its receives whatever this rank does, so this ends."""
        for message in list(self._sends):
            self.release(message)
        if self._pool is not None:
            self._pool.trim()


def solid_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as its bytes should travel: in order, with a conjugate or negative carried out."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def wire_of(tensor: torch.Tensor) -> torch.Tensor:
    """A solid tensor's memory in a type that every backend knows: bools travel as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def join(store: Store, rank: int, size: int, backend: str, timeout: float, device: torch.device) -> None:
    """Create the default process group. No ``device_id``: pairs of neighbours get their own communicators."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend=backend,
        store=PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
