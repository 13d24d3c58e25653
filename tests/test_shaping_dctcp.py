"""DCTCP (RFC 8257) through a meter that marks: no loss, and a wait near the threshold.

Sender and receiver are virtual machines with a kernel that has DCTCP; the
receiver must have it, too, since it echoes each mark by itself (section 3.2).
docs/waiting.md has the figures.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import numpy as np
from fbtest.guest import Guest
from fbtest.netns import parse_snmp
from fbtest.proc import wait_until
from fbtest.testbed import Testbed, VhostPort
from fbtest.traffic import parse_iperf3

from shaping import MBIT, favour_pmds, write_results

#: QEMU emulates both processors, on one core: more than this takes too long.
RATE = 100 * MBIT
#: A multiple of the time for which an emulated machine may not run.
THRESHOLD_MS = 30
#: Slow start doubles the window once more until it hears of the first mark.
MAX_DELAY_MS = 100
METER = 1
#: Until TCP has found its rate, and what is measured then.
WARM_UP = 2.5
SECONDS = 4.0
#: Others that run on that core can take rate from the sender, never give it any.
ATTEMPTS = 4


@dataclass
class Figures:
    """What one connection reached, in bit/s, packets and ms.

    `marked` is what the switch marked, `arrived` what the receiver's kernel
    counted with CE.  `wait_ms` is how long what waited in the switch took at the
    meter's rate, in samples.
    """

    port: float
    retransmits: int
    dropped: int
    marked: int
    arrived: int
    wait_ms: dict[str, float]


def marks_arrived(guest: Guest) -> int:
    """Packets with CE that the guest's kernel has received."""
    return parse_snmp(guest.run("cat /proc/net/netstat"))["IpExt"]["InCEPkts"]


def transfer(bed: Testbed, sender: Guest, receiver: Guest, to: VhostPort, algorithm: str,
             ecn: bool) -> Figures:
    """One TCP connection from `sender` to `receiver`, which is at the port `to`."""
    ovs = bed.ovs
    favour_pmds(bed)
    for guest in (sender, receiver):
        guest.run(f"sysctl -qw net.ipv4.tcp_congestion_control={algorithm} "
                  f"net.ipv4.tcp_ecn={int(ecn)}")

    def dropped() -> int:
        shown = ovs.flowbundler_show(to.name)[to.name]
        return (ovs.meter_stats(bed.bridge)[METER].drops
                + sum(n for key, n in shown.items() if key.startswith("drop_")))

    def marked() -> int:
        return ovs.coverage().get("datapath_meter_ecn_marked", 0)

    waits: list[tuple[float, float]] = []

    def more() -> dict[str, float]:
        backlog_bytes = ovs.flowbundler_show(to.name)[to.name]["backlog_bytes"]
        waits.append((time.monotonic(), 8e3 * backlog_bytes / RATE))
        return {"sent": ovs.dump_ports(bed.bridge)[to.name].tx_bytes}

    drops_before, marks_before, arrived_before = dropped(), marked(), marks_arrived(receiver)
    receiver.start("iperf3 -s -1 -J")
    seconds = WARM_UP + SECONDS + 0.5
    with bed.sampler(0.05, more) as sampler:
        # The receiver listens after a moment, which is not to be seen from here.
        client = sender.run("for i in 1 2 3 4 5 6 7 8 9; do "
                            f"iperf3 -c {receiver.ip} -J -i 0.5 -t {seconds:.0f} >/tmp/out && "
                            "break; sleep 0.3; done; cat /tmp/out", timeout=seconds + 30)
    receiver.result()
    result = parse_iperf3(client, "")
    assert not result.error, result.error
    sent = sampler.series("sent")
    begin = sent.time[np.argmax(sent.total > sent.total[0] + 100_000)]
    steady = (begin + WARM_UP, begin + WARM_UP + SECONDS)
    arrived = marks_arrived(receiver) - arrived_before
    # PMD threads hand their coverage counters in once a second.
    wait_until(lambda: marked() - marks_before >= arrived, "the switch's count of marks")
    values = [wait for at, wait in waits if steady[0] <= at <= steady[1]]
    return Figures(sent.rate(*steady), result.retransmits,
                   dropped() - drops_before, marked() - marks_before, arrived,
                   {f"p{q}": round(float(np.percentile(values, q)), 2) for q in (5, 50, 95)})


def good(figures: Figures) -> bool:
    """Whether a marked connection has its rate and waits for about the threshold.

    An emulated machine may not run for longer than what waits takes: 5 % of the rate.
    Nor may the other one, whose virtqueue then overflows: a few retransmissions.  The
    limit drops nothing, in no attempt.
    """
    return (figures.port >= 0.95 * RATE and figures.retransmits <= 3
            and figures.wait_ms["p50"] <= 1.1 * THRESHOLD_MS)


def test_dctcp(testbed: Testbed) -> None:
    ovs = testbed.ovs
    ports = [testbed.vhost_port(name) for name in ("vm-a", "vm-b")]
    sender, receiver = (testbed.guest(port) for port in ports)
    a, b = (port.number for port in ports)
    ovs.set_config(meter_shaping=True, meter_shaping_max_delay=1000 * MAX_DELAY_MS)
    ovs.set_qos("vm-b", "flowbundler")
    ovs.set_meter(testbed.bridge, METER, RATE)
    ovs.replace_flows(testbed.bridge, [f"in_port={a},actions=meter:{METER},output:{b}",
                                       f"in_port={b},actions=output:{a}"])

    for _ in range(ATTEMPTS):
        without = transfer(testbed, sender, receiver, ports[1], "cubic", False)
        # (If little waited, the emulated machine has had no time to send more.)
        if without.wait_ms["p50"] > THRESHOLD_MS:
            break
    ovs.set_config(meter_shaping_ecn_threshold=1000 * THRESHOLD_MS)
    for _ in range(ATTEMPTS):
        marked = transfer(testbed, sender, receiver, ports[1], "dctcp", True)
        print(without, marked)
        assert marked.port <= 1.01 * RATE and marked.dropped == 0
        if good(marked):
            break
    write_results("shaping-dctcp", {"cubic, no ECN": asdict(without), "dctcp": asdict(marked)})
    assert good(marked)
    assert marked.marked == marked.arrived > 0
    assert without.marked == without.arrived == 0
    # A window's growth in the round trip after a mark, and what a late poll adds.
    assert marked.wait_ms["p95"] < THRESHOLD_MS + 10
    # Without marks the window grows until the meter drops something.
    assert without.wait_ms["p50"] > marked.wait_ms["p50"]
