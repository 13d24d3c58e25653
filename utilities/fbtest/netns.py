"""Network namespaces, veth pairs and their kernel counters."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from . import procfs
from .proc import Background, CommandError, run, wait_until

#: Names of kernel objects made here: this, the maker's pid, and a suffix.
NAME_PREFIX = "fb"
_OURS = re.compile(rf"{NAME_PREFIX}(\d+)[a-z]")
_IFNAMSIZ = 15


def unique_name(suffix: str, pid: int | None = None) -> str:
    """A kernel object's name that no other run uses: fb<pid><suffix>.

    `suffix` begins with a letter; the whole has at most 15 characters.
    """
    name = f"{NAME_PREFIX}{os.getpid() if pid is None else pid}{suffix}"
    if len(name) > _IFNAMSIZ or not _OURS.match(name):
        raise ValueError(f"{name!r} cannot name an interface")
    return name


@dataclass(frozen=True)
class LinkCounters:
    """One interface's counters, as the kernel counts them."""

    rx_bytes: int
    rx_packets: int
    rx_dropped: int
    tx_bytes: int
    tx_packets: int
    tx_dropped: int


def parse_net_dev(text: str) -> dict[str, LinkCounters]:
    """Parse /proc/net/dev: interface name to counters."""
    links = {}
    for line in text.splitlines()[2:]:
        name, _, rest = line.partition(":")
        v = [int(x) for x in rest.split()]
        links[name.strip()] = LinkCounters(
            rx_bytes=v[0], rx_packets=v[1], rx_dropped=v[3],
            tx_bytes=v[8], tx_packets=v[9], tx_dropped=v[11],
        )
    return links


def link_counters(pid: int | str = "self") -> dict[str, LinkCounters]:
    """Counters of all interfaces in the namespace of process `pid`."""
    return parse_net_dev(Path(f"/proc/{pid}/net/dev").read_text())


def parse_snmp(text: str) -> dict[str, dict[str, int]]:
    """Parse /proc/net/snmp: protocol to counter name to value."""
    table: dict[str, dict[str, int]] = {}
    lines = text.splitlines()
    for names, values in zip(lines[::2], lines[1::2], strict=True):
        proto, _, head = names.partition(":")
        _, _, tail = values.partition(":")
        table[proto] = dict(zip(head.split(), map(int, tail.split()), strict=True))
    return table


def listening(pid: int, port: int) -> bool:
    """Whether a TCP socket listens on `port` in the namespace of process `pid`."""
    for table in ("tcp", "tcp6"):
        try:
            text = Path(f"/proc/{pid}/net/{table}").read_text()
        except FileNotFoundError:
            continue
        for line in text.splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(
                fields[1].rsplit(":", 1)[1], 16
            ) == port:
                return True
    return False


