"""What a series of departures or counter samples says: rate, bursts, order.

Times are nanoseconds or seconds as each function says, lengths are bytes of
the Ethernet frame without FCS, rates are bit/s.  Nothing here touches the
system, so each function is tested with series made by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

NS = 1_000_000_000


@dataclass(frozen=True)
class Excess:
    """The worst window of a series against ``rate * W + burst``.

    `bytes` is the least burst with which every window conforms; the window
    runs from element `first` to element `last`, both included.
    """

    bytes: float
    first: int
    last: int
    window_s: float


#: Bytes that rounding of the float arithmetic may add or take.
_ROUNDING = 1e-3


def _worst(low: NDArray, high: NDArray, time_s: NDArray) -> Excess:
    """The greatest high[j] - low[i] with i <= j; the shortest such window."""
    excess = high - np.minimum.accumulate(low)
    last = int(np.argmax(excess >= excess.max() - _ROUNDING))
    upto = low[: last + 1]
    first = int(np.flatnonzero(upto <= upto.min() + _ROUNDING)[-1])
    return Excess(float(excess.max()), first, last,
                  float(time_s[last] - time_s[first]))


def _increasing(time: NDArray, what: str) -> None:
    if len(time) > 1 and bool(np.any(np.diff(time) < 0)):
        where = int(np.argmax(np.diff(time) < 0))
        raise ValueError(f"{what} go back after element {where}")


def max_excess(time_ns: ArrayLike, length: ArrayLike, rate: float) -> Excess:
    """How far departures exceed a rate, over all windows, in one pass.

    For every pair i <= j the window from packet i to packet j, both counted,
    lasts t[j] - t[i]; its excess is its bytes minus rate * duration.  The
    greatest excess is the burst a GCRA at this rate would have to allow for
    the departures to conform: one packet's length if they are perfectly
    paced.  Linear: the best start for each end is a running minimum.
    """
    t = np.asarray(time_ns, dtype=np.int64)
    size = np.asarray(length, dtype=np.int64)
    if len(t) != len(size):
        raise ValueError("as many times as lengths are needed")
    if len(t) == 0:
        return Excess(0.0, 0, 0, 0.0)
    _increasing(t, "departure times")
    if rate <= 0:
        raise ValueError("rate must be above 0")
    sent = np.cumsum(size)
    allowed = (t - t[0]) * (rate / 8 / NS)
    return _worst(sent - size - allowed, sent - allowed, (t - t[0]) / NS)


def conforms(time_ns: ArrayLike, length: ArrayLike, rate: float,
             burst: float, gap_s: float = 0.0) -> bool:
    """Whether every window W has at most rate * (W + gap_s) + burst bytes.

    `burst` is in bytes; `gap_s` the longest time in which nothing could
    leave (the longest gap between a PMD thread's polls).
    """
    allowed = burst + rate / 8 * gap_s
    return max_excess(time_ns, length, rate).bytes <= allowed + _ROUNDING


def max_deficit(time_ns: ArrayLike, length: ArrayLike, rate: float) -> Excess:
    """How far departures of a backlogged flow fall short of a rate.

    For every window from just after packet i to packet j: rate * duration
    minus the bytes of the packets i+1 to j.
    """
    t = np.asarray(time_ns, dtype=np.int64)
    size = np.asarray(length, dtype=np.int64)
    if len(t) < 2:
        return Excess(0.0, 0, 0, 0.0)
    _increasing(t, "departure times")
    lag = (t - t[0]) * (rate / 8 / NS) - np.cumsum(size)
    return _worst(lag, lag, (t - t[0]) / NS)


def packet_rate(time_ns: ArrayLike, length: ArrayLike,
                start_ns: int, end_ns: int) -> float:
    """bit/s of the packets that left in [start_ns, end_ns)."""
    if end_ns <= start_ns:
        raise ValueError("the window is empty")
    t = np.asarray(time_ns)
    inside = (t >= start_ns) & (t < end_ns)
    return float(np.asarray(length)[inside].sum()) * 8 * NS / (
        end_ns - start_ns)


def paced_rate(time_ns: ArrayLike, length: ArrayLike) -> float:
    """bit/s of a run of departures, exact at its edges.

    The first packet's bytes are not counted: they were due before the first
    interval began.
    """
    t = np.asarray(time_ns)
    if len(t) < 2 or t[-1] <= t[0]:
        raise ValueError("two departures at different times are needed")
    return float(np.asarray(length)[1:].sum()) * 8 * NS / float(t[-1] - t[0])


def binned_rate(time_ns: ArrayLike, length: ArrayLike, bin_ns: int
                ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rate per bin: the bins' middles in seconds after the first packet,
    and bit/s in each whole bin."""
    t = np.asarray(time_ns, dtype=np.int64)
    if len(t) == 0:
        return np.empty(0), np.empty(0)
    which = (t - t[0]) // bin_ns
    whole = int(which[-1])
    sums = np.bincount(which, weights=np.asarray(length, dtype=float))[:whole]
    middles = (np.arange(whole) + 0.5) * bin_ns / NS
    return middles, sums * 8 * NS / bin_ns


@dataclass(frozen=True)
class OrderReport:
    """What sequence numbers say of a set of packets.

    `reordered` counts packets that came after a later one of their flow,
    `repeated` those that came twice in a row, `missing` the numbers skipped.
    `worst` maps the flows with disorder to their count.
    """

    packets: int
    flows: int
    reordered: int
    repeated: int
    missing: int
    worst: dict[int, int]

    @property
    def in_order(self) -> bool:
        """No packet out of order and none twice."""
        return self.reordered == 0 and self.repeated == 0


def check_order(flow: ArrayLike, seq: ArrayLike, modulus: int | None = None
                ) -> OrderReport:
    """Check each flow's sequence numbers, in the order given.

    Flows below 0 (packets without a tag) are ignored.  With `modulus`, the
    source repeats the numbers 0 .. modulus-1; then a step is taken as forward
    if it is less than half the modulus, so fewer than that may be lost in a
    row, and a packet may be late by fewer than that.
    """
    f = np.asarray(flow, dtype=np.int64)
    s = np.asarray(seq, dtype=np.int64)
    tagged = f >= 0
    f, s = f[tagged], s[tagged]
    if len(f) == 0:
        return OrderReport(0, 0, 0, 0, 0, {})
    by_flow = np.argsort(f, kind="stable")
    f, s = f[by_flow], s[by_flow]
    same = f[1:] == f[:-1]
    flows = 1 + int((~same).sum())
    if modulus is None:
        # Against the highest number so far: a packet late by ten is one
        # packet out of order, not ten.
        starts = np.flatnonzero(np.r_[True, ~same])
        top = np.concatenate([np.maximum.accumulate(part)
                              for part in np.split(s, starts[1:])])
        late = same & (s[1:] < top[:-1])
        repeated = same & (s[1:] == top[:-1])
        skipped = np.where(same, np.maximum(top[1:] - top[:-1] - 1, 0), 0)
        # A late packet fills a hole that was counted before.
        missing = max(0, int(skipped.sum()) - int(late.sum()))
    else:
        if modulus < 4:
            raise ValueError("modulus must be at least 4")
        step = (s[1:] - s[:-1]) % modulus
        late = same & (step >= (modulus + 1) // 2)
        repeated = same & (step == 0)
        forward = same & ~late & ~repeated
        missing = max(0, int((step[forward] - 1).sum()) - int(late.sum()))
    ids, counts = np.unique(f[1:][late], return_counts=True)
    order = np.argsort(-counts, kind="stable")[:10]
    return OrderReport(
        packets=len(f), flows=flows, reordered=int(late.sum()),
        repeated=int(repeated.sum()), missing=missing,
        worst={int(ids[i]): int(counts[i]) for i in order},
    )


@dataclass(frozen=True)
class Gaps:
    """Times between consecutive departures, in microseconds."""

    count: int
    mean_us: float
    median_us: float
    p99_us: float
    max_us: float
    back_to_back: int


def gap_statistics(time_ns: ArrayLike, near_ns: int = 1000) -> Gaps:
    """Statistics of the gaps between consecutive departures.

    `back_to_back` is the longest run of packets each less than `near_ns`
    after the one before.
    """
    gaps = np.diff(np.asarray(time_ns, dtype=np.int64))
    if len(gaps) == 0:
        return Gaps(0, 0.0, 0.0, 0.0, 0.0, 0)
    edges = np.flatnonzero(np.r_[True, gaps >= near_ns, True])
    return Gaps(
        count=len(gaps), mean_us=float(gaps.mean()) / 1e3,
        median_us=float(np.median(gaps)) / 1e3,
        p99_us=float(np.percentile(gaps, 99)) / 1e3,
        max_us=float(gaps.max()) / 1e3,
        back_to_back=int(np.diff(edges).max()),
    )


class CounterSeries:
    """Samples of a growing byte counter: times in seconds, totals in bytes."""

    def __init__(self, time_s: Sequence[float] | NDArray,
                 total: Sequence[float] | NDArray):
        self.time = np.asarray(time_s, dtype=float)
        self.total = np.asarray(total, dtype=float)
        if len(self.time) != len(self.total):
            raise ValueError("as many times as totals are needed")
        _increasing(self.time, "sample times")
        _increasing(self.total, "the counter's totals")

    def __len__(self) -> int:
        return len(self.time)

    def at(self, when: float) -> float:
        """The counter at `when`, on the line between its neighbours."""
        return float(np.interp(when, self.time, self.total))

    def rate(self, start: float, end: float) -> float:
        """bit/s between the samples nearest inside `start` and `end`.

        Only samples count: nothing is interpolated, so the figure is exact
        for the window it was taken over.
        """
        first = int(np.searchsorted(self.time, start, "left"))
        last = int(np.searchsorted(self.time, end, "right")) - 1
        if last <= first:
            raise ValueError(
                f"fewer than two samples between {start:g} and {end:g} s")
        return float((self.total[last] - self.total[first]) * 8
                     / (self.time[last] - self.time[first]))

    def rates(self, step: float
              ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The rate in consecutive windows of at least `step` seconds:
        the windows' middles and bit/s."""
        picks = [0]
        for i in range(1, len(self.time)):
            # Half a sample's slack, or jitter would skip every other one.
            if self.time[i] - self.time[picks[-1]] >= step * 0.9:
                picks.append(i)
        t, c = self.time[picks], self.total[picks]
        if len(t) < 2:
            return np.empty(0), np.empty(0)
        return (t[1:] + t[:-1]) / 2, np.diff(c) * 8 / np.diff(t)

    def max_excess(self, rate: float) -> Excess:
        """The worst window between two samples against ``rate * W``.

        What samples can show: a burst shorter than the sampling interval
        appears spread over it.
        """
        if len(self.time) == 0:
            return Excess(0.0, 0, 0, 0.0)
        above = self.total - (self.time - self.time[0]) * rate / 8
        return _worst(above, above, self.time)


@dataclass(frozen=True)
class Settled:
    """When a changed rate was in force, as `settle_time` saw it.

    `delay_s` is the start, counted from the change, of the first window that
    is right and that no wrong one follows.  `resolution_s` is the length of
    the longest window: a wrong stretch that is short against it, so that it
    moves the window's rate by less than the tolerance, cannot be seen.
    """

    delay_s: float
    resolution_s: float
    windows: int


def settle_time(series: CounterSeries, change: float, target: float,
                tolerance: float, window: float, until: float) -> Settled:
    """How long after `change` the rate was `target` for good.

    Looks at every window of about `window` seconds, sliding sample by sample,
    that lies between `change` and `until`, and finds the last that is off by
    more than `tolerance` (a fraction).  Raises `ValueError` if the series
    does not reach far enough, or the last window is itself off.
    """
    t, c = series.time, series.total
    start = int(np.searchsorted(t, change, "left"))
    stop = int(np.searchsorted(t, until, "right"))
    t, c = t[start:stop], c[start:stop]
    ends = np.searchsorted(t, t + window * 0.999, "left")
    valid = ends < len(t)
    first, ends = np.flatnonzero(valid), ends[valid]
    if len(first) == 0:
        raise ValueError("no whole window after the change")
    length = t[ends] - t[first]
    rates = (c[ends] - c[first]) * 8 / length
    off = np.abs(rates / target - 1) > tolerance
    if off[-1]:
        raise ValueError(
            f"not settled by {until:g} s: {rates[-1] / 1e6:.3f} Mbit/s "
            f"instead of {target / 1e6:.3f}")
    last_bad = np.flatnonzero(off)
    when = 0.0 if len(last_bad) == 0 else float(
        t[first[last_bad[-1] + 1]] - change)
    return Settled(max(0.0, when), float(length.max()), len(first))
