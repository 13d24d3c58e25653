"""Nothing takes a limit off without a word: each of these did, once."""

from __future__ import annotations

from typing import Any

import pytest

from controller_pipeline import BAD_BAND, FakeSwitch, send
from fbrates import config, plan, sync
from fbrates.config import Identity
from fbrates.loader import InvalidConfig
from fbrates.plan import DELETE, Flow, FlowKey, Meter, MeterMod
from fbrates.service import UnknownName
from test_controller_plan import FILE, World, packet

NAME = "0000000000000001"


def status(world: World) -> Any:
    return world.service.status_view()["switches"][NAME]


# A trial that says nothing about the band.


@pytest.mark.parametrize("refusal", ["OFPET_METER_MOD_FAILED OFPMMFC_OUT_OF_METERS", "EPERM"])
def test_a_trial_that_fails_makes_no_drop_bands(refusal: str) -> None:
    world = World().up()
    world.switch.shapes = True
    world.switch.connect(world.service)
    world.switch.run()
    shaping = dict(world.switch.meters)
    assert all(meter.shaping for meter in shaping.values())
    # The table is full, so that the trial finds no room.
    world.switch.refuse_trial = refusal
    world.switch.connect(world.service)
    world.switch.run()
    world.pass_time(5)
    assert world.switch.meters == shaping
    assert any(refusal in error["error"] for error in status(world)["errors"])
    assert status(world)["band"] == "shape"


def test_a_switch_of_which_nothing_is_known_is_tried_again() -> None:
    world = World()
    world.switch.shapes = True
    world.switch.refuse_trial = "OFPET_METER_MOD_FAILED OFPMMFC_OUT_OF_METERS"
    world.switch.connect(world.service)
    world.switch.run()
    world.pass_time(20)
    assert (world.in_sync, status(world)["band"], world.switch.meters) == (False, None, {})
    assert "OUT_OF_METERS" in status(world)["errors"][0]["error"]
    world.switch.refuse_trial = ""
    world.pass_time(40)
    assert world.in_sync and all(meter.shaping for meter in world.switch.meters.values())


@pytest.mark.parametrize("refusal", sorted(sync.NO_SHAPE_BAND))
def test_what_means_that_there_is_no_shape_band(refusal: str) -> None:
    world = World()
    world.switch.shapes = True
    world.switch.refuse_trial = refusal
    world.switch.connect(world.service)
    world.switch.run()
    assert world.in_sync
    assert (status(world)["band"], status(world)["no_shape_reason"]) == ("drop", refusal)
    assert BAD_BAND in sync.NO_SHAPE_BAND


# Others' meters.


def foreign(world: World, number: int) -> tuple[Meter, Flow]:
    """Somebody's meter, and a flow that uses it."""
    meter = Meter(number, 77)
    key = FlowKey(0, 5, (("in_port", number % 1000),))
    flow = Flow(key, 0x77, meter=number, outputs=("NORMAL",))
    world.switch.meters[number], world.switch.flows[key] = meter, flow
    return meter, flow


@pytest.mark.parametrize("number", [1, 9999, 10000, 12345, 65535])
def test_a_meter_that_is_not_ours_stays(number: int) -> None:
    world = World()
    assert number not in world.service.given()
    meter, flow = foreign(world, number)
    world.up()
    world.pass_time(60)
    assert world.switch.meters[number] == meter
    assert world.switch.flows[flow.key] == flow
    assert status(world)["others_meters"] == ([number] if number >= 10000 else [])


def test_an_id_that_somebody_else_has_is_not_taken() -> None:
    world = World()
    number = world.meter("red/a")
    meter, flow = foreign(world, number)
    world.switch.connect(world.service)
    world.switch.run()
    world.pass_time(60)
    assert world.switch.meters == {number: meter}
    assert world.switch.flows == {flow.key: flow}
    assert not world.in_sync
    assert f"{number} (red/a)" in status(world)["blocked"]
    # Gone there: it goes on by itself.
    plan.apply([MeterMod(DELETE, meter)], world.switch.meters, world.switch.flows)
    world.pass_time(40)
    assert world.in_sync and status(world)["blocked"] is None


def test_adopting_is_an_explicit_act() -> None:
    world = World()
    number = world.meter("red/a")
    foreign(world, number)
    other, _ = foreign(world, 12345)
    world.switch.connect(world.service)
    world.switch.run()
    assert other.id in world.switch.meters
    world.service.adopt(1)
    world.switch.run()
    assert world.in_sync
    assert world.switch.meters[number].rate_kbps == 300_000
    assert other.id not in world.switch.meters


