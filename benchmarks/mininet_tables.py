#!/usr/bin/env python3
"""Tables of what links of mininet reach: ours, and TCLink beside it.

usage: mininet_tables.py [--quick] [--tables tcp,rtt,path] [--seconds N]

tcp   TCP between two hosts at a switch, one of which has a link with a rate: from it and to
      it, with FlowBundlerLink, without DPDK, and with TCLink (HTB) on a Linux bridge
rtt   round-trip times on links with a delay, idle and while TCP fills them
path  TCP at a rate over a path with a round-trip time

Prints markdown, and writes it and all figures to build/bench/mininet.md and .json.  Needs root
and mininet ("make mininet").  Run it when nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "tests"))
from mininet_bed import BUILD, program  # noqa: E402

#: The sum of a link's delays on the way there and back: two links, each way.
DELAYS_A_ROUND_TRIP = 4


def transfer(figures: dict[str, float], mbit: float) -> list[str]:
    """A transfer's cells: goodput, its part of the rate, segments sent again."""
    return [f"{figures['goodput']:.1f}", f"{100 * figures['goodput'] / mbit:.1f} %",
            f"{figures['retransmitted']:.0f} / {figures['all_retransmitted']:.0f}"]


def tcp(options: argparse.Namespace) -> Iterator[list[str]]:
    """Goodput and retransmissions at rates."""
    yield ["link", "Mbit/s", "control", "from the host", "", "sent again", "to the host", "",
           "sent again"]
    links = {"FlowBundlerLink": {}, "without DPDK": {"dpdk": False}, "TCLink": {"ours": False}}
    for mbit in (10, 100) if options.quick else (10, 100, 500, 1000):
        for control in ("bbr", "cubic")[:1 if options.quick else 2]:
            for name, how in links.items():
                got = program("rates", bw=mbit, seconds=options.seconds, congestion=control,
                              **how)
                record("tcp", {"link": name, "bw": mbit, "control": control, **got})
                yield [name, str(mbit), control, *transfer(got["sends"], mbit),
                       *transfer(got["receives"], mbit)]


def rtt(options: argparse.Namespace) -> Iterator[list[str]]:
    """Round-trip times in ms, those of a queue beside those of an empty path."""
    yield ["delay, ms", "jitter, ms", "idle: least", "median", "most",
           "while 100 Mbit/s are full: least", "median", "most"]
    for delay, jitter in ((1, 0), (15, 0)) if options.quick else ((1, 0), (15, 0), (100, 0),
                                                                 (15, 5)):
        link = {"bw": 100, "delay": f"{delay}ms"} | ({"jitter": f"{jitter}ms"} if jitter else {})
        got = program("round_trips", link=link, busy=True, count=options.pings, timeout=300)
        record("rtt", {"delay": delay, "jitter": jitter, **got})
        yield [str(delay), str(jitter), *(f"{f(got[when]):.1f}" for when in ("idle", "busy")
                                          for f in (min, statistics.median, max))]


def path(options: argparse.Namespace) -> Iterator[list[str]]:
    """TCP over a path with a round-trip time."""
    yield ["Mbit/s", "round trip, ms", "control", "from the host", "", "sent again",
           "to the host", "", "sent again"]
    for mbit in (100,) if options.quick else (100, 1000):
        for trip in (0, 10, 50):
            for control in ("bbr", "cubic")[:1 if options.quick else 2]:
                delay = f"{1000 * trip // DELAYS_A_ROUND_TRIP}us" if trip else None
                got = program("rates", bw=mbit, seconds=2 * options.seconds, delay=delay,
                              congestion=control, warm_up=options.seconds)
                record("path", {"bw": mbit, "rtt": trip, "control": control, **got})
                yield [str(mbit), str(trip), control, *transfer(got["sends"], mbit),
                       *transfer(got["receives"], mbit)]


TABLES: dict[str, Callable[[argparse.Namespace], Iterator[list[str]]]] = {
    "tcp": tcp, "rtt": rtt, "path": path}
figures: dict[str, list[dict[str, Any]]] = {}


def record(table: str, row: dict[str, Any]) -> None:
    """Keep a row with all its figures."""
    figures.setdefault(table, []).append(row)


def main() -> int:
    """Make the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows")
    parser.add_argument("--tables", default="tcp,rtt,path", help="which (%(default)s)")
    parser.add_argument("--seconds", type=int, default=5, help="of each transfer (%(default)s)")
    parser.add_argument("--pings", type=int, default=40, help="of each link (%(default)s)")
    options = parser.parse_args()
    if unknown := set(options.tables.split(",")) - TABLES.keys():
        parser.error(f"--tables {','.join(unknown)}: must be of {', '.join(TABLES)}")
    if os.geteuid() != 0:
        parser.error("mininet needs root")
    lines = []
    for name in options.tables.split(","):
        rows = TABLES[name](options)
        head = next(rows)
        lines += [f"## {name}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for row in rows:
            lines.append("| " + " | ".join(row) + " |")
            print(lines[-1], flush=True)
        lines.append("")
    directory = BUILD / "bench"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "mininet.md").write_text("\n".join(lines))
    (directory / "mininet.json").write_text(json.dumps(figures, indent=1))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
