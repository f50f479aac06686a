"""Memory for received tensors, used again as soon as nothing refers to it.

Whether a stage still needs an input is known to nobody but the tensors themselves: autograd saves it, a
layer returns a view of it, an array shares it. All of them share the tensor's storage, and a storage gives
its memory back when the last of them is gone. So a block goes back into the pool at the end of its storage's
life, which no user of the tensor can outlive, and is never taken back from one.

Small tensors come from torch's allocator: glibc's own pool is a microsecond faster than this one. Large ones
(from 32 MiB on under glibc's defaults, which a run under torchrun has) would be mapped and faulted in page by
page each time: 300 times slower than a block from here in a trial. On CUDA torch's allocator is the pool.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

# Bytes. Between this and 32 MiB both ways are alike.
POOLED_FROM = 2**20


class BufferPool:
    """Uninitialised CPU tensors whose memory comes back by itself."""

    def __init__(self, pooled_from: int = POOLED_FROM) -> None:
        self._pooled_from = pooled_from
        self._free: dict[int, list[torch.Tensor]] = {}
        self._asked: set[int] = set()

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor; its content is whatever was there."""
        count = 1
        for length in size:
            count *= length
        needed = count * dtype.itemsize
        if needed < self._pooled_from:
            return torch.empty(size, dtype=dtype)
        self._asked.add(needed)
        free = self._free.setdefault(needed, [])
        block = free.pop() if free else torch.empty(needed, dtype=torch.uint8)
        # The new storage holds this array, and nothing else does.
        lease = block.numpy()
        flat = torch.frombuffer(lease, dtype=dtype)
        weakref.finalize(lease, free.append, block).atexit = False
        # Not a view of ``flat``: layers may change an input in place.
        return torch.empty(0, dtype=dtype).set_(flat.untyped_storage()).resize_(tuple(size))

    def trim(self) -> None:
        """Give up blocks of sizes that nobody has asked for since the last call."""
        for size in self._free.keys() - self._asked:
            del self._free[size]
        self._asked.clear()

    @property
    def idle_bytes(self) -> int:
        """Memory of blocks that wait for use."""
        return sum(size * len(blocks) for size, blocks in self._free.items())
