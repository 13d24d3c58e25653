"""The REST interface: what it answers, and that a refused request changes nothing."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller_harness import Controller
from controller_pipeline import FakeSwitch
from fbrates import config
from fbrates.rest import CONFIRM_TIMEOUT, MAX_BODY, Api, Response
from fbrates.service import RateChange, Service
from fbrates.sync import BARRIER_EVERY, RETRY_DELAYS

FILE = """
tenants:
  red:
    destinations: [{to: 10.2.0.0/16, rate: 70Mbps}]
    vms:
      a:
        port: vm-a
        rate: 300Mbps
        destinations: [{to: 10.0.0.9, rate: 50Mbps}, {to: "2001:db8::/32", rate: 60Mbps}]
      gone: {port: absent, rate: 1Mbps}
"""
VM = "/v1/tenants/red/vms/a"


class PumpedEvent:
    """An event whose wait lets the switch work, and takes time if that is in vain."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_set = False

    def set(self) -> None:
        self.is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        if self.world.obeying:
            self.world.switch.run()
        if not self.is_set:
            self.world.now += timeout or 0
        return self.is_set


class World:
    def __init__(self, text: str = FILE) -> None:
        self.text = text
        self.now = 50.0
        self.obeying = True
        self.switch = FakeSwitch({"vm-a": 1})
        self.service = Service(
            lambda: config.parse(self.text),
            lambda: PumpedEvent(self),
            lambda: self.now,
            lambda: self.now,
        )
        self.api = Api(self.service, lambda: self.now)
        self.switch.connect(self.service)
        self.switch.run()

    def put(self, path: str, body: Any) -> Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.api.handle("PUT", path, data)

    def state(self) -> Any:
        return (dict(self.service.rates), dict(self.switch.meters), dict(self.switch.flows))

    def kbps(self, key: str) -> int:
        return self.switch.meters[self.service.numbers.meters[key]].rate_kbps


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize(
    "body",
    [{"rate": "50Mbps"}, {"rate": 50_000_000}, {"rate": "50000000"}]
    + [{"rate_bps": 50_000_000}, {"rate_bps": "50000000"}],
)
def test_a_rate_is_changed(world: World, body: Any) -> None:
    answer = world.put(f"{VM}/rate", body)
    assert answer.status == 200
    number = world.service.numbers.meters["red/a"]
    assert answer.body == {
        "tenant": "red",
        "vm": "a",
        "meter_id": number,
        "old_rate": "300Mbps",
        "old_rate_bps": 300_000_000,
        "new_rate": "50Mbps",
        "new_rate_bps": 50_000_000,
        "applied": True,
        "elapsed_ms": 0.0,
        "switches": {"0000000000000001": {"applied": True, "errors": []}},
    }
    assert world.kbps("red/a") == 50_000
    view = world.api.handle("GET", VM).body
    assert (view["rate"], view["file_rate"]) == ("50Mbps", "300Mbps")
    assert view["meter_id"] == number


@pytest.mark.parametrize(
    ("path", "key"),
    [
        (f"{VM}/destinations/10.0.0.9/rate", "red/a->10.0.0.9"),
        (f"{VM}/destinations/10.0.0.9/32/rate", "red/a->10.0.0.9"),
        (f"{VM}/destinations/2001:db8::/32/rate", "red/a->2001:db8::/32"),
        (f"{VM}/destinations/2001:DB8:0::/32/rate", "red/a->2001:db8::/32"),
        ("/v1/tenants/red/destinations/10.2.0.0/16/rate", "red->10.2.0.0/16"),
    ],
)
def test_a_destinations_rate_is_changed(world: World, path: str, key: str) -> None:
    answer = world.put(path, {"rate": "7Mbps"})
    assert (answer.status, answer.body["applied"]) == (200, True)
    assert world.kbps(key) == 7_000
    assert world.api.handle("GET", path).body["rate_bps"] == 7_000_000


def test_a_tenants_own_rate_is_changed() -> None:
    world = World(FILE.replace("  red:\n", "  red:\n    rate: 150Mbps\n"))
    assert world.kbps("red") == 150_000
    answer = world.put("/v1/tenants/red/rate", {"rate": "120Mbps"})
    assert (answer.status, answer.body["tenant"], world.kbps("red")) == (200, "red", 120_000)
    assert world.api.handle("GET", "/v1/tenants/red").body["rate"] == "120Mbps"
    assert World().put("/v1/tenants/red/rate", {"rate": "120Mbps"}).status == 404


