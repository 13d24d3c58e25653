"""Tenants, VMs, destinations and ports made, changed and deleted one by one over REST."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

import fbrates.service
from controller_pipeline import FakeSwitch
from fbrates import config, resources
from fbrates.answers import PROBLEM, Response
from fbrates.rest import Api
from fbrates.service import Service
from fbrates.store import Forgetful
from test_controller_rest import PumpedEvent

FILE = """
ports: {up: {max-rate: 300Mbps}}
tenants:
  red:
    rate: 900Mbps
    destinations: [{to: 10.2.0.0/16, rate: 70Mbps}]
    vms:
      a: {port: vm-a, rate: 300Mbps, destinations: [{to: 10.0.0.9, rate: 50Mbps}]}
      s: {port: vm-s, min-rate: 100Mbps}
  blue: {vms: {b: {port: vm-b, mac: "02:00:00:00:00:0b", rate: 20Mbps}}}
"""
PORTS = {"vm-a": 1, "vm-s": 2, "vm-b": 3, "vm-c": 4}
RED, A = "/v1/tenants/red", "/v1/tenants/red/vms/a"
NAME = "0000000000000001"


class World:
    """A controller with a store, and a switch."""

    def __init__(self, store: Forgetful | None = None) -> None:
        self.text = FILE
        self.now = 50.0
        self.obeying = True
        self.store = store or Forgetful()
        self.switch = FakeSwitch(PORTS)
        self.switch.shapes = True
        self.service = Service(
            lambda: config.parse(self.text),
            lambda: PumpedEvent(self),  # type: ignore[arg-type]
            lambda: self.now,
            lambda: self.now,
            store=self.store,
        )
        self.api = Api(self.service, lambda: self.now)
        self.switch.connect(self.service)
        self.switch.run()

    def ask(
        self, method: str, path: str, body: Any = None, query: str = "", **headers: str
    ) -> Response:
        data = b"" if body is None else json.dumps(body).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = self.api.handle(method, path, data, given, "me", query=query)
        json.loads(answer.encode())
        return answer

    def get(self, path: str) -> Any:
        answer = self.ask("GET", path)
        assert answer.status == 200, answer.body
        return answer.body

    def kbps(self, key: str) -> int | None:
        number = self.service.numbers.meters.get(key)
        meter = self.switch.meters.get(number) if number is not None else None
        return None if meter is None else meter.rate_kbps

    def state(self) -> Any:
        meters = {number: meter.rate_kbps for number, meter in self.switch.meters.items()}
        return self.service.export_text(), meters, dict(self.switch.flows), self.store.entries

    def refused(self, method: str, path: str, body: Any = None, **more: str) -> Response:
        """A request that is refused; nothing may change."""
        before = self.state()
        answer = self.ask(method, path, body, **more)
        self.switch.run()
        assert 400 <= answer.status < 500, answer.body
        assert self.state() == before
        return answer


@pytest.fixture
def world() -> World:
    return World()


def test_a_vm_is_made_changed_and_deleted(world: World) -> None:
    path = "/v1/tenants/blue/vms/c"
    spec = {"port": "vm-c", "rate": "40Mbps", "destinations": [{"to": "10.0.0.9", "rate": "4Mbps"}]}
    made = world.ask("PUT", path, spec)
    assert (made.status, made.body["applied"], made.headers["Location"]) == (201, True, path)
    assert made.body["switches"] == {NAME: {"applied": True, "errors": []}}
    assert (world.kbps("blue/c"), world.kbps("blue/c->10.0.0.9")) == (40_000, 4_000)
    assert world.get(path)["spec"] == spec and world.get(path)["rate"] == "40Mbps"

    # What is not said of destinations stays; what is said of them is all there is.
    assert world.ask("PUT", path, {"port": "vm-c", "rate": "30Mbps"}).status == 200
    assert (world.kbps("blue/c"), world.kbps("blue/c->10.0.0.9")) == (30_000, 4_000)
    assert (
        world.ask("PUT", path, {"port": "vm-c", "rate": "30Mbps", "destinations": []}).status == 200
    )
    assert world.kbps("blue/c->10.0.0.9") is None

    gone = world.ask("DELETE", path)
    assert (gone.status, gone.body["applied"], gone.body["spec"]) == (200, True, None)
    assert world.kbps("blue/c") is None and world.ask("GET", path).status == 404
    # Nothing that is removed becomes unlimited.
    assert world.get("/v1/closed") == {"closed": ["port vm-c"]}
    assert world.refused("DELETE", path).status == 404
    assert [(entry.who, entry.what.split(",")[0]) for entry in world.store.entries[1:]] == [
        ("me", "blue/c: made: port vm-c"),
        ("me", "blue/c: changed: port vm-c"),
        ("me", "blue/c: changed: port vm-c"),
        ("me", "blue/c: deleted"),
    ]


def test_the_same_again_changes_nothing(world: World) -> None:
    path, spec = "/v1/tenants/blue/vms/c", {"port": "vm-c", "rate": "40Mbps"}
    first = world.ask("PUT", path, spec)
    before = world.state()
    second = world.ask("PUT", path, spec)
    assert (first.status, second.status, second.body["applied"]) == (201, 200, True)
    assert second.headers["ETag"] == first.headers["ETag"]
    assert world.state() == before
    for path in (RED, A, f"{A}/destinations/10.0.0.9", "/v1/ports/up"):
        seen = world.ask("GET", path)
        answer = world.ask("PUT", path, seen.body["spec"])
        assert (answer.status, answer.headers["ETag"]) == (200, seen.headers["ETag"])


def test_a_tenant_is_made_and_deleted_with_all_that_is_its(world: World) -> None:
    path = "/v1/tenants/green"
    made = world.ask("PUT", path, {"rate": "1Gbps"})
    # Nothing of it is anywhere yet, and so nothing is in force.
    assert (made.status, made.body["applied"]) == (201, False)
    assert made.body["reason"] == "no connected switch has it"
    assert world.ask("PUT", f"{path}/vms/c", {"port": "vm-c", "rate": "40Mbps"}).status == 201
    assert (world.kbps("green"), world.kbps("green/c")) == (1_000_000, 40_000)
    # Its own rate changes, its VMs stay.
    assert world.ask("PUT", path, {"rate": "2Gbps"}).body["applied"] is True
    assert (world.kbps("green"), world.kbps("green/c")) == (2_000_000, 40_000)
    assert world.ask("DELETE", path).status == 200
    assert world.kbps("green") is None and world.kbps("green/c") is None
    assert world.get("/v1/closed") == {"closed": ["port vm-c"]}
    assert world.service.retired == {} or all(
        item.owner.startswith("green") for item in world.service.retired.values()
    )


def test_a_destination_is_made_and_deleted(world: World) -> None:
    for path, key in ((f"{A}/destinations/10.3.0.0/16", "red/a->10.3.0.0/16"),
                      (f"{RED}/destinations/10.3.0.0/16", "red->10.3.0.0/16")):  # fmt: skip
        made = world.ask("PUT", path, {"rate": "9Mbps"})
        assert (made.status, made.body["applied"], world.kbps(key)) == (201, True, 9_000)
        assert world.get(path)["spec"] == {"rate": "9Mbps"}
        assert world.ask("PUT", path, {"rate": "8Mbps", "burst": "15kB"}).status == 200
        assert world.kbps(key) == 8_000
        assert world.get(f"{path}/rate")["rate"] == "8Mbps"
        assert world.ask("DELETE", path).status == 200
        assert world.kbps(key) is None
        assert world.refused("DELETE", path).body["errors"][0]["field"] == "destination"


def test_a_port_is_made_before_those_who_share_it(world: World) -> None:
    made = world.ask("PUT", "/v1/ports/other", {"max-rate": "1Gbps"})
    assert (made.status, made.body["applied"]) == (201, True)
    assert world.ask("PUT", "/v1/ports/other", {"max-rate": "900Mbps"}).status == 200
    spec = {"port": "vm-c", "shares": "other", "min-rate": "10Mbps"}
    assert world.ask("PUT", "/v1/tenants/blue/vms/c", spec).body["applied"] is True
    assert world.kbps("blue/c") == 900_000
    # Who shared the only port that there was still shares that one.
    assert world.get(f"{RED}/vms/s/share")["port"] == "up"
    refused = world.refused("DELETE", "/v1/ports/other")
    assert (refused.status, refused.body["error"]["field"]) == (409, "tenants.blue.vms.c.shares")
    assert world.ask("DELETE", "/v1/tenants/blue/vms/c").status == 200
    assert world.ask("DELETE", "/v1/ports/other").status == 200
    assert list(world.get("/v1/ports")["ports"]) == ["up"]


def test_what_was_set_live_stays_where_it_is_not_said(world: World) -> None:
    world.ask("PUT", f"{A}/rate", {"rate": "200Mbps"})
    world.ask("PUT", f"{A}/destinations/10.0.0.9/rate", {"rate": "5Mbps"})
    world.ask("PUT", f"{RED}/rate", {"rate": "800Mbps"})
    world.ask("PUT", f"{RED}/vms/c", {"port": "vm-c", "rate": "1Mbps"})
    assert (world.kbps("red/a"), world.kbps("red/a->10.0.0.9"), world.kbps("red")) == (
        200_000, 5_000, 800_000)  # fmt: skip
    # What was applied is still what a tenant may go back to.
    assert world.get(A)["file_rate"] == "300Mbps"
    world.ask("PUT", A, {"port": "vm-a", "rate": "250Mbps"})
    assert (world.kbps("red/a"), world.kbps("red/a->10.0.0.9")) == (250_000, 5_000)


def test_it_is_there_after_a_restart(world: World) -> None:
    world.ask("PUT", "/v1/tenants/green", {"rate": "1Gbps"})
    world.ask("PUT", "/v1/tenants/green/vms/c", {"port": "vm-c", "rate": "40Mbps"})
    world.ask("DELETE", A)
    again = World(world.store)
    assert yaml.safe_load(again.service.export_text()) == yaml.safe_load(
        world.service.export_text()
    )
    assert again.get("/v1/tenants/green/vms/c")["rate"] == "40Mbps"
    assert again.ask("GET", A).status == 404
    # The file says otherwise of it, and reading it again must not undo it.
    for answer in (again.refused("POST", "/v1/reload"),):
        assert "red/a" in answer.body["detail"] and "green" in answer.body["detail"]
    again.text = again.service.export_text()
    assert again.ask("POST", "/v1/reload").status == 200
    again.text = FILE
    assert again.ask("POST", "/v1/reload").status == 200
    assert again.get(A)["rate"] == "300Mbps"


def test_going_back(world: World) -> None:
    world.ask("DELETE", A)
    number = world.get("/v1/history")["history"][-1]["number"]
    assert world.ask("POST", f"/v1/history/{number - 1}/rollback", {}).status == 200
    assert world.kbps("red/a") == 300_000
    # Nothing is edited any more: the file says the same.
    assert world.ask("POST", "/v1/reload").status == 200


# Expectations.


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RED, {"rate": "100Mbps"}),
        (A, {"port": "vm-a", "rate": "9Mbps"}),
        (f"{A}/rate", {"rate": "9Mbps"}),
        (f"{RED}/rate", {"rate": "9Mbps"}),
        (f"{A}/destinations/10.0.0.9", {"rate": "9Mbps"}),
        (f"{A}/destinations/10.0.0.9/rate", {"rate": "9Mbps"}),
        (f"{RED}/destinations/10.2.0.0/16/rate", {"rate": "9Mbps"}),
        (f"{RED}/vms/s/share", {"weight": 7}),
        ("/v1/ports/up", {"max-rate": "200Mbps"}),
    ],
)
def test_a_change_of_what_was_seen_only(world: World, path: str, body: Any) -> None:
    tag = world.ask("GET", path).headers["ETag"]
    for other in ('"x"', f"W/{tag}", '"a", "b"'):
        refused = world.refused("PUT", path, body, If_Match=other)
        assert (refused.status, refused.body["error"]["field"]) == (412, "If-Match")
        assert tag in refused.body["error"]["allowed"]
    assert world.refused("PUT", path, body, If_None_Match="*").status == 412
    answer = world.ask("PUT", path, body, If_Match=f'"x", {tag}')
    assert answer.status == 200
    assert answer.headers["ETag"] == world.ask("GET", path).headers["ETag"] != tag
    # Who has seen what was before is told.
    assert world.refused("PUT", path, body, If_Match=tag).status == 412
    assert world.ask("PUT", path, body, If_Match="*").status == 200


def test_the_tag_is_of_all_that_is_in_it(world: World) -> None:
    tags = [world.ask("GET", path).headers["ETag"] for path in (RED, A, "/v1/tenants/blue")]
    world.ask("PUT", f"{A}/destinations/10.0.0.9/rate", {"rate": "9Mbps"})
    now = [world.ask("GET", path).headers["ETag"] for path in (RED, A, "/v1/tenants/blue")]
    assert [old == new for old, new in zip(tags, now, strict=True)] == [False, False, True]
    assert world.refused("DELETE", RED, If_Match=tags[0]).status == 412
    assert world.ask("DELETE", RED, If_Match=now[0]).status == 200


def test_only_what_is_not_there(world: World) -> None:
    body = {"port": "vm-c", "rate": "9Mbps"}
    assert world.refused("PUT", f"{RED}/vms/c", body, If_Match="*").status == 412
    assert world.ask("PUT", f"{RED}/vms/c", body, If_None_Match="*").status == 201
    assert world.refused("PUT", f"{RED}/vms/c", body, If_None_Match="*").status == 412


# Refusals.


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "fields"),
    [
        ("PUT", f"{RED}/vms/c", {"prot": "vm-c", "rate": "1Mbps", "burst": 5}, 400,
         ["vm", "burst", "prot"]),
        ("PUT", f"{RED}/vms/c", {"port": "vm-a", "rate": "1Mbps"}, 400, ["port"]),
        ("PUT", f"{RED}/vms/c", {"mac": "02:00:00:00:00:0b", "rate": "1Mbps"}, 400, ["mac"]),
        ("PUT", f"{RED}/vms/c", {"port": "vm-c"}, 400, ["rate"]),
        ("PUT", f"{RED}/vms/c", {"port": None, "rate": None}, 400, ["port", "rate"]),
        ("PUT", f"{RED}/vms/c", {}, 400, ["vm", "rate"]),
        ("PUT", f"{RED}/vms/c", [], 400, ["body"]),
        ("PUT", f"{RED}/vms/c d", {"port": "vm-c", "rate": "1Mbps"}, 400, ["vm"]),
        ("PUT", "/v1/tenants/no way", {}, 400, ["tenant"]),
        ("PUT", f"{RED}/vms/c",
         {"port": "vm-c", "rate": "1Mbps", "destinations": [{"to": "x", "rate": 0}]}, 400,
         ["destinations[0].rate", "destinations[0].to"]),
        ("PUT", f"{RED}/vms/c", {"port": "vm-c", "shares": "none"}, 400, ["shares"]),
        ("PUT", f"{RED}/vms/s", {"port": "vm-s", "min-rate": "400Mbps"}, 400, ["min-rate"]),
        ("PUT", f"{A}/destinations/10.0.0.9", {"to": "10.0.0.8", "rate": "1Mbps"}, 400, ["to"]),
        ("PUT", f"{A}/destinations/10.0.0.9", {"rate": "x"}, 400, ["rate"]),
        ("PUT", f"{A}/destinations/10.0.0.9/8", {"rate": "1Mbps"}, 400, ["destination"]),
        ("PUT", "/v1/tenants/none/vms/c", {"port": "vm-c", "rate": "1Mbps"}, 404, ["tenant"]),
        ("PUT", f"{RED}/vms/none/destinations/10.0.0.9", {"rate": "1Mbps"}, 404, ["vm"]),
        ("PUT", "/v1/tenants/", {}, 405, ["method"]),
        ("PUT", "/v1/ports/p q", {"max-rate": "1Gbps"}, 400, ["port"]),
        ("PUT", "/v1/ports/new", {}, 400, ["max-rate"]),
        ("DELETE", "/v1/ports/up", None, 409, ["tenants.red.vms.s.min-rate"]),
        ("DELETE", "/v1/ports/none", None, 404, ["port"]),
        ("DELETE", "/v1/tenants/none", None, 404, ["tenant"]),
        ("DELETE", "/v1/tenants/none/vms/c", None, 404, ["tenant"]),
        ("DELETE", f"{RED}/vms/none", None, 404, ["vm"]),
        ("GET", f"{RED}/vms/none", None, 404, ["vm"]),
    ],
)  # fmt: skip
def test_each_field_that_is_wrong_is_named(
    world: World, method: str, path: str, body: Any, status: int, fields: list[str]
) -> None:
    answer = world.refused(method, path, body)
    assert (answer.status, [error["field"] for error in answer.body["errors"]]) == (status, fields)
    # RFC 9457.
    assert answer.content_type == PROBLEM
    assert (answer.body["status"], answer.body["type"]) == (status, "about:blank")
    assert answer.body["title"] and answer.body["detail"] == answer.body["error"]["message"]


def test_many_vms_are_not_lost_by_a_slip(world: World) -> None:
    for number in range(20):
        world.ask("PUT", f"{RED}/vms/m{number}", {"port": f"p{number}", "rate": "1Mbps"})
    refused = world.refused("PUT", RED, {"vms": {}})
    assert "would be removed at once" in refused.body["detail"]
    assert world.refused("PUT", RED, {"vms": {}}, query="force=yes").status == 400
    assert world.ask("PUT", RED, {"vms": {}}, query="force=true").status == 200
    assert world.get(f"{RED}/vms") == {}


# In force, or said not to be.


def test_a_switch_that_refuses_is_told(world: World) -> None:
    world.switch.max_meters = len(world.switch.meters)
    answer = world.ask("PUT", f"{RED}/vms/c", {"port": "vm-c", "rate": "9Mbps"})
    assert (answer.status, answer.body["stored"], answer.body["applied"]) == (502, True, False)
    assert "OUT_OF_METERS" in answer.body["detail"]
    world.switch.max_meters = 100
    for _ in range(5):
        world.now += 31
        world.service.tick()
        world.switch.run()
    assert world.get(answer.headers["Location"])["state"] == "applied"


def test_who_applies_a_file_is_told_what_a_switch_refuses(world: World) -> None:
    """An error about nobody in particular was told to nobody, and the answer was 200."""
    world.switch.max_meters = len(world.switch.meters)
    text = FILE.replace("  blue:", "      c: {port: vm-c, rate: 9Mbps}\n  blue:")
    answer = world.ask("POST", "/v1/apply", {"file": text})
    assert (answer.status, answer.body["stored"]) == (502, True)
    assert "OUT_OF_METERS" in answer.body["detail"]


def test_a_switch_that_is_silent_is_not_waited_for(world: World) -> None:
    world.obeying = False
    answer = world.ask("PUT", f"{RED}/vms/c", {"port": "vm-c", "rate": "9Mbps"})
    assert (answer.status, answer.body["applied"]) == (504, False)
    gone = world.ask("DELETE", A)
    assert gone.status == 504
    place = gone.headers["Location"]
    assert world.get(place)["state"] == "pending"
    world.switch.run()
    assert world.get(place)["state"] == "applied"
    assert world.get(answer.headers["Location"])["state"] == "applied"


def test_who_does_not_want_to_wait(world: World) -> None:
    path = f"{RED}/vms/c"
    answer = world.ask("PUT", path, {"port": "vm-c", "rate": "9Mbps"}, Prefer="respond-async")
    assert (answer.status, answer.body["applied"]) == (202, False)
    place = answer.headers["Location"]
    assert world.get(place)["state"] == "pending"
    world.switch.run()
    assert world.get(place)["state"] == "applied"
    world.ask("PUT", path, {"port": "vm-c", "rate": "8Mbps"})
    assert world.get(place)["state"] == "superseded"


def test_a_vm_before_its_port(world: World) -> None:
    answer = world.ask("PUT", f"{RED}/vms/later", {"port": "vm-later", "rate": "9Mbps"})
    assert (answer.status, answer.body["applied"]) == (201, False)
    place = answer.body["change"]
    assert world.get(place)["state"] == "pending"
    assert world.switch.sync is not None
    world.switch.sync.port_changed("vm-later", 9, False)
    world.switch.run()
    assert world.get(place)["state"] == "applied"


def test_switches_that_are_away_are_named(world: World) -> None:
    assert world.switch.sync is not None
    world.service.disconnect(world.switch.sync)
    answer = world.ask("DELETE", A)
    assert (answer.status, answer.body["not_connected"]) == (200, [NAME])


def test_adopting_is_in_the_history(world: World) -> None:
    assert world.ask("POST", f"/v1/switches/{NAME}/adopt").status == 200
    entry = world.store.entries[-1]
    assert (entry.who, entry.what) == ("me", f"adopted the meters of switch {NAME}")
    assert world.ask("POST", f"/v1/history/{entry.number - 1}/rollback", {}).status == 200


# Pages.


@pytest.mark.parametrize("path", ["/v1/tenants", f"{RED}/vms", "/v1/ports"])
def test_pages(world: World, path: str) -> None:
    for name in ("m3", "m1", "m2"):
        world.ask("PUT", f"/v1/tenants/{name}", {"vms": {}})
        world.ask("PUT", f"{RED}/vms/{name}", {"port": f"p{name}", "rate": "1Mbps"})
        world.ask("PUT", f"/v1/ports/{name}", {"max-rate": "1Gbps"})
    whole = world.get(path)
    whole = whole.get("tenants") or whole.get("ports") or whole
    seen: dict[str, Any] = {}
    query = "limit=2"
    while True:
        answer = world.ask("GET", path, query=query)
        part = answer.body
        part = part.get("tenants") or part.get("ports") or part
        assert 1 <= len(part) <= 2
        seen |= part
        if "Link" not in answer.headers:
            break
        link, relation = answer.headers["Link"].split("; ")
        assert relation == 'rel="next"' and link.startswith(f"<{path}?")
        query = link[1:-1].partition("?")[2]
    assert list(seen) == sorted(whole) and seen == whole


def test_pages_of_the_history(world: World) -> None:
    for rate in range(1, 6):
        world.ask("PUT", f"{A}/rate", {"rate": f"{rate}Mbps"})
    first = world.ask("GET", "/v1/history", query="limit=2")
    assert [item["number"] for item in first.body["history"]] == [1, 2]
    assert first.headers["Link"] == '</v1/history?limit=2&after=2>; rel="next"'
    rest = world.ask("GET", "/v1/history", query="after=2")
    assert [item["number"] for item in rest.body["history"]] == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("path", "query", "field"),
    [("/v1/tenants", "limit=0", "limit"), ("/v1/tenants", "limit=1001", "limit"),
     ("/v1/tenants", "limit=x", "limit"), ("/v1/tenants", "limit=٣", "limit"),
     ("/v1/tenants", "limit=1&limit=2", "query"), ("/v1/tenants", "lmit=1", "lmit"),
     ("/v1/history", "after=x", "after"), ("/v1/status", "limit=1", "limit"),
     ("/v1/status", "a&" * 20, "query")],
)  # fmt: skip
def test_queries_that_are_wrong(world: World, path: str, query: str, field: str) -> None:
    answer = world.ask("GET", path, query=query)
    assert (answer.status, answer.body["error"]["field"]) == (400, field)


def test_a_tag_depends_on_what_is_said_only() -> None:
    assert resources.tag({"a": 1, "b": 2}) == resources.tag({"b": 2, "a": 1}) != resources.tag({})


def test_unknown_names_are_the_services_too() -> None:
    assert fbrates.service.UnknownName is resources.UnknownName
