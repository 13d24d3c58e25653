"""Devices and machines that fail: what that costs is bounded, counted, and over when they work.

No one else has less meanwhile, and no buffer is lost.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest
from benchmarks.frames import SMALL, frames
from fbtest.analysis import max_excess, paced_rate
from fbtest.clock import CaptureClock
from fbtest.fixtures import checked_testbed, sandbox
from fbtest.netns import Namespace, add_veth, delete_link, unique_name
from fbtest.pcap import FlowSpec, tagged_frame, write_flows, write_frames
from fbtest.proc import run, wait_until
from fbtest.testbed import Recorder, Testbed
from scapy.utils import RawPcapReader

from oracle import FLOWS, FRAME_BYTES, Oracle
from shaping import (
    MBIT,
    MTU,
    NS,
    REFERENCE_METER,
    SHAPER_DROPS,
    Log,
    Reference,
    assert_backlogged,
    assert_conforms,
    backlog,
    capture,
    favour_pmds,
    longest_gap,
    run_for,
)

HERE = Path(__file__).resolve().parent

#: Sends the frames of a file.
SENDER = """
import socket, sys
from scapy.utils import RawPcapReader
interface = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
interface.bind((sys.argv[1], 0))
for frame, _ in RawPcapReader(sys.argv[2]):
    interface.send(frame)
