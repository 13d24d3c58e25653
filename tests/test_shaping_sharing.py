"""VMs that share a port's rate, with the real controller and real traffic.

Three VMs under a port of 300 Mbit/s: guaranteed 100, 50 and 50, weights 1, 2 and 1.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pytest
from fbtest.analysis import max_excess, packet_rate
from fbtest.clock import CaptureClock
from fbtest.controller import Controller
from fbtest.pcap import FlowSpec, Packets
from fbtest.proc import wait_until
from fbtest.testbed import Recorder, Testbed

from shaping import MBIT, MODULUS, MTU, NS, favour_pmds, run_for, write_results

PORT = 300 * MBIT
MINIMUM = {"a": 100 * MBIT, "b": 50 * MBIT, "c": 50 * MBIT}
FLOW = {"a": 1, "b": 2, "c": 3}
FILE = """
unknown_sources: forward
ports: {out: {max-rate: 300Mbps}}
forwarding:
  mode: static
  entries: [%s]
tenants:
  t:
    vms:
      a: {port: a, min-rate: 100Mbps, max-rate: 300Mbps, weight: 1}
      b: {port: b, min-rate: 50Mbps, max-rate: 300Mbps, weight: 2}
      c: {port: c, min-rate: 50Mbps, max-rate: 300Mbps, weight: 1}
