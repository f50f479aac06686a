"""What the annealings of orders have in common: the blocks of a critical path, and the move of a task.

A critical path runs back from a task that ends last, each time to what set the task's start: the task before
it on its device, or the one whose result it waited for. Tasks of one device on it without idle time between
them are a block: only what leaves its place there makes the path shorter (Nowicki and Smutnicki 1996).

Places are ``device * width + place``. The loops are written for numba and also run as plain Python.
"""

from __future__ import annotations

from typing import Any


def critical_blocks(waited: Any, codes: Any, width: int, end: int, alike: bool, critical: Any) -> int:
    """Trace a critical path back from place ``end``; how many of its tasks follow another at once.

    Parameters
    ----------
    waited : array
        Per place, that of the task whose result set its start; -1 where its device's last task did, or the
        begin of the step.
    codes : array
        Per place, what kind of task is there.
    alike : bool
        Whether tasks that follow one of their own code are among them: no swap tells these two apart.
    critical : array, shape (tasks, 4)
        Filled with device, place, and first and last place of the block of each.
    """
    number = block = 0
    d, i = end // width, end % width
    last = i
    while i >= 0:
        at = d * width + i
        if waited[at] < 0:
            if i > 0 and (alike or codes[at - 1] != codes[at]):
                critical[number, 0] = d
                critical[number, 1] = i
                critical[number, 3] = last
                number += 1
            i -= 1
            continue
        while block < number:
            critical[block, 2] = i
            block += 1
        d, i = waited[at] // width, waited[at] % width
        last = i
    while block < number:
        critical[block, 2] = 0
        block += 1
    return number


def shift(codes: Any, row: int, source: int, target: int) -> None:
    """Move the code at place ``source`` of a row to ``target``; those between close up."""
    moved = codes[row + source]
    step = 1 if target > source else -1
    k = row + source
    last = row + target
    while k != last:
        codes[k] = codes[k + step]
        k += step
    codes[last] = moved
