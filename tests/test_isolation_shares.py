"""Shares of a port's rate: equal, in bytes, whatever thread a flow is in.

Endless sources in the PMD threads, held back or not.  What one destination gets of a
port's rate depends on neither how many others its thread serves, nor how often that
polls, nor on the size of its frames.
"""

from __future__ import annotations

import numpy as np
import pytest
from fbtest.pcap import FlowSpec
from fbtest.proc import wait_until
from fbtest.testbed import Testbed

from shaping import (
    MBIT,
    NS,
    duration,
    favour_pmds,
    pmd_threads,
    recorded,
    second_cpu,
    write_results,
)

SECONDS = 5
#: Windows of a second that are looked at, those in which a thread was away for longer
#: than GAP_S are not judged, and how many must remain.
WINDOWS, GAP_S, LEAST = 41, 0.005, 20


def bytes_by_flow(records: np.ndarray, flows: np.ndarray) -> np.ndarray:
    """What each of `flows` has sent."""
    return np.array([int(records["bytes"][records["flow"] == flow].sum()) for flow in flows])


def longest_gap(records: np.ndarray) -> float:
    """The longest time in s without a departure."""
    return float(np.diff(records["time_ns"]).max()) / NS


@pytest.mark.parametrize("held_back", [False, True], ids=["flooding", "held back"])
@pytest.mark.parametrize("rate", [100, 1000])
def test_threads_share_a_rate(probe_testbed: Testbed, rate: int, held_back: bool) -> None:
    """One destination in one thread, fifteen in another one."""
    bed, ovs = probe_testbed, probe_testbed.ovs
    cpu, = ovs.pmd_cpus()
    other = second_cpu(bed)
    ovs.set_config(pmd_cpu_mask=f"{1 << cpu | 1 << other:#x}")
    bed.sink("out")
    ovs.set_qos("out", "flowbundler", max_rate=rate * MBIT)
    flows = []
    for i, (n, core) in enumerate(((1, other), (15, cpu))):
        # (Thinned, so that the switch has time for other work on a machine with two cores.)
        source = bed.source(f"src{i}", [FlowSpec(16 * i + j, dst_ip=f"10.73.{i}.{j}")
                                        for j in range(n)], rate=4 * rate * MBIT)
        ovs.vsctl("set", "Interface", f"src{i}", f"other_config:pmd-rxq-affinity=0:{core}",
                  *(["other_config:shaper-rx-limit=4194304"] if held_back else []))
        flows.append(f"in_port={source.number},actions=output:{bed.ports['out'].number}")
    wait_until(lambda: len(pmd_threads(ovs)) == 2, "there are two PMD threads")
    ovs.replace_flows(bed.bridge, flows)
    records = recorded(ovs, SECONDS)
    every = np.unique(records["flow"])
    assert len(every) == 16
    begin, end = int(records["time_ns"][0]), int(records["time_ns"][-1])
    judged, away = [], 0
    for start in np.linspace(begin, end - NS, WINDOWS):
        window = records[(records["time_ns"] >= start) & (records["time_ns"] < start + NS)]
        threads = [window[(window["flow"] >> 8 & 0xFF) == i] for i in range(2)]
        # The first has a packet every 16 * 1514 bytes.
        if max(longest_gap(t) for t in threads) > GAP_S + 16 * 1514 * 8 / (rate * MBIT):
            away += 1
            continue
        sent = bytes_by_flow(window, every)
        judged.append((float((sent.max() - sent.min()) / sent.mean()),
                       float(sent.sum() * 8 / (rate * MBIT))))
    print(f"{rate} Mbit/s: NFM, total {judged}; {away} windows with a thread that was away")
    write_results("isolation-threads",
                  {f"{rate}, held back: {held_back}": {"judged": judged, "away": away}})
    assert len(judged) >= LEAST
    # A packet of each more or less is 0.4 % of a share in a second at 100 Mbit/s.
    assert max(nfm for nfm, _ in judged) <= 0.03
    assert [total for _, total in judged] == pytest.approx([1] * len(judged), rel=0.005)


@pytest.mark.parametrize("frame", [64, 512])
def test_bytes_decide(probe_testbed: Testbed, frame: int) -> None:
    """Large frames of one sender, small ones of another."""
    bed, ovs = probe_testbed, probe_testbed.ovs
    rate = 200 * MBIT
    bed.sink("out")
    ovs.set_qos("out", "flowbundler", max_rate=rate)
    sources = [bed.source(f"src{i}", [FlowSpec(4 * i + j, dst_ip=f"10.73.{i}.{j}",
                                               frame_size=size) for j in range(4)])
               for i, size in enumerate((1514, frame))]
    ovs.replace_flows(bed.bridge, [
        f"in_port={s.number},actions=output:{bed.ports['out'].number}" for s in sources])
    favour_pmds(bed)
    records = recorded(ovs, 3)
    sent = bytes_by_flow(records, np.unique(records["flow"]))
    span = duration(records)
    shares = [float(s) for s in sent / sent.sum()]
    print(f"{frame} B: {sent.sum() * 8 / span / MBIT:.1f} Mbit/s, by flow {shares}")
    write_results("isolation-bytes", {f"{frame} B": shares})
    assert sent.sum() * 8 / span == pytest.approx(rate, rel=0.01)
    assert shares == pytest.approx([1 / 8] * 8, rel=0.01)
