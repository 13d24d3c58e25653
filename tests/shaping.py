"""What the tests of shaping real traffic share.

The tests judge the switch by what others say of it: the kernel's counters of
the veth behind a port, iperf3, and the times that DPDK's net_pcap driver
stamps on departures; not by the shaper's own counters, unless these are what
is tested.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fbtest import procfs, switch
from fbtest.analysis import check_order, max_deficit, max_excess
from fbtest.clock import CaptureClock
from fbtest.ovs import Ovs
from fbtest.pcap import FlowSpec, Packets
from fbtest.probe import Probe
from fbtest.proc import wait_until
from fbtest.testbed import Recorder, Testbed

REPO = Path(__file__).resolve().parent.parent
RESULTS = Path(os.environ.get("FB_BUILD") or REPO / "build") / "test-results"

MBIT = 1_000_000
NS = 1_000_000_000
#: A meter's burst where none is set, and the largest frame.
MTU = 1514
#: Numbers repeat after so many packets of a flow.  At an endless source most
#: packets are dropped, and order can be told only where fewer than half as
#: many are dropped in a row: tens of millions are offered in a second, so a
#: flow's packets must leave less than 0.2 ms apart (or as many times that as
#: there are flows).
MODULUS = 16384

#: Every cause that flowbundler/show counts drops under.
SHAPER_DROPS = ("drop_max_delay", "drop_backlog", "drop_budget", "drop_flows", "drop_expired",
                "drop_removed", "drop_segment")

#: Meter and port of the reference flow, see `Reference`.
REFERENCE_METER = 90


def pmd_threads(ovs: Ovs) -> list[int]:
    """The kernel's ids of vswitchd's PMD threads."""
    return [tid for tid, name in procfs.threads(ovs.pid()).items() if name.startswith("pmd-")]


def second_cpu(bed: Testbed) -> int:
    """A processor for a second PMD thread; without one, skips the test."""
    others = bed.cpus - bed.ovs.pmd_cpus()
    if not others:
        pytest.skip("a second PMD thread needs a second CPU")
    return min(others)


def favour_pmds(bed: Testbed) -> None:
    """Give the PMD threads their cores, as far as that is ours to give.

    A PMD thread should have its core to itself.  On a small machine it shares
    it with whatever runs, and the kernel takes it away for milliseconds.  The
    tests allow for such gaps; this makes them rarer: this process keeps off
    those cores while the testbed is there (which itself prefers vswitchd to
    other sessions), and PMD threads come before the rest of vswitchd.
    """
    bed._stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
    os.sched_setaffinity(0, bed.cpus)
    for thread in pmd_threads(bed.ovs):
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, thread, -20)


def run_for(ovs: Ovs, seconds: float) -> None:
    """Let traffic run for `seconds`, as long as vswitchd lives."""
    pid, end = ovs.pid(), time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        os.kill(pid, 0)
        time.sleep(min(left, 0.25))


def recorded(ovs: Ovs, seconds: float) -> Any:
    """What leaves `out` in `seconds`, when traffic has run for a while, in order of time.

    All of it: the probe has missed nothing.
    """
    run_for(ovs, 0.5)
    with Probe(ovs, "out") as probe:
        run_for(ovs, seconds)
    recording = probe.recording()
    assert recording.counters.lost == 0
    return recording.records[np.argsort(recording.records["time_ns"], kind="stable")]


def duration(records: Any) -> float:
    """Seconds from the first to the last of what has been `recorded`."""
    return (int(records["time_ns"][-1]) - int(records["time_ns"][0])) / NS


class Log(switch.Log):
    """What vswitchd logs from now on, and what is wrong there."""

    def __init__(self, ovs: Ovs):
        super().__init__(ovs.env)

    def problems(self) -> list[str]:
        """The warnings and errors among them.

        Not timeval's: a thread that sleeps had to wait for a processor.  And not "Dropped N
        log messages", which a rate limit writes just before the message that it lets pass:
        that one is of the same kind as those which it did not, and stands here.
        """
        lines = [line for line in self.lines()
                 if re.search(r"\|(WARN|ERR|EMER)\|", line)
                 and not re.search(r"\|timeval(\([^)]*\))?\|", line)]
        return [line for line, after in zip(lines, [*lines, ""][1:], strict=True)
                if not (re.search(r"\|Dropped \d+ log messages in last ", line)
                        and line.split("|")[2:4] == after.split("|")[2:4])]


def write_results(name: str, results: Mapping[str, Any]) -> None:
    """Add `results` to build/test-results/NAME.json."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    old: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        old = json.loads(path.read_text())
    path.write_text(json.dumps({**old, **results}, indent=2, sort_keys=True) + "\n")


