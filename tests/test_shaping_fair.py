"""Fair meters: a tenant's bulk traffic must not starve its small flows.

One VM with 100 Mbit/s sends in bulk, by TCP or by UDP at twice its rate, and
asks a server something every 10 ms.  How long the answers take is what the VM's
user sees; build/test-results/shaping-fair.json has all figures.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import pytest
from fbtest.limiters import MeterShaper
from fbtest.ovs import MeterStats
from fbtest.testbed import Host, Testbed
from fbtest.traffic import RoundTrips

from shaping import MBIT, favour_pmds, write_results

RATE = 100 * MBIT
METER = 1
#: Until TCP has found its rate, and what is measured then.
WARM_UP = 1.0
SECONDS = 4.0
#: Other programs on the machine's two cores can only add to a round trip and
#: take rate away: the best of some attempts counts.
ATTEMPTS = 3
#: The bulk flow's turn and the request's own take 0.12 ms each, and the wheel and
#: the poll less than 0.1 ms; the rest is the kernels of both ends, which here
#: share two cores with the PMD thread and iperf3.
FAIR_P99_US = 5000


@dataclass
class Figures:
    """What is sent from the port, in bit/s, and the small flow's round trips in us."""

    port: float
    p50: float
    p99: float
    lost: int
    answered: int


@pytest.fixture
def fairness(testbed: Testbed) -> Iterator[None]:
    """Puts back what the test changes."""
    yield
    testbed.ovs.set_config(meter_shaping_fair=None)


def figures_of(bed: Testbed, vm: Host, web: Host, bulk: str) -> Figures:
    """The small flow beside `bulk` traffic from `vm` to `web`."""
    favour_pmds(bed)
    with contextlib.ExitStack() as stack, bed.sampler(0.025) as sampler:
        begin = time.monotonic()
        if bulk == "tcp":
            tcp = bed.tcp(vm, web, seconds=WARM_UP + SECONDS + 0.5)
        else:
            stack.callback(bed.flood(vm, web, rate=2 * RATE).close)
        time.sleep(WARM_UP)  # What is measured begins when the queue has its length.
        small = bed.pingpong(vm, web, interval=0.01, frame_size=98)
        time.sleep(SECONDS)
        trips: RoundTrips = small.result()
        if bulk == "tcp":
            assert not tcp.result().error
    port = sampler.series("web.tx_bytes").rate(begin + WARM_UP, begin + WARM_UP + SECONDS)
    return Figures(port, trips.percentile(50), trips.percentile(99), trips.lost,
                   len(trips.rtt_us))


def set_fair(bed: Testbed, said_by: str, fair: bool) -> None:
    """Makes the meter `fair` or not, in place, by the switch's setting or the meter's band."""
    if said_by == "switch":
        bed.ovs.set_config(meter_shaping_fair=fair)
    else:
        bed.ovs.ofctl("mod-meter", bed.bridge,
                      f"meter={METER} kbps stats bands=type=shape rate={RATE // 1000} "
                      f"fair={str(fair).lower()}")


@pytest.mark.parametrize(("bulk", "said_by"), [
    ("tcp", "switch"), pytest.param("udp", "switch", marks=pytest.mark.full), ("udp", "band")])
def test_small_flow_beside_bulk(testbed: Testbed, fairness: None, bulk: str, said_by: str,
                                record_property) -> None:
    ovs = testbed.ovs
    vm, web = testbed.host("vm"), testbed.host("web")
    shaper = MeterShaper(ovs, testbed.bridge, "web", METER)
    shaper.set_rate(RATE)
    testbed.set_flows(vm_meters={"vm": METER})
    if said_by == "band":
        set_fair(testbed, said_by, False)
        ovs.set_config(meter_shaping=None)  # From here on only the band says anything.
    seen: dict[bool, Figures] = {}
    for fair in (False, True):
        set_fair(testbed, said_by, fair)
        for _ in range(ATTEMPTS):
            figures = figures_of(testbed, vm, web, bulk)
            print(f"{bulk}, by {said_by}, {'fair' if fair else 'one line'}: {figures}")
            # The rate is the meter's in either case: 1 % as in test_shaping_tcp.
            assert figures.port <= 1.01 * RATE, figures
            if figures.port >= 0.99 * RATE and (not fair or figures.p99 <= FAIR_P99_US):
                break
        seen[fair] = figures
        assert figures.port == pytest.approx(RATE, rel=0.01)
    name = bulk if said_by == "switch" else f"{bulk}, by {said_by}"
    write_results("shaping-fair", {name: {"one line": asdict(seen[False]),
                                          "fair": asdict(seen[True])}})
    record_property(name, {mode: asdict(f) for mode, f in
                           (("one line", seen[False]), ("fair", seen[True]))})
    assert seen[True].p99 <= FAIR_P99_US
    assert seen[True].lost == 0
    # That there was something to be fair about.  (How much of the meter's max-delay
    # of 50 ms a bulk flow fills depends on its window: UDP all of it, TCP some ms.)
    assert seen[False].p99 > 4 * seen[True].p99


def test_rates_and_drops(testbed: Testbed, fairness: None) -> None:
    """Two VMs of different rates, UDP beyond them: exact rates, and each packet counted."""
    ovs = testbed.ovs
    rates = {"one": 50 * MBIT, "two": 150 * MBIT}
    web = testbed.host("web")
    ovs.set_config(meter_shaping=True, meter_shaping_fair=True)
    ovs.set_qos("web", "flowbundler")
    hosts = {name: testbed.host(name) for name in rates}
    for number, rate in enumerate(rates.values(), 1):
        ovs.set_meter(testbed.bridge, number, rate)
    testbed.set_flows(vm_meters={"one": 1, "two": 2})
    favour_pmds(testbed)
    with contextlib.ExitStack() as stack:
        for number, (name, rate) in enumerate(rates.items(), 1):
            stack.callback(testbed.flood(hosts[name], web, rate=1.5 * rate, flow=number,
                                         port=9100 + number).close)
        first: dict[int, MeterStats] | None = None
        for _ in range(ATTEMPTS):
            with testbed.sampler(0.025) as sampler:
                time.sleep(WARM_UP)
                begin, before = time.monotonic(), ovs.meter_stats(testbed.bridge)
                time.sleep(SECONDS)
                after, end = ovs.meter_stats(testbed.bridge), time.monotonic()
            first = first or before
            total = sampler.series("web.tx_bytes").rate(begin, end)
            passed = {}
            for number, name in enumerate(rates, 1):
                new, old = after[number], before[number]
                passed[name] = ((new.bytes_in - new.drop_bytes) - (old.bytes_in - old.drop_bytes)
                                ) * 8 / (end - begin)
            print(f"{total / MBIT:.2f} Mbit/s: {passed}")
            # What waits changes by less than max-delay, which is 1.3 % of the time.
            assert total <= 1.01 * sum(rates.values())
            assert all(passed[name] <= 1.025 * rate for name, rate in rates.items())
            if total >= 0.99 * sum(rates.values()):
                break
    assert total == pytest.approx(sum(rates.values()), rel=0.01)
    for name, rate in rates.items():
        assert passed[name] == pytest.approx(rate, rel=0.025)
    assert all(after[number].drops > before[number].drops for number in after)
    web_drops = ovs.flowbundler_show("web")["web"]["drop_max_delay"]
    assert web_drops >= sum(m.drops for m in after.values()) - sum(
        m.drops for m in first.values())
