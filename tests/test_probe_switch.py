"""The probe in a real vswitchd with DPDK: what it sees, and what it survives."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fbtest.fixtures import sandbox
from fbtest.ovs import Ovs
from fbtest.pcap import FlowSpec, tagged_frame
from fbtest.probe import (
    Probe,
    ProbeError,
    Telemetry,
    batches,
    cli,
    flow_rates,
    lateness,
    read_recording,
)
from fbtest.probe.control import BUILD, connect, dpdk_port
from fbtest.proc import group_nice, run, wait_until
from fbtest.switch import SANDBOX
from fbtest.testbed import Testbed

from shaping import MBIT, favour_pmds, run_for, write_results

SHM = Path("/dev/shm")


def address(flow: int) -> int:
    """10.73.0.FLOW as a number."""
    return 0x0A490000 + flow


def flood(bed: Testbed, flows: int = 4, size: int = 600) -> None:
    """Flows as fast as the PMD thread makes them, through port "out" to nowhere."""
    source = bed.source("src", [FlowSpec(n, dst_ip=f"10.73.0.{n}", frame_size=size)
                                for n in range(1, flows + 1)])
    bed.sink("out")
    bed.set_flows(routes=[(f"in_port={source.number}", "out")])


def shaped(bed: Testbed, rates: dict[int, int]) -> None:
    """Flows with a meter each, far above their rates, on a shaped port "out"."""
    bed.ovs.set_config(meter_shaping=True)
    source = bed.source("src", [FlowSpec(n, dst_ip=f"10.73.0.{n}", frame_size=600)
                                for n in rates])
    bed.sink("out")
    bed.ovs.set_qos("out", "flowbundler")
    for n, rate in rates.items():
        bed.ovs.set_meter(bed.bridge, n, rate)
    bed.set_flows(dest_meters=[(f"ip,nw_dst=10.73.0.{n}", n) for n in rates],
                  routes=[(f"in_port={source.number}", "out")])


def mappings(ovs: Ovs) -> int:
    """How many of the probe's files vswitchd has mapped."""
    return Path(f"/proc/{ovs.pid()}/maps").read_text().count("/fbprobe-")


def test_rates_and_lateness_of_shaped_flows(probe_testbed: Testbed) -> None:
    bed, rates = probe_testbed, {1: 20 * MBIT, 2: 50 * MBIT, 3: 100 * MBIT, 4: 200 * MBIT}
    shaped(bed, rates)
    favour_pmds(bed)
    run_for(bed.ovs, 0.5)
    with Probe(bed.ovs, "out", edt=True) as probe:
        before = bed.ovs.meter_stats(bed.bridge)
        run_for(bed.ovs, 4)
        after = bed.ovs.meter_stats(bed.bridge)
    recording = probe.recording()
    found = flow_rates(recording.records)
    late = lateness(recording.records, recording.clock_error_ns)
    print(late, recording.clock_error_ns, batches(recording.records))
    write_results("probe", {"shaped": {
        "deviation": {n: found[address(n)].rate / rate - 1 for n, rate in rates.items()},
        "clock_error_ns": recording.clock_error_ns, "lateness_ns": late.percentiles}})

    assert set(found) == {address(n) for n in rates}
    for n, rate in rates.items():
        # 4 s are long against the PMD thread's gaps.
        assert found[address(n)].rate == pytest.approx(rate, rel=0.005)
        passed = (after[n].packets_in - after[n].drops) - (before[n].packets_in - before[n].drops)
        # What was there before, and max-delay's worth of what waits, may differ.
        assert found[address(n)].packets == pytest.approx(passed, rel=0.05)
    counters = recording.counters
    assert counters.packets == len(recording.records) and counters.lost == 0
    assert counters.bytes == 600 * counters.packets
    # A microsecond would be much for a clock that the vDSO makes from the TSC.
    assert recording.clock_error_ns < 1000
    assert late.packets == len(recording.records) and late.early == 0
    assert late.percentiles[50.0] < 1e6