"""
#: Seconds in which a division settles: what waited for the port is drained,
#: and what the others used before is forgotten, in a few tenths of one.
SETTLE_S = 0.7
PHASE_S = 1.5
#: The length of windows in which the guarantee is looked for.
WINDOW_S = 0.05
#: How many bytes any window may have above the port's rate: what the port catches up on
#: while packets wait for it (10 ms), and the packets that the PMD thread had in hand
#: (max-batch, 128) when it was held up: they are on record when they have left.
EXCESS = PORT / 8 * 0.01 + 128 * 1514
#: As in test_shaping_tcp: others on the machine only ever take from TCP.
ATTEMPTS = 3


def start_controller(bed: Testbed, entries: str) -> Controller:
    path = bed.dir / "tenants.yaml"
    path.write_text(FILE % entries)
    controller = Controller(path, bed.ovs, bed.bridge, bed.cpus)
    bed._stack.callback(controller.close)
    controller.connect()
    return controller


@dataclass
class Sleepers:
    """VMs as endless sources in the PMD thread; asleep are those that a flow drops."""

    bed: Testbed
    destinations: int = 1  # of `a`

    def __post_init__(self) -> None:
        for i, name in enumerate("abc"):
            number = self.destinations if name == "a" else 1
            # Twice the port's rate, so that it is never short of packets though
            # the PMD thread, which makes them, is at times held up.
            self.bed.source(
                name, [FlowSpec(FLOW[name], dst_ip=f"10.73.{i * 8 + j // 250}.{j % 250 + 1}")
                       for j in range(number)],
                packets_per_flow=MODULUS // number, rate=2 * PORT)

    def _match(self, name: str) -> str:
        return f"table=0,priority=30000,in_port={self.bed.ports[name].number}"

    def asleep(self, *names: str) -> None:
        self.bed.ovs.add_flows(self.bed.bridge,
                               [f"{self._match(name)},actions=drop" for name in names])

    def awake(self, name: str) -> int:
        """Wake it; gives the time before, CLOCK_MONOTONIC in ns."""
        before = time.monotonic_ns()
        self.bed.ovs.ofctl("del-flows", "--strict", self.bed.bridge, self._match(name))
        return before


@dataclass
class Phase:
    """What should be so from `start` (ns) on."""

    what: str
    start: int
    rates: dict[str, int]
    wakes: str = ""


def guarantee_delay(mine: Packets, all_: Packets, rate: float) -> float:
    """After how many s from its first packet a VM has its guarantee for good.

    From then on it has `rate`'s part of what leaves the port in every window of WINDOW_S.
    (Its part, because on a small machine the PMD thread, and so
    the port as a whole, is held up for milliseconds, and catches up.)  Two MTU are
    allowed: whole packets leave, and the wheel's slots are as far apart as two of a flow.
    The first packet leaves at once, as its meter has not been used for long.
    """
    start, end = int(mine.time_ns[0]), int(mine.time_ns[-1] - WINDOW_S * NS)
    begins = np.arange(start, end, NS // 1000)

    def carried(packets: Packets) -> np.ndarray:
        total = np.concatenate([[0], np.cumsum(packets.length)])
        first, last = (np.searchsorted(packets.time_ns, begins + int(at * NS))
                       for at in (0, WINDOW_S))
        return total[last] - total[first]

    short = np.flatnonzero(carried(mine) < carried(all_) * rate / PORT - 2 * MTU)
    return float(begins[short[-1]] - start) / NS + 0.001 if len(short) else 0.0


def test_udp(testbed: Testbed) -> None:
    """One alone, two by weight, a third that wakes up, a controller that dies.

    Floods, judged by the times at which packets left the port.  In no attempt may more
    than the port's rate leave; a controller that had no processor divides late.
    """
    ovs = testbed.ovs
    vms = Sleepers(testbed)
    out = testbed.recorder("out")
    ovs.set_config(meter_shaping=True)
    ovs.set_qos("out", "flowbundler", max_rate=PORT)
    for _ in range(ATTEMPTS):
        results, wrong = share_in_turns(testbed, vms, out)
        if not wrong:
            break
    write_results("sharing", results)
    assert not wrong


def share_in_turns(testbed: Testbed, vms: Sleepers, out: Recorder
                   ) -> tuple[dict[str, float], list[str]]:
    """Do it once; gives what was measured, and what of it was not as it should be."""
    ovs = testbed.ovs
    controller = start_controller(testbed, "{to: 10.73.0.0/16, port: out}")
    vms.asleep("a", "b", "c")
    favour_pmds(testbed)
    clock = CaptureClock(out.path)
    phases: list[Phase] = []

    def phase(what: str, wakes: str = "", seconds: float = PHASE_S, **mbps: int) -> None:
        start = vms.awake(wakes) if wakes else time.monotonic_ns()
        phases.append(Phase(what, start, {n: r * MBIT for n, r in mbps.items()}, wakes))
        run_for(ovs, seconds)

    run_for(ovs, 0.3)
    phase("a alone", "a", a=300)
    clock.mark()
    phase("a and b by weight", "b", a=100, b=200)
    phase("all", "c", a=100, b=133, c=67)
    vms.asleep("b")
    phase("a and c by weight", a=150, c=150)
    vms.asleep("a")
    phase("c alone", c=300)
    # The controller dies as in a crash; the switch keeps the last division.
    controller._process.close()
    phase("a wakes, no controller", "a")
    again = start_controller(testbed, "{to: 10.73.0.0/16, port: out}")
    phase("a and c, new controller", a=150, c=150)
    end = time.monotonic_ns()
    clock.mark()
    sharing = next(iter(again.get("/v1/status")["switches"].values()))["sharing"]

    again._process.close()

    times = clock.apply(out.read())
    results: dict[str, float] = {"poll_ms": sharing["poll_ms"]}
    wrong: list[str] = []

    def should(be: bool, what: str) -> None:
        if not be:
            print(f"  not as it should be: {what}")
            wrong.append(what)

    for item, following in zip(phases, [*phases[1:], None], strict=True):
        until = following.start if following else end
        steady = item.start + int(SETTLE_S * NS)
        measured = {name: packet_rate(part.time_ns, part.length, steady, until) / MBIT
                    for name, flow in FLOW.items()
                    for part in [times.of_flow(flow).between(steady, until)] if len(part)}
        print(f"{item.what}: " + ", ".join(f"{n} {r:.1f}" for n, r in measured.items()))
        results |= {f"{item.what}: {name}": rate for name, rate in measured.items()}
        # 3 %: 2 % are what a division of all that there is may be short of
        # while it drains, 1 % the smallest change that is sent at once.
        for name, rate in item.rates.items():
            should(measured.get(name, 0) * MBIT == pytest.approx(rate, rel=0.03),
                   f"{item.what}: {name} has {measured.get(name, 0):.1f} Mbit/s")
        assert set(measured) == set(item.rates or "ac")
        whole = times.between(item.start, until)
        worst = max_excess(whole.time_ns, whole.length, PORT)
        print(f"  at most {worst.bytes / 1000:.0f} kB above 300 Mbit/s in any window")
        results[f"{item.what}: excess_bytes"] = worst.bytes
        assert worst.bytes <= EXCESS, item.what
        if item.rates:
            total = packet_rate(whole.time_ns, whole.length, steady, until)
            should(total >= 0.97 * PORT, f"{item.what}: {total / MBIT:.1f} Mbit/s in all")
        if item.wakes and item.rates:
            mine = times.of_flow(FLOW[item.wakes]).between(item.start, until)
            delay = guarantee_delay(mine, whole, MINIMUM[item.wakes])
            soon = mine.between(int(mine.time_ns[0]), int(mine.time_ns[0]) + NS // 4)
            rate = soon.length.sum() * 8 / 0.25
            print(f"  {item.wakes} has its guarantee after {delay * 1000:.1f} ms, and "
                  f"{rate / MBIT:.1f} Mbit/s in the first 0.25 s")
            results[f"{item.what}: guarantee_ms"] = delay * 1000
            should(delay <= 0.1, f"{item.what}: guarantee after {delay:.3f} s")
            should(rate >= MINIMUM[item.wakes],
                   f"{item.what}: {rate / MBIT:.1f} Mbit/s at first")
    return results, wrong


def test_a_borrower_with_many_destinations(testbed: Testbed) -> None:
    """What has been lent to 1000 FIFOs is given back within 100 ms, too.

    The port's turns go round the FIFOs, so one that wakes beside 1000 has next to nothing
    until the borrower's meter has been cut down, and what it had let pass has left.
    """
    ovs = testbed.ovs
    vms = Sleepers(testbed, destinations=1000)
    out = testbed.recorder("out")
    ovs.set_config(meter_shaping=True)
    ovs.set_qos("out", "flowbundler", max_rate=PORT)
    start_controller(testbed, "{to: 10.73.0.0/16, port: out}")
    vms.asleep("a", "b", "c")
    favour_pmds(testbed)
    clock = CaptureClock(out.path)
    run_for(ovs, 0.3)
    vms.awake("a")
    clock.mark()
    wakes = []
    for _ in range(5):
        run_for(ovs, SETTLE_S)
        start = vms.awake("b")
        run_for(ovs, 0.4)
        wakes.append((start, time.monotonic_ns()))
        vms.asleep("b")
    clock.mark()
    times = clock.apply(out.read())
    delays = []
    for start, end in wakes:
        whole = times.between(start, end)
        delays.append(guarantee_delay(whole.of_flow(FLOW["b"]), whole, MINIMUM["b"]))
    print("guarantee after " + ", ".join(f"{delay * 1000:.0f}" for delay in delays) + " ms")
    write_results("sharing", {"1000 destinations: guarantee_ms": [d * 1000 for d in delays]})
    # Each is two polls and meter-shaping-max-delay at most, 90 ms, if the controller runs
    # when it should; the median is not that of a moment when the machine was busy.
    assert float(np.median(delays)) <= 0.1, delays


def test_tcp(testbed: Testbed) -> None:
    """The same by TCP, judged by the kernel's counters of the veth pairs.

    How much of 300 Mbit/s one TCP connection gets on a machine of two cores depends on
    what else it does, so it is measured first, with a meter and a port of that rate.
    """
    ovs = testbed.ovs
    hosts = {name: testbed.host(name) for name in "abc"}
    web = testbed.host("web")
    ovs.set_config(meter_shaping=True)
    ovs.set_qos("web", "flowbundler", max_rate=PORT)
    ovs.set_meter(testbed.bridge, 1, PORT)
    testbed.set_flows(vm_meters={"a": 1})
    favour_pmds(testbed)
    with testbed.sampler() as sampler:
        fixed = testbed.tcp(hosts["a"], web, seconds=4)
        assert not fixed.result().error
    alone = sampler.series("web.tx_bytes").rate(fixed.started + 1, fixed.started + 4) / MBIT
    print(f"a fixed rate of 300: {alone:.1f}")
    part = min(alone / 300, 1.0)
    entries = ", ".join(f"{{to: {host.ip}, port: {host.name}}}"
                        for host in (*hosts.values(), web))
    controller = start_controller(testbed, entries)
    expected = {1: {"a": 300}, 2: {"a": 100, "b": 200}, 3: {"a": 100, "b": 133, "c": 67}}
    step, settle = 3.0, 1.2
    results: dict[str, float] = {"tcp, fixed rate of 300": alone}
    for _ in range(ATTEMPTS):
        transfers = []
        with testbed.sampler(0.01) as sampler:
            begin = time.monotonic()
            for i, host in enumerate(hosts.values()):
                wait_until(lambda at=begin + i * step: time.monotonic() >= at, "the next phase",
                           2 * step, 0.01)
                transfers.append(testbed.tcp(host, web, seconds=(3 - i) * step + 1,
                                             port=5201 + i))
            run_for(ovs, step)
        assert not any(transfer.result().error for transfer in transfers)
        good = True
        for i, shares in expected.items():
            started = transfers[i - 1].started
            window = started + settle, started + step - 0.3
            total = sampler.series("web.tx_bytes").rate(*window) / MBIT
            # What comes in from a host is what leaves in the long run: TCP waits, and
            # is hardly ever dropped.
            got = {name: sampler.series(f"{name}.rx_bytes").rate(*window) / MBIT
                   for name in shares}
            print(f"{i} of 3: total {total:.1f}, "
                  + ", ".join(f"{name} {rate:.1f}" for name, rate in got.items()))
            results |= {f"tcp, {i} of 3: {name}": rate for name, rate in got.items()}
            # No attempt may get more, 0.5 % for the counters' stamps.
            assert total <= 300 * 1.005
            # 3 %, and 5 % for one of several: between runs as such the fixed rate varies
            # by as much.
            good &= total >= 0.97 * part * 300
            good &= all(got[name] >= 0.95 * part * rate for name, rate in shares.items())
        for name, transfer in zip("bc", transfers[1:], strict=True):
            series = sampler.series(f"{name}.rx_bytes")
            # iperf3 first talks over a connection of its own: the data begins with
            # the first 50 kB.
            began = float(series.time[np.searchsorted(series.total - series.at(transfer.started),
                                                      50_000)])
            rate = series.rate(began + 0.1, began + 0.3)
            print(f"{name}: {rate / MBIT:.1f} Mbit/s from 100 ms on")
            results[f"tcp, {name} wakes: from 100 ms on"] = rate / MBIT
            good &= rate >= part * MINIMUM[name]
        if good:
            break
    write_results("sharing", results)
    assert good, controller.log()
