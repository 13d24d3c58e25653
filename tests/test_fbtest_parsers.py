"""Parsers of what the kernel, Open vSwitch and iperf3 print."""

import json
import os
import time

import pytest
from fbtest import autotest, guest, measure, netns, ovs, proc, procfs, traffic, vhost

DUMP_PORTS = """\
OFPST_PORT reply (OF1.5) (xid=0x2): 3 ports
  port  "red-vm": rx pkts=7, bytes=700, drop=1, errs=0, frame=?, over=?, crc=?
           tx pkts=9, bytes=900, drop=4, errs=0, coll=?
           duration=0.012s
           CUSTOM Statistics
                      ovs_tx_failure_drops=0, ovs_tx_qos_drops=3,
                      rx_errors=2, tx_q0_bytes=0,
  port  web: rx pkts=?, bytes=?, drop=?, errs=0, frame=?, over=?, crc=?
           tx pkts=1, bytes=2, drop=3, errs=0, coll=?
           duration=0.028s
  port vm: rx pkts=5, bytes=50, drop=0, errs=?, frame=?, over=?, crc=?
           tx pkts=6, bytes=60, drop=7, errs=?, coll=?
           duration=4.269s
           rx rfc2819 1_to_64_packets=0, 65_to_127_packets=5, broadcast_packets=0,
           tx rfc2819 1_to_64_packets=0, 65_to_127_packets=6, broadcast_packets=0,
           CUSTOM Statistics
                      ovs_rx_qos_drops=8,
  port LOCAL: rx pkts=0, bytes=0, drop=0, errs=0, frame=0, over=0, crc=0
           tx pkts=0, bytes=0, drop=15135, errs=0, coll=0
           duration=4.024s
"""


def test_dump_ports():
    ports = ovs.parse_dump_ports(DUMP_PORTS)
    assert list(ports) == ["red-vm", "web", "vm", "LOCAL"]
    vm = ports["vm"]
    assert (vm.rx_packets, vm.tx_packets, vm.tx_drop) == (5, 6, 7)
    assert vm.custom["ovs_rx_qos_drops"] == 8
    red = ports["red-vm"]
    assert (red.rx_packets, red.rx_bytes, red.rx_drop) == (7, 700, 1)
    assert (red.tx_packets, red.tx_bytes, red.tx_drop) == (9, 900, 4)
    assert red.custom == {"ovs_tx_failure_drops": 0, "ovs_tx_qos_drops": 3,
                          "rx_errors": 2, "tx_q0_bytes": 0}
    assert ports["web"].rx_packets == 0 and ports["web"].tx_drop == 3
    assert ports["LOCAL"].tx_drop == 15135


def test_meter_stats():
    stats = ovs.parse_meter_stats("""\
OFPST_METER reply (OF1.3) (xid=0x2):
meter:1 flow_count:1 packet_in_count:34 byte_in_count:523 duration:2.030s bands:
0: packet_count:32 byte_count:500

meter:12 flow_count:0 packet_in_count:0 byte_in_count:0 duration:2.030s bands:
0: packet_count:0 byte_count:0
""")
    assert stats == {1: ovs.MeterStats(1, 34, 523, 32, 500), 12: ovs.MeterStats(12, 0, 0, 0, 0)}


def test_queue_stats():
    stats = ovs.parse_queue_stats("""\
OFPST_QUEUE reply (OF1.3) (xid=0x4): 2 queues
  port 12 queue 0: bytes=302, pkts=1, errors=0, duration=3.5s
  port 12 queue 7: bytes=2100, pkts=20, errors=3, duration=3.5s
""")
    assert stats == {0: ovs.QueueStats(302, 1, 0), 7: ovs.QueueStats(2100, 20, 3)}


def test_mempools():
    text = """\
mempool <ovs1>@0x1
  size=262144
  populated_size=262144
    cache_count[1]=481
    total_cache_count=481
  common_pool_count=261567
mempool <ovs2>@0x2
  populated_size=100
    total_cache_count=0
  common_pool_count=100
"""
    assert ovs.parse_mempools(text) == {"ovs1": 96, "ovs2": 0}


def test_ovsdb_values():
    assert ovs.ovsdb_value(["map", [["a", "1"], ["b", "2"]]]) == {"a": "1", "b": "2"}
    assert ovs.ovsdb_value(["set", [["uuid", "x"], ["uuid", "y"]]]) == ["x", "y"]
    assert ovs.ovsdb_value(["set", []]) == []
    assert ovs.ovsdb_value(7) == 7