"""


def shown(bed: Testbed, port: str) -> dict[str, int]:
    """What flowbundler/show has for `port`."""
    return bed.ovs.flowbundler_show(port)[port]


def mbufs_at_rest(bed: Testbed) -> int:
    """mbufs in use, without those that a PMD thread has in its hands just now."""
    return min(bed.mbufs_in_use() for _ in range(5))


def wait_mbufs_at_rest(bed: Testbed, expected: int) -> None:
    """Wait until no more than `expected` are."""
    wait_until(lambda: mbufs_at_rest(bed) <= expected, f"{expected} mbufs in use, at most", 15, 0.1)


# A device that does not take what it is given.


def test_vm_that_takes_a_part(testbed: Testbed) -> None:
    """What a full virtqueue does not take is dropped there, as without a shaper."""
    oracle = Oracle(testbed)
    before = shown(testbed, "out")
    failed = oracle.ovs.dump_ports(testbed.bridge)["out"].custom["ovs_tx_failure_drops"]
    oracle.start()
    for _ in range(4):
        # The virtqueue has room for 1024 packets, of thousands that come in a second.
        full = oracle.drops().get("out tx", 0)
        oracle.receiver.pause()
        try:
            wait_until(lambda full=full: oracle.drops().get("out tx", 0) > full + 50,
                       "the virtqueue is full", 10)
        finally:
            oracle.receiver.resume()
        oracle.wait_traffic()
    sums = oracle.check(may_drop=("out tx",))
    after = shown(testbed, "out")
    left = sum(after[name] - before[name] for name in ("sent", "bypassed"))
    print(sums, left)
    # What the shaper says has left is what the device was given.
    assert left == sums.receiver.received + sums.drops["out tx"]
    custom = oracle.ovs.dump_ports(testbed.bridge)["out"].custom
    assert custom["ovs_tx_failure_drops"] - failed == sums.drops["out tx"]


def test_vm_that_is_gone(testbed: Testbed) -> None:
    """What is due at a port without its VM is dropped; the sender goes on."""
    oracle = Oracle(testbed)
    oracle.start()
    oracle.receiver.close()
    # (OVS has no counters of a port that no VM is connected to.)
    for _ in range(3):
        # More than what had been offered before: nobody is held up.
        left, sent = shown(testbed, "out")["sent"], oracle.sender.report().sent
        wait_until(lambda left=left: shown(testbed, "out")["sent"] > left + 1000, "they leave", 10)
        wait_until(lambda sent=sent: oracle.sender.report().sent > sent + 1000, "more comes", 10)
    assert not any(shown(testbed, "out")[name] for name in SHAPER_DROPS)
    oracle.sender.rate(0)
    wait_until(lambda: oracle.sender.report().pending == 0, "the VM has sent all", 10)
    wait_until(lambda: backlog(oracle.ovs, "out") == 0, "all has left", 10)
    testbed.wait_mbufs(oracle._mbufs)

    oracle.out.path.unlink(missing_ok=True)
    oracle.receiver = testbed.vm(oracle.out, flows=FLOWS, frame_bytes=FRAME_BYTES)
    # The switch may take a moment to set the port up again.
    wait_until(lambda: oracle.ovs.dump_ports(testbed.bridge)["out"].tx_drop > 3000,
               "what was dropped is told", 10)
    oracle.forget()
    oracle.start()
    oracle.stop()
    oracle.forget()
    oracle.start()
    oracle.run(0.3)
    print(oracle.check())


@pytest.mark.parametrize("how", ["link", "port"])
def test_device_that_is_down(testbed: Testbed, how: str) -> None:
    """A port whose link, or which itself, is down holds up nobody else."""
    bed, ovs, rate = testbed, testbed.ovs, 50 * MBIT
    ovs.set_config(meter_shaping=True)
    dead, other = bed.host("dead"), bed.host("other")
    for n, host in enumerate((dead, other), 1):
        ovs.set_qos(host.name, "flowbundler")
        ovs.set_meter(bed.bridge, n, rate)
    bed.source("src", [FlowSpec(n, dst_ip=f"10.73.0.{n}", frame_size=1000) for n in (1, 2)])
    rest = mbufs_at_rest(bed)
    favour_pmds(bed)
    bed.set_flows(dest_meters=[(f"ip,nw_dst=10.73.0.{n}", n) for n in (1, 2)],
                  routes=[("ip,nw_dst=10.73.0.1", "dead"), ("ip,nw_dst=10.73.0.2", "other")])

    def set_down(is_down: bool) -> None:
        if how == "link":
            dead.ns.ip("link", "set", "eth0", "down" if is_down else "up")
        else:
            ovs.ofctl("mod-port", bed.bridge, "dead", "down" if is_down else "up")

    with bed.sampler() as sampler:
        run_for(ovs, 0.7)
        for _ in range(2):
            set_down(True)
            run_for(ovs, 0.7)
            set_down(False)
            # The kernel may take a moment to bring the link up.
            run_for(ovs, 0.2)
        up = time.monotonic()
        run_for(ovs, 2.5)
        end = time.monotonic()
    undisturbed = sampler.series("other.tx_bytes")
    recovered = sampler.series("dead.tx_bytes").rate(up + 0.3, end - 0.1)
    rates = undisturbed.rate(up - 1.5, end - 0.1), recovered
    print(rates)
    # 2 %: a PMD thread that is stopped for some ms sends late what falls into a sample.
    assert rates[0] == pytest.approx(rate, rel=0.02)
    assert recovered == pytest.approx(rate, rel=0.02)
    assert backlog(ovs, "dead") <= rate / 8 / 1000 * 0.05 * 1.1 + 2
    ovs.replace_flows(bed.bridge, [])
    wait_mbufs_at_rest(bed, rest)


def test_frames_that_are_too_long(testbed: Testbed) -> None:
    """Those above the port's MTU are dropped when they leave; others of their FIFO pass."""
    bed, ovs, rate = testbed, testbed.ovs, 20 * MBIT
    ovs.set_config(meter_shaping=True)
    path = bed.dir / "src.pcap"
    write_flows(path, [FlowSpec(n, frame_size=size) for n, size in ((1, 600), (2, 3000))], 16)
    bed.add_port("src", f"net_pcap,rx_pcap={path},infinite_rx=1", mtu_request=9000)
    out = bed.recorder("out")
    ovs.set_qos("out", "flowbundler")
    ovs.set_meter(bed.bridge, 1, rate)
    rest = mbufs_at_rest(bed)
    bed.set_flows(vm_meters={"src": 1}, routes=[("ip", "out")])
    wait_until(lambda: shown(bed, "out")["sent"] > 1000, "packets leave", 20)
    ovs.replace_flows(bed.bridge, [])
    wait_until(lambda: backlog(ovs, "out") == 0, "all has left", 10)
    shaper, counters = shown(bed, "out"), ovs.dump_ports(bed.bridge)["out"]
    left = shaper["sent"] + shaper["bypassed"]
    too_long = counters.custom["ovs_tx_mtu_exceeded_drops"]
    packets = out.read()
    print(left, too_long, len(packets))
    assert left == len(packets) + too_long and too_long > 0
    assert set(packets.length.tolist()) == {600}
    assert counters.tx_drop == too_long
    wait_mbufs_at_rest(bed, rest)


