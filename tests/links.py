"""Links between two switches that are flooded, and whether they stay alive.

    sudo make check-links MINUTES=10 SEED=1

Two bridges are connected by five wires, each a veth pair between two DPDK ports: two are a
bond that speaks LACP (balance-tcp, lacp-time=fast), two a bond whose members speak CFM
(balance-slb), each 100 ms, and one has BFD of 3 x 100 ms.  All have a max-rate.  In both
directions ten times as much is offered to each, by senders that nothing holds back, for all
the time.  What has come over a wire waits again, for a port that is slower still, and there is
a `shaper-rx-limit`, which a VM that sends over the first bond runs into.  Each second
something is changed in a QoS.  Two hosts ask each other's address over the wire with BFD.

The host of the first switch sends to a thousand addresses, which the main thread forwards.
Three more VMs forge what keeps links alive, and send that to where floods go: LACP over the
first bond, ARP and BFD that says "down" over the wire with BFD.

A twin, a wire with all three protocols, but without rates and floods, runs beside.  What
goes down there within `SAME_TIME_S` of what goes down at a link is the machine's doing.

A seed determines what is changed.  Each run is a line of docs/results/runs.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "utilities")]

from fbtest.ovs import Ovs  # noqa: E402
from fbtest.pcap import FlowSpec, write_frames  # noqa: E402
from fbtest.proc import Background, group_nice, run, wait_until  # noqa: E402
from fbtest.testbed import Testbed  # noqa: E402

import runs  # noqa: E402
from shaping import MBIT, Log, favour_pmds  # noqa: E402

#: Of each wire, in each direction, and how many times as much is offered.
RATE, OFFERED = 20 * MBIT, 10
#: What leaves a switch that has received it from a wire.
SINK_RATE = RATE // 4
#: Bytes that may wait of a receive queue: a few frames.
RX_LIMIT = 5000
FRAME_BYTES = 1000
#: Flows of each flood, to as many destinations, and of the VM.
FLOWS, VM_FLOWS = 256, 16
#: What the VM offers, in frames a second.
VM_PPS = 3000

#: What the first switch's own host offers to the wire with BFD, in frames a second.
HOST_PPS = 3000

#: The links, and the VLAN that each is in, so that no frame goes round.
LINKS = {"tcp": 10, "slb": 20, "bfd": 30}
BONDS = ("tcp", "slb")
TWIN, TWIN_VLAN = "twin", 40
ENDS = ("a", "b")
#: Ports that speak what can time out.
BFD = tuple(f"{name}-{end}" for name in ("bfd", TWIN) for end in ENDS)
CFM = tuple(f"{name}-{end}{i}" for name in ("slb", TWIN) for end in ENDS
            for i in (("0", "1") if name in BONDS else ("",)))
LACP = tuple(f"{name}-{end}" for name in ("tcp", TWIN) for end in ENDS)
MEMBERS = tuple(f"{name}-{end}{i}" for name in BONDS for end in ENDS for i in "01")

#: What happens within so long of each other has one cause.
SAME_TIME_S = 1.0
#: In what part of the minutes the machine may have been at fault.
MOST_DISTURBED = 0.2
#: Where VMs, hosts and what floods send to.
VM_MAC = "02:fb:00:02:00:01"
ASKS_PER_S = 20
#: What part of a host's questions may be without an answer in time, and how many in a row.
MOST_UNANSWERED, MOST_SILENT = 0.02, 2
LOAD = "ten times the rate over each link"

#: Where our BFD is sent to, and no other BFD is to be heard (`bfd_remote_dst_mac`).
BFD_MAC = "00:23:20:00:00:01"
#: What is forged, for which link, and how much is offered of each.
FORGED = {"lacp": "tcp", "arp": "bfd", "bfd": "bfd"}
FORGED_RATE = RATE
#: BFD's header: version 1, state down, detect multiplier 3, length 24, both discriminators
#: (none of the other end), and intervals of 0.1 s.
BFD_DOWN = struct.pack("!BBBBIIIII", 0x20, 0x40, 3, 24, 1, 0, 100_000, 100_000, 0)
#: A LACPDU of who wants to be another system: actor, partner, collector, and zeros.
LACPDU = (struct.pack("!BB", 1, 1)
          + struct.pack("!BBHHIHHHBBBB", 1, 20, 1, 0x02FB, 0x66, 1, 1, 1, 0x3D, 0, 0, 0)
          + struct.pack("!BBHHIHHHBBBB", 2, 20, 1, 0x02FB, 0x67, 1, 1, 1, 0x3D, 0, 0, 0)
          + struct.pack("!BBH", 3, 16, 0)).ljust(110, b"\0")

#: Sends frames to an interface, to addresses in turn, and is behind its time for 0.1 s at most.
FLOODER = """
import socket, sys, time

