"""Options declared once: an annotated field of a dataclass says name, type, default, bounds and words.

Whoever takes an option reads its field: a command's signature (:mod:`zbsolve.cli.declared`), the parser of a
rank under torchrun (:mod:`zbsolve.runtime.worker`), the check of what was given, and job files. A field
without a declaration is for callers in Python alone. Nothing here needs more than the standard library: the
command line is built from it, and has to start fast.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from types import NoneType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from zbsolve.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What an option's name, type and default do not say.

    Attributes
    ----------
    help, metavar : str
        For the command's help page; without a metavar it shows the type.
    flag : str
        Where it is not the field's name, and in ``short`` its short form.
    least, most, above : float, optional
        Bounds of a number; ``above`` itself is not allowed.
    give : str
        What to give instead of a number that is out of bounds.
    on_command : bool
        Whether the command has it, too, or only the parser of a rank.
    listed_after : str
        Field that it follows on the command's help page, if not the one declared before it.
    rank_flag, rank_help : str
        For the parser of a rank, where it differs. That page has words only where a name needs them.
    """

    help: str = ""
    metavar: str = ""
    flag: str = ""
    short: str = ""
    least: float | None = None
    most: float | None = None
    above: float | None = None
    give: str = ""
    on_command: bool = True
    listed_after: str = ""
    rank_flag: str = ""
    rank_help: str = ""


@dataclass(frozen=True, slots=True)
class Declared:
    """An option as its field declares it. ``kind`` is str, int, float, bool, or tuple for whole numbers."""

    name: str
    kind: type
    default: Any
    choices: tuple[str, ...]
    is_optional: bool
    words: Declaration

    @property
    def flag(self) -> str:
        """As it is written on a command line."""
        return self.words.flag or "--" + self.name.replace("_", "-")

    def complaint(self, value: Any) -> str | None:
        """What to give instead of a value that is not allowed; None where it is."""
        words = self.words
        if value is None and self.is_optional:
            return None
        if self.choices:
            return None if value in self.choices else f"one of {', '.join(self.choices)}"
        if self.kind is tuple:
            return None if value and min(value) >= 1 else "whole numbers from 1"
        if self.kind in (int, float):
            if not math.isfinite(value):
                return words.give or "a finite number"
            if words.least is not None and value < words.least:
                return words.give or f"at least {words.least:g}"
            if words.most is not None and value > words.most:
                return words.give or f"at most {words.most:g}"
            if words.above is not None and value <= words.above:
                return words.give or f"a number above {words.above:g}"
        return None


class Options:
    """Base of a dataclass of options."""

    def check(self, *, as_flags: bool = False) -> None:
        """Raise ``InputError`` for the first option that makes no sense, named as a field or as a flag."""
        for declared in declarations(type(self)).values():
            value = getattr(self, declared.name)
            instead = declared.complaint(value)
            if instead is not None:
                shown = repr(value) if declared.choices else f"{value:g}" if declared.kind is float else value
                said = f"{declared.flag} {shown}" if as_flags else f"{declared.name} is {shown}"
                raise InputError(f"{said}: give {instead}")

    def to_json(self) -> dict[str, Any]:
        """JSON data, with every field."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Options from what :meth:`to_json` of this version wrote."""
        hints = get_type_hints(cls)
        assert data.keys() <= hints.keys()
        return cls(**{name: _of_type(value, hints[name]) for name, value in data.items()})


def _of_type(value: Any, hint: Any) -> Any:
    """A value from JSON: arrays are tuples, objects in them what the tuple holds."""
    if not isinstance(value, list):
        return value
    (array,) = (part for part in (hint, *get_args(hint)) if get_origin(part) is tuple)
    item: type[Any] = get_args(array)[0]
    return tuple(item(**part) if isinstance(part, dict) else part for part in value)


def declarations(options: type[Options]) -> dict[str, Declared]:
    """Every declared option of a dataclass, by name, in the order of its fields."""
    return {
        name: _read(name, get_args(hint)[0], getattr(options, name), words)
        for name, hint in get_type_hints(options, include_extras=True).items()
        for words in getattr(hint, "__metadata__", ())
        if isinstance(words, Declaration)
    }


def _read(name: str, hint: Any, default: Any, words: Declaration) -> Declared:
    parts = [part for part in get_args(hint) if part is not NoneType]
    is_optional = NoneType in get_args(hint)
    bare = parts[0] if is_optional else hint
    choices = get_args(bare) if get_origin(bare) is Literal else ()
    kind = str if choices else get_origin(bare) or bare
    return Declared(name, kind, default, choices, is_optional, words)


def integers(text: str, where: str) -> tuple[int, ...]:
    """Whole numbers from 1, separated by commas; ``where`` (an option) begins the error line."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise InputError(f"{where} {text}: give whole numbers from 1, separated by commas, such as 3,3,2")
    return values