def test_frames_in_several_buffers(testbed: Testbed) -> None:
    """A frame that its driver received into a chain of buffers waits and leaves as one."""
    bed, ovs, rate, sizes, each = testbed, testbed.ovs, 4 * MBIT, (600, 3000), 200
    ovs.set_config(meter_shaping=True, meter_shaping_max_delay=5_000_000)
    out = bed.recorder("out")
    ovs.vsctl("set", "Interface", "out", "mtu_request=9000")
    ovs.set_qos("out", "flowbundler", max_delay=5_000_000)
    ovs.set_meter(bed.bridge, 1, rate)
    ovs.replace_flows(bed.bridge, [f"ip,actions=meter:1,output:{out.number}"])
    path, generator = bed.dir / "src.pcap", random.Random(1)
    write_flows(path, [FlowSpec(n, frame_size=size) for n, size in enumerate(sizes, 1)], each)
    with RawPcapReader(str(path)) as reader:
        sent = [frame[:64] + generator.randbytes(len(frame) - 64) for frame, _ in reader]
    write_frames(path, sent)
    peer = bed._keep(Namespace(unique_name("peer")))
    outer = unique_name("outer")
    bed._stack.callback(delete_link, outer)
    add_veth(outer, peer, "eth0", "02:fb:00:00:ff:01", "10.71.255.1/24", mtu=9000)
    # The port's buffers have room for its MTU, not the interface's: two hold a frame of 3000.
    bed.add_port("src", f"net_pcap,iface={outer}")
    rest = bed.mbufs_in_use()
    peer.exec(sys.executable, "-c", SENDER, "eth0", str(path))
    wait_until(lambda: ovs.meter_stats(bed.bridge)[1].packets_in == 2 * each, "all have come", 10)
    held, waiting = bed.mbufs_in_use() - rest, backlog(ovs, "out")
    wait_until(lambda: backlog(ovs, "out") == 0, "all have left", 10)
    with RawPcapReader(str(out.path)) as reader:
        received = [frame for frame, _ in reader]
    packets = out.read()
    found = paced_rate(packets.time_ns, packets.length)
    print(f"{held} buffers in use by {waiting} packets; {found / MBIT:.4f} Mbit/s")
    assert waiting > each and held > 1.4 * waiting
    assert received == sent
    # 1 %: the meter's burst, and what a poll that is late at either end moves, of 1.4 s.
    assert found == pytest.approx(rate, rel=0.01)
    wait_mbufs_at_rest(bed, rest)


# Buffers.


@pytest.fixture
def small_testbed() -> Iterator[Testbed]:
    """On a switch with few packet buffers."""
    for env in sandbox("--memory", "192"):
        yield from checked_testbed(env)


def pool_size(bed: Testbed) -> int:
    """All mbufs of all pools."""
    text = bed.ovs.appctl("netdev-dpdk/get-mempool-info")
    return sum(int(line.split("=")[1]) for line in text.splitlines()
               if line.strip().startswith("populated_size="))


