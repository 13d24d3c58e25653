"""Counts every packet between two virtual machines, whatever is changed meanwhile.

One VM (`Oracle.sender`) offers more than its meters let through, numbered; the
other one checks what comes.  What the first VM's virtqueue took has either come
to the other VM, in order and once, or is in a counter of what was dropped.  In
between packets wait at port "out".

A VM may be killed and another one take its place.  What the first one had sent is
then what the switch had received, and what had come to it what the switch had given
to its device.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass, replace

from fbtest.ovs import PortCounters
from fbtest.proc import wait_until
from fbtest.testbed import Testbed, VhostPort
from fbtest.vm import Vm, VmCounters

from shaping import MBIT, SHAPER_DROPS, Log, run_for

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

#: OpenFlow numbers of the ports, also after these have been deleted and added again.
NUMBERS = {"vm": 11, "out": 12}
#: Where the VM's frames go to.
DST_MAC = "02:fb:00:02:00:01"
#: The numbers of a VM's packets begin so far behind those of the VM before it.
GENERATION = 1 << 32


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

    #: The ports whose counters count, and those of them that have a shaper.
    ports: tuple[str, ...] = ("vm", "out")
    shaped: tuple[str, ...] = ("out",)

    def __init__(self, bed: Testbed):
        self.bed, self.ovs = bed, bed.ovs
        self.vm = self.add_port("vm")
        self.add_out()
        self.ovs.set_config(meter_shaping=True, meter_shaping_max_delay=PATIENCE_US,
                            shaper_rx_limit=RX_LIMIT)
        self.set_qos()
        self.set_meters_and_flows()
        self._generation = 0
        self.add_vms()
        self.log = Log(self.ovs)
        self._mbufs = bed.mbufs_in_use()
        self.forget()
        self._counters = self.counters()

    def add_vms(self) -> None:
        """Start the VMs."""
        self.sender = self._new_vm(self.vm)
        self.receiver = self._new_vm(*self.receiving)

    def _new_vm(self, *ports: VhostPort, **kwargs: int) -> Vm:
        return self.bed.vm(*ports,
                           **({"flows": FLOWS, "frame_bytes": FRAME_BYTES,
                               "first": self._generation * GENERATION} | kwargs))

    def add_port(self, name: str, qos: str = "") -> VhostPort:
        """Add "vm" or "out" to the bridge, for the VM that is there or will be."""
        return self.bed.vhost_port(name, qos=qos, ofport_request=NUMBERS[name])

    def add_out(self) -> None:
        """Add what packets leave by."""
        self.out = self.add_port("out")
        self.receiving = [self.out]

    def delete_out(self) -> tuple[str, int]:
        """Delete "out"; what is returned is for `add_out_again`."""
        self.keep("out ")
        qos, metered = self.ovs.get("Port", "out", "qos"), self._metered()
        self.ovs.vsctl("del-port", self.bed.bridge, "out")
        return qos, metered

    def add_out_again(self, qos: str, metered: int | None = None) -> None:
        """Add "out" with the QoS that it had; returns when packets come.

        Two drops are in no counter of OVS.  What is sent before the VM has connected to
        a new port: OVS begins to count anew then.  And what passes a meter and after that
        nothing, because its port is gone: the port was not there from when the meters had
        counted `metered` packets on, so what they have counted since is the most.  None:
        there are no meters and flows.
        """
        self.out = self.add_port("out", qos)
        self.receiving = [self.out]
        if metered is None:
            self.set_meters_and_flows()
        most = 0 if metered is None else self._metered() - metered
        self.wait_traffic()
        self._stop_sending()
        self._wait_rest()
        counters, shown = self.ovs.dump_ports(self.bed.bridge)["out"], self.shown()
        self._gone["out tx"] += (shown["sent"] + shown["bypassed"]
                                 - counters.tx_packets - counters.tx_drop)
        if metered is not None:
            self._gone["no port"] += max(min(self._missing_for_good(), most), 0)
        self.start()

    def _missing_for_good(self) -> int:
        """How many packets are missing when nothing is on its way.

        Threads add what they count to the totals once a second.
        """
        since, missing = time.monotonic(), self.sums().missing

        def counted() -> bool:
            nonlocal since, missing
            before, missing = missing, self.sums().missing
            if missing != before:
                since = time.monotonic()
            return time.monotonic() > since + 1.5

        wait_until(counted, "what is missing stays the same", 20, 0.1)
        return missing

    def shown(self) -> dict[str, int]:
        """What flowbundler/show says of the ports with a shaper, added up."""
        total: Counter[str] = Counter()
        for port, values in self.ovs.flowbundler_show().items():
            if port in self.shaped:
                total.update({k: v for k, v in values.items() if isinstance(v, int)})
        return total

    def backlog(self) -> int:
        """How many packets wait."""
        return self.shown()["backlog"]

    def set_qos(self, **keys: str | int) -> None:
        """Give the port its shaper, or change its keys.

        It has one queue, which all packets are in, without a rate of its own.
        """
        self.ovs.set_qos("out", "flowbundler", **({"max_delay": PATIENCE_US} | keys))
        qos = self.ovs.get("Port", "out", "qos")
        if not self.ovs.get("QoS", qos, "queues"):
            self.ovs.vsctl("--", "set", "QoS", qos, "queues:0=@q",
                           "--", "--id=@q", "create", "Queue", "other_config={}")

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
        for name in self.ports:
            if name in ports:
                found |= {f"{name} rx": ports[name].rx_drop, f"{name} tx": ports[name].tx_drop}
        shown = self.shown()
        found |= {name: shown[name] for name in SHAPER_DROPS}
        coverage = self.ovs.coverage()
        # The shaper's own counter of it goes with the port.
        found["drop_removed"] = coverage.get("flowbundler_drop_removed", 0)
        found |= {name: count for name, count in coverage.items()
                  if name.startswith(("datapath_drop_", "drop_action_"))
                  and name != "datapath_drop_meter"}
        return found

    def counters(self) -> dict[str, int]:
        """Everything that only ever rises, by object and name.  There may be gaps."""
        found: dict[str, int] = {}
        ports = self.ovs.dump_ports(self.bed.bridge)
        for port, counters in ports.items():
            if port in self.ports:
                found |= {f"{port} {name}": getattr(counters, name) for name in (
                    "rx_packets", "rx_bytes", "rx_drop", "tx_packets", "tx_bytes", "tx_drop")}
        for port in set(self.shaped) & set(ports):
            for queue, stats in self.ovs.queue_stats(self.bed.bridge, port).items():
                found |= {f"queue {port} {queue} {name}": value
                          for name, value in vars(stats).items()}
        for meter, stats in self.ovs.meter_stats(self.bed.bridge).items():
            found |= {f"meter {meter} {name}": value for name, value in vars(stats).items()}
        shown = self.shown()
        found |= {f"shaper {name}": shown[name] for name in (
            "sent", "sent_bytes", "bypassed", "bypassed_bytes", "batches", *SHAPER_DROPS)
            if name in shown}
        return found

    def check_counters(self, may_restart: tuple[str, ...] = ()) -> None:
        """None has fallen since the last call, but those that begin with `may_restart`."""
        before, now = self._counters, self.counters()
        self._counters = before | now
        fallen = {name: (before[name], value) for name, value in now.items()
                  if value < before.get(name, 0) and not name.startswith(may_restart)}
        if fallen:
            raise OracleError(f"counters fell: {fallen}")

    def drops(self) -> dict[str, int]:
        """Packets dropped since the beginning, by cause; what is 0 is left out."""
        found = Counter(self._drops())
        found.update(self._gone)
        found.subtract(self._before)
        return {name: count for name, count in found.items() if count}

    def settle(self, cleared: str) -> None:
        """Stop, and do what `keep` does."""
        self.stop()
        self.keep(cleared)

    def keep(self, cleared: str) -> None:
        """Keep what drops there have been whose names begin with `cleared`.

        For when OVS is about to set these counters to 0.
        """
        now = self._drops()
        self._gone.update({name: count for name, count in now.items()
                           if name.startswith(cleared)})

    def kill_sender(self) -> None:
        """End the VM at "vm" while it sends; what its virtqueue has goes with it.

        What it had sent is then what came to the meters: the port's own counters go
        with the VM.
        """
        at_rest, before = self.stop(), self._metered()
        self.start()
        self.sender.kill()
        self._wait_rest()
        self._sent_before = replace(
            at_rest.sender, sent=at_rest.sender.sent + self._metered() - before)

    def _wait_rest(self) -> None:
        """Wait until nothing comes any more, and nothing waits."""
        seen = -1

        def at_rest() -> bool:
            nonlocal seen
            before, seen = seen, self._metered()
            return seen == before and self.backlog() == 0

        wait_until(at_rest, "all has left", 20, interval=0.1)

    def _metered(self) -> int:
        """How many packets have come to the meters."""
        return sum(m.packets_in for m in self.ovs.meter_stats(self.bed.bridge).values())

    def new_sender(self) -> None:
        """Another VM takes the place of the one at "vm", and sends."""
        self._generation += 1
        self.sender = self._new_vm(self.vm)
        self._sent = VmCounters()
        self.start()

    def kill_receiver(self) -> None:
        """End the VM at "out" while packets come.

        It hangs first, until its virtqueue takes no more: then what the port has sent is
        what has come to the VM.
        """
        def out() -> PortCounters:
            return self.ovs.dump_ports(self.bed.bridge)["out"]

        at_rest, before = self.stop(), out()
        self.start()
        self.receiver.pause()
        wait_until(lambda: out().tx_drop > before.tx_drop + 100, "its virtqueue is full", 20)
        self._received_before = replace(
            at_rest.receiver,
            received=at_rest.receiver.received + out().tx_packets - before.tx_packets)
        self.receiver.kill()

    def new_receiver(self) -> None:
        """Another VM takes the place of the one at "out"; returns when packets come."""
        self.receiver = self._new_vm(*self.receiving)
        self._received = VmCounters()
        self.wait_traffic()
        self._count_flushed()

    def _count_flushed(self) -> None:
        """Count what a new receiver's driver has thrown away.

        DPDK's net_virtio empties its virtqueue when it starts (virtio_dev_start()), and
        the switch may have put packets there by then: the port has sent more than has come.
        """
        self._stop_sending()
        self._wait_rest()
        ports = self.ovs.dump_ports(self.bed.bridge)
        sent = sum(ports[port.name].tx_packets for port in self.receiving)
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: self.receiver.report().received == sent, "all come", 1)
        self._gone["out flushed"] += sent - self.receiver.report().received
        self.start()

    def start(self) -> None:
        """Have the VM send; returns when packets come, and others wait at "out"."""
        self.sender.rate(OFFERED_PPS)
        self.wait_traffic()

    def wait_traffic(self) -> None:
        """Wait until packets come (again), and others wait."""
        before = self.receiver.report().received
        wait_until(lambda: self.receiver.report().received > before + 100, "packets come", 20)
        wait_until(lambda: self.backlog() > FLOWS, "packets wait", 20)

    def run(self, seconds: float) -> None:
        """Let it run."""
        run_for(self.ovs, seconds)

    def sums(self) -> Sums:
        """Now.  Packets that are on their way are missing."""
        drops = self.drops()
        return Sums(self.sender.report().since(self._sent).plus(self._sent_before),
                    self.receiver.report().since(self._received).plus(self._received_before),
                    drops)

    def forget(self) -> None:
        """Count from now on, when all packets are accounted for."""
        self._before, self._gone = self._drops(), Counter()
        self._sent, self._received = self.sender.report(), self.receiver.report()
        #: What VMs that are gone have sent and received.
        self._sent_before = self._received_before = VmCounters()

    def _stop_sending(self) -> None:
        """Have the VM send what its virtqueue has still to take, and no more."""
        self.sender.rate(0)
        wait_until(lambda: self.sender.report().pending == 0, "the VM has sent all", 20)

    def stop(self) -> Sums:
        """Have the VM send no more; returns when what it sent has been accounted for."""
        self._stop_sending()

        def complete() -> Sums | None:
            sums = self.sums()
            return None if sums.missing else sums

        try:
            return wait_until(complete, "all packets are accounted for", 10, 0.1)
        except TimeoutError:
            # The caller says what is missing.
            return self.sums()

    def check(self, *, may_drop: tuple[str, ...] = (), may_reorder: bool = False,
              may_be_strange: bool = False) -> Sums:
        """Stop, and look whether all packets are accounted for and in order.

        Drops are allowed by the causes that begin with `may_drop` only, frames that the
        switch itself has sent if they `may_be_strange`.
        """
        sums = self.stop()
        got = sums.receiver
        unexpected = {name: n for name, n in sums.drops.items()
                      if not name.startswith(may_drop)}
        wrong = {"missing": sums.missing, "misordered": 0 if may_reorder else got.misordered,
                 "duplicates": got.duplicates, "damaged": got.damaged,
                 "strange": 0 if may_be_strange else got.strange, **unexpected}
        if any(wrong.values()):
            raise OracleError(f"{ {k: v for k, v in wrong.items() if v} }: {sums}")
        self.bed.wait_mbufs(self._mbufs)
        return sums
