"""Numbers in words, alike in every output."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


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
