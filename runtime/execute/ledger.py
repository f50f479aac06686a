"""Memory that a device holds, noted after each op of a step, and how far each op rises above it."""

from __future__ import annotations

from typing import NamedTuple


class Noted(NamedTuple):
    """Bytes around one op.

    ``own`` is what its micro-batch holds on the stage after it, ``rise`` how far the op goes above what was
    held before it; ``after`` is all that the device holds after it, ``highest`` the most while it ran.
    """

    own: int
    rise: int
    after: int
    highest: int


class MemoryLedger:
    """Bytes per stage (largest micro-batch) and per op of a device."""

    def __init__(self) -> None:
        # Held after F and after B; risen while F, B, W and BW ran.
        self.after: dict[str, dict[int, int]] = {"F": {}, "B": {}}
        self.rises: dict[str, dict[int, int]] = {op: {} for op in ("F", "B", "W", "BW")}
        self.levels: list[int] = []
        self.highest: list[int] = []

    def note(self, op: str, stage: int, noted: Noted) -> None:
        """Note an op that has ended."""
        for table, value in ((self.after, noted.own), (self.rises, noted.rise)):
            if op in table:
                table[op][stage] = max(value, table[op].get(stage, 0))
        self.levels.append(noted.after)
        self.highest.append(max(noted.highest, noted.after))