def test_packets_that_are_copied_for_dpdk_keep_their_edts(probe_testbed: Testbed) -> None:
    """Those that the bridge's own interface, a tap, sends."""
    bed = probe_testbed
    bed.ovs.set_config(meter_shaping=True)
    sink = bed.sink("out")
    bed.ovs.set_qos("out", "flowbundler")
    bed.ovs.set_meter(bed.bridge, 1, MBIT)
    bed.ovs.replace_flows(bed.bridge, [f"in_port=LOCAL,udp,actions=meter:1,{sink.number}"])
    frame = tagged_frame(FlowSpec(1, frame_size=250))
    run("ip", "link", "set", bed.bridge, "up")
    with Probe(bed.ovs, "out", edt=True) as probe, socket.socket(
            socket.AF_PACKET, socket.SOCK_RAW) as interface:
        interface.bind((bed.bridge, 0))
        for _ in range(20):
            interface.send(frame)
        wait_until(lambda: len(probe.records()) == 20, "all have left")
    recording = probe.recording()
    late = lateness(recording.records, recording.clock_error_ns)
    assert late.packets == 20 and late.early == 0
    # 250 bytes at 1 Mbit/s.
    assert np.diff(recording.records["edt_ns"]).tolist() == pytest.approx([2e6] * 19, abs=2)


def test_flows_by_other_fields(probe_testbed: Testbed) -> None:
    bed = probe_testbed
    shaped(bed, {1: 20 * MBIT, 2: 20 * MBIT})

    def seen(**options: Any) -> set[int]:
        with Probe(bed.ovs, "out", **options) as probe:
            run_for(bed.ovs, 0.3)
        return set(probe.records()["flow"].tolist())

    assert seen() == {address(1), address(2)}
    assert seen(flow="src") == {0x0A480001}
    # The ports of the test packets, 10000 and 9.
    assert seen(flow="offset:34") == {10000 << 16 | 9}
    assert seen(flow="offset:1000") == {0}
    # The datapath's ids of the two meters.
    assert len(seen(flow="meter")) == 2


def test_a_burst_waits_as_told(probe_testbed: Testbed) -> None:
    bed, wait = probe_testbed, 20_000
    flood(bed)
    favour_pmds(bed)
    gaps = {}
    for ns in (0, wait):
        with Probe(bed.ovs, "out", burst_wait_ns=ns, records=1 << 16) as probe:
            run_for(bed.ovs, 0.3)
        recording = probe.recording()
        starts = recording.records["time_ns"][recording.records["position"] == 0]
        gaps[ns] = np.diff(starts)
    print({ns: np.percentile(g, [0, 50, 99]) for ns, g in gaps.items()})
    # Times are rounded, and the TSC's frequency is as DPDK rounds it.
    assert gaps[wait].min() >= wait * 0.99
    # It costs what it says, beside what a burst costs anyhow.
    assert np.median(gaps[wait]) - np.median(gaps[0]) == pytest.approx(wait, rel=0.1)


@pytest.mark.full
def test_what_recording_costs(probe_testbed: Testbed) -> None:
    """The rate at which one PMD thread forwards, recorded or not; paired."""
    bed = probe_testbed
    flood(bed, size=64)
    favour_pmds(bed)

    def packet_ns() -> float:
        first, start = bed.ovs.dump_ports(bed.bridge)["out"].tx_packets, time.monotonic_ns()
        run_for(bed.ovs, 1)
        last, end = bed.ovs.dump_ports(bed.bridge)["out"].tx_packets, time.monotonic_ns()
        return (end - start) / (last - first)

    kinds: dict[str, dict[str, Any]] = {
        "counted": {"records": 0}, "recorded": {"wrap": True},
        "with edt": {"wrap": True, "edt": True}, "by meter": {"wrap": True, "flow": "meter"}}
    costs: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(3):
        for kind, options in kinds.items():
            without = packet_ns()
            with Probe(bed.ovs, "out", **options):
                costs[kind].append(packet_ns() - without)
    cost = {kind: float(np.median(values)) for kind, values in costs.items()}
    print({kind: f"{ns:.1f} ns" for kind, ns in cost.items()}, f"of {without:.1f} ns")
    write_results("probe", {"cost_ns": cost, "packet_ns": without})
    # Generous: the machine has other work.
    assert max(cost.values()) < 100


