"""REST bodies, requests and files of all kinds: refused by name, or in force and visible.

Never an internal error, never an answer that is not JSON, and nothing changes with what is
refused.
"""

from __future__ import annotations

import copy
import http.client
import json
import math
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import test_controller_rest
from controller_harness import ROOT, Controller
from controller_pipeline import FakeSwitch
from fbrates import config, loader
from fbrates.rest import Api, Response
from fbrates.service import Service
from hostile import examples, strict_json
from test_controller_rest import PumpedEvent

FILE = """
ports: {up: {max-rate: 300Mbps}}
tenants:
  red:
    destinations: [{to: 10.2.0.0/16, rate: 70Mbps}]
    vms:
      a: {port: vm-a, rate: 300Mbps, destinations: [{to: 10.0.0.9, rate: 50Mbps}]}
      s: {port: vm-s, shares: up, min-rate: 100Mbps, max-rate: 200Mbps, weight: 2}
      t: {port: vm-t, shares: up}
"""
PORTS = {"vm-a": 1, "vm-s": 2, "vm-t": 3, "vhu-web": 4, "vhu-db": 5, "vhu-ci": 6, "uplink": 7}
RATES = ["/v1/tenants/red/vms/a/rate", "/v1/tenants/red/vms/a/destinations/10.0.0.9/rate",
         "/v1/tenants/red/destinations/10.2.0.0/16/rate"]
SHARES = ["/v1/tenants/red/vms/s/share", "/v1/tenants/red/vms/t/share"]
PORT = "/v1/ports/up"
KEYS = ["rate", "rate_bps", "min-rate", "max-rate", "weight"]


class World(test_controller_rest.World):
    """A controller with something of everything, and a switch."""

    def __init__(self, text: str = FILE) -> None:
        self.text = text
        self.refused: list[loader.Problem] = []
        self.now = 50.0
        self.obeying = True
        self.switch = FakeSwitch(PORTS)
        self.switch.shapes = True
        self.service = Service(self.read, lambda: PumpedEvent(self),
                               lambda: self.now, lambda: self.now)
        self.api = Api(self.service, lambda: self.now)
        self.switch.connect(self.service)
        self.switch.run()

    def read(self) -> config.Config:
        """Read the file, and note what is wrong with it."""
        try:
            return config.parse(self.text)
        except loader.InvalidConfig as error:
            self.refused = error.problems
            raise

    def state(self) -> Any:
        service = self.service
        return (*super().state(), dict(service.shares), dict(service.port_rates), service.config)

    def get(self, path: str) -> Any:
        answer = self.api.handle("GET", path)
        assert answer.status == 200, answer.body
        return strict_json(answer.encode())

    def ask(self, method: str, path: str, body: bytes = b"") -> Response:
        """A request; what is refused must be so by name, and change nothing."""
        before = self.state()
        answer = self.api.handle(method, path, body)
        data = strict_json(answer.encode())
        self.switch.run()
        assert 200 <= answer.status < 500
        if answer.status >= 400:
            error = data["error"]
            assert {"field", "value", "allowed", "message"} <= error.keys()
            assert error["message"]
            assert self.state() == before
        return answer


# Values of all kinds.

RATE_TEXTS = ["5Mbps", "300Mbps", "0.256Mbps", "unlimited", "400Gbps", "401Gbps", "1e9", "",
              " 5Mbps", "5Mbps\n", "٣Mbps", "٣", "-1kbps", "nan", "inf", "0x10", "null", "9" * 30,
              "9" * 5000]
_odd_text = st.sampled_from(["\ud800", "a\nb", "\0", "\u2028", "x" * 300, "’" * 200]) \
    | st.text(max_size=6)
_numbers = (
    st.sampled_from([0, -1, 1, 2, 999, 1000, 1500, 256_000, 256_001, 300_000_000,
                     50_000_000, 400_000_000_000, 400_000_001_000, 1 << 31, 1 << 63, 1 << 64,
                     10**4000, -10**4000])
    | st.integers(1, 300_000).map(lambda kbps: kbps * 1000)
    | st.sampled_from([0.0, -0.0, 5e7, 1e308, math.inf, -math.inf, math.nan, 1.5])
)
_scalars = _numbers | st.sampled_from(RATE_TEXTS) | _odd_text | st.none() | st.booleans()
_keys = st.sampled_from([*KEYS, "Rate", "rate ", "", "burst"]) | _odd_text
_junk = st.recursive(_scalars, lambda inner: st.lists(inner, max_size=3)
                     | st.dictionaries(_keys, inner, max_size=3), max_leaves=6)
