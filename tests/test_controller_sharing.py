"""Sharing of a port: demands from counters, changes of meters, settings live and from files.

Traffic is simulated: each VM offers a rate, and a meter lets it pass up to its own rate
and drops the rest.  What the real switch makes of it is in test_shaping_sharing.py.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controller_pipeline import FakeSwitch
from fbrates import config, plan, sync
from fbrates.loader import InvalidConfig
from fbrates.metrics import Metrics
from fbrates.plan import MODIFY, MeterMod
from fbrates.rest import Api, Response
from fbrates.service import Service
from fbrates.sharing import CHANGE, HUNGRY_HOLD, POLL_INTERVAL, MeterSample, Poller

FILE = """
ports: {up: {max-rate: 300Mbps}}
tenants:
  t:
    vms:
      a: {port: a, min-rate: 100Mbps}
      b: {port: b, min-rate: 50Mbps, weight: 2}
      c: {port: c, min-rate: 50Mbps}
      fixed: {port: f, rate: 7Mbps}
"""
PORTS = {"a": 1, "b": 2, "c": 3, "f": 4, "up": 5}
VM = "/v1/tenants/t/vms"
FAIR = {"a": 100, "b": 133.333, "c": 66.666}
"""Mbit/s of each if all want all."""

SETTLED = 1.5
"""Seconds after which a division no longer changes while traffic does not: what VMs used
before is forgotten in a few tenths of one, and what waits at the port is drained."""


class World:
    """A controller, a switch and traffic, without wires and in simulated time."""

    def __init__(self, text: str = FILE) -> None:
        self.text = text
        self.now = 1000.0
        self.offered: dict[str, float] = {}
        self.bytes: dict[int, list[float]] = {}
        self.history: list[dict[str, float]] = []
        self.service = self.controller()
        self.switch = FakeSwitch(dict(PORTS))
        self.switch.stats = self.count
        self.api = Api(self.service, lambda: self.now)
        self.connect()

    def connect(self) -> None:
        self.switch.connect(self.service)
        self.switch.run()
        self.switch.changes()

    def controller(self) -> Service:
        return Service(
            lambda: config.parse(self.text), threading.Event, lambda: self.now, lambda: self.now
        )

    def restart(self) -> None:
        """Begin anew with what the switch has, as a restarted controller does."""
        self.service = self.controller()
        self.api = Api(self.service, lambda: self.now)
        self.connect()

    def count(self, number: int) -> MeterSample:
        came, dropped = self.bytes.get(number, [0.0, 0.0])
        return MeterSample(int(came), int(dropped), self.now - 1000.0)

    def number(self, name: str) -> int:
        return self.service.numbers.meters[f"t/{name}"]

    def mbps(self, name: str) -> float:
        """What the VM's meter is set to."""
        return self.switch.meters[self.number(name)].rate_kbps / 1000

    def rates(self) -> dict[str, float]:
        present = [name for name in "abc" if self.number(name) in self.switch.meters]
        return {name: self.mbps(name) for name in present}

    def passing(self) -> float:
        return sum(min(rate, self.mbps(name)) for name, rate in self.offered.items())

    @property
    def poller(self) -> Poller:
        return self.service.pollers[1]

    def run(self, seconds: float, **offered: float) -> None:
        """Let VMs offer these rates (Mbit/s; others go on as before) for a while."""
        self.offered.update(offered)
        end = self.now + seconds
        while self.now < end - 1e-9:
            wait = self.service.poll(self.switch.sync)  # type: ignore[arg-type]
            self.switch.run()
            step = min(wait, end - self.now)
            for name, rate in self.offered.items():
                counts = self.bytes.setdefault(self.number(name), [0.0, 0.0])
                counts[0] += rate * step * 1e6 / 8
                counts[1] += max(rate - self.mbps(name), 0.0) * step * 1e6 / 8
            self.now += step
            self.history.append(self.rates())

    def put(self, path: str, body: Any) -> Response:
        return self.api.handle("PUT", path, json.dumps(body).encode())

    def expect(self, **rates: float) -> None:
        for name, rate in rates.items():
            # What is left of a change below 0.1 % is not sent.
            assert self.mbps(name) == pytest.approx(rate, rel=0.002), self.rates()


@pytest.fixture
def world() -> World:
    return World()


