"""FlowBundlerSwitch: a bridge of our vswitchd, as a switch of mininet."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fbtest.proc import CommandError
from mininet.link import Intf, OVSIntf, TCIntf
from mininet.node import Node, OVSSwitch, Switch

from . import vswitch
from .params import LinkError, Shape

#: net_af_packet's rings: large enough for what is sent at once, small enough for the cache.
_RINGS = "qpairs=1,blocksz=4096,framesz=2048,framecnt=512"
#: The keys that we set, and so take away.
_QOS_KEYS = ("max-rate", "max-delay", "delay", "jitter")
_RX_KEYS = ("shaper-rx-rate", "shaper-rx-max-delay", "shaper-rx-delay", "shaper-rx-jitter")


def peer(intf: Intf) -> Intf | None:
    """The interface at the other end of the link of `intf`."""
    link = intf.link
    if link is None or getattr(link, "intf2", None) is None:
        return None
    return link.intf2 if link.intf1 is intf else link.intf1


class FlowBundlerSwitch(OVSSwitch):
    """A bridge of an Open vSwitch with the shaper, with a port for each link.

    Takes OVSSwitch's parameters.  All of a Mininet's switches are bridges of one private
    ovs-vswitchd, which is started with the first and ended with the last of them; commands
    of the node (`s1.cmd("ovs-vsctl show")`) are for that one.
    """

    def __init__(self, name: str, failMode: str | None = None, dpdk: bool | None = None,
                 memory: int | None = None, **params: Any):
        """Make the node; `start` makes the bridge.

        failMode: "secure" or "standalone"; by default standalone without a controller
        dpdk: whether to use DPDK; by default where it starts
        memory: MB for DPDK, 1024 by default; of the first switch that is started
        """
        params |= {"datapath": "user", "batch": False}
        OVSSwitch.__init__(self, name, failMode=failMode or "secure", **params)
        self._fail_mode = failMode
        self._dpdk, self._memory = dpdk, memory
        # Of each port: whether it bypasses the kernel's queues, its row of QoS.
        self._bypass: dict[str, bool] = {}
        self._qos: dict[str, str] = {}
        self.vswitch: vswitch.VSwitch | None = None

    @classmethod
    def setup(cls) -> None:
        """Tell what is missing.  (OVSSwitch asks the machine's own Open vSwitch.)"""
        try:
            vswitch.built_tree()
        except vswitch.SwitchError as error:
            raise SystemExit(f"*** {error}") from None
        cls.OVSVersion = "3.5"

    # Starting and stopping.

    def start(self, controllers: Iterable[Node]) -> None:
        """Make the bridge with all its ports, and connect it to `controllers`."""
        if self.inNamespace:
            raise vswitch.SwitchError(f"{self.name}: a FlowBundlerSwitch works in the root "
                                      "namespace only: leave out --innamespace")
        self.vswitch = vswitch.acquire(self, self._dpdk, self._memory)
        self.cmd("export", *(f"{name}={shlex.quote(value)}"
                             for name, value in self.vswitch.ovs.env.items()
                             if name == "PATH" or name.startswith("OVS_")))
        ports = [intf for intf in self.intfList() if self.ports[intf] and not intf.IP()]
        try:
            for intf in ports:
                self._check(intf)
            controllers = list(controllers)
            command = ["--", "--if-exists", "del-br", self.name, "--", "add-br", self.name,
                       *self._bridge(controllers)]
            self._add_ports(ports, command)
            self._verify(ports)
        except BaseException:
            self._leave()
            raise
        for intf in ports:
            self._prepare_peer(intf)

    def _bridge(self, controllers: list[Node]) -> list[str]:
        """Commands of ovs-vsctl for the bridge's own columns."""
        fail_mode = self._fail_mode or ("secure" if controllers else "standalone")
        self.failMode = fail_mode
        command = ["--", "set", "Bridge", self.name, "datapath_type=netdev",
                   f"fail_mode={fail_mode}", f"other_config:datapath-id={self.dpid}",
                   f"other_config:dp-desc={self.name}"]
        if not self.inband:
            command.append("other_config:disable-in-band=true")
        if self.protocols:
            command.append(f"protocols={self.protocols}")
        if self.stp and fail_mode == "standalone":
            command.append("stp_enable=true")
        targets = [f"{c.protocol}:{c.IP()}:{c.port}" for c in controllers]
        if self.listenPort:
            targets.append(f"ptcp:{self.listenPort}:127.0.0.1")
        for number, target in enumerate(targets):
            command += ["--", f"--id=@c{number}", "create", "Controller",
                        f'target="{target}"',
                        *([f"max_backoff={self.reconnectms}"] if self.reconnectms else []),
                        "--", "add", "Bridge", self.name, "controller", f"@c{number}"]
        return command

    def _add_ports(self, intfs: list[Intf], command: list[str]) -> None:
        """Run `command` of ovs-vsctl and those that add ports for `intfs`."""
        assert self.vswitch is not None
        for intf in intfs:
            command += self._port(intf)
        # It prints the rows that it makes, in the order in which it is told to.
        rows = self.vswitch.ovs.vsctl(*command).split()
        shaped = [intf.name for intf in intfs if not isinstance(intf, OVSIntf)]
        self._qos.update(zip(reversed(shaped), reversed(rows), strict=False))

    def _port(self, intf: Intf) -> list[str]:
        """Commands of ovs-vsctl that add the port of `intf`, with its QoS."""
        assert self.vswitch is not None
        name = intf.name
        columns = [f"ofport_request={self.ports[intf]}"]
        command = ["--", "add-port", self.name, name, "--", "set", "Interface", name, *columns]
        if isinstance(intf, OVSIntf):
            other = peer(intf)
            return [*command, "type=patch", f"options:peer={other}"]
        with contextlib.suppress(OSError):
            # Not for this namespace's own networking.
            Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
        self.cmd("ip link set dev", name, "arp off up")
        if self.vswitch.dpdk:
            # What tc is to have, it must see.
            self._bypass[name] = not self._has_tc(intf)
            command += ["type=dpdk", f"options:dpdk-devargs={self.vswitch.device()},iface={name},"
                        f"{_RINGS},qdisc_bypass={self._bypass[name]:d}"]
        command += [f"other_config:{key}={value}" for key, value in self._reception(intf).items()]
        qos = [f"other_config:{key}={value}" for key, value in self._sending(intf).items()]
        row = f"@{self.name}-{self.ports[intf]}"
        return [*command, "--", f"--id={row}", "create", "QoS", "type=flowbundler", *qos,
                "--", "set", "Port", name, f"qos={row}"]

    def _verify(self, intfs: Iterable[Intf]) -> None:
        """Raise if a port is not there or its QoS is not in force."""
        assert self.vswitch is not None
        ovs = self.vswitch.ovs
        if not isinstance(ovs.get("Interface", self.name, "ofport"), int):
            raise vswitch.SwitchError(
                f"{self.name}: the bridge cannot be made: does another ovs-vswitchd (another "
                "mininet, fb-sandbox) have a userspace datapath (ovs-netdev) in this network "
                "namespace?  End it, or run one of them under 'unshare --net'")
        for intf in intfs:
            if error := ovs.get("Interface", intf.name, "error"):
                raise vswitch.SwitchError(f"{intf.name}: {error}")
            status = ovs.get("Interface", intf.name, "status")
            for key in ("qos_error", "shaper_rx_error"):
                if error := status.get(key):
                    raise LinkError(f"{intf.name}: the switch refuses {error}")

    def _prepare_peer(self, intf: Intf) -> None:
        """Have what is at the other end finish its frames itself, off the switch's CPUs."""
        other = peer(intf)
        if other is None or isinstance(other.node, FlowBundlerSwitch):
            return
        # What comes from there is read raw: checksums and segments must be there.
        other.cmd("ethtool -K", other, "tx off tso off gso off")
        assert self.vswitch is not None
        self.vswitch.keep_off(other.node.pid)

    def stop(self, deleteIntfs: bool = True) -> None:
        """Delete the bridge; the last one ends the vswitchd."""
        self._leave()
        Switch.stop(self, deleteIntfs)

    def _leave(self) -> None:
        self._delete_bridges([self])
        self.vswitch = None
        vswitch.release([self])

    @staticmethod
    def _delete_bridges(switches: Iterable[FlowBundlerSwitch]) -> None:
        """Delete the bridges of `switches` with their rows of QoS, in one go."""
        command: list[str] = []
        ovs = None
        for switch in switches:
            if switch.vswitch is None or not switch.vswitch.running():
                continue
            ovs = switch.vswitch.ovs
            command += ["--", "--if-exists", "del-br", switch.name]
            command += [word for row in switch._qos.values()
                        for word in ("--", "--if-exists", "destroy", "QoS", row)]
            switch._qos.clear()
        if ovs is not None:
            # It may be gone at the same time (mn -c).
            with contextlib.suppress(CommandError):
                ovs.vsctl(*command)

    @classmethod
    def batchStartup(cls, switches: Iterable[FlowBundlerSwitch], **_: Any
                     ) -> Iterable[FlowBundlerSwitch]:
        """All has been started by `start`."""
        return switches

    @classmethod
    def batchShutdown(cls, switches: Iterable[FlowBundlerSwitch], **_: Any
                      ) -> Iterable[FlowBundlerSwitch]:
        """Stop `switches`, and the vswitchd if these are its last ones."""
        cls._delete_bridges(switches)
        for switch in switches:
            switch.vswitch = None
            switch.terminate()
        vswitch.release(switches)
        return switches

    # Ports.

    def attach(self, intf: Intf) -> None:
        """Add a port for `intf` while the switch runs."""
        if self.vswitch is None:
            raise vswitch.SwitchError(f"{self.name} is not running: net.start() or "
                                      f"{self.name}.start([]) comes before attach()")
        self._check(intf)
        self._add_ports([intf], ["--", "--if-exists", "del-port", self.name, intf.name])
        self._verify([intf])
        self._prepare_peer(intf)

    def detach(self, intf: Intf) -> None:
        """Take the port of `intf` off the switch."""
        if self.vswitch is not None and self.vswitch.running():
            self.vswitch.ovs.vsctl("--if-exists", "del-port", self.name, str(intf))

    def update(self, intf: Intf) -> None:
        """Have the port of `intf` do what its link says now, in place."""
        if self.vswitch is None or intf.name not in self._qos:
            return      # `start` or `attach` will.
        if self._has_tc(intf) and self._bypass.get(intf.name):
            raise LinkError(f"{intf.name}: loss: allowed when the link is made, not later, "
                            "because the port bypasses the kernel's queues")
        self._check(intf)
        ovs = self.vswitch.ovs
        qos, reception = self._sending(intf), self._reception(intf)
        row = self._qos[intf.name]
        command = ["--", "remove", "QoS", row, "other_config", *_QOS_KEYS]
        for table, record, keys in (("QoS", row, qos), ("Interface", intf.name, reception)):
            if keys:
                command += ["--", "set", table, record,
                            *(f"other_config:{key}={value}" for key, value in keys.items())]
        gone = [key for key in _RX_KEYS if key not in reception]
        ovs.vsctl("--", "remove", "Interface", intf.name, "other_config", *gone, *command)
        self._verify([intf])

    # What links want.

    @staticmethod
    def _shape(intf: Intf | None) -> Shape:
        return getattr(intf, "shape", None) or Shape()

    def _sending(self, intf: Intf) -> dict[str, str]:
        """The keys of the QoS of the port of `intf`."""
        return self._shape(intf).qos()

    def _reception(self, intf: Intf) -> dict[str, str]:
        """The keys of the Interface of `intf`: what the host at the other end may send."""
        other = peer(intf)
        if other is None or isinstance(other.node, Switch):
            return {}
        return self._shape(other).reception()

    def _check(self, intf: Intf) -> None:
        """Refuse what there is no memory for."""
        assert self.vswitch is not None
        for end in (intf, peer(intf)):
            try:
                self._shape(end).check_buffers(self.vswitch.buffers)
            except LinkError as error:
                raise LinkError(f"{end}: {error}") from None

    def _has_tc(self, intf: Intf) -> bool:
        """Whether packets that leave by `intf` are to pass the kernel's queues."""
        if hasattr(intf, "shape"):
            return bool(self._shape(intf).loss)
        return isinstance(intf, TCIntf)
