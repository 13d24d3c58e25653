"""When packets leave, against when they should: lateness, gaps, bursts, batches.

Departures and the times that meters gave are recorded by the probe, a callback
at the driver, independent of the shaper.  One to 16 flows of 1 to 25 Gbit/s,
as long as they are at most 80 % of what the switch forwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from fbtest.probe import (
    Probe,
    Recording,
    batches,
    by_flow,
    gap_quantiles,
    intra_flow_bursts,
    lateness,
)

from benchmarks.ceiling import measure as measure_ceiling
from benchmarks.frames import LARGE
from benchmarks.results import progress, table
from benchmarks.rig import NULL, Rig
from benchmarks.shaped import MLTW, SCHEDULERS, Shaped, shaping_switch
from benchmarks.switch import STOCK, Switch

TITLE = "Pacing"

FLOWS = (1, 4, 16)
RATES_BPS = (1e9, 10e9, 25e9)
#: The part of the ceiling that is used at most.
LOAD = 0.8
#: Departures recorded of a case, at most.
RECORDS = 1 << 22


def poll_gap_ns(recording: Recording) -> int:
    """The longest time in which something was due and nothing was sent."""
    records = recording.records
    starts = np.flatnonzero(np.r_[True, np.diff(records["burst"]) != 0])
    times = records["time_ns"][starts]
    due = np.minimum.reduceat(records["edt_ns"], starts)
    return int((times[1:] - np.maximum(times[:-1], due[1:])).max(initial=0))


def judge(recording: Recording, rate_bps: float) -> dict[str, Any]:
    """What is told of a recording of flows of the same rate."""
    records = recording.records
    late = lateness(records, recording.clock_error_ns)
    sent = batches(records)
    flows = by_flow(records)
    burst = max(b.excess_bytes for b in
                intra_flow_bursts(records, dict.fromkeys(flows, rate_bps)).values())
    gap = poll_gap_ns(recording)
    gaps = np.concatenate([np.diff(part["time_ns"]) for part in flows.values()])
    return {"lateness": asdict(late), "batch": sent.mean, "batch_flows": sent.mean_flows,
            "burst_bytes": burst, "poll_gap_ns": gap,
            "burst_allowed": 2 * max(LARGE.sizes) + rate_bps / 8 * gap / 1e9,
            "gap_ns": gap_quantiles(gaps).tolist()}


def cases(ceilings: dict[int, float]) -> Iterator[tuple[int, float]]:
    """Numbers of flows, and their rate."""
    for n, ceiling in ceilings.items():
        for rate in RATES_BPS:
            if n * rate <= LOAD * ceiling:
                yield n, rate


def run(quick: bool) -> dict[str, Any]:
    """Record all cases."""
    seconds = 0.2 if quick else 0.5
    numbers = FLOWS[1:2] if quick else FLOWS
    schedulers = [MLTW] if quick else [s for s in SCHEDULERS if s.granularity_ns in (0, 100)]
    progress("pacing: ceiling")
    with Switch(STOCK, private=True) as switch:
        ceilings = {n: measure_ceiling(switch, n, LARGE, (True,), seconds)[0] * LARGE.mean * 8
                    for n in numbers}
    cells = []
    with shaping_switch(probe=True, peers=not quick) as switch:
        for n in numbers:
            with Rig(switch, n, LARGE, NULL) as rig:
                for scheduler in schedulers:
                    shaped = Shaped(rig, scheduler, seconds)
                    for flows, rate in cases({n: ceilings[n]}):
                        progress(f"pacing: {n} x {rate / 1e9:g} Gbit/s, {scheduler.label}")
                        tried = shaped.attempt(flows * rate)
                        with Probe(switch.ovs, "out", edt=True, records=RECORDS) as probe:
                            time.sleep(seconds)
                        cells.append({"n": n, "rate": rate, "scheduler": scheduler.label,
                                      "achieved": tried.achieved / tried.target}
                                     | judge(probe.recording(), rate))
                        probe.close()
    return {"seconds": seconds, "ceilings": ceilings, "cells": cells}


def text(results: dict[str, Any]) -> str:
    """The table; times in microseconds."""
    rows = []
    for cell in results["cells"]:
        late = cell["lateness"]
        # Keys from JSON are text.
        percentiles = {float(q): value for q, value in late["percentiles"].items()}
        rows.append([
            f"{cell['n']} x {cell['rate'] / 1e9:g} Gbit/s, {cell['scheduler']}",
            f"{cell['achieved']:.2%}", late["early"],
            *(f"{percentiles[q] / 1000:.2f}" for q in (50, 90, 99, 99.9)),
            f"{late['latest'] / 1000:.0f}", f"{cell['poll_gap_ns'] / 1000:.0f}",
            f"{cell['burst_bytes']:.0f}", f"{cell['burst_allowed']:.0f}",
            f"{cell['batch']:.1f}", f"{cell['batch_flows']:.1f}"])
    return (table(["flows", "achieved", "early", "p50", "p90", "p99", "p99.9", "max", "poll gap",
                   "burst", "explained", "batch", "flows in it"], rows)
            + f"\n\nLateness and the longest poll gap in us; a flow's worst burst in bytes, and "
            "what 2 MTU and the rate times that gap explain; means of packets and of flows in a "
            f"transmission. {results['seconds']} s each, 1514 B frames, net_null.")


def plot(results: dict[str, Any], path: Path) -> None:
    """Gaps between packets of a flow, for the highest rate: as software-NIC paper's figure 9."""
    fastest = max(cell["rate"] for cell in results["cells"])
    cells = [cell for cell in results["cells"] if cell["rate"] == fastest]
    numbers = sorted({cell["n"] for cell in cells})
    figure, panels = plt.subplots(1, len(numbers), figsize=(1 + 4 * len(numbers), 3.4),
                                  layout="constrained", squeeze=False, sharey=True)
    ideal = max(LARGE.sizes) * 8e9 / fastest
    for axes, n in zip(panels[0], numbers, strict=True):
        for cell in (cell for cell in cells if cell["n"] == n):
            gaps = cell["gap_ns"]
            axes.plot(gaps, np.linspace(0, 1, len(gaps)), label=cell["scheduler"])
        axes.axvline(ideal, color="black", ls=":", label="ideal")
        axes.set_xlim(0, 6 * ideal)
        axes.set(title=f"{n} x {fastest / 1e9:g} Gbit/s", xlabel="gap of a flow's packets (ns)")
    panels[0][0].set_ylabel("part of gaps")
    panels[0][-1].legend(fontsize="x-small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
