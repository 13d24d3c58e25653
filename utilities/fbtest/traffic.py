"""Traffic between hosts: iperf3 TCP, UDP floods, request and response."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .proc import Background, CommandError, wait_until

if TYPE_CHECKING:
    from .testbed import Host

_PACKAGE_PARENT = str(Path(__file__).resolve().parent.parent)


@dataclass
class TcpInterval:
    """One of iperf3's report intervals; times since the test's start."""

    start_s: float
    end_s: float
    bits_per_second: float


@dataclass
class TcpResult:
    """What iperf3 saw.

    `goodput` is the payload the receiver got, in bit/s over its whole time;
    `retransmits` the sender's; `intervals` the receiver's.
    """

    goodput: float
    retransmits: int
    intervals: list[TcpInterval] = field(default_factory=list)
    error: str = ""

    def goodput_between(self, start_s: float, end_s: float) -> float:
        """Goodput over the intervals that lie within the given times."""
        inside = [i for i in self.intervals
                  if i.start_s >= start_s and i.end_s <= end_s]
        seconds = sum(i.end_s - i.start_s for i in inside)
        if seconds <= 0:
            return 0.0
        return sum(i.bits_per_second * (i.end_s - i.start_s)
                   for i in inside) / seconds


def _parse(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError:
        return {}


def parse_iperf3(client: str, server: str) -> TcpResult:
    """Join the JSON of iperf3's two ends; either may have been cut short."""
    sent, received = _parse(client), _parse(server)
    end = sent.get("end", {}).get("sum_sent", {})
    retransmits = end.get("retransmits")
    if retransmits is None:
        retransmits = sum(i["sum"].get("retransmits", 0)
                          for i in sent.get("intervals", []))
    intervals = [
        TcpInterval(i["sum"]["start"], i["sum"]["end"],
                    i["sum"]["bits_per_second"])
        for i in (received or sent).get("intervals", [])
        if i["sum"]["end"] > i["sum"]["start"]
    ]
    seconds = sum(i.end_s - i.start_s for i in intervals)
    bits = sum(i.bits_per_second * (i.end_s - i.start_s) for i in intervals)
    total = received.get("end", {}).get("sum_received", {})
    goodput = total.get("bits_per_second") or (
        bits / seconds if seconds else 0.0)
    return TcpResult(goodput, int(retransmits), intervals,
                     sent.get("error", "" if sent else "no report"))


class IperfTcp:
    """An iperf3 TCP transfer from `src` to `dst`; starts at once."""

    def __init__(self, src: Host, dst: Host, *, seconds: float,
                 port: int = 5201, streams: int = 1, interval: float = 0.5,
                 extra: tuple[str, ...] = ()):
        # iperf3 takes whole seconds only, and would round down.
        self.src, self.dst, self.seconds = src, dst, math.ceil(seconds)
        cpus = src.cpus
        self._client: Background | None = None
        self._server = dst.ns.spawn(
            "iperf3", "--server", "--one-off", "--json", "--port", str(port),
            "--interval", str(interval), name=f"iperf3 server {dst.name}",
            cpus=cpus)
        try:
            wait_until(lambda: self._listening(port), "iperf3 server")
            self.started = time.monotonic()
            self._client = src.ns.spawn(
                "iperf3", "--client", dst.ip, "--json", "--port", str(port),
                "--time", str(self.seconds), "--interval", str(interval),
                "--parallel", str(streams), *extra,
                name=f"iperf3 client {src.name}", cpus=cpus)
        except BaseException:
            self.close()
            raise

    def _listening(self, port: int) -> bool:
        self._server.check_running()
        return self.dst.ns.listening(port)

    def check(self) -> None:
        """Raise if the client has ended before its time."""
        if (self._client is not None and not self._client.running()
                and time.monotonic() < self.started + self.seconds - 0.5):
            raise CommandError(self._client.argv,
                               self._client.popen.returncode,
                               self._client.stderr()
                               or _parse(self._client.stdout()).get(
                                   "error", self._client.stdout()))

    def result(self, grace: float = 5.0) -> TcpResult:
        """Wait for the end and read both ends' reports.

        iperf3 ends its tests over a TCP connection of its own that passes
        the limiter too and may be starved; after `grace` seconds it is told
        to stop and reports what it has.
        """
        assert self._client is not None
        left = self.started + self.seconds + grace - time.monotonic()
        for process, patience in ((self._client, left), (self._server, 1.0)):
            try:
                process.wait(max(patience, 0.1))
            except CommandError:
                process.stop(first=signal.SIGINT)
        result = parse_iperf3(self._client.stdout(), self._server.stdout())
        self.close()
        return result

    def close(self) -> None:
        """End both programs, if they still run."""
        if self._client is not None:
            self._client.close()
        self._server.close()