def test_unlimited_and_back(world: World) -> None:
    answer = world.put(f"{VM}/rate", {"rate": "unlimited"})
    assert (answer.status, answer.body["new_rate_bps"]) == (200, None)
    answer = world.put(f"{VM}/rate", {"rate": "5Mbps"})
    assert (answer.status, answer.body["old_rate"]) == (200, "unlimited")
    assert world.kbps("red/a") == 5_000


def test_a_silent_switch_is_waited_for_and_not_forever(world: World) -> None:
    world.obeying = False
    answer = world.put(f"{VM}/rate", {"rate": "5Mbps"})
    assert answer.status == 504
    assert answer.body["applied"] is False
    assert answer.body["elapsed_ms"] == CONFIRM_TIMEOUT * 1000
    assert "not confirmed yet" in answer.body["reason"]
    place = answer.headers["Location"]
    assert world.api.handle("GET", place).body["state"] == "pending"
    world.obeying = True
    world.switch.run()
    assert world.kbps("red/a") == 5_000
    assert world.api.handle("GET", place).body["state"] == "applied"
    assert world.put(f"{VM}/rate", {"rate": "6Mbps"}).status == 200
    assert world.api.handle("GET", place).body["state"] == "superseded"


def test_who_does_not_want_to_wait_says_so(world: World) -> None:
    world.obeying = False
    later = {"Prefer": "respond-async, wait=10"}
    answer = world.api.handle("PUT", f"{VM}/rate", b'{"rate": "5Mbps"}', later)
    assert (answer.status, answer.body["applied"]) == (202, False)
    assert world.now == 50
    place = answer.headers["Location"]
    assert world.api.handle("GET", place).body["state"] == "pending"
    world.switch.run()
    view = world.api.handle("GET", place).body
    assert (view["state"], view["new_rate"]) == ("applied", "5Mbps")
    assert world.api.handle("GET", "/v1/changes/999").status == 404
    assert world.api.handle("GET", "/v1/changes/-1").status == 404


def test_a_refusal_is_told_as_one(world: World) -> None:
    world.switch.meters.clear()
    answer = world.put(f"{VM}/rate", {"rate": "5Mbps"})
    assert answer.status == 502
    assert "UNKNOWN_METER" in answer.body["error"]["message"]
    assert answer.body["error"]["value"] == "0000000000000001"
    place = answer.headers["Location"]
    assert world.api.handle("GET", place).body["state"] == "pending"
    audit_after_errors(world)
    assert world.api.handle("GET", place).body["state"] == "applied"


def test_many_vms_are_removed_by_force_only(world: World) -> None:
    world.text = "tenants: {}"
    answer = world.api.handle("POST", "/v1/reload")
    assert (answer.status, answer.body["error"]["field"]) == (400, "tenants")
    for body in (b'{"force": 1}', b'{"farce": true}', b"[]"):
        assert world.api.handle("POST", "/v1/reload", body).status == 400
    assert world.api.handle("POST", "/v1/reload", b'{"force": true}').status == 200
    closed = world.api.handle("GET", "/v1/closed").body["closed"]
    assert closed == ["port vm-a", "port absent"]
    body = b'{"closed": "port vm-a"}'
    assert world.api.handle("DELETE", "/v1/closed", body).body["closed"] == ["port absent"]
    assert world.api.handle("DELETE", "/v1/closed", body).status == 404


def test_adopting_over_rest(world: World) -> None:
    assert world.api.handle("POST", "/v1/switches/0000000000000001/adopt").status == 200
    assert world.api.handle("POST", "/v1/switches/0000000000000002/adopt").status == 404
    assert world.api.handle("POST", "/v1/switches/1/adopt").status == 400


def test_a_vm_that_is_not_there_yet(world: World) -> None:
    answer = world.put("/v1/tenants/red/vms/gone/rate", {"rate": "5Mbps"})
    assert (answer.status, answer.body["applied"], answer.body["switches"]) == (503, False, {})
    assert world.switch.sync is not None
    world.switch.sync.port_changed("absent", 5, deleted=False)
    world.switch.run()
    assert world.kbps("red/gone") == 5_000


def test_a_switch_that_refuses(world: World) -> None:
    world.switch.meters.clear()
    answer = world.put(f"{VM}/rate", {"rate": "5Mbps"})
    assert (answer.status, answer.body["applied"]) == (502, False)
    assert "UNKNOWN_METER" in answer.body["switches"]["0000000000000001"]["errors"][0]


