"""What a switch should have, and the way there from what it has.

Four tables, because an OpenFlow 1.3 flow entry can name one meter:

===== ========================= ============================================
table matches                   does
===== ========================= ============================================
0     a VM: in_port or source   meter of the VM, writes who it is into the
                                metadata, goes on to table 1, or to table 2
                                if its tenant has no rate of its own
1     metadata: the tenant      meter of the tenant, goes on to table 2
2     metadata and destination  meter of the destination, goes on to table 3
3     destination               forwards
===== ========================= ============================================

The metadata field carries the tenant's number in its upper and the VM's in its lower
32 bits, so that the other tables need not repeat how a VM is recognized.

A flow's match is a sorted tuple of (field, text or number) with OpenFlow's names of
the fields.  Addresses are text, with ``/prefix`` (IP) or ``/mask`` (MAC, metadata)
behind them where not every bit counts.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from fbrates import ids
from fbrates.config import (
    Address,
    Config,
    Destination,
    Identity,
    Limit,
    Network,
    Shaping,
    Tenant,
    Vm,
    network_text,
)

COOKIE_PREFIX = 0xFB1D
"""The upper 16 bits of our flows' cookies; the lower 32 are the number of the owner."""
COOKIE_SHIFT = 48
COOKIE_MASK = 0xFFFF << COOKIE_SHIFT

VM_TABLE, TENANT_TABLE, DESTINATION_TABLE, FORWARDING_TABLE = 0, 1, 2, 3

ALL_BITS = 0xFFFFFFFFFFFFFFFF
TENANT_MASK = 0xFFFFFFFF00000000

NORMAL, FLOOD = "NORMAL", "FLOOD"

ETH_IPV4, ETH_IPV6, ETH_ARP = 0x0800, 0x86DD, 0x0806
IP_UDP, IP_ICMPV6 = 17, 58
ROUTER_ADVERTISEMENT, NEIGHBOR_ADVERTISEMENT, REDIRECT = 134, 136, 137
"""Types of ICMPv6 (RFC 4861, section 4)."""

LINK_LOCAL = "fe80::/10"

TAGGED: dict[str, int | str] = {"vlan_vid": "0x1000/0x1000"}
"""Matches frames with a VLAN tag of any VLAN: OFPVID_PRESENT."""

DEFAULT_PRIORITY = 1
"""Not 0, so that another controller's table-miss flow can stay where it is."""

# Table 0: what recognizes a VM.  A port says more than an address, which a sender
# can make up, and a VLAN or tunnel at the port still more; what contradicts the addresses
# of a VM is below what agrees with them.
BY_SEGMENT, BY_PORT, BY_MAC, BY_IP = 400, 300, 200, 100
CLOSED, FROM_UPLINK = 60, 50
AGREES = 20
FORGES = 40  # What a router says, or another neighbor, with a source that agrees.
ADVERTISES = 60  # What a neighbor says of itself.
IS_TAGGED = 80

# Table 2: 1000 + 2 * prefix length, and the VM's own entry before its tenant's.
DESTINATION_BASE = 1000

# Table 3, static forwarding: MAC addresses, then hosts, then what is for all, then
# prefixes by length (a default route must not swallow broadcasts).
FORWARD_MAC = 2000
FORWARD_HOST = 1600
FORWARD_MULTICAST = 1500
FORWARD_PREFIX = 1000

Match = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True)
class Meter:
    """A meter with one drop band or shape band, or (`foreign`) one that is something else."""

    id: int
    rate_kbps: int
    burst_kbit: int | None = None
    shaping: Shaping | None = None
    """What its shape band says; None: it has a drop band."""
    foreign: str = ""


@dataclass(frozen=True)
class FlowKey:
    """What makes a flow entry the same flow entry."""

    table: int
    priority: int
    match: Match


@dataclass(frozen=True)
class Flow:
    """A flow entry.  Without goto and outputs it drops."""

    key: FlowKey
    cookie: int
    meter: int | None = None
    metadata: int | None = None
    goto: int | None = None
    outputs: tuple[int | str, ...] = ()
    foreign: str = ""
    """Set for an entry read from a switch that has what ours never have."""
    packets: int = field(default=0, compare=False)
    bytes: int = field(default=0, compare=False)
    """What it had counted when it was read."""


