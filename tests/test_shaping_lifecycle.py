"""What becomes of packets that wait when something is taken away.

Each time a few hundred packets wait at a slow meter's pace when it happens.
Every packet is accounted for: by the recorder behind the port, or by a
counter, and by the packet buffers in use, which must be as many as before.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fbtest import procfs
from fbtest.ovs import Ovs
from fbtest.pcap import FlowSpec, write_flows
from fbtest.proc import wait_until
from fbtest.testbed import Recorder, Testbed

from shaping import (
    MBIT,
    MTU,
    REPO,
    Log,
    backlog,
    favour_pmds,
    pmd_threads,
)

#: 1514-byte frames at 1 Mbit/s leave 12 ms apart: HELD of them take 4 s.
RATE = MBIT
HELD = 330
#: The source's OpenFlow port number, known before it is there.
SOURCE = 77
#: A fraction of a second's worth of packets.
FILLER = 1_000_000


@dataclass
class Held:
    """HELD packets that came at once, and wait at `out`."""

    bed: Testbed
    out: Recorder
    log: Log

    def assert_all_left(self) -> None:
        """All leave, in order; nothing is kept; vswitchd finds nothing wrong."""
        wait_until(lambda: len(self.out.read()) == HELD, "all have left")
        assert list(self.out.read().seq) == list(range(HELD))
        self.bed.wait_mbufs(0)
        assert self.log.problems() == []


def hold(bed: Testbed) -> Held:
    """Have packets wait at a port `out`, of a source that has no more."""
    ovs = bed.ovs
    # Longer than any of them has to wait: at the meter, and at a port whose
    # shaper is removed.
    longest = 8_000_000
    ovs.set_config(meter_shaping=True, meter_shaping_max_delay=longest)
    out = bed.recorder("out")
    ovs.set_qos("out", "flowbundler", max_delay=longest)
    ovs.set_meter(bed.bridge, 1, RATE)
    match = f"in_port={SOURCE},ip,nw_dst=10.73.0.1"
    bed.set_flows(routes=[(match, "out")])
    ovs.add_flows(bed.bridge, [f"table=0,priority=10,{match},actions=meter:1,goto_table:1"])
    assert bed.mbufs_in_use() == 0
    # Not endless: a port that receives a file once, when it is added.  What it
    # receives before the bridge knows it is lost: FILLER packets, without a
    # flow, come first.
    path, filler = bed.dir / "src.pcap", bed.dir / "filler.pcap"
    write_flows(path, [FlowSpec(1)], HELD)
    write_flows(filler, [FlowSpec(2, dst_ip="10.73.9.9", frame_size=60)], 1)
    header, fill = filler.read_bytes()[:24], filler.read_bytes()[24:]
    path.write_bytes(header + fill * FILLER + path.read_bytes()[24:])
    bed.add_port("src", f"net_pcap,rx_pcap={path}", ofport_request=SOURCE)
    favour_pmds(bed)

    def admitted() -> int:
        meter = ovs.meter_stats(bed.bridge)[1]
        assert meter.drops == 0
        return meter.packets_in

    wait_until(lambda: admitted() == HELD, "all packets are in")
    assert backlog(ovs, "out") >= HELD * 0.8
    assert bed.mbufs_in_use() >= HELD * 0.8
    return Held(bed, out, Log(ovs))


@pytest.fixture
def held(testbed: Testbed) -> Iterator[Held]:
    """Packets that wait; afterwards vswitchd must live."""
    yield hold(testbed)
    assert testbed.ovs.alive()


def test_qos_removed(held: Held) -> None:
    """What waits leaves at its time, nothing is lost."""
    held.bed.ovs.clear_qos("out")
    first, begin = len(held.out.read()), time.monotonic()
    time.sleep(0.5)
    seconds = time.monotonic() - begin
    left = len(held.out.read()) - first
    # No burst: at their rate, give or take 10 packets (120 ms) for a noisy machine.
    assert left == pytest.approx(RATE / 8 / MTU * seconds, abs=10)
    held.assert_all_left()


def test_port_deleted(held: Held) -> None:
    """What waits is freed; other ports go on."""
    bed = held.bed
    bed.delete_port("out")
    bed.wait_mbufs(0)
    # Ports that come have DPDK warn of what their driver cannot do.
    assert held.log.problems() == []
    again = bed.recorder("again")
    bed.ovs.set_qos("again", "flowbundler")
    source = bed.source("src2", [FlowSpec(1)])
    bed.set_flows(routes=[(f"in_port={source.number}", "again")])
    # The file begins as an empty one.
    wait_until(lambda: again.path.stat().st_size > 100_000 and len(again.read()) > 1000,
               "traffic at a new port")


def test_receiving_port_deleted(held: Held) -> None:
    """Packets wait elsewhere when the port that received them goes.

    Their buffers live on until they have left: none is lost.
    """
    held.bed.delete_port("src")
    assert backlog(held.bed.ovs, "out") > 0
    held.assert_all_left()


@pytest.mark.parametrize("how", ["OpenFlow", "appctl"])
def test_port_down(held: Held, how: str) -> None:
    """A port that is down sends nothing; what comes due there is dropped."""
    bed, ovs = held.bed, held.bed.ovs

    def up(state: bool) -> None:
        if how == "OpenFlow":
            ovs.ofctl("mod-port", bed.bridge, str(held.out.number), "up" if state else "down")
        else:
            ovs.appctl("netdev-dpdk/set-admin-state", "out", "up" if state else "down")

    def dropped() -> int:
        return ovs.dump_ports(bed.bridge)["out"].tx_drop

    before = dropped()
    up(False)
    sent = len(held.out.read())
    # The rest comes due in its own time, and takes no buffers then.
    bed.wait_mbufs(0)
    assert backlog(ovs, "out") == 0
    # One may have been on its way.
    assert len(held.out.read()) - sent <= 1
    lost = HELD - len(held.out.read())
    assert lost > 0
    # Each is counted, by the port.
    assert dropped() - before == lost
    up(True)
    assert held.log.problems() == []
    source = bed.source("src2", [FlowSpec(2)])
    bed.set_flows(vm_meters={"src2": 1}, routes=[(f"in_port={source.number}", "out")])
    wait_until(lambda: bool((held.out.read().flow == 2).sum() > 10), "traffic again")


def test_pmd_threads_change(held: Held) -> None:
    """PMD threads move to another core and back; all packets leave, in order."""
    ovs = held.bed.ovs
    before = pmd_threads(ovs)
    config = ovs.get("Open_vSwitch", ".", "other_config")["pmd-cpu-mask"]
    other = next(core for core in range(os.cpu_count() or 1) if core not in ovs.pmd_cpus())
    for mask in (f"{1 << other:#x}", config):
        ovs.set_config(pmd_cpu_mask=mask)
        wait_until(lambda old=before: pmd_threads(ovs) not in ([], old), "other PMD threads")
        before = pmd_threads(ovs)
        assert backlog(ovs, "out") > 50, "nothing waits any more: no test"
    held.assert_all_left()
    # Never early, whoever sends: the last left when it was due.  2 %, because
    # the recorder's clock may run 0.2 % off, and the first one may be late.
    times = held.out.read().time_ns
    assert (times[-1] - times[0]) / 1e9 >= 0.98 * (HELD - 1) * MTU * 8 / RATE


def test_another_qos_type(held: Held) -> None:
    """A policer in the shaper's place: what waits still leaves."""
    held.bed.ovs.set_qos("out", "egress-policer", cir=125_000_000, cbs=1_000_000)
    held.assert_all_left()