name, interval, frame = sys.argv[1], 1 / float(sys.argv[2]), bytes.fromhex(sys.argv[3])
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
sock.setblocking(False)
sock.bind((name, 0))
due, n = time.monotonic(), 0
while True:
    now = time.monotonic()
    due = max(due, now - 0.1)
    while due <= now:
        n = (n + 1) % 1000
        try:
            # The last two bytes of the destination, which the checksum need not fit.
            sock.send(frame[:32] + n.to_bytes(2) + frame[34:])
        except OSError:
            pass
        due += interval
    time.sleep(0.002)
"""

#: Asks for an address over and over; when it is ended, it tells how often, how often it
#: was answered, and how many times in a row it was not at most.
ASKER = """
import json, signal, socket, struct, sys, time

def end(*_):
    raise SystemExit

signal.signal(signal.SIGTERM, end)
mac, mine, other, interval = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
raw = bytes.fromhex(mac.replace(":", ""))
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806))
sock.bind(("eth0", 0x0806))
ask = (b"\\xff" * 6 + raw + struct.pack("!HHHBBH", 0x0806, 1, 0x0800, 6, 4, 1)
       + raw + socket.inet_aton(mine) + bytes(6) + socket.inet_aton(other)).ljust(60, b"\\0")
asked = answered = silent = longest = 0
print("ready", flush=True)
try:
    while True:
        sock.send(ask)
        due, got = time.monotonic() + interval, False
        while True:
            # What came while this program did not run counts.
            sock.settimeout(max(0, due - time.monotonic()))
            try:
                frame = sock.recv(2048)
            except (TimeoutError, BlockingIOError):
                break
            got |= frame[20:22] == b"\\0\\2" and frame[28:32] == socket.inet_aton(other)
        asked += 1
        answered += got
        silent = 0 if got else silent + 1
        longest = max(longest, silent)
except SystemExit:
    print(json.dumps({"asked": asked, "answered": answered, "silent": longest}), flush=True)
"""


def forged(name: str, mac: str) -> bytes:
    """Give a frame to `mac` that passes as what keeps a link alive; "plain" does not."""
    from scapy.layers.inet import IP, UDP
    from scapy.layers.inet6 import ICMPv6ND_NS, IPv6
    from scapy.layers.l2 import ARP, Ether
    from scapy.packet import Raw

    def ask6(hop_limit: int) -> Ether:
        return (Ether() / IPv6(src="fd72::66", dst="fd73::1", hlim=hop_limit)
                / ICMPv6ND_NS(tgt="fd73::1"))

    frames = {
        "lacp": Ether(type=0x8809) / Raw(LACPDU),
        "arp": Ether() / ARP(op=1, hwsrc="02:fb:00:66:00:01", psrc="10.72.0.66",
                             pdst="10.73.0.1"),
        "nd": ask6(255),
        "nd-from-afar": ask6(254),
        "plain": Ether() / IP(src="10.72.0.66", dst="10.73.0.1") / UDP(chksum=0),
        "bfd": Ether() / IP(src="10.72.0.66", dst="10.73.0.1", ttl=255)
        / UDP(sport=49152, dport=3784, chksum=0) / Raw(BFD_DOWN),
    }
    frame = frames[name]
    frame.src, frame.dst = "02:fb:00:66:00:01", mac
    return bytes(frame).ljust(60, b"\0")


class LinkError(AssertionError):
    """A link has been down that should not have been, or a test has tested nothing."""


@dataclass(frozen=True)
class Down:
    """Something that went down, when (as time.time has it), and how."""

    time_s: float
    port: str
    what: str

    @property
    def is_twin(self) -> bool:
        """Whether it is the twin's."""
        return self.port.startswith(TWIN)

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.time_s, UTC).strftime("%H:%M:%S.%f")[:-3]
        return f"{when} {self.port}: {self.what}"


