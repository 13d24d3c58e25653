"""What our patches cost a switch that does not use them.

Unpatched OVS and ours forward the same traffic, without any QoS, in turns on
the same core.  In a pair of measurements both are started anew, since where
memory happens to lie speeds a process up or down by more than what is sought.
Both run all the time of a pair, but one is stopped (SIGSTOP); which was started
first changes from pair to pair, since that is no matter of the code either.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.frames import LARGE, SMALL, Mix
from benchmarks.results import progress, table
from benchmarks.rig import Rig
from benchmarks.stats import median_interval, spread
from benchmarks.switch import OURS, STOCK, Switch, only

TITLE = "Cost of the patches without QoS"
DESTINATIONS = 16
#: The part by which ours may be slower.
TARGET = 0.01
#: Where the kernel offers the processor's own counters.
INSTRUCTIONS = Path("/sys/bus/event_source/devices/cpu")


def pair(mix: Mix, rounds: int, seconds: float, order: tuple[str, str]
         ) -> dict[str, list[dict[str, float]]]:
    """Measurements of both, by tree; `order` is in which they are started."""
    taken: dict[str, list[dict[str, float]]] = {STOCK: [], OURS: []}
    with ExitStack() as stack:
        switches: dict[str, Switch] = {}
        rigs: dict[str, Rig] = {}
        for tree in order:
            for other in switches.values():
                other.pause()
            switches[tree] = stack.enter_context(Switch(tree, private=True))
            rigs[tree] = stack.enter_context(Rig(switches[tree], DESTINATIONS, mix))
            rigs[tree].forward(metered=False)
        # What drifts with time counts for both alike.
        for tree in (*order, *reversed(order)) * rounds:
            with only(switches[tree], switches.values()):
                time.sleep(0.2)
                taken[tree].append(asdict(rigs[tree].measure(seconds)))
        for switch in switches.values():
            switch.resume()
    return taken


def run(quick: bool) -> dict[str, Any]:
    """Measure all pairs of both frame sizes."""
    pairs, rounds, seconds = (4, 1, 0.3) if quick else (9, 3, 0.5)
    results: dict[str, Any] = {"destinations": DESTINATIONS, "measurements": 2 * rounds,
                               "seconds": seconds, "mixes": {}}
    for mix in (SMALL,) if quick else (SMALL, LARGE):
        taken = []
        for n in range(pairs):
            progress(f"hook-off: {mix.name}, pair {n + 1} of {pairs}")
            order = (OURS, STOCK) if n % 2 else (STOCK, OURS)
            taken.append(pair(mix, rounds, seconds, order))
        results["mixes"][mix.name] = taken
    return results


def _ratios(pairs: list[dict[str, list[dict[str, float]]]], what: str) -> list[float]:
    """Ours by unpatched, of the median of each pair."""
    return [median(m[what] for m in taken[OURS]) / median(m[what] for m in taken[STOCK])
            for taken in pairs]


def text(results: dict[str, Any]) -> str:
    """The result as a table."""
    rows = []
    for name, pairs in results["mixes"].items():
        for what, unit in (("cycles", "TSC cycles / packet"), ("pps", "packets / s")):
            ratios = _ratios(pairs, what)
            low, high, confidence = median_interval(ratios)
            stock = median(m[what] for taken in pairs for m in taken[STOCK])
            number = f"{stock / 1e6:.2f} M" if what == "pps" else f"{stock:.1f}"
            rows.append([f"{name}, {unit}", number, f"{median(ratios) - 1:+.2%}",
                         f"{low - 1:+.2%} to {high - 1:+.2%} ({confidence:.1%})",
                         f"{spread(ratios):.2%}", len(ratios)])
    note = (f"{results['destinations']} destinations. For each pair both are started anew, and "
            f"measured {results['measurements']} times for {results['seconds']} s in turns. "
            f"Target: within {TARGET:.0%}.")
    if not INSTRUCTIONS.exists():
        note += " Instructions per packet: this machine offers no counter of instructions."
    return table(["frames, measure", "unpatched", "ours", "interval of the median",
                  "spread of pairs", "pairs"], rows) + "\n\n" + note


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw each pair's ratio."""
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for name, pairs in results["mixes"].items():
        ratios = [100 * (r - 1) for r in _ratios(pairs, "cycles")]
        axes.plot(range(1, len(ratios) + 1), ratios, "o", label=name)
    axes.axhline(0, color="grey", lw=0.8)
    axes.axhline(100 * TARGET, color="grey", lw=0.8, ls="--", label="target")
    axes.set(xlabel="pair", ylabel="cycles of a packet against unpatched (%)")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
