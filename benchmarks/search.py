"""The highest rate that is held, found by trying."""

from __future__ import annotations

from collections.abc import Callable

#: How much further each try goes until the answer lies between two of them.
STRIDE = 1.2


def highest(holds: Callable[[float], bool], guess: float, *, precision: float = 0.01,
            lowest: float, ceiling: float) -> float:
    """The highest rate for which `holds`, to `precision` (a part of it).

    Tries `guess` first, so a good one saves tries.  0 if not even `lowest`
    holds; `ceiling` if that does.  It is assumed that what holds at one rate
    holds at all lower ones.
    """
    guess = min(max(guess, lowest), ceiling)
    good, bad = 0.0, float("inf")
    rate = guess
    while True:
        if holds(rate):
            good = rate
            if rate >= ceiling:
                return rate
        else:
            bad = rate
            if rate <= lowest:
                return 0.0
        if bad <= good * (1 + precision):
            return good
        if bad == float("inf"):
            rate = min(good * STRIDE, ceiling)
        elif good == 0.0:
            rate = max(bad / STRIDE, lowest)
        else:
            rate = (good * bad) ** 0.5