UNKNOWN_FLOW = FlowKey(VM_TABLE, DEFAULT_PRIORITY, ())
"""The entry that what comes from nobody known meets."""


@dataclass
class Plan:
    """The meters and flows that one switch should have."""

    meters: dict[int, Meter] = field(default_factory=dict)
    flows: dict[FlowKey, Flow] = field(default_factory=dict)
    missing_ports: set[str] = field(default_factory=set)
    shape: bool = False
    """Whether the meters have shape bands."""


UNKNOWN, TRIAL = "(unknown sources)", "(trial)"
"""What has a number beside VMs and destinations; no VM can have such a name."""


@dataclass
class Numbers:
    """The numbers that a configuration's names have."""

    meters: dict[str, int]
    tenants: dict[str, int]
    owners: dict[int, str]
    trial: int
    """The meter id that shape bands are tried with; nothing else has it."""

    @classmethod
    def of(
        cls,
        config: Config,
        before: Mapping[str, int] | None = None,
        tenants_before: Mapping[str, int] | None = None,
        unusable: Collection[int] = (),
    ) -> Numbers:
        """Number everything in the configuration; ValueError if the ids are too few.

        Who had a number `before` keeps it; new ones are not among the `unusable`.
        """
        keys = [limit.key for limit in config.limits()]
        keys += [TRIAL] if config.unknown_rate is None else [TRIAL, UNKNOWN]
        meters = ids.allocate(keys, config.first_meter, config.last_meter, before, unusable)
        tenants = ids.allocate(config.tenants, 1, 0x7FFFFFFF, tenants_before)
        trial = meters.pop(TRIAL)
        return cls(meters, tenants, {number: key for key, number in meters.items()}, trial)

    def all(self) -> dict[str, int]:
        """Give all that have a meter id, also the trial."""
        return {**self.meters, TRIAL: self.trial}

    def describe(self, number: int) -> str:
        """Name the owner of a meter id or of a cookie's lower half."""
        return self.owners.get(number, f"number {number}")


# What to change.  `what` names it for logs and errors.


@dataclass(frozen=True)
class MeterMod:
    """Add, modify or delete a meter."""

    command: str
    meter: Meter


@dataclass(frozen=True)
class FlowMod:
    """Add (or replace) or delete one flow entry."""

    command: str
    flow: Flow


@dataclass(frozen=True)
class Barrier:
    """Everything before it is done before anything after it."""


Change = MeterMod | FlowMod | Barrier

ADD, MODIFY, DELETE = "add", "modify", "delete"


