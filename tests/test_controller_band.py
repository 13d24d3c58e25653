"""Shape bands: the trial, what switches with and without it get, and Ryu's wire format."""

from __future__ import annotations

import importlib

import pytest

import shape_band
import wire
from controller_pipeline import BAD_BAND
from fbrates import config, plan, sync, units
from fbrates.config import InvalidConfig, Shaping
from fbrates.plan import ADD, DELETE, MODIFY, Meter, MeterMod
from framework import NAME, ofp, parser
from test_controller_plan import FILE, World

ProtocolDesc = importlib.import_module(f"{NAME}.ofproto.ofproto_protocol").ProtocolDesc

SHAPING = "shaping: {max_delay: 20ms, ecn_threshold: 5ms}\n"


def shaping_of(world: World) -> set[Shaping | None]:
    return {meter.shaping for meter in world.switch.meters.values()}


def test_drop_bands_if_the_file_says_so() -> None:
    world = World("shaping: {band: drop}\n" + FILE)
    world.switch.shapes = True
    world.up()
    assert shaping_of(world) == {None}
    status = world.service.status_view()["switches"]["0000000000000001"]
    assert (status["band"], status["no_shape_reason"]) == ("drop", "the file says so")
    world.text = FILE
    world.service.reload()
    world.switch.run()
    assert shaping_of(world) == {Shaping()}
    status = world.service.status_view()["switches"]["0000000000000001"]
    assert (status["band"], status["no_shape_reason"]) == ("shape", None)


# The trial.


def test_a_switch_that_has_it() -> None:
    world = World(SHAPING + FILE)
    world.switch.shapes = True
    world.up()
    assert shaping_of(world) == {Shaping(20_000, 5_000)}
    assert world.switch.meters.keys() == world.service.numbers.owners.keys()
    status = world.service.status_view()["switches"]["0000000000000001"]
    assert (status["band"], status["no_shape_reason"]) == ("shape", None)
    (meters,) = world.service.meters_view().values()
    assert meters[0]["bands"][0]["type"] == "SHAPE"
    assert meters[0]["bands"][0]["max_delay"] == 20_000
    assert meters[0]["bands"][0]["fair"] is False


def test_a_switch_that_does_not(caplog: pytest.LogCaptureFixture) -> None:
    world = World(SHAPING + FILE).up()
    assert shaping_of(world) == {None}
    status = world.service.status_view()["switches"]["0000000000000001"]
    assert (status["band"], status["no_shape_reason"]) == ("drop", BAD_BAND)
    assert status["errors"] == []
    assert f"no shape bands ({BAD_BAND})" in caplog.text
    (meters,) = world.service.meters_view().values()
    assert {band["type"] for meter in meters for band in meter["bands"]} == {"DROP"}


@pytest.mark.parametrize("shapes", [False, True])
def test_the_trial_leaves_nothing_behind(shapes: bool) -> None:
    world = World("meters: {first: 100, last: 200}\n" + FILE)
    world.switch.shapes = shapes
    foreign = {5: Meter(5, 1), 201: Meter(201, 1)}
    world.switch.meters.update(foreign)
    world.up()
    trials = [message for message in world.switch.sent if isinstance(message, sync.Trial)]
    assert [trial.command for trial in trials] == [ADD, DELETE]
    (number,) = {trial.meter.id for trial in trials}
    assert 100 <= number <= 200 and number not in world.service.numbers.owners
    assert world.switch.meters.keys() == {*world.service.numbers.owners, *foreign}


def test_a_trial_interrupted_does_not_spoil_the_next() -> None:
    world = World()
    world.switch.shapes = True
    world.switch.connect(world.service)
    world.switch.run(limit=5)  # bands, ports, meters, flows; added, and not deleted
    left = dict(world.switch.meters)
    assert len(left) == 1
    world.up()
    assert world.switch.sync is not None and world.switch.sync.shapes
    assert not left.keys() & world.switch.meters.keys()


