"""Memory that a device holds, noted after each op of a step."""

from __future__ import annotations


class MemoryLedger:
    """Bytes held per stage after F and after B (largest micro-batch), and by the device after each op."""

    def __init__(self) -> None:
        self.after: dict[str, dict[int, int]] = {"F": {}, "B": {}}
        self.levels: list[int] = []
        self.peak = 0

    def note(self, op: str, stage: int, own: int, total: int) -> None:
        """After an op: what its micro-batch holds on the stage, and all that the device holds."""
        if op in self.after:
            self.after[op][stage] = max(own, self.after[op].get(stage, 0))
        self.levels.append(total)
        self.peak = max(self.peak, total)
