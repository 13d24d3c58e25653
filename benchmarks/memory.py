"""Memory that a port's shaper takes, by scheduler and granularity.

As in the FlowBundler paper's figure 9: what the process gains by the QoS and by
traffic through it.  Each is measured in a vswitchd of its own.  The traffic
runs for longer than Carousel's horizon of 10 s and Eiffel's two, since memory of
theirs that was never touched is not resident.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.results import progress, table
from benchmarks.rig import Rig
from benchmarks.shaped import (
    BURST_FRAMES,
    MLTW,
    SCHEDULERS,
    Scheduler,
    Shaped,
    rx_limit,
    shaping_switch,
)

TITLE = "Memory of a shaped port"

DESTINATIONS = (16, 10_000)
RATE_BPS = 10e9


def resident(pid: int) -> int:
    """Resident bytes of a process, without huge pages."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"^Rss:\s+(\d+) kB", text, re.M)[1]) * 1024  # type: ignore[index]


def measure(scheduler: Scheduler, n: int, seconds: float) -> dict[str, float]:
    """Bytes that a QoS takes, at once and after traffic."""
    with shaping_switch(peers=scheduler != MLTW) as switch, Rig(switch, n) as rig:
        rig.set_meters([RATE_BPS / n] * n, BURST_FRAMES)
        rig.forward(metered=True)
        rig.ovs.hold_back(rx_limit(rig, RATE_BPS))
        # All flows are in the datapath, and freed memory is given back.
        time.sleep(3)
        before = resident(switch.pid)
        shaped = Shaped(rig, scheduler, 0.2)
        shaped.set_rate(RATE_BPS)
        time.sleep(0.5)
        idle = resident(switch.pid)
        time.sleep(seconds)
        after = resident(switch.pid)
        rate = rig.measure(0.5).pps * rig.mix.mean * 8
    return {"at_once": idle - before, "after": after - before, "bps": rate}


def run(quick: bool) -> dict[str, Any]:
    """Measure all schedulers."""
    seconds = 1.0 if quick else 22.0
    cells = []
    for n in DESTINATIONS[:1] if quick else DESTINATIONS:
        for scheduler in SCHEDULERS:
            if scheduler.batching == "all" or (quick and scheduler.granularity_ns):
                continue  # Batching takes no memory.
            progress(f"memory: {n} destinations, {scheduler.label}")
            name = scheduler.label.split(",")[0]
            cells.append({"scheduler": name, "n": n} | measure(scheduler, n, seconds))
    return {"seconds": seconds, "rate": RATE_BPS, "cells": cells}


def text(results: dict[str, Any]) -> str:
    """The table."""
    rows = [[f"{cell['scheduler']}, {cell['n']} destinations", f"{cell['at_once'] / 2**20:.1f}",
             f"{cell['after'] / 2**20:.1f}", f"{cell['bps'] / 1e9:.2f}"]
            for cell in results["cells"]]
    return (table(["scheduler", "0.5 s (MiB)", f"{results['seconds']:.0f} s later (MiB)",
                   "rate (Gbit/s)"], rows)
            + f"\n\nGain of vswitchd's resident memory by the QoS, {results['rate'] / 1e9:.0f} "
            "Gbit/s of traffic through it. Packets that wait are in the receiving port's "
            "buffers, which are huge pages and not counted.")


def plot(results: dict[str, Any], path: Path) -> None:
    """Bars."""
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    names = [f"{cell['scheduler']}\n{cell['n']}" for cell in results["cells"]]
    axes.bar(names, [max(cell["after"], 4096) / 2**20 for cell in results["cells"]])
    axes.set_yscale("log")
    axes.tick_params(axis="x", labelsize="x-small")
    axes.set(xlabel="scheduler, destinations", ylabel="resident memory gained (MiB)")
    figure.savefig(path, dpi=120)
    plt.close(figure)