def test_who_comes_later_gets_no_id_of_others() -> None:
    number = plan.Numbers.of(config.parse(FILE.replace("m: {mac", "n: {mac"))).meters["red/n"]
    world = World()
    meter, _ = foreign(world, number)
    world.up()
    world.text = FILE.replace("      m: {mac", "      n: {port: up, rate: 1Mbps}\n      m: {mac")
    world.service.reload()
    world.switch.run()
    assert world.in_sync
    assert world.meter("red/n") != number and world.switch.meters[number] == meter


def test_what_we_gave_is_ours_without_flows() -> None:
    world = World().up()
    world.switch.flows.clear()
    world.switch.connect(world.service)
    world.switch.run()
    assert world.in_sync and status(world)["others_meters"] == []


# Ids.


def colliding() -> tuple[str, str]:
    """Give two names of VMs of red whose hashes want the same id, the earlier one last."""
    spans: dict[int, str] = {}
    for i in range(100_000):
        name = f"v{i}"
        number = plan.ids.allocate([f"red/{name}"], 1, 5)[f"red/{name}"]
        if number in spans:
            pair = [spans[number], name]
            both = plan.ids.allocate([f"red/{n}" for n in pair], 1, 5)
            pair.sort(key=lambda n: both[f"red/{n}"] == number)
            return pair[0], pair[1]
        spans[number] = name
    raise AssertionError


def crowded(*names: str) -> str:
    vms = ", ".join(f"{name}: {{port: p{name}, rate: 1Mbps}}" for name in names)
    return f"meters: {{first: 1, last: 5}}\ntenants: {{red: {{vms: {{{vms}}}}}}}"


def test_who_comes_moves_nobody() -> None:
    loser, winner = colliding()
    world = World(crowded(loser), {f"p{loser}": 1, f"p{winner}": 2}).up()
    number = world.meter(f"red/{loser}")
    world.text = crowded(loser, winner)
    world.service.reload()
    world.switch.run()
    assert world.meter(f"red/{loser}") == number
    assert world.meter(f"red/{winner}") not in (number, world.service.numbers.trial)


def test_a_number_is_given_again_only_when_all_switches_let_go_of_it() -> None:
    vms = ["a", "b"]
    world = World(crowded(*vms), {"pa": 1, "pb": 2, "pc": 3}).up()
    away = FakeSwitch({"pa": 1})
    away.connect(world.service, 2)
    away.run()
    number = world.meter("red/a")
    world.service.disconnect(away.sync)
    world.text = crowded("b", "c")
    world.service.reload()
    world.switch.run()
    world.pass_time(5)
    assert world.service.status_view()["retired_meters"] == {str(number): "red/a"}
    assert world.meter("red/c") != number
    # There are five ids: two VMs, the trial, what is not free yet, and one more.
    world.text = crowded("b", "c", "d", "e")
    with pytest.raises(InvalidConfig, match="not enough meter ids"):
        world.service.reload()
    away.connect(world.service, 2)
    away.run()
    world.service.tick()
    assert world.service.status_view()["retired_meters"] == {}
    world.service.reload()
    world.switch.run()
    assert number in (world.meter("red/d"), world.meter("red/e"))


def test_a_switch_that_is_gone_is_forgotten_by_command_only() -> None:
    world = World().up()
    away = FakeSwitch({})
    away.connect(world.service, 2)
    away.run()
    with pytest.raises(ValueError, match="is connected"):
        world.service.forget(2)
    world.service.disconnect(away.sync)
    world.text = FILE.replace("      m: {mac: 02:00:00:00:00:0a, rate: 10Mbps}\n", "")
    world.service.reload()
    world.switch.run()
    world.pass_time(5)
    assert world.service.retired
    assert not world.in_sync
    world.service.forget(2)
    assert world.service.retired == {}
    assert world.in_sync
    with pytest.raises(UnknownName):
        world.service.forget(2)


def test_who_comes_back_has_its_number_again() -> None:
    world = World().up()
    numbers = dict(world.service.numbers.meters)
    away = FakeSwitch({})
    away.connect(world.service, 2)
    away.run()
    world.service.disconnect(away.sync)
    world.text = FILE.replace("      m: {mac: 02:00:00:00:00:0a, rate: 10Mbps}\n", "")
    world.service.reload()
    world.text = FILE
    world.service.reload()
    assert world.service.numbers.meters == numbers
    assert world.service.retired == {}


# The file.


