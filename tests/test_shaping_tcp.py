"""TCP through the shaper: the rate at the port, and what is left for the user.

The same connection passes the stock egress policer and kernel HTB in the same
test run; build/test-results/shaping-tcp.json has all figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import pytest
from fbtest.limiters import EgressPolicer, Htb, Limiter, MeterShaper
from fbtest.testbed import Host, Testbed

from shaping import MBIT, favour_pmds, write_results

#: Until TCP has found its rate, and what is measured then.
WARM_UP = 1.5
SECONDS = 5.0
#: Other programs on the machine's two cores can take rate from a TCP sender but
#: never give it any: upper bounds hold each time, lower bounds for the best of
#: three attempts.
ATTEMPTS = 3


@dataclass
class Figures:
    """What one transfer reached, in bit/s and packets.

    `port` counts frames without FCS that left the port, by the kernel's
    counter of the veth behind it.
    """

    port: float
    goodput: float
    retransmits: int
    drops: int


def transfer(bed: Testbed, vm: Host, to: Host, drops: Callable[[], int] = lambda: 0) -> Figures:
    """One TCP connection from `vm` to `to`."""
    favour_pmds(bed)
    sent_again, dropped = vm.retransmits(), drops()
    with bed.sampler(0.025) as sampler:
        begin = time.monotonic()
        tcp = bed.tcp(vm, to, seconds=WARM_UP + SECONDS + 0.2)
        result = tcp.result()
    assert not result.error, result.error
    port = sampler.series(f"{to.name}.tx_bytes").rate(begin + WARM_UP, begin + WARM_UP + SECONDS)
    return Figures(port, result.goodput_between(WARM_UP, WARM_UP + SECONDS),
                   vm.retransmits() - sent_again, drops() - dropped)


def best_transfer(bed: Testbed, vm: Host, to: Host, *, at_most: float, port: float,
                  goodput: float, drops: Callable[[], int] = lambda: 0) -> Figures:
    """The first of some transfers that reaches `port` and `goodput`, or the last.

    None may exceed `at_most`.
    """
    for _ in range(ATTEMPTS):
        figures = transfer(bed, vm, to, drops)
        print(figures)
        assert figures.port <= at_most, figures
        if figures.port >= port and figures.goodput >= goodput:
            break
    return figures


def record(limiter: str, rate: int, figures: Figures) -> None:
    write_results("shaping-tcp", {f"{limiter} {rate // MBIT}": asdict(figures)})
    print(f"{limiter:>8} {rate / MBIT:5.0f}: port {figures.port / MBIT:8.2f} "
          f"goodput {figures.goodput / MBIT:8.2f} Mbit/s, {figures.retransmits} retransmitted, "
          f"{figures.drops} dropped")


@pytest.mark.parametrize("rate", [
    10 * MBIT, 100 * MBIT, pytest.param(500 * MBIT, marks=pytest.mark.full), 1000 * MBIT])
def test_tcp_gets_its_rate(testbed: Testbed, rate: int, record_property) -> None:
    vm, web = testbed.host("vm"), testbed.host("web")
    shaper = MeterShaper(testbed.ovs, testbed.bridge, "web", 1)
    shaper.set_rate(rate)
    testbed.set_flows(vm_meters={"vm": 1})
    # 1 %: of the sampled counter's edges, a frame is 0.02 % at 10 Mbit/s, and a
    # sample that is late by 5 ms 0.1 %.  94 %: TCP's headers leave 1448 bytes of
    # 1514, which is 95.6 %.
    figures = best_transfer(testbed, vm, web, at_most=1.01 * rate, port=0.99 * rate,
                            goodput=0.94 * rate, drops=shaper.drops)
    record("shaper", rate, figures)
    record_property("port", figures.port)
    record_property("goodput", figures.goodput)
    assert figures.port == pytest.approx(rate, rel=0.01)
    assert figures.goodput >= 0.94 * rate


@pytest.mark.parametrize("rate", [
    100 * MBIT, pytest.param(1000 * MBIT, marks=pytest.mark.full)])
def test_beside_policer_and_htb(testbed: Testbed, rate: int, record_property) -> None:
    """The shaper does what HTB in the sender itself does; the policer does not."""
    vm, web = testbed.host("vm"), testbed.host("web")
    figures: dict[str, Figures] = {}
    limiters: dict[str, Limiter] = {
        "policer": EgressPolicer(testbed.ovs, testbed.bridge, "web"),
        "htb": Htb(vm),
        "shaper": MeterShaper(testbed.ovs, testbed.bridge, "web", 1),
    }
    for name, limiter in limiters.items():
        limiter.set_rate(rate)
        testbed.set_flows(vm_meters={"vm": 1} if name == "shaper" else {})
        if name == "shaper":
            # 1.5 % of HTB's: HTB's own rate is up to 1 % off where it counts
            # what the kernel hands it, and the rest is iperf3's own resolution.
            figures[name] = best_transfer(testbed, vm, web, at_most=1.01 * rate, port=0.99 * rate,
                                          goodput=0.985 * figures["htb"].goodput,
                                          drops=limiter.drops)
        else:
            figures[name] = transfer(testbed, vm, web, limiter.drops)
        record(name, rate, figures[name])
        record_property(name, asdict(figures[name]))
        limiter.clear()
        testbed.set_flows()
    assert figures["shaper"].goodput >= 0.985 * figures["htb"].goodput
    # What the shaper is for: it drops, and TCP sends again, far less.
    assert figures["shaper"].retransmits < figures["policer"].retransmits / 10


def test_port_max_rate(testbed: Testbed) -> None:
    """A port's own rate holds TCP to it, without any meter."""
    rate = 200 * MBIT
    vm, web = testbed.host("vm"), testbed.host("web")
    testbed.ovs.set_qos("web", "flowbundler", max_rate=rate)
    testbed.set_flows()
    figures = best_transfer(testbed, vm, web, at_most=1.01 * rate, port=0.99 * rate,
                            goodput=0.94 * rate)
    record("port", rate, figures)
    assert figures.port == pytest.approx(rate, rel=0.01)
    assert figures.goodput >= 0.94 * rate