# The division follows what is used.


def test_at_first_everybody_has_its_fair_share(world: World) -> None:
    world.expect(**FAIR)
    assert world.switch.meters[world.number("fixed")].rate_kbps == 7000


def test_one_alone_has_the_whole_port(world: World) -> None:
    world.run(SETTLED, a=1000)
    world.expect(a=300)
    world.expect(b=FAIR["b"], c=FAIR["c"])


def test_two_share_by_weight(world: World) -> None:
    world.run(SETTLED, a=1000, b=1000)
    world.expect(a=100, b=200)
    world.run(SETTLED, a=0, c=1000)
    world.expect(b=200, c=100)
    world.run(SETTLED, b=0, a=1000)
    world.expect(a=150, c=150)


def test_who_wants_less_leaves_the_rest(world: World) -> None:
    """`b` uses 40 of its 133: what it leaves, but for its headroom of a quarter, is lent."""
    world.run(SETTLED, a=1000, b=40, c=1000)
    world.expect(a=125, c=125)
    assert world.mbps("b") == pytest.approx(FAIR["b"], rel=0.001)


def test_a_sleeper_has_its_guarantee_at_once_and_the_others_yield_at_the_next_poll(
    world: World,
) -> None:
    world.run(SETTLED, a=1000)
    world.history.clear()
    world.run(2 * POLL_INTERVAL + 0.001, c=50)
    assert all(rates["c"] >= 50 for rates in world.history)
    # 150 Mbit/s is what `a` has if `c` wants all; that it wants no more is found out later.
    assert world.mbps("a") <= 250
    world.run(SETTLED)
    world.expect(a=300 - 50 * 1.25)


@pytest.mark.parametrize("part", [0.05, 0.3, 0.95])
def test_it_yields_within_two_polls_whenever_the_other_wakes(part: float) -> None:
    """A VM that wakes just before a poll has hardly used anything at that poll."""
    world = World()
    world.run(SETTLED, a=1000)
    world.run(POLL_INTERVAL * part)
    world.run(2 * POLL_INTERVAL, c=1000)
    assert world.mbps("a") <= 150


def test_what_is_no_longer_used_is_lent_soon(world: World) -> None:
    world.run(SETTLED, a=1000, b=1000)
    world.run(HUNGRY_HOLD + 0.2, b=0)
    assert world.mbps("a") >= 0.9 * 300
    world.run(SETTLED)
    world.expect(a=300)


def test_a_keepalive_reserves_nothing(world: World) -> None:
    world.run(SETTLED, a=1000, c=0.5)
    world.expect(a=300 - 0.5 * 1.25)


def test_what_grows_has_room_to_grow(world: World) -> None:
    """Doubling every 20 ms, as TCP in slow start, costs no more than a poll."""
    world.run(SETTLED, a=1000)
    rate = 1.0
    while rate < 150:
        world.run(POLL_INTERVAL, c=rate)
        assert world.mbps("c") >= min(rate, FAIR["c"])
        rate *= 2
    world.run(2 * POLL_INTERVAL, c=1000)
    assert world.mbps("c") >= 0.75 * 150
    world.run(SETTLED)
    world.expect(a=150, c=150)


def test_never_above_the_maximum() -> None:
    world = World(FILE.replace("c, min-rate: 50Mbps", "c, min-rate: 50Mbps, max-rate: 80Mbps"))
    world.run(SETTLED, c=1000)
    world.expect(c=80)
    world.run(SETTLED, a=1000)
    world.expect(a=220, c=80)
    assert max(rates["c"] for rates in world.history) == 80


def test_steady_traffic_sends_nothing(world: World) -> None:
    world.run(SETTLED, a=1000, b=40, c=1000)
    world.switch.changes()
    world.run(2.0)
    assert world.switch.changes() == []
    assert world.poller.polls > 100


def test_changes_are_in_place_and_take_before_they_give(world: World) -> None:
    world.run(SETTLED, a=1000)
    world.switch.changes()
    world.run(SETTLED, b=1000)
    changes = world.switch.changes()
    assert changes
    assert all(isinstance(item, MeterMod) and item.command == MODIFY for item in changes)
    assert changes[0].meter.id == world.number("a")  # type: ignore[union-attr]
    state: dict[int, int] = {}
    for change in changes:
        assert isinstance(change, MeterMod)
        rate = change.meter.rate_kbps
        before = state.get(change.meter.id)
        assert before is None or abs(rate - before) >= min(CHANGE, 0.001) * before
        state[change.meter.id] = rate


