"""What the walk before step 1 finds out about a stage's layers, by running them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class StageTraits:
    """How a stage's layers behave beyond what they compute.

    Attributes
    ----------
    changes_inputs : bool
        They change what they get in place: give them copies.
    kept_outputs : tuple of int
        Outputs whose memory they keep for later calls (a work buffer, a parameter): hand on copies.
    draws_host : bool
        They draw from Python's or numpy's generator: seed those, too.
    changes_buffers : tuple of str
        Buffers that a forward changes: forwards must come in the micro-batches' order.
    once : str
        Why a part of their backward cannot run a second time, which the generic split needs; empty if it can.
    """

    changes_inputs: bool = False
    kept_outputs: tuple[int, ...] = ()
    draws_host: bool = False
    changes_buffers: tuple[str, ...] = ()
    once: str = ""

    def __or__(self, other: StageTraits) -> StageTraits:
        """What either of two walks showed."""
        return StageTraits(
            self.changes_inputs or other.changes_inputs,
            tuple(sorted({*self.kept_outputs, *other.kept_outputs})),
            self.draws_host or other.draws_host,
            tuple(dict.fromkeys((*self.changes_buffers, *other.changes_buffers))),
            self.once or other.once,
        )

    def to_text(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> StageTraits:
        """From the store."""
        data = json.loads(text)
        for name in ("kept_outputs", "changes_buffers"):
            data[name] = tuple(data[name])
        return cls(**data)