def meter_for(
    limit: Limit, number: int, rate: int | None, shaping: Shaping | None = None
) -> Meter | None:
    """Give the meter of a VM or destination at `rate` bit/s; None if it is unlimited.

    It has a shape band that says `shaping`, or without that a drop band.
    """
    return None if rate is None else Meter(number, rate // 1000, limit.burst, shaping)


def build(
    config: Config,
    numbers: Numbers,
    rates: Mapping[str, int | None],
    ports: Mapping[str, int],
    shape: bool = False,
    closed: Iterable[Identity] = (),
) -> Plan:
    """Give what a switch with these ports (name -> number) should have.

    `shape` says that it has the shape band.

    `rates` has the rate in bit/s, or None for unlimited, of every VM and destination
    by key.  A VM whose port the switch does not have has nothing there, and its port
    is in the result's `missing_ports`.

    What comes from who is `closed`, because it was a VM and is none any more, is dropped
    also where unknown sources are not.
    """
    return _Builder(config, numbers, rates, ports, shape, closed).build()


class _Builder:
    def __init__(
        self,
        config: Config,
        numbers: Numbers,
        rates: Mapping[str, int | None],
        ports: Mapping[str, int],
        shape: bool,
        closed: Iterable[Identity],
    ) -> None:
        self.closed = closed
        self.shaping = config.shaping if shape else None
        self.config = config
        self.numbers = numbers
        self.rates = rates
        self.ports = ports
        self.plan = Plan(shape=self.shaping is not None)

    def build(self) -> Plan:
        for tenant in self.config.tenants.values():
            present = [vm for vm in tenant.vms.values() if self.vm(tenant, vm)]
            if present and tenant.total is not None:
                number = self.numbers.meters[tenant.total.key]
                who: dict[str, int | str] = {"metadata": self.of_tenant(tenant)}
                meter, goto = self.meter(tenant.total), DESTINATION_TABLE
                self.add(TENANT_TABLE, DEFAULT_PRIORITY, who, number, meter, goto=goto)
            if present:
                for destination in tenant.destinations.values():
                    self.destination(tenant, None, destination)
        self.unknown()
        self.add(DESTINATION_TABLE, DEFAULT_PRIORITY, {}, goto=FORWARDING_TABLE)
        self.forwarding()
        return self.plan

    def of_tenant(self, tenant: Tenant) -> str:
        """Give the metadata that all VMs of a tenant have."""
        return f"{self.numbers.tenants[tenant.name] << 32:#x}/{TENANT_MASK:#x}"

    def unknown(self) -> None:
        """Table 0, for what is no VM's."""
        config, goto = self.config, FORWARDING_TABLE
        for name in config.uplinks:
            if (in_port := self.port(name)) is not None:
                self.add(VM_TABLE, FROM_UPLINK, {"in_port": in_port}, goto=goto)
        if config.unknown_sources == "drop":
            self.add(VM_TABLE, DEFAULT_PRIORITY, {})
            return
        for identity in self.closed:
            for match in self.matches(identity):
                self.add(VM_TABLE, CLOSED, match)
        number = None
        if config.unknown_rate is not None:
            number = self.numbers.meters[UNKNOWN]
            self.plan.meters[number] = Meter(
                number, config.unknown_rate // 1000, shaping=self.shaping
            )
        self.add(VM_TABLE, DEFAULT_PRIORITY, {}, number or 0, number, goto=goto)

    def matches(self, identity: Identity) -> Iterable[dict[str, int | str]]:
        """Give what matches all that comes from there; nothing if this switch has no such port."""
        if identity.port is not None:
            if identity.port not in self.ports:
                return []
            return [{"in_port": self.ports[identity.port], **_segment(identity)}]
        if identity.mac is not None:
            return [{"eth_src": identity.mac}]
        return _sources([ipaddress.ip_address(ip) for ip in identity.ips], own_only=True)

    def add(
        self,
        table: int,
        priority: int,
        match: dict[str, int | str],
        owner: int = 0,
        meter: int | None = None,
        metadata: int | None = None,
        goto: int | None = None,
        outputs: tuple[int | str, ...] = (),
    ) -> None:
        key = FlowKey(table, priority, tuple(sorted(match.items())))
        cookie = COOKIE_PREFIX << COOKIE_SHIFT | owner
        self.plan.flows[key] = Flow(key, cookie, meter, metadata, goto, outputs)

    def meter(self, limit: Limit) -> int | None:
        number = self.numbers.meters[limit.key]
        meter = meter_for(limit, number, self.rates[limit.key], self.shaping)
        if meter is None:
            return None
        self.plan.meters[number] = meter
        return number

    def port(self, name: str) -> int | None:
        number = self.ports.get(name)
        if number is None:
            self.plan.missing_ports.add(name)
        return number

    def vm(self, tenant: Tenant, vm: Vm) -> bool:
        """Table 0; False if the VM cannot be on this switch."""
        if vm.port is not None:
            in_port = self.port(vm.port)
            if in_port is None:
                return False
            segment = _segment(vm.identity)
            level, checked = BY_SEGMENT if segment else BY_PORT, bool(vm.mac or vm.ips)
            base = {"in_port": in_port, **segment}
            agreeing = {**base, "eth_src": vm.mac} if vm.mac else base
        elif vm.mac is not None:
            level, base, checked = BY_MAC, {"eth_src": vm.mac}, bool(vm.ips)
            agreeing = base
        else:
            level, base, checked, agreeing = BY_IP, {}, False, {}

        number = self.numbers.meters[vm.key]
        meter = self.meter(vm)
        metadata = self.numbers.tenants[tenant.name] << 32 | number

        def accept(priority: int, match: dict[str, int | str]) -> None:
            goto = DESTINATION_TABLE if tenant.total is None else TENANT_TABLE
            self.add(VM_TABLE, priority, match, number, meter, metadata, goto)

        if vm.ips:
            for source in _sources(vm.ips, own_only=level == BY_IP):
                accept(level + AGREES, {**agreeing, **source})
        else:
            accept(level + AGREES if checked else level, agreeing)
        own = _own_ipv6(vm.ips) if checked else []
        if own:
            # These say something of the address inside them, not of the source's.
            for kind in (ROUTER_ADVERTISEMENT, NEIGHBOR_ADVERTISEMENT, REDIRECT):
                self.add(VM_TABLE, level + FORGES, {**agreeing, **_icmpv6(kind)}, number)
            for source, target in itertools.product(own, own):
                says = {"ipv6_src": source, "ipv6_nd_target": target}
                accept(level + ADVERTISES, {**agreeing, **_icmpv6(NEIGHBOR_ADVERTISEMENT), **says})
        if checked:
            # Sent by the VM under a name that is not its own: no rate applies to
            # it, so it must not pass.
            self.add(VM_TABLE, level, base, number)
        if self.config.forwarding.mode == "static":
            # Nothing there looks at VLANs, so a tag would leave by any port.
            froms = list(_sources(vm.ips, own_only=True)) if level == BY_IP else [base]
            for match in froms:
                self.add(VM_TABLE, level + IS_TAGGED, {**match, **TAGGED}, number)
        for destination in vm.destinations.values():
            self.destination(tenant, vm, destination)
        return True

    def destination(self, tenant: Tenant, vm: Vm | None, destination: Destination) -> None:
        """Table 2."""
        network = destination.network
        metadata: int | str = self.of_tenant(tenant)
        if vm is not None:
            metadata = self.numbers.tenants[tenant.name] << 32 | self.numbers.meters[vm.key]
        self.add(
            DESTINATION_TABLE,
            DESTINATION_BASE + 2 * network.prefixlen + (vm is not None),
            {"metadata": metadata, **_ip_match(network, "dst")},
            self.numbers.meters[destination.key],
            self.meter(destination),
            goto=FORWARDING_TABLE,
        )

    def forwarding(self) -> None:
        """Table 3."""
        forwarding = self.config.forwarding
        if forwarding.mode == "normal":
            self.add(FORWARDING_TABLE, DEFAULT_PRIORITY, {}, outputs=(NORMAL,))
            return
        for entry in forwarding.entries:
            port = self.port(entry.port)
            if port is None:
                continue
            if isinstance(entry.to, str):
                self.add(FORWARDING_TABLE, FORWARD_MAC, {"eth_dst": entry.to}, outputs=(port,))
                continue
            length, longest = entry.to.prefixlen, entry.to.max_prefixlen
            priority = FORWARD_HOST if length == longest else FORWARD_PREFIX + length
            self.add(FORWARDING_TABLE, priority, _ip_match(entry.to, "dst"), outputs=(port,))
            if entry.to.version == 4:
                # Who asks for the address is answered by the one that has it.
                match: dict[str, int | str] = {"eth_type": ETH_ARP}
                if entry.to.prefixlen:
                    match["arp_tpa"] = network_text(entry.to)
                self.add(FORWARDING_TABLE, priority, match, outputs=(port,))
        self.add(
            FORWARDING_TABLE,
            FORWARD_MULTICAST,
            {"eth_dst": "01:00:00:00:00:00/01:00:00:00:00:00"},
            outputs=(FLOOD,),
        )
        outputs = (NORMAL,) if forwarding.unknown == "normal" else ()
        self.add(FORWARDING_TABLE, DEFAULT_PRIORITY, {}, outputs=outputs)


def _segment(identity: Identity) -> dict[str, int | str]:
    if identity.vlan is not None:
        return {"vlan_vid": 0x1000 | identity.vlan}
    return {} if identity.vni is None else {"tunnel_id": identity.vni}


def _ip_match(network: Network, side: str) -> dict[str, int | str]:
    version = network.version
    match: dict[str, int | str] = {"eth_type": ETH_IPV4 if version == 4 else ETH_IPV6}
    if network.prefixlen:
        match[f"ipv{version}_{side}"] = network_text(network)
    return match


def _sources(addresses: Iterable[Address], own_only: bool) -> Iterable[dict[str, int | str]]:
    """Give the matches of what a host with these addresses sends.

    Beside its own addresses that is what it sends to get or keep one: DHCP and ARP
    probes from 0.0.0.0, IPv6's from :: and link-local addresses; not so when the
    address is all that the VM is recognized by (`own_only`).  Neighbor Advertisements
    and the like are among these packets, and must be looked at before.
    """
    addresses = list(addresses)
    for address in addresses:
        yield _ip_match(ipaddress.ip_network(address), "src")
        if address.version == 4:
            yield {"eth_type": ETH_ARP, "arp_spa": str(address)}
    if own_only:
        return
    versions = {address.version for address in addresses}
    if 4 in versions:
        yield {"eth_type": ETH_ARP, "arp_spa": "0.0.0.0"}
        yield {
            "eth_type": ETH_IPV4,
            "ipv4_src": "0.0.0.0",
            "ip_proto": IP_UDP,
            "udp_src": 68,
            "udp_dst": 67,
        }
    if 6 in versions:
        yield {"eth_type": ETH_IPV6, "ipv6_src": "::"}
        if LINK_LOCAL in _own_ipv6(addresses):
            yield {"eth_type": ETH_IPV6, "ipv6_src": LINK_LOCAL}


def _own_ipv6(addresses: Iterable[Address]) -> list[str]:
    """Give what a host with these addresses may say that it is in IPv6; none without IPv6.

    Link-local addresses are its own invention, so it may have any, unless the file has
    one for it.
    """
    own = [address for address in addresses if address.version == 6]
    texts = [str(address) for address in own]
    if own and not any(address.is_link_local for address in own):
        texts.append(LINK_LOCAL)
    return texts


def _icmpv6(kind: int) -> dict[str, int | str]:
    return {"eth_type": ETH_IPV6, "ip_proto": IP_ICMPV6, "icmpv6_type": kind}


def diff(plan: Plan, meters: Mapping[int, Meter], flows: Mapping[FlowKey, Flow]) -> list[Change]:
    """Give the changes that turn these meters and flows into the plan's, in order.

    What is right already is not touched.  A meter whose rate differs is modified in
    place.  New things come before their users and old things go after theirs: meters
    are added first, then flows from the last table to the first, then old flows go
    from the first table to the last, and unused meters at the end.
    """
    changes: list[Change] = []
    for number, meter in sorted(plan.meters.items()):
        actual = meters.get(number)
        if actual is None:
            changes.append(MeterMod(ADD, meter))
        elif actual != meter:
            changes.append(MeterMod(MODIFY, meter))
    if any(isinstance(change, MeterMod) and change.command == ADD for change in changes):
        changes.append(Barrier())
    new = [flow for key, flow in plan.flows.items() if flows.get(key) != flow]
    new.sort(key=lambda flow: (-flow.key.table, -flow.key.priority))
    changes += [FlowMod(ADD, flow) for flow in new]
    old = [flow for key, flow in flows.items() if key not in plan.flows]
    old.sort(key=lambda flow: (flow.key.table, flow.key.priority))
    changes += [FlowMod(DELETE, flow) for flow in old]
    gone = [meter for number, meter in sorted(meters.items()) if number not in plan.meters]
    if gone and (new or old):
        changes.append(Barrier())
    changes += [MeterMod(DELETE, meter) for meter in gone]
    return changes


def apply(changes: Iterable[Change], meters: dict[int, Meter], flows: dict[FlowKey, Flow]) -> None:
    """Do to a picture of a switch what the changes do to the switch."""
    for change in changes:
        match change:
            case MeterMod(command, meter):
                if command == DELETE:
                    meters.pop(meter.id, None)
                    for key in [k for k, flow in flows.items() if flow.meter == meter.id]:
                        del flows[key]
                else:
                    meters[meter.id] = meter
            case FlowMod(command, flow):
                if command == DELETE:
                    flows.pop(flow.key, None)
                else:
                    flows[flow.key] = flow