def test_reconnecting_changes_no_shape_band() -> None:
    """The switch shows shape bands as drop bands until it is told that we know them."""
    world = World(SHAPING + FILE)
    world.switch.shapes = True
    world.up()
    world.switch.connect(world.service)
    assert world.switch.sent[0] == sync.ReadsShapeBands()
    world.switch.run()
    assert world.in_sync
    assert world.switch.changes() == []
    assert shaping_of(world) == {Shaping(20_000, 5_000)}


def test_no_id_left_for_a_trial() -> None:
    count = len(plan.Numbers.of(config.parse(FILE)).owners)
    with pytest.raises(InvalidConfig, match=f"{count} meter ids are not enough"):
        config.parse(f"meters: {{first: 1, last: {count}}}\n" + FILE)
    config.parse(f"meters: {{first: 1, last: {count + 1}}}\n" + FILE)


@pytest.mark.parametrize("lost", ["all", "trial", "barrier"])
def test_silence_about_the_trial_is_noticed(lost: str) -> None:
    world = World()
    world.switch.shapes = True
    world.switch.connect(world.service)
    if lost != "all":
        world.switch.run(limit=4)
        assert isinstance(world.switch.queue[0][1], sync.Trial)
    dropped = {"all": range(10), "trial": range(3), "barrier": [2]}[lost]
    world.switch.queue = [m for i, m in enumerate(world.switch.queue) if i not in dropped]
    world.switch.run()
    assert not world.in_sync
    world.pass_time(sync.REPLY_TIMEOUT + 1)
    assert world.in_sync
    assert None not in shaping_of(world)


@pytest.mark.parametrize("steps", range(16))
def test_a_rate_set_at_any_moment_is_in_force(steps: int) -> None:
    world = World(SHAPING + FILE)
    world.switch.shapes = True
    world.switch.connect(world.service)
    world.switch.run(limit=steps)
    change = world.service.set_rate(world.limit("red/a"), 7_000_000)
    world.switch.run()
    assert [waiter.applied for waiter in change.waiters.values()] == [True]
    number = world.meter("red/a")
    assert world.switch.meters[number] == Meter(number, 7000, shaping=Shaping(20_000, 5_000))
    assert world.in_sync
    world.switch.changes()
    world.pass_time(60)
    assert world.switch.changes() == []


def test_from_drop_to_shape_in_place_and_back() -> None:
    """As when the switch is updated, and if it should be replaced by an older one."""
    world = World().up()
    flows = dict(world.switch.flows)
    for shapes in (True, False):
        world.switch.shapes = shapes
        world.switch.connect(world.service)
        world.switch.run()
        assert world.in_sync
        changes = world.switch.changes()
        assert len(changes) == len(world.switch.meters)
        assert all(isinstance(item, MeterMod) and item.command == MODIFY for item in changes)
        assert shaping_of(world) == {Shaping() if shapes else None}
        assert world.switch.flows == flows


def test_a_reload_changes_what_the_bands_say() -> None:
    world = World()
    world.switch.shapes = True
    world.up()
    world.switch.changes()
    world.text = SHAPING + FILE
    world.service.reload()
    world.switch.run()
    assert shaping_of(world) == {Shaping(20_000, 5_000)}
    assert all(item.command == MODIFY for item in world.switch.changes())


def test_fair_is_a_change_of_the_meters_that_are_there() -> None:
    world = World()
    world.switch.shapes = True
    world.up()
    flows = dict(world.switch.flows)
    for fair in (True, False):
        world.switch.changes()
        world.text = f"shaping: {{fair: {str(fair).lower()}}}\n" + FILE
        world.service.reload()
        world.switch.run()
        assert shaping_of(world) == {Shaping(fair=fair)}
        changes = world.switch.changes()
        assert len(changes) == len(world.switch.meters)
        assert all(isinstance(item, MeterMod) and item.command == MODIFY for item in changes)
        assert world.switch.flows == flows
        (meters,) = world.service.meters_view().values()
        assert {band["fair"] for meter in meters for band in meter["bands"]} == {fair}
    # A rate that is set keeps what the file says.
    world.text = "shaping: {fair: true}\n" + FILE
    world.service.reload()
    world.switch.run()
    world.service.set_rate(world.limit("red/a"), 7_000_000)
    world.switch.run()
    number = world.meter("red/a")
    assert world.switch.meters[number] == Meter(number, 7000, shaping=Shaping(fair=True))