def test_a_poll_asks_for_few_meters_or_for_all(world: World) -> None:
    world.run(0.1, a=1)
    asked = [item for item in world.switch.sent if isinstance(item, sync.MeterStatsRequest)]
    assert {item.meter for item in asked} == {None}
    many = "".join(f"      x{i}: {{port: x{i}, rate: 1Mbps}}\n" for i in range(100))
    world = World(FILE + many)
    world.switch.ports.update({f"x{i}": 10 + i for i in range(100)})
    world.connect()
    world.run(SETTLED, a=1000)
    asked = [item for item in world.switch.sent if isinstance(item, sync.MeterStatsRequest)]
    assert {item.meter for item in asked} == {world.number(name) for name in "abc"}
    world.expect(a=300)


def test_polls_become_rarer_when_they_take_long(world: World) -> None:
    def slow(number: int) -> MeterSample:
        world.now += 0.01
        return world.count(number)

    world.switch.stats = slow
    world.run(2.0, a=1000)
    # Four meters: 40 ms for a poll, which may be half of the time.
    assert world.poller.interval == pytest.approx(0.08, rel=0.1)
    status = world.service.status_view()["switches"]["0000000000000001"]["sharing"]
    assert status["interval_ms"] == pytest.approx(80, rel=0.1)


def test_a_silent_switch_is_asked_again(world: World) -> None:
    world.run(0.1, a=1000)
    polls = world.poller.polls
    world.service.poll(world.switch.sync)  # type: ignore[arg-type]
    world.switch.queue.clear()
    for _ in range(300):
        world.now += 0.005
        world.service.poll(world.switch.sync)  # type: ignore[arg-type]
    world.run(0.1)
    assert world.poller.polls > polls


def test_what_a_destination_refuses_is_not_usage() -> None:
    """A flood towards a destination of 20 Mbit/s uses 20, not what the VM's meter saw."""
    text = FILE.replace(
        "{port: a, min-rate: 100Mbps}",
        "{port: a, min-rate: 100Mbps, destinations: [{to: 10.0.0.9, rate: 20Mbps}]}",
    )
    world = World(text)
    destination = world.service.numbers.meters["t/a->10.0.0.9"]

    def count(number: int) -> MeterSample:
        sample = world.count(number)
        if number == destination:
            came = world.count(world.number("a")).bytes_in
            return MeterSample(came, int(came * 70 / 90), sample.seconds)
        return sample

    world.switch.stats = count
    world.run(SETTLED, a=90, b=1000)
    world.expect(b=300 - 20 * 1.25)


def test_a_meter_that_was_made_anew_is_measured_anew(world: World) -> None:
    world.run(SETTLED, a=1000, c=20)
    world.bytes[world.number("c")] = [0.0, 0.0]
    world.run(POLL_INTERVAL)
    assert world.mbps("a") == pytest.approx(275, rel=0.01)
    world.run(SETTLED)
    world.expect(a=275)


@st.composite
def scenes(draw: st.DrawFn) -> list[Mapping[str, float]]:
    """What three VMs offer, one time after the other."""
    rates = st.one_of(st.just(0.0), st.floats(0.01, 400), st.just(1000.0))
    return draw(
        st.lists(st.fixed_dictionaries(dict.fromkeys("abc", rates)), min_size=1, max_size=4)
    )


@settings(max_examples=60, deadline=None)
@example([{"a": 0.0, "b": 0.0, "c": 0.0}, {"a": 0.0, "b": 190.0, "c": 107.0}])
@given(scenes())
def test_any_traffic(scene: list[Mapping[str, float]]) -> None:
    world = World()
    for offered in scene:
        world.run(SETTLED, **offered)
        rates = world.rates()
        for name, minimum in (("a", 100), ("b", 50), ("c", 50)):
            assert minimum <= rates[name] <= 300
        passing = world.passing()
        # A change of less than 0.1 % may be pending for each of them.
        assert passing <= 300 * 1.003
        # Work-conserving: nothing is left unused that somebody wants, but for a quarter
        # of what those use who do not use up what they have.
        wanted = min(300.0, sum(min(rate, 300.0) for rate in offered.values()))
        content = sum(rate for n, rate in offered.items() if rate < 0.95 * rates[n])
        # One that uses 95 % or more counts as wanting more, even if it does not.
        nearly = sum(rates[n] - rate for n, rate in offered.items()
                     if 0.95 * rates[n] <= rate < rates[n])
        assert passing >= wanted - 0.25 * content - nearly - 0.02 * 300
    for rates in world.history:
        assert all(rates[name] >= minimum for name, minimum in (("a", 100), ("b", 50), ("c", 50)))


