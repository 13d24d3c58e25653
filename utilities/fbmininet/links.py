"""FlowBundlerIntf and FlowBundlerLink: links whose rates and delays the switch holds."""

from __future__ import annotations

import os
from typing import Any

from mininet.link import Intf, Link, TCIntf
from mininet.log import info
from mininet.node import Node, Switch

from . import vswitch
from .params import LinkError, Shape, check_names, shape
from .switch import FlowBundlerSwitch, peer


class FlowBundlerIntf(TCIntf):
    """An end of a link, with TCIntf's parameters.

    What leaves a switch of ours waits at its port; what a host sends to one waits in the
    switch, too, under the same parameters.  At any other end this is a TCIntf.
    """

    #: What this end sends, where a switch of ours sees to it.
    shape: Shape | None = None

    def served_by(self) -> FlowBundlerSwitch | None:
        """The switch that does what is asked of this end; None if tc has to."""
        if isinstance(self.node, FlowBundlerSwitch):
            return self.node
        nodes = getattr(self.link, "nodes", ())
        others = [node for node in nodes if node is not self.node]
        if others and not isinstance(self.node, Switch) and isinstance(
                others[0], FlowBundlerSwitch):
            return others[0]
        return None

    def config(self, **params: Any) -> dict[str, Any] | None:
        """Configure the interface, and what it sends.

        As with TCIntf, at run time too: what is not given is no longer there, and without
        any of bw, delay, jitter, loss, max_queue_size all stays as it was.  Raises
        LinkError, and what was in force stays.
        """
        served_by = self.served_by()
        check(params, served_by)
        if served_by is None:
            return self._config_tc(params)
        wanted = shape(params)
        result = Intf.config(self, **{key: value for key, value in params.items()
                                      if key in ("mac", "ip", "ifconfig", "up")})
        if not isinstance(self.node, Switch):
            self._offloads(**params)
        if wanted is None:
            return None
        before, self.shape = self.shape, wanted
        try:
            self._update(before)
        except Exception:
            self.shape = before
            raise
        info(f"({wanted.text()}) ")
        return result

    def _update(self, before: Shape | None) -> None:
        """Have the switch follow, if its port is there."""
        if self.shape is not None and (self.shape.loss or (before and before.loss)):
            self._set_loss(self.shape.loss)
        switch = self.served_by()
        port = self if self.node is switch else peer(self)
        if switch is not None and port is not None:
            switch.update(port)

    def _offloads(self, gro: bool = False, rxo: bool = True, **_params: Any) -> None:
        """Set a host's offloads.  What it sends is read raw: it must be complete."""
        gro = not _params.get("disable_gro", not gro)
        self.cmd("ethtool -K", self, "tx off tso off gso off",
                 "gro", "on" if gro else "off", "rx", "on" if rxo else "off")

    def _set_loss(self, percent: float) -> None:
        """Have netem lose packets that leave by this interface."""
        self.tc("%s qdisc del dev %s root")
        said = self.tc("%s qdisc add dev %s root netem limit 100000 loss " + f"{percent:.5f}%%"
                       ) if percent else ""
        if said.strip():
            raise LinkError(f"{self}: loss={percent:g}: only netem can lose packets, and this "
                            f"kernel says: {said.strip()} (modprobe sch_netem, or leave loss out)")

    def _config_tc(self, params: dict[str, Any]) -> dict[str, Any] | None:
        """Configure an end that no switch of ours serves."""
        result = TCIntf.config(self, **{key: value for key, value in params.items()
                                        if key != "use_htb"})
        said = " ".join(line for output in (result["tcoutputs"] if result else ())
                        for line in output.splitlines() if not line.startswith("Warning"))
        if said:
            wanted = ", ".join(f"{key}={value}" for key, value in params.items()
                               if key in TC_NEEDS_NETEM and value is not None)
            raise LinkError(
                f"{self}: no FlowBundlerSwitch is at this end, so tc has to do it, and it says: "
                f"{said}" + (f"; {wanted} needs the kernel's netem (modprobe sch_netem)"
                             if wanted else ""))
        return result


#: What TCIntf has netem for.
TC_NEEDS_NETEM = ("delay", "jitter", "loss", "max_queue_size")


def check(params: dict[str, Any], switch: FlowBundlerSwitch | None) -> None:
    """Refuse parameters that cannot be, before anything is made."""
    if switch is not None:
        shape(params)
        return
    check_names(params, tc=True)
    wanted = shape({key: value for key, value in params.items()
                    if key in ("bw", "delay", "jitter", "loss", "max_queue_size")})
    if wanted is not None and wanted.rate_mbit > TCIntf.bwParamMax:
        raise LinkError(f"bw={params['bw']!r}: no FlowBundlerSwitch is at this end, and TCLink's "
                        f"HTB allows up to {TCIntf.bwParamMax} Mbit/s")


class FlowBundlerLink(Link):
    """A link with TCLink's parameters, of which the switches of ours at its ends see to."""

    def __init__(self, node1: Node, node2: Node, **params: Any):
        """As `Link`.  Raises LinkError, and nothing is made."""
        self.nodes = (node1, node2)
        params.setdefault("cls1", FlowBundlerIntf)
        params.setdefault("cls2", FlowBundlerIntf)
        common = {key: value for key, value in params.items() if key not in LINK_PARAMS}
        for number, (node, other) in enumerate(((node1, node2), (node2, node1)), 1):
            own = {**(params.get(f"params{number}") or {}), **common}
            served = next((n for n in (node, other) if isinstance(n, FlowBundlerSwitch)), None)
            if served is other and isinstance(node, Switch):
                served = None
            check(own, served)
            if served is None and any(own.get(key) for key in ("bw", *TC_NEEDS_NETEM)):
                info(f"(TCLink at {node}) ")
        try:
            Link.__init__(self, node1, node2, **params)
        except BaseException:
            self._unmake(params)
            raise

    @classmethod
    def makeIntfPair(cls, intfname1: str, intfname2: str, *args: Any, **kwargs: Any) -> Any:
        """Make the pair of interfaces, to be deleted at the end whatever happens."""
        result = Link.makeIntfPair(intfname1, intfname2, *args, **kwargs)
        for name in (intfname1, intfname2):
            if name in os.listdir("/sys/class/net"):
                vswitch.guard(name)
        return result

    def _unmake(self, params: dict[str, Any]) -> None:
        """Delete what was made of a link that could not be."""
        for node in self.nodes:
            for intf in [i for i in node.intfList() if i.link is self]:
                intf.cmd("ip link del", intf)
                node.delIntf(intf)


#: The parameters of Link itself, not of its interfaces.
LINK_PARAMS = ("port1", "port2", "intfName1", "intfName2", "addr1", "addr2", "intf", "cls1",
               "cls2", "params1", "params2", "fast")
