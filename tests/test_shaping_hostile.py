"""Tenants that try to get more than their rate, or to pass as others.

Each trick has a VM of its own, whose port's PMD thread sends the same few frames without
end, through the flows of the real controller.  All VMs send at once.  Frames of a trick have
a length that no other's have: so what left is told apart, whatever else is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fbtest.controller import Controller
from fbtest.pcap import FlowSpec, write_frames
from fbtest.proc import wait_until
from fbtest.testbed import Recorder, Testbed

from shaping import MBIT, Log, capture, favour_pmds, write_results

OUT_MAC, OTHER_MAC = "02:fb:00:02:00:01", "02:fb:00:02:00:02"
OUT_IP, LIMITED_IP = "10.73.0.1", "10.73.9.9"
OUT_IP6, LIMITED_IP6 = "fd73::1", "fd73:9::9"
VM_MAC, VM_IP, VM_IP6 = "02:fb:00:01:00:01", "10.72.0.1", "fd72::1"
#: Who is not to be disturbed, and what it has a right to.
CALM_MAC, CALM_IP, CALM_IP6, CALM_LENGTH = "02:fb:00:01:00:02", "10.72.0.2", "fd72::2", 1000
RATE, LIMITED_RATE, CALM_RATE = 5 * MBIT, 2 * MBIT, 20 * MBIT
SECONDS = 2.0
#: Frames of a trick, which differ where that is the trick.
FRAMES = 32


@dataclass(frozen=True)
class Trick:
    """What a VM sends, and at which rate that may leave.

    `make` gives frame number i as a scapy packet; `cut` is the frame's length if it is not
    to be as long as it says.
    """

    name: str
    make: Callable[[int], Any]
    rate: int = RATE
    cut: int | None = None


def tricks(openflow: tuple[str, int]) -> dict[str, list[Trick]]:
    """Give the tricks, by how their VMs are recognized and limited."""
    from scapy.contrib.mpls import MPLS
    from scapy.layers.inet import GRE, ICMP, IP, TCP, UDP, IPOption_NOP
    from scapy.layers.inet6 import (
        ICMPv6ND_NA,
        ICMPv6NDOptDstLLAddr,
        IPv6,
        IPv6ExtHdrDestOpt,
        IPv6ExtHdrFragment,
    )
    from scapy.layers.l2 import ARP, LLC, STP, Dot1AD, Dot1Q, Ether
    from scapy.layers.vxlan import VXLAN
    from scapy.packet import Raw

    def eth(src: str = VM_MAC, dst: str = OUT_MAC, **more: Any) -> Any:
        return Ether(src=src, dst=dst, **more)

    def ip(dst: str = OUT_IP, src: str = VM_IP, **more: Any) -> Any:
        return IP(src=src, dst=dst, **more)

    def ip6(dst: str = OUT_IP6, src: str = VM_IP6, **more: Any) -> Any:
        return IPv6(src=src, dst=dst, **more)

    def udp(**more: Any) -> Any:
        return UDP(sport=1000, dport=9, chksum=0, **more)

    def arp(spa: str, sha: str = VM_MAC) -> Any:
        return ARP(op=1, hwsrc=sha, psrc=spa, pdst=OUT_IP)

    def advertise(target: str, src: str, i: int) -> Any:
        return (eth() / ip6(src=src) / ICMPv6ND_NA(tgt=target, R=0, S=0, O=1)
                / ICMPv6NDOptDstLLAddr(lladdr=VM_MAC))

    controller_ip, controller_port = openflow
    by_port = [
        Trick("plain", lambda i: eth() / ip() / udp()),
        Trick("mac", lambda i: eth(src=f"02:fb:00:77:00:{i:02x}") / ip() / udp()),
        Trick("mac-of-other", lambda i: eth(src=CALM_MAC) / ip(src=CALM_IP) / udp()),
        Trick("mac-group", lambda i: eth(src="03:fb:00:77:00:01") / ip() / udp()),
        Trick("ip", lambda i: eth() / ip(src=f"10.74.0.{i}") / udp()),
        # Static forwarding takes no tagged frames from VMs.
        Trick("vlan", lambda i: eth() / Dot1Q(vlan=i) / ip() / udp(), 0),
        Trick("vlan-priority", lambda i: eth() / Dot1Q(vlan=0, prio=7) / ip() / udp(), 0),
        Trick("qinq", lambda i: eth() / Dot1AD(vlan=i) / Dot1Q(vlan=1) / ip() / udp(), 0),
        Trick("arp", lambda i: eth(dst="ff:ff:ff:ff:ff:ff") / arp(f"10.74.0.{i}")),
        Trick("ipv6", lambda i: eth() / ip6() / udp()),
        Trick("ipv6-options", lambda i: eth() / ip6() / IPv6ExtHdrDestOpt() / udp()),
        Trick("fragment-first", lambda i: eth() / ip(flags="MF", id=i) / udp()),
        Trick("fragment-later", lambda i: eth() / ip(frag=100 + i, id=i, proto=17) / Raw(b"x")),
        Trick("ipv6-fragment", lambda i: eth() / ip6() / IPv6ExtHdrFragment(offset=100, id=i)),
        Trick("vxlan", lambda i: eth() / ip() / UDP(sport=i, dport=4789) / VXLAN(vni=i) / eth()
              / ip(src=f"10.74.0.{i}") / udp()),
        Trick("gre", lambda i: eth() / ip() / GRE() / ip(src=f"10.74.0.{i}") / udp()),
        Trick("mpls", lambda i: eth() / MPLS(label=i, s=1) / ip() / udp()),
        Trick("to-other-mac", lambda i: eth(dst=OTHER_MAC) / ip() / udp()),
        Trick("to-unknown-mac", lambda i: eth(dst=f"02:99:00:00:00:{i:02x}") / ip() / udp()),
        Trick("to-all", lambda i: eth(dst="ff:ff:ff:ff:ff:ff") / ip(dst="255.255.255.255") / udp()),
        Trick("spanning-tree", lambda i: Ether(src=VM_MAC, dst="01:80:c2:00:00:00", type=300)
              / LLC(dsap=0x42, ssap=0x42) / STP()),
        Trick("version", lambda i: eth() / ip(version=i % 16) / udp()),
        Trick("length-of-header", lambda i: eth() / ip(ihl=i % 16) / udp()),
        Trick("length", lambda i: eth() / ip(len=20 + 999 * i) / udp()),
        Trick("cut-ip", lambda i: eth() / ip(), cut=14 + 13),
        Trick("cut-tag", lambda i: eth() / Dot1Q(vlan=1), cut=14 + 3),
        Trick("nothing-but-ethernet", lambda i: eth(type=0x0800), cut=14),
        # The hidden flows of in-band control let these past everything.
        Trick("from-controller", lambda i: eth() / ip(src=controller_ip)
              / TCP(sport=controller_port, dport=i)),
        Trick("to-controller", lambda i: eth() / ip(dst=controller_ip)
              / TCP(sport=i, dport=controller_port)),
    ]
    # The VM has RATE, and towards LIMITED_IP and LIMITED_IP6 less.
    limited = [
        Trick("plain", lambda i: eth() / ip(LIMITED_IP) / udp(), LIMITED_RATE),
        Trick("vlan", lambda i: eth() / Dot1Q(vlan=i) / ip(LIMITED_IP) / udp(), 0),
        Trick("ports", lambda i: eth() / ip(LIMITED_IP) / UDP(sport=i, dport=i), LIMITED_RATE),
        Trick("first", lambda i: eth() / ip(LIMITED_IP, flags="MF", id=i) / udp(), LIMITED_RATE),
        Trick("later", lambda i: eth() / ip(LIMITED_IP, frag=99, id=i) / Raw(b"x"), LIMITED_RATE),
        Trick("options", lambda i: eth()
              / ip(LIMITED_IP, options=[IPOption_NOP()] * i) / udp(), LIMITED_RATE),
        Trick("version", lambda i: eth() / ip(LIMITED_IP, version=i % 16) / udp(), LIMITED_RATE),
        Trick("source", lambda i: eth() / ip(LIMITED_IP, src=f"10.74.0.{i}") / udp(), LIMITED_RATE),
        Trick("to-other-mac", lambda i: eth(dst=OTHER_MAC) / ip(LIMITED_IP) / udp(), LIMITED_RATE),
        Trick("gre", lambda i: eth() / ip(LIMITED_IP) / GRE() / ip() / udp(), LIMITED_RATE),
        Trick("icmp", lambda i: eth() / ip(LIMITED_IP) / ICMP(), LIMITED_RATE),
        Trick("ipv6", lambda i: eth() / ip6(LIMITED_IP6) / udp(), LIMITED_RATE),
        Trick("ipv6-later", lambda i: eth() / ip6(LIMITED_IP6)
              / IPv6ExtHdrFragment(offset=100, id=i), LIMITED_RATE),
        Trick("ipv6-options", lambda i: eth() / ip6(LIMITED_IP6) / IPv6ExtHdrDestOpt() / udp(),
              LIMITED_RATE),
        # Without an IP header that the switch can read, only the VM's own rate counts.
        Trick("qinq", lambda i: eth() / Dot1AD(vlan=i) / Dot1Q(vlan=1) / ip(LIMITED_IP) / udp(), 0),
        Trick("length-of-header", lambda i: eth() / ip(LIMITED_IP, ihl=1) / udp()),
    ]
    # The VM has a port and addresses: what contradicts them goes nowhere.
    checked = [
        Trick("right", lambda i: eth() / ip() / udp()),
        Trick("right-ipv6", lambda i: eth() / ip6() / udp()),
        Trick("right-arp", lambda i: eth() / arp(VM_IP)),
        Trick("right-neighbour", lambda i: advertise(VM_IP6, VM_IP6, i)),
        Trick("later", lambda i: eth() / ip(frag=100, id=i) / Raw(b"x")),
        Trick("vlan", lambda i: eth() / Dot1Q(vlan=i) / ip() / udp(), 0),
        Trick("address-request", lambda i: eth() / ip(src="0.0.0.0") / UDP(sport=68, dport=67)),
        Trick("mac", lambda i: eth(src=CALM_MAC) / ip() / udp(), 0),
        Trick("ip", lambda i: eth() / ip(src=CALM_IP) / udp(), 0),
        Trick("ip-vlan", lambda i: eth() / Dot1Q(vlan=i) / ip(src=CALM_IP) / udp(), 0),
        Trick("ip-first", lambda i: eth() / ip(src=CALM_IP, flags="MF", id=i) / udp(), 0),
        Trick("ip-later", lambda i: eth() / ip(src=CALM_IP, frag=100, id=i) / Raw(b"x"), 0),
        Trick("no-ip", lambda i: eth() / ip(src="0.0.0.0") / udp(), 0),
        Trick("ipv6", lambda i: eth() / ip6(src=CALM_IP6) / udp(), 0),
        Trick("arp", lambda i: eth() / arp(CALM_IP), 0),
        Trick("neighbour", lambda i: advertise(CALM_IP6, VM_IP6, i), 0),
        Trick("neighbour-link-local", lambda i: advertise(CALM_IP6, "fe80::1", i), 0),
        Trick("length-of-header", lambda i: eth() / ip(ihl=1) / udp(), 0),
        Trick("qinq", lambda i: eth() / Dot1AD(vlan=i) / Dot1Q(vlan=1) / ip() / udp(), 0),
        Trick("mpls", lambda i: eth() / MPLS(label=i, s=1) / ip() / udp(), 0),
        Trick("ethertype", lambda i: eth(type=0x88B5) / Raw(b"x"), 0),
        Trick("from-controller", lambda i: eth() / ip(src=controller_ip)
              / TCP(sport=controller_port, dport=i), 0),
    ]
    return {"port": by_port, "limited": limited, "checked": checked}


def config(kind: str, ports: Sequence[str]) -> str:
    """Write the file: tenant `evil` with a VM at each of the ports, and `calm`."""
    vm: dict[str, Any] = {"rate": f"{RATE // MBIT}Mbps"}
    if kind == "limited":
        vm["destinations"] = [{"to": to, "rate": f"{LIMITED_RATE // MBIT}Mbps"}
                              for to in (LIMITED_IP, LIMITED_IP6)]
    vms = {port: {"port": port, **vm} for port in ports}
    if kind == "checked":
        # Nobody else's addresses may be given twice: each VM has one of its own beside.
        for i, item in enumerate(vms.values()):
            item |= {"mac": vm_mac(i), "ip": [vm_ip(i), vm_ip6(i)]}
    return yaml.safe_dump({
        "unknown_sources": "drop",
        "tenants": {
            "evil": {"vms": vms},
            "good": {"vms": {"calm": {"port": "calm", "rate": f"{CALM_RATE // MBIT}Mbps"}}},
        },
        "forwarding": {"mode": "static", "unknown": "drop", "entries": [
            {"to": to, "port": "out"} for to in
            (OUT_MAC, OTHER_MAC, "10.73.0.0/16", "0.0.0.0/0", "::/0")]},
    })


def vm_mac(i: int) -> str:
    return f"02:fb:00:01:01:{i:02x}"


def vm_ip(i: int) -> str:
    return f"10.72.1.{i}"


def vm_ip6(i: int) -> str:
    return f"fd72:1::{i:x}"


def frames(trick: Trick, length: int, i: int) -> Iterator[bytes]:
    """Give the frames of a trick at VM number `i`, all of one length."""
    own = [(VM_MAC, vm_mac(i)), (VM_IP, vm_ip(i)), (VM_IP6, vm_ip6(i))]
    for number in range(FRAMES):
        packet = trick.make(number)
        layer = packet
        while layer:
            for name, value in list(layer.fields.items()):
                for everyone, mine in own:
                    if isinstance(value, str) and value == everyone:
                        setattr(layer, name, mine)
            layer = layer.payload
        data = bytes(packet)
        yield data[:length] + bytes(max(0, length - len(data)))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["port", "limited", "checked"])
def test_no_trick_gets_more(testbed: Testbed, tmp_path: Path, kind: str) -> None:
    """What leaves of each VM is its rate, or nothing; nobody else has less."""
    ovs = testbed.ovs
    count = len(tricks(("127.0.0.1", 1))[kind])
    ports = [f"e{i:02d}" for i in range(count)]
    file = tmp_path / "tenants.yaml"
    file.write_text(config(kind, ports))
    out: Recorder = testbed.recorder("out")
    ovs.set_qos("out", "flowbundler")
    controller = Controller(file, ovs, testbed.bridge, testbed.cpus)
    try:
        address, _, number = controller.openflow.rpartition(":")
        lengths: dict[int, Trick] = {}
        for i, trick in enumerate(tricks((address, int(number)))[kind]):
            length = trick.cut or 300 + 4 * i
            assert length not in lengths and length != CALM_LENGTH
            lengths[length] = trick
            path = testbed.dir / f"{ports[i]}.pcap"
            write_frames(path, frames(trick, length, i))
            testbed.add_port(ports[i], f"net_pcap,rx_pcap={path},infinite_rx=1")
        testbed.source("calm", [FlowSpec(1, frame_size=CALM_LENGTH)])
        log = Log(ovs)
        controller.connect()
        wait_until(lambda: not any(switch["missing_ports"] for switch in
                                   controller.get("/v1/status")["switches"].values()),
                   "the controller has found all ports", 20, 0.1)
        favour_pmds(testbed)
        seen = capture(testbed, out, SECONDS)
    finally:
        controller.close()

    packets = seen.packets
    span = (seen.end_ns - seen.start_ns) / 1e9
    left = {length: float(packets.length[packets.length == length].sum()) * 8 / span
            for length in {*lengths, CALM_LENGTH}}
    rates = {trick.name: left[length] for length, trick in lengths.items()}
    write_results("shaping-hostile", {kind: {**rates, "calm": left[CALM_LENGTH]}})
    print({name: f"{rate / MBIT:.2f}" for name, rate in rates.items()})
    assert set(np.unique(packets.length).tolist()) <= {*lengths, CALM_LENGTH}
    # 2 %: 2 s, and frames that left a poll later than they should have.
    evaded = {trick.name: left[length] for length, trick in lengths.items()
              if left[length] > 1.02 * trick.rate}
    assert not evaded, f"more than allowed: {evaded}"
    # What may pass did, or the test would have shown nothing.
    stopped = {trick.name: left[length] for length, trick in lengths.items()
               if left[length] < 0.95 * trick.rate}
    assert not stopped, f"less than allowed: {stopped}"
    assert left[CALM_LENGTH] == pytest.approx(CALM_RATE, rel=0.02)
    assert not [line for line in log.problems() if "EMER" in line]
