"""Desired meters and flows, differences, and one switch's re-sync, in simulation."""

from __future__ import annotations

import copy
import ipaddress
import random
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller_pipeline import FakeSwitch, Packet, Result, send
from fbrates import config, ids, plan, sync
from fbrates.plan import ADD, DELETE, MODIFY, Flow, FlowKey, FlowMod, Meter, MeterMod, Numbers
from fbrates.service import Service

PORTS = {"vm-a": 1, "vm-b": 2, "up": 3}

FILE = """
unknown_sources: forward
tenants:
  red:
    destinations: [{to: 10.2.0.0/16, rate: 70Mbps}, {to: 10.1.0.0/16, rate: 80Mbps}]
    vms:
      a:
        port: vm-a
        rate: 300Mbps
        destinations:
          - {to: 10.0.0.9, rate: 50Mbps}
          - {to: 10.0.0.0/8, rate: 200Mbps}
          - {to: 10.1.0.0/16, rate: 100Mbps}
          - {to: "2001:db8::/32", rate: 60Mbps}
      m: {mac: 02:00:00:00:00:0a, rate: 10Mbps}
  blue:
    vms:
      b: {port: vm-b, mac: 02:00:00:00:00:0b, ip: [10.0.0.2, "fd00::2"], rate: 100Mbps}
      i: {ip: 10.0.0.3, rate: 20Mbps}
"""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    """A controller and a switch without wires."""

    def __init__(self, text: str = FILE, ports: dict[str, int] | None = None) -> None:
        self.text = text
        self.clock = Clock()
        self.service = Service(
            lambda: config.parse(self.text), threading.Event, self.clock, self.clock
        )
        self.switch = FakeSwitch(PORTS if ports is None else ports)

    def up(self) -> World:
        self.switch.connect(self.service)
        self.switch.run()
        assert self.in_sync
        return self

    @property
    def in_sync(self) -> bool:
        return bool(self.service.status_view()["in_sync"])

    def meter(self, key: str) -> int:
        return self.service.numbers.meters[key]

    def owners(self, packet: Packet) -> list[str]:
        """Say whose meters a packet passes, one after the other."""
        result = send(self.switch.flows, packet)
        return [self.service.numbers.owners[number] for number in result.meters]

    def limit(self, key: str) -> Any:
        return next(item for item in self.service.config.limits() if item.key == key)

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds * 2)):
            self.clock.now += 0.5
            self.service.tick()
            self.switch.run()


def packet(port: int = 9, src: str = "10.0.0.77", dst: str = "10.0.0.88", **more: Any) -> Packet:
    version = ipaddress.ip_address(src).version
    return {
        "in_port": port,
        "eth_src": "02:00:00:00:00:77",
        "eth_dst": "02:00:00:00:00:88",
        "eth_type": 0x0800 if version == 4 else 0x86DD,
        f"ipv{version}_src": src,
        f"ipv{version}_dst": dst,
        "ip_proto": 6,
        **more,
    }


def arp(port: int, spa: str, tpa: str = "10.0.0.88", **more: Any) -> Packet:
    return {
        "in_port": port,
        "eth_src": "02:00:00:00:00:77",
        "eth_dst": "ff:ff:ff:ff:ff:ff",
        "eth_type": 0x0806,
        "arp_spa": spa,
        "arp_tpa": tpa,
        **more,
    }


# Which packets pass which meters.


def test_a_vm_known_by_its_port() -> None:
    world = World().up()
    assert world.owners(packet(1, dst="192.0.2.1")) == ["red/a"]
    assert world.owners(arp(1, "1.2.3.4")) == ["red/a"]
    assert world.owners({"in_port": 1, "eth_type": 0x88CC}) == ["red/a"]


@pytest.mark.parametrize(
    ("dst", "key"),
    [
        ("10.0.0.9", "red/a->10.0.0.9"),
        ("10.0.0.8", "red/a->10.0.0.0/8"),
        ("10.2.0.9", "red->10.2.0.0/16"),  # longer than the VM's own 10/8
        ("10.1.0.9", "red/a->10.1.0.0/16"),  # as long as the tenant's: the VM's own
    ],
)
def test_the_longest_prefix_decides(dst: str, key: str) -> None:
    world = World().up()
    assert world.owners(packet(1, dst=dst)) == ["red/a", key]


def test_ipv6_destinations() -> None:
    world = World().up()
    assert world.owners(packet(1, "fd00::1", "2001:db8::5")) == ["red/a", "red/a->2001:db8::/32"]
    assert world.owners(packet(1, "fd00::1", "2001:db9::5")) == ["red/a"]