class Reference:
    """A second, fast flow through the same PMD thread: shows when it polled.

    64-byte frames, one each 10.24 us, go to a recorder of their own by a
    shaper with fine slots.  The flow always has packets waiting, and all that
    are due leave when the PMD thread polls, so a time in which the thread did
    not poll is a gap between two departures.  What is due just before the
    gap may have left one interval before it.
    """

    RATE = 50 * MBIT
    INTERVAL_S = 64 * 8 / RATE

    def __init__(self, bed: Testbed):
        self.recorder = bed.recorder("ref")
        self.source = bed.source("refsrc", [FlowSpec(900, dst_mac="02:fb:00:02:00:99",
                                                     dst_ip="10.79.0.1", frame_size=64)],
                                 rate=2 * self.RATE)
        bed.ovs.set_qos("ref", "flowbundler", max_granularity=1024)
        bed.ovs.set_meter(bed.bridge, REFERENCE_METER, self.RATE)

    @property
    def route(self) -> tuple[str, str]:
        return f"in_port={self.source.number}", "ref"

    def read(self) -> Packets:
        """What has left so far."""
        return self.recorder.read()


def longest_gap(reference: Packets) -> float:
    """The longest time in s in which the PMD thread did not poll.

    Gaps that follow each other closely count together: after a gap a poll
    sends 128 packets (max-batch) and not all that have become due.  The time
    that gaps have taken is taken for made up for by as much time of polling,
    though in truth it takes less.
    """
    times = reference.time_ns
    spaces = np.diff(times)
    behind = longest = 0
    until = int(times[0])
    for gap in np.flatnonzero(spaces > 5 * Reference.INTERVAL_S * NS):
        behind = max(0, behind - int(times[gap]) + until) + int(spaces[gap])
        until = int(times[gap + 1])
        longest = max(longest, behind)
    return longest / NS + Reference.INTERVAL_S


@dataclass
class Capture:
    """What left a recorder in a time, on CLOCK_MONOTONIC.

    `gap_s` is the longest time in which the PMD thread did not poll, if there
    was a `Reference`.
    """

    packets: Packets
    gap_s: float
    start_ns: int
    end_ns: int


def capture(bed: Testbed, recorder: Recorder, seconds: float, warm_up: float = 1.0,
            reference: Reference | None = None) -> Capture:
    """What leaves `recorder` in `seconds`, after `warm_up`."""
    run_for(bed.ovs, warm_up)
    clock = CaptureClock(recorder.path)
    clock.mark()
    start = time.monotonic_ns()
    run_for(bed.ovs, seconds)
    end = time.monotonic_ns()
    clock.mark()
    recorded, gap = recorder.read(), 0.0
    if reference is not None:
        # What was late at the start was so because of gaps before it.
        before = start - NS // 10
        gap = longest_gap(clock.apply(recorded, reference.read()).between(before, end))
    return Capture(clock.apply(recorded).between(start, end), gap, start, end)


def assert_conforms(packets: Packets, rate: float, gap_s: float, what: str = "") -> None:
    """Every window W has at most rate * (W + longest poll gap) + burst bytes.

    The burst is two MTU: the meter's own, and one because of the wheel, whose
    slots are as far apart as two packets of the flow at most: a packet may be
    late by that much, and the next one be on time.
    """
    worst = max_excess(packets.time_ns, packets.length, rate)
    allowed = rate / 8 * gap_s + 2 * MTU
    assert worst.bytes <= allowed, (
        f"{what}: {worst.bytes:.0f} bytes too many in a window of {worst.window_s * 1e3:.3f} ms; "
        f"the longest poll gap of {gap_s * 1e6:.0f} us and the burst explain {allowed:.0f}")


def assert_backlogged(packets: Packets, rate: float, gap_s: float, what: str = "") -> None:
    """No window falls short of the rate by more than the same."""
    worst = max_deficit(packets.time_ns, packets.length, rate)
    allowed = rate / 8 * gap_s + 2 * MTU
    assert worst.bytes <= allowed, (
        f"{what}: {worst.bytes:.0f} bytes too few in a window of {worst.window_s * 1e3:.3f} ms; "
        f"the longest poll gap of {gap_s * 1e6:.0f} us and the burst explain {allowed:.0f}")


def assert_in_order(packets: Packets, modulus: int | None = MODULUS) -> None:
    """No packet left after a later one of its flow, and none twice.

    With an endless source this needs a meter's drops, which are evenly
    spread.  Behind a port's or queue's own rate a poll that is late lets
    packets expire, hundreds in a row, and as many thousands of numbers.
    """
    order = check_order(packets.flow, packets.seq, modulus)
    assert order.packets > 0 and order.in_order, order


def backlog(ovs: Ovs, port: str) -> int:
    """Packets that wait at `port`."""
    return int(ovs.flowbundler_show(port)[port]["backlog"])


def wait_empty(ovs: Ovs, port: str, timeout: float = 10.0) -> None:
    """Wait until nothing waits at `port`."""
    wait_until(lambda: backlog(ovs, port) == 0, f"nothing waits at {port}", timeout)