# Connections come and go.


def test_a_new_controller_goes_on_from_the_last_division(world: World) -> None:
    world.run(SETTLED, a=1000, b=1000)
    world.switch.changes()
    world.restart()
    assert world.switch.changes() == []
    world.expect(a=100, b=200)
    world.run(SETTLED)
    world.expect(a=100, b=200)


def test_a_switch_that_returns_empty_is_given_meters_again(world: World) -> None:
    world.run(SETTLED, a=1000)
    world.switch.meters.clear()
    world.switch.flows.clear()
    world.connect()
    world.expect(**FAIR)
    world.run(SETTLED)
    world.expect(a=300)


def test_an_audit_finds_nothing_to_repair(world: World) -> None:
    world.run(SETTLED, a=1000, b=30)
    connection = world.switch.sync
    assert connection is not None
    world.switch.changes()
    connection.start_audit()
    world.run(0.2, b=1000)
    world.now += 1
    connection.start_audit()
    world.switch.run()
    assert connection.repairs == 0
    world.run(SETTLED)
    world.expect(a=100, b=200)


def test_a_vm_whose_port_comes_later_takes_part_then(world: World) -> None:
    del world.switch.ports["c"]
    world.connect()
    world.run(SETTLED, a=1000)
    assert world.number("c") not in world.switch.meters
    assert world.switch.sync is not None
    world.switch.sync.port_changed("c", 3, False)
    world.switch.run()
    world.run(SETTLED, c=1000)
    world.expect(a=150, c=150)


# Settings.


def test_a_share_is_changed_live(world: World) -> None:
    world.run(SETTLED, a=1000, b=1000, c=1000)
    world.expect(**FAIR)
    number = world.number("c")
    before = world.switch.meters[number]
    answer = world.service.set_share(world.service.vm("t", "c"), weight=4, max_rate=200_000_000)
    assert list(answer.waiters) == ["0000000000000001"]
    world.switch.run()
    assert all(waiter.applied for waiter in answer.waiters.values())
    world.expect(a=100, b=200 / 3, c=400 / 3)
    assert world.switch.meters[number] != before
    world.run(SETTLED)
    world.expect(a=100, b=200 / 3, c=400 / 3)
    view = world.api.handle("GET", f"{VM}/c/share").body
    assert (view["weight"], view["max-rate"], view["file"]["weight"]) == (4, "200Mbps", 1)
    assert view["switches"]["0000000000000001"]["wants_more"] is True
    assert view["switches"]["0000000000000001"]["share_bps"] == pytest.approx(400e6 / 3, rel=0.002)
    # It stays when the file is read again, unless the file says something new.
    assert world.service.reload()["live_changes_kept"] == 1
    assert world.service.set_share(world.service.vm("t", "c"), weight=1).new.weight == 1
    world.text = FILE.replace("c: {port: c, ", "c: {port: c, weight: 1, max-rate: 300Mbps, ")
    world.service.reload()
    world.run(SETTLED)
    world.expect(**FAIR)


def test_a_ports_rate_is_changed_live(world: World) -> None:
    world.run(SETTLED, a=1000)
    answer = world.put("/v1/ports/up", {"max-rate": "250Mbps"})
    # Nothing obeys while the request waits, so it cannot be confirmed here.
    assert (answer.status, answer.body["new_max-rate"]) == (504, "250Mbps")
    world.switch.run()
    world.expect(a=250)
    assert world.api.handle("GET", "/v1/ports/up").body["max_rate_bps"] == 250_000_000


