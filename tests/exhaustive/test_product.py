"""Random tiny instances of every mix: nothing that the product says of them is false.

`ZBSOLVE_EXHAUSTIVE` sets how many instances of each mix the slow run looks at, and from which number on:
``5000`` or ``5000:20000``.
"""

from __future__ import annotations

import json
import os

import pytest

from tests.exhaustive.cases import MIXES, case, shrunk
from tests.exhaustive.claims import CLAIMS, Claim, false_claims

SAMPLE = 20
COUNT, _, FIRST = os.environ.get("ZBSOLVE_EXHAUSTIVE", "5000").partition(":")


def look_at(mix: str, numbers: range) -> None:
    """Fail at the first false claim, with the smallest instance that it is made of."""
    for number in numbers:
        data = case(mix, number)
        for claim, every in CLAIMS:
            found = false_claims(claim, data) if number % every == 0 else []
            if found:
                pytest.fail(f"{mix} {number}: {found[0]}\n{_smallest(claim, data, found[0])}")


def _smallest(claim: Claim, data: dict[str, object], message: str) -> str:
    """Shrunk while something is said wrongly in the same first words."""
    words = message.split()[:2]
    small = shrunk(data, lambda other: any(m.split()[:2] == words for m in false_claims(claim, other)))
    return f"smallest: {false_claims(claim, small)[0]}\n{json.dumps(small)}"


@pytest.mark.parametrize("mix", MIXES)
def test_sample(mix: str) -> None:
    """The first instances of every mix."""
    look_at(mix, range(SAMPLE))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("mix", MIXES)
def test_thousands(mix: str) -> None:
    """As many of every mix as the environment asks for."""
    look_at(mix, range(int(FIRST or 0), int(FIRST or 0) + int(COUNT)))