def test_a_reload_keeps_what_was_set_live() -> None:
    world = World().up()
    world.service.set_rate(world.limit("red/a"), 5_000_000)
    world.service.set_rate(world.limit("blue/b"), 6_000_000)
    world.text = FILE.replace("rate: 100Mbps}\n      i:", "rate: 101Mbps}\n      i:")
    assert world.text != FILE
    result = world.service.reload()
    world.switch.run()
    assert (result["live_changes_kept"], result["live_changes_dropped"]) == (1, 1)
    assert world.switch.meters[world.meter("red/a")].rate_kbps == 5_000
    # What the file has changed is the file's.
    assert world.switch.meters[world.meter("blue/b")].rate_kbps == 101_000


def test_a_file_that_is_cut_off_is_refused() -> None:
    world = World().up()
    before = (dict(world.switch.meters), dict(world.switch.flows))
    world.text = FILE[: FILE.index("      m: {mac")]
    with pytest.raises(InvalidConfig, match="3 of 4 VMs would be removed at once"):
        world.service.reload()
    world.switch.run()
    assert (world.switch.meters, world.switch.flows) == before
    assert world.service.reload(force=True)["removed"] == 3


def test_what_is_removed_is_closed() -> None:
    """Whatever it was known by, and also by a controller that forwards unknown sources."""
    world = World().up()
    frames = {
        "port vm-a": packet(1),
        "mac 02:00:00:00:00:0a": packet(3, eth_src="02:00:00:00:00:0a"),
        "ip 10.0.0.3": packet(3, "10.0.0.3"),
    }
    world.text = "unknown_sources: forward\ntenants: {}"
    world.service.reload(force=True)
    world.switch.run()
    assert set(world.service.status_view()["closed"]) == {*frames, "port vm-b"}
    for frame in frames.values():
        assert send(world.switch.flows, frame).outputs == []
    assert send(world.switch.flows, packet(3)).outputs == ["NORMAL"]
    # Until something is said of it.
    world.text = (
        "unknown_sources: forward\nuplinks: [vm-a]\n"
        "tenants: {red: {vms: {x: {mac: 02:00:00:00:00:0a, rate: 1Mbps}}}}"
    )
    world.service.reload()
    world.service.release(Identity(ips=("10.0.0.3",)))
    world.switch.run()
    assert world.service.status_view()["closed"] == ["port vm-b"]
    for frame in frames.values():
        assert send(world.switch.flows, frame).outputs == ["NORMAL"]


# Unknown sources.


def test_unknown_sources_are_dropped_unless_the_file_says_otherwise() -> None:
    world = World(FILE.replace("unknown_sources: forward\n", "uplinks: [up]\n")).up()
    assert send(world.switch.flows, packet(9)).outputs == []
    assert send(world.switch.flows, packet(3)).outputs == ["NORMAL"]
    policy = world.service.status_view()["unknown_sources"]
    assert policy == {"policy": "drop", "rate": None, "uplinks": ["up"]}


def test_unknown_sources_with_a_rate() -> None:
    world = World(FILE.replace("forward", "{rate: 2Mbps}")).up()
    result = send(world.switch.flows, packet(9))
    (number,) = result.meters
    assert result.outputs == ["NORMAL"]
    assert world.switch.meters[number] == Meter(number, 2000)
    assert world.service.describe(number) == "(unknown sources)"
    assert world.service.status_view()["unknown_sources"]["rate"] == "2Mbps"


def test_what_unknown_sources_sent_is_shown() -> None:
    world = World().up()
    key = plan.UNKNOWN_FLOW
    flow = world.switch.flows[key]
    world.switch.flows[key] = Flow(**{**vars(flow), "packets": 3, "bytes": 300})
    world.pass_time(world.service.config.resync_interval + 1)
    assert status(world)["unknown_sources"] == {"packets": 3, "bytes": 300}
    assert status(world)["repairs"] == 0


# Switches.


def test_a_switch_that_is_listed_and_has_never_come_is_not_in_sync() -> None:
    world = World("switches: [1, 2]\n" + FILE)
    world.switch.connect(world.service)
    world.switch.run()
    view = world.service.status_view()
    assert view["in_sync"] is False
    assert view["switches"]["0000000000000002"]["connected"] is False


def test_a_connection_that_was_replaced_is_silent() -> None:
    world = World().up()
    old, newer = world.switch, FakeSwitch(world.switch.ports)
    connection = old.sync
    assert connection is not None
    connection.start_audit()
    newer.connect(world.service)
    newer.run()
    old.sent.clear()
    old.meters.clear()
    old.run()
    connection.port_changed("vm-a", 7, deleted=False)
    connection.replan()
    connection.tick()
    old.run()
    assert old.sent == []
    assert world.in_sync


