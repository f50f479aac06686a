"""What an op needs only while it runs: how far memory rises above the level before it.

On CUDA the allocator tells (its peak since the op began). On CPU nothing does, so every tensor that any torch
op returns, in a forward or in a backward, is followed from then until its memory is freed. Not seen on CPU:
what a kernel allocates for itself and frees before it returns (workspaces of convolutions and attention,
packed copies of a matrix), and memory that other libraries take.

Following tensors is slow: it is for the one untimed step whose memory is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zbsolve.runtime.values import tensors_in

T = TypeVar("T")


class Watch(Protocol):
    """Follows the memory of one device, op by op."""

    rise: int
    """Most bytes above the level at the beginning of the op watched last."""

    def op(self, received: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        """Watch an op that takes ``received`` over."""
        ...

    def existed(self, address: int) -> bool:
        """Whether a storage that the op took or left was there before it began."""
        ...


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The CPU's watch: tensors alive among those that watched ops have returned or taken over."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rise = 0
        self._live = self._peak = 0
        self._fresh: set[int] = set()
        self._known: dict[int, ref[Any]] = {}

    @property
    def alive(self) -> int:
        """Bytes of everything followed that is still there."""
        return self._live

    def op(self, received: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        """As :class:`Watch`."""
        return self._op(received)

    @contextmanager
    def _op(self, received: Iterable[torch.Tensor]) -> Iterator[None]:
        for tensor in received:
            self._follow(tensor)
        self._fresh = set()
        base = self._peak = self._live
        with self:
            yield
        self.rise = self._peak - base

    def existed(self, address: int) -> bool:
        """As :class:`Watch`."""
        return address not in self._fresh

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # What comes out as a view or changed in place was there before.
        given = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if tensor.untyped_storage().data_ptr() not in given:
                self._follow(tensor)
        return result

    def _follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or address in self._known:
            return

        def gone(_: object) -> None:
            self._live -= size
            del self._known[address]

        self._known[address] = ref(storage, gone)
        self._fresh.add(address)
        self._live += size
        self._peak = max(self._peak, self._live)


class AllocatorPeak:
    """The watch of a CUDA device. Not run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.rise = 0
        self._device = device
        self._received: set[int] = set()

    def op(self, received: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        """As :class:`Watch`."""
        return self._op(received)

    @contextmanager
    def _op(self, received: Iterable[torch.Tensor]) -> Iterator[None]:
        self._received = {t.untyped_storage().data_ptr() for t in received}
        base = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        self.rise = torch.cuda.max_memory_allocated(self._device) - base

    def existed(self, address: int) -> bool:
        """As :class:`Watch`."""
        return address in self._received


def watch_of(device: torch.device) -> Watch:
    """The watch of a device."""
    return AllocatorPeak(device) if device.type == "cuda" else LiveTensors()


class HoldsStorages(Protocol):
    """A stage, as far as it is asked here."""

    def held_storages(self, microbatch: int) -> dict[int, int]:
        """Address and bytes of every storage that a micro-batch holds."""
        ...

    def storages(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """Address and bytes of tensors' storages, parameters and buffers left out."""
        ...


def measure_rise(
    stage: HoldsStorages, microbatch: int, received: list[torch.Tensor], watch: Watch, op: Callable[[], T]
) -> tuple[T, int]:
    """Run an op; its result, and how far memory rose above what was held before it.

    What the op takes over (a received input or gradient, targets that the loss keeps) counts from the op's
    beginning, although it was allocated earlier: until then it is no stage's.
    """
    before = stage.held_storages(microbatch)
    involved = stage.storages(received)
    with watch.op(received):
        result = op()
    involved |= stage.held_storages(microbatch)
    return result, watch.rise + _taken(involved, before, watch)


def _taken(involved: Mapping[int, int], before: Mapping[int, int], watch: Watch) -> int:
    return sum(size for address, size in involved.items() if address not in before and watch.existed(address))
