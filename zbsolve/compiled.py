"""Numba where it is installed, plain Python where it is not: the same functions either way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


# Loading machine code from the disk takes 50 ms: once a process, not once a search.
_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def compile_loop(function: Function, *called: Callable[..., Any]) -> Function:
    """The machine-code version of a function over numpy arrays and scalars, or the function itself.

    ``called`` are the functions that it calls. The code is kept on disk beside the module, where that can
    be written: it is compiled once a machine, not once a process. Called when a long search begins, not at
    import: numba takes half a second to load.
    """
    try:
        return cast(Function, _dispatcher(function, called))
    except ImportError:
        return function


def is_ready(function: Callable[..., Any], *called: Callable[..., Any]) -> bool:
    """Whether :func:`compile_loop` of the same finds its machine code made, which takes seconds otherwise."""
    try:
        dispatcher = _dispatcher(function, called)
    except ImportError:
        return False
    if dispatcher.signatures:
        return True
    source = Path(function.__code__.co_filename)
    kept = Path(dispatcher.stats.cache_path).glob(f"{source.stem}.{function.__qualname__}-*.nbi")
    return any(index.stat().st_mtime >= source.stat().st_mtime for index in kept)


def _dispatcher(function: Callable[..., Any], called: tuple[Callable[..., Any], ...]) -> Any:
    if function not in _compiled:
        from numba import njit
        from numba.extending import register_jitable

        for inner in called:
            register_jitable(inner)
        _compiled[function] = njit(cache=True, nogil=True)(function)
    return _compiled[function]