def test_tenants_share_their_destinations_and_not_with_others() -> None:
    world = World().up()
    mac = {"eth_src": "02:00:00:00:00:0a"}
    assert world.owners(packet(3, dst="10.2.0.1", **mac)) == ["red/m", "red->10.2.0.0/16"]
    assert world.owners(packet(3, dst="10.0.0.9", **mac)) == ["red/m"]
    assert world.owners(packet(3, "10.0.0.3", "10.2.0.1")) == ["blue/i"]


def test_a_tenant_with_a_rate_of_its_own() -> None:
    text = FILE.replace("  blue:\n", "  blue:\n    rate: 150Mbps\n    burst: 120kbit\n")
    text = text.replace("  red:\n", "  red:\n    rate: unlimited\n")
    world = World(text).up()
    good = {"eth_src": "02:00:00:00:00:0b"}
    assert world.owners(packet(2, "10.0.0.2", **good)) == ["blue/b", "blue"]
    assert world.owners(packet(3, "10.0.0.3", "10.2.0.1")) == ["blue/i", "blue"]
    assert world.switch.meters[world.meter("blue")] == Meter(world.meter("blue"), 150_000, 120)
    assert world.owners(packet(1, dst="10.0.0.9")) == ["red/a", "red/a->10.0.0.9"]
    world.service.set_rate(world.limit("red"), 200_000_000)
    world.switch.run()
    assert world.owners(packet(1, dst="10.0.0.9")) == ["red/a", "red", "red/a->10.0.0.9"]
    assert world.owners(packet(1, dst="10.2.0.9")) == ["red/a", "red", "red->10.2.0.0/16"]
    assert world.in_sync


def test_what_contradicts_a_port_is_dropped() -> None:
    world = World().up()
    flows = world.switch.flows
    good = {"eth_src": "02:00:00:00:00:0b"}
    assert world.owners(packet(2, "10.0.0.2", **good)) == ["blue/b"]
    assert world.owners(packet(2, "fd00::2", "fd00::9", **good)) == ["blue/b"]
    assert world.owners(arp(2, "10.0.0.2", **good)) == ["blue/b"]
    advertises = {"ip_proto": 58, "icmpv6_type": 136, **good}
    for src in ("fd00::2", "fe80::1"):
        for target in ("fd00::2", "fe80::1"):
            sent = packet(2, src, "fd00::9", ipv6_nd_target=target, **advertises)
            assert world.owners(sent) == ["blue/b"]
    # What a host sends to get its addresses.
    assert world.owners(arp(2, "0.0.0.0", **good)) == ["blue/b"]
    dhcp = {"ip_proto": 17, "udp_src": 68, "udp_dst": 67}
    assert world.owners(packet(2, "0.0.0.0", "255.255.255.255", **good, **dhcp)) == ["blue/b"]
    assert world.owners(packet(2, "fe80::1", "ff02::2", **good)) == ["blue/b"]
    for bad in (
        packet(2, "10.0.0.2"),
        packet(2, "10.0.0.99", **good),
        packet(2, "10.0.0.3", **good),
        packet(2, "fd00::3", "fd00::9", **good),
        packet(2, "0.0.0.0", **good),
        arp(2, "10.0.0.3", **good),
        arp(2, "10.0.0.2"),
        packet(2, "fd00::2", "fd00::9", ipv6_nd_target="fd00::3", **advertises),
        packet(2, "fe80::1", "fd00::9", ipv6_nd_target="fd00::3", **advertises),
        packet(2, "fd00::3", "fd00::9", ipv6_nd_target="fd00::2", **advertises),
        {"in_port": 2, "eth_type": 0x88CC, **good},
    ):
        result = send(flows, bad)
        assert (result.meters, result.outputs, result.tables) == ([], [], [0]), bad


def icmpv6(port: int, kind: int, src: str, target: str | None = None, **more: Any) -> Packet:
    inside = {"ip_proto": 58, "icmpv6_type": kind, "ipv6_nd_target": target}
    return packet(port, src, "ff02::1", **inside, **more)


