"""Counts every packet between two virtual machines, whatever is changed meanwhile.

One VM (`Oracle.sender`) offers more than its meters let through, numbered; the
other one checks what comes.  What the first VM's virtqueue took has either come
to the other VM, in order and once, or is in a counter of what was dropped.  In
between packets wait at port "out".
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

from fbtest.proc import wait_until
from fbtest.testbed import Testbed, VhostPort
from fbtest.vm import Vm, VmCounters

from shaping import MBIT, SHAPER_DROPS, Log, backlog, run_for

FLOWS = 8
FRAME_BYTES = 1000
#: What the VM offers, in frames a second: about twice what its meters let through.
OFFERED_PPS = 12_000
#: Of all flows together, and of each.
TOTAL = 24 * MBIT
RATE = TOTAL // FLOWS
#: What may wait of the VM's receive queue: a few dozen packets.
RX_LIMIT = 40_000

#: The longest that packets may wait, in us: they expire in no pause of a PMD thread.
PATIENCE_US = 2_000_000


class OracleError(AssertionError):
    """Something is lost, or came in another order than it was sent."""


@dataclass
class Sums:
    """What both VMs have seen, and drops by cause."""

    sender: VmCounters
    receiver: VmCounters
    drops: dict[str, int]

    @property
    def missing(self) -> int:
        """Packets that are neither received nor counted as dropped."""
        return self.sender.sent - self.receiver.received - sum(self.drops.values())


class Oracle:
    """Two VMs, at ports "vm" and "out", meters and flows between them."""

    def __init__(self, bed: Testbed):
        self.bed, self.ovs = bed, bed.ovs
        self.vm: VhostPort = bed.vhost_port("vm")
        self.out: VhostPort = bed.vhost_port("out")
        self.ovs.set_config(meter_shaping=True, meter_shaping_max_delay=PATIENCE_US,
                            shaper_rx_limit=RX_LIMIT)
        self.set_qos()
        self.set_meters_and_flows()
        self.sender: Vm = bed.vm(self.vm, flows=FLOWS, frame_bytes=FRAME_BYTES)
        self.receiver: Vm = bed.vm(self.out, flows=FLOWS, frame_bytes=FRAME_BYTES)
        self.log = Log(self.ovs)
        self._mbufs = bed.mbufs_in_use()
        self.forget()

    def set_qos(self, **keys: str | int) -> None:
        """Give "out" its shaper, or change its keys."""
        self.ovs.set_qos("out", "flowbundler", **({"max_delay": PATIENCE_US} | keys))

    def set_meters_and_flows(self) -> None:
        """Make the switch forward, from nothing."""
        for meter in range(1, FLOWS + 1):
            self.ovs.set_meter(self.bed.bridge, meter, RATE)
        self.set_flows()

    def set_flows(self) -> None:
        """A meter for each destination, as the VM's flows have them."""
        self.ovs.replace_flows(self.bed.bridge, [
            f"in_port={self.vm.number},ip,nw_dst=10.73.0.{n},"
            f"actions=meter:{n},output:{self.out.number}" for n in range(1, FLOWS + 1)])

    def _drops(self) -> dict[str, int]:
        ports = self.ovs.dump_ports(self.bed.bridge)
        found = {f"meter {m.meter}": m.drops
                 for m in self.ovs.meter_stats(self.bed.bridge).values()}
        for name in ("vm", "out"):
            if name in ports:
                found |= {f"{name} rx": ports[name].rx_drop, f"{name} tx": ports[name].tx_drop}
        shown: dict[str, Any] = self.ovs.flowbundler_show().get("out", {})
        found |= {name: int(shown.get(name, 0)) for name in SHAPER_DROPS}
        found |= {name: count for name, count in self.ovs.coverage().items()
                  if name.startswith(("datapath_drop_", "drop_action_"))
                  and name != "datapath_drop_meter"}
        return found

    def drops(self) -> dict[str, int]:
        """Packets dropped since the beginning, by cause; what is 0 is left out."""
        found = Counter(self._drops())
        found.update(self._gone)
        found.subtract(self._before)
        return {name: count for name, count in found.items() if count}

    def settle(self, cleared: str) -> None:
        """Stop; keep what drops there have been whose names begin with `cleared`.

        For when OVS is about to set these counters to 0.
        """
        self.stop()
        now = self._drops()
        self._gone.update({name: count for name, count in now.items()
                           if name.startswith(cleared)})

    def start(self) -> None:
        """Have the VM send; returns when packets come, and others wait at "out"."""
        self.sender.rate(OFFERED_PPS)
        self.wait_traffic()

    def wait_traffic(self) -> None:
        """Wait until packets come (again), and others wait."""
        before = self.receiver.report().received
        wait_until(lambda: self.receiver.report().received > before + 100, "packets come", 20)
        wait_until(lambda: backlog(self.ovs, "out") > FLOWS, "packets wait", 20)

    def run(self, seconds: float) -> None:
        """Let it run."""
        run_for(self.ovs, seconds)

    def sums(self) -> Sums:
        """Now.  Packets that are on their way are missing."""
        drops = self.drops()
        return Sums(self.sender.report().since(self._sent),
                    self.receiver.report().since(self._received), drops)

    def forget(self) -> None:
        """Count from now on, when all packets are accounted for."""
        self._before, self._gone = self._drops(), Counter()
        self._sent, self._received = self.sender.report(), self.receiver.report()

    def stop(self) -> Sums:
        """Have the VM send no more; returns when what it sent has been accounted for."""
        self.sender.rate(0)
        wait_until(lambda: self.sender.report().pending == 0, "the VM has sent all", 20)
        # The caller says what is missing.
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: self.sums().missing == 0, "all packets are accounted for", 10, 0.1)
        return self.sums()

    def check(self, *, may_drop: tuple[str, ...] = (), may_reorder: bool = False) -> Sums:
        """Stop, and look whether all packets are accounted for and in order.

        Drops are allowed by the causes that begin with `may_drop` only.
        """
        sums = self.stop()
        got = sums.receiver
        unexpected = {name: n for name, n in sums.drops.items()
                      if not name.startswith(may_drop)}
        wrong = {"missing": sums.missing, "misordered": 0 if may_reorder else got.misordered,
                 "duplicates": got.duplicates, "damaged": got.damaged,
                 "strange": got.strange, **unexpected}
        if any(wrong.values()):
            raise OracleError(f"{ {k: v for k, v in wrong.items() if v} }: {sums}")
        self.bed.wait_mbufs(self._mbufs)
        return sums
