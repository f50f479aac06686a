"""Options of an instance that some parts do not know: what to call them, and their refusal."""

from __future__ import annotations

from zbsolve.errors import InputError
from zbsolve.model.instance import Instance


def is_extended(instance: Instance) -> bool:
    """Whether an instance uses an option that the exact models and their bounds do not know."""
    return bool(options_of(instance))


def options_of(instance: Instance) -> tuple[str, ...]:
    """The options in words, for errors."""
    named = (
        (instance.recomputes, "recomputation (t_r)"),
        (instance.has_pairs, "F&B pairs (t_fb)"),
        (instance.replicas > 1, "several replicas"),
    )
    return tuple(name for used, name in named if used)


def require_plain(instance: Instance, what: str) -> None:
    """Refuse an instance with such options, naming the first."""
    for option in options_of(instance):
        raise InputError(f"{what} does not model {option}: use --solver auto or heuristic, or leave it out")
