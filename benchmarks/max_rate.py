"""The highest rate that is shaped accurately, with 1 to 256 destinations.

As in the FlowBundler paper's figure 8: the total of equal rates, one for each
destination, is raised until what leaves is more than 1 % off it.  What leaves
is counted by the port's driver (or the kernel), behind the shaper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.ceiling import measure as measure_ceiling
from benchmarks.frames import IMIX, LARGE, SMALL, Mix
from benchmarks.results import progress, table
from benchmarks.rig import AF_PACKET, DOORBELLS, NULL, Rig, Sink
from benchmarks.shaped import MLTW, SCHEDULERS, TOLERANCE, Scheduler, Shaped, shaping_switch
from benchmarks.switch import STOCK, Switch

TITLE = "Highest accurately shaped rate"


#: Frames to a destination in a row: a receive burst, so that packets to different
#: destinations come at different times; and in a whole turn at most, since what
#: waits should fit into a cache.
RUN, TURN = 32, 1024


@dataclass(frozen=True)
class Case:
    """Where it is measured."""

    sink: Sink
    n: int
    mix: Mix
    interleaved: bool = False

    @property
    def run(self) -> int:
        """How many frames the source sends to each destination in turn."""
        return 1 if self.interleaved else min(RUN, TURN // self.n)

    @property
    def label(self) -> str:
        """What tables call it."""
        return f"{self.n} x {self.mix.name}" + (", interleaved" if self.interleaved else "")


def cases(quick: bool) -> list[Case]:
    """Where to measure: destinations and frames."""
    if quick:
        return [Case(NULL, 16, LARGE, interleaved=True),
                *(Case(sink, 16, LARGE) for sink in (NULL, DOORBELLS[-1]))]
    found = [Case(sink, n, LARGE) for sink in (NULL, AF_PACKET, *DOORBELLS)
             for n in (1, 2, 4, 8, 16, 64, 256)]
    found += [Case(NULL, n, LARGE, interleaved=True) for n in (2, 4, 8, 16, 64, 256)]
    found += [Case(DOORBELLS[-1], 16, LARGE, interleaved=True)]
    return found + [Case(NULL, 16, mix) for mix in (SMALL, IMIX)]


def by_sink(found: list[Case]) -> Iterator[tuple[list[Case], bool]]:
    """The cases of each sink, and whether their switch can be in a namespace of its own."""
    for sink in dict.fromkeys(case.sink for case in found):
        yield [case for case in found if case.sink == sink], sink != AF_PACKET


def ceilings(found: list[Case], seconds: float) -> dict[Case, float]:
    """What unpatched OVS with meters that never drop forwards, in bit/s."""
    rates = {}
    for some, private in by_sink(found):
        with Switch(STOCK, private=private, probe=True) as switch:
            for case in some:
                progress(f"max-rate: ceiling, {case.sink.name}, {case.label}")
                pps = measure_ceiling(switch, case.n, case.mix, (True,), seconds, case.sink,
                                      case.run)[0]
                rates[case] = pps * case.mix.mean * 8
    return rates


def shaped(marks: dict[Case, float], schedulers: tuple[Scheduler, ...],
           seconds: float) -> list[dict[str, Any]]:
    """The highest rates of all schedulers in all cases, whose ceilings are `marks`."""
    cells = []
    peers = tuple(s for s in schedulers if s != MLTW)
    for (some, private), group in product(by_sink(list(marks)), ((MLTW,), peers)):
        # What a scheduler made of the ceiling in the case before.
        guesses = dict.fromkeys(group, 0.7)
        with shaping_switch(private=private, probe=True, peers=group == peers) as switch:
            for case in some:
                with Rig(switch, case.n, case.mix, case.sink, run=case.run) as rig:
                    for scheduler in group:
                        progress(f"max-rate: {case.sink.name}, {case.label}, {scheduler.label}")
                        result = Shaped(rig, scheduler, seconds).search(
                            guesses[scheduler] * marks[case])
                        guesses[scheduler] = result["bps"] / marks[case]
                        cells.append({"sink": case.sink.name, "case": case.label,
                                      "scheduler": scheduler.label} | result)
    return cells


def run(quick: bool) -> dict[str, Any]:
    """Ceilings, shaped rates, and the ceilings again: whether the machine was steady."""
    seconds = 0.3 if quick else 0.5
    found = cases(quick)
    schedulers = tuple(s for s in SCHEDULERS if s == MLTW or s.granularity_ns == 100) \
        if quick else SCHEDULERS
    before = ceilings(found, seconds)
    cells = shaped(before, schedulers, seconds)
    after = before if quick else ceilings(found, seconds)
    return {
        "seconds": seconds, "schedulers": [s.label for s in schedulers], "cells": cells,
        "tolerance": TOLERANCE, "ceilings": [
            {"sink": case.sink.name, "case": case.label, "n": case.n, "run": case.run,
             "drawn": case.mix == LARGE and not case.interleaved,
             "bps": (before[case] + after[case]) / 2, "change": after[case] / before[case] - 1}
            for case in found],
    }


def _cells(results: dict[str, Any], sink: str, case: str) -> dict[str, float]:
    """bit/s by scheduler."""
    return {cell["scheduler"]: cell["bps"] for cell in results["cells"]
            if (cell["sink"], cell["case"]) == (sink, case)}


def text(results: dict[str, Any]) -> str:
    """A table for each port, and the ratios that are asked for."""
    parts = []
    for sink in dict.fromkeys(c["sink"] for c in results["ceilings"]):
        rows, ratios = [], []
        for ceiling in (c for c in results["ceilings"] if c["sink"] == sink):
            rates = _cells(results, sink, ceiling["case"])
            rows.append([ceiling["case"], f"{ceiling['bps'] / 1e9:.1f}",
                         *(f"{rates[name] / 1e9:.2f}" for name in results["schedulers"])])
            ratios.append([ceiling["case"], f"{rates['mltw'] / ceiling['bps']:.2f}",
                           *(f"{rates['mltw'] / rates[name]:.2f}" if rates[name] else "-"
                             for name in results["schedulers"][1:])])
        parts += [f"Sent to {sink}, Gbit/s:",
                  table(["destinations x frames", "ceiling", *results["schedulers"]], rows),
                  "mltw against the ceiling and the others (ratio):",
                  table(["destinations x frames", "ceiling", *results["schedulers"][1:]],
                        ratios)]
    worst = max(abs(c["change"]) for c in results["ceilings"])
    parts.append(f"Ceiling: unpatched, with meters that never drop; it changed by up to "
                 f"{worst:.1%} from before to after. Rates held within "
                 f"{results['tolerance']:.0%} for {results['seconds']} s.")
    return "\n\n".join(parts)


def plot(results: dict[str, Any], path: Path) -> None:
    """The rate over the number of destinations, one panel a port."""
    large = [c for c in results["ceilings"] if c["drawn"]]
    sinks = list(dict.fromkeys(c["sink"] for c in large))
    figure, panels = plt.subplots(1, len(sinks), figsize=(1 + 4.2 * len(sinks), 4),
                                  layout="constrained", squeeze=False, sharex=True)
    for axes, sink in zip(panels[0], sinks, strict=True):
        mine = [c for c in large if c["sink"] == sink]
        numbers = [c["n"] for c in mine]
        axes.plot(numbers, [c["bps"] / 1e9 for c in mine], "k--", label="ceiling, no shaping")
        for name in results["schedulers"]:
            axes.plot(numbers, [_cells(results, sink, c["case"])[name] / 1e9 for c in mine],
                      "o-" if name == MLTW.name else ".-", label=name)
        axes.set_xscale("log", base=2)
        axes.set(title=sink, xlabel="destinations", ylabel="highest shaped rate (Gbit/s)")
        axes.set_ylim(bottom=0)
        axes.set_xticks(numbers, numbers)
    panels[0][-1].legend(fontsize="x-small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
