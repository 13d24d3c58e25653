"""A testbed on a running Open vSwitch with DPDK.

    with Testbed() as bed:
        vm, web = bed.host("vm"), bed.host("web")
        bed.set_flows()
        with bed.sampler() as sampler:
            result = bed.tcp(vm, web, seconds=5).result()
        print(sampler.series("web.tx_bytes").rate(...))

`Testbed` needs the environment of ``fb-sandbox run`` (PATH, OVS_RUNDIR).  All
it makes is removed when the ``with`` block ends, however it ends.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from .guest import Guest
from .measure import Sampler
from .netns import (
    Namespace,
    add_veth,
    add_wire,
    delete_link,
    link_counters,
    our_names,
    remove_stale,
    unique_name,
)
from .ovs import Ovs
from .pcap import FlowSpec, Packets, empty_pcap, no_packets, read_pcap, write_flows
from .proc import CommandError, group_nice, run, spare_cpus, wait_until
from .traffic import IperfTcp, PingPong, UdpFlood
from .vhost import Testpmd
from .vm import Vm

_serial = itertools.count()
_device = itertools.count()

INNER = "eth0"
#: A DPDK device that drives an interface of the kernel.
_AF_PACKET = "net_af_packet,iface={},qpairs=1,blocksz=4096,framesz=2048,framecnt=512"
#: Hugepages aside, captures are large and written at line rate: memory first.
_SCRATCH = "/dev/shm"


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


@dataclass
class Port:
    """A port of the testbed's bridge."""

    name: str
    number: int
    devargs: str


@dataclass
class Host:
    """A network namespace behind a DPDK port of the bridge.

    `outer` is the veth end that the port drives: what the kernel counts as
    sent on it are the frames that left the port.
    """

    name: str
    ns: Namespace
    port: Port
    outer: str
    ip: str
    mac: str
    cpus: set[int]

    def route(self, prefix: str, mac: str = "02:fb:00:02:00:01") -> None:
        """Send packets for `prefix` to the MAC address `mac`.

        For destinations that no host has, such as a recorder's.
        """
        gateway = "10.71.255.254"
        self.ns.ip("neighbor", "replace", gateway, "lladdr", mac,
                   "dev", INNER, "nud", "permanent")
        self.ns.ip("route", "replace", prefix, "via", gateway,
                   "dev", INNER, "onlink")

    def retransmits(self) -> int:
        """TCP segments sent again by this host so far."""
        return self.ns.snmp()["Tcp"]["RetransSegs"]


@dataclass
class VhostPort(Port):
    """A vhost-user port; the virtual machine listens on the socket `path`."""

    path: Path


P = TypeVar("P", bound=Port)


def _numbered(devargs: str) -> str:
    """Arguments of a DPDK device, with a number behind the driver's name."""
    driver, _, rest = devargs.partition(",")
    return f"{driver}{next(_device)}" + (f",{rest}" if rest else "")


@dataclass
class Recorder(Port):
    """A port that writes what leaves it to a file, stamped on leaving."""

    path: Path

    def read(self) -> Packets:
        """The packets that have left so far."""
        # The driver writes the file's header with the first burst.
        return read_pcap(self.path) if self.path.stat().st_size else no_packets()