def test_bridge_deleted(held: Held) -> None:
    """The whole bridge goes, its ports' QoS records still there."""
    held.bed.ovs.vsctl("del-br", held.bed.bridge)
    wait_until(held.bed.ovs.alive, "vswitchd answers")
    held.bed.wait_mbufs(0)
    assert held.log.problems() == []


# A sandbox of its own for what ends vswitchd.

_INSIDE = """
import json, os, sys
print("INSIDE " + json.dumps(dict(os.environ)), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["sandbox", "exit", "SIGTERM"])
def test_vswitchd_stopped(ovs_env: dict[str, str], tmp_path: Path, how: str) -> None:
    """vswitchd ends while packets wait: in order, soon, and without a crash.

    It is another vswitchd than the other tests'.  This process stays outside
    its network namespace, so ports are such that need no network device.
    """
    errors = tmp_path / "sandbox.err"
    tree = ovs_env.get("FB_OVS_TREE")
    options = ["--stock-tree", tree] if tree else []
    with errors.open("w") as file:
        sandbox = subprocess.Popen(
            [str(REPO / "utilities" / "fb-sandbox"), "run", "--private-net", "--memory", "512",
             *options, "--", sys.executable, "-c", _INSIDE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
            start_new_session=True)
    assert sandbox.stdin is not None and sandbox.stdout is not None
    try:
        first = sandbox.stdout.readline()
        assert first.startswith("INSIDE "), errors.read_text()
        env = json.loads(first.removeprefix("INSIDE "))
        ovs = Ovs(env)
        pid = ovs.pid()
        with Testbed(env) as bed:
            log = hold(bed).log
            if how == "exit":
                ovs.appctl("exit")
            elif how == "SIGTERM":
                os.kill(pid, signal.SIGTERM)
            else:
                sandbox.stdin.close()
            wait_until(lambda: not procfs.alive(pid), "vswitchd has ended", 20)
            lines = log.lines()
            # The database goes too: the testbed need not wait for vswitchd.
            if how != "sandbox":
                sandbox.stdin.close()
            status = sandbox.wait(30)
    finally:
        if sandbox.poll() is None:
            sandbox.terminate()
            sandbox.wait(30)
        sandbox.stdout.close()
    # A crash ends in the log with the signal's number, or without a word.
    assert not [line for line in lines if "|ERR|" in line or "|EMER|" in line], lines
    if how == "sandbox":
        assert status == 0, errors.read_text()
        assert "crashed" not in errors.read_text()