def test_queue_max_rate(testbed: Testbed) -> None:
    """set_queue puts one VM under a queue's rate; the other has the rest of the port's."""
    ovs = testbed.ovs
    slow, fast, web = testbed.host("slow"), testbed.host("fast"), testbed.host("web")
    ovs.vsctl("--", "set", "Port", "web", "qos=@q",
              "--", "--id=@q", "create", "QoS", "type=flowbundler",
              f"other_config:max-rate={400 * MBIT}", "queues:1=@one",
              "--", "--id=@one", "create", "Queue", f"other_config:max-rate={100 * MBIT}")
    testbed.set_flows()
    ovs.add_flows(testbed.bridge, [
        f"table=0,priority=10,in_port={slow.port.number},"
        "actions=set_queue:1,goto_table:1"])
    favour_pmds(testbed)
    # At the port only the sum can be told; the queue's share is what its
    # receiver got: iperf3's goodput times frame over payload.
    frame = 1514 / 1448
    for _ in range(ATTEMPTS):
        with testbed.sampler(0.025) as sampler:
            begin = time.monotonic()
            transfers = [testbed.tcp(host, web, seconds=WARM_UP + SECONDS + 0.2, port=port)
                         for host, port in ((slow, 5201), (fast, 5202))]
            results = [t.result() for t in transfers]
        assert not any(r.error for r in results)
        queue, rest = (frame * r.goodput_between(WARM_UP, WARM_UP + SECONDS) for r in results)
        total = sampler.series("web.tx_bytes").rate(begin + WARM_UP, begin + WARM_UP + SECONDS)
        print(f"queue {queue / MBIT:.2f}, rest {rest / MBIT:.2f}, port {total / MBIT:.2f} Mbit/s")
        # 1 % is asked for; iperf3's intervals add 0.5 % to what it says.
        assert queue <= 1.015 * 100 * MBIT and total <= 1.01 * 400 * MBIT
        if queue >= 98.5 * MBIT and total >= 396 * MBIT:
            break
    ovs.vsctl("--", "clear", "QoS", ovs.get("Port", "web", "qos"), "queues",
              "--", "--all", "destroy", "Queue")
    write_results("shaping-tcp", {"queue 100 of port 400": {
        "queue": queue, "rest": rest, "port": total}})
    assert queue == pytest.approx(100 * MBIT, rel=0.015)
    assert total == pytest.approx(400 * MBIT, rel=0.01)
    assert rest == pytest.approx(300 * MBIT, rel=0.02)