def test_fair_where_there_is_no_shape_band(caplog: pytest.LogCaptureFixture) -> None:
    world = World("shaping: {fair: true}\n" + FILE).up()
    assert shaping_of(world) == {None}
    status = world.service.status_view()["switches"]["0000000000000001"]
    assert (status["band"], status["no_shape_reason"]) == ("drop", BAD_BAND)
    assert "'shaping' of the file is not in force" in caplog.text


def test_the_trial_says_all_that_a_file_can() -> None:
    world = World()
    world.switch.shapes = True
    world.up()
    (trial,) = {message.meter for message in world.switch.sent if isinstance(message, sync.Trial)}
    assert trial.shaping == Shaping(fair=True)


# The file.


@pytest.mark.parametrize(
    ("text", "us"),
    [("1us", 1), ("20ms", 20_000), ("0.5 ms", 500), ("10s", 10_000_000), ("1.5s", 1_500_000)],
)
def test_times(text: str, us: int) -> None:
    assert units.parse_duration(text) == us


@pytest.mark.parametrize(
    "value",
    ["0us", "0.5us", "10.000001s", "11s", "20", 20, 20.5, True, None, "20 m", "20MS", "-1ms", ""],
)
def test_no_times(value: object) -> None:
    with pytest.raises(units.UnitError) as info:
        units.parse_duration(value)
    assert info.value.allowed == units.DURATION_ALLOWED


@pytest.mark.parametrize(
    ("shaping", "field", "message"),
    [
        ("{max_delay: 20}", "shaping.max_delay", "not a time"),
        ("{max_delay: 11s}", "shaping.max_delay", "time out of range"),
        ("{ecn_threshold: }", "shaping.ecn_threshold", "not a time"),
        ("{max_delay: 5ms, ecn_threshold: 5ms}", "shaping.ecn_threshold", "no packet waits"),
        ("{max_dela: 5ms}", "shaping.max_dela", "unknown key, did you mean max_delay?"),
        ("5ms", "shaping", "must be a mapping"),
        ("{band: shape}", "shaping.band", "not one of the allowed words"),
        ("{band: drop, max_delay: 5ms}", "shaping.max_delay", "a drop band cannot say this"),
        ("{band: drop, fair: true}", "shaping.fair", "a drop band cannot say this"),
        ("{fair: yes}", "shaping.fair", "not one of the allowed words"),
        ("{fair: 1}", "shaping.fair", "not one of the allowed words"),
        ("{fair: }", "shaping.fair", "there is nothing here"),
    ],
)
def test_mistakes_in_the_file(shaping: str, field: str, message: str) -> None:
    with pytest.raises(InvalidConfig) as info:
        config.parse(f"shaping: {shaping}\n" + FILE)
    (problem,) = info.value.problems
    assert problem.field == field
    assert message in problem.message
    assert problem.line == 1


# The wire.

DATAPATH = ProtocolDesc(version=ofp.OFP_VERSION)


def reply(*meters: tuple[int, int, bytes]) -> bytes:
    """Give an OFPMP_METER_CONFIG reply with these (id, flags, bands)."""
    body = b"".join(
        (8 + len(bands)).to_bytes(2, "big")
        + flags.to_bytes(2, "big")
        + number.to_bytes(4, "big")
        + bands
        for number, flags, bands in meters
    )
    kind = ofp.OFPMP_METER_CONFIG.to_bytes(2, "big")
    header = bytes([ofp.OFP_VERSION, ofp.OFPT_MULTIPART_REPLY])
    return header + (16 + len(body)).to_bytes(2, "big") + bytes(4) + kind + bytes(6) + body


