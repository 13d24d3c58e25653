"""Backpressure into a virtual machine: what it may not send stays with it.

The machine is dpdk-testpmd with a virtio-user device, which offers more than
two million frames a second.  Without other_config:shaper-rx-limit nearly all of
that is dropped by its meter; with it nothing is, anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from fbtest.proc import wait_until
from fbtest.testbed import Recorder, Testbed, VhostPort
from fbtest.vhost import Testpmd

from shaping import (
    MBIT,
    MTU,
    SHAPER_DROPS,
    Log,
    Reference,
    assert_backlogged,
    assert_conforms,
    backlog,
    capture,
    favour_pmds,
    second_cpu,
    wait_empty,
)

METER = 1
#: What one poll may yield beyond the limit: NETDEV_MAX_BURST frames.
BURST_BYTES = 32 * MTU


@dataclass
class Bed:
    """A VM at port "vm" whose frames pass `METER` to the recorder "out"."""

    bed: Testbed
    port: VhostPort
    vm: Testpmd
    out: Recorder
    reference: Reference

    def backlog_bytes(self) -> int:
        """Bytes that wait at "out"."""
        return int(self.bed.ovs.flowbundler_show("out")["out"]["backlog_bytes"])

    def drops(self) -> dict[str, int]:
        """Packets of the VM dropped so far, by cause; causes without drops are left out."""
        ovs = self.bed.ovs
        shown = ovs.flowbundler_show("out")["out"]
        counters = ovs.dump_ports(self.bed.bridge)["vm"]
        found = {name: int(shown[name]) for name in SHAPER_DROPS}
        found |= {"meter": ovs.meter_stats(self.bed.bridge)[METER].drops, "rx": counters.rx_drop,
                  "rx_qos": counters.custom["ovs_rx_qos_drops"]}
        return {name: count for name, count in found.items() if count}


@pytest.fixture
def bed(testbed: Testbed) -> Iterator[Bed]:
    """A VM that sends nothing yet."""
    ovs = testbed.ovs
    port = testbed.vhost_port("vm")
    vm = testbed.testpmd(port)
    out = testbed.recorder("out")
    ovs.set_config(meter_shaping=True)
    ovs.set_qos("out", "flowbundler")
    reference = Reference(testbed)
    favour_pmds(testbed)
    yield Bed(testbed, port, vm, out, reference)


def set_rate(bed: Bed, rate: int, *, modify: bool = False) -> None:
    """Give the VM a rate, and the flow that it needs."""
    ovs, bridge = bed.bed.ovs, bed.bed.bridge
    ovs.set_meter(bridge, METER, rate, modify=modify)
    if not modify:
        match, port = bed.reference.route
        ovs.replace_flows(bridge, [
            f"in_port={bed.port.number},actions=meter:{METER},output:{bed.out.number}",
            f"{match},actions=meter:90,output:{bed.reference.recorder.number}"])


@pytest.mark.parametrize("rate, limit", [(20 * MBIT, 16384), (200 * MBIT, 131072)])
def test_all_that_a_vm_may_not_send_stays_with_it(bed: Bed, rate: int, limit: int,
                                                  record_property) -> None:
    ovs = bed.bed.ovs
    set_rate(bed, rate)
    ovs.set_config(shaper_rx_limit=limit)
    log = Log(ovs)
    bed.vm.start()

    seen: list[int] = []
    captured = capture(bed.bed, bed.out, 3.0, reference=bed.reference)
    for _ in range(100):
        seen.append(bed.backlog_bytes())
        time.sleep(0.005)
    counters = bed.vm.stop()
    wait_empty(ovs, "out")

    # It would have sent far more, and what it did send has all left.
    assert counters.refused > 10 * counters.sent
    wait_until(lambda: len(bed.out.read()) >= counters.sent, "all has left")
    assert len(bed.out.read()) == counters.sent
    assert bed.drops() == {}

    seconds = (captured.end_ns - captured.start_ns) / 1e9
    measured = captured.packets.length.sum() * 8 / seconds
    record_property("rate", measured)
    record_property("max_backlog", max(seen))
    print(f"{measured / MBIT:.2f} Mbit/s of {rate / MBIT:.0f}, at most {max(seen)} bytes wait, "
          f"{counters}")
    # Two frames at the edges, and what the longest gap between polls moves.
    assert measured == pytest.approx(rate, rel=0.001, abs=(2 * MTU * 8 + captured.gap_s * rate)
                                     / seconds)
    assert_conforms(captured.packets, rate, captured.gap_s)
    assert_backlogged(captured.packets, rate, captured.gap_s)
    assert limit // 2 <= max(seen) <= limit + BURST_BYTES
    assert log.problems() == []


def test_without_a_limit_the_meter_drops(bed: Bed) -> None:
    """The same VM, to show that the test above could fail; then the limit is set live."""
    ovs = bed.bed.ovs
    set_rate(bed, 200 * MBIT)
    bed.vm.start()
    wait_until(lambda: bed.drops().get("meter", 0) > 100_000, "the meter drops")
    assert backlog(ovs, "out") > 0

    ovs.set_config(shaper_rx_limit=65536)
    # What waits beyond the limit has to leave first: up to 50 ms.
    wait_until(lambda: bed.backlog_bytes() <= 65536 + BURST_BYTES, "the backlog falls")
    before = bed.drops()
    time.sleep(0.5)
    assert bed.drops() == before
    ovs.set_config(shaper_rx_limit=None)
    wait_until(lambda: bed.drops()["meter"] > before["meter"] + 100_000, "the meter drops again")
    bed.vm.stop()


@pytest.mark.parametrize("limit", [1, 16384])
def test_a_destination_that_is_gone_stops_nobody(bed: Bed, limit: int) -> None:
    """What is due leaves for a port without a peer, too (and is dropped there)."""
    ovs, bridge, rate = bed.bed.ovs, bed.bed.bridge, 50 * MBIT
    gone = bed.bed.vhost_port("gone")
    ovs.set_qos("gone", "flowbundler")
    ovs.set_config(shaper_rx_limit=limit)
    set_rate(bed, rate)
    ovs.replace_flows(bridge, [f"in_port={bed.port.number},actions=meter:{METER},"
                               f"output:{gone.number}"])
    bed.vm.start()

    def received() -> int:
        return ovs.dump_ports(bridge)["vm"].rx_packets

    wait_until(lambda: received() > 100, "the VM's frames are received")
    before, begin = received(), time.monotonic()
    time.sleep(1)
    measured = (received() - before) * MTU * 8 / (time.monotonic() - begin)
    bed.vm.stop()
    # Less than a packet may wait, so each moment in which the VM or the PMD thread
    # has no processor costs rate; a queue that rests for ever has none.
    assert 0.5 * rate <= measured <= 1.05 * rate
    wait_empty(ovs, "gone")
    assert bed.drops() == {}


def test_a_queue_moves_between_threads(bed: Bed) -> None:
    """Nothing is dropped, and no more waits, while the VM's queue changes its thread."""
    ovs, limit = bed.bed.ovs, 131072
    cpu, = ovs.pmd_cpus()
    other = second_cpu(bed.bed)
    set_rate(bed, 200 * MBIT)
    ovs.set_config(shaper_rx_limit=limit, pmd_cpu_mask=hex(1 << cpu | 1 << other))
    bed.vm.start()
    seen = []
    for where in (cpu, other, cpu):
        ovs.vsctl("set", "Interface", "vm", f"other_config:pmd-rxq-affinity=0:{where}")
        for _ in range(20):
            seen.append(bed.backlog_bytes())
            time.sleep(0.01)
    sent = bed.vm.stop().sent
    wait_empty(ovs, "out")
    # (The recorder begins anew when its port gets more queues, one a thread.)
    shown = ovs.flowbundler_show("out")["out"]
    assert shown["sent"] + shown["bypassed"] == sent > 0
    assert bed.drops() == {}
    # A thread tells once an iteration what it still holds, so that the other may
    # poll once more.
    assert limit // 2 <= max(seen) <= limit + 2 * BURST_BYTES