def test_a_change_is_not_confirmed_while_the_one_before_it_was_refused(world: World) -> None:
    world.switch.meters.clear()
    path = "/v1/tenants/red/destinations/10.2.0.0/16/rate"
    for _ in range(3):
        answer = world.put(f"{VM}/rate", {"rate": "5Mbps"})
        # The second one finds it in doubt, and waits for what an audit says.
        assert (answer.status in (502, 504), answer.body["applied"]) == (True, False)
    assert world.service.numbers.meters["red/a"] not in world.switch.meters
    audit_after_errors(world)
    assert world.put(f"{VM}/rate", {"rate": "5Mbps"}).status == 200
    assert world.kbps("red/a") == 5_000
    # What the error was not about is not in doubt.
    del world.switch.meters[world.service.numbers.meters["red/a"]]
    assert world.put(f"{VM}/rate", {"rate": "6Mbps"}).status == 502
    assert world.put(path, {"rate": "7Mbps"}).status == 200


def test_a_meter_that_cannot_be_added_is_not_confirmed(world: World) -> None:
    assert world.put(f"{VM}/rate", {"rate": "unlimited"}).status == 200
    world.switch.max_meters = 0
    for rate in ("5Mbps", "5Mbps", "6Mbps", "unlimited", "7Mbps"):
        assert world.put(f"{VM}/rate", {"rate": rate}).status in (502, 504), rate
    world.switch.max_meters = 10
    audit_after_errors(world)
    assert world.kbps("red/a") == 7_000
    assert world.put(f"{VM}/rate", {"rate": "7Mbps"}).status == 200


def test_all_who_wait_for_an_audit_hear_of_its_errors(world: World) -> None:
    vm = world.service.vm("red", "a")
    (destination,) = world.service.tenant("red").destinations.values()
    for limit in (vm, destination):
        world.service.set_rate(limit, None)
    world.switch.run()
    sync = world.switch.sync
    assert sync is not None
    sync.start_audit()
    changes = [world.service.set_rate(limit, 5_000_000) for limit in (vm, destination)]
    world.switch.max_meters = 0
    world.switch.run()
    for change in changes:
        assert any("OUT_OF_METERS" in error for error in refusals(change))


def test_who_waits_for_an_audit_is_told_when_the_switch_goes(world: World) -> None:
    world.switch.meters.clear()
    world.put(f"{VM}/rate", {"rate": "5Mbps"})
    change = world.service.set_rate(world.service.vm("red", "a"), 6_000_000)
    assert world.switch.sync is not None
    world.service.disconnect(world.switch.sync)
    assert "the switch disconnected" in refusals(change)


def test_all_who_ask_for_the_same_hear_of_its_error(world: World) -> None:
    world.switch.meters.clear()
    vm = world.service.vm("red", "a")
    # The second finds that what it wants has been sent, but not what came of it.
    changes = [world.service.set_rate(vm, 5_000_000) for _ in range(2)]
    world.switch.run()
    for change in changes:
        assert any("UNKNOWN_METER" in error for error in refusals(change))


def test_nothing_is_in_sync_while_something_is_in_doubt(world: World) -> None:
    world.switch.meters.clear()
    assert world.put(f"{VM}/rate", {"rate": "5Mbps"}).status == 502
    assert world.api.handle("POST", "/v1/reload", b"").status == 200
    world.switch.run()
    sync = world.switch.sync
    assert sync is not None
    assert not sync.in_sync
    audit_after_errors(world)
    assert sync.in_sync


def refusals(change: RateChange) -> list[str]:
    """Give what the one who waits for a change, which must not be applied, was told."""
    (waiter,) = change.waiters.values()
    assert waiter.event.wait(0)
    assert not waiter.applied
    return waiter.errors


def audit_after_errors(world: World) -> None:
    """Let the time pass after which a switch that refused something is asked again."""
    world.now += max(RETRY_DELAYS)
    world.service.tick()
    world.switch.run()


