"""What a PMD thread spends on packets that wait is that of the queues that they came from.

`pmd-rxq-show` and the automatic load balancing go by the cycles that are assigned to receive
queues.  Packets that a shaper holds leave in a later iteration; what sending them takes must
be their queue's all the same, or a queue whose packets wait looks half as busy as it is.
"""

from __future__ import annotations

import re

import pytest
from fbtest.pcap import FlowSpec
from fbtest.testbed import Testbed

from shaping import MBIT, favour_pmds, run_for, write_results

#: OVS sums up cycles every 5 s; the first of these sums has the beginning in it.
INTERVAL_S = 5


def usage(bed: Testbed) -> tuple[dict[str, int], int]:
    """Percent of the PMD's cycles for each receiving port, and of what is no queue's."""
    shown = bed.ovs.appctl("dpif-netdev/pmd-rxq-show", "-secs", str(INTERVAL_S))
    ports = {name: int(percent) for name, percent in
             re.findall(r"port: (\S+) .*pmd usage: +(\d+) %", shown)}
    overhead = re.search(r"overhead: +(\d+) %", shown)
    assert overhead, shown
    return ports, int(overhead[1])


@pytest.mark.parametrize("held_back", [False, True], ids=["flooded", "held-back"])
def test_cycles_of_packets_that_wait_are_their_queues(testbed: Testbed, held_back: bool) -> None:
    bed, ovs = testbed, testbed.ovs
    bed.sink("out")
    ovs.set_qos("out", "flowbundler")
    sources = {name: bed.source(name, [FlowSpec(10 * i + j, dst_ip=f"10.73.{i}.{1 + j}",
                                                frame_size=64) for j in range(8)])
               for i, name in enumerate(("waits", "waits-too"))}
    if held_back:
        # All that is received waits, and nothing is dropped: polls are left out instead.
        for name in sources:
            ovs.vsctl("set", "Interface", name, "other_config:shaper-rx-limit=4096")
    ovs.set_config(meter_shaping=True)
    ovs.set_meter(bed.bridge, 1, 1000 * MBIT)
    ovs.set_meter(bed.bridge, 2, 250 * MBIT)
    ovs.replace_flows(bed.bridge, [
        f"in_port={source.number},actions=meter:{meter},output:{bed.ports['out'].number}"
        for meter, source in enumerate(sources.values(), 1)])
    favour_pmds(bed)
    run_for(ovs, 2.2 * INTERVAL_S)
    ports, overhead = usage(bed)
    spent = sum(ports.values()) + overhead
    print(f"{ports}, no queue's: {overhead} %")
    write_results("rxq-cycles", {f"held back: {held_back}": [ports, overhead]})
    if held_back:
        # Percents are whole numbers; a thread that does little polls in vain.
        assert overhead <= 5
        assert ports["waits"] == pytest.approx(4 * ports["waits-too"], rel=0.4), \
            "one has four times as many packets as the other"
    else:
        assert overhead <= 0.05 * spent