def test_tenants_that_fill_the_pool(small_testbed: Testbed) -> None:
    """Those who let all wait that they may, for 10 s, leave buffers for others to receive in."""
    bed, ovs, meters = small_testbed, small_testbed.ovs, 8
    ovs.set_config(meter_shaping=True)
    out = bed.host("out")
    ovs.set_qos("out", "flowbundler")
    routes = []
    for n in range(3):
        # 10 s of 8 x 2 Mbit/s are 312,500 frames of 64 bytes.
        flows = [FlowSpec(i, dst_ip=f"10.73.{n}.{i}", frame_size=64) for i in range(meters)]
        greedy = bed.source(f"greedy{n}", flows, packets_per_flow=4)
        routes.append((f"in_port={greedy.number}", "out"))
        for i in range(meters):
            ovs.ofctl("add-meter", bed.bridge, f"meter={1 + n * meters + i} kbps "
                      "bands=type=shape rate=2000 max_delay=10000000")
    calm = bed.source("calm", [FlowSpec(99, dst_ip="10.74.0.1", frame_size=1000)])
    bed.host("web")
    ovs.set_qos("web", "flowbundler")
    rate = 100 * MBIT
    ovs.set_meter(bed.bridge, 90, rate)
    routes.append((f"in_port={calm.number}", "web"))
    rest, size = mbufs_at_rest(bed), pool_size(bed)
    favour_pmds(bed)
    bed.set_flows(vm_meters={"calm": 90}, routes=routes, dest_meters=[
        (f"ip,nw_dst=10.73.{n}.{i}", 1 + n * meters + i) for n in range(3) for i in range(meters)])
    greedy_meters = range(1, 1 + 3 * meters)
    wait_until(lambda: all(ovs.meter_stats(bed.bridge)[n].drops > 1000 for n in greedy_meters),
               "there is no room for more", 30)
    # They have dropped that, long before the 10 s, and nothing else had to be.
    assert not any(shown(bed, "out")[name] for name in SHAPER_DROPS)
    held = backlog(ovs, "out")
    with bed.sampler() as sampler:
        run_for(ovs, 3)
    used = bed.mbufs_in_use()
    series = sampler.series("web.tx_bytes")
    found = series.rate(series.time[0] + 0.2, series.time[-1])
    print(f"{held} packets wait, {used} of {size} mbufs in use, {rest} at rest; "
          f"calm {found / MBIT:.2f} Mbit/s")
    # Enough for this to be a test, and no more than is said.
    assert 0.2 * size < held <= 0.75 * size
    assert used <= rest + 0.75 * size + 512
    assert found == pytest.approx(rate, rel=0.01)
    ovs.replace_flows(bed.bridge, [])
    bed.delete_port("out")
    del bed.hosts["out"]
    wait_mbufs_at_rest(bed, rest)
    assert out.name not in ovs.flowbundler_show()


def test_no_buffer_to_copy_into(small_testbed: Testbed) -> None:
    """Packets that no DPDK device received are dropped one by one if there is no buffer.

    The pool is used up by what a port keeps for itself, as rings do, and what waits.
    """
    bed, ovs, meters = small_testbed, small_testbed.ovs, 8
    ovs.set_config(meter_shaping=True, meter_shaping_max_delay=3_000_000)
    for name in ("slow", "web"):
        bed.sink(name)
        ovs.set_qos(name, "flowbundler", max_delay=3_000_000)
    rest = mbufs_at_rest(bed)
    # The driver keeps a buffer for each packet of its file.  What is left is less than what may
    # wait: 8 x 100 kbit/s for 3 s are 4687 frames.
    kept = (pool_size(bed) - rest - 2000) // meters
    hog = bed.source("hog", [FlowSpec(i, dst_ip=f"10.73.0.{i}", frame_size=64)
                             for i in range(meters)], packets_per_flow=kept)
    for i in range(meters):
        ovs.set_meter(bed.bridge, 1 + i, 100_000)
    # All of what is sent at once leaves in one batch.
    ovs.set_meter(bed.bridge, 90, 10 * MBIT, burst_bits=20 * 250 * 8)
    web = f"in_port=LOCAL,udp,actions=meter:90,output:{bed.ports['web'].number}"
    ovs.replace_flows(bed.bridge, [web, *(
        f"in_port={hog.number},ip,nw_dst=10.73.0.{i},actions=meter:{1 + i},"
        f"output:{bed.ports['slow'].number}" for i in range(meters))])
    run("ip", "link", "set", bed.bridge, "up")
    frame = bytes(tagged_frame(FlowSpec(1, dst_ip="10.74.0.1", frame_size=250)))
    sent = 0

    def outcome() -> tuple[int, int]:
        counters = ovs.dump_ports(bed.bridge)["web"]
        return counters.tx_packets, counters.custom["ovs_tx_failure_drops"]

    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as interface:
        interface.bind((bed.bridge, 0))

        def send() -> tuple[int, int]:
            nonlocal sent
            for _ in range(20):
                interface.send(frame)
            sent += 20
            wait_until(lambda: sum(outcome()) == sent, "each is sent or counted", 10)
            return outcome()

        def splits_a_batch() -> bool:
            (passed, failed), (more, worse) = outcome(), send()
            return more > passed and worse > failed

        # With the pool used up there are now no buffers, now some: fewer than one receive
        # from the hog takes.
        wait_until(splits_a_batch, "there are buffers for a part of a batch", 20)
        used, size = bed.mbufs_in_use(), pool_size(bed)
        ovs.replace_flows(bed.bridge, [web])
        wait_until(lambda: backlog(ovs, "slow") == 0, "all has left", 10)
        bed.delete_port("hog")
        wait_mbufs_at_rest(bed, rest)
        passed, failed = outcome()
        print(f"{used} of {size} mbufs in use: {failed} of {sent} packets found no buffer")
        assert send() == (passed + 20, failed)
    assert ovs.dump_ports(bed.bridge)["web"].tx_drop == failed