def test_an_error_is_heard_among_any_number_of_messages() -> None:
    vms = ", ".join(f"v{n}: {{port: p{n}, rate: 1Mbps}}" for n in range(2 * BARRIER_EVERY))
    world = World(f"tenants: {{red: {{vms: {{{vms}}}}}}}")
    world.switch = switch = FakeSwitch({f"p{n}": n + 1 for n in range(2 * BARRIER_EVERY)})
    switch.max_meters = 2 * BARRIER_EVERY - 1
    sync = switch.connect(world.service)
    # The last meter finds no room: its error comes when all has been sent.
    switch.run()
    assert not sync.in_sync
    assert any("OUT_OF_METERS" in error.error for error in sync.errors)
    switch.max_meters += 1
    audit_after_errors(world)
    assert sync.in_sync
    assert len(sync._sent) < 10


def test_a_refused_reload_says_where(world: World) -> None:
    world.text = FILE + "nonsense: 1\n"
    line = len(world.text.splitlines())
    assert world.api.handle("POST", "/v1/reload", b"").status == 400
    status = world.api.handle("GET", "/v1/status", b"").body
    assert status["last_reload_error"].startswith(f"line {line}: nonsense: ")


def test_a_switch_that_the_file_leaves_out_is_forgotten(world: World) -> None:
    def status() -> Any:
        return world.api.handle("GET", "/v1/status", b"").body

    name = "0000000000000001"
    world.text = FILE + "switches: [2]\n"
    assert world.api.handle("POST", "/v1/reload", b"").status == 200
    assert name not in status()["switches"] and status()["ignored_switches"] == [name]
    # And taken on again.
    world.text = FILE
    assert world.api.handle("POST", "/v1/reload", b"").status == 200
    world.switch.connect(world.service)
    world.switch.run()
    assert (list(status()["switches"]), status()["ignored_switches"]) == ([name], [])
    # One that is gone is remembered, until the file leaves it out.
    assert world.switch.sync is not None
    world.service.disconnect(world.switch.sync)
    assert status()["switches"][name]["connected"] is False
    world.text = FILE + "switches: [2]\n"
    assert world.api.handle("POST", "/v1/reload", b"").status == 200
    assert name not in status()["switches"]


