"""Numba where it is installed, plain Python where it is not: the same functions either way."""

from __future__ import annotations

from collections.abc import Callable
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
    if function not in _compiled:
        try:
            from numba import njit
            from numba.extending import register_jitable
        except ImportError:
            return function
        for inner in called:
            register_jitable(inner)
        _compiled[function] = njit(cache=True, nogil=True)(function)
    return cast(Function, _compiled[function])