def test_destinations_without_number(testbed: Testbed) -> None:
    """Who sends to more destinations than there are FIFOs takes none from others."""
    bed, ovs = testbed, testbed.ovs
    ovs.set_config(meter_shaping=True)
    out = bed.recorder("out")
    ovs.set_qos("out", "flowbundler", max_flows=1024)
    path, rates = bed.dir / "evil.pcap", {1: 50 * MBIT, 2: 20 * MBIT}
    # 50 ms of its rate are 4882 packets, each to another one.
    write_frames(path, frames(range(8192), SMALL))
    evil = bed.add_port("evil", f"net_pcap,rx_pcap={path},infinite_rx=1")
    calm = bed.source("calm", [FlowSpec(1 + n, dst_ip=f"10.99.0.{n}", frame_size=500)
                               for n in range(16)], rate=2 * rates[2])
    for meter, rate in rates.items():
        ovs.set_meter(bed.bridge, meter, rate)
    favour_pmds(bed)
    flows = [f"in_port={port.number},actions=meter:{meter},output:{out.number}"
             for meter, port in ((1, evil), (2, calm))]
    ovs.replace_flows(bed.bridge, flows[:1])
    wait_until(lambda: shown(bed, "out")["drop_flows"] > 1000, "FIFOs are used up", 20)
    # Now somebody else comes.
    ovs.replace_flows(bed.bridge, flows)
    seen = capture(bed, out, 2, warm_up=0.3)
    ovs.replace_flows(bed.bridge, [])
    wait_until(lambda: backlog(ovs, "out") == 0, "all has left", 10)
    counted, packets = ovs.meter_stats(bed.bridge)[2], out.read()
    passed, left = counted.packets_in - counted.drops, int((packets.flow >= 1).sum())
    span = (seen.end_ns - seen.start_ns) / 1e9
    is_calm = seen.packets.flow >= 1
    evil_rate, calm_rate = (float(seen.packets.length[which].sum()) * 8 / span
                            for which in (~is_calm, is_calm))
    show = shown(bed, "out")
    print(f"calm: {passed} passed its meter, {left} left, {calm_rate / MBIT:.2f} Mbit/s; "
          f"evil {evil_rate / MBIT:.2f} Mbit/s; {show['drop_flows']} drops, {show['flows']} FIFOs")
    # Each packet that its meter let through.
    assert left == passed
    assert calm_rate == pytest.approx(rates[2], rel=0.02)
    assert evil_rate <= rates[1] * 1.02
    assert show["flows"] <= 1024


# Time.

#: What leaves at the rate of a meter, and of a port, in the tests below.
TIMED = {"metered": 100 * MBIT, "paced": 80 * MBIT}


def metered_and_paced(bed: Testbed) -> tuple[dict[str, Recorder], list[tuple[str, str]]]:
    """Ports that record, with a shaper and an endless source each, and routes to them.

    "src1" is to pass meter 1; "paced" has a rate of its own.
    """
    ovs = bed.ovs
    ovs.set_config(meter_shaping=True)
    outs = {name: bed.recorder(name) for name in TIMED}
    ovs.set_qos("metered", "flowbundler")
    ovs.set_qos("paced", "flowbundler", max_rate=TIMED["paced"])
    ovs.set_meter(bed.bridge, 1, TIMED["metered"])
    numbers = [bed.source(f"src{n}", [FlowSpec(n, dst_ip=f"10.73.0.{n}")]).number for n in (1, 2)]
    return outs, [(f"in_port={number}", name) for number, name in zip(numbers, TIMED, strict=True)]


