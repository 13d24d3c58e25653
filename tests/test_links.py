"""What keeps links alive does so while they are flooded, and nobody gets ahead by forging it.

tests/links.py has the switches, the floods, and what is watched; `make check-links` does
for ten minutes what the first test does for some seconds.
"""

from __future__ import annotations

import random
import statistics

import pytest
from fbtest.pcap import write_frames
from fbtest.testbed import Testbed

from links import Down, LinkError, Seen, downs, expired, forged, links
from shaping import MBIT, NS, capture, favour_pmds, write_results

SECONDS, ATTEMPTS = 12.0, 3


def test_flooded_links_stay_up(testbed: Testbed) -> None:
    """LACP, CFM, BFD and ARP over wires that are offered ten times their rates."""
    with links(testbed) as those:
        those.flood()
        before = those.ovs.coverage()
        for _ in range(ATTEMPTS):
            seen = those.watch(SECONDS, random.Random(1), print)
            print(seen)
            seen.check()
            those.check_flooded(before)
            if not seen.downs and seen.answered_well:
                break
    assert seen.asked > 100
    assert seen.answered_well
    assert not seen.downs, "the machine took the twin down each time"


# Who gets ahead.

#: Of the port that is flooded, and what may go ahead of it for each who sends ARP, and of all.
OUT_RATE, PART, ALL_PARTS = 40 * MBIT, 0.01, 0.1
RECORD_S = 2.0
#: Receiving ports that are flooded with ARP or discovery: more than have a part.
ARP_PORTS = 12
LENGTH = 1000


def test_nobody_gets_ahead_by_forging(testbed: Testbed) -> None:
    """Who asks for addresses has 1 % more than his share, who sends LACP or BFD his share."""
    bed = testbed
    out = bed.recorder("out")
    bed.ovs.set_qos("out", "flowbundler", max_rate=OUT_RATE)
    arps = ["arp-small", "nd", *(f"arp{i}" for i in range(2, ARP_PORTS))]
    others = ["plain", "lacp", "bfd", "nd-from-afar"]
    # Frames of a sender have a length of their own.
    lengths = {name: LENGTH + i for i, name in enumerate([*others, *arps])} | {"arp-small": 60}
    flows = []
    for name, length in lengths.items():
        kind = "arp" if name.startswith("arp") else name
        frame = forged(kind, "01:80:c2:00:00:02" if kind == "lacp" else "02:fb:00:02:00:01")
        path = bed.dir / f"{name}.pcap"
        write_frames(path, [frame.ljust(length, b"\0")])
        port = bed.add_port(name, f"net_pcap,rx_pcap={path},infinite_rx=1")
        flows.append(f"in_port={port.number},actions=output:{out.number}")
    favour_pmds(bed)
    bed.ovs.replace_flows(bed.bridge, flows)
    seen = capture(bed, out, RECORD_S)

    span = (seen.end_ns - seen.start_ns) / NS
    sent = {name: length * int((seen.packets.length == length).sum())
            for name, length in lengths.items()}
    # Shares are of bytes, however long frames are.
    share = statistics.mean(sent[name] for name in others)
    # Beyond that, as parts of the rate.
    ahead = {name: (sent[name] - share) * 8 / span / OUT_RATE for name in lengths}
    total = sum(sent.values()) * 8 / span
    print(sent, {name: f"{part:.3%}" for name, part in ahead.items()}, total)
    write_results("links-forging", {"ahead": ahead, "of": OUT_RATE, "sent": total})
    assert total == pytest.approx(OUT_RATE, rel=0.01)
    assert share > 100 * LENGTH
    assert [sent[name] for name in others] == pytest.approx([share] * len(others), rel=0.02)
    # The packets at both ends of the time: one is 0.01 % of it.
    assert max(ahead[name] for name in arps) <= PART + 0.0005
    assert sum(ahead[name] for name in arps) == pytest.approx(ALL_PARTS, abs=0.003)


# What tests/links.py judges by.

LOG = """\
2026-11-24T01:53:43.123Z|00012|bfd(monitor3)|INFO|bfd-a: BFD state change: \
(bfd.SessionState: up, bfd.LocalDiag: "No Diagnostic") -> (bfd.SessionState: down, \
bfd.LocalDiag: "Control Detection Time Expired")
2026-11-24T01:53:43.200Z|00013|bfd(monitor3)|INFO|bfd-b: BFD state change: \
(bfd.SessionState: down, bfd.LocalDiag: "No Diagnostic") -> (bfd.SessionState: up, \
bfd.LocalDiag: "No Diagnostic")
2026-11-24T01:53:44.000Z|00014|cfm(monitor3)|INFO|slb-a0: CFM faults changed from [] to [recv].
2026-11-24T01:53:44.100Z|00015|cfm(monitor3)|INFO|slb-a0: CFM faults changed from [recv] to [].
2026-11-24T01:53:45.500Z|00016|bond|INFO|member tcp-a0: disabled
2026-11-24T01:53:45.600Z|00017|bond|INFO|member tcp-a0: enabled
""".replace("\\\n", "")


def test_what_the_log_says_went_down() -> None:
    found = downs(LOG.splitlines())
    assert [(down.port, down.time_s - found[0].time_s) for down in found] == [
        ("bfd-a", 0), ("slb-a0", pytest.approx(0.877)), ("tcp-a0", pytest.approx(2.377))]
    assert str(found[0]).startswith("01:53:43.123 bfd-a: BFD state change")


def test_what_lacp_says_expired() -> None:
    assert expired("---- tcp-a statistics ----\n\nmember: tcp-a0:\n  TX PDUs: 7\n"
                   "  Link Expired: 2\n  Link Defaulted: 0\n\nmember: tcp-a1:\n"
                   "  Link Expired: 0\n") == {"tcp-a0": 2, "tcp-a1": 0}


def test_only_what_the_twin_did_too_is_the_machines() -> None:
    seen = Seen(downs=[Down(100.0, "twin-a", "x"), Down(100.9, "bfd-a", "x"),
                       Down(99.1, "tcp-a0", "x")])
    seen.check()
    assert (seen.flaps, seen.disturbed(60)) == ([], 1)
    seen.downs.append(Down(101.1, "slb-b1", "x"))
    with pytest.raises(LinkError, match="slb-b1"):
        seen.check()
