"""How fast the switch forwards where nothing waits: the mark that shaping is held to.

Unpatched OVS without meters and with a meter for each destination that never
drops, and ours without QoS.  They take turns, and are started anew each round.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.frames import IMIX, LARGE, SMALL, Mix
from benchmarks.plots import bars
from benchmarks.results import progress, table
from benchmarks.rig import NO_LIMIT, NULL, Rig, Sink
from benchmarks.stats import spread
from benchmarks.switch import OURS, STOCK, Switch, only

TITLE = "Ceiling: forwarding without shaping"


@dataclass(frozen=True)
class Variant:
    """What forwards."""

    name: str
    tree: str
    metered: bool


VARIANTS = (Variant("unpatched", STOCK, False),
            Variant("unpatched, meters", STOCK, True),
            Variant("ours, no QoS", OURS, False))


def measure(switch: Switch, n: int, mix: Mix, metered: tuple[bool, ...], seconds: float,
            sink: Sink = NULL, run: int = 1) -> list[float]:
    """Packets a second, without or with meters, that never drop."""
    speeds = []
    with Rig(switch, n, mix, sink, run=run) as rig:
        if any(metered):
            rig.set_meters([NO_LIMIT] * n)
        for with_meters in metered:
            rig.forward(metered=with_meters)
            time.sleep(0.3)
            speeds.append(rig.measure(seconds).pps)
    return speeds


def run(quick: bool) -> dict[str, Any]:
    """Measure all cases, round by round."""
    rounds, seconds = (3, 0.3) if quick else (7, 1.0)
    cases = [(n, LARGE) for n in ((16,) if quick else (1, 4, 16, 64, 256))]
    cases += [(16, SMALL)] if quick else [(16, SMALL), (16, IMIX)]
    taken: dict[str, dict[str, list[float]]] = {
        f"{n} x {mix.name}": {v.name: [] for v in VARIANTS} for n, mix in cases}
    for turn in range(rounds):
        with ExitStack() as stack:
            switches = {tree: stack.enter_context(Switch(tree, private=True))
                        for tree in (STOCK, OURS)}
            for n, mix in cases:
                name = f"{n} x {mix.name}"
                progress(f"ceiling: round {turn + 1} of {rounds}, {name}")
                for tree in switches:
                    variants = [v for v in VARIANTS if v.tree == tree]
                    with only(switches[tree], switches.values()):
                        speeds = measure(switches[tree], n, mix,
                                         tuple(v.metered for v in variants), seconds)
                    for variant, pps in zip(variants, speeds, strict=True):
                        taken[name][variant.name].append(pps)
    return {"seconds": seconds, "rounds": rounds, "cases": taken,
            "bytes": {f"{n} x {mix.name}": mix.mean for n, mix in cases}}


def text(results: dict[str, Any]) -> str:
    """The medians as a table."""
    rows = []
    for name, variants in results["cases"].items():
        bits = 8 * results["bytes"][name]
        row = [name]
        for variant in VARIANTS:
            pps = median(variants[variant.name])
            row.append(f"{pps / 1e6:.2f} / {pps * bits / 1e9:.1f} "
                       f"(±{spread(variants[variant.name]):.1%})")
        rows.append(row)
    return (table(["destinations x frames", *(v.name for v in VARIANTS)], rows)
            + f"\n\nMpps / Gbit/s (± half the distance of the quartiles), medians of "
            f"{results['rounds']} rounds of {results['seconds']} s; net_pcap to net_null, "
            "one core.")


def plot(results: dict[str, Any], path: Path) -> None:
    """Bars for each case."""
    cases = results["cases"]
    bars(path, list(cases), {v.name: [median(taken[v.name]) / 1e6 for taken in cases.values()]
                             for v in VARIANTS},
         "destinations x frames", "forwarding rate (Mpps)")
