"""What a second PMD thread adds: two of them on ports of their own, against one.

Each thread has a source, destinations with a meter each, and a port that shapes.  They
share nothing but the switch, so what is missing to twice the rate of one is what threads
cost each other, and what else runs on their cores.  Plain forwarding, of which the same
is missing, says how much of that is the machine's.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
from fbtest.pcap import write_frames
from fbtest.proc import wait_until
from fbtest.testbed import Testbed

from benchmarks.frames import LARGE, SMALL, Mix, frames
from benchmarks.results import progress, table
from benchmarks.rig import flows, pmd_threads, set_meters, tx_packets
from benchmarks.search import highest
from benchmarks.shaped import (
    BURST_FRAMES,
    FRAMES_EACH,
    HIGHEST,
    LOWEST,
    TOLERANCE,
    shaping_switch,
)
from benchmarks.stats import spread
from benchmarks.switch import Switch

TITLE = "Scaling: two PMD threads against one"
DESTINATIONS = 16
#: How precisely the highest rate is searched for, as a part: rounds differ by more.
PRECISION = 0.03
FORWARDS, SHAPES = "forwards", "shapes"
#: Time of the whole rate that may wait: one of the threads shares its core with others, so
#: that it polls later at times than one that has a core to itself.
POLL_GAP_S = 50e-6


class Lanes:
    """A source, destinations with meters and a port for each of the PMD threads on `cpus`."""

    def __init__(self, switch: Switch, cpus: list[int], mix: Mix, seconds: float):
        self.switch, self.mix, self.seconds, self.ovs = switch, mix, seconds, switch.ovs
        self.n = DESTINATIONS * len(cpus)
        self._metered = False
        self._stack = ExitStack()
        try:
            self.ovs.set_config(pmd_cpu_mask=f"{sum(1 << cpu for cpu in cpus):#x}")
            self.bed = self._stack.enter_context(Testbed(self.ovs.env))
            self._stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            os.sched_setaffinity(0, self.bed.cpus)
            self.outs = [self.bed.add_port(f"out{i}", "net_null,no-rx=1", **mix.options)
                         for i in range(len(cpus))]
            for i, cpu in enumerate(cpus):
                capture = self.bed.dir / f"{i}.pcap"
                write_frames(capture, frames(self._destinations(i), mix))
                self.bed.add_port(f"src{i}", f"net_pcap,rx_pcap={capture},infinite_rx=1",
                                  **mix.options)
                self.ovs.vsctl("set", "Interface", f"src{i}",
                               f"other_config:pmd-rxq-affinity=0:{cpu}")
            threads = wait_until(lambda: pmd_threads(switch, len(cpus)), "the PMD threads run")
            for thread in threads:
                os.setpriority(os.PRIO_PROCESS, thread, -20)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    @staticmethod
    def _destinations(lane: int) -> range:
        return range(lane * DESTINATIONS, (lane + 1) * DESTINATIONS)

    def forward(self, *, metered: bool) -> None:
        """Send each source's frames to its port, through meters or not."""
        self.ovs.replace_flows(self.bed.bridge, (
            flow for i, out in enumerate(self.outs)
            for flow in flows(self._destinations(i), out, metered=metered)))

    def measure(self, seconds: float) -> float:
        """Bits a second that leave all ports together."""
        def read() -> tuple[float, int]:
            before = time.monotonic()
            sent = tx_packets(self.switch, [out.name for out in self.outs])
            return (before + time.monotonic()) / 2, sent

        (start, first), _, (end, last) = read(), time.sleep(seconds), read()
        return (last - first) / (end - start) * self.mix.mean * 8

    def shape(self) -> None:
        """Have the ports shape."""
        for out in self.outs:
            self.ovs.set_qos(out.name, "flowbundler")

    def set_rate(self, total_bps: float) -> None:
        """Give all destinations equal parts, and let as much wait as each thread needs."""
        each = FRAMES_EACH * DESTINATIONS * max(self.mix.sizes)
        limit = round(each + total_bps / len(self.outs) / 8 * POLL_GAP_S)
        self.ovs.hold_back(limit)
        set_meters(self.ovs, self.bed.bridge, self.mix, [total_bps / self.n] * self.n,
                   BURST_FRAMES, there=self._metered)
        self._metered = True

    def attempt(self, total_bps: float) -> float:
        """What leaves where `total_bps` are allowed."""
        self.set_rate(total_bps)
        got = 0.0
        for _ in range(2):
            # What waited at the old rate has left by then.
            time.sleep(0.2)
            got = self.measure(self.seconds)
            if abs(got / total_bps - 1) <= TOLERANCE:
                break
        return got