def test_an_audit_ends_however_many_flows_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of an answer takes its time, all together more than the time-out."""
    monkeypatch.setattr(sync, "WINDOW_FLOWS", 8, raising=False)
    vms = "\n".join(f"      v{i}: {{port: p{i}, rate: 1Mbps}}" for i in range(100))
    world = World(f"tenants:\n  t:\n    vms:\n{vms}", {f"p{i}": i + 1 for i in range(100)})

    def slow() -> None:
        world.clock.now += sync.REPLY_TIMEOUT / 5
        world.service.tick()

    world.up()
    world.switch.before_part = slow
    assert world.switch.sync is not None
    audits = world.switch.sync.audits
    world.switch.sync.start_audit()
    world.switch.run(limit=500)
    assert world.switch.sync.audits > audits
    windows = {item.windows for item in world.switch.sent if isinstance(item, sync.FlowsRequest)}
    assert windows == {16}


def test_a_window_that_is_lost_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "WINDOW_FLOWS", 1)
    world = World().up()
    assert world.switch.sync is not None
    audits = world.switch.sync.audits
    world.switch.changes()
    world.switch.sync.start_audit()
    world.switch.run(limit=3)
    asked = len(world.switch.sent)
    world.switch.queue.clear()
    world.pass_time(sync.REPLY_TIMEOUT + 1)
    assert world.switch.sync.audits == audits + 1
    again = [item for item in world.switch.sent[asked:] if isinstance(item, sync.FlowsRequest)]
    assert again[0] == world.switch.sent[asked - 1]
    assert world.switch.changes() == []


# Addresses that two tenants have.


OVERLAPPING = """
tenants:
  red: {vms: {a: {port: vm-a, mac: 02:00:00:00:00:01, ip: 10.0.0.1, rate: 1Mbps}}}
  blue: {vms: {b: {port: vm-b, mac: 02:00:00:00:00:01, ip: 10.0.0.1, rate: 2Mbps}}}
"""


def test_ports_tell_vms_with_the_same_addresses_apart() -> None:
    world = World(OVERLAPPING).up()
    same = {"eth_src": "02:00:00:00:00:01"}
    assert world.owners(packet(1, "10.0.0.1", **same)) == ["red/a"]
    assert world.owners(packet(2, "10.0.0.1", **same)) == ["blue/b"]


@pytest.mark.parametrize("key", ["vlan", "vni"])
def test_vlans_and_tunnels_tell_vms_apart(key: str) -> None:
    text = OVERLAPPING.replace("port: vm-a", f"port: up, {key}: 5")
    text = text.replace("port: vm-b", f"port: up, {key}: 6") + "uplinks: [up]\n"
    world = World(text).up()

    def sent(number: int) -> list[str]:
        inside = {"vlan_vid": 0x1000 | number} if key == "vlan" else {"tunnel_id": number}
        return world.owners(packet(3, "10.0.0.1", eth_src="02:00:00:00:00:01", **inside))

    assert (sent(5), sent(6), sent(7)) == (["red/a"], ["blue/b"], [])
    spoofed = packet(3, "10.0.0.9", eth_src="02:00:00:00:00:01")
    spoofed |= {"vlan_vid": 0x1005} if key == "vlan" else {"tunnel_id": 5}
    assert send(world.switch.flows, spoofed).outputs == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("port: vm-b, mac", "mac", "mac is already that of tenants.red.vms.a"),
        ("tenants:", "forwarding: static\ntenants:", "ip is already that of tenants.red.vms.a"),
        ("port: vm-b", "port: vm-a", "port is already that of tenants.red.vms.a"),
        ("port: vm-b", "port: vm-a, vlan: 7", "port is already that of tenants.red.vms.a"),
        ("port: vm-b", "port: vm-b, vlan: 0", "not a VLAN"),
        ("port: vm-b", "port: vm-b, vni: 16777216", "not a VNI"),
        ("port: vm-b", "vlan: 7", "is of no use without a port"),
        ("port: vm-b", "port: vm-b, vlan: 7, vni: 8", "both vlan and vni"),
        ("tenants:", "uplinks: [vm-a]\ntenants:", "is the port of tenants.red.vms.a"),
        ("tenants:", "uplinks: [x, x]\ntenants:", "is already in this list"),
        ("tenants:", "unknown_sources: {rate: 5}\ntenants:", "rate out of range"),
        ("tenants:", "unknown_sources: fast\ntenants:", "not one of the allowed words"),
    ],
)
def test_what_does_not_tell_vms_apart(old: str, new: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        config.parse(OVERLAPPING.replace(old, new))