@pytest.mark.parametrize("port", [2, 9])  # of a VM known by its port, or by its MAC address
def test_a_vm_with_an_ipv6_address_speaks_for_itself_only(port: int) -> None:
    text = FILE if port == 2 else FILE.replace("port: vm-b, mac", "mac")
    world = World(text).up()
    mac = {"eth_src": "02:00:00:00:00:0b"}
    for src in ("fd00::2", "fe80::b"):
        for target in ("fd00::2", "fe80::b"):
            own = icmpv6(port, plan.NEIGHBOR_ADVERTISEMENT, src, target, **mac)
            assert world.owners(own) == ["blue/b"]
            assert send(world.switch.flows, own).outputs == ["NORMAL"]
        # What it asks for: routers, neighbors, an echo.
        assert world.owners(icmpv6(port, 133, src, **mac)) == ["blue/b"]
        assert world.owners(icmpv6(port, 135, src, "fd00::9", **mac)) == ["blue/b"]
        assert world.owners(icmpv6(port, 128, src, **mac)) == ["blue/b"]
    # Duplicate address detection.
    assert world.owners(icmpv6(port, 135, "::", "fd00::2", **mac)) == ["blue/b"]
    bad = [
        icmpv6(port, plan.NEIGHBOR_ADVERTISEMENT, "::", "fd00::2", **mac),
        icmpv6(port, plan.NEIGHBOR_ADVERTISEMENT, "fd00::9", "fd00::2", **mac),
    ]
    for src in ("fd00::2", "fe80::b", "::"):
        bad += [
            icmpv6(port, plan.NEIGHBOR_ADVERTISEMENT, src, "fd00::9", **mac),
            icmpv6(port, plan.ROUTER_ADVERTISEMENT, src, **mac),
            icmpv6(port, plan.REDIRECT, src, **mac),
        ]
    for item in bad:
        result = send(world.switch.flows, item)
        assert (result.meters, result.outputs, result.tables) == ([], [], [0]), item


def test_a_link_local_address_of_the_file_is_the_only_one() -> None:
    world = World(FILE.replace('"fd00::2"]', '"fd00::2", "fe80::b"]')).up()
    mac = {"eth_src": "02:00:00:00:00:0b"}
    kind = plan.NEIGHBOR_ADVERTISEMENT
    assert world.owners(packet(2, "fe80::b", "ff02::2", **mac)) == ["blue/b"]
    assert world.owners(icmpv6(2, kind, "fd00::2", "fe80::b", **mac)) == ["blue/b"]
    for bad in (
        packet(2, "fe80::1", "ff02::2", **mac),
        icmpv6(2, kind, "fe80::b", "fe80::1", **mac),
        icmpv6(2, kind, "fe80::1", "fe80::b", **mac),
    ):
        result = send(world.switch.flows, bad)
        assert (result.meters, result.outputs, result.tables) == ([], [], [0]), bad


def test_a_vm_without_addresses_may_be_a_router() -> None:
    world = World().up()
    for kind in (plan.ROUTER_ADVERTISEMENT, plan.REDIRECT):
        assert world.owners(icmpv6(1, kind, "fe80::1")) == ["red/a"]
    neighbor = icmpv6(1, plan.NEIGHBOR_ADVERTISEMENT, "fe80::1", "fd00::9")
    assert world.owners(neighbor) == ["red/a"]


def test_a_port_says_more_than_an_address() -> None:
    world = World().up()
    away = "192.0.2.1"
    assert world.owners(packet(1, "10.0.0.3", away)) == ["red/a"]
    assert world.owners(packet(1, dst=away, eth_src="02:00:00:00:00:0a")) == ["red/a"]
    assert world.owners(packet(3, "10.0.0.3", eth_src="02:00:00:00:00:0a")) == ["red/m"]


@pytest.mark.parametrize(("word", "outputs"), [("forward", ["NORMAL"]), ("drop", [])])
def test_unknown_sources(word: str, outputs: list[str]) -> None:
    world = World(FILE.replace("forward", word)).up()
    result = send(world.switch.flows, packet(3))
    assert (result.meters, result.outputs) == ([], outputs)


def test_an_unlimited_destination_exempts_from_a_wider_one() -> None:
    text = FILE.replace("{to: 10.0.0.9, rate: 50Mbps}", "{to: 10.0.0.9, rate: unlimited}")
    world = World(text).up()
    assert world.owners(packet(1, dst="10.0.0.9")) == ["red/a"]
    assert world.owners(packet(1, dst="10.0.0.8")) == ["red/a", "red/a->10.0.0.0/8"]


STATIC = (
    """
forwarding:
  entries: [{to: 02:00:00:00:00:fe, port: up}, {to: 0.0.0.0/0, port: up}, {to: 10.7.0.1, port: no}]
"""
    + FILE
)


