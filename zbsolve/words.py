"""Numbers in words, alike in every output, and names as people write them."""

from __future__ import annotations

import math
from collections.abc import Collection

from zbsolve.errors import InputError

# How like a name has to be to be meant (difflib's ratio), and how many are offered.
_LIKENESS = 0.5
_MOST_OFFERED = 3


def time_text(value: float) -> str:
    """A time or memory amount with digits enough to compare: three decimals, of small ones six digits."""
    if abs(value) >= 1e6:
        return f"{value:,.0f}"
    if abs(value) < 1:
        return f"{value:.6g}"
    return f"{value:,.3f}".rstrip("0").rstrip(".")


def percent(share: float) -> str:
    """A share in per cent to two decimals, to more where these would show a zero that it is not.

    What float64 rounding leaves counts as zero.
    """
    value = 100 * share
    if abs(value) < 1e-7:
        return "0.00%"
    decimals = 2 if abs(value) >= 0.005 else -math.floor(math.log10(abs(value)))
    return f"{value:.{decimals}f}%"


def spelled(name: str, known: Collection[str]) -> str | None:
    """A known name as it is spelled, for one written in any case; None where it is none."""
    if name in known:
        return name
    folded = name.casefold()
    # A collection may hold names that it does not list, such as ``interleaved:4``.
    return next((k for k in known if k.casefold() == folded), folded if folded in known else None)


def alike(name: str, known: Collection[str]) -> str:
    """The known names that may have been meant, joined by "or"; empty where none is like it."""
    from difflib import get_close_matches

    by_folded = {k.casefold(): k for k in known}
    close = get_close_matches(name.casefold(), by_folded, n=_MOST_OFFERED, cutoff=_LIKENESS)
    return " or ".join(by_folded[found] for found in close)


def pick(name: str, known: Collection[str], what: str) -> str:
    """The known name that is meant, in any case.

    Raises
    ------
    InputError
        There is none: says which there are, and which of them are like it; ``what`` is what they name.
    """
    found = spelled(name, known)
    if found is None:
        close = alike(name, known)
        hint = f" (did you mean {close}?)" if close else ""
        raise InputError(f"{what} {name!r} is not known: use one of {', '.join(known)}{hint}")
    return found