class Testbed:
    """A bridge with hosts, sources, sinks and recorders."""

    # Not a test, whatever its name looks like to pytest.
    __test__ = False

    def __init__(self, env: Mapping[str, str] | None = None, *, subnet: int = 10):
        """Make it on the vswitchd of `env`.

        Of two that are connected, `subnet` keeps apart the addresses of hosts: these
        are 10.71.0.`subnet` + 1 and so on.
        """
        self.ovs = Ovs(env)
        self.hosts: dict[str, Host] = {}
        self.guests: list[Guest] = []
        self.ports: dict[str, Port] = {}
        self.bonds: dict[str, Sequence[Port]] = {}
        self._stack = ExitStack()
        self._subnet = subnet
        remove_stale()
        if not self.ovs.alive():
            raise RuntimeError("no ovs-vswitchd answers in "
                               + self.ovs.env["OVS_RUNDIR"])
        self.cpus = spare_cpus(self.ovs.pmd_cpus())
        # A PMD thread has its core to itself in production.  Here it may have
        # to share: let it have nearly all.
        pid = self.ovs.pid()
        nice = group_nice(pid, -20)
        if nice is not None:
            self._stack.callback(group_nice, pid, nice)
        try:
            parent = _SCRATCH if os.access(_SCRATCH, os.W_OK) else None
            self.dir = Path(tempfile.mkdtemp(prefix="fbtest-", dir=parent))
            self._stack.callback(shutil.rmtree, self.dir, ignore_errors=True)
            self.bridge = unique_name(f"b{next(_serial)}")
            self._stack.callback(self._remove_bridge)
            self._add_bridge()
        except BaseException:
            self._stack.close()
            raise

    def _try_bridge(self) -> bool:
        """Add the bridge; returns whether it could be made.

        It cannot be while another vswitchd in the network namespace has a
        netdev datapath, or is about to be rid of it: both want "ovs-netdev".
        """
        # Secure: nothing is forwarded before there are flows, or an endless
        # source would flood every host.
        self.ovs.vsctl("add-br", self.bridge, "--", "set", "Bridge", self.bridge,
                       "datapath_type=netdev", "fail_mode=secure")
        if isinstance(self.ovs.get("Interface", self.bridge, "ofport"), int):
            return True
        self._remove_bridge()
        return False

    def __enter__(self) -> Testbed:
        return self

    def __exit__(self, *_exc) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything; raise if something is left."""
        # If vswitchd does not answer, nothing waits for it.
        self.ovs.gone = not self.ovs.alive()
        self._stack.close()
        left = [name for host in self.hosts.values()
                for name in (host.outer, host.ns.name)]
        present = set(our_names(os.getpid()))
        left = [name for name in [*left, self.bridge] if name in present]
        if left:
            raise RuntimeError(f"left behind: {' '.join(left)}")

    def _add_bridge(self) -> None:
        wait_until(self._try_bridge, f"bridge {self.bridge} is made (does another vswitchd "
                   "have ovs-netdev in this network namespace?)", 20, 0.2)

    def remake_bridge(self) -> None:
        """Delete the bridge with its ports, and add an empty one like it.

        Rows of QoS and queues stay.
        """
        self.ovs.vsctl("del-br", self.bridge)
        self.ports.clear()
        self._add_bridge()

    def _remove_bridge(self) -> None:
        try:
            for port in (*self.ports, *self.bonds):
                self.ovs.clear_qos(port)
        except CommandError:
            pass  # The row or vswitchd is gone already.
        try:
            self.ovs.vsctl("--if-exists", "del-br", self.bridge)
        except CommandError:
            # vswitchd is gone; its database may still be there.
            self.ovs.gone = True
            run("ovs-vsctl", "--timeout=2", "--no-wait", "--if-exists",
                "del-br", self.bridge, env=self.ovs.env, check=False)
        if self.ovs.gone:
            delete_link(self.bridge)

    def _keep(self, thing: C) -> C:
        self._stack.callback(thing.close)
        return thing

    # Ports.

    def add_port(self, name: str, devargs: str, *, n_rxq: int = 1,
                 **options: str | int) -> Port:
        """Add a DPDK port; `devargs` begins with the driver's name, to which
        a number is added, e.g. ``net_null`` or ``net_null,no-rx=1``."""
        devargs = _numbered(devargs)
        args = [f"options:dpdk-devargs={devargs}"]
        if n_rxq > 1:
            args.append(f"options:n_rxq={n_rxq}")
        args += [f"{k}={v}" for k, v in options.items()]
        port = Port(name, self._add_port(name, "dpdk", *args), devargs)
        self.ports[name] = port
        return port

    def _add_port(self, name: str, port_type: str, *columns: str) -> int:
        """Add a port; returns its OpenFlow number."""
        self.ovs.vsctl("add-port", self.bridge, name, "--", "set",
                       "Interface", name, f"type={port_type}", *columns)
        error = self.ovs.get("Interface", name, "error")
        if error:
            self.ovs.vsctl("del-port", self.bridge, name)
            raise RuntimeError(f"port {name}: {error}")
        return self.ovs.get("Interface", name, "ofport")

    def vhost_port(self, name: str, qos: str = "", **options: str | int) -> VhostPort:
        """Add a port for a virtual machine, which may come before or after it.

        The port (dpdkvhostuserclient) connects to the socket that the machine
        listens on, again and again if need be.  `qos` is the row of its QoS, if any.
        """
        path = self.dir / f"{name}.sock"
        columns = [f"{k}={v}" for k, v in options.items()]
        number = self._add_port(name, "dpdkvhostuserclient",
                                f"options:vhost-server-path={path}", *columns,
                                *(["--", "set", "Port", name, f"qos={qos}"] if qos else []))
        port = VhostPort(name, number, "", path)
        self.ports[name] = port
        return port

    def vhost_bond(self, name: str, *members: str, **options: str | int) -> list[VhostPort]:
        """Add a bond of ports such as those of `vhost_port`; returns these.

        `options` are columns of the bond's Port.
        """
        ports = [VhostPort(member, 0, "", self.dir / f"{member}.sock") for member in members]
        self._add_bond(name, ports, options, lambda port: [
            "type=dpdkvhostuserclient", f"options:vhost-server-path={port.path}"])
        return ports

    def bond(self, name: str, members: Mapping[str, str], **options: str | int) -> list[Port]:
        """Add a bond of DPDK ports: their names, and devices as for `add_port`.

        `options` are columns of the bond's Port.
        """
        ports = [Port(member, 0, _numbered(devargs)) for member, devargs in members.items()]
        self._add_bond(name, ports, options, lambda port: [
            "type=dpdk", f"options:dpdk-devargs={port.devargs}"])
        return ports

    def _add_bond(self, name: str, ports: Sequence[P], options: Mapping[str, str | int],
                  columns: Callable[[P], list[str]]) -> None:
        """Add a bond; `columns` are those of a member's Interface."""
        self.ovs.vsctl(
            "--", "add-bond", self.bridge, name, *(port.name for port in ports),
            *(f"{k}={v}" for k, v in options.items()),
            *(word for port in ports for word in (
                "--", "set", "Interface", port.name, *columns(port))))
        for port in ports:
            port.number = self.ovs.get("Interface", port.name, "ofport")
        # (Its QoS is the bond's.)
        self.bonds[name] = ports

    def wire(self) -> tuple[str, str]:
        """Make a wire between two DPDK ports; returns the devices for `add_port`."""
        n = next(_serial)
        ends = unique_name(f"w{n}a"), unique_name(f"w{n}b")
        self._stack.callback(delete_link, ends[0])
        add_wire(*ends)
        return _AF_PACKET.format(ends[0]), _AF_PACKET.format(ends[1])

    def testpmd(self, port: VhostPort, **kwargs: Any) -> Testpmd:
        """Start a virtual machine at `port` that can send; ready on return."""
        self._wait_link("down", port)
        vm = self._keep(Testpmd(port.path, cpus=self.cpus, directory=self.dir,
                                **kwargs))
        vm.wait_ready()
        self._wait_link("up", port)
        return vm

    def _wait_link(self, state: str, *ports: VhostPort) -> None:
        """Wait until the switch has handled that the VM at `ports` came ("up") or went.

        Both take it a while: threads of DPDK hear it first, and tell the main thread,
        which sets the port up anew.  A VM is ready before that, and what the log has
        to say of it, such as what its driver cannot do, would come at any time.
        """
        for port in ports:
            self.ovs.vsctl("wait-until", "Interface", port.name, f"link_state={state}",
                           timeout=40)

    def vm(self, *ports: VhostPort, **kwargs: Any) -> Vm:
        """Start a virtual machine at `ports` that counts; ready on return."""
        self._wait_link("down", *ports)
        # PMD threads may move to its core.
        vm = self._keep(Vm([port.path for port in ports], directory=self.dir,
                           cpus=self.cpus | self.ovs.pmd_cpus(), **kwargs))
        vm.wait_ready()
        self._wait_link("up", *ports)
        return vm

    def delete_port(self, name: str) -> None:
        """Take a port off the bridge."""
        self.ovs.clear_qos(name)
        self.ovs.vsctl("del-port", self.bridge, name)
        del self.ports[name]

    def host(self, name: str, *, static_arp: bool = True) -> Host:
        """Add a namespace behind a DPDK port named `name`.

        With `static_arp` it and the hosts before it know each other's MAC
        addresses; else they ask.
        """
        n = next(_serial)
        self._subnet += 1
        ip, mac = f"10.71.0.{self._subnet}", f"02:fb:00:00:00:{n % 256:02x}"
        ns = self._keep(Namespace(unique_name(f"n{n}")))
        outer = unique_name(f"v{n}")
        self._stack.callback(delete_link, outer)
        add_veth(outer, ns, INNER, mac, f"{ip}/24")
        port = self.add_port(name, _AF_PACKET.format(outer))
        host = Host(name, ns, port, outer, ip, mac, self.cpus)
        if static_arp:
            for other in self.hosts.values():
                for a, b in ((host, other), (other, host)):
                    a.ns.ip("neighbor", "replace", b.ip, "lladdr", b.mac,
                            "dev", INNER, "nud", "permanent")
        self.hosts[name] = host
        return host

    def source(self, name: str, flows: Sequence[FlowSpec], *,
               packets_per_flow: int = 64, rate: int | None = None,
               mtu: int | None = None) -> Port:
        """Add a port that receives `flows`, over and over, as fast as its
        PMD thread polls.

        The PMD thread itself makes the packets, so the load is no other
        program's.  With `rate` (bit/s) a stock ingress policer thins it, in
        bursts of a millisecond; otherwise what is not forwarded must be
        dropped.  It begins at once; without a flow for it its
        packets are dropped.

        Sequence numbers repeat after `packets_per_flow`, so they tell order
        only where fewer than half as many are dropped in a row; for order
        behind heavy dropping use `flood`.  Frames above 1514 bytes need an `mtu`,
        which brings buffers of that size with it.
        """
        path = self.dir / f"{name}.pcap"
        write_flows(path, flows, packets_per_flow)
        options = {} if mtu is None else {"mtu_request": mtu}
        if rate is not None:
            # kbit/s and kbit; it counts without the Ethernet header.
            options |= {"ingress_policing_rate": rate // 1000,
                        "ingress_policing_burst": max(16, rate // 1_000_000)}
        return self.add_port(name, f"net_pcap,rx_pcap={path},infinite_rx=1",
                             **options)

    def sink(self, name: str, mtu: int | None = None) -> Port:
        """Add a port that takes everything up to its `mtu` and receives nothing.

        It counts packets only, no bytes.
        """
        return self.add_port(name, "net_null,no-rx=1",
                             **({} if mtu is None else {"mtu_request": mtu}))

    def recorder(self, name: str) -> Recorder:
        """Add a port that records what leaves it; it receives nothing."""
        path = self.dir / f"{name}.tx.pcap"
        nothing = empty_pcap(self.dir / "nothing.pcap")
        port = self.add_port(name, f"net_pcap,rx_pcap={nothing},tx_pcap={path}")
        recorder = Recorder(port.name, port.number, port.devargs, path)
        self.ports[name] = recorder
        return recorder

    def guest(self, port: VhostPort, **kwargs: Any) -> Guest:
        """Boot a virtual machine at `port` in QEMU; ready on return.

        The hosts, other guests and it know each other's MAC addresses.
        """
        self._subnet += 1
        ip, mac = f"10.71.0.{self._subnet}", f"02:fb:00:01:00:{self._subnet:02x}"
        self._wait_link("down", port)
        guest = self._keep(Guest(port.path, address=f"{ip}/24", mac=mac,
                                 cpus=self.cpus, **kwargs))
        guest.wait_ready()
        self._wait_link("up", port)
        for host in self.hosts.values():
            host.ns.ip("neighbor", "replace", ip, "lladdr", mac,
                       "dev", INNER, "nud", "permanent")
            guest.run(f"arp -s {host.ip} {host.mac}")
        for other in self.guests:
            other.run(f"arp -s {guest.ip} {guest.mac}")
            guest.run(f"arp -s {other.ip} {other.mac}")
        self.guests.append(guest)
        return guest

    # Forwarding without a controller.

    def set_flows(
        self,
        *,
        vm_meters: Mapping[str, int] | None = None,
        dest_meters: Iterable[tuple[str, int]] = (),
        routes: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Replace the bridge's flows by three tables, as the controller's.

        Table 0 takes packets of each port in `vm_meters` (port name to meter)
        through its meter, table 1 those that a match in `dest_meters` picks
        (such as ``ip,nw_dst=10.71.0.12``) through a meter, table 2 forwards:
        `routes` (match to port name) first, then to the hosts by MAC address,
        broadcasts to all of them.
        """
        flows = ["table=0,priority=0,actions=goto_table:1",
                 "table=1,priority=0,actions=goto_table:2"]
        for port, meter in (vm_meters or {}).items():
            number = self.ports[port].number
            flows.append(f"table=0,priority=10,in_port={number},"
                         f"actions=meter:{meter},goto_table:1")
        for match, meter in dest_meters:
            flows.append(f"table=1,priority=10,{match},"
                         f"actions=meter:{meter},goto_table:2")
        for match, port in routes:
            flows.append(f"table=2,priority=20,{match},"
                         f"actions=output:{self.ports[port].number}")
        for host in self.hosts.values():
            flows.append(f"table=2,priority=10,dl_dst={host.mac},"
                         f"actions=output:{host.port.number}")
        numbers = [f"output:{h.port.number}" for h in self.hosts.values()]
        if numbers:
            flows.append("table=2,priority=5,dl_dst=ff:ff:ff:ff:ff:ff,"
                         "actions=" + ",".join(numbers))
        self.ovs.replace_flows(self.bridge, flows)

    # Traffic; each is ended with the testbed at the latest.

    def tcp(self, src: Host, dst: Host, *, seconds: float, **kwargs: Any
            ) -> IperfTcp:
        """Start an iperf3 TCP transfer."""
        return self._keep(IperfTcp(src, dst, seconds=seconds, **kwargs))

    def flood(self, src: Host, dst: Host | Sequence[str], *, rate: float,
              **kwargs: Any) -> UdpFlood:
        """Start a UDP flood to a host, or to addresses (see `Host.route`)."""
        return self._keep(UdpFlood(src, dst, rate=rate, **kwargs))

    def pingpong(self, src: Host, dst: Host, **kwargs: Any) -> PingPong:
        """Start requests and responses."""
        return self._keep(PingPong(src, dst, **kwargs))

    # Measurement.

    def read_counters(self) -> dict[str, float]:
        """Counters of all hosts, as a `Sampler` takes them.

        HOST.tx_bytes and HOST.tx_packets are what left the host's port,
        HOST.rx_bytes and HOST.rx_packets what came in from the host (frames
        without FCS), HOST.retransmits the host's TCP retransmissions.
        """
        links = link_counters()
        values: dict[str, float] = {}
        for name, host in self.hosts.items():
            link = links[host.outer]
            values[f"{name}.tx_bytes"] = link.tx_bytes
            values[f"{name}.tx_packets"] = link.tx_packets
            values[f"{name}.rx_bytes"] = link.rx_bytes
            values[f"{name}.rx_packets"] = link.rx_packets
            values[f"{name}.retransmits"] = host.retransmits()
        return values

    def sampler(self, interval: float = 0.05,
                more: Callable[[], Mapping[str, float]] | None = None
                ) -> Sampler:
        """A sampler, not yet started, of `read_counters` (and of `more`)."""
        def read() -> Mapping[str, float]:
            values = self.read_counters()
            if more is not None:
                values.update(more())
            return values

        return Sampler(read, interval)

    def mbufs_in_use(self) -> int:
        """mbufs in use in all mempools (also those that queues hold)."""
        return sum(self.ovs.mempools().values())

    def wait_mbufs(self, expected: int, timeout: float = 5.0) -> None:
        """Wait until `expected` mbufs are in use: none leaked, none held."""
        wait_until(lambda: self.mbufs_in_use() == expected,
                   f"{expected} mbufs in use", timeout, interval=0.1)
