"""A command's parameters from declared options: its signature is built from their fields."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from zbsolve.options import Declared, Options, declarations, integers

Command = Callable[..., None]


def with_options(options: type[Options]) -> Callable[[Command], Command]:
    """In place of a function's parameter ``options``, one for each declared option that commands have.

    The function is given the options made of them, checked.
    """
    taken = {name: one for name, one in declarations(options).items() if one.words.on_command}

    def extend(function: Command) -> Command:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            made = options(**{name: _value(one, given.pop(name)) for name, one in taken.items()})
            made.check(as_flags=True)
            function(options=made, **given)

        own = inspect.signature(function, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            parameters += map(_parameter, _as_listed(taken)) if parameter.name == "options" else [parameter]
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return extend


def _as_listed(taken: dict[str, Declared]) -> list[Declared]:
    """In the order of the help page."""
    order = [name for name, one in taken.items() if not one.words.listed_after]
    for name, one in taken.items():
        if one.words.listed_after:
            order.insert(order.index(one.words.listed_after) + 1, name)
    return [taken[name] for name in order]


def _value(declared: Declared, given: Any) -> Any:
    if declared.kind is tuple:
        return None if given is None else integers(given, declared.flag)
    return given.value if isinstance(given, StrEnum) else given


def _parameter(declared: Declared) -> inspect.Parameter:
    words, kind, default = declared.words, declared.kind, declared.default
    if declared.choices:
        members = {choice.replace("-", "_"): choice for choice in declared.choices}
        enumeration = StrEnum(declared.name, members)  # type: ignore[misc]
        kind, default = enumeration, enumeration(default)
    elif kind is tuple:
        kind = str
    # A switch that is off has one name; to one that is on typer adds a "--no-".
    named = bool(words.flag) or (kind is bool and not default)
    option: Any = typer.Option(
        *((declared.flag,) if named else ()),
        *((words.short,) if words.short else ()),
        help=words.help,
        metavar=words.metavar or None,
        show_default=default != "",
        min=words.least,
        max=words.most,
    )
    annotation = Annotated[kind | None if declared.is_optional else kind, option]  # type: ignore[valid-type]
    return inspect.Parameter(
        declared.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
    )