class Agent:
    """One of `fbtest.agents` in a host's namespace; ready on return."""

    def __init__(self, host: Host, *args: str):
        path = os.pathsep.join(
            p for p in (_PACKAGE_PARENT, os.environ.get("PYTHONPATH")) if p)
        self._process = host.ns.spawn(
            sys.executable, "-m", "fbtest.agents", *args,
            name=f"{args[0]} {host.name}", cpus=host.cpus,
            env={**os.environ, "PYTHONPATH": path})
        try:
            wait_until(self._is_ready, self._process.name)
        except BaseException:
            self.close()
            raise

    def _is_ready(self) -> bool:
        if self._process.stdout().startswith("ready"):
            return True
        self._process.check_running()
        return False

    def running(self) -> bool:
        """Whether it has not ended by itself."""
        return self._process.running()

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Its report; ends it first, or waits `timeout` s for its end."""
        if timeout is None:
            self._process.stop()
        else:
            self._process.wait(timeout)
        lines = self._process.stdout().splitlines()
        error = self._process.stderr()
        self.close()
        if len(lines) < 2:
            raise CommandError(self._process.argv,
                               self._process.popen.returncode, error)
        return json.loads(lines[-1])

    def close(self) -> None:
        """End it, if it still runs."""
        self._process.close()


class UdpFlood:
    """A UDP flood from `src`; starts at once.

    `dst` is a host, in which a sink is started, or addresses that the host
    has a route to (`Host.route`); several take turns, packet by packet.
    `rate` is bit/s of whole frames (without FCS), of `frame_size` bytes.
    Packets are tagged with a flow number (`flow` for the first destination,
    and counting up) and a sequence number in the flow.
    """

    def __init__(self, src: Host, dst: Host | Sequence[str], *, rate: float,
                 frame_size: int = 1514, port: int = 9009, flow: int = 1,
                 seconds: float = 0):
        self._sink: Agent | None = None
        if isinstance(dst, Sequence):
            addresses = ",".join(dst)
        else:
            addresses = dst.ip
            self._sink = Agent(dst, "sink", "--port", str(port))
        try:
            self._flood = Agent(
                src, "flood", "--to", addresses, "--port", str(port),
                "--rate", f"{rate:.0f}", "--frame-size", str(frame_size),
                "--flow", str(flow), "--seconds", f"{seconds:g}")
        except BaseException:
            if self._sink is not None:
                self._sink.close()
            raise

    def check(self) -> None:
        """Raise if the sender has ended."""
        if not self._flood.running():
            self.result()
            raise RuntimeError("the UDP flood ended before its time")

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """End it, or wait `timeout` s for the end of its `seconds`.

        Returns datagrams `sent`, `failed` (refused by the host's own queue)
        and `skipped` (due while the program did not run), and `frame_bytes`
        sent.
        """
        result = self._flood.result(timeout)
        self.close()
        return result

    def close(self) -> None:
        """End both programs, if they still run."""
        self._flood.close()
        if self._sink is not None:
            self._sink.close()


@dataclass
class RoundTrips:
    """Round-trip times in microseconds, and requests without an answer."""

    rtt_us: list[float]
    lost: int

    def percentile(self, q: float) -> float:
        """The q-th percentile in microseconds."""
        return float(np.percentile(self.rtt_us, q)) if self.rtt_us else 0.0


class PingPong:
    """Requests from `src`, answered by `dst`, one at a time, over UDP."""

    def __init__(self, src: Host, dst: Host, *, interval: float = 0.01,
                 count: int = 0, frame_size: int = 98, port: int = 9007):
        self._echo = Agent(dst, "echo", "--port", str(port))
        try:
            self._ping = Agent(
                src, "ping", "--to", dst.ip, "--port", str(port),
                "--interval", str(interval), "--count", str(count),
                "--frame-size", str(frame_size))
        except BaseException:
            self._echo.close()
            raise

    def result(self, timeout: float | None = None) -> RoundTrips:
        """End it, or wait `timeout` s for `count` requests to be done."""
        report = self._ping.result(timeout)
        self._echo.close()
        return RoundTrips(report["rtt_us"], report["lost"])

    def close(self) -> None:
        """End both programs, if they still run."""
        self._ping.close()
        self._echo.close()
