"""Two PMD threads share a meter: its rate is that of both together.

Each thread polls a source of its own that offers much more than the meter lets through.
With two cores there is none left for others: the threads are stopped for milliseconds
whenever anything else runs.  So rates are low, and what is judged is when packets left,
as DPDK's callbacks saw it.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
from fbtest.pcap import FlowSpec
from fbtest.probe import Probe, lateness
from fbtest.proc import wait_until
from fbtest.testbed import Testbed

from shaping import MBIT, NS, pmd_threads, run_for, second_cpu, write_results

FRAME = 600
SECONDS = 3.0
#: Longer than a thread is stopped: the meter is never idle.
MAX_DELAY_US = 200_000


@pytest.mark.parametrize(("outputs", "rate"), [
    (1, 100 * MBIT), pytest.param(1, 400 * MBIT, marks=pytest.mark.full), (2, 400 * MBIT)])
def test_two_threads_share_a_meter(probe_testbed: Testbed, outputs: int, rate: int) -> None:
    bed, ovs = probe_testbed, probe_testbed.ovs
    cpu, = ovs.pmd_cpus()
    other = second_cpu(bed)
    ovs.set_config(meter_shaping=True, meter_shaping_max_delay=MAX_DELAY_US,
                   pmd_cpu_mask=f"{1 << cpu | 1 << other:#x}")
    outs = [f"out{i}" for i in range(outputs)]
    for out in outs:
        bed.sink(out)
        ovs.set_qos(out, "flowbundler")
    ovs.set_meter(bed.bridge, 1, rate)
    routes = []
    for i, core in enumerate((cpu, other)):
        # (What it offers is thinned so that the switch has time for other work, too.)
        source = bed.source(f"src{i}", [FlowSpec(i, dst_ip=f"10.73.0.{1 + i}", frame_size=FRAME)],
                            rate=2 * rate)
        ovs.vsctl("set", "Interface", f"src{i}", f"other_config:pmd-rxq-affinity=0:{core}")
        routes.append((f"in_port={source.number}", outs[i % outputs]))
    wait_until(lambda: len(pmd_threads(ovs)) == 2, "there are two PMD threads")
    bed.set_flows(vm_meters={"src0": 1, "src1": 1}, routes=routes)

    with ExitStack() as stack:
        run_for(ovs, 1)
        probes = [stack.enter_context(Probe(ovs, out, edt=True)) for out in outs]
        run_for(ovs, SECONDS)
    recordings = [probe.recording() for probe in probes]
    records = np.concatenate([r.records for r in recordings])
    late = lateness(records, max(r.clock_error_ns for r in recordings))

    # All that was to leave in this time did, and is recorded, if it left within 0.3 s.
    start = max(int(r.records["edt_ns"].min()) for r in recordings) + NS // 10
    end = min(int(r.records["time_ns"].max()) for r in recordings) - 3 * NS // 10
    assert late.latest < 3 * NS / 10, late
    span = (end - start) / NS
    assert span > SECONDS / 2
    assigned = records[(records["edt_ns"] >= start) & (records["edt_ns"] < end)]
    shares = [int(assigned["bytes"][assigned["flow"] == 0x0A490001 + i].sum()) * 8 / span / rate
              for i in range(2)]
    # By departures: at both ends what was late then is on the other side.
    left = records[(records["time_ns"] >= start) & (records["time_ns"] < end)]
    departed = int(left["bytes"].sum()) * 8 / span / rate
    behind = sum(int(records["bytes"][(records["edt_ns"] < at) & (records["time_ns"] >= at)].sum())
                 for at in (start, end)) * 8 / span / rate
    print(f"rate {sum(shares):.5f} of the meter's, {shares} by thread; by departures "
          f"{departed:.5f}, late at the ends {behind:.5f}; {late}")
    write_results("production-cores", {f"{outputs} outputs, {rate // MBIT} Mbit/s": {
        "assigned": sum(shares), "departed": departed, "shares": shares,
        "lateness_ns": late.percentiles}})

    assert all(r.counters.lost == 0 for r in recordings)
    assert late.early == 0 and late.packets == len(records)
    # Not 0.5 % because of the meter, which is exact, but for times in which both threads
    # were stopped so long that nothing waited.
    assert sum(shares) == pytest.approx(1, rel=0.005)
    assert departed == pytest.approx(1, abs=0.005 + behind)
    # Neither may have done nothing: then nothing was shared.
    assert min(shares) > 0.02
