"""Options of an instance that some parts do not know: what to call them."""

from __future__ import annotations

from zbsolve.model.instance import Instance


def is_extended(instance: Instance) -> bool:
    """Whether an instance uses an option that the exact models and their bounds do not know."""
    return bool(options_of(instance))


def is_plain(instance: Instance) -> bool:
    """Whether it uses none of them."""
    return not is_extended(instance)


def options_of(instance: Instance) -> tuple[str, ...]:
    """The options in words, for errors."""
    named = (
        (instance.recomputes, "recomputation (t_r)"),
        (instance.has_pairs, "F&B pairs (t_fb)"),
        (instance.replicas > 1, "several replicas"),
    )
    return tuple(name for used, name in named if used)