def test_net_dev():
    links = netns.parse_net_dev("""\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets
  eth0: 100 2 0 3 0 0 0 0 400 5 0 6 0 0 0 0
fb12v1:1 1 0 0 0 0 0 0 2 2 0 0 0 0 0 0
""")
    assert links["eth0"] == netns.LinkCounters(100, 2, 3, 400, 5, 6)
    assert links["fb12v1"].tx_bytes == 2
    assert "lo" in netns.link_counters()


def test_snmp():
    table = netns.parse_snmp("Tcp: InSegs RetransSegs\nTcp: 12 3\nUdp: A\nUdp: -1\n")
    assert table == {"Tcp": {"InSegs": 12, "RetransSegs": 3}, "Udp": {"A": -1}}


def test_names_fit_and_are_ours():
    name = netns.unique_name("v255", pid=4194304)
    assert len(name) <= 15
    assert netns.unique_name("n1").startswith(f"fb{os.getpid()}n")
    with pytest.raises(ValueError):
        netns.unique_name("much-too-long")
    with pytest.raises(ValueError):
        netns.unique_name("1")


def interval(start, end, rate, **more):
    return {"sum": {"start": start, "end": end, "bits_per_second": rate, **more}}


def test_iperf3_reports():
    client = json.dumps({
        "intervals": [interval(0, 1, 5e6, retransmits=2), interval(1, 2, 9e6, retransmits=1)],
        "end": {"sum_sent": {"bits_per_second": 7e6, "retransmits": 4}}})
    server = json.dumps({
        "intervals": [interval(0, 1, 4e6), interval(1, 2, 8e6)],
        "end": {"sum_received": {"bits_per_second": 6e6}}})
    result = traffic.parse_iperf3(client, server)
    assert (result.goodput, result.retransmits, result.error) == (6e6, 4, "")
    assert result.goodput_between(1, 2) == 8e6
    assert result.goodput_between(3, 4) == 0


def test_iperf3_cut_short():
    client = json.dumps({
        "intervals": [interval(0, 1, 5e6, retransmits=2), interval(1, 2, 9e6, retransmits=1)],
        "end": {}, "error": "interrupt"})
    result = traffic.parse_iperf3(client, "")
    assert (result.goodput, result.retransmits, result.error) == (7e6, 3, "interrupt")
    assert traffic.parse_iperf3("", "").error == "no report"


def test_cpu_masks():
    assert proc.parse_cpu_mask("0x2") == {1}
    assert proc.parse_cpu_mask("f0") == {4, 5, 6, 7}
    mine = os.sched_getaffinity(0)
    assert proc.spare_cpus(mine) == mine
    assert proc.spare_cpus(set()) == mine


def test_a_failing_command_is_shown():
    with pytest.raises(proc.CommandError, match="sh -c echo no >&2; exit 3.*status 3.*no"):
        proc.run("sh", "-c", "echo no >&2; exit 3")
    with pytest.raises(proc.CommandError, match="timed out"):
        proc.run("sleep", "10", timeout=0.1)
    with pytest.raises(proc.CommandError, match="no-such-program"):
        proc.run("no-such-program")


def test_wait_until():
    assert proc.wait_until(lambda: 5, "five") == 5
    with pytest.raises(TimeoutError, match="never"):
        proc.wait_until(lambda: 0, "never", timeout=0.05)


def test_background_is_ended():
    child = proc.Background(["sh", "-c", "trap '' TERM; echo up; while :; do sleep 1; done"])
    proc.wait_until(lambda: child.stdout() == "up\n", "child is up")
    pid = child.pid
    child.stop(grace=0.1)
    assert not child.running()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    child.close()


def test_background_dies_with_its_parent():
    code = ("import sys, time; sys.path[:0] = sys.argv[1:]\n"
            "from fbtest.proc import Background\n"
            "print(Background(['sleep', '1000']).pid, flush=True)\n"
            "import os; os.kill(os.getpid(), 9)\n")
    parent = os.path.dirname(os.path.dirname(proc.__file__))
    import subprocess
    import sys
    done = subprocess.run([sys.executable, "-c", code, parent], capture_output=True, text=True)
    pid = int(done.stdout)
    proc.wait_until(lambda: not procfs.alive(pid), "the child is gone")