#: What vswitchd logs of it, and of which module.
_TIME = r"^(?P<time>\S+)Z\|\d+\|"
_LOGGED = [re.compile(_TIME + rest) for rest in (
    r"bfd(\([^)]*\))?\|INFO\|(?P<port>\S+): "
    r"(?P<what>BFD state change: \(bfd.SessionState: up.*SessionState: (?!up)\w+).*",
    r"cfm(\([^)]*\))?\|INFO\|(?P<port>\S+): (?P<what>CFM faults changed from \[\] .*)",
    r"bond(\([^)]*\))?\|INFO\|member (?P<port>\S+): (?P<what>disabled)")]


def downs(lines: list[str]) -> list[Down]:
    """What has gone down by vswitchd's log."""
    found = []
    for line in lines:
        for pattern in _LOGGED:
            if match := pattern.match(line):
                when = datetime.fromisoformat(match["time"]).replace(tzinfo=UTC).timestamp()
                found.append(Down(when, match["port"], match["what"]))
    return found


def expired(shown: str) -> dict[str, int]:
    """How often LACP has heard nothing for too long, by port, from lacp/show-stats."""
    return {port: int(n) for port, n in re.findall(
        r"^member: (\S+):$.*?^ +Link Expired: (\d+)$", shown, re.M | re.S)}


