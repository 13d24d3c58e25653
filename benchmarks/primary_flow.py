"""Accuracy of one flow's rate beside others that have the rest of a 100 Gbit/s link.

As in the software-NIC paper's figure 8a (Understanding the limits of software
NICs, ANCS 2018): a primary flow's rate is raised in steps, the rest of the link is
divided evenly, all on one core.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
from fbtest.probe import Probe, flow_rates

from benchmarks.frames import LARGE, address
from benchmarks.results import progress, table
from benchmarks.rig import Rig
from benchmarks.shaped import MLTW, SCHEDULERS, Scheduler, Shaped, shaping_switch

TITLE = "One flow beside others on a 100 Gbit/s link"

LINK_BPS = 100e9
RECORDS = 1 << 22
#: Recordings of a step, of which the median counts.
RECORDINGS = 3
PRIMARY = int.from_bytes(bytes(map(int, address(0).split("."))), "big")


def record(rig: Rig, seconds: float) -> tuple[float, float]:
    """The rate of the primary flow, and of all, in bit/s."""
    with Probe(rig.ovs, "out", records=RECORDS) as probe:
        time.sleep(seconds)
    rates = {flow: r.rate for flow, r in flow_rates(probe.records()).items()}
    probe.close()
    return rates.get(PRIMARY, 0.0), sum(rates.values())


def sweep(rig: Rig, scheduler: Scheduler, others: int, step_bps: float, seconds: float
          ) -> list[dict[str, float]]:
    """Target, rate achieved by the primary flow and by all, for each step."""
    shaped = Shaped(rig, scheduler, seconds)
    found = []
    target = step_bps
    while target < LINK_BPS:
        shaped.set_rates([target] + [(LINK_BPS - target) / others] * others)
        time.sleep(0.2)
        taken = [record(rig, seconds) for _ in range(RECORDINGS)]
        found.append({"target": target, "primary": median(rates[0] for rates in taken),
                      "all": median(rates[1] for rates in taken)})
        target += step_bps
    return found


def run(quick: bool) -> dict[str, Any]:
    """Sweep for all schedulers and numbers of others."""
    step, seconds = (25e9, 0.1) if quick else (5e9, 0.15)
    schedulers = [MLTW] if quick else [
        s for s in SCHEDULERS if s == MLTW or (s.granularity_ns, s.batching) == (100, "slot")]
    series = []
    with shaping_switch(probe=True, peers=not quick) as switch:
        for others in (4,) if quick else (1, 2, 4, 16):
            with Rig(switch, 1, LARGE, others=others) as rig:
                for scheduler in schedulers:
                    progress(f"primary-flow: {others} others, {scheduler.label}")
                    series.append({"others": others, "scheduler": scheduler.label,
                                   "steps": sweep(rig, scheduler, others, step, seconds)})
    return {"link": LINK_BPS, "seconds": seconds, "series": series}


def text(results: dict[str, Any]) -> str:
    """How far the primary flow falls short, at most, and from where on it does."""
    rows = []
    for one in results["series"]:
        off = [(abs(s["primary"] / s["target"] - 1), s["target"]) for s in one["steps"]]
        held = [target for part, target in off if part <= 0.01]
        rows.append([f"{one['others']} others, {one['scheduler']}", f"{max(off)[0]:.2%}",
                     f"{max(off)[1] / 1e9:g}", f"{len(held)} of {len(off)}",
                     f"{min(s['all'] for s in one['steps']) / 1e9:.1f}"])
    return (table(["flows", "worst deviation", "at (Gbit/s)", "steps within 1 %",
                   "least total (Gbit/s)"], rows)
            + "\n\nRate of the primary flow against its target; all targets together are "
            f"{results['link'] / 1e9:.0f} Gbit/s. 1514 B frames, net_null, recorded by the probe.")


def plot(results: dict[str, Any], path: Path) -> None:
    """Achieved against target, one panel a number of others."""
    numbers = sorted({one["others"] for one in results["series"]})
    figure, panels = plt.subplots(1, len(numbers), figsize=(1 + 3 * len(numbers), 3.3),
                                  layout="constrained", squeeze=False, sharey=True)
    for axes, n in zip(panels[0], numbers, strict=True):
        for one in (one for one in results["series"] if one["others"] == n):
            axes.plot([s["target"] / 1e9 for s in one["steps"]],
                      [s["primary"] / 1e9 for s in one["steps"]], ".-", label=one["scheduler"])
        axes.plot([0, 100], [0, 100], "k:", lw=0.8)
        axes.set(title=f"{n} others", xlabel="target (Gbit/s)")
    panels[0][0].set_ylabel("achieved (Gbit/s)")
    panels[0][-1].legend(fontsize="x-small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
