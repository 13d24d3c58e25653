"""What departures say: rates, lateness, gaps, bursts, batches.

All functions take a structured array of `ring.RECORD`, in the order of time,
lengths are bytes without FCS, rates bit/s.  Vectorized, so that tens of
millions of departures take seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..analysis import NS, max_excess
from .ring import Records, pick

PERCENTILES = (50.0, 90.0, 99.0, 99.9, 99.99)
#: EDTs further from the departures than this are not EDTs.
PLAUSIBLE_NS = 10 * NS


def between(records: Records, start_ns: int, end_ns: int) -> Records:
    """The departures in [start_ns, end_ns)."""
    first, last = np.searchsorted(records["time_ns"], [start_ns, end_ns])
    return records[first:last]


def by_flow(records: Records) -> dict[int, Records]:
    """Each flow's departures."""
    if len(records) == 0:
        return {}
    grouped = pick(records, np.argsort(records["flow"], kind="stable"))
    starts = np.flatnonzero(np.r_[True, grouped["flow"][1:] != grouped["flow"][:-1]])
    return {int(part["flow"][0]): part for part in np.split(grouped, starts[1:])}


@dataclass(frozen=True)
class FlowRate:
    """How much of a flow left.

    `rate` is exact at its edges: the first packet's bytes, due before the first
    gap began, do not count.  0 if fewer than two bursts had the flow.
    """

    packets: int
    bytes: int
    rate: float


def _paced(part: Records) -> float:
    span = int(part["time_ns"][-1] - part["time_ns"][0])
    total = int(part["bytes"].sum(dtype=np.int64)) - int(part["bytes"][0])
    return total * 8 * NS / span if span > 0 else 0.0


def flow_rates(records: Records) -> dict[int, FlowRate]:
    """Each flow's packets, bytes and rate."""
    return {flow: FlowRate(len(part), int(part["bytes"].sum(dtype=np.int64)), _paced(part))
            for flow, part in by_flow(records).items()}


def window_rates(records: Records, window_s: float
                 ) -> tuple[NDArray[np.float64], NDArray[np.uint32], NDArray[np.float64]]:
    """Rates in consecutive whole windows.

    The windows' middles in s after the first departure, the flows, and bit/s by
    flow and window.
    """
    flows, which = np.unique(records["flow"], return_inverse=True)
    if len(records) == 0:
        return np.empty(0), flows, np.empty((0, 0))
    window_ns = round(window_s * NS)
    if window_ns < 1:
        raise ValueError(f"window_s: {window_s} is not allowed: at least 1e-9")
    window = (records["time_ns"] - records["time_ns"][0]) // window_ns
    whole = int(window[-1])
    inside = window < whole
    totals = np.bincount(which[inside] * whole + window[inside],
                         weights=records["bytes"][inside],
                         minlength=len(flows) * whole).reshape(len(flows), whole)
    return (np.arange(whole) + 0.5) * window_s, flows, totals * 8 * NS / window_ns


@dataclass(frozen=True)
class Lateness:
    """Departure minus EDT, of the packets that have one; in ns.

    `early` left more than the tolerance before their EDTs; `earliest` is the
    least lateness, and negative if any left early.
    """

    packets: int
    early: int
    earliest: float
    mean: float
    latest: float
    percentiles: dict[float, float]


def lateness_ns(records: Records) -> NDArray[np.int64]:
    """Departure minus EDT of each packet that has an EDT."""
    stamped = records[records["edt_ns"] != 0]
    late = stamped["time_ns"] - stamped["edt_ns"]
    if len(late) and abs(float(np.median(late))) > PLAUSIBLE_NS:
        raise ValueError(f"what was read as EDTs is {np.median(late) / NS:.0f} s off: the "
                         "edt_offset is not this application's ('make probe')")
    return late


def lateness(records: Records, tolerance_ns: float = 0.0) -> Lateness:
    """How late packets left; the tolerance is `Recording.clock_error_ns`."""
    late = lateness_ns(records)
    if len(late) == 0:
        return Lateness(0, 0, 0.0, 0.0, 0.0, dict.fromkeys(PERCENTILES, 0.0))
    return Lateness(
        packets=len(late), early=int((late < -tolerance_ns).sum()), earliest=float(late.min()),
        mean=float(late.mean()), latest=float(late.max()),
        percentiles={q: float(v) for q, v in
                     zip(PERCENTILES, np.percentile(late, PERCENTILES), strict=True)})