@dataclass
class Seen:
    """What a flood has come to."""

    seconds: float = 0.0
    changes: int = 0
    downs: list[Down] = field(default_factory=list)
    asked: int = 0
    answered: int = 0
    silent: int = 0
    """How many times in a row the hosts' questions were not answered, at most."""

    def _near_twin(self, down: Down) -> bool:
        return any(other.is_twin and abs(other.time_s - down.time_s) <= SAME_TIME_S
                   for other in self.downs)

    @property
    def flaps(self) -> list[Down]:
        """What went down at links, and not at the twin at the same time."""
        return [down for down in self.downs if not down.is_twin and not self._near_twin(down)]

    def disturbed(self, part_s: float) -> int:
        """In how many parts of the time, each so long, the twin went down."""
        return len({int(down.time_s // part_s) for down in self.downs if down.is_twin})

    @property
    def answered_well(self) -> bool:
        """Whether the hosts heard of each other all the time."""
        return (self.answered >= self.asked * (1 - MOST_UNANSWERED) > 0
                and self.silent <= MOST_SILENT)

    def check(self) -> None:
        """Raise `LinkError` if anything but the machine took a link down."""
        if self.flaps:
            raise LinkError("went down, which the twin did not:\n"
                            + "\n".join(map(str, self.flaps)))


class Links:
    """The two switches, and all between and at them."""

    def __init__(self, a: Testbed, b: Testbed):
        self.ovs: Ovs = a.ovs
        self.beds = dict(zip(ENDS, (a, b), strict=True))
        self._expired: dict[str, int] = {}
        self.ovs.appctl("vlog/disable-rate-limit", "bfd", "cfm", "bond")
        b._stack.callback(self.ovs.appctl, "vlog/enable-rate-limit", "bfd", "cfm", "bond")
        self._add_links()
        self._add_senders()
        self._wait_up()
        self._log = Log(self.ovs)
        self._downs: list[Down] = []
        self._look()

    # The switches.

    def _add_links(self) -> None:
        fast = {"lacp": "active", "other_config:lacp-time": "fast"}
        kinds = {"tcp": {"bond_mode": "balance-tcp", **fast}, "slb": {"bond_mode": "balance-slb"}}
        for name, options in kinds.items():
            wires = [self.beds["b"].wire() for _ in range(2)]
            for n, (end, bed) in enumerate(self.beds.items()):
                bed.bond(f"{name}-{end}", {f"{name}-{end}{i}": wire[n]
                                           for i, wire in enumerate(wires)},
                         tag=LINKS[name], **options)
        for name, vlan in (("bfd", LINKS["bfd"]), (TWIN, TWIN_VLAN)):
            wire = self.beds["b"].wire()
            for n, (end, bed) in enumerate(self.beds.items()):
                bed.add_port(f"{name}-{end}", wire[n])
                self._in_vlan(vlan, f"{name}-{end}")
        words: list[str] = []
        for port in BFD:
            words += ["--", "set", "Interface", port, "bfd:enable=true", "bfd:min_rx=100",
                      "bfd:min_tx=100", "bfd:mult=3", f'bfd:bfd_remote_dst_mac="{BFD_MAC}"']
        for port in CFM:
            words += ["--", "set", "Interface", port, f"cfm_mpid={1 + ('-b' in port)}",
                      "other_config:cfm_interval=100"]
        for end in ENDS:
            words += ["--", "set", "Port", f"{TWIN}-{end}",
                      *(f"{key}={value}" for key, value in fast.items())]
        self.ovs.vsctl(*words)
        for name in LINKS:
            for end in ENDS:
                self.ovs.set_qos(f"{name}-{end}", "flowbundler", max_rate=RATE)

    def _in_vlan(self, vlan: int, *ports: str) -> None:
        self.ovs.vsctl(*(word for port in ports for word in (
            "--", "set", "Port", port, f"tag={vlan}")))

    def _send_to(self, mac: str, vlan: int, *ports: str) -> None:
        """Have both switches send what is for `mac` to these ports."""
        for bed, port in zip(self.beds.values(), ports, strict=True):
            self.ovs.appctl("fdb/add", bed.bridge, port, str(vlan), mac)

    def _add_senders(self) -> None:
        """Add what sends over the links, and where that goes to; there are no flows yet."""
        self.ovs.set_config(shaper_rx_limit=RX_LIMIT)
        for n, (name, vlan) in enumerate(LINKS.items()):
            for m, (end, bed) in enumerate(self.beds.items()):
                sink, source = f"sink-{name}-{end}", f"flood-{name}-{end}"
                bed.sink(sink)
                self.ovs.set_qos(sink, "flowbundler", max_rate=SINK_RATE)
                bed.source(source, [
                    FlowSpec(i, src_mac=f"02:fb:00:{0x40 + 2 * n + m:02x}:00:{i % 16:02x}",
                             dst_mac=f"02:fb:00:02:{n:02x}:{0x10 + m:02x}",
                             dst_ip=f"10.73.0.{i}", frame_size=FRAME_BYTES)
                    for i in range(FLOWS)], packets_per_flow=1,
                    rate=OFFERED * RATE * (2 if name in BONDS else 1))
                self._in_vlan(vlan, sink, source)
            a, b = (f"{name}-{end}0" if name in BONDS else f"{name}-{end}" for end in ENDS)
            self._send_to(f"02:fb:00:02:{n:02x}:10", vlan, a, f"sink-{name}-b")
            self._send_to(f"02:fb:00:02:{n:02x}:11", vlan, f"sink-{name}-a", b)
        bed_a, bed_b = self.beds.values()
        for name, link in FORGED.items():
            path = bed_a.dir / f"forged-{name}.pcap"
            write_frames(path, [forged(name, f"02:fb:00:02:{list(LINKS).index(link):02x}:10")])
            bed_a.add_port(f"forged-{name}", f"net_pcap,rx_pcap={path},infinite_rx=1",
                           ingress_policing_rate=FORGED_RATE // 1000,
                           ingress_policing_burst=16)
            self._in_vlan(LINKS[link], f"forged-{name}")
        ports = bed_a.vhost_port("vm"), bed_b.vhost_port("vm-out")
        self._in_vlan(LINKS["tcp"], "vm", "vm-out")
        self._send_to(VM_MAC, LINKS["tcp"], "tcp-a0", "vm-out")
        self.vm = bed_b.vm(*ports, flows=VM_FLOWS, frame_bytes=FRAME_BYTES)
        self.hosts = bed_a.host("host-a"), bed_b.host("host-b")
        # (The bridge's own port is the host's, and the main thread's to poll.)
        self._in_vlan(LINKS["bfd"], "host-a", "host-b", bed_a.bridge)
        run("ip", "link", "set", bed_a.bridge, "up")
        to = f"02:fb:00:02:{list(LINKS).index('bfd'):02x}:10"
        self._host = [sys.executable, "-I", "-S", "-c", FLOODER, bed_a.bridge, str(HOST_PPS),
                      forged("plain", to).ljust(FRAME_BYTES, b"\0").hex()]

    def flood(self) -> None:
        """Begin to send."""
        for bed in self.beds.values():
            self.ovs.replace_flows(bed.bridge, ["actions=NORMAL"])
            favour_pmds(bed)
        self.vm.rate(VM_PPS)
        self.beds["b"]._keep(Background(self._host, name="host", cpus=self.beds["b"].cpus))

    @contextlib.contextmanager
    def _asking(self, seen: Seen) -> Iterator[None]:
        """Have the first host ask for the second one's address meanwhile."""
        one, other = self.hosts
        asker = one.ns.spawn(sys.executable, "-I", "-S", "-c", ASKER, one.mac, one.ip, other.ip,
                             str(1 / ASKS_PER_S), name="asker", cpus=one.cpus)
        group_nice(asker.pid, -15)
        try:
            wait_until(asker.stdout, "the host asks")
            yield
            asker.stop()
            told = json.loads(asker.stdout().splitlines()[-1])
            seen.asked, seen.answered, seen.silent = (
                told["asked"], told["answered"], told["silent"])
        finally:
            asker.close()

    # What is seen of the links.

    def not_up(self) -> list[str]:
        """The ports that a protocol says are not up."""
        forwarding = dict(re.findall(r"^---- (\S+) ----$.*?^  Forwarding: (\w+)$",
                                     self.ovs.appctl("bfd/show"), re.M | re.S))
        found = [port for port in BFD if forwarding.get(port) != "true"]
        cfm = dict(re.findall(r"^---- (\S+) ----$\nMPID \d+:.*\n(  fault|  average)",
                              self.ovs.appctl("cfm/show"), re.M))
        found += [port for port in CFM if cfm.get(port) != "  average"]
        for port in LACP:
            shown = self.ovs.appctl("lacp/show", port)
            if not ("status: active negotiated" in shown and "current" in shown
                    and not re.search("expired|defaulted", shown)):
                found.append(port)
        for port in (f"{name}-{end}" for name in BONDS for end in ENDS):
            shown = self.ovs.appctl("bond/show", port)
            found += [f"{port}{i}" for i in "01" if f"member {port}{i}: enabled" not in shown]
        return found

    def _wait_up(self) -> None:
        try:
            wait_until(lambda: not self.not_up(), "all links are up", 20, 0.2)
        except TimeoutError:
            raise LinkError(f"not up: {self.not_up()}") from None

    def _look(self) -> None:
        """See which ports LACP has heard nothing at since the last time."""
        now = expired(self.ovs.appctl("lacp/show-stats"))
        self._downs += [Down(time.time(), port, "LACP expired") for port, n in now.items()
                        if n > self._expired.get(port, n)]
        self._expired = now

    def watch(self, seconds: float, choose: random.Random,
              say: Callable[[str], None] = lambda text: None) -> Seen:
        """Change something each second for so long; returns what went down meanwhile."""
        seen = Seen()
        with self._asking(seen):
            begun = time.monotonic()
            while (passed := time.monotonic() - begun) < seconds:
                if passed >= seen.changes:
                    seen.changes += 1
                    say(f"{passed:6.1f} s: {self._change(choose)}")
                self._look()
                time.sleep(0.2)
            seen.seconds = time.monotonic() - begun
        # What an end hears of the other one's may still come.
        for _ in range(5):
            time.sleep(0.2)
            self._look()
        seen.downs = sorted(self._downs + downs(self._log.lines()), key=lambda d: d.time_s)
        self._downs, self._log = [], Log(self.ovs)
        if not seen.flaps and (dead := self.not_up()):
            raise LinkError(f"not up in the end: {dead}")
        return seen

    def _change(self, choose: random.Random) -> str:
        """Change something in the QoS of a link; returns what."""
        port = f"{choose.choice(tuple(LINKS))}-{choose.choice(ENDS)}"
        key, value = choose.choice((
            ("max_rate", choose.choice((RATE, RATE // 2, RATE // 4))),
            ("max_delay", choose.choice((10_000, 50_000, 200_000))),
            ("max_granularity", choose.choice((1024, 4096, 65536))),
            ("type", "made anew")))
        if key == "type":
            self.ovs.clear_qos(port)
            self.ovs.set_qos(port, "flowbundler", max_rate=RATE)
        else:
            self.ovs.set_qos(port, "flowbundler", **{key: value})
        return f"{port}: {key} {value}"

    def check_flooded(self, before: dict[str, int]) -> None:
        """Raise `LinkError` if the links were not offered too much, or nobody held back.

        `before` are OVS's counters from when the flood had begun.
        """
        now = self.ovs.coverage()
        shown = self.ovs.flowbundler_show()
        idle = [port for port in (*MEMBERS, "bfd-a", "bfd-b", *(
            f"sink-{name}-{end}" for name in LINKS for end in ENDS))
            if not shown[port]["backlog"]]
        if len(idle) > 2:  # One has just been made anew.
            raise LinkError(f"nothing waits at {idle}")
        for name in ("datapath_rxq_held_back", "flowbundler_drop_max_delay"):
            if now.get(name, 0) <= before.get(name, 0):
                raise LinkError(f"{name} has not risen")


@contextlib.contextmanager
def links(a: Testbed) -> Iterator[Links]:
    """Give links from the switch of a testbed to one of another testbed."""
    with Testbed(a.ovs.env, subnet=100) as b:
        yield Links(a, b)


def main() -> int:
    """Do what the command line says, in the environment of fb-sandbox."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=None, help="default: the time")
    parser.add_argument("--no-record", action="store_true", help="add no line to the record")
    args = parser.parse_args()
    seed = int(time.time()) if args.seed is None else args.seed
    print(f"links: {args.minutes:g} minutes with --seed {seed}", flush=True)

    with Testbed() as bed, links(bed) as those:
        those.flood()
        before = those.ovs.coverage()
        seen, error = Seen(), ""
        try:
            seen = those.watch(args.minutes * 60, random.Random(seed),
                               lambda text: print(f"links: {text}", flush=True))
            seen.check()
            those.check_flooded(before)
            if seen.disturbed(60) > MOST_DISTURBED * args.minutes:
                raise LinkError("the machine took the twin down too often")
            if not seen.answered_well:
                raise LinkError(f"{seen.answered} answers of {seen.asked}, at most "
                                f"{seen.silent} missing in a row")
        except LinkError as exc:
            error = str(exc)
    for down in seen.downs:
        print(f"links: {down}")
    detail = {"minutes": f"{seen.seconds / 60:.1f}", "seed": seed, "changes": seen.changes,
              "flaps": len(seen.flaps), "disturbed_minutes": seen.disturbed(60),
              "asked": seen.asked, "answered": seen.answered}
    if not args.no_record:
        runs.append("links", LOAD, not error, detail)
    print("links:", *(f"{name}={value}" for name, value in detail.items()))
    if error:
        print(f"links: FAILED with --seed {seed}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