def test_ring_that_is_full_counts_what_it_lost(probe_testbed: Testbed) -> None:
    flood(probe_testbed)
    with Probe(probe_testbed.ovs, "out", records=2000) as probe:
        run_for(probe_testbed.ovs, 0.3)
    recording = probe.recording()
    counters = recording.counters
    # 2048 in bursts of at most 32, and not one of them is a part.
    assert 2048 - 32 < len(recording.records) <= 2048
    assert counters.lost > 0 and counters.overwritten == 0
    assert counters.lost + len(recording.records) == counters.packets


def test_a_ring_that_wraps_is_read_while_it_is_written(probe_testbed: Testbed) -> None:
    flood(probe_testbed)
    sizes = []
    with Probe(probe_testbed.ovs, "out", records=1 << 18, wrap=True) as probe:
        run_for(probe_testbed.ovs, 0.1)
        for _ in range(20):
            r = probe.records()
            sizes.append(len(r))
            assert np.all(np.diff(r["time_ns"]) >= 0)
            # Bursts are whole but for the last: positions count up from 0.
            same = np.diff(r["burst"]) == 0
            assert np.all(np.diff(r["position"].astype(int))[same] == 1)
            assert np.all(r["position"][1:][~same] == 0)
            # If this process had to pause, all that it has copied may be void.
            assert set(r["bytes"].tolist()) <= {600}
    assert max(sizes) > 1000
    recording = probe.recording()
    assert (1 << 18) - 32 < len(recording.records) <= 1 << 18
    assert recording.counters.lost == 0
    assert recording.counters.overwritten + len(recording.records) == recording.counters.packets


def test_attached_twice_and_nothing_is_left(probe_testbed: Testbed) -> None:
    bed = probe_testbed
    flood(bed)
    before = sorted(SHM.iterdir())
    for _ in range(2):
        with Probe(bed.ovs, "out") as probe:
            assert mappings(bed.ovs) == 1
            with pytest.raises(ProbeError, match="is being recorded already"), \
                    Probe(bed.ovs, "out"):
                pass
            run_for(bed.ovs, 0.2)
        assert len(probe.records()) > 1000
        # The callbacks have gone, and so has the memory.
        assert mappings(bed.ovs) == 0
        counted = probe.recording().counters
        run_for(bed.ovs, 0.1)
        assert probe.recording().counters == counted
    assert sorted(SHM.iterdir()) == before


def test_a_port_is_reconfigured_while_it_is_recorded(probe_testbed: Testbed) -> None:
    bed = probe_testbed
    # Frames of zeros, and as many tx queues as there are PMD threads and one more.
    source = bed.add_port("src", "net_null")
    bed.sink("out")
    bed.set_flows(routes=[(f"in_port={source.number}", "out")])
    (cpu,) = bed.ovs.pmd_cpus()
    # With a PMD thread on each of two cores, this test has to get its share.
    group_nice(bed.ovs.pid(), 0)
    with Probe(bed.ovs, "out", queues=3, wrap=True) as probe:
        packets = probe.packet_counter()
        assert probe.status()["recorded"] == probe.status()["tx_queues"] == 2
        seen = packets()
        for mask in ("0x3", hex(1 << cpu)) * 2:
            bed.ovs.set_config(pmd_cpu_mask=mask)
            queues = 2 if mask == hex(1 << cpu) else 3
            wait_until(lambda n=queues: probe.status()["tx_queues"] == n, f"{queues} tx queues")
            # A third queue is recorded as soon as it is noticed.
            wait_until(lambda n=queues: probe.status()["recorded"] >= n, "all are recorded")
            before = seen
            wait_until(lambda n=before: packets() > n + 10_000, "packets are recorded")
            seen = packets()
    assert len(probe.records()) > 10_000
    # The third queue was not there any more when its callback was to be removed.
    # Once it is there again it must not have two of them.
    bed.ovs.set_config(pmd_cpu_mask="0x3")
    with Probe(bed.ovs, "out", queues=3, wrap=True) as probe:
        packets = probe.packet_counter()
        wait_until(lambda: probe.status()["recorded"] == 3, "all are recorded")
        wait_until(lambda: packets() > 10_000, "packets are recorded")
        before = bed.ovs.dump_ports(bed.bridge)["out"].tx_packets
        start = packets()
        run_for(bed.ovs, 1)
        after = bed.ovs.dump_ports(bed.bridge)["out"].tx_packets
        end = packets()
    assert end - start == pytest.approx(after - before, rel=0.1)


