"""Accuracy with 10,000 to 100,000 destinations, a meter each.

As in the FlowBundler paper's figure 10b: 50 Gbit/s in all, sampled every 100 ms.
Where unpatched OVS with as many flows and meters does not forward that much, it
is 60 % of what it does, or 85 % with jumbo frames.  Also how long it takes to set
the meters and flows up.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from fbtest.probe import Probe, flow_rates

from benchmarks.frames import JUMBO, LARGE, Mix
from benchmarks.results import progress, table
from benchmarks.rig import NO_LIMIT, Rig
from benchmarks.shaped import rx_limit, shaping_switch
from benchmarks.switch import STOCK, Switch

TITLE = "Many destinations"

RATE_BPS = 50e9
#: The part of the ceiling that is used at most, by frames.
LOAD = {LARGE: 0.6, JUMBO: 0.85}
#: The part of the target at which it begins, and for how many frames of each.
SPREAD, SPREAD_FRAMES = 0.995, 50
SAMPLE_S = 0.1
#: A sample that takes longer is taken again: 0.1 % of the time between them.
MAX_READ_S = SAMPLE_S / 1000
#: For 262,144 buffers of jumbo frames.
MEMORY_MB = 6144
#: The datapath's flows are at most so many (other_config:flow-limit); OVS
#: starts from 10,000 and goes there in steps.
FLOW_LIMIT = 200_000
#: Departures recorded, at most.
RECORDS = 1 << 24
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
            return time.monotonic() - began
        time.sleep(0.1)
    raise TimeoutError(f"the datapath has not {n} flows after {PATIENCE_S} s")


def set_up(rig: Rig, rates_bps: list[float]) -> dict[str, float]:
    """Set meters and flows; returns how long that took, in s."""
    times = {}
    rig.switch.ctl("upcall/set-flow-limit", str(FLOW_LIMIT))
    began = time.monotonic()
    rig.set_meters(rates_bps)
    times["meters_s"] = time.monotonic() - began
    began = time.monotonic()
    rig.forward(metered=True)
    times["flows_s"] = time.monotonic() - began
    times["datapath_s"] = wait_flows(rig.switch, rig.n)
    return times


def ceiling(n: int, mix: Mix) -> float:
    """What unpatched OVS forwards with a meter for each that never drops, in bit/s."""
    with Switch(STOCK, private=True, memory_mb=MEMORY_MB,
                config={"flow-limit": FLOW_LIMIT}) as switch, Rig(switch, n, mix) as rig:
        set_up(rig, [NO_LIMIT] * n)
        time.sleep(2)
        return rig.measure(1.0).pps * mix.mean * 8


def deviations(rig: Rig, samples: int, target: float) -> list[float]:
    """The part by which each sample's rate is off.

    Read from the probe's memory: vswitchd, which takes a core for milliseconds at
    times to look after so many flows, would answer at a time that is not known so
    precisely.
    """
    found = []
    with Probe(rig.ovs, "out", records=0) as probe:
        packets = probe.packet_counter()

        def read() -> tuple[float, int]:
            while True:
                before = time.monotonic()
                sent = packets()
                after = time.monotonic()
                if after - before < MAX_READ_S:
                    return (before + after) / 2, sent

        last_s, last = read()
        due = time.monotonic()
        for _ in range(samples):
            due += SAMPLE_S
            time.sleep(max(0.0, due - time.monotonic()))
            now_s, now = read()
            bps = (now - last) / (now_s - last_s) * rig.mix.mean * 8
            found.append(abs(bps / target - 1))
            last_s, last = now_s, now
    probe.close()
    return found


def flow_deviations(rig: Rig, target: float, seconds: float) -> dict[str, float]:
    """The part by which flows' own rates are off, over `seconds`."""
    with Probe(rig.ovs, "out", records=RECORDS) as probe:
        time.sleep(seconds)
    recording = probe.recording()
    probe.close()
    off = [abs(flow.rate * rig.n / target - 1)
           for flow in flow_rates(recording.records).values() if flow.packets > 2]
    return {"flows": len(off), "median": float(np.median(off)),
            "p99": float(np.percentile(off, 99)), "lost": recording.counters.lost}


