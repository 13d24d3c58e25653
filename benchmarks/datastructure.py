"""Schedulers of departure times beside each other, without a switch.

Runs edt-sched-bench (see there for the traffic): what a packet costs by the number
of flows, what the calls after a pause cost, and memory.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import table
from benchmarks.switch import BUILD

PROGRAM = BUILD / "bench" / "edt-sched-bench"
CALLGRIND_PROGRAM = BUILD / "bench" / "edt-sched-bench-callgrind"

TITLE = "Schedulers of departure times"

#: What the program measures when there is no scheduler.
FLOOR = "ring"
OURS = "mltw"
#: Those that ours is compared with.
PEERS = ("carousel-1us", "carousel-100ns", "eiffel-1us", "eiffel-100ns", "heap", "tree")
FLOWS = (1, 16, 256, 4096, 100_000)
CALLGRIND_PACKETS = 200_000
STALLS_NS = (10_000_000, 1_000_000_000)

COLORS = {
    "ring": "0.6", "mltw": "#c0392b", "mltw-slots": "#e59866", "mltw-paper": "#d98880",
    "carousel-1us": "#1f618d", "carousel-100ns": "#2980b9", "carousel-100ns-slots": "#85c1e9",
    "eiffel-1us": "#1e8449", "eiffel-100ns": "#27ae60", "eiffel-100ns-slots": "#82e0aa",
    "heap": "#7d3c98", "tree": "#b7950b", "flow-shaper": "#34495e",
}

Result = dict[str, Any]


def lines(argv: Sequence[str | Path]) -> list[Result]:
    """The objects that the program prints."""
    result = subprocess.run(list(map(str, argv)), stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in result.stdout.splitlines()]


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, and the range, of what was measured several times."""
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1]}


def throughput(quick: bool, mixed: bool) -> list[Result]:
    """The ns per packet, by scheduler and number of flows."""
    argv: list[str | Path] = [PROGRAM, "throughput", f"--rounds={5 if quick else 7}",
                              f"--packets={200_000 if quick else 1_000_000}"]
    if mixed:
        argv += ["--mixed", f"--flows={','.join(map(str, FLOWS[1:]))}"]
    found: dict[tuple[str, int], list[Result]] = defaultdict(list)
    # What memory a process gets, which differs, matters as much as its rounds.
    for _ in range(1 if quick else 3):
        for line in lines(argv):
            found[line["scheduler"], line["flows"]].append(line)
    return [{"scheduler": scheduler, "flows": flows, "rounds": len(rounds),
             "ns": spread(r["ns"] for r in rounds),
             "batch": statistics.median(r["batch"] for r in rounds)}
            for (scheduler, flows), rounds in found.items()]


def stalls(quick: bool) -> list[Result]:
    """What the calls after a pause took, by scheduler and length of the pause."""
    found: dict[tuple[str, int], list[Result]] = defaultdict(list)
    for line in lines([PROGRAM, "stall", f"--rounds={5 if quick else 15}"]):
        found[line["scheduler"], line["stall_ns"]].append(line)
    return [{"scheduler": scheduler, "stall_ns": stall_ns,
             **{key: spread(r[key] for r in rounds)
                for key in ("first_ns", "worst_ns", "total_ns", "calls", "packets")}}
            for (scheduler, stall_ns), rounds in found.items()]


def instructions() -> list[Result]:
    """Instructions per packet, counted by callgrind; a count does not vary."""
    found = []
    # Not the shaper, which uses parts of OVS that were built with AVX-512.
    for scheduler in (FLOOR, OURS, *PEERS):
        for flows in FLOWS[:4]:
            result = subprocess.run(
                ["valgrind", "--tool=callgrind", "--collect-atstart=no",
                 "--toggle-collect=run_packets*", "--callgrind-out-file=/dev/null",
                 str(CALLGRIND_PROGRAM), f"--packets={CALLGRIND_PACKETS}", f"--flows={flows}",
                 f"--schedulers={scheduler}", "once"], capture_output=True, text=True, check=True)
            count = re.search(r"Collected : (\d+)", result.stderr)
            assert count, result.stderr
            once = json.loads(result.stdout)
            found.append({"scheduler": scheduler, "flows": flows,
                          "instructions": int(count[1]) / once["packets"]})
    return found


def run(quick: bool) -> Result:
    """Measure everything; instructions, which take minutes, only if not `quick`."""
    return {
        "equal": throughput(quick, mixed=False),
        "mixed": throughput(quick, mixed=True),
        "stall": stalls(quick),
        "memory": lines([PROGRAM, "memory"]),
        "instructions": [] if quick else instructions(),
    }


def behind(found: Result) -> list[str]:
    """Where one of the peers is not slower than ours; empty if nowhere."""
    told = []
    for pattern in ("equal", "mixed"):
        ns = {(r["scheduler"], r["flows"]): r["ns"]["median"] for r in found[pattern]}
        told += [f"{pattern} rates, {flows} flows: {peer} {ns[peer, flows]:.1f} ns, "
                 f"{OURS} {ns[OURS, flows]:.1f} ns"
                 for peer in PEERS for flows in FLOWS
                 if (peer, flows) in ns and ns[peer, flows] <= ns[OURS, flows]]
    return told