_depths = st.sampled_from([10, 300, 900, 940, 960, 970, 980, 985, 990, 995, 1000, 5000])
_bodies = (
    st.dictionaries(st.sampled_from(KEYS), _numbers | st.sampled_from(RATE_TEXTS), min_size=1,
                    max_size=2).map(json.dumps)
    | st.dictionaries(_keys, _junk, max_size=2).map(json.dumps)
    | _junk.map(json.dumps)
    | st.builds(lambda key, depth: f'{{"{key}": {"[" * depth}{"]" * depth}}}',
                st.sampled_from(KEYS), _depths)
    | st.builds(lambda key, depth: f'{{"{key}":' * depth + "1" + "}" * depth,
                st.sampled_from(KEYS), _depths)
    | st.builds(lambda key, text: f'{{"{key}": {text}}}', st.sampled_from(KEYS),
                st.sampled_from(["1e400", "-1e400", "1E+2", "01", "+1", ".5", "0x10", "Infinity",
                                 "'x'", '"\\ud800"', '"\\x"', "9" * 4301, "1,", ""]))
)


def visible(value: Any) -> int | None:
    """The rate that a value of a body means."""
    return config.parse_rate_or_unlimited(value) or None


@examples(400)
@given(st.sampled_from([*RATES, *SHARES, PORT]), _bodies)
def test_any_body_is_refused_or_in_force(path: str, body: str) -> None:
    world = World()
    answer = world.ask("PUT", path, body.encode())
    if answer.status >= 400:
        assert isinstance(answer.body["error"]["field"], str)
        assert answer.body["error"]["allowed"] is not None
        return
    data, view = strict_json(body), world.get(path)
    assert data
    names = {"rate": "rate_bps", "rate_bps": "rate_bps", "min-rate": "min_rate_bps",
             "max-rate": "max_rate_bps"}
    for key, value in data.items():
        if key == "weight":
            assert view["weight"] == value
        else:
            assert view[names[key]] == visible(value)
    if path in RATES:
        key = {RATES[0]: "red/a", RATES[1]: "red/a->10.0.0.9", RATES[2]: "red->10.2.0.0/16"}[path]
        if view["rate_bps"] is not None:
            assert world.kbps(key) * 1000 == view["rate_bps"]


def test_the_bodies_that_were_wrong_once() -> None:
    """Answers that were not JSON, or an internal error."""
    world = World()
    for path in (RATES[0], SHARES[0], PORT):
        for body in (b'{"rate": 1e400}', b'{"max-rate": 1e400}', b'{"weight": -1e400}',
                     b'{"rate": [1e400]}'):
            assert world.ask("PUT", path, body).status == 400
    for depth in range(600, 1000, 3):
        assert world.ask("PUT", RATES[0], b'{"rate": ' + b"[" * depth + b"]" * depth
                         + b"}").status == 400


# Requests over real HTTP.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    running = Controller(tmp_path_factory.mktemp("controller"), FILE)
    try:
        yield running.start()
    finally:
        running.stop()


_segments = st.sampled_from(
    ["v1", "tenants", "red", "vms", "a", "s", "rate", "share", "ports", "up", "destinations",
     "10.0.0.9", "status", "meters", "reload", "", ".", "..", "%ff", "%00", "%0a", "%2F",
     "%252F", "%C3%A9", "%F0%9F%98%80", "%ED%A0%80", "metrics", "x" * 300]
)
_paths = st.sampled_from([*RATES, *SHARES, PORT, "/v1/status", "/metrics"]) | st.builds(
    lambda segments, query: "/v1/" + "/".join(segments) + query,
    st.lists(_segments, max_size=9), st.sampled_from(["", "?", "?rate=5Mbps", "?%ff", "#"]))
_methods = st.sampled_from(["GET", "PUT", "PUT", "POST", "DELETE", "HEAD", "PATCH", "OPTIONS",
                            "FOO"])
_headers = st.sampled_from(
    [{}, {}, {}, {"Content-Type": "text/html"}, {"Content-Encoding": "gzip"},
     {"Expect": "nonsense"}, {"Accept": "image/png"}, {"X-HTTP-Method-Override": "DELETE"},
     {"Host": ""}, {"Content-Type": "\xff"}])


def test_any_request_is_answered(server: Controller) -> None:
    parts = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)

    @examples(300)
    @given(_methods, _paths, _bodies, _headers)
    def run(method: str, path: str, body: str, headers: dict[str, str]) -> None:
        before = server.get("/v1/tenants")
        connection.request(method, path, body.encode(), headers)
        answer = connection.getresponse()
        data = answer.read()
        # There is no switch, so nothing comes in force.
        assert answer.status < 500 or answer.status == 503, (answer.status, data)
        if method != "HEAD" and answer.headers["Content-Type"] == "application/json":
            strict_json(data)
        if 400 <= answer.status < 500:
            assert server.get("/v1/tenants") == before

    run()
    connection.close()
    assert "Traceback" not in server.log.read_text()


