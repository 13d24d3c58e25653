"""The testbed on a real vswitchd: it forwards, measures, and leaves nothing."""

import os
import time

import pytest
from fbtest import analysis, netns
from fbtest.limiters import EgressPolicer, Htb
from fbtest.ovs import Ovs
from fbtest.pcap import FlowSpec
from fbtest.proc import Background, wait_until
from fbtest.testbed import Testbed

NS = 1_000_000_000


def test_two_hosts_talk(testbed):
    a, b = testbed.host("a"), testbed.host("b", static_arp=False)
    testbed.set_flows()
    trips = testbed.pingpong(a, b, count=20, interval=0.001).result(timeout=20)
    assert trips.lost == 0 and len(trips.rtt_us) == 20

    with testbed.sampler() as sampler:
        begin = time.monotonic()
        result = testbed.tcp(a, b, seconds=2).result()
    assert not result.error
    assert result.goodput > 10e6
    at_port = sampler.series("b.tx_bytes").rate(begin, begin + 2)
    # The port carries the goodput and the headers, and no more.
    assert 0.9 < result.goodput / at_port < 1.1
    assert a.retransmits() >= result.retransmits


def test_flood_is_recorded_in_order(testbed):
    a = testbed.host("a")
    recorder = testbed.recorder("rec")
    a.route("10.73.0.0/16")
    testbed.set_flows(routes=[(f"in_port={a.port.number}", "rec")])
    begin = time.time_ns()
    # So slow that a driver's ring holds what comes in 0.2 s.
    sent = testbed.flood(a, [f"10.73.0.{n}" for n in range(1, 5)], rate=5e6,
                         frame_size=300, seconds=1).result(timeout=20)
    wait_until(lambda: len(recorder.read()) == sent["sent"], "all is recorded")
    packets = recorder.read()
    order = analysis.check_order(packets.flow, packets.seq)
    assert order.in_order and order.missing == 0 and order.flows == 4
    assert set(packets.length) == {300}
    assert len(set(packets.dst)) == 4
    # Stamped as they left: on the clock, and within the second.
    assert abs(packets.time_ns[0] - begin) < 5e9
    assert packets.time_ns[-1] - packets.time_ns[0] < 3e9


def test_source_and_sink(testbed):
    source = testbed.source("src", [FlowSpec(n, dst_ip=f"10.73.0.{n}") for n in range(1, 17)])
    testbed.sink("out")
    held = testbed.mbufs_in_use()
    assert held >= 16 * 64
    testbed.set_flows(routes=[(f"in_port={source.number}", "out")])

    def sent():
        return testbed.ovs.dump_ports(testbed.bridge)["out"].tx_packets

    wait_until(lambda: sent() > 100_000, "a hundred thousand packets")
    testbed.delete_port("src")
    testbed.wait_mbufs(0)


def test_a_meter_limits(testbed):
    a, b = testbed.host("a"), testbed.host("b")
    testbed.ovs.set_meter(testbed.bridge, 7, 20_000_000, burst_bits=100_000)
    testbed.set_flows(vm_meters={"a": 7})
    with testbed.sampler() as sampler:
        begin = time.monotonic()
        testbed.flood(a, b, rate=60e6, seconds=2).result(timeout=20)
    rate = sampler.series("b.tx_bytes").rate(begin + 0.5, begin + 1.5)
    assert rate == pytest.approx(20e6, rel=0.1)
    stats = testbed.ovs.meter_stats(testbed.bridge)[7]
    assert stats.drops > 0 and stats.packets_in > stats.drops


@pytest.mark.parametrize("kind", ["policer", "htb"])
def test_comparison_limiters(testbed, kind):
    a, b = testbed.host("a"), testbed.host("b")
    testbed.set_flows()
    limiter = (EgressPolicer(testbed.ovs, testbed.bridge, "b") if kind == "policer"
               else Htb(a))
    limiter.set_rate(10_000_000)
    flood = testbed.flood(a, b, rate=90e6)
    with testbed.sampler() as sampler:
        begin = time.monotonic()
        wait_until(lambda: time.monotonic() > begin + 1.5, "a second and a half")
        asked = time.monotonic()
        limiter.set_rate(30_000_000)
        changed = time.monotonic()
        wait_until(lambda: time.monotonic() > changed + 1.5, "and another")
    flood.check()
    sent = flood.result()
    series = sampler.series("b.tx_bytes")
    assert series.rate(begin + 0.5, asked) == pytest.approx(10e6, rel=0.1)
    assert series.rate(changed + 0.5, changed + 1.5) == pytest.approx(30e6, rel=0.1)
    assert limiter.drops() + sent["failed"] > 0
    limiter.clear()
    limiter.clear()


def test_pmd_threads_keep_their_core(testbed):
    testbed.sink("out")
    (cpu,) = testbed.ovs.pmd_cpus()
    busy = Background(["sh", "-c", "while :; do :; done"], cpus={cpu})
    try:
        before, begin = testbed.ovs.pmd_run_ns(), time.monotonic_ns()
        wait_until(lambda: time.monotonic_ns() > begin + NS, "a second")
        after, spent = testbed.ovs.pmd_run_ns(), time.monotonic_ns() - begin
    finally:
        busy.close()
    assert after.keys() == before.keys() and len(after) == 1
    for thread, ran in after.items():
        assert (ran - before[thread]) / spent > 0.8


def test_a_bad_port_says_why(testbed):
    with pytest.raises(Exception, match="broken"):
        testbed.add_port("broken", "net_af_packet,iface=fbnosuch")


def test_nothing_is_left_after_a_failure(ovs_env):
    before = netns.our_names(os.getpid())
    with pytest.raises(ZeroDivisionError), Testbed(ovs_env) as bed:
        a, b = bed.host("a"), bed.host("b")
        bed.set_flows()
        flood = bed.flood(a, b, rate=10e6)
        tcp = bed.tcp(a, b, seconds=100)
        scratch = bed.dir
        raise ZeroDivisionError
    assert netns.our_names(os.getpid()) == before
    assert not scratch.exists()
    assert not flood._flood.running() and not tcp._client.running()
    assert bed.bridge not in Ovs(ovs_env).vsctl("list-br").split()


def test_what_a_killed_run_left_is_removed(ovs_env):
    # The highest pid there can be is nobody's.
    name = netns.unique_name("n0", pid=4194305)
    netns.run("ip", "netns", "add", name)
    assert name in netns.our_names()
    assert netns.remove_stale() == [name]
    assert name not in netns.our_names()
