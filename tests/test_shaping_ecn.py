"""ECN: a TCP flow that is told in time waits near the threshold, and loses nothing.

One connection passes a limit with marking and without; packets of a request and
response beside it, which are not ECT, wait in the same queue and show for how
long.  build/test-results/shaping-ecn.json has all figures; docs/waiting.md
explains them.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from fbtest.netns import parse_snmp
from fbtest.proc import wait_until
from fbtest.testbed import Host, Testbed

from shaping import MBIT, favour_pmds, write_results

#: Until TCP has found its rate, and what is measured then.
WARM_UP = 1.5
SECONDS = 5.0
#: Other programs on the machine's two cores can only add to a round trip and
#: take rate away: the best of some attempts counts.
ATTEMPTS = 3
METER = 1


@dataclass
class Figures:
    """What one transfer reached, in bit/s, packets and ms.

    `marked` are the packets with CE that the receiver's kernel counted,
    `header_errors` those that it refused for their IP header.
    """

    port: float
    goodput: float
    retransmits: int
    dropped: int
    marked: int
    marked_by_switch: int
    header_errors: int
    rtt_ms: dict[str, float]


def set_ecn(host: Host, on: bool) -> None:
    """Let `host` use ECN in TCP connections, or refuse it."""
    host.ns.exec("sysctl", "-qw", f"net.ipv4.tcp_ecn={int(on)}")


def ip_counter(host: Host, table: str, protocol: str, counter: str) -> int:
    """A counter in one of the tables in /proc/net of `host`."""
    return parse_snmp(Path(f"/proc/{host.ns.pid}/net/{table}").read_text())[protocol][counter]


class Limit:
    """A rate for what goes to `port`: that of a meter or that of the port itself."""

    def __init__(self, bed: Testbed, port: str, what: str, rate: int):
        self.bed, self.port, self.what, self.rate = bed, port, what, rate
        bed.ovs.set_config(meter_shaping=True)
        bed.ovs.set_qos(port, "flowbundler")
        if what == "meter":
            bed.ovs.set_meter(bed.bridge, METER, rate)
        bed.set_flows(vm_meters={"vm": METER} if what == "meter" else {})
        self.set_threshold(0)

    def set_threshold(self, threshold_us: int) -> None:
        """Mark packets that wait for longer than that; 0: none."""
        if self.what == "meter":
            self.bed.ovs.set_config(meter_shaping_ecn_threshold=threshold_us)
        else:
            self.bed.ovs.set_qos(self.port, "flowbundler", max_rate=self.rate,
                                 ecn_threshold=threshold_us)

    def dropped(self) -> int:
        """Packets that would have waited for too long."""
        shown = self.bed.ovs.flowbundler_show(self.port)[self.port]
        drops = sum(n for key, n in shown.items() if key.startswith("drop_"))
        if self.what == "meter":
            drops += self.bed.ovs.meter_stats(self.bed.bridge)[METER].drops
        return drops

    def marked(self) -> int:
        """Packets marked so far."""
        if self.what == "meter":
            return self.bed.ovs.coverage().get("datapath_meter_ecn_marked", 0)
        return self.bed.ovs.flowbundler_show(self.port)[self.port]["ecn_marked"]


def transfer(limit: Limit, vm: Host, to: Host) -> Figures:
    """One CUBIC connection from `vm` to `to`, and requests and responses beside it."""
    bed = limit.bed
    favour_pmds(bed)

    def counters() -> list[int]:
        return [vm.retransmits(), limit.dropped(), ip_counter(to, "netstat", "IpExt", "InCEPkts"),
                limit.marked(), ip_counter(to, "snmp", "Ip", "InHdrErrors")]

    before = counters()
    with bed.sampler(0.025) as sampler:
        begin = time.monotonic()
        tcp = bed.tcp(vm, to, seconds=WARM_UP + SECONDS + 0.2, extra=("--congestion", "cubic"))
        time.sleep(WARM_UP)
        ping = bed.pingpong(vm, to, interval=0.01)
        time.sleep(SECONDS)
        trips = ping.result()
        result = tcp.result()
    assert not result.error, result.error
    # PMD threads hand their coverage counters in once a second.
    arrived = ip_counter(to, "netstat", "IpExt", "InCEPkts") - before[2]
    wait_until(lambda: limit.marked() - before[3] >= arrived, "the switch's count of marks")
    assert len(trips.rtt_us) > 50, f"only {len(trips.rtt_us)} answers"
    return Figures(
        sampler.series(f"{to.name}.tx_bytes").rate(begin + WARM_UP, begin + WARM_UP + SECONDS),
        result.goodput_between(WARM_UP, WARM_UP + SECONDS),
        *(after - b for after, b in zip(counters(), before, strict=True)),
        {f"p{q}": round(trips.percentile(q) / 1000, 3) for q in (5, 50, 95, 99)})


def good(figures: Figures, rate: int, threshold_us: int) -> bool:
    """Whether a marked flow has its rate, without a loss, and waits for about the threshold.

    1 % of the rate, as without ECN: see test_shaping_tcp.py.  The switch is never
    idle, for after a mark CUBIC keeps 70 % of its window (RFC 9438, section
    4.6): 70 % of the threshold still wait.  Programs that share
    two cores are some ms late themselves, so thresholds of this test are a
    multiple of that.  The half of the packets that wait longest may wait for a
    little more than the threshold, since the window grows until a mark is
    answered.

    The switch drops nothing, in no attempt.  A driver's ring overflows when its
    thread does not run, and a probe for a lost tail (RFC 8985) is sent when an
    answer is late: a few retransmissions have nothing to do with the limit.
    """
    return (figures.port >= 0.99 * rate and figures.retransmits <= 3
            and figures.rtt_ms["p50"] <= 1.1 * threshold_us / 1000)


def with_and_without(bed: Testbed, what: str, rate: int, threshold_us: int
                     ) -> tuple[Figures, Figures]:
    """The same transfer without marking and with it."""
    vm, web = bed.host("vm"), bed.host("web")
    limit = Limit(bed, "web", what, rate)
    set_ecn(vm, False)
    set_ecn(web, False)
    tries: list[Figures] = []
    for _ in range(ATTEMPTS):
        tries.append(transfer(limit, vm, web))
        print(f"without: {tries[-1]}")
        if tries[-1].port >= 0.99 * rate and tries[-1].rtt_ms["p50"] > threshold_us / 1000:
            break
    # One whose frame a driver's ring lost does not fill the queue.
    tries = [t for t in tries if t.port >= 0.99 * rate]
    # That the shaper lets it have its rate is test_shaping_tcp.py's matter.
    assert tries, f"too busy a machine: no TCP connection gets {rate / MBIT:.0f} Mbit/s"
    without = max(tries, key=lambda t: t.rtt_ms["p50"])

    set_ecn(vm, True)
    set_ecn(web, True)
    limit.set_threshold(threshold_us)
    for _ in range(ATTEMPTS):
        marked = transfer(limit, vm, web)
        print(f"with: {marked}")
        if good(marked, rate, threshold_us):
            break
    name = f"{what} {rate // MBIT} Mbit/s"
    write_results("shaping-ecn", {
        f"{name}, cubic, no ECN": asdict(without),
        f"{name}, cubic, {threshold_us} us": asdict(marked)})
    return without, marked


def check(rate: int, threshold_us: int, without: Figures, marked: Figures) -> None:
    """What a flow that is marked must reach, beside one that is not."""
    threshold_ms = threshold_us / 1000
    assert marked.port <= 1.01 * rate and marked.dropped == 0
    assert good(marked, rate, threshold_us)

    # The receiver counts the marks that the switch does, except those of frames
    # that a driver's ring lost, see good(); a wrong checksum would lose all.
    assert marked.marked > 0 and marked.header_errors == 0
    assert 0 <= marked.marked_by_switch - marked.marked <= 10
    assert without.marked == without.marked_by_switch == 0
    # Nothing waits as long as without: some ms for a poll that is late, and a
    # window's growth in the round trip after the mark.
    assert marked.rtt_ms["p99"] < threshold_ms + 10
    assert marked.rtt_ms["p50"] < without.rtt_ms["p50"]


@pytest.mark.parametrize(("what", "rate", "threshold_us"), [
    ("meter", 100 * MBIT, 20000),
    pytest.param("meter", 1000 * MBIT, 15000, marks=pytest.mark.full),
    pytest.param("port", 100 * MBIT, 20000, marks=pytest.mark.full),
    ("port", 1000 * MBIT, 15000),
])
def test_cubic(testbed: Testbed, what: str, rate: int, threshold_us: int) -> None:
    check(rate, threshold_us, *with_and_without(testbed, what, rate, threshold_us))