def test_a_port_goes_while_it_is_recorded(probe_testbed: Testbed) -> None:
    bed = probe_testbed
    flood(bed)
    for _ in range(3):
        number = dpdk_port(bed.ovs, "out")
        with Probe(bed.ovs, "out") as probe:
            run_for(bed.ovs, 0.1)
            bed.delete_port("out")
            with connect(bed.ovs) as telemetry:
                assert telemetry.command("/fbprobe/status") == []
                # DPDK gives its number to the next port.
                with pytest.raises(ProbeError, match="port: "):
                    telemetry.command("/fbprobe/status", number)
            assert probe.recording().settings["stopped"]
            assert len(probe.records()) > 0
            assert mappings(bed.ovs) == 0
            bed.sink("out")
            bed.set_flows(routes=[(f"in_port={bed.ports['src'].number}", "out")])
            with pytest.raises(ProbeError, match="is not being recorded"):
                probe.stop()


@pytest.mark.parametrize(("parameters", "message"), [
    ("nosuch", "port: 'nosuch' is not allowed: the number or name of one of DPDK's 2 ports"),
    ("99", "port: '99' is not allowed"),
    ("-1", "port: '-1' is not allowed"),
    ("", "port: '' is not allowed"),
    ("PORT,colour=red", "'colour' is not a key: file, records, queues, flow, "
                        "edt_offset, edt_valid_offset, burst_wait_ns and mode are"),
    ("PORT,records", "'records' is not allowed: KEY=VALUE"),
    ("PORT,records=5", "records: '5' is not allowed: a number from 1024 to 268435456"),
    ("PORT,records=-1024", "records: '-1024' is not allowed"),
    ("PORT,records=99999999999999999999", "records: '99999999999999999999' is not allowed"),
    ("PORT,queues=1025", "queues: '1025' is not allowed: a number from 0 to 1024"),
    ("PORT,burst_wait_ns=1000001", "burst_wait_ns: '1000001' is not allowed: a number from "
                                   "0 to 1000000"),
    ("PORT,burst_wait_ns=1us", "burst_wait_ns: '1us' is not allowed"),
    ("PORT,edt_offset=1017", "edt_offset: '1017' is not allowed: a number from 0 to 1016"),
    ("PORT,flow=dest", "flow: 'dest' is not allowed: dst, src, offset:BYTES or mbuf:BYTES"),
    ("PORT,flow=offset:", "flow=offset: '' is not allowed: a number from 0 to 1020"),
    ("PORT,mode=ring", "mode: 'ring' is not allowed: stop or wrap"),
    ("PORT,file=relative", "file: 'relative' is not allowed: an absolute path of at most 127"),
    ("PORT,file=/dev/shm", "file: /dev/shm: File exists"),
    ("PORT,file=/nowhere/f", "file: /nowhere/f: No such file or directory"),
    ("PORT,records=1024;mode=\"x\\", "mode: '?x?' is not allowed"),
])
def test_bad_parameters_are_refused(probe_testbed: Testbed, parameters: str,
                                    message: str) -> None:
    probe_testbed.sink("out")
    probe_testbed.sink("other")
    number = dpdk_port(probe_testbed.ovs, "out")
    before = sorted(SHM.iterdir())
    with connect(probe_testbed.ovs) as telemetry:
        with pytest.raises(ProbeError) as caught:
            telemetry.command("/fbprobe/start", parameters.replace("PORT", number))
        assert message in str(caught.value)
        assert telemetry.command("/fbprobe/status") == []
        with pytest.raises(ProbeError, match=f"port: {number} is not being recorded"):
            telemetry.command("/fbprobe/stop", number)
    assert sorted(SHM.iterdir()) == before