BAD = [
    # method, path, body, status, field, part of the message
    ("PUT", f"{VM}/rate", b"", 400, "body", "not JSON"),
    ("PUT", f"{VM}/rate", b"rate=5Mbps", 400, "body", "not JSON"),
    ("PUT", f"{VM}/rate", b'{"rate": "5Mbps"', 400, "body", "not JSON"),
    ("PUT", f"{VM}/rate", b'{"rate": "\xff"}', 400, "body", "not JSON"),
    ("PUT", f"{VM}/rate", b'{"rate": NaN}', 400, "body", "not JSON"),
    ("PUT", f"{VM}/rate", b"[" * 50_000, 400, "body", "not JSON"),
    ("PUT", f"{VM}/rate", b'{"rate": ' + b"9" * 5000 + b"}", 400, "body", "not JSON"),
    ("PUT", f"{VM}/rate", b'{"rate": "5Mbps", "rate": "6Mbps"}', 400, "body", "given twice"),
    ("PUT", f"{VM}/rate", b"[]", 400, "body", "not an object"),
    ("PUT", f"{VM}/rate", b'"5Mbps"', 400, "body", "not an object"),
    ("PUT", f"{VM}/rate", b"null", 400, "body", "not an object"),
    ("PUT", f"{VM}/rate", b"{}", 400, "rate", "missing"),
    ("PUT", f"{VM}/rate", b'{"rate": "5Mbps", "rate_bps": 5}', 400, "rate", "both given"),
    ("PUT", f"{VM}/rate", b'{"rtae": "5Mbps"}', 400, "rtae", "unknown key"),
    ("PUT", f"{VM}/rate", b'{"rate": "5Mbps", "burst": 5}', 400, "burst", "unknown key"),
    ("PUT", f"{VM}/rate", b'{"rate": null}', 400, "rate", "not a rate"),
    ("PUT", f"{VM}/rate", b'{"rate": true}', 400, "rate", "not a rate"),
    ("PUT", f"{VM}/rate", b'{"rate": []}', 400, "rate", "not a rate"),
    ("PUT", f"{VM}/rate", b'{"rate": 5e7}', 400, "rate", "not a rate"),
    ("PUT", f"{VM}/rate", b'{"rate": "5 furlongs"}', 400, "rate", "not a rate"),
    ("PUT", f"{VM}/rate", b'{"rate": "5mbps"}', 400, "rate", "not a rate"),
    ("PUT", f"{VM}/rate", b'{"rate": 0}', 400, "rate", "out of range"),
    ("PUT", f"{VM}/rate", b'{"rate": -1}', 400, "rate", "out of range"),
    ("PUT", f"{VM}/rate", b'{"rate": "401Gbps"}', 400, "rate", "out of range"),
    ("PUT", f"{VM}/rate", b'{"rate_bps": 1e400}', 400, "rate_bps", "not a rate"),
    ("PUT", f"{VM}/rate", b'{"rate_bps": "5Mbps"}', 400, "rate_bps", "not an integer"),
    ("PUT", f"{VM}/rate", b'{"rate_bps": 1500}', 400, "rate_bps", "whole number of kbit/s"),
    ("PUT", f"{VM}/rate", b'{"rate_bps": 18446744073709551616}', 400, "rate_bps", "range"),
    ("PUT", f"{VM}/rate", b" " * (MAX_BODY + 1), 413, "body", "too large"),
    ("PUT", "/v1/tenants/green/vms/a/rate", b'{"rate": "5Mbps"}', 404, "tenant", "green"),
    ("PUT", "/v1/tenants/red/vms/z/rate", b'{"rate": "5Mbps"}', 404, "vm", "unknown vm z"),
    ("PUT", f"{VM}/destinations/10.0.0.8/rate", b"{}", 404, "destination", "10.0.0.8"),
    ("PUT", f"{VM}/destinations/10.0.0.8/8/rate", b"{}", 400, "destination", "host bits"),
    ("PUT", f"{VM}/destinations/x/rate", b"{}", 400, "destination", "not an address"),
    ("PUT", "/v1/tenants/red/destinations/10.3.0.0/16/rate", b"{}", 404, "destination", "10.3"),
    ("PUT", "/v1/tenants/red/vms//rate", b"{}", 404, "vm", "unknown"),
    ("GET", "/v1/tenants/green", b"", 404, "tenant", "green"),
    ("GET", "/v1/nothing", b"", 404, "path", "no such path"),
    ("GET", "/v1", b"", 404, "path", "no such path"),
    ("POST", f"{VM}/rate", b'{"rate": "5Mbps"}', 405, "method", "not allowed"),
    ("POST", VM, b"", 405, "method", "not allowed"),
    ("DELETE", f"{VM}/rate", b"", 405, "method", "not allowed"),
    ("PUT", "/v1/tenants", b"{}", 405, "method", "not allowed"),
    ("GET", "/v1/reload", b"", 405, "method", "not allowed"),
    ("PUT", "/v1/status", b"{}", 405, "method", "not allowed"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "field", "message"), BAD)
def test_a_bad_request(
    world: World, method: str, path: str, body: bytes, status: int, field: str, message: str
) -> None:
    before = world.state()
    world.switch.changes()
    answer = world.api.handle(method, path, body)
    error = answer.body["error"]
    assert (answer.status, error["field"]) == (status, field)
    assert message in error["message"]
    assert set(error) == {"field", "value", "allowed", "message"}
    assert error["allowed"] is not None
    json.loads(answer.encode())
    world.switch.run()
    assert world.state() == before
    assert world.switch.changes() == []


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"[1, [2]]", "[1, [2]]"),
        (b'{"rate": {"a": []}}', "{'a': []}"),
        (b'{"rate": [' + b"0, " * 99 + b"0]}", "[" + "0, " * 18 + "0,..."),
        (b'{"rtae": [1]}', "[1]"),
        (b'{"rate_bps": 1e400}', "inf"),
        (b'{"rate_bps": 1' + b"0" * 60 + b"}", "1" + "0" * 56 + "..."),
        (b'{"rate": 77}', 77),
        (b'{"rate": true}', True),
        (b'{"rate": "x"}', "x"),
    ],
)
def test_only_scalars_are_sent_back(world: World, body: bytes, shown: Any) -> None:
    answer = world.put(f"{VM}/rate", body)
    assert answer.status == 400
    json.dumps(answer.body, allow_nan=False)
    assert answer.body["error"]["value"] == shown


def test_unknown_names_tell_the_known(world: World) -> None:
    allowed = world.put("/v1/tenants/red/vms/z/rate", {}).body["error"]["allowed"]
    assert allowed == ["a", "gone"]


def test_a_refused_method_names_the_others(world: World) -> None:
    answer = world.api.handle("POST", f"{VM}/rate")
    assert answer.headers["Allow"] == "GET, PUT"