def test_switch_that_stands_still(testbed: Testbed) -> None:
    """After a second in which nothing runs, no more leaves at once than had waited.

    So it is after a virtual machine that contains the switch has been stopped or moved.
    """
    bed, ovs = testbed, testbed.ovs
    outs, routes = metered_and_paced(bed)
    bed.set_flows(vm_meters={"src1": 1}, routes=routes)
    favour_pmds(bed)
    run_for(ovs, 0.5)
    clock = CaptureClock(outs["metered"].path)
    clock.mark()
    pid = ovs.pid()
    stops = []
    for _ in range(2):
        run_for(ovs, 0.5)
        os.kill(pid, signal.SIGSTOP)
        try:
            start = time.monotonic_ns()
            time.sleep(1)
            stops.append((start, time.monotonic_ns()))
        finally:
            os.kill(pid, signal.SIGCONT)
    run_for(ovs, 2.2)
    clock.mark()
    reference = outs["metered"].read()
    captures = [clock.apply(reference, recorder.read()) for recorder in outs.values()]
    # What waited: max-delay's worth; at a port that makes up for 10 ms, less.
    waited = {"metered": 0.050, "paced": 0.010}
    for (name, rate), packets in zip(TIMED.items(), captures, strict=True):
        worst = max_excess(packets.time_ns, packets.length, rate)
        # And frames: the last that was admitted, the first that came then, the window's
        # first, and two of slots, whose times are rounded up.
        assert worst.bytes <= rate / 8 * waited[name] + 5 * MTU, f"{name}: {worst}"
        for start, end in stops:
            assert len(packets.between(start + 50_000_000, end)) == 0
        # Exact again, half a second later.
        first, last = stops[-1][1] + 500_000_000, stops[-1][1] + 2_000_000_000
        found = packets.between(first, last).length.sum() * 8e9 / (last - first)
        print(f"{name}: {found / MBIT:.3f} Mbit/s, worst {worst}")
        # 2 %: at both ends what is late by up to 15 ms is on the other side.
        assert found == pytest.approx(rate, rel=0.02)


@pytest.fixture
def wall_clock(tmp_path: Path) -> Iterator[tuple[Testbed, Callable[[float], None]]]:
    """On a switch with a wall clock that can be set (by so many seconds, from the true time)."""
    library, offset = tmp_path / "wall-clock.so", tmp_path / "offset"
    run("cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(HERE / "preload/wall-clock.c"))
    offset.write_bytes(bytes(8))

    def step(seconds: float) -> None:
        with offset.open("r+b", buffering=0) as file:
            file.write(struct.pack("=q", int(seconds * 1e9)))

    for env in sandbox(LD_PRELOAD=str(library), WALL_CLOCK_OFFSET=str(offset)):
        del env["LD_PRELOAD"]
        for bed in checked_testbed(env):
            yield bed, step


def test_wall_clock_that_is_set(wall_clock: tuple[Testbed, Callable[[float], None]]) -> None:
    """Forward, backward, by much and by little: departures do not know."""
    bed, step = wall_clock
    ovs = bed.ovs
    outs, routes = metered_and_paced(bed)
    reference = Reference(bed)
    bed.set_flows(vm_meters={"src1": 1, "refsrc": REFERENCE_METER},
                  routes=[*routes, reference.route])
    favour_pmds(bed)
    # Each request is logged, with the time that the switch believes it is.
    ovs.appctl("vlog/set", "unixctl:file:dbg")
    log, believed = Log(ovs), []
    run_for(ovs, 0.5)
    clock = CaptureClock(outs["metered"].path)
    clock.mark()
    start = time.monotonic_ns()
    steps = (3600, -7200, 0.05, -0.05, 86400 * 365, 0)
    for seconds in steps:
        step(seconds)
        ovs.appctl("version")
        stamp = datetime.fromisoformat(log.lines()[-1].split("|")[0])
        believed.append(stamp.timestamp() - time.time())
        run_for(ovs, 0.4)
    end = time.monotonic_ns()
    clock.mark()
    ovs.appctl("vlog/set", "unixctl:file:info")
    # 1 s: between the switch's look at its clock and this program's at its own.
    assert believed == pytest.approx(steps, abs=1)
    recorded = outs["metered"].read()
    gap = longest_gap(clock.apply(recorded, reference.read()).between(start - NS // 10, end))
    for name, rate in TIMED.items():
        packets = clock.apply(recorded, outs[name].read()).between(start, end)
        found = paced_rate(packets.time_ns, packets.length)
        print(f"{name}: {found / rate - 1:+.4%}, longest poll gap {gap * 1e6:.0f} us")
        assert_conforms(packets, rate, gap, name)
        assert_backlogged(packets, rate, gap, name)
        # As in test_shaping_udp.py.
        assert found == pytest.approx(rate, rel=0.005)
