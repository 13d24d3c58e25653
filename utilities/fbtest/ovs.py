"""Thin helpers over ovs-vsctl, ovs-ofctl and ovs-appctl.

They talk to the Open vSwitch that OVS_RUNDIR in the environment names, with
the programs found on PATH: ``fb-sandbox run`` sets both.  What a command
says when it fails is in the `CommandError` raised.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import procfs
from .proc import CommandError, parse_cpu_mask, run

#: The OpenFlow version used: the first with meters.
OPENFLOW = "OpenFlow13"


def ovsdb_value(value: Any) -> Any:
    """Turn an OVSDB JSON value into a plain Python one."""
    if isinstance(value, list) and len(value) == 2:
        kind, inner = value
        if kind == "map":
            return {ovsdb_value(k): ovsdb_value(v) for k, v in inner}
        if kind == "set":
            return [ovsdb_value(v) for v in inner]
        if kind in ("uuid", "named-uuid"):
            return inner
    return value


@dataclass
class PortCounters:
    """One port's counters as ``ovs-ofctl dump-ports`` shows them, live.

    `custom` has the port type's own, for example ``ovs_tx_qos_drops``.
    """

    rx_packets: int = 0
    rx_bytes: int = 0
    rx_drop: int = 0
    tx_packets: int = 0
    tx_bytes: int = 0
    tx_drop: int = 0
    custom: dict[str, int] = field(default_factory=dict)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


_PORT = re.compile(r"^\s*port\s+\"?([^\s\":]+)\"?: rx (.*)$")


def parse_dump_ports(text: str) -> dict[str, PortCounters]:
    """Parse dump-ports: the port, as it is printed, to its counters."""
    ports: dict[str, PortCounters] = {}
    current: PortCounters | None = None
    for line in text.splitlines():
        match = _PORT.match(line)
        if match:
            current = ports[match[1]] = PortCounters()
            direction, rest = "rx", match[2]
        elif current is None:
            continue
        elif line.strip().startswith("tx pkts="):
            direction, rest = "tx", line.strip()[3:]
        elif re.match(r"\s*[rt]x rfc2819 ", line):
            continue  # Packets by length, which vhost-user ports have.
        elif "=" in line and not line.strip().startswith("duration"):
            pairs = re.findall(r"(\w+)=(\d+)", line)
            current.custom.update((k, int(v)) for k, v in pairs)
            continue
        else:
            continue
        values = dict(re.findall(r"(\w+)=(\S+?)(?:,|$)", rest))
        setattr(current, f"{direction}_packets", _number(values["pkts"]))
        setattr(current, f"{direction}_bytes", _number(values["bytes"]))
        setattr(current, f"{direction}_drop", _number(values["drop"]))
    return ports


@dataclass
class MeterStats:
    """A meter's counters; `drops` are its first band's packets."""

    meter: int
    packets_in: int
    bytes_in: int
    drops: int
    drop_bytes: int


@dataclass
class QueueStats:
    """A queue's counters; `errors` are packets dropped."""

    bytes: int
    packets: int
    errors: int


_QUEUE = re.compile(r"queue (\d+): bytes=(\d+), pkts=(\d+), errors=(\d+)")


def parse_queue_stats(text: str) -> dict[int, QueueStats]:
    """Parse ``ovs-ofctl queue-stats`` of one port: queue number to counters."""
    return {int(m[1]): QueueStats(int(m[2]), int(m[3]), int(m[4]))
            for m in _QUEUE.finditer(text)}


_METER = re.compile(
    r"meter:(\d+) .*?packet_in_count:(\d+) byte_in_count:(\d+)"
    r"(.*?)(?=meter:\d|\Z)", re.S)
_BAND = re.compile(r"packet_count:(\d+) byte_count:(\d+)")


def parse_meter_stats(text: str) -> dict[int, MeterStats]:
    """Parse ``ovs-ofctl meter-stats``: meter number to counters."""
    meters = {}
    for number, packets, nbytes, bands in _METER.findall(text):
        band = _BAND.search(bands)
        meters[int(number)] = MeterStats(
            meter=int(number), packets_in=int(packets), bytes_in=int(nbytes),
            drops=int(band[1]) if band else 0,
            drop_bytes=int(band[2]) if band else 0,
        )
    return meters


def parse_mempools(text: str) -> dict[str, int]:
    """Parse netdev-dpdk/get-mempool-info: pool name to mbufs in use."""
    pools: dict[str, int] = {}
    name = ""
    for line in text.splitlines():
        if match := re.match(r"mempool <([^>]+)>", line):
            name = match[1]
            pools[name] = 0
        elif match := re.match(r"\s*populated_size=(\d+)$", line):
            pools[name] += int(match[1])
        elif match := re.match(
                r"\s*(?:total_cache_count|common_pool_count)=(\d+)$", line):
            pools[name] -= int(match[1])
    return pools