@given(st.binary(max_size=40) | st.text(max_size=20).map(lambda text: text.encode()))
def test_any_body_is_answered(body: bytes) -> None:
    world = World()
    before = world.state()
    answer = world.put(f"{VM}/rate", body)
    assert answer.status == 400
    assert world.state() == before


def test_reload(world: World) -> None:
    world.put(f"{VM}/rate", {"rate": "5Mbps"})
    before = world.state()
    world.text = FILE.replace("rate: 70Mbps", "rtae: 70Mbps").replace("60Mbps", "-1")
    answer = world.api.handle("POST", "/v1/reload")
    assert answer.status == 400
    fields = [error["field"] for error in answer.body["errors"]]
    assert fields == [
        "tenants.red.destinations[0].rtae",
        "tenants.red.vms.a.destinations[1].rate",
    ]
    assert answer.body["error"] == answer.body["errors"][0]
    world.switch.run()
    assert world.state() == before
    world.text = FILE.replace("70Mbps", "71Mbps")
    answer = world.api.handle("POST", "/v1/reload")
    assert answer.status == 200
    assert answer.body == {
        "added": 0,
        "removed": 0,
        "rates_changed": 1,
        "live_changes_kept": 1,
        "live_changes_dropped": 0,
    }
    world.switch.run()
    assert world.kbps("red->10.2.0.0/16") == 71_000
    assert world.kbps("red/a") == 5_000


def test_views(world: World) -> None:
    status = world.api.handle("GET", "/v1/status").body
    assert status["in_sync"] is True
    switch = status["switches"]["0000000000000001"]
    assert (switch["meters"], switch["missing_ports"]) == (4, ["absent"])
    assert set(status["meters"].values()) >= {"red/a", "red/a->10.0.0.9"}
    meters = world.api.handle("GET", "/v1/meters").body["0000000000000001"]
    a = next(meter for meter in meters if meter["owner"] == "red/a")
    assert a["flags"] == ["KBPS"]
    assert a["bands"] == [{"type": "DROP", "rate": 300_000, "burst_size": 0}]
    tenants = world.api.handle("GET", "/v1/tenants").body["tenants"]
    assert tenants["red"]["vms"]["gone"]["switches"] == []
    assert tenants["red"]["vms"]["a"]["destinations"]["10.0.0.9"]["rate"] == "50Mbps"
    alone = world.api.handle("GET", "/v1/tenants/red").body
    assert {**tenants["red"], "spec": alone["spec"]} == alone
    assert world.api.handle("GET", "/v1/tenants/red/vms").body == tenants["red"]["vms"]


# The same through a real server.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    directory = tmp_path_factory.mktemp("controller")
    running = Controller(directory, FILE, "--rest-name", "ctl.example")
    try:
        yield running.start()
    finally:
        running.stop()


Ask = Callable[..., tuple[int, Any]]


@pytest.fixture
def ask(server: Controller) -> Iterator[Ask]:
    parts = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)

    def ask(method: str, path: str | bytes, body: Any = None, **headers: str) -> tuple[int, Any]:
        quoted = urllib.parse.quote(path)
        connection.request(
            method, quoted, body, headers, encode_chunked="Transfer-Encoding" in headers
        )
        answer = connection.getresponse()
        data = answer.read()
        kind = "problem+json" if answer.status >= 400 else "json"
        assert answer.headers["Content-Type"] == f"application/{kind}", data
        return answer.status, json.loads(data)

    yield ask
    connection.close()


def test_bad_requests_on_one_real_connection(ask: Ask) -> None:
    before = ask("GET", "/v1/tenants")
    for method, path, body, status, field, message in BAD:
        if path == "/v1/tenants/red/vms//rate":
            continue
        answered, answer = ask(method, path, body)
        assert (answered, answer["error"]["field"]) == (status, field), (path, body[:50])
        assert message in answer["error"]["message"]
    assert ask("GET", "/v1/tenants") == before


def test_a_large_chunked_body_is_refused(ask: Ask) -> None:
    pieces = (b" " * 1024 for _ in range(80))
    status, answer = ask("PUT", f"{VM}/rate", pieces, **{"Transfer-Encoding": "chunked"})
    assert (status, answer["error"]["field"]) == (413, "body")


