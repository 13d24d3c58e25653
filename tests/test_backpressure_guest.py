"""TCP of a virtual machine, with a kernel of its own, through the shaper.

With other_config:shaper-rx-limit what the machine may not send yet waits in its
virtqueue, and its own stack makes the sender wait: nothing is lost.  The same
connection passes the stock egress policer in the same test run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
from fbtest.guest import Guest
from fbtest.limiters import EgressPolicer, Limiter, MeterShaper
from fbtest.proc import wait_until
from fbtest.testbed import Host, Testbed
from fbtest.traffic import parse_iperf3

from shaping import MBIT, MTU, favour_pmds, wait_empty, write_results

RATE = 100 * MBIT
#: What leaves in 21 ms: for so long the guest may get no processor, or TCP have
#: nothing to send, without a loss of rate.  What may wait for 50 ms is twice that.
LIMIT = 262144
#: What one poll may yield beyond it.
BURST_BYTES = 32 * MTU
#: Until TCP has found its rate, and what is measured then.
WARM_UP = 1.5
SECONDS = 4.0
#: QEMU emulates the machine's processor on a core that it shares with the
#: receiver.  Others that run there can take rate from the sender, but never
#: give it any.
ATTEMPTS = 3


@dataclass
class Figures:
    """What one transfer reached; rates in bit/s, `port` of whole frames."""

    port: float
    goodput: float
    retransmits: int
    drops: int
    max_backlog_bytes: int


def transfer(bed: Testbed, guest: Guest, web: Host, limiter: Limiter) -> Figures:
    """One TCP connection from the guest to `web`."""
    favour_pmds(bed)
    ovs, dropped = bed.ovs, limiter.drops()
    shaped = isinstance(limiter, MeterShaper)

    waits = [0]

    def more() -> dict[str, float]:
        if shaped:
            waits.append(ovs.flowbundler_show("web")["web"]["backlog_bytes"])
        return {}

    server = bed._keep(web.ns.spawn("iperf3", "--server", "--one-off", "--json",
                                    name="iperf3 server", cpus=web.cpus))
    wait_until(lambda: web.ns.listening(5201), "iperf3 listens")
    seconds = WARM_UP + SECONDS + 0.5
    with bed.sampler(0.1, more) as sampler:
        begin = time.monotonic()
        client = guest.run(f"iperf3 -c {web.ip} -J -i 0.5 -t {seconds:.0f}", timeout=seconds + 20)
    server.wait(5)
    result = parse_iperf3(client, server.stdout())
    assert not result.error, result.error
    port = sampler.series("web.tx_bytes").rate(begin + WARM_UP, begin + WARM_UP + SECONDS)
    return Figures(port, result.goodput_between(WARM_UP, WARM_UP + SECONDS), result.retransmits,
                   limiter.drops() - dropped, max(waits))


def test_tcp_of_a_guest_loses_nothing(testbed: Testbed, record_property) -> None:
    ovs = testbed.ovs
    web = testbed.host("web")
    vm = testbed.vhost_port("vm")
    guest = testbed.guest(vm)

    def set_flows(*actions: str) -> None:
        ovs.replace_flows(testbed.bridge, [
            f"in_port={vm.number},actions={''.join(actions)}output:{web.port.number}",
            f"in_port={web.port.number},actions=output:{vm.number}"])

    policer = EgressPolicer(ovs, testbed.bridge, "web")
    policer.set_rate(RATE)
    set_flows()
    policed = transfer(testbed, guest, web, policer)
    policer.clear()

    shaper = MeterShaper(ovs, testbed.bridge, "web", 1)
    shaper.set_rate(RATE)
    ovs.set_config(shaper_rx_limit=LIMIT)
    set_flows("meter:1,")
    # TCP's headers leave 1448 bytes of 1514.
    goodput = RATE * 1448 / MTU
    for _ in range(ATTEMPTS):
        shaped = transfer(testbed, guest, web, shaper)
        print(policed, shaped)
        assert shaped.port <= 1.01 * RATE
        assert shaped.retransmits == 0 and shaped.drops == 0
        # The sender was stopped, and that is what bounds what waits.
        assert LIMIT // 4 <= shaped.max_backlog_bytes <= LIMIT + BURST_BYTES
        if shaped.goodput >= 0.98 * goodput:
            break
    wait_empty(ovs, "web")
    causes = {name: count for name, count in ovs.flowbundler_show("web")["web"].items()
              if name.startswith("drop_") and count}
    for name, figures in (("policer", policed), ("shaper", shaped)):
        write_results("backpressure-guest", {name: vars(figures)})
        record_property(name, vars(figures))
    assert causes == {}
    assert ovs.dump_ports(testbed.bridge)["vm"].rx_drop == 0
    assert shaped.port == pytest.approx(RATE, rel=0.02)
    assert shaped.goodput == pytest.approx(goodput, rel=0.02)
    # How much the policer takes depends on how fast the guest's processor is; it drops.
    assert policed.retransmits > 100 and policed.goodput < shaped.goodput
