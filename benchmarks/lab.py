"""A switch to be measured: OVS-DPDK from a build tree, and traffic through it.

One PMD thread receives from an endless source (net_pcap, which the thread
itself copies packets from) and sends to one port.  Nothing but the switch takes
part, so what is measured is what one core of the switch does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from fbtest.netns import link_counters
from fbtest.ovs import Ovs
from fbtest.pcap import FlowSpec, tagged_frame, write_frames
from fbtest.probe import Probe
from fbtest.proc import spare_cpus, wait_until
from fbtest.testbed import Host, Testbed

from benchmarks import openflow

REPO = Path(__file__).resolve().parent.parent
BUILD = Path(os.environ.get("FB_BUILD") or REPO / "build")

#: All there are; a rig keeps this process off the PMD thread's.
_CPUS = ",".join(map(str, sorted(os.sched_getaffinity(0))))

#: The trees that are compared.
OURS, STOCK = "ovs", "ovs-stock"
#: A meter's rate in bit/s that no traffic reaches.
NO_LIMIT = 4e12

# Tells the environment of the sandbox it is started in, and stays until the
# end of its input, which also comes if we are killed.
_INSIDE = """
import json, os, sys
print("BENCH " + json.dumps(dict(os.environ)), flush=True)
sys.stdin.read()
"""


class Switch:
    """A running ovs-vswitchd, of OVS tree build/`tree`.

    Several can run at a time if all but one are `private`: in network namespaces
    of their own, which ports to other namespaces cannot be made from.
    """

    def __init__(self, tree: str = OURS, *, config: Mapping[str, str | int] | None = None,
                 private: bool = False, probe: bool = False, memory_mb: int = 2048):
        if not (BUILD / tree / "vswitchd" / "ovs-vswitchd").exists():
            raise RuntimeError(f"{BUILD / tree} is not built: run 'make ovs-stock'")
        options = ["--memory", str(memory_mb), *(["--private-net"] if private else [])]
        options += ["--probe"] if probe else []
        for key, value in (config or {}).items():
            options += ["--set", f"{key}={value}"]
        self._sandbox = subprocess.Popen(
            ["taskset", "--cpu-list", _CPUS, str(REPO / "utilities" / "fb-sandbox"), "run",
             "--stock-tree", str(BUILD / tree), *options, "--", sys.executable, "-c", _INSIDE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            self.ovs = Ovs(self._environ())
            self.pid = self.ovs.pid()
            # Threads of the switch that are not PMD threads, and those that they
            # start: DPDK puts its own on the PMD thread's core.
            spare = spare_cpus(self.ovs.pmd_cpus())
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), spare)
            self._control = socket.socket(socket.AF_UNIX)
            self._control.settimeout(60)
            self._control.connect(
                str(Path(self.ovs.env["OVS_RUNDIR"], f"ovs-vswitchd.{self.pid}.ctl")))
        except BaseException:
            self.close()
            raise

    def _environ(self) -> dict[str, str]:
        assert self._sandbox.stdout is not None
        for line in self._sandbox.stdout:
            if line.startswith("BENCH "):
                return json.loads(line[len("BENCH "):])
        raise RuntimeError(f"fb-sandbox ended with status {self._sandbox.wait()}")

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, kind: type[BaseException] | None, _exc: BaseException | None,
                 _traceback: TracebackType | None) -> None:
        status = self.close()
        if status and kind is None:
            raise RuntimeError(f"fb-sandbox ended with status {status}")

    def close(self) -> int:
        """End it; returns the sandbox's exit status."""
        assert self._sandbox.stdin is not None
        self.resume()
        self._sandbox.stdin.close()
        try:
            return self._sandbox.wait(60)
        except subprocess.TimeoutExpired:
            self._sandbox.terminate()
            return self._sandbox.wait(60)

    def pause(self) -> None:
        """Stop vswitchd, with its PMD threads, until `resume`."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let vswitchd run again."""
        if hasattr(self, "pid"):
            os.kill(self.pid, signal.SIGCONT)

    def ctl(self, command: str, *args: str) -> str:
        """What ``ovs-appctl`` would print, without starting a program."""
        request = {"id": 0, "method": command, "params": args}
        self._control.sendall(json.dumps(request).encode())
        text = b""
        while True:
            more = self._control.recv(1 << 16)
            if not more:
                raise RuntimeError(f"{command}: ovs-vswitchd is gone")
            text += more
            try:
                reply = json.loads(text)
            except ValueError:
                continue  # There is more to come.
            if reply["error"]:
                raise RuntimeError(f"{command}: {reply['error']}")
            return reply["result"]

    def pmd_stats(self) -> dict[str, int]:
        """The PMD thread's counters, by the names that pmd-stats-show has for them."""
        text = self.ctl("dpif-netdev/pmd-stats-show")
        block = text[text.index("pmd thread "):text.index("main thread")]
        pairs = (line.strip().split(": ", 1) for line in block.splitlines() if ": " in line)
        return {key: int(value.split()[0]) for key, value in pairs
                if value.split()[0].isdigit()}