def test_static_forwarding() -> None:
    world = World(STATIC).up()
    flows = world.switch.flows

    def out(packet: Packet) -> list[int | str]:
        return send(flows, packet).outputs

    assert out(packet(1, dst="192.0.2.1")) == [3]
    assert out(packet(1, dst="10.0.0.2")) == [2]  # blue/b says so itself
    assert out(packet(1, eth_dst="02:00:00:00:00:0b", dst="192.0.2.1")) == [2]
    assert out(arp(1, "10.0.0.1", "10.0.0.2")) == [2]
    assert out(arp(1, "10.0.0.1", "10.0.0.44")) == ["FLOOD"]
    assert out(packet(1, dst="255.255.255.255", eth_dst="ff:ff:ff:ff:ff:ff")) == ["FLOOD"]
    assert out(packet(1, "fd00::1", "fd00::5")) == []
    assert world.switch.sync is not None
    assert world.switch.sync.status()["missing_ports"] == ["no"]


def test_static_forwarding_takes_no_tags_from_vms() -> None:
    agrees = {"eth_src": "02:00:00:00:00:0b"}
    frames = [
        packet(1, dst="192.0.2.1"),
        {"in_port": 1, "eth_type": 0x88CC, "eth_dst": "02:00:00:00:00:fe"},
        packet(2, "10.0.0.2", "192.0.2.1", **agrees),
        icmpv6(2, 136, "fd00::2", "fd00::2", eth_dst="33:33:00:00:00:01", **agrees),
        packet(9, dst="192.0.2.1", eth_src="02:00:00:00:00:0a"),
        packet(9, "10.0.0.3", "192.0.2.1"),
        arp(9, "10.0.0.3"),
    ]
    static, normal = World(STATIC).up(), World().up()
    for frame in frames:
        assert send(static.switch.flows, frame).outputs
        for vid in (0, 5, 4095):  # 0 has a priority only, but is a tag
            tagged = {**frame, "vlan_vid": 0x1000 | vid}
            result = send(static.switch.flows, tagged)
            assert (result.meters, result.outputs, result.tables) == ([], [], [0]), tagged
            # There it is the switch's business: tag and trunks of the Port.
            assert send(normal.switch.flows, tagged).outputs == ["NORMAL"]
    assert send(static.switch.flows, packet(3, dst="192.0.2.1", vlan_vid=0x1005)).outputs == [3]


# Numbers.


@given(st.sets(st.text(min_size=1, max_size=8), max_size=60), st.integers(0, 5), st.randoms())
def test_numbers_depend_on_names_only(names: set[str], spare: int, rng: random.Random) -> None:
    first, last = 7, 7 + len(names) + spare - 1
    shuffled = list(names)
    rng.shuffle(shuffled)
    numbers = ids.allocate(names, first, last)
    assert numbers == ids.allocate(shuffled, first, last)
    assert len(set(numbers.values())) == len(names)
    assert all(first <= number <= last for number in numbers.values())


def test_numbers_stay_when_others_come() -> None:
    names = [f"t/{i}" for i in range(1000)]
    before = ids.allocate(names, 1, 65535)
    after = ids.allocate([*names, "t/new"], 1, 65535)
    assert sum(before[name] != after[name] for name in names) <= 1
    with pytest.raises(ValueError, match="1000 names for 10 numbers"):
        ids.allocate(names, 1, 10)


# Whatever the file and the switch.

_names = st.sampled_from("abcdef")
_rates = st.sampled_from(["1kbps", "5Mbps", "40Gbps", "unlimited"])
_networks = st.sampled_from(
    ["10.0.0.0/8", "10.1.0.0/16", "10.1.2.0/24", "10.1.2.3", "0.0.0.0/0"]
    + ["fd00::/8", "fd00:1::/32", "fd00:1::7", "::/0"]
)