def measure(n: int, mix: Mix, samples: int, seconds: float) -> dict[str, Any]:
    """Set up `n` destinations, sample the rate and record."""
    limit = ceiling(n, mix)
    target = min(RATE_BPS, LOAD[mix] * limit)
    cell: dict[str, Any] = {"n": n, "mix": mix.name, "ceiling": limit, "target": target}
    with shaping_switch(probe=True, memory_mb=MEMORY_MB) as switch:
        switch.ovs.set_config(flow_limit=FLOW_LIMIT)
        with Rig(switch, n, mix) as rig:
            # At first a little more slowly than meters allow, so that each frame comes
            # after its meter's time: so the times of the flows are spread over the time
            # that one of them takes for a frame (which may be as long as a sample), and
            # do not stay as close together as when the flows were set up.
            rig.ovs.hold_back(64 * int(mix.mean))
            rig.ovs.set_qos("out", "flowbundler", max_rate=int(SPREAD * target))
            cell |= set_up(rig, [target / n] * n)
            time.sleep(2 + SPREAD_FRAMES * n * mix.mean * 8 / target)
            rig.ovs.hold_back(rx_limit(rig, target))
            rig.ovs.vsctl("remove", "QoS", rig.ovs.get("Port", "out", "qos"), "other_config",
                          "max-rate")
            time.sleep(2)
            before = lookups(switch)
            cell["deviations"] = deviations(rig, samples, target)
            cell["lookups"] = {key: value - before[key]
                               for key, value in lookups(switch).items()}
            cell["per_flow"] = flow_deviations(rig, target, seconds)
            cell["show"] = {key: value for key, value in
                            rig.ovs.flowbundler_show("out")["out"].items()
                            if isinstance(value, int)}
            began = time.monotonic()
        cell["removal_s"] = time.monotonic() - began
    return cell


def run(quick: bool) -> dict[str, Any]:
    """Measure all numbers of destinations."""
    cells = []
    for mix in (LARGE,) if quick else (LARGE, JUMBO):
        for n in (10_000,) if quick else (10_000, 50_000, 100_000):
            progress(f"scale: {n} x {mix.name}")
            cells.append(measure(n, mix, *((20, 0.5) if quick else (300, 4.0))))
    return {"sample_s": SAMPLE_S, "cells": cells}


def text(results: dict[str, Any]) -> str:
    """The tables."""
    rows, setup = [], []
    for cell in results["cells"]:
        name, off, flows = f"{cell['n']} x {cell['mix']}", cell["deviations"], cell["per_flow"]
        rows.append([name, f"{cell['ceiling'] / 1e9:.1f}", f"{cell['target'] / 1e9:.1f}",
                     f"{np.median(off):.3%}", f"{np.percentile(off, 99):.3%}", f"{max(off):.3%}",
                     f"{flows['median']:.3%}", f"{flows['p99']:.3%}"])
        hits = cell["lookups"]["emc hits"] / sum(cell["lookups"].values())
        setup.append([name, f"{hits:.0%}", *(f"{cell[key]:.2f}" for key in
                                             ("meters_s", "flows_s", "datapath_s", "removal_s"))])
    return (table(["destinations x frames", "ceiling", "target (Gbit/s)", "median", "p99", "max",
                   "flows' median", "flows' p99"], rows)
            + f"\n\n|achieved - target| / target, sampled every {results['sample_s'] * 1000:.0f} "
            "ms, and of each flow over seconds, by the probe.\n\n"
            + table(["", "EMC hits", "meters (s)", "flows (s)", "datapath (s)", "removal (s)"],
                    setup)
            + "\n\nTimes to set meters, to add OpenFlow flows, until the datapath has all flows, "
            "and to remove all.")


def plot(results: dict[str, Any], path: Path) -> None:
    """The distribution of deviations."""
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for cell in results["cells"]:
        off = np.sort(cell["deviations"]) * 100
        axes.plot(off, np.arange(1, len(off) + 1) / len(off),
                  label=f"{cell['n']} x {cell['mix']}")
    axes.set(xlabel="deviation of a 100 ms sample (%)", ylabel="part of samples")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
