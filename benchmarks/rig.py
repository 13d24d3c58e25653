"""Traffic through a switch, and its measurement.

The PMD thread receives from an endless source (net_pcap, which the thread itself
copies packets from) and sends to one port.  Nothing but the switch takes part, so
what is measured is what one core of the switch does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from fbtest import procfs
from fbtest.netns import link_counters
from fbtest.ovs import Ovs
from fbtest.pcap import write_frames
from fbtest.probe import Probe
from fbtest.proc import wait_until
from fbtest.testbed import Host, Port, Testbed

from benchmarks import openflow
from benchmarks.frames import LARGE, Mix, address, frames
from benchmarks.switch import Switch

#: A meter's rate in bit/s that no traffic reaches.
NO_LIMIT = 4e12


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


def pmd_threads(switch: Switch, count: int) -> list[int]:
    """The switch's PMD threads, or none as long as they are not `count`."""
    found = [tid for tid, name in procfs.threads(switch.pid).items() if name.startswith("pmd-")]
    return found if len(found) == count else []


def set_meters(ovs: Ovs, bridge: str, mix: Mix, rates_bps: Iterable[float], burst_frames: int,
               *, there: bool) -> None:
    """A meter for each destination, of the rates given, or changed to them if `there`.

    Rates are in whole kbit/s, bursts in whole kbit.
    """
    burst = -(-burst_frames * max(mix.sizes) * 8 // 1000)
    with openflow.Connection(ovs.env["OVS_RUNDIR"], bridge) as connection:
        connection.set_meters(openflow.MODIFY if there else openflow.ADD,
                              ((n + 1, round(bps / 1000)) for n, bps in enumerate(rates_bps)),
                              burst)


def flows(destinations: Iterable[int], out: Port, *, metered: bool) -> Iterator[str]:
    """OpenFlow flows, one for each destination, to `out`, through its meter or not."""
    for n in destinations:
        meter = f"meter:{n + 1}," if metered else ""
        yield f"ip,nw_dst={address(n)},actions={meter}output:{out.number}"


def tx_packets(switch: Switch, ports: Collection[str]) -> int:
    """Packets that the drivers of `ports` have sent together."""
    total, counts = 0, False
    for line in switch.ctl("dpctl/show", "-s", "netdev@ovs-netdev").splitlines():
        if line.startswith("  port "):
            counts = line.split()[2] in ports
        elif counts and line.startswith("    TX packets:"):
            total += int(line.split(":")[1].split()[0])
    return total


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
            self._pmd, = wait_until(lambda: pmd_threads(switch, 1), "the PMD thread runs")
            os.setpriority(os.PRIO_PROCESS, self._pmd, -20)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.switch.resume()
        self._stack.close()

    def _add_source(self, name: str, destinations: range) -> None:
        capture = self.bed.dir / f"{name}.pcap"
        write_frames(capture, frames(destinations, self.mix, self.run))
        self.bed.add_port(name, f"net_pcap,rx_pcap={capture},infinite_rx=1",
                          **self.mix.options)

    # Forwarding.

    def set_meters(self, rates_bps: Iterable[float], burst_frames: int = 0) -> None:
        """A meter for each destination, of the rates given; those there change in place."""
        set_meters(self.ovs, self.bed.bridge, self.mix, rates_bps, burst_frames,
                   there=self.has_meters)
        self.has_meters = True

    def forward(self, *, metered: bool) -> None:
        """One flow for each destination, through its meter or not."""
        self.ovs.replace_flows(self.bed.bridge, flows(range(self.n), self.out, metered=metered))

    # Measurement.

    def read(self) -> Reading:
        """The counters now."""
        before = time.monotonic()
        sent = self._sent()
        after = time.monotonic()
        run = procfs.run_ns(self.switch.pid, self._pmd)
        assert run is not None, "the PMD thread has ended"
        stats = self.switch.pmd_stats()
        return Reading((before + after) / 2, sent, stats["packets received"],
                       stats["idle cycles"] + stats["processing cycles"], run)

    def _sent(self) -> int:
        if self._host is not None:
            # The driver counts frames that the kernel did not take.
            return link_counters()[self._host.outer].tx_packets
        return tx_packets(self.switch, ["out"])

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