# Files.

EVERYTHING = loader.parse((ROOT / "controller" / "examples" / "everything.yaml").read_text()).data
Path = tuple[str | int, ...]


def paths_in(data: Any, path: Path = ()) -> Iterator[Path]:
    """Give the path of each part of a file."""
    if path:
        yield path
    for key, item in data.items() if isinstance(data, dict) else (
            enumerate(data) if isinstance(data, list) else ()):
        yield from paths_in(item, (*path, key))


class Raw(str):
    """YAML as it stands."""


_raw = st.sampled_from(
    ["0x" + "f" * 5000, "9" * 5000, "1.0e999", "-1.0e999", ".inf", ".nan", "~", "!!int abc",
     "!!float x", "!!binary aGk=", "!!set {a, b}", "!!python/name:os.system x", "!x {}", "&a [*a]",
     "*nope", "2001-01-01", "1:30", "0o17", "<<", "[[[[[[[[1]]]]]]]]", "{<<: 5}", "{? [a] : b}",
     "!!int 0x" + "f" * 5000, "[" * 3000, '"\\ud800"', '"\\x07"', "\x07"]).map(Raw)
_words = st.sampled_from(["any", "normal", "static", "drop", "forward", "auto", "20ms", "3kB",
                          "10.0.0.9", "10.0.0.0/8", "::/0", "02:00:00:00:00:07", "uplink",
                          "vhu-web", "red"])
_values = _junk | _raw | _words | st.sampled_from(RATE_TEXTS)


def as_yaml(data: Any) -> str:
    """Write a file as JSON, which YAML includes, but for `Raw` parts."""
    raw: list[str] = []

    def strip(item: Any) -> Any:
        if isinstance(item, Raw):
            raw.append(item)
            return f"@raw{len(raw) - 1}@"
        if isinstance(item, dict):
            return {key: strip(value) for key, value in item.items()}
        return [strip(value) for value in item] if isinstance(item, list) else item

    text = json.dumps(strip(data), indent=1)
    for number, part in enumerate(raw):
        text = text.replace(f'"@raw{number}@"', part)
    return text


@st.composite
def changes(draw: st.DrawFn) -> tuple[Path, Any, str]:
    """Change one part of a good file: give where, the new value, and the file."""
    data = copy.deepcopy(EVERYTHING)
    path = draw(st.sampled_from(sorted(paths_in(EVERYTHING), key=str)))
    value = draw(_values)
    where: Any = data
    for part in path[:-1]:
        where = where[part]
    what = draw(st.sampled_from(["replace", "replace", "replace", "add", "delete"]))
    if what == "delete":
        del where[path[-1]]
        value = ...
    elif what == "add" and isinstance(where, dict):
        path = (*path[:-1], draw(_keys))
        where[path[-1]] = value
    else:
        where[path[-1]] = value
    return path, value, as_yaml(data)


@examples(200)
@given(changes())
def test_any_file_is_refused_or_in_force(change: tuple[Path, Any, str]) -> None:
    path, value, text = change
    world = World(as_yaml(EVERYTHING))
    world.text = text
    answer = world.ask("POST", "/v1/reload")
    if answer.status == 200:
        parsed = world.service.config
        assert parsed == config.parse(text)
        view = world.get("/v1/tenants")["tenants"]
        assert view.keys() == parsed.tenants.keys()
        for limit in parsed.limits():
            assert world.service.rates[limit.key] == limit.rate
        return
    errors = answer.body["errors"]
    assert answer.body["error"] == errors[0] and answer.status == 400
    for problem in world.refused:
        assert problem.text("f.yaml").isprintable(), problem
    # The value that cannot be right anywhere is named with its place.
    if value is None or isinstance(value, float):
        name = loader.dotted(path)
        assert any(error["field"].startswith(name) or name.startswith(error["field"])
                   for error in errors), (name, errors)


def test_files_that_ended_the_controller_once() -> None:
    huge = "0x" + "f" * 5000
    for key in ("ip", "rate", "port", "mac", "burst", "destinations", "weight"):
        text = f"tenants: {{red: {{vms: {{a: {{port: p, rate: 1Mbps, {key}: {huge}}}}}}}}}"
        with pytest.raises(loader.InvalidConfig) as caught:
            config.parse(text)
        assert all(len(problem.text()) < 500 for problem in caught.value.problems)
    with pytest.raises(loader.InvalidConfig, match="datapath id"):
        config.parse(f"switches: [{huge}]\ntenants: {{}}")
    world = World()
    for value in ("1.0e999", "[1.0e999]", "-1.0e999"):
        world.text = FILE.replace("300Mbps", value)
        assert world.ask("POST", "/v1/reload").status == 400
