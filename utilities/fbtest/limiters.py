"""Three ways to limit a host's traffic, side by side.

Each has the same three methods: `set_rate` (first time and later changes),
`drops` (packets it has dropped so far) and `clear`.
"""

from __future__ import annotations

import json
from typing import Protocol

from .ovs import Ovs
from .testbed import INNER, Host


class Limiter(Protocol):
    """What the three have in common."""

    def set_rate(self, bits_per_second: int) -> None:
        """Limit to this rate from now on."""

    def drops(self) -> int:
        """Packets dropped so far."""
        ...

    def clear(self) -> None:
        """Take the limit away."""


class EgressPolicer:
    """Open vSwitch's own ``egress-policer`` on a port.

    Its `cir` is in bytes per second and `cbs` in bytes, and it counts bytes
    without the Ethernet header.  `burst_s` is how long a burst at the rate
    fills `cbs`.
    """

    def __init__(self, ovs: Ovs, bridge: str, port: str,
                 burst_s: float = 0.05):
        self.ovs, self.bridge, self.port = ovs, bridge, port
        self.burst_s = burst_s

    def set_rate(self, bits_per_second: int) -> None:
        """Set cir and cbs."""
        cir = bits_per_second // 8
        self.ovs.set_qos(self.port, "egress-policer", cir=cir,
                         cbs=max(2048, int(cir * self.burst_s)))

    def drops(self) -> int:
        """Packets the policer has dropped on this port."""
        counters = self.ovs.dump_ports(self.bridge)[self.port]
        return counters.custom.get("ovs_tx_qos_drops", counters.tx_drop)

    def clear(self) -> None:
        """Remove the QoS."""
        self.ovs.clear_qos(self.port)


class Htb:
    """Kernel HTB on a host's own interface: what shaping can give.

    The kernel tells the sender's TCP when the queue is full, which no switch
    can do; so it is the mark to reach, not something to be had in a switch.
    """

    def __init__(self, host: Host):
        self.host = host
        self._there = False

    def set_rate(self, bits_per_second: int) -> None:
        """Add or change the one class."""
        verb = "change" if self._there else "add"
        if not self._there:
            self._tc("qdisc", "add", "dev", INNER, "root", "handle", "1:",
                     "htb", "default", "1")
        self._tc("class", verb, "dev", INNER, "parent", "1:", "classid",
                 "1:1", "htb", "rate", f"{bits_per_second}bit", "quantum",
                 "1514")
        self._there = True

    def drops(self) -> int:
        """Packets the qdisc has dropped."""
        shown = json.loads(self._tc("-s", "-j", "qdisc", "show", "dev", INNER))
        return sum(q.get("drops", 0) for q in shown if q.get("root"))

    def clear(self) -> None:
        """Remove the qdisc."""
        if self._there:
            self._tc("qdisc", "del", "dev", INNER, "root")
            self._there = False

    def _tc(self, *args: str) -> str:
        return self.host.ns.exec("tc", *args)


class MeterShaper:
    """A flowbundler port and a meter that stamps departure times.

    The meter is one that `Testbed.set_flows` refers to.  A meter's rate is
    in kbit/s; changing it happens in place.
    """

    def __init__(self, ovs: Ovs, bridge: str, port: str, meter: int,
                 **other_config: str | int):
        self.ovs, self.bridge, self.port = ovs, bridge, port
        self.meter = meter
        self.other_config = other_config
        self._there = False

    def set_rate(self, bits_per_second: int) -> None:
        """Set the QoS and the meter, or change the meter's rate."""
        if not self._there:
            self.ovs.set_config(meter_shaping=True)
            self.ovs.set_qos(self.port, "flowbundler", **self.other_config)
        self.ovs.set_meter(self.bridge, self.meter, bits_per_second,
                           modify=self._there)
        self._there = True

    def drops(self) -> int:
        """Packets that would have waited for too long."""
        return self.ovs.meter_stats(self.bridge)[self.meter].drops

    def clear(self) -> None:
        """Remove the QoS and the meter (and the flows that use it)."""
        if self._there:
            self.ovs.clear_qos(self.port)
            self.ovs.ofctl("del-meter", self.bridge, f"meter={self.meter}")
            self._there = False