@st.composite
def configs(draw: st.DrawFn) -> str:
    """Write a file: each VM has a port, address or MAC address of its own."""
    import yaml

    def destinations() -> list[dict[str, str]]:
        chosen = draw(st.lists(_networks, unique=True, max_size=4))
        return [{"to": item, "rate": draw(_rates)} for item in chosen]

    tenants: dict[str, Any] = {}
    count = 0
    for tenant in draw(st.lists(_names, unique=True, max_size=3)):
        vms: dict[str, Any] = {}
        for vm in draw(st.lists(_names, unique=True, max_size=4)):
            count += 1
            parts = draw(st.sets(st.sampled_from(["port", "mac", "ip"]), min_size=1))
            body: dict[str, Any] = {"rate": draw(_rates), "destinations": destinations()}
            if "port" in parts:
                body["port"] = f"p{count}"
            if "mac" in parts:
                body["mac"] = f"02:00:00:00:01:{count:02x}"
            if "ip" in parts:
                body["ip"] = draw(
                    st.sampled_from(
                        [[f"10.9.0.{count}"], [f"fd99::{count}"]]
                        + [[f"10.9.0.{count}", f"fd99::{count}"]]
                    )
                )
            vms[vm] = body
        tenants[tenant] = {"vms": vms, "destinations": destinations()}
        if draw(st.booleans()):
            tenants[tenant]["rate"] = draw(_rates)
    forwarding: Any = draw(st.sampled_from(["normal", "static"]))
    unknown = draw(st.sampled_from(["forward", "drop"]))
    return yaml.safe_dump(
        {"tenants": tenants, "unknown_sources": unknown, "forwarding": forwarding}
    )


ALL_PORTS = {f"p{i}": 100 + i for i in range(1, 13)}


def vm_packet(vm: config.Vm, dst: str) -> Packet | None:
    """Give a packet that the VM may send, or None if it has no address of that kind."""
    version = ipaddress.ip_address(dst).version
    src = "10.200.0.1" if version == 4 else "fd88::1"
    if vm.ips:
        own = [str(address) for address in vm.ips if address.version == version]
        if not own:
            return None
        src = own[0]
    result = packet(ALL_PORTS[vm.port] if vm.port else 9, src, dst)
    if vm.mac:
        result["eth_src"] = vm.mac
    return result


def expected(service: Service, vm: config.Vm, dst: str) -> list[str]:
    """Say in the plainest way which limits a packet of the VM is under."""
    address = ipaddress.ip_address(dst)
    tenant = service.config.tenants[vm.tenant]
    found = [(d.network.prefixlen, 1, d) for d in vm.destinations.values() if address in d.network]
    found += [
        (d.network.prefixlen, 0, d) for d in tenant.destinations.values() if address in d.network
    ]
    chain: list[config.Limit] = [vm] if tenant.total is None else [vm, tenant.total]
    if found:
        chain.append(max(found, key=lambda item: item[:2])[2])
    return [limit.key for limit in chain if service.rates[limit.key] is not None]


@settings(max_examples=150, deadline=None)
@given(configs())
def test_every_packet_of_a_vm_passes_its_meters(text: str) -> None:
    world = World(text, ALL_PORTS).up()
    targets = ["10.1.2.3", "10.1.2.4", "10.1.9.9", "10.8.8.8", "192.0.2.1"]
    targets += ["fd00:1::7", "fd00:1::8", "fd00:2::1", "2001:db8::1"]
    for tenant in world.service.config.tenants.values():
        for vm in tenant.vms.values():
            for dst in targets:
                sent = vm_packet(vm, dst)
                if sent is not None:
                    assert world.owners(sent) == expected(world.service, vm, dst)
    for dst in targets:
        src = "10.99.0.1" if "." in dst else "fd77::1"
        assert world.owners(packet(9, src, dst)) == []


@settings(max_examples=100, deadline=None)
@given(configs(), configs(), st.data())
def test_a_reload_leaves_nothing_and_a_second_one_does_nothing(
    one: str, two: str, data: st.DataObject
) -> None:
    world = World(one, ALL_PORTS).up()
    world.switch.changes()
    world.text = two
    world.service.reload(force=True)
    # But for what is closed until that is meant to be unlimited.
    for identity in list(world.service.closed):
        world.service.release(identity)
    world.switch.run()
    fresh = World(two, ALL_PORTS).up()
    assert world.in_sync
    assert world.switch.meters == fresh.switch.meters
    assert world.switch.flows == fresh.switch.flows
    assert not world.switch.sync or not world.switch.sync.errors
    world.switch.changes()
    world.service.reload()
    world.switch.run()
    assert world.switch.changes() == []
    # Nor does a re-sync, with some of it lost, touch what is right.
    lost = data.draw(
        st.sets(st.sampled_from(sorted(world.switch.meters)), max_size=2)
        if world.switch.meters
        else st.just(set())
    )
    plan.apply(
        [MeterMod(DELETE, world.switch.meters[number]) for number in lost],
        world.switch.meters,
        world.switch.flows,
    )
    kept = (dict(world.switch.meters), dict(world.switch.flows))
    world.switch.connect(world.service)
    world.switch.run()
    for change in world.switch.changes():
        match change:
            case MeterMod(command, meter):
                assert command == ADD and meter.id not in kept[0]
            case FlowMod(command, flow):
                assert command == ADD and flow.key not in kept[1]
    assert world.switch.flows == fresh.switch.flows
    assert world.switch.meters == fresh.switch.meters