def ideal_gaps(part: Records, rate: float | None = None) -> NDArray[np.float64]:
    """The gaps in ns that one flow's departures should have.

    Those between their EDTs where all have one (a gap is 0 where an EDT is
    before another's), else each packet's time at `rate`, by default the rate
    that the flow had.
    """
    if len(part) and np.all(part["edt_ns"] != 0) and rate is None:
        return np.maximum(np.diff(part["edt_ns"]), 0).astype(float)
    rate = _paced(part) if rate is None else rate
    if rate <= 0:
        return np.zeros(max(0, len(part) - 1))
    return part["bytes"][1:] * (8 * NS / rate)


def gap_quantiles(gaps_ns: NDArray, points: int = 201) -> NDArray[np.float64]:
    """A CDF: the gaps at `points` equal steps of probability, from 0 to 1."""
    if len(gaps_ns) == 0:
        return np.zeros(points)
    return np.quantile(gaps_ns, np.linspace(0, 1, points))


@dataclass(frozen=True)
class IntraFlowBurst:
    """A flow's worst burst.

    `excess_bytes` is the least burst with which every window has at most rate
    times its length, and `window_s` the worst window; `rate` is what was
    taken for the flow's rate.  `run_packets` left back to back in a single
    transmission, with nothing of other flows between them.
    """

    rate: float
    excess_bytes: float
    window_s: float
    run_packets: int
    run_bytes: int


def _runs(records: Records) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Where runs of one flow in one burst begin, and how long they are."""
    changes = ((records["flow"][1:] != records["flow"][:-1])
               | (records["burst"][1:] != records["burst"][:-1]))
    starts = np.flatnonzero(np.r_[True, changes])
    return starts, np.diff(np.r_[starts, len(records)])


def intra_flow_bursts(records: Records, rates: Mapping[int, float] | None = None
                      ) -> dict[int, IntraFlowBurst]:
    """Each flow's worst burst against its rate (default: what it had)."""
    if len(records) == 0:
        return {}
    starts, lengths = _runs(records)
    sizes = np.add.reduceat(records["bytes"], starts, dtype=np.int64)
    flows, which = np.unique(records["flow"][starts], return_inverse=True)
    most = np.zeros(len(flows), np.int64)
    most_bytes = np.zeros(len(flows), np.int64)
    np.maximum.at(most, which, lengths)
    np.maximum.at(most_bytes, which, sizes)
    bursts = {}
    for i, (flow, part) in enumerate(by_flow(records).items()):
        rate = (rates or {}).get(flow) or _paced(part)
        # A flow of one burst has no rate: all of it is one burst.
        worst = max_excess(part["time_ns"], part["bytes"], rate or 1e-9)
        bursts[flow] = IntraFlowBurst(rate, worst.bytes, worst.window_s,
                                      int(most[i]), int(most_bytes[i]))
    return bursts


@dataclass(frozen=True)
class Batches:
    """The bursts in which the port was given packets.

    `sizes` and `flows` count the bursts by their packets and by the number of
    different flows in them.
    """

    count: int
    mean: float
    sizes: dict[int, int]
    mean_flows: float
    flows: dict[int, int]


def _histogram(values: NDArray) -> dict[int, int]:
    numbers, counts = np.unique(values, return_counts=True)
    return {int(n): int(c) for n, c in zip(numbers, counts, strict=True)}


def batches(records: Records) -> Batches:
    """Sizes of the bursts, and how many flows each had."""
    if len(records) == 0:
        return Batches(0, 0.0, {}, 0.0, {})
    burst = records["burst"].astype(np.int64) - int(records["burst"][0])
    sizes = np.bincount(burst)
    pairs = np.sort(burst << 32 | records["flow"])
    new = np.r_[True, pairs[1:] != pairs[:-1]]
    flows = np.bincount(pairs[new] >> 32)
    return Batches(len(sizes), float(sizes.mean()), _histogram(sizes),
                   float(flows.mean()), _histogram(flows))