@pytest.mark.parametrize(
    ("path", "body", "field", "allowed"),
    [
        (f"{VM}/a/share", {"min-rate": "250Mbps"}, "max-rate", "at least 350Mbps"),
        (
            f"{VM}/a/share",
            {"min-rate": "400Mbps"},
            "min-rate",
            "at most 300Mbps (this is about t/a)",
        ),
        ("/v1/ports/up", {"max-rate": "1Mbps"}, "max-rate", "at least 200Mbps"),
        (f"{VM}/a/share", {"max-rate": "50Mbps"}, "min-rate", "at most 50Mbps (this is about t/a)"),
        (f"{VM}/a/share", {"min-rate": "1kbps"}, "min-rate", "256kbps or more"),
        (f"{VM}/a/share", {"max-rate": "unlimited"}, "max-rate", "1kbps to 400Gbps"),
        (f"{VM}/a/share", {"weight": 0}, "weight", "an integer from 1 to 1000"),
        (f"{VM}/a/share", {"weight": "2"}, "weight", "an integer from 1 to 1000"),
        (f"{VM}/a/share", {"weight": True}, "weight", "an integer from 1 to 1000"),
        (f"{VM}/a/share", {"rate": "1Mbps"}, "rate", "min-rate, max-rate and weight"),
        (f"{VM}/a/share", {"some": 1}, "some", "min-rate, max-rate and weight"),
        (f"{VM}/a/share", {}, "body", "min-rate, max-rate and weight"),
        (f"{VM}/a/share", [], "body", "an object with min-rate"),
        (f"{VM}/fixed/share", {"weight": 2}, "vm", "VMs with shares"),
        (f"{VM}/a/rate", {"rate": "1Mbps"}, "rate", f"PUT {VM}/a/share"),
        ("/v1/ports/up", {"max-rate": "199Mbps"}, "max-rate", "at least 200Mbps"),
        ("/v1/ports/up", {"max-rate": 0}, "max-rate", "1kbps to 400Gbps"),
        ("/v1/ports/up", {}, "max-rate", "1kbps to 400Gbps"),
        ("/v1/ports/up", {"min-rate": "1Mbps"}, "min-rate", "max-rate"),
    ],
)
def test_refused_requests_change_nothing(
    world: World, path: str, body: Any, field: str, allowed: str
) -> None:
    before = (dict(world.switch.meters), world.service.shares, dict(world.service.port_rates))
    answer = world.put(path, body)
    assert answer.status == 400
    error = answer.body["error"]
    assert error["field"] == field
    assert allowed in str(error["allowed"])
    world.switch.run()
    assert before == (world.switch.meters, world.service.shares, world.service.port_rates)


def problems(text: str) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        config.parse(text)
    return [problem.text() for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "ports: {up: {max-rate: 300Mbps}}",
            "",
            "tenants.t.vms.a.min-rate: there is no port whose rate could be shared; allowed: "
            "with ports: {NAME: {max-rate: RATE}} at the top of the file",
        ),
        (
            "up: {max-rate: 300Mbps}",
            "up: {max-rate: 199Mbps}",
            "ports.up.max-rate: '199Mbps': is less than the min-rates of the 3 VMs that share "
            "it; allowed: at least 200Mbps",
        ),
        (
            "b, min-rate: 50Mbps",
            "b, min-rate: 50Mbps, max-rate: 40Mbps",
            "tenants.t.vms.b.min-rate: '50Mbps': is above its max-rate of 40Mbps; allowed: at "
            "most 40Mbps",
        ),
        (
            "b, min-rate: 50Mbps",
            "b, min-rate: 301Mbps",
            "tenants.t.vms.b.min-rate: '301Mbps': is above what port up has; allowed: at most "
            "300Mbps",
        ),
        (
            "weight: 2",
            "weight: 1001",
            "tenants.t.vms.b.weight: 1001: not a weight; allowed: an integer from 1 to 1000",
        ),
        (
            "weight: 2",
            "shares: down",
            "tenants.t.vms.b.shares: 'down': no such port in ports; allowed: up",
        ),
        (
            "rate: 7Mbps",
            "rate: 7Mbps, weight: 1",
            "tenants.t.vms.fixed.rate: '7Mbps': is a rate of its own, but weight says that it "
            "shares a port's; allowed: either rate, or shares, min-rate, max-rate, weight",
        ),
        (
            "ports: {up",
            "ports: {down: {max-rate: 1Gbps}, up",
            "tenants.t.vms.a.shares: several ports are shared; allowed: down, up",
        ),
        (
            "min-rate: 100Mbps",
            "min_rate: 100Mbps",
            "tenants.t.vms.a.min_rate: unknown key, did you mean min-rate?",
        ),
        (
            "min-rate: 100Mbps",
            "min-rate: 255kbps",
            "tenants.t.vms.a.min-rate: '255kbps': rate too low to let one full frame pass in "
            "time; allowed: 256kbps or more",
        ),
    ],
)
def test_files_that_are_refused(old: str, new: str, problem: str) -> None:
    assert old in FILE
    found = problems(FILE.replace(old, new))
    assert any(problem in item for item in found), found