@settings(max_examples=60, deadline=None)
@given(configs(), st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5000)), max_size=8))
def test_a_rate_change_is_one_message(text: str, changes: list[tuple[int, int]]) -> None:
    world = World(text, ALL_PORTS).up()
    limited = [item for item in world.service.config.limits() if item.rate is not None]
    for index, mbps in changes if limited else []:
        limit = limited[index % len(limited)]
        number = world.meter(limit.key)
        if number not in world.switch.meters:
            continue  # a tenant's destination, and the tenant has no VM
        same = world.service.rates[limit.key] == mbps * 1_000_000
        flows = copy.copy(world.switch.flows)
        world.switch.changes()
        change = world.service.set_rate(limit, mbps * 1_000_000)
        world.switch.run()
        wanted = [] if same else [MeterMod(MODIFY, Meter(number, mbps * 1000, limit.burst))]
        assert world.switch.changes() == wanted
        assert world.switch.flows == flows
        assert [waiter.applied for waiter in change.waiters.values()] == [True]
    # And it is still so after a re-sync.
    meters = dict(world.switch.meters)
    world.switch.connect(world.service)
    world.switch.run()
    assert world.switch.changes() == []
    assert world.switch.meters == meters


def test_while_it_changes_no_packet_escapes_its_meter() -> None:
    """At every step of a reload, packets of VMs that stay pass their VM's meter."""
    world = World().up()
    world.text = FILE.replace("{to: 10.0.0.9, rate: 50Mbps}", "{to: 10.0.0.8, rate: 5Mbps}")
    world.text = world.text.replace("m: {mac", "n: {port: up, rate: 1Mbps}\n      m: {mac")
    steps = []

    def observe() -> None:
        steps.append(world.owners(packet(1, dst="10.0.0.7")))
        result: Result = send(world.switch.flows, packet(1, dst="10.0.0.9"))
        assert result.outputs == ["NORMAL"]

    world.switch.observe = observe
    world.service.reload()
    world.switch.run()
    assert len(steps) > 5
    assert all(step == ["red/a", "red/a->10.0.0.0/8"] for step in steps)


# One switch's life.


def test_foreign_things_are_left_alone() -> None:
    world = World("meters: {first: 100, last: 999}\n" + FILE)
    foreign_flow = Flow(FlowKey(0, 0, ()), 0x77, outputs=("NORMAL",))
    foreign_meter = Meter(5, 1)
    world.switch.flows[foreign_flow.key] = foreign_flow
    world.switch.meters[5] = foreign_meter
    world.up()
    assert world.switch.flows[foreign_flow.key] == foreign_flow
    assert world.switch.meters[5] == foreign_meter
    world.text = "meters: {first: 100, last: 999}\ntenants: {}"
    world.service.reload(force=True)
    world.switch.run()
    assert world.switch.flows[foreign_flow.key] == foreign_flow
    assert world.switch.meters == {5: foreign_meter}


def test_leftovers_of_ours_go() -> None:
    world = World()
    old_cookie = plan.COOKIE_PREFIX << plan.COOKIE_SHIFT | 4711
    key = FlowKey(0, 300, (("in_port", 99),))
    world.switch.meters[4711] = Meter(4711, 5)
    world.switch.flows[key] = Flow(key, old_cookie, meter=4711, goto=1)
    world.up()
    assert 4711 not in world.switch.meters
    assert key not in world.switch.flows


def test_a_port_that_comes_moves_and_goes() -> None:
    world = World(ports={"up": 3}).up()
    assert world.switch.sync is not None
    connection = world.switch.sync
    assert connection.status()["missing_ports"] == ["vm-a", "vm-b"]
    assert world.meter("red/a") not in world.switch.meters
    connection.port_changed("vm-a", 7, deleted=False)
    world.switch.run()
    assert world.owners(packet(7)) == ["red/a", "red/a->10.0.0.0/8"]
    world.switch.changes()
    connection.port_changed("vm-a", 7, deleted=False)  # its link went down, say
    world.switch.run()
    assert world.switch.changes() == []
    connection.port_changed("vm-a", 8, deleted=False)
    world.switch.run()
    assert world.owners(packet(8)) == ["red/a", "red/a->10.0.0.0/8"]
    assert world.owners(packet(7)) == []
    assert not any(isinstance(c, MeterMod) for c in world.switch.changes())
    connection.port_changed("vm-a", 8, deleted=True)
    world.switch.run()
    assert world.owners(packet(8)) == []
    assert world.meter("red/a") not in world.switch.meters
    assert world.in_sync