def test_ports_that_cannot_be_recorded(probe_testbed: Testbed) -> None:
    probe_testbed.sink("out")
    with pytest.raises(ProbeError, match="port: 'nosuch' is not a port of the switch: out"), \
            Probe(probe_testbed.ovs, "nosuch"):
        pass
    with pytest.raises(ProbeError, match="is not driven by DPDK"), \
            Probe(probe_testbed.ovs, probe_testbed.bridge):
        pass


def test_a_switch_without_the_probe_says_so(testbed: Testbed) -> None:
    testbed.sink("out")
    with pytest.raises(ProbeError, match="no telemetry socket"), Probe(testbed.ovs, "out"):
        pass


def test_a_socket_that_nobody_answers(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="No such file"):
        Telemetry(tmp_path / "nosuch")


def test_the_command_line(probe_testbed: Testbed, tmp_path: Path, capsys: Any,
                          monkeypatch: pytest.MonkeyPatch) -> None:
    flood(probe_testbed)
    for key, value in probe_testbed.ovs.env.items():
        monkeypatch.setenv(key, value)
    before = sorted(SHM.iterdir())
    out = tmp_path / "out"
    assert cli.main(["record", "out", "0.2", "--edt", "--records", "4096",
                     "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {
        "out.fbp", "report.json", "report.txt", "report.png"}
    assert "10.73.0.1" in capsys.readouterr().out
    assert sorted(SHM.iterdir()) == before

    file = tmp_path / "mine.fbp"
    assert cli.main(["start", "out", "--file", str(file), "--records", "1024"]) == 0
    assert cli.main(["status", "out"]) == 0
    assert str(file) in capsys.readouterr().out
    assert cli.main(["stop", "out"]) == 0
    assert cli.main(["stop", "out"]) == 1
    assert "is not being recorded" in capsys.readouterr().err
    assert cli.main(["report", str(file)]) == 0


def test_armed_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "departures.fbp"
    running = sandbox("--probe", "--memory", "512",
                      FBPROBE=f"port=net_null77,records=4096;file={file}")
    env = next(running)
    try:
        with Testbed(env) as bed:
            source = bed.source("src", [FlowSpec(1)])
            bed.ovs.vsctl("add-port", bed.bridge, "out", "--", "set", "Interface", "out",
                          "type=dpdk", "options:dpdk-devargs=net_null77,no-rx=1")
            number = bed.ovs.get("Interface", "out", "ofport")
            bed.ovs.replace_flows(bed.bridge, [f"in_port={source.number},actions={number}"])
            wait_until(file.exists, "the port is recorded")
            wait_until(lambda: read_recording(file).counters.lost > 0, "the ring is full")
        # The port was closed with the bridge.
        assert read_recording(file).settings["stopped"]
    finally:
        assert next(running, None) is None


def test_clock_agrees_with_this_process(probe_testbed: Testbed) -> None:
    flood(probe_testbed)
    start = time.monotonic_ns()
    with Probe(probe_testbed.ovs, "out", records=1 << 14) as probe:
        run_for(probe_testbed.ovs, 0.1)
    end = time.monotonic_ns()
    times = probe.records()["time_ns"]
    assert start < times[0] < times[-1] < end


def test_the_sandbox_says_that_the_plug_in_is_not_built(tmp_path: Path) -> None:
    result = subprocess.run(
        [SANDBOX, "run", "--run-dir", tmp_path / "run", "--probe", "--stock-tree",
         BUILD / "ovs", "--", "true"], env={**os.environ, "FB_BUILD": str(tmp_path)},
        capture_output=True, text=True)
    assert result.returncode == 125
    assert f"{tmp_path}/librte_fbprobe.so is not there: run 'make probe'" in result.stderr
