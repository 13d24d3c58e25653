"""The highest rate that is held, found by trying."""

from __future__ import annotations

from collections.abc import Callable

#: How much further each try goes until the answer lies between two of them.
STRIDE = 1.2


def highest(achieved: Callable[[float], float], guess: float, *, tolerance: float,
            precision: float, lowest: float, ceiling: float) -> float:
    """The highest rate of which `achieved` is at most `tolerance` (a part) off.

    To `precision`, also a part.  Tries `guess` first, so a good one saves tries.
    0 if not even `lowest` is held; `ceiling` if that is.  It is assumed that what
    holds at one rate holds at all lower ones.
    """
    rate = min(max(guess, lowest), ceiling)
    good, bad = 0.0, float("inf")
    while True:
        got = achieved(rate)
        if abs(got / rate - 1) <= tolerance:
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
            # What was achieved of too much is often close to the answer.
            rate = max(min(bad / STRIDE, got), lowest)
        else:
            rate = min((good * bad) ** 0.5, good * STRIDE)
