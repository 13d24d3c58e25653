"""Queues of a port that is flooded: weights, a strict priority, and a row of Linux's HTB.

Endless sources in the PMD thread, not held back.  What each queue has of the port's rate,
and how regularly the first one sends, is what the probe sees at the port.
"""

from __future__ import annotations

import numpy as np
import pytest
from fbtest.pcap import FlowSpec
from fbtest.testbed import Testbed

from shaping import MBIT, NS, duration, favour_pmds, recorded, write_results

RATE = 200 * MBIT
FRAME = 1514


def set_queues(bed: Testbed, *queues: str) -> None:
    """Give `out` the rate and queues 1, 2, ... with these keys."""
    args = ["--", "set", "Port", "out", "qos=@q", "--", "--id=@q", "create", "QoS",
            "type=flowbundler", f"other_config:max-rate={RATE}",
            # What has a time leaves by less than this after it.
            "other_config:max-granularity=1024"]
    args += [f"queues:{i}=@q{i}" for i in range(1, len(queues) + 1)]
    for i, keys in enumerate(queues, 1):
        args += ["--", f"--id=@q{i}", "create", "Queue",
                 *(f"other_config:{key}" for key in keys.split())]
    bed.ovs.vsctl(*args)


def test_weights_under_flood(probe_testbed: Testbed) -> None:
    """Three queues with weights 1, 2 and 4; the first has the most destinations."""
    bed, ovs = probe_testbed, probe_testbed.ovs
    bed.sink("out")
    set_queues(bed, "weight=1", "weight=2", "weight=4")
    sources = [bed.source(f"src{i}", [FlowSpec(16 * i + j, dst_ip=f"10.73.{i}.{j}")
                                      for j in range(n)]) for i, n in enumerate((16, 4, 1))]
    ovs.replace_flows(bed.bridge, [
        f"in_port={s.number},actions=set_queue:{i},output:{bed.ports['out'].number}"
        for i, s in enumerate(sources, 1)])
    favour_pmds(bed)
    records = recorded(ovs, 3)
    queue = records["flow"] >> 8 & 0xFF
    sent = np.array([int(records["bytes"][queue == i].sum()) for i in range(3)])
    span = duration(records)
    shares = [float(share) for share in sent / sent.sum()]
    print(f"{sent.sum() * 8 / span / MBIT:.1f} Mbit/s, by queue {shares}")
    write_results("isolation-queues", {"weights": shares})
    assert sent.sum() * 8 / span == pytest.approx(RATE, rel=0.01)
    assert shares == pytest.approx([1 / 7, 2 / 7, 4 / 7], rel=0.01)


def test_strict_priority_under_flood(probe_testbed: Testbed) -> None:
    """A queue below the port's rate, in front of two that flood, waits for none of their packets.

    A meter gives its packets times that are exactly as far apart as its rate says, which they
    wait for before they wait for the port.  So how much later each leaves than the one that
    was the least late is what it has waited for the port, and for the poll of the thread.
    """
    bed, ovs = probe_testbed, probe_testbed.ovs
    bed.sink("out")
    set_queues(bed, "priority=0", "priority=1", "priority=2")
    ovs.set_config(meter_shaping=True)
    ovs.set_meter(bed.bridge, 1, RATE // 10)
    first = bed.source("src0", [FlowSpec(0, dst_ip="10.73.0.1")], rate=RATE // 2)
    floods = [bed.source(f"src{i}", [FlowSpec(16 * i + j, dst_ip=f"10.73.{i}.{j}")
                                     for j in range(8)]) for i in (1, 2)]
    out = bed.ports["out"].number
    ovs.replace_flows(bed.bridge, [
        f"in_port={first.number},actions=meter:1,set_queue:1,output:{out}",
        *(f"in_port={s.number},actions=set_queue:{i},output:{out}"
          for i, s in enumerate(floods, 2))])
    favour_pmds(bed)
    records = recorded(ovs, 3)
    queue = records["flow"] >> 8 & 0xFF
    sent = [int(records["bytes"][queue == i].sum()) for i in range(3)]
    times = records["time_ns"][queue == 0].astype(np.int64)
    late = times - np.arange(len(times)) * (FRAME * 8 * NS * 10 // RATE)
    p99 = float(np.percentile(late - late.min(), 99)) / 1000
    # The port always has something to send: a packet's time, or its thread did not poll.
    packet = FRAME * 8e6 / RATE
    gap = float(np.diff(records["time_ns"].astype(np.int64)).max()) / 1000
    print(f"bytes by queue {sent}; the first is {p99:.1f} us late (p99); the longest gap is "
          f"{gap:.1f} us")
    write_results("isolation-queues", {"strict": {"p99_us": p99, "gap_us": gap, "sent": sent}})
    # All of them, in order and at the meter's rate: what was lost would shift the others.
    span = (int(times[-1]) - int(times[0])) / NS
    assert (len(times) - 1) * FRAME * 8 / span == pytest.approx(RATE / 10, rel=0.001)
    # (1 us is the wheel's granularity.)
    assert p99 <= packet + gap + 1
    # Floods use what is left, the last one nothing but what a late poll made up for.
    assert sum(sent) * 8 / ((int(records["time_ns"][-1]) - int(records["time_ns"][0])) / NS) == (
        pytest.approx(RATE, rel=0.01))
    assert sent[1] / sum(sent) == pytest.approx(0.9, rel=0.01)
    assert sent[2] / sum(sent) <= 0.002


def test_a_row_of_htb_at_a_dpdk_port(probe_testbed: Testbed) -> None:
    """The rate of a pod as kube-ovn writes it, queue 0 of a `linux-htb` row, flooded."""
    bed, ovs = probe_testbed, probe_testbed.ovs
    bed.sink("out")
    ovs.vsctl("--", "set", "Port", "out", "qos=@q",
              "--", "--id=@q", "create", "QoS", "type=linux-htb", "queues:0=@q0",
              "--", "--id=@q0", "create", "Queue", "other_config:max-rate=50000000",
              "other_config:burst=5000000")
    source = bed.source("src", [FlowSpec(i, dst_ip=f"10.73.0.{1 + i}") for i in range(4)])
    ovs.replace_flows(bed.bridge, [
        f"in_port={source.number},actions=output:{bed.ports['out'].number}"])
    favour_pmds(bed)
    records = recorded(ovs, 2)
    span = duration(records)
    rate = int(records["bytes"].sum()) * 8 / span
    print(f"{rate / MBIT:.2f} Mbit/s")
    write_results("isolation-queues", {"linux-htb": rate})
    assert rate == pytest.approx(50 * MBIT, rel=0.01)
    assert ovs.appctl("qos/show", "out").startswith("QoS: out linux-htb\n")
    assert "qos_error" not in ovs.vsctl("get", "Interface", "out", "status")
