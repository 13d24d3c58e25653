"""Medians, spreads and confidence intervals of what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median


def spread(values: Sequence[float]) -> float:
    """Half of the distance between the quartiles, as a part of the median."""
    if len(values) < 2:
        return 0.0
    ordered = sorted(values)
    low, high = (quantile(ordered, q) for q in (0.25, 0.75))
    return (high - low) / 2 / median(ordered)


def quantile(ordered: Sequence[float], q: float) -> float:
    """The q-quantile of sorted values, interpolated."""
    at = q * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def median_interval(values: Sequence[float], confidence: float = 0.95
                    ) -> tuple[float, float, float]:
    """A confidence interval of the median, from the sign test, and its confidence.

    The interval between the k-th smallest and the k-th largest of n values
    holds the median unless fewer than k of them fell to one side of it, each of
    which has a chance of a half: nothing is assumed of how values are
    distributed.  With few values the confidence asked for may be out of reach;
    the widest interval and its confidence are given then.
    """
    ordered, n = sorted(values), len(values)

    def coverage(k: int) -> float:
        return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2 ** n

    k = max((k for k in range(1, n // 2 + 1) if coverage(k) >= confidence), default=1)
    return ordered[k - 1], ordered[n - k], max(0.0, coverage(k))