def test_a_link_that_flaps_costs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World().up()
    connection = world.switch.sync
    assert connection is not None
    build, built = plan.build, []

    def counted(*arguments: Any) -> plan.Plan:
        built.append(arguments)
        return build(*arguments)

    monkeypatch.setattr(plan, "build", counted)
    world.switch.sent.clear()
    for _ in range(1000):
        connection.port_changed("vm-a", 1, deleted=False)
        connection.port_changed("never-seen", 77, deleted=True)
    assert (built, world.switch.sent) == ([], [])
    connection.port_changed("vm-a", 7, deleted=False)
    assert len(built) == 1


@pytest.mark.parametrize("answer", ["older", "newer"])
def test_ports_that_change_while_they_are_asked_for(answer: str) -> None:
    world = World(ports={"vm-a": 1, "vm-b": 2})
    connection = world.switch.connect(world.service)
    for _ in range(1000):
        connection.port_changed("vm-a", 1, deleted=False)
    connection.port_changed("vm-b", 2, deleted=True)
    connection.port_changed("up", 2, deleted=False)
    if answer == "newer":
        world.switch.ports = {"vm-a": 1, "up": 2}
    world.switch.run()
    assert connection.ports == {"vm-a": 1, "up": 2}
    assert world.switch.sent.count(sync.PortsRequest()) == 1
    assert world.in_sync


def test_an_audit_repairs_what_someone_else_did() -> None:
    world = World().up()
    wanted = (dict(world.switch.meters), dict(world.switch.flows))
    number = world.meter("red/a")
    world.switch.meters[number] = Meter(number, 1)
    world.switch.flows.pop(next(iter(world.switch.flows)))
    world.pass_time(world.service.config.resync_interval + 1)
    assert (world.switch.meters, world.switch.flows) == wanted
    assert world.switch.sync is not None
    assert world.switch.sync.repairs == 1
    world.switch.changes()
    world.pass_time(60)
    assert world.switch.changes() == []
    assert world.switch.sync.repairs == 1


def test_an_error_is_told_and_repaired() -> None:
    world = World().up()
    assert world.switch.sync is not None
    number = world.meter("red/a")
    plan.apply(
        [MeterMod(DELETE, world.switch.meters[number])], world.switch.meters, world.switch.flows
    )
    change = world.service.set_rate(world.limit("red/a"), 5_000_000)
    world.switch.run()
    (waiter,) = change.waiters.values()
    assert not waiter.applied
    assert waiter.errors == [f"modify meter {number} of red/a 5Mbps: UNKNOWN_METER"]
    status = world.service.status_view()
    assert not status["in_sync"]
    errors = status["switches"]["0000000000000001"]["errors"]
    assert [(item["about"], item["error"]) for item in errors] == [
        (f"modify meter {number} of red/a 5Mbps", "UNKNOWN_METER")
    ]
    world.pass_time(2)
    assert world.in_sync
    assert world.switch.meters[number].rate_kbps == 5000
    assert world.owners(packet(1, dst="192.0.2.1")) == ["red/a"]


