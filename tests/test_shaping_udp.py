"""UDP above the rate: how much leaves, when, and in which order.

The source is DPDK's net_pcap driver in the PMD thread itself, so no program on
another core decides what is offered.  What leaves is stamped by a net_pcap
recorder behind the shaped port.
"""

from __future__ import annotations

import pytest
from fbtest.analysis import paced_rate
from fbtest.pcap import FlowSpec
from fbtest.proc import wait_until
from fbtest.testbed import Testbed

from shaping import (
    MBIT,
    MODULUS,
    NS,
    REFERENCE_METER,
    Reference,
    assert_backlogged,
    assert_conforms,
    assert_in_order,
    capture,
    favour_pmds,
    run_for,
    wait_empty,
    write_results,
)

SECONDS = 5.0


# The recorder writes every packet to a file: about 100,000 in a second are what
# the PMD thread does beside its other work.
@pytest.mark.parametrize(("size", "rate"), [(64, 50 * MBIT), (512, 200 * MBIT), (1514, 500 * MBIT)])
def test_udp_at_three_times_the_rate(testbed: Testbed, size: int, rate: int,
                                     record_property) -> None:
    ovs = testbed.ovs
    recorder = testbed.recorder("out")
    source = testbed.source("src", [FlowSpec(1, frame_size=size)],
                            packets_per_flow=MODULUS, rate=3 * rate)
    reference = Reference(testbed)
    ovs.set_config(meter_shaping=True)
    ovs.set_qos("out", "flowbundler")
    ovs.set_meter(testbed.bridge, 1, rate)
    testbed.set_flows(vm_meters={"src": 1, "refsrc": REFERENCE_METER},
                      routes=[(f"in_port={source.number}", "out"), reference.route])
    favour_pmds(testbed)

    before = ovs.meter_stats(testbed.bridge)[1]
    seen = capture(testbed, recorder, SECONDS, reference=reference)
    after = ovs.meter_stats(testbed.bridge)[1]
    packets, gap = seen.packets, seen.gap_s
    seconds = (packets.time_ns[-1] - packets.time_ns[0]) / NS
    measured = float(packets.length[1:].sum()) * 8 / seconds
    offered = (after.packets_in - before.packets_in) / (
        after.packets_in - after.drops - before.packets_in + before.drops)
    print(f"{size} bytes at {rate / 1e6:g} Mbit/s: {measured / rate - 1:+.4%}, "
          f"offered {offered:.2f} times, longest poll gap {gap * 1e6:.0f} us")
    record_property("deviation", measured / rate - 1)
    record_property("longest_poll_gap_us", gap * 1e6)
    write_results("shaping-udp", {f"{size} bytes": {
        "rate": rate, "measured": measured, "offered_times": offered,
        "longest_poll_gap_us": gap * 1e6}})

    assert set(packets.length) == {size}
    # The stock policer that thins the source counts without the 14 bytes of
    # Ethernet header, hence offers more, up to 28 % with 64-byte frames.
    assert offered > 2.9
    # What is asked for.  The flow always has packets waiting: a late poll only
    # delays them, and 5 s are long against the longest gap.
    assert abs(measured / rate - 1) < 0.005
    assert_conforms(packets, rate, gap)
    assert_backlogged(packets, rate, gap)
    assert set(packets.flow) == {1}


def test_order_and_conformance_of_flows_at_different_rates(testbed: Testbed) -> None:
    """Eight flows with a meter each share a port; all have packets waiting."""
    ovs = testbed.ovs
    # Packets of a flow leave at most 0.4 ms apart, see MODULUS.
    rates = {1: 4, 2: 6, 3: 10, 4: 15, 5: 20, 6: 30, 7: 50, 8: 80}
    sizes = {1: 200, 2: 300, 3: 400, 4: 64, 5: 512, 6: 1000, 7: 300, 8: 1514}
    flows = [FlowSpec(n, dst_ip=f"10.73.0.{n}", frame_size=sizes[n]) for n in rates]
    recorder = testbed.recorder("out")
    # Half as many of each as usual: they occupy packet buffers.
    source = testbed.source("src", flows, packets_per_flow=MODULUS // 2)
    reference = Reference(testbed)
    ovs.set_config(meter_shaping=True)
    ovs.set_qos("out", "flowbundler")
    for flow, rate in rates.items():
        ovs.set_meter(testbed.bridge, flow, rate * MBIT)
    testbed.set_flows(
        vm_meters={"refsrc": REFERENCE_METER},
        dest_meters=[(f"ip,nw_dst=10.73.0.{n}", n) for n in rates],
        routes=[(f"in_port={source.number}", "out"), reference.route])
    favour_pmds(testbed)

    seen = capture(testbed, recorder, SECONDS, reference=reference)
    packets, gap = seen.packets, seen.gap_s
    assert_in_order(packets, MODULUS // 2)
    for flow, rate in rates.items():
        mine = packets.of_flow(flow)
        # The flow always has packets waiting, so 0.5 % of 5 s (25 ms) is long
        # against a packet's interval and the PMD thread's gaps.
        assert paced_rate(mine.time_ns, mine.length) == pytest.approx(rate * MBIT, rel=0.005)
        assert_conforms(mine, rate * MBIT, gap, f"flow {flow}")
        assert_backlogged(mine, rate * MBIT, gap, f"flow {flow}")


def test_order_while_now_one_meter_decides_now_the_other(testbed: Testbed) -> None:
    """A flow passes two meters and a port's rate, and which is slowest changes.

    A program in a namespace sends, so that sequence numbers do not repeat.
    """
    ovs = testbed.ovs
    host, recorder = testbed.host("vm"), testbed.recorder("out")
    host.route("10.73.0.0/16")
    ovs.set_config(meter_shaping=True)
    # Less than the 35 Mbit/s that the meters below let through on average, so
    # that packets expire at the port.
    ovs.set_qos("out", "flowbundler", max_rate=25 * MBIT)
    ovs.set_meter(testbed.bridge, 1, 40 * MBIT)
    ovs.set_meter(testbed.bridge, 2, 20 * MBIT)
    testbed.set_flows(vm_meters={"vm": 1}, dest_meters=[("ip,nw_dst=10.73.0.1", 2)],
                      routes=[(f"in_port={host.port.number}", "out")])
    flood = testbed.flood(host, ["10.73.0.1", "10.73.0.2"], rate=80 * MBIT, frame_size=600)
    wait_until(lambda: len(recorder.read()) > 1000, "traffic runs")
    favour_pmds(testbed)
    for rate in [10, 80, 30, 15, 60] * 6:
        ovs.set_meter(testbed.bridge, 1, rate * MBIT, modify=True)
        run_for(ovs, 0.05)
    flood.check()
    flood.result()
    wait_empty(ovs, "out")
    packets = recorder.read()
    assert set(packets.flow[packets.flow >= 0]) == {1, 2}
    assert_in_order(packets, modulus=None)
    meters = ovs.meter_stats(testbed.bridge)
    port = ovs.flowbundler_show("out")["out"]
    bound = [meters[1].drops, meters[2].drops, port["drop_max_delay"] + port["drop_expired"]]
    assert all(bound), f"a rate did not bind: {bound} drops"
