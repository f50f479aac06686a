"""One GPU cut into parts (CUDA green contexts), so that a plan's devices run side by side on it.

Each part has multiprocessors of its own. Memory bandwidth, caches, power and clock are shared, so an op's
time depends on what runs beside it: profile in the same way as you run. It is one process: a message is a
tensor that stays where it is, and one host thread launches everything, which small ops will notice.

torch's own ``torch.cuda.green_contexts`` (2.13) makes one part at a time out of the whole device, the first
so many multiprocessors of it, so that two of its contexts share them. Here the driver splits the device once
into disjoint parts, through the package cuda-bindings, which CUDA builds of torch bring along.

Not run on a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from zbsolve.errors import EnvironmentFailedError
from zbsolve.runtime.execute.lanes import CudaStreams

_OTHERWISE = "run with one process a device instead (leave green_contexts out)"
_NEEDED = (
    "cuDevSmResourceSplitByCount",
    "cuDevResourceGenerateDesc",
    "cuGreenCtxCreate",
    "cuGreenCtxStreamCreate",
)


def one_gpu() -> torch.device:
    """The GPU to cut.

    Raises
    ------
    EnvironmentFailedError
        None is found.
    """
    if not torch.cuda.is_available():
        raise EnvironmentFailedError(f"green contexts need a GPU, and none is found: {_OTHERWISE}")
    return torch.device("cuda", 0)


class GreenStreams(CudaStreams):
    """Lane d issues on part d of a device.

    Attributes
    ----------
    multiprocessors : int
        What each part has.

    Raises
    ------
    EnvironmentFailedError
        Driver, package or device cannot cut it into so many parts.
    """

    def __init__(self, device: torch.device, parts: int) -> None:
        super().__init__(device)
        try:
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError:
            raise EnvironmentFailedError(
                f"green contexts need the package cuda-bindings, which is not installed: {_OTHERWISE}"
            ) from None
        missing = [name for name in _NEEDED if not hasattr(self._driver, name)]
        if missing:
            raise EnvironmentFailedError(f"cuda-bindings has no {missing[0]}: update it, or {_OTHERWISE}")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.current_stream(device).synchronize()  # the device's own context must be there first
        self.multiprocessors, self._parts = self._split(parts)

    def create(self, lane: int) -> Any:
        """A stream of part ``lane``."""
        stream = self._call("cuGreenCtxStreamCreate", self._parts[lane], 1, 0)  # 1: CU_STREAM_NON_BLOCKING
        return torch.cuda.ExternalStream(int(stream), device=self._device)  # type: ignore[no-untyped-call]

    def _split(self, parts: int) -> tuple[int, list[Any]]:
        """Green contexts of equal disjoint parts, as large as the device's granularity allows."""
        driver = self._driver
        handle = self._call("cuDeviceGet", self._device.index)
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = self._call("cuDeviceGetDevResource", handle, kind)
        total = int(whole.sm.smCount)
        for wanted in range(total // parts, 0, -1):
            groups, count, _ = self._call("cuDevSmResourceSplitByCount", parts, whole, 0, wanted)
            if count >= parts:
                break
        else:
            raise EnvironmentFailedError(
                f"the GPU's {total} multiprocessors cannot be cut into {parts} parts: {_OTHERWISE}"
            )
        contexts = []
        for group in groups[:parts]:
            description = self._call("cuDevResourceGenerateDesc", [group], 1)
            flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
            contexts.append(self._call("cuGreenCtxCreate", description, handle, flags))
        return int(groups[0].sm.smCount), contexts

    def _call(self, name: str, *arguments: Any) -> Any:
        """A driver function's results, without its status."""
        status, *results = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            raise EnvironmentFailedError(f"green contexts: {name} failed ({status}): {_OTHERWISE}")
        return results[0] if len(results) == 1 else tuple(results)
