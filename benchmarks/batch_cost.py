"""What a packet costs to send, by the size of the burst it is sent in.

As in the FlowBundler paper's figure 3b.  net_null's transmit does nothing but
free the packets; net_af_packet makes a system call a burst; a PCIe doorbell is
modelled by a wait after each burst, since this machine has no NIC.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
from fbtest.netns import Namespace, add_veth, delete_link, remove_stale, unique_name
from fbtest.proc import Background
from fbtest.proc import run as run_command

from benchmarks.results import progress, table
from benchmarks.switch import BUILD, REPO

TITLE = "Cost of a packet by the size of its burst"

BURSTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DOORBELLS_NS = (300, 900)
#: Where the PMD thread of the other benchmarks runs.
CORE = 1


def build() -> Path:
    """Compile the program that sends; returns its path."""
    program, source = BUILD / "bench" / "tx-burst", REPO / "benchmarks" / "tx-burst.c"
    flags = run_command("pkg-config", "--cflags", "--libs", "libdpdk").split()
    program.parent.mkdir(parents=True, exist_ok=True)
    # The last -march counts: that of the rest of the build.
    subprocess.run(["gcc", "-O2", "-g", "-Wall", "-Wextra", "-o", str(program), str(source),
                    *flags, "-march=native"], check=True)
    return program


@contextmanager
def veth() -> Iterator[str]:
    """A veth whose other end is in a namespace; its name."""
    remove_stale()
    with ExitStack() as stack:
        namespace = Namespace(unique_name("bc"))
        stack.callback(namespace.close)
        name = unique_name("bcv")
        stack.callback(delete_link, name)
        add_veth(name, namespace, "eth0", "02:fb:00:00:00:01", "10.71.0.1/24")
        yield name


def measure(program: Path, device: str, wait_ns: int, seconds: float) -> dict[int, float]:
    """Cycles a packet, by the size of the burst."""
    argv = [str(program), "--no-pci", "--no-huge", "-m", "64", "--no-shconf", "--no-telemetry",
            "-l", str(CORE), f"--vdev={device}", "--", str(wait_ns), str(seconds),
            *map(str, BURSTS)]
    process = Background(argv, name="tx-burst")
    try:
        if process.wait(60 + 2 * seconds * len(BURSTS)):
            raise RuntimeError(process.stderr())
        lines = [line.split() for line in process.stdout().splitlines() if line[:1].isdigit()]
    finally:
        process.close()
    return {int(burst): int(cycles) / int(packets) for burst, packets, cycles, _ in lines}


def run(quick: bool) -> dict[str, Any]:
    """Measure all devices, round by round."""
    rounds, seconds = (1, 0.1) if quick else (5, 0.5)
    program = build()
    taken: dict[str, dict[int, list[float]]] = {}
    with veth() as interface:
        devices = [("net_null", "net_null0", 0)]
        devices += [(f"net_null, {ns} ns doorbell (model)", "net_null0", ns)
                    for ns in DOORBELLS_NS]
        devices += [("af_packet", "net_af_packet0,iface=" + interface + ",qpairs=1,"
                     "blocksz=4096,framesz=2048,framecnt=512", 0)]
        for turn in range(rounds):
            for name, device, wait_ns in devices:
                progress(f"batch-cost: round {turn + 1} of {rounds}, {name}")
                for burst, cycles in measure(program, device, wait_ns, seconds).items():
                    taken.setdefault(name, {}).setdefault(burst, []).append(cycles)
    return {"seconds": seconds, "rounds": rounds, "cycles": taken}


def _medians(results: dict[str, Any]) -> dict[str, list[float]]:
    """Cycles a packet of each device, in the order of BURSTS (keys from JSON are text)."""
    return {name: [median(values) for values in bursts.values()]
            for name, bursts in results["cycles"].items()}


def text(results: dict[str, Any]) -> str:
    """The medians as a table."""
    rows = [[name, *(f"{value:.0f}" for value in values), f"{values[0] / values[-1]:.1f}"]
            for name, values in _medians(results).items()]
    return (table(["packets in a burst", *map(str, BURSTS), "1 to 256"], rows)
            + f"\n\nTSC cycles a packet of {results['seconds']} s each, medians of "
            f"{results['rounds']} rounds; the last column is the ratio of the first to the "
            "last. 1514 B frames; taking buffers from the pool included.")


def plot(results: dict[str, Any], path: Path) -> None:
    """Cycles a packet over the size of the burst."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, values in _medians(results).items():
        axes.plot(BURSTS, values, "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(BURSTS, BURSTS)
    axes.set(xlabel="packets in a burst", ylabel="TSC cycles a packet")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