class Namespace:
    """A network namespace; `exec` and `spawn` run programs in it.

    A small sleeping process holds it open, so that /proc/PID/net of that
    process shows the namespace's counters without entering it.
    """

    def __init__(self, name: str):
        self.name = name
        run("ip", "netns", "add", name)
        try:
            self._holder = Background(
                ["ip", "netns", "exec", name, "sleep", "infinity"],
                name=f"{name} holder",
            )
            wait_until(self._entered, f"a process in namespace {name}")
            self.ip("link", "set", "lo", "up")
            self.exec("sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1",
                      check=False)
        except BaseException:
            self.close()
            raise

    def _entered(self) -> bool:
        self._holder.check_running()
        inside = os.stat(f"/proc/{self._holder.pid}/ns/net").st_ino
        return inside == os.stat(f"/run/netns/{self.name}").st_ino

    @property
    def pid(self) -> int:
        """The pid of a process inside."""
        return self._holder.pid

    def argv(self, *argv: str) -> list[str]:
        """The command that runs `argv` inside."""
        return ["ip", "netns", "exec", self.name, *argv]

    def exec(self, *argv: str, check: bool = True, timeout: float = 30) -> str:
        """Run a command inside to its end."""
        return run(*self.argv(*argv), check=check, timeout=timeout)

    def ip(self, *args: str) -> str:
        """``ip`` with `args` inside."""
        return run("ip", "-n", self.name, *args)

    def spawn(self, *argv: str, name: str = "", **kwargs) -> Background:
        """Start a program inside; the caller closes it."""
        return Background(self.argv(*argv), name=name or argv[0], **kwargs)

    def counters(self) -> dict[str, LinkCounters]:
        """The counters of the interfaces inside."""
        return link_counters(self.pid)

    def snmp(self) -> dict[str, dict[str, int]]:
        """The protocol counters inside, e.g. ``["Tcp"]["RetransSegs"]``."""
        return parse_snmp(Path(f"/proc/{self.pid}/net/snmp").read_text())

    def listening(self, port: int) -> bool:
        """Whether a TCP socket inside listens on `port`."""
        return listening(self.pid, port)

    def close(self) -> None:
        """Remove the namespace (and with it the interfaces inside)."""
        holder = getattr(self, "_holder", None)
        if holder is not None:
            holder.close()
        run("ip", "netns", "del", self.name, check=False)


def add_veth(outer: str, ns: Namespace, inner: str, mac: str, cidr: str,
             mtu: int = 1500) -> None:
    """Make a veth pair: `outer` here, `inner` with `mac`, `cidr` in `ns`.

    Nothing may finish frames on the way out of the namespace, because what
    leaves it is read raw from `outer`: checksums, TSO and GSO are off inside.
    The outer end takes no part in this namespace's networking: it has no
    address, no ARP and no IPv6.
    """
    run("ip", "link", "add", outer, "type", "veth",
        "peer", "name", inner, "netns", ns.name)
    try:
        _set_up_outer(outer, mtu)
        ns.ip("link", "set", inner, "address", mac, "mtu", str(mtu))
        ns.ip("address", "add", cidr, "dev", inner)
        ns.exec("ethtool", "-K", inner,
                "tx", "off", "tso", "off", "gso", "off")
        ns.ip("link", "set", inner, "up")
    except BaseException:
        delete_link(outer)
        raise


def add_wire(one: str, other: str, mtu: int = 1500) -> None:
    """Make a veth pair both of whose ends are here, as `outer` of `add_veth` is."""
    run("ip", "link", "add", one, "type", "veth", "peer", "name", other)
    try:
        for end in (one, other):
            _set_up_outer(end, mtu)
    except BaseException:
        delete_link(one)
        raise


def _set_up_outer(name: str, mtu: int) -> None:
    """Set an interface up that takes no part in this namespace's networking."""
    run("sysctl", "-qw", f"net.ipv6.conf.{name}.disable_ipv6=1", check=False)
    run("ip", "link", "set", name, "arp", "off", "mtu", str(mtu), "up")


def delete_link(name: str) -> None:
    """Delete an interface, if it is there."""
    run("ip", "link", "del", name, check=False)


def our_names(pid: int | None = None) -> list[str]:
    """Interfaces and namespaces here that runs of this library made.

    Only those of process `pid` if given.
    """
    names = list(link_counters())
    with contextlib.suppress(FileNotFoundError):
        names += os.listdir("/run/netns")
    return sorted(
        name for name in names
        if (m := _OURS.match(name)) and pid in (None, int(m[1]))
    )


def remove_stale() -> list[str]:
    """Remove what runs that were killed left behind; returns the names.

    A name carries its maker's pid; what a living process made is kept.
    """
    gone = []
    for name in our_names():
        match = _OURS.match(name)
        if match is None or procfs.state(int(match[1])):
            continue
        for argv in (["ip", "link", "del", name], ["ip", "netns", "del", name]):
            try:
                run(*argv)
                gone.append(name)
                break
            except CommandError:
                continue
    return gone