class Ovs:
    """The Open vSwitch that the environment names."""

    def __init__(self, env: Mapping[str, str] | None = None):
        self.env = dict(os.environ if env is None else env)
        #: Whether vswitchd is known to answer no more.
        self.gone = False
        if "OVS_RUNDIR" not in self.env:
            raise RuntimeError("OVS_RUNDIR is not set: run this under "
                               "'fb-sandbox run --'")

    # The three programs.

    def vsctl(self, *args: str, timeout: int = 30) -> str:
        """``ovs-vsctl``, which waits until vswitchd has followed, if it is not `gone`."""
        return run("ovs-vsctl", f"--timeout={timeout}", *(["--no-wait"] if self.gone else []),
                   *args, env=self.env, timeout=timeout + 5)

    def ofctl(self, *args: str, of: str = OPENFLOW, stdin: str | None = None
              ) -> str:
        """``ovs-ofctl`` speaking OpenFlow version `of`."""
        return run("ovs-ofctl", "-O", of, *args, env=self.env, stdin=stdin)

    def appctl(self, *args: str, target: str = "ovs-vswitchd",
               timeout: int = 10) -> str:
        """``ovs-appctl`` to `target`."""
        return run("ovs-appctl", "--timeout", str(timeout), "-t", target,
                   *args, env=self.env, timeout=timeout + 5)

    # The daemon.

    def alive(self) -> bool:
        """Whether vswitchd answers within 10 s."""
        try:
            self.appctl("version")
        except CommandError:
            return False
        return True

    def running(self) -> bool:
        """Whether there is a vswitchd, be it one that hangs."""
        try:
            return procfs.alive(self.pid())
        except FileNotFoundError:
            return False

    def pid(self) -> int:
        """The pid of vswitchd."""
        path = Path(self.env["OVS_RUNDIR"], "ovs-vswitchd.pid")
        return int(path.read_text())

    def versions(self) -> dict[str, str]:
        """The versions of Open vSwitch and DPDK that run."""
        dpdk = self.get("Open_vSwitch", ".", "dpdk_version")
        return {"ovs": self.appctl("version").split()[-1],
                "dpdk": dpdk if isinstance(dpdk, str) else ""}

    def pmd_run_ns(self) -> dict[str, int]:
        """How long each PMD thread has run so far, by thread name, in ns.

        A PMD thread polls all the time: what it did not run of a time span,
        something else ran on its core, and nothing was forwarded.
        """
        pid = self.pid()
        found = {name: procfs.run_ns(pid, tid)
                 for tid, name in procfs.threads(pid).items() if name.startswith("pmd-c")}
        return {name: ns for name, ns in found.items() if ns is not None}

    def pmd_cpus(self) -> set[int]:
        """The CPUs that PMD threads poll on, as pmd-cpu-mask says."""
        config = self.get("Open_vSwitch", ".", "other_config")
        mask = config.get("pmd-cpu-mask", "")
        return parse_cpu_mask(mask) if mask else set()

    # The database.

    def get(self, table: str, record: str, column: str) -> Any:
        """A column's value, as a plain Python value."""
        text = self.vsctl("--format=json", f"--columns={column}", "list",
                          table, record)
        return ovsdb_value(json.loads(text)["data"][0][0])

    def set_config(self, **other_config: str | int | bool | None) -> None:
        """Set keys of Open_vSwitch's other_config; None removes a key.

        Underscores in names stand for dashes.
        """
        for name, value in other_config.items():
            key = name.replace("_", "-")
            if value is None:
                self.vsctl("remove", "Open_vSwitch", ".", "other_config", key)
            else:
                text = str(value).lower() if isinstance(value, bool) else value
                self.vsctl("set", "Open_vSwitch", ".",
                           f"other_config:{key}={text}")

    def hold_back(self, limit: int, type_: str = "dpdk") -> None:
        """Give all interfaces of a type their own shaper-rx-limit, in bytes.

        (That of Open_vSwitch's other_config is not for NICs, whose type sources are of.)
        """
        names = self.vsctl("--bare", "--columns=name", "find", "Interface", f"type={type_}")
        self.vsctl(*(word for name in names.split() for word in (
            "--", "set", "Interface", name, f"other_config:shaper-rx-limit={limit}")))

    def interface_statistics(self, name: str) -> dict[str, int]:
        """An interface's statistics; vswitchd renews them every 5 s only."""
        return self.get("Interface", name, "statistics")

    def backup(self) -> str:
        """The database, as ``ovsdb-client backup`` writes it."""
        return run("ovsdb-client", "backup", self._socket(), env=self.env)

    def restore(self, backup: str) -> None:
        """Make the database what it was, whatever is in it now."""
        with tempfile.TemporaryFile("w+") as file:
            file.write(backup)
            file.seek(0)
            # It seeks in its standard input.
            subprocess.run(["ovsdb-client", "--force", "restore", self._socket()],
                           env=self.env, stdin=file, check=True, timeout=30)

    def _socket(self) -> str:
        return f"unix:{self.env['OVS_RUNDIR']}/db.sock"

    # QoS.

    def set_qos(self, port: str, qos_type: str, **other_config: str | int
                ) -> None:
        """Give `port` a QoS of `qos_type`, in place of any it has.

        Underscores in names stand for dashes.  Asking for the type the port
        has changes its keys in place.
        """
        pairs = [f"other_config:{k.replace('_', '-')}={v}"
                 for k, v in other_config.items()]
        old = self.get("Port", port, "qos")
        if old and self.get("QoS", old, "type") == qos_type:
            if pairs:
                self.vsctl("set", "QoS", old, *pairs)
            return
        args = ["set", "Port", port, "qos=@q", "--", "--id=@q", "create",
                "QoS", f"type={qos_type}", *pairs]
        self.vsctl("--", *args, "--", *self.destroy_qos(old))

    def clear_qos(self, port: str) -> None:
        """Take the QoS off `port`, and destroy its row and those of its queues."""
        old = self.get("Port", port, "qos")
        if old:
            self.vsctl("--", "clear", "Port", port, "qos", "--", *self.destroy_qos(old))

    def destroy_qos(self, qos: str) -> list[str]:
        """A command of `vsctl` that destroys a QoS (not if it is "") and its queues.

        No port may have it any more.
        """
        if not qos:
            return ["init"]
        queues = self.get("QoS", qos, "queues").values()
        return ["destroy", "QoS", qos,
                *(word for queue in queues for word in ("--", "destroy", "Queue", queue))]

    def qos_show(self, port: str) -> str:
        """``ovs-appctl qos/show``."""
        return self.appctl("qos/show", port)

    def flowbundler_show(self, port: str | None = None) -> Any:
        """``ovs-appctl flowbundler/show --format json``, parsed."""
        args = ["--format", "json", "flowbundler/show"]
        return json.loads(self.appctl(*args, *([port] if port else [])))

    # Flows, meters, counters.

    def replace_flows(self, bridge: str, flows: Iterable[str]) -> None:
        """Make `flows` the bridge's flows, in one bundle."""
        self.ofctl("--bundle", "replace-flows", bridge, "-",
                   stdin="\n".join(flows) + "\n")

    def add_flows(self, bridge: str, flows: Iterable[str]) -> None:
        """Add `flows` to the bridge."""
        self.ofctl("add-flows", bridge, "-", stdin="\n".join(flows) + "\n")

    def set_meter(self, bridge: str, meter: int, bits_per_second: int, *,
                  burst_bits: int | None = None, modify: bool = False) -> None:
        """Add (or `modify` in place) a drop-band meter.

        OpenFlow counts a meter's rate in kbit/s and its burst in kbit.
        """
        if bits_per_second % 1000:
            raise ValueError("a meter's rate is a multiple of 1000 bit/s")
        flags = "kbps stats"
        band = f"type=drop rate={bits_per_second // 1000}"
        if burst_bits is not None:
            flags = "kbps burst stats"
            band += f" burst_size={max(1, burst_bits // 1000)}"
        self.ofctl("mod-meter" if modify else "add-meter", bridge,
                   f"meter={meter} {flags} bands={band}")

    def del_meters(self, bridge: str) -> None:
        """Delete all of the bridge's meters."""
        self.ofctl("del-meters", bridge)

    def queue_stats(self, bridge: str, port: str) -> dict[int, QueueStats]:
        """The counters of the queues that `port` has."""
        return parse_queue_stats(self.ofctl("queue-stats", bridge, port))

    def meter_stats(self, bridge: str) -> dict[int, MeterStats]:
        """The bridge's meters' counters."""
        return parse_meter_stats(self.ofctl("meter-stats", bridge))

    def dump_ports(self, bridge: str) -> dict[str, PortCounters]:
        """The bridge's ports' counters, by port name; these are live."""
        return parse_dump_ports(
            self.ofctl("--names", "dump-ports", bridge, of="OpenFlow15"))

    def mempools(self) -> dict[str, int]:
        """mbufs in use in each of the datapath's mempools."""
        return parse_mempools(self.appctl("netdev-dpdk/get-mempool-info"))

    def coverage(self) -> dict[str, int]:
        """vswitchd's event counters: name to total."""
        text = self.appctl("coverage/show")
        return {m[1]: int(m[2]) for m in re.finditer(
            r"^(\S+)\s.*total: (\d+)$", text, re.M)}