def test_sampler():
    begin = time.monotonic()

    def read():
        return {"x": (time.monotonic() - begin) * 125_000}

    with measure.Sampler(read, interval=0.01) as sampler:
        proc.wait_until(lambda: len(sampler.series("x")) > 10, "ten samples")
    series = sampler.series("x")
    assert series.rate(series.time[0], series.time[-1]) == pytest.approx(1e6, rel=0.05)
    assert sampler.recent_rate("x", 0.05) == pytest.approx(1e6, rel=0.2)
    assert sampler.names() == ["x"]


def test_sampler_passes_errors_on():
    def read():
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"), measure.Sampler(read):
        pass


TESTPMD_STOP = """\
stop
Telling cores to stop...

  ---------------------- Forward statistics for port 0  ----------------------
  RX-packets: 1              RX-dropped: 0             RX-total: 1
  TX-packets: 2              TX-dropped: 3             TX-total: 5
  ----------------------------------------------------------------------------

  +++++++++++++++ Accumulated forward statistics for all ports+++++++++++++++
  RX-packets: 10             RX-dropped: 0             RX-total: 10
  TX-packets: 5077888        TX-dropped: 111345792     TX-total: 116423680
  ++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++

Done.
"""


def test_testpmd_counters():
    assert vhost.parse_stop(TESTPMD_STOP) == vhost.TestpmdCounters(5077888, 111345792, 10)
    with pytest.raises(ValueError, match="no statistics"):
        vhost.parse_stop("stop\nPacket forwarding not started\n")


def test_what_a_vm_needs_is_named(tmp_path, monkeypatch):
    """A machine without QEMU, testpmd or the guest's image is told what to do."""
    with pytest.raises(RuntimeError, match="vmlinuz is not there: run 'make guest'"):
        guest.Guest(tmp_path / "s", address="10.0.0.1/24", mac="02:00:00:00:00:01", cpus={0},
                    image=tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="dpdk-testpmd is not installed: run 'make guest'"):
        vhost.Testpmd(tmp_path / "s", cpus={0}, directory=tmp_path)
    for name in ("vmlinuz", "initrd"):
        (tmp_path / name).touch()
    with pytest.raises(RuntimeError, match="qemu-system-x86_64 is not installed: run 'make guest'"):
        guest.Guest(tmp_path / "s", address="10.0.0.1/24", mac="02:00:00:00:00:01", cpus={0},
                    image=tmp_path)


AUTOTEST_LIST = """\
openvswitch 3.5.0 test suite test groups:

 NUM: FILE-NAME:LINE     TEST-GROUP-NAME
      KEYWORDS

   9: completion.at:754  vsctl-bashcomp - negative test
 501: ofp-print.at:720   OFPT_FLOW_MOD - OF1.2 - low verbosity
      ofp-print
 502: ofp-print.at:746   OFPT_FLOW_MOD - OF1.2 - low verbosity
      ofp-print
1041: pmd.at:100         PMD - a - long (ok) title
"""
AUTOTEST_OUTPUT = """\
## openvswitch 3.5.0 test suite. ##
  9: vsctl-bashcomp - negative test                  skipped (completion.at:754)
502: OFPT_FLOW_MOD - OF1.2 - low verbosity           FAILED (ofp-print.at:746)
501: OFPT_FLOW_MOD - OF1.2 - low verbosity           ok
1041: PMD - a - long (ok) title                       FAILED (pmd.at:117)
## Test results. ##
ERROR: 4 tests were run,
2 failed unexpectedly.
502: OFPT_FLOW_MOD - OF1.2 - low verbosity           ok
1041: PMD - a - long (ok) title                       FAILED (pmd.at:117)
"""


def test_autotests_are_told_apart():
    flow_mod = "OFPT_FLOW_MOD - OF1.2 - low verbosity"
    tests = autotest.parse_list(AUTOTEST_LIST)
    assert tests == {("vsctl-bashcomp - negative test", 0): 9, (flow_mod, 0): 501,
                     (flow_mod, 1): 502, ("PMD - a - long (ok) title", 0): 1041}
    results = autotest.parse(AUTOTEST_OUTPUT, tests)
    assert results.passed == {(flow_mod, 0), (flow_mod, 1)}
    assert results.failed == {("PMD - a - long (ok) title", 0)}
    assert results.skipped == {("vsctl-bashcomp - negative test", 0)}
    assert results.unstable == {(flow_mod, 1)}


def test_a_suite_that_cannot_run_is_an_error(tmp_path):
    (tmp_path / "tests").mkdir()
    with pytest.raises(autotest.SuiteError, match="(?s)after 0 tests:.*No rule"):
        autotest.run(tmp_path)