def by_flows(results: list[Result], cell: str) -> str:
    """A table with a row for each scheduler and a column for each number of flows.

    `cell` is "ns", "batch" or "instructions".
    """
    flows = sorted({r["flows"] for r in results})
    rows: dict[str, dict[int, str]] = defaultdict(dict)
    for r in results:
        value = r[cell]
        rows[r["scheduler"]][r["flows"]] = (
            f"{value['median']:.1f} ({value['min']:.1f}-{value['max']:.1f})"
            if isinstance(value, dict) else f"{value:.1f}")
    return table(["flows", *map(str, flows)],
                 [[scheduler, *(row.get(n, "") for n in flows)] for scheduler, row in rows.items()])


def size(n_bytes: int) -> str:
    """A number of bytes, for people."""
    return f"{n_bytes / 1e6:.2f} MB"


def duration(ns: float) -> str:
    """A time, for people."""
    return f"{ns / 1e3:.1f} us"


def text(found: Result) -> str:
    """The tables."""
    parts = [
        "ns per packet for enqueue and dequeue, flows of equal rates: median (range).",
        f"'{FLOOR}' is a ring instead of a scheduler: what the benchmark itself costs.",
        "", by_flows(found["equal"], "ns"), "",
        "The same, rates from 1 to 64:", "", by_flows(found["mixed"], "ns"), "",
        "Packets that a call of dequeue returns, equal rates:", "",
        by_flows(found["equal"], "batch"), "",
        "Calls of dequeue for up to 32 packets after a pause, 256 flows, until nothing is",
        "due: the first, the worst, and all together (medians; range of the worst):", "",
        table(["", "pause", "first", "worst", "range", "all", "packets"],
              [[r["scheduler"], f"{r['stall_ns'] // 1_000_000} ms",
                duration(r["first_ns"]["median"]), duration(r["worst_ns"]["median"]),
                f"{duration(r['worst_ns']['min'])} - {duration(r['worst_ns']['max'])}",
                duration(r["total_ns"]["median"]), f"{r['packets']['median']:.0f}"]
               for r in sorted(found["stall"], key=lambda r: r["stall_ns"])]), "",
        "Memory for up to 131072 entries, 256 flows: allocated, and resident when created,",
        "after 100 ms of traffic, and after the whole horizon has passed (Eiffel's two):", "",
        table(["", "allocated", "created", "after 100 ms", "after horizon"],
              [[r["scheduler"], *(size(r[key]) for key in
                                  ("allocated", "created", "after_100ms", "after_rotation"))]
               for r in found["memory"]]),
    ]
    if found["instructions"]:
        parts += ["", "Instructions per packet (callgrind, without AVX-512):", "",
                  by_flows(found["instructions"], "instructions")]
    where = behind(found)
    parts += ["", f"{OURS} is not ahead of:" if where
              else f"{OURS} is ahead of {', '.join(PEERS)} at every number of flows."]
    parts += [f"  {line}" for line in where]
    return "\n".join(parts)


def plot(found: Result, path: Path) -> None:
    """The picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 9))
    for axis, pattern, title in ((axes[0][0], "equal", "flows of equal rates"),
                                 (axes[0][1], "mixed", "rates from 1 to 64")):
        shown = (FLOOR, OURS, *PEERS)
        for scheduler in shown:
            points = sorted((r["flows"], r["ns"]) for r in found[pattern]
                            if r["scheduler"] == scheduler)
            axis.errorbar([flows for flows, _ in points], [ns["median"] for _, ns in points],
                          yerr=[[ns["median"] - ns["min"] for _, ns in points],
                                [ns["max"] - ns["median"] for _, ns in points]],
                          label=scheduler, color=COLORS[scheduler], marker="o", capsize=2,
                          linestyle=":" if scheduler == FLOOR else "-",
                          linewidth=2.5 if scheduler == OURS else 1.2)
        axis.set(xscale="log", xlabel="flows", ylabel="ns per packet", title=f"Cost, {title}")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)

    names = [r["scheduler"] for r in found["memory"] if r["scheduler"] != FLOOR
             and not r["scheduler"].endswith("-slots")]
    axis = axes[1][0]
    for i, stall_ns in enumerate(STALLS_NS):
        worst = {r["scheduler"]: r["worst_ns"]["median"] for r in found["stall"]
                 if r["stall_ns"] == stall_ns}
        axis.bar([j + 0.4 * i - 0.2 for j in range(len(names))],
                 [worst[name] / 1e3 for name in names], width=0.4,
                 color=[COLORS[name] for name in names], alpha=(0.5, 1)[i])
    axis.set(yscale="log", ylabel="us", title="Worst call after a pause of 10 ms (pale) and 1 s")
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axis = axes[1][1]
    memory = {r["scheduler"]: r for r in found["memory"]}
    for i, key in enumerate(("after_100ms", "after_rotation")):
        axis.bar([j + 0.4 * i - 0.2 for j in range(len(names))],
                 [max(memory[name][key], 4096) / 1e6 for name in names], width=0.4,
                 color=[COLORS[name] for name in names], alpha=(0.5, 1)[i])
    axis.set(yscale="log", ylabel="MB",
             title="Resident memory after 100 ms (pale) and the whole horizon")
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
