"""Accuracy with 10,000 to 100,000 destinations, a meter each, at 50 Gbit/s in all.

As in the FlowBundler paper's figure 10b: what leaves is sampled every 100 ms.
Also how long it takes to set the meters and flows up.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.lab import Rig, Switch
from benchmarks.results import progress, table
from benchmarks.shaped import BURST_FRAMES, MLTW, rx_limit
from benchmarks.shaped import switch as shaping_switch

TITLE = "Many destinations"

RATE_BPS = 50e9
SAMPLE_S = 0.1
#: The datapath's flows are at most so many (other_config:flow-limit); OVS
#: starts from 10,000 and goes there in steps.
FLOW_LIMIT = 200_000
#: Until the datapath has all flows, in s.
PATIENCE_S = 120


def lookups(switch: Switch) -> dict[str, int]:
    """Packets by how their flow was found."""
    return {key: value for key, value in switch.pmd_stats().items()
            if key in ("emc hits", "smc hits", "megaflow hits", "miss with success upcall",
                       "miss with failed upcall")}


def wait_flows(switch: Switch, n: int) -> float:
    """Wait until the datapath has `n` flows; returns how long that was."""
    began = time.monotonic()
    while time.monotonic() < began + PATIENCE_S:
        first = next(line for line in switch.ctl("dpctl/show", "netdev@ovs-netdev").splitlines()
                     if line.strip().startswith("flows:"))
        if int(first.split(":")[1]) >= n:
            break
        time.sleep(0.1)
    return time.monotonic() - began


def deviations(rig: Rig, samples: int) -> list[float]:
    """The part by which each sample's rate is off."""
    found = []
    last = rig.read()
    due = time.monotonic()
    for _ in range(samples):
        due += SAMPLE_S
        time.sleep(max(0.0, due - time.monotonic()))
        now = rig.read()
        bps = (now.sent - last.sent) / (now.time_s - last.time_s) * rig.mix.mean * 8
        found.append(abs(bps / RATE_BPS - 1))
        last = now
    return found


def measure(n: int, samples: int) -> dict[str, Any]:
    """Set up `n` destinations and sample the rate."""
    cell: dict[str, Any] = {"n": n}
    began = time.monotonic()
    with shaping_switch() as switch:
        switch.ovs.set_config(flow_limit=FLOW_LIMIT)
        with Rig(switch, n) as rig:
            cell["source_s"] = time.monotonic() - began
            rig.ovs.set_config(shaper_rx_limit=rx_limit(n, rig.mix, RATE_BPS))
            rig.ovs.set_qos("out", "flowbundler", **MLTW.options)
            switch.ctl("upcall/set-flow-limit", str(FLOW_LIMIT))
            began = time.monotonic()
            rig.set_meters([RATE_BPS / n] * n, BURST_FRAMES)
            cell["meters_s"] = time.monotonic() - began
            began = time.monotonic()
            rig.forward(metered=True)
            cell["flows_s"] = time.monotonic() - began
            cell["upcalls_s"] = wait_flows(switch, n)
            time.sleep(2)
            before = lookups(switch)
            cell["deviations"] = deviations(rig, samples)
            cell["lookups"] = {key: value - before[key]
                               for key, value in lookups(switch).items()}
            began = time.monotonic()
    cell["removal_s"] = time.monotonic() - began
    return cell


def run(quick: bool) -> dict[str, Any]:
    """Measure all numbers of destinations."""
    cells = []
    for n in (10_000,) if quick else (10_000, 50_000, 100_000):
        progress(f"scale: {n} destinations")
        cells.append(measure(n, 30 if quick else 300))
    return {"rate": RATE_BPS, "sample_s": SAMPLE_S, "cells": cells}


def text(results: dict[str, Any]) -> str:
    """The table."""
    rows = []
    for cell in results["cells"]:
        off = cell["deviations"]
        total = sum(cell["lookups"].values())
        rows.append([cell["n"], f"{np.median(off):.3%}", f"{np.percentile(off, 99):.3%}",
                     f"{max(off):.3%}", f"{cell['lookups']['emc hits'] / total:.1%}",
                     f"{cell['meters_s']:.2f}", f"{cell['flows_s']:.2f}",
                     f"{cell['upcalls_s']:.1f}", f"{cell['removal_s']:.1f}"])
    return (table(["destinations", "median", "p99", "max", "EMC hits", "meters (s)", "flows (s)",
                   "datapath (s)", "removal (s)"], rows)
            + f"\n\n|achieved - target| / target of {results['rate'] / 1e9:.0f} Gbit/s, sampled "
            f"every {results['sample_s'] * 1000:.0f} ms, 1514 B frames; times to set meters, to "
            "add OpenFlow flows, until the datapath has all flows, and to remove all.")


def plot(results: dict[str, Any], path: Path) -> None:
    """The distribution of deviations."""
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for cell in results["cells"]:
        off = np.sort(cell["deviations"]) * 100
        axes.plot(off, np.arange(1, len(off) + 1) / len(off), label=f"{cell['n']} destinations")
    axes.set(xlabel="deviation of a 100 ms sample (%)", ylabel="part of samples")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