def test_a_switch_without_room_is_not_in_sync_and_not_hammered() -> None:
    world = World()
    world.switch.max_meters = 2
    world.switch.connect(world.service)
    world.switch.run()
    assert not world.in_sync
    once = len(world.switch.changes())
    world.pass_time(600)
    # Four times in the first 18 s, and then every 30 s.
    assert len(world.switch.changes()) < once * (4 + 600 // 30 + 1)
    world.switch.max_meters = 100
    world.pass_time(40)
    assert world.in_sync


def test_silence_is_noticed() -> None:
    world = World()
    world.switch.connect(world.service)
    world.switch.queue.clear()  # the ports request is lost
    world.pass_time(sync.REPLY_TIMEOUT + 1)
    assert world.in_sync
    assert world.switch.sync is not None
    world.switch.sync.start_audit()
    world.switch.queue.clear()
    world.pass_time(sync.REPLY_TIMEOUT + 1)
    change = world.service.set_rate(world.limit("red/a"), 5_000_000)
    world.switch.queue.pop()  # the barrier is lost
    world.pass_time(sync.REPLY_TIMEOUT + 1)
    assert [waiter.applied for waiter in change.waiters.values()] == [True]


@pytest.mark.parametrize("steps", range(12))
def test_a_rate_set_at_any_moment_of_a_connection_is_in_force(steps: int) -> None:
    world = World()
    world.switch.connect(world.service)
    world.switch.run(limit=steps)
    change = world.service.set_rate(world.limit("red/a"), 7_000_000)
    world.switch.run()
    assert [waiter.applied for waiter in change.waiters.values()] == [True]
    assert world.switch.meters[world.meter("red/a")].rate_kbps == 7000
    assert world.in_sync
    assert world.switch.sync is not None and not world.switch.sync.errors


@pytest.mark.parametrize("steps", range(4))
def test_a_rate_set_during_an_audit_is_not_taken_for_a_difference(steps: int) -> None:
    world = World().up()
    assert world.switch.sync is not None
    world.switch.changes()
    world.switch.sync.start_audit()
    world.switch.run(limit=steps)
    world.service.set_rate(world.limit("red/a"), 7_000_000)
    world.switch.run()
    meter = Meter(world.meter("red/a"), 7000)
    assert world.switch.changes() == [MeterMod(MODIFY, meter)]
    assert world.switch.meters[meter.id] == meter
    assert world.switch.sync.repairs == 0
    assert world.in_sync


def test_to_unlimited_and_back() -> None:
    world = World().up()
    change = world.service.set_rate(world.limit("red/a"), None)
    world.switch.run()
    assert [waiter.applied for waiter in change.waiters.values()] == [True]
    assert world.owners(packet(1, dst="10.0.0.9")) == ["red/a->10.0.0.9"]
    assert world.meter("red/a") not in world.switch.meters
    change = world.service.set_rate(world.limit("red/a"), 9_000_000)
    world.switch.run()
    assert [waiter.applied for waiter in change.waiters.values()] == [True]
    assert world.owners(packet(1, dst="10.0.0.9")) == ["red/a", "red/a->10.0.0.9"]


def test_a_disconnection_wakes_those_who_wait() -> None:
    world = World().up()
    change = world.service.set_rate(world.limit("red/a"), 7_000_000)
    assert world.switch.sync is not None
    world.service.disconnect(world.switch.sync)
    (waiter,) = change.waiters.values()
    assert waiter.event.wait(0)
    assert (waiter.applied, waiter.errors) == (False, ["the switch disconnected"])
    world.up()
    assert world.switch.meters[world.meter("red/a")].rate_kbps == 7000


def test_a_refused_reload_changes_nothing() -> None:
    world = World().up()
    world.service.set_rate(world.limit("red/a"), 7_000_000)
    world.switch.run()
    before = (world.service.config, dict(world.service.rates))
    world.switch.changes()
    world.text = "tenants: ["
    with pytest.raises(config.InvalidConfig):
        world.service.reload()
    assert (world.service.config, world.service.rates) == before
    assert world.switch.changes() == []
    assert "not YAML" in world.service.status_view()["last_reload_error"]
    world.text = FILE
    assert world.service.reload()["live_changes_dropped"] == 0
    world.text = FILE.replace("rate: 300Mbps", "rate: 301Mbps")
    assert world.service.reload()["live_changes_dropped"] == 1
    world.switch.run()
    assert world.switch.meters[world.meter("red/a")].rate_kbps == 301_000


def test_switches_that_the_file_is_not_about() -> None:
    world = World("switches: [0x2]\n" + FILE)
    assert world.service.connect(1, world.switch.send) is None
    assert world.switch.sent == []
    world.switch.connect(world.service, 2)
    world.switch.run()
    assert world.in_sync


def test_numbers_of_ten_thousand_vms_plan_quickly() -> None:
    import time

    vms = "\n".join(f"      v{i}: {{port: p{i}, rate: 1Mbps}}" for i in range(10_000))
    parsed = config.parse(f"tenants:\n  t:\n    vms:\n{vms}")
    numbers = Numbers.of(parsed)
    rates = {limit.key: limit.rate for limit in parsed.limits()}
    started = time.process_time()
    built = plan.build(parsed, numbers, rates, {f"p{i}": i + 1 for i in range(10_000)})
    assert len(built.meters) == 10_000
    assert plan.diff(built, built.meters, built.flows) == []
    assert time.process_time() - started < 5
