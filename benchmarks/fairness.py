"""What fair meters cost: the highest rate that is shaped accurately, with and without.

The same search as in max-rate.  A destination is one flow here, so fair meters have
nothing to divide: what is seen is what turns cost.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.frames import LARGE
from benchmarks.max_rate import Case
from benchmarks.plots import bars
from benchmarks.results import progress, table
from benchmarks.rig import NULL, Rig
from benchmarks.shaped import MLTW, Shaped, shaping_switch
from benchmarks.stats import spread

TITLE = "Highest accurately shaped rate with fair meters"

#: Where a search begins, in bit/s.
GUESS = 90e9


def run(quick: bool) -> dict[str, Any]:
    """Both kinds of meters in turns, in a vswitchd that is started anew each round."""
    rounds, seconds = (1, 0.3) if quick else (5, 0.5)
    cases = [Case(NULL, n, LARGE, interleaved) for n in ((16,) if quick else (1, 16, 256))
             for interleaved in ((False,) if n == 1 else (False, True))]
    taken: dict[str, dict[str, list[float]]] = {
        case.label: {"in one line": [], "fair": []} for case in cases}
    for turn in range(rounds):
        with shaping_switch(private=True) as switch:
            for case in cases:
                with Rig(switch, case.n, case.mix, case.sink, run=case.run) as rig:
                    for name, rates in taken[case.label].items():
                        progress(f"fairness: round {turn + 1} of {rounds}, {case.label}, {name}")
                        rig.ovs.set_config(meter_shaping_fair=name == "fair")
                        rates.append(Shaped(rig, MLTW, seconds).search(GUESS)["bps"])
    return {"rounds": rounds, "seconds": seconds, "cases": taken}


def text(results: dict[str, Any]) -> str:
    """The medians as a table."""
    rows = []
    for name, kinds in results["cases"].items():
        plain, fair = (kinds[kind] for kind in ("in one line", "fair"))
        rows.append([name, *(f"{median(rates) / 1e9:.1f} (±{spread(rates):.1%})"
                             for rates in (plain, fair)),
                     f"{median(f / p for f, p in zip(fair, plain, strict=True)):.2f}"])
    return (table(["destinations x frames", "in one line", "fair", "ratio"], rows)
            + f"\n\nGbit/s (± half the distance of the quartiles), medians of "
            f"{results['rounds']} rounds; net_pcap to net_null, one core.")


def plot(results: dict[str, Any], path: Path) -> None:
    """Bars for each case."""
    cases = results["cases"]
    bars(path, list(cases), {kind: [median(kinds[kind]) / 1e9 for kinds in cases.values()]
                             for kind in ("in one line", "fair")},
         "destinations x frames", "Gbit/s")