def measure(switch: Switch, cpus: list[int], mix: Mix, seconds: float, guess: float
            ) -> dict[str, float]:
    """How much is forwarded, and the highest rate that is shaped, in bit/s."""
    with Lanes(switch, cpus, mix, seconds) as lanes:
        lanes.forward(metered=False)
        time.sleep(0.3)
        forwards = lanes.measure(seconds)
        lanes.shape()
        lanes.set_rate(LOWEST)
        lanes.forward(metered=True)
        shapes = highest(lanes.attempt, guess or forwards * 0.6, tolerance=TOLERANCE,
                         precision=PRECISION, lowest=LOWEST, ceiling=HIGHEST)
    return {FORWARDS: forwards, SHAPES: shapes}


def run(quick: bool) -> dict[str, Any]:
    """Measure one thread and two in turns."""
    rounds, seconds = (1, 0.3) if quick else (3, 0.5)
    results: dict[str, Any] = {"destinations": DESTINATIONS, "seconds": seconds,
                               "rounds": rounds, "cpus": os.cpu_count(), "mixes": {}}
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise RuntimeError("scaling: two PMD threads need two CPUs")
    for mix in (LARGE,) if quick else (LARGE, SMALL):
        taken: dict[str, list[dict[str, float]]] = {"1": [], "2": []}
        for turn in range(rounds):
            with shaping_switch(private=False) as switch:
                first, = switch.ovs.pmd_cpus()
                second = next(cpu for cpu in cpus if cpu != first)
                for used in ([first], [first, second]):
                    progress(f"scaling: {mix.name}, round {turn + 1} of {rounds}, "
                             f"{len(used)} threads")
                    guesses = [m[SHAPES] for m in taken[str(len(used))]]
                    taken[str(len(used))].append(
                        measure(switch, used, mix, seconds, median(guesses) if guesses else 0))
        results["mixes"][mix.name] = taken
    return results


def _ratios(taken: dict[str, list[dict[str, float]]], what: str) -> list[float]:
    """Two threads by one, of each round."""
    return [two[what] / one[what] if one[what] else float("nan")
            for one, two in zip(taken["1"], taken["2"], strict=True)]


def text(results: dict[str, Any]) -> str:
    """The medians as a table."""
    rows = []
    for name, taken in results["mixes"].items():
        for what in (FORWARDS, SHAPES):
            ratios = _ratios(taken, what)
            rows.append([f"{name}, {what}",
                         *(f"{median(m[what] for m in taken[n]) / 1e9:.2f}" for n in ("1", "2")),
                         f"{median(ratios):.2f} (±{spread(ratios):.1%})"])
    note = (f"Gbit/s that leave all ports together; ratio: median of {results['rounds']} rounds "
            "(± half the distance of the quartiles), in each of which both were measured in one "
            f"switch. {results['destinations']} destinations a thread. shapes: the highest rate "
            f"held to {TOLERANCE:.0%}.")
    if results["cpus"] <= 2:
        note += (" This machine has 2 cores: the second thread takes the one that everything else"
                 " uses, vswitchd's other threads and the measurement included, so the ratio is a"
                 " lower bound.")
    return table(["frames", "1 thread", "2 threads", "ratio"], rows) + "\n\n" + note


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw each round's ratio."""
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for name, taken in results["mixes"].items():
        for what, mark in ((FORWARDS, "o"), (SHAPES, "x")):
            ratios = _ratios(taken, what)
            axes.plot(range(1, len(ratios) + 1), ratios, mark, label=f"{name}, {what}")
    axes.axhline(2, color="grey", lw=0.8, ls="--")
    axes.set(xlabel="round", ylabel="two threads by one", ylim=(0, 2.2))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