def test_a_chunked_body_is_read(ask: Ask) -> None:
    pieces = iter([b'{"rate": ', b'"6Mbps"}'])
    status, answer = ask("PUT", f"{VM}/rate", pieces, **{"Transfer-Encoding": "chunked"})
    assert (status, answer["new_rate"]) == (503, "6Mbps")
    assert "no connected switch" in answer["reason"]


@pytest.mark.parametrize(
    ("header", "value"),
    [("Origin", "http://evil.example"), ("Origin", "null"), ("Origin", "")]
    + [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Site", "same-site")]
    + [("Host", "evil.example"), ("Host", "evil.example:8080"), ("Host", "localhost.evil.example")]
    + [("Host", "127.0.0.1.evil.example"), ("Host", "[127.0.0.1]"), ("Host", "[localhost]")]
    + [("Host", "::1"), ("Host", "127.1"), ("Host", "")],
)
def test_what_a_web_page_asks_for_is_refused(ask: Ask, header: str, value: str) -> None:
    before = ask("GET", "/v1/tenants")
    for method, path, body in (
        ("PUT", f"{VM}/rate", b'{"rate": "5Mbps"}'),
        ("POST", "/v1/reload", None),
        ("GET", "/v1/tenants", None),
        ("GET", "/metrics", None),
    ):
        status, answer = ask(method, path, body, **{header: value})
        error = answer["error"]
        assert (status, error["field"], error["value"]) == (403, header, value), (method, path)
        assert error["allowed"]
    assert ask("GET", "/v1/tenants") == before


@pytest.mark.parametrize(
    ("header", "value"),
    [("Sec-Fetch-Site", "none"), ("Sec-Fetch-Site", "same-origin")]
    + [("Host", "localhost"), ("Host", "LocalHost:8080"), ("Host", "192.0.2.1:80")]
    + [("Host", "[::1]"), ("Host", "[fd00::1]:8080"), ("Host", "Ctl.Example:8080")],
)
def test_what_is_no_web_page_is_answered(ask: Ask, header: str, value: str) -> None:
    status, answer = ask("GET", VM, None, **{header: value})
    assert (status, answer["file_rate"]) == (200, "300Mbps")


def test_the_name_listened_on_is_answered(tmp_path: Path) -> None:
    # Not an IP address as Host has it, and still what every resolver knows.
    running = Controller(tmp_path, FILE, "--rest-listen", "127.1:0")
    try:
        running.start()
        assert running.url.startswith("http://127.1:")
        running.get("/v1/status")
    finally:
        running.stop()


def test_a_path_that_is_not_utf8(ask: Ask) -> None:
    for path in (b"/v1/\xff", b"/v1/tenants/\xc3/vms/a/rate", b"/v1/\xed\xa0\x80"):
        status, answer = ask("GET", path)
        assert (status, answer["error"]["field"]) == (400, "path")
        assert answer["error"]["value"] == urllib.parse.quote(path)
        assert "not UTF-8" in answer["error"]["message"]
    assert ask("GET", "/v1/tenants")[0] == 200


def test_bodies_nested_to_any_depth(ask: Ask) -> None:
    # Somewhere here is what Python reads and would not write, or show, again.
    for depth in (1, 50, *range(100, 1000, 25), 2000, 30_000):
        for body in (
            b"[" * depth + b"]" * depth,
            b'{"rate": ' + b"[" * depth + b"]" * depth + b"}",
        ):
            status, answer = ask("PUT", f"{VM}/rate", body)
            assert (status, answer["error"]["field"] in ("body", "rate")) == (400, True), depth
            assert isinstance(answer["error"]["value"], str)
            assert len(answer["error"]["value"]) <= 60


def test_quoted_prefixes(server: Controller, ask: Ask) -> None:
    for quoted in ("2001:db8::/32", "2001%3Adb8%3A%3A%2F32"):
        path = f"{server.url}{VM}/destinations/{quoted}/rate"
        assert server.session.get(path, timeout=20).json()["destination"] == "2001:db8::/32"


def test_a_port_that_is_taken(server: Controller, tmp_path: Path) -> None:
    port = urllib.parse.urlsplit(server.url).netloc
    import subprocess

    from controller_harness import ROOT

    result = subprocess.run(
        [
            str(ROOT / "utilities" / "fb-controller"),
            *("--config", str(server.config), "--rest-listen", port),
            *("--ofp-listen", "127.0.0.1:0"),
        ],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=tmp_path,
    )
    assert result.returncode == 1
    assert f"cannot listen on {port}: Address already in use" in result.stderr