@dataclass(frozen=True)
class Sink:
    """A port to send to; `driver` is net_null or net_af_packet.

    With `doorbell_ns` each burst takes so much longer: a model of a NIC's.
    """

    name: str
    driver: str
    doorbell_ns: int = 0


NULL = Sink("net_null", "net_null")
#: A veth whose other end is in a namespace of its own: a system call a burst.
AF_PACKET = Sink("af_packet", "net_af_packet")
DOORBELLS = tuple(Sink(f"net_null, {ns} ns doorbell (model)", "net_null", ns)
                  for ns in (300, 900))


@dataclass(frozen=True)
class Mix:
    """The frames of each destination, in turn; bytes without FCS."""

    name: str
    sizes: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Mean bytes of a frame."""
        return sum(self.sizes) / len(self.sizes)

    @property
    def options(self) -> dict[str, int]:
        """What a port needs to be told."""
        largest = max(self.sizes)
        return {"mtu_request": largest - 14} if largest > 1514 else {}


LARGE = Mix("1514 B", (1514,))
JUMBO = Mix("9014 B", (9014,))
SMALL = Mix("64 B", (64,))
# 7:4:1, as evenly as 12 frames allow.
IMIX = Mix("IMIX", (64, 570, 64, 64, 570, 64, 1514, 64, 570, 64, 570, 64))


def address(n: int) -> str:
    """The IPv4 address of destination `n`, counted from 0."""
    return f"10.{73 + (n >> 16)}.{n >> 8 & 255}.{n & 255}"


def frames(destinations: range, mix: Mix, run: int = 1) -> Iterator[bytes]:
    """`run` frames to each destination in turn, as often as all sizes have come."""
    templates = {size: tagged_frame(FlowSpec(0, frame_size=size)) for size in set(mix.sizes)}
    for turn in range(len(mix.sizes)):
        for n in destinations:
            for k in range(turn * run, (turn + 1) * run):
                frame = templates[mix.sizes[(k + n) % len(mix.sizes)]]
                frame[30:34] = bytes(map(int, address(n).split(".")))
                frame[24:26] = b"\0\0"
                words = sum(int.from_bytes(frame[at:at + 2], "big") for at in range(14, 34, 2))
                words = (words & 0xFFFF) + (words >> 16)
                frame[24:26] = (~(words + (words >> 16)) & 0xFFFF).to_bytes(2, "big")
                yield bytes(frame)


@dataclass(frozen=True)
class Reading:
    """Counters at one time.

    `sent` is the sending port's own counter (or the kernel's), behind the
    shaper; `cycles` and `received` are the PMD thread's; `run_ns` is how long
    the kernel let that thread run.
    """

    time_s: float
    sent: int
    received: int
    cycles: int
    run_ns: int


@dataclass(frozen=True)
class Speed:
    """What happened between two readings.

    `pps` is packets a second; `share` the part of the time in which the PMD
    thread had its core, to some milliseconds; `cycles` TSC cycles a packet.
    """

    pps: float
    share: float
    cycles: float


class Rig:
    """Traffic through a switch: a source, flows, meters and a port to send to.

    A source sends `run` frames to each of its destinations in turn, so all of them
    get the rate of the slowest.  A second source has `others` destinations more.
    """

    def __init__(self, switch: Switch, n_destinations: int, mix: Mix = LARGE,
                 sink: Sink = NULL, others: int = 0, run: int = 1):
        self.switch, self.n, self.mix = switch, n_destinations + others, mix
        self.run = run
        self.ovs = switch.ovs
        self._stack = ExitStack()
        self._host: Host | None = None
        self.has_meters = False
        try:
            self.bed = self._stack.enter_context(Testbed(self.ovs.env))
            # A PMD thread should have its core to itself: keep off it.
            self._stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            os.sched_setaffinity(0, self.bed.cpus)
            if sink.driver == "net_af_packet":
                self._host = self.bed.host("out")
                self.out = self._host.port
            else:
                self.out = self.bed.add_port("out", f"{sink.driver},no-rx=1", **mix.options)
            if sink.doorbell_ns:
                self._stack.enter_context(Probe(self.ovs, "out", records=0,
                                                burst_wait_ns=sink.doorbell_ns))
            self._add_source("src", range(n_destinations))
            if others:
                self._add_source("others", range(n_destinations, self.n))
            self._pmd = wait_until(self._pmd_thread, "the PMD thread runs")
            os.setpriority(os.PRIO_PROCESS, self._pmd, -20)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.switch.resume()
        self._stack.close()

    def _pmd_thread(self) -> int:
        for task in Path(f"/proc/{self.switch.pid}/task").iterdir():
            if (task / "comm").read_text().startswith("pmd-"):
                return int(task.name)
        return 0

    def _add_source(self, name: str, destinations: range) -> None:
        capture = self.bed.dir / f"{name}.pcap"
        write_frames(capture, frames(destinations, self.mix, self.run))
        self.bed.add_port(name, f"net_pcap,rx_pcap={capture},infinite_rx=1",
                          **self.mix.options)

    # Forwarding.

    def set_meters(self, rates_bps: Iterable[float], burst_frames: int = 0) -> None:
        """A meter for each destination, of the rates given.

        Meters that are there change in place.  Rates are in whole kbit/s, bursts
        in whole kbit.
        """
        burst = -(-burst_frames * max(self.mix.sizes) * 8 // 1000)
        command = openflow.MODIFY if self.has_meters else openflow.ADD
        with openflow.Connection(self.ovs.env["OVS_RUNDIR"], self.bed.bridge) as connection:
            connection.set_meters(command, ((n + 1, round(bps / 1000)) for n, bps
                                            in enumerate(rates_bps)), burst)
        self.has_meters = True

    def forward(self, *, metered: bool) -> None:
        """One flow for each destination, through its meter or not."""
        self.ovs.replace_flows(self.bed.bridge, (
            f"ip,nw_dst={address(n)},actions={f'meter:{n + 1},' if metered else ''}"
            f"output:{self.out.number}" for n in range(self.n)))

    # Measurement.

    def read(self) -> Reading:
        """The counters now."""
        before = time.monotonic()
        sent = self._sent()
        after = time.monotonic()
        run = Path(f"/proc/{self.switch.pid}/task/{self._pmd}/schedstat").read_text()
        stats = self.switch.pmd_stats()
        return Reading((before + after) / 2, sent, stats["packets received"],
                       stats["idle cycles"] + stats["processing cycles"], int(run.split()[0]))

    def _sent(self) -> int:
        if self._host is not None:
            # The driver counts frames that the kernel did not take.
            return link_counters()[self._host.outer].tx_packets
        lines = iter(self.switch.ctl("dpctl/show", "-s", "netdev@ovs-netdev").splitlines())
        for line in lines:
            if line.split()[:3:2] == ["port", "out"]:
                for line in lines:
                    if line.startswith("    TX packets:"):
                        return int(line.split(":")[1].split()[0])
        raise RuntimeError("the port is gone")

    def measure(self, seconds: float) -> Speed:
        """What leaves in `seconds` from now on."""
        first = self.read()
        time.sleep(seconds)
        return speed(first, self.read())


def speed(first: Reading, last: Reading) -> Speed:
    """What happened between two readings."""
    seconds = last.time_s - first.time_s
    sent = last.sent - first.sent
    received = max(1, last.received - first.received)
    return Speed(sent / seconds, (last.run_ns - first.run_ns) / 1e9 / seconds,
                 (last.cycles - first.cycles) / received)


@contextmanager
def only(switch: Switch, others: Iterable[Switch]) -> Iterator[None]:
    """Let `switch` run and hold the others, which share the PMD thread's core with it."""
    for other in others:
        if other is not switch:
            other.pause()
    switch.resume()
    try:
        yield
    finally:
        for other in others:
            other.resume()