def read(message: bytes) -> list[plan.Meter]:
    parsed = parser.OFPMultipartReply.parser(
        DATAPATH, ofp.OFP_VERSION, ofp.OFPT_MULTIPART_REPLY, len(message), 0, bytearray(message)
    )
    return [wire.meter_from_wire(item) for item in parsed.body]


def packed(command: str, meter: Meter) -> bytes:
    message = wire.to_wire(DATAPATH, MeterMod(command, meter))
    message.set_xid(2)
    message.serialize()
    return bytes(message.buf)


BAND = bytes.fromhex("ffff0020 000186a0 000000c8 00002320 0001 000000000000 0000c350 00001388")
FAIR = bytes.fromhex("ffff0020 00000400 00000000 00002320 0001 000100000000 00000000 00000000")
DROP = bytes.fromhex("00010010 00000400 00000000 00000000")
OTHER = bytes.fromhex("ffff0018 00000001 00000000 4f4e4600 0000000000000000")


def test_a_meter_mod() -> None:
    """The bytes are those of the test "shape band - meter_mod" of ovs-ofctl."""
    meter = Meter(5, 100_000, 200, Shaping(50_000, 5_000))
    assert packed(ADD, meter) == bytes.fromhex("041d0030 00000002 0000 0005 00000005") + BAND
    fair = Meter(5, 1024, shaping=Shaping(fair=True))
    assert packed(MODIFY, fair) == bytes.fromhex("041d0030 00000002 0001 0001 00000005") + FAIR
    drop = Meter(5, 1024)
    assert packed(MODIFY, drop) == bytes.fromhex("041d0020 00000002 0001 0001 00000005") + DROP
    assert packed(DELETE, meter) == bytes.fromhex("041d0010 00000002 0002 0005 00000005")


def test_saying_that_we_read_shape_bands() -> None:
    """The bytes are those of the test "shape band - set_meter_bands" of ovs-ofctl."""
    message = wire.to_wire(DATAPATH, sync.ReadsShapeBands())
    message.set_xid(2)
    message.serialize()
    assert bytes(message.buf) == bytes.fromhex("04040014 00000002 00002320 00000040 00000002")


def test_a_reply_with_bands_of_all_kinds() -> None:
    first, second, *others = read(
        reply(
            (1, 5, BAND),
            (2, 1, DROP),
            (3, 1, OTHER),
            (4, 1, OTHER[:2] + b"\x00\x10" + OTHER[4:16]),
            (5, 5, BAND + BAND),
            (6, 2, BAND),
        )
    )
    (fair,) = read(reply((7, 1, FAIR)))
    assert fair == Meter(7, 1024, shaping=Shaping(fair=True))
    assert first == Meter(1, 100_000, 200, Shaping(50_000, 5_000))
    assert second == Meter(2, 1024)
    assert [meter.id for meter in others] == [3, 4, 5, 6]
    assert all(meter.foreign for meter in others)


def test_our_experimenter_with_another_subtype_is_not_ours() -> None:
    (meter,) = read(reply((1, 1, BAND.replace(b"\x23\x20\x00\x01", b"\x23\x20\x00\x02"))))
    assert meter.foreign


@pytest.mark.parametrize("flags", [2, 3, 0x100, 0x8001])
def test_flags_that_we_do_not_know_are_not_ours(flags: int) -> None:
    (meter,) = read(reply((1, 1, FAIR[:18] + flags.to_bytes(2, "big") + FAIR[20:])))
    assert meter.foreign


@pytest.mark.parametrize("length", [0, 4, 15, 33, 0xFFFF])
def test_a_malformed_band_is_an_error(length: int) -> None:
    """Not a loop without end, and no bytes from behind the message."""
    band = BAND[:2] + length.to_bytes(2, "big") + BAND[4:]
    with pytest.raises(ValueError, match="meter band"):
        shape_band.parse(band, 0)
    with pytest.raises(ValueError, match="meter band"):
        shape_band.parse(BAND[:12], 0)
    with pytest.raises(ValueError, match="meter band"):
        read(reply((1, 1, band)))