def test_a_port_may_be_there_before_those_who_share_it() -> None:
    """Over REST it has to be, and what is exported then is a file like any other."""
    text = "ports: {up: {max-rate: 1Gbps}}\ntenants: {t: {vms: {a: {port: a, rate: 1Mbps}}}}"
    assert config.parse(text).ports == {"up": 1_000_000_000}


def test_defaults_of_those_that_share() -> None:
    text = (
        "ports: {up: {max-rate: 1Gbps}}\ndefaults: {rate: 5Mbps}\n"
        "tenants: {t: {vms: {a: {port: a, shares: up}, b: {port: b}}}}"
    )
    parsed = config.parse(text)
    assert parsed.shares() == {"t/a": config.Share("up", config.MIN_SHARE, None, 1)}
    assert parsed.tenants["t"].vms["b"].rate == 5_000_000


def test_a_reload_changes_shares(world: World) -> None:
    world.run(SETTLED, a=1000, b=1000)
    world.text = FILE.replace("weight: 2", "weight: 5").replace("300Mbps", "600Mbps")
    assert world.service.reload()["rates_changed"] == 2
    world.switch.run()
    world.run(SETTLED)
    world.expect(a=100, b=500)
    world.text = "ports: {}\ntenants: {t: {vms: {a: {port: a, rate: 30Mbps}}}}"
    world.service.reload(force=True)
    world.switch.run()
    world.offered = {"a": 1000}
    assert [meter.rate_kbps for meter in world.switch.meters.values()] == [30_000]
    assert world.service.poll(world.switch.sync) > 0  # type: ignore[arg-type]


def test_metrics(world: World) -> None:
    world.run(SETTLED, a=1000, b=40)
    text = Metrics(world.service).render().decode()
    for line in (
        'flowbundler_port_rate_bits_per_second{port="up"} 3e+08',
        'flowbundler_share_min_rate_bits_per_second{owner="t/a",port="up"} 1e+08',
        'flowbundler_share_weight{owner="t/b",port="up"} 2.0',
        'flowbundler_rate_bits_per_second{owner="t/fixed"} 7e+06',
        'flowbundler_share_interval_seconds{switch="0000000000000001"} 0.02',
        "# TYPE flowbundler_share_polls_total counter",
    ):
        assert line in text, text
    assert 'flowbundler_rate_bits_per_second{owner="t/a"}' not in text
    assert 'flowbundler_share_max_rate_bits_per_second{owner="t/a"' not in text
    share = 'flowbundler_share_bits_per_second{owner="t/a",port="up",switch="0000000000000001"} '
    usage = share.replace("share_bits", "share_usage_bits").replace("t/a", "t/b")
    values = {
        line.rsplit(" ", 1)[0] + " ": float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("flowbundler_share")
    }
    assert values[share] == pytest.approx(250e6, rel=0.002)
    assert values[usage] == pytest.approx(40e6, rel=0.001)


def test_views_of_those_that_share(world: World) -> None:
    view = world.api.handle("GET", f"{VM}/b").body
    assert (view["rate"], view["rate_bps"], view["share"]["min-rate"]) == ("shared", None, "50Mbps")
    assert view["meter_id"] == world.number("b")
    ports = world.api.handle("GET", "/v1/ports").body["ports"]
    assert list(ports["up"]["vms"]) == ["t/a", "t/b", "t/c"]
    assert world.api.handle("GET", f"{VM}/fixed/share").status == 404
    meter = plan.Meter(world.number("a"), 100_000)
    assert world.switch.meters[meter.id] == meter
