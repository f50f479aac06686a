"""A module's buffers: what a forward changes of them, and putting them back."""

from __future__ import annotations

import torch
from torch import nn


class RunningState:
    """The buffers of a module as they were: objects and contents.

    A forward may change a buffer in place, put another tensor in its place, or register a new one.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._held = [
            (part, name, buffer, None if buffer is None else buffer.detach().clone())
            for part in module.modules()
            for name, buffer in part._buffers.items()
        ]

    def changed(self) -> list[str]:
        """Names of the buffers that are not what they were, new ones included."""
        before = {(part, name): content for part, name, _, content in self._held}
        names = []
        for path, part in self._module.named_modules():
            for name, buffer in part._buffers.items():
                content = before.get((part, name))
                if (buffer is None) != (content is None) or not (
                    buffer is None or content is None or _same_bits(buffer, content)
                ):
                    names.append(f"{path}.{name}" if path else name)
        return names

    def restore(self) -> None:
        """Put everything back."""
        for part in self._module.modules():
            part._buffers.clear()
        with torch.no_grad():
            for part, name, buffer, content in self._held:
                part._buffers[name] = buffer
                if buffer is not None and content is not None:
                    if buffer.requires_grad:  # a forward may have tied it to its graph
                        buffer.detach_()
                    if not _same_bits(buffer, content):
                        buffer.copy_(content)


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every buffer under every name that it has (a buffer may be shared by several layers)."""
    return dict(module.named_buffers(remove_duplicate=False))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # A NaN is not equal to itself; where both have one they agree.
    return bool(((one == other) | ((one != one) & (other != other))).all())
