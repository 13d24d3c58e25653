"""What was confirmed is never lost: the state, its history, and the deaths it survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller_harness import ROOT, Controller, wait_for
from controller_pipeline import FakeSwitch
from fbrates import config, state
from fbrates.dbserver import Server
from fbrates.differences import differences
from fbrates.loader import InvalidConfig
from fbrates.rest import Api
from fbrates.service import Service, UnknownName
from fbrates.store import Forgetful, Keeper, Operation, StoreDoubt, StoreError
from hostile import examples
from ovsdb_store import OvsdbStore
from test_controller_plan import FILE, PORTS, configs

SHARING = """
ports: {up: {max-rate: 300Mbps}}
tenants:
  t:
    vms:
      a: {port: a, min-rate: 100Mbps, destinations: [{to: 10.0.0.9, rate: 5Mbps}]}
      b: {port: b, shares: up, weight: 2}
"""
ROUNDS = int(os.environ.get("FB_ROUNDS", "3"))
Start = Callable[..., Controller]


class World:
    """Controllers that come one after the other, on one store."""

    def __init__(self, text: str = FILE, store: Any = None) -> None:
        self.text = text
        self.store = store if store is not None else Forgetful()
        self.now = 1000.0
        self.restart()

    def restart(self) -> Service:
        self.service = Service(
            lambda: config.parse(self.text),
            threading.Event,
            lambda: self.now,
            lambda: self.now,
            store=self.store,
        )
        return self.service

    def limit(self, key: str) -> Any:
        return next(item for item in self.service.config.limits() if item.key == key)

    def picture(self) -> Any:
        """All that must not be forgotten."""
        service = self.service
        return (
            service.config, service.rates, service.shares, service.port_rates, service.numbers,
            service.retired, service.closed, service.taken_on,
        )  # fmt: skip


@examples(60)
@given(configs(), st.lists(st.tuples(st.integers(0, 99), st.integers(0, 5000)), max_size=6))
def test_all_comes_back(text: str, changes: list[tuple[int, int]]) -> None:
    world = World(text)
    limits = list(world.service.config.limits())
    for index, mbps in changes if limits else []:
        limit = limits[index % len(limits)]
        world.service.set_rate(limit, mbps * 1_000_000 or None)
    before = world.picture()
    # By way of JSON, as a database has it.
    assert world.store.rows is not None
    rows = {
        table: {tuple(key): row for key, row in json.loads(json.dumps(list(items.items())))}
        for table, items in world.store.rows.items()
    }
    world.store.rows = rows
    world.restart()
    assert world.picture() == before
    # What is exported says the same, and is a file.
    exported = config.parse(world.service.export_text())
    assert {limit.key: limit.rate for limit in exported.limits()} == world.service.rates
    assert differences(exported, world.service.wanted()) == []


def test_shares_and_ports_come_back() -> None:
    world = World(SHARING)
    world.service.set_share(world.service.vm("t", "b"), weight=7, max_rate=200_000_000)
    world.service.set_port_rate("up", 400_000_000)
    before = world.picture()
    world.restart()
    assert world.picture() == before
    assert config.parse(world.service.export_text()).shares() == world.service.shares


def test_what_switches_said_comes_back() -> None:
    world = World()
    switch = FakeSwitch(PORTS)
    switch.connect(world.service)
    switch.run()
    world.text = FILE.replace("      m: {mac: 02:00:00:00:00:0a, rate: 10Mbps}\n", "")
    world.service.reload()
    assert world.service.retired and world.service.closed
    world.service.save_soft()
    before = world.picture()
    world.restart()
    assert world.picture() == before
    # The new one knows that the switch's meters are ours, flows or none.
    switch.flows.clear()
    switch.connect(world.service)
    switch.run()
    assert world.service.status_view()["in_sync"]


def test_a_file_beside_a_full_store_changes_nothing() -> None:
    world = World()
    world.service.set_rate(world.limit("red/a"), 5_000_000)
    before = world.picture()
    world.restart()
    # The file says what it said, and the store something else.
    assert world.service.file_differs == ["~ red/a: 5Mbps -> 300Mbps"]
    world.text = "tenants: {}"
    world.restart()
    assert world.picture() == before
    assert "- red/a" in world.service.status_view()["file_differs"]
    world.text = "tenants: ["
    world.restart()
    assert world.picture() == before
    assert "not YAML" in str(world.service.last_reload_error)


def test_an_empty_store_needs_a_file() -> None:
    with pytest.raises(InvalidConfig):
        World("tenants: [")


def test_applying_a_file() -> None:
    world = World()
    world.service.set_rate(world.limit("red/a"), 5_000_000)
    other = config.parse(FILE.replace("rate: 100Mbps}\n      i:", "rate: 101Mbps}\n      i:"))
    expected = ["~ blue/b: 100Mbps -> 101Mbps", "~ red/a: 5Mbps -> 300Mbps"]
    before = world.picture()
    assert world.service.apply(other, dry_run=True).changes == expected
    assert world.picture() == before
    assert world.service.apply(other, "me").changes == expected
    assert world.service.rates["red/a"] == 300_000_000
    assert world.service.apply(other).changes == []
    last = world.service.history()[-1]
    assert (last.who, last.what) == ("me", "applied a file: " + "; ".join(expected))
    with pytest.raises(InvalidConfig, match="at once"):
        world.service.apply(config.parse("tenants: {}"))
    assert world.service.apply(config.parse("tenants: {}"), force=True).changes
    assert world.service.rates == {}


def test_going_back() -> None:
    world = World()
    pictures = {1: world.service.rates.copy()}
    for number, rate in enumerate((5, 6, 7), 2):
        world.service.set_rate(world.limit("red/a"), rate * 1_000_000, "me")
        pictures[number] = world.service.rates.copy()
    world.service.apply(config.parse("tenants: {}"), force=True)
    assert [entry.number for entry in world.service.history()] == [1, 2, 3, 4, 5]
    for number in (3, 4, 1, 2):
        assert world.service.rollback(number, "me").changes
        assert world.service.rates == pictures[number]
    world.restart()
    assert world.service.rates == pictures[2]
    for unknown in (0, 99):
        with pytest.raises(UnknownName):
            world.service.rollback(unknown)


class Refusing(Forgetful):
    """A store that can be told to fail."""

    error: StoreError | None = None

    def commit(self, operations: Any, entry: Any, first: bool = False) -> None:
        if isinstance(self.error, StoreDoubt):
            super().commit(operations, entry, first)
        if self.error is not None:
            raise self.error
        super().commit(operations, entry, first)


def test_what_is_not_stored_is_not_done() -> None:
    world = World(store=Refusing())
    switch = FakeSwitch(PORTS)
    switch.connect(world.service)
    switch.run()
    api = Api(world.service, lambda: world.now)
    before = (world.picture(), dict(switch.meters), dict(switch.flows))
    world.store.error = StoreError("the disk is full")
    switch.changes()
    for method, path, body in (
        ("PUT", "/v1/tenants/red/vms/a/rate", b'{"rate": "5Mbps"}'),
        ("PUT", "/v1/tenants/red/destinations/10.2.0.0/16/rate", b'{"rate": "5Mbps"}'),
        ("POST", "/v1/apply", json.dumps({"file": SHARING, "force": True}).encode()),
    ):
        answer = api.handle(method, path, body)
        assert (answer.status, answer.body["error"]["field"]) == (503, "database")
        assert "the disk is full" in answer.body["error"]["message"]
    switch.run()
    assert (world.picture(), switch.meters, switch.flows) == before
    assert switch.changes() == []


def test_what_may_have_been_stored_is_looked_up() -> None:
    world = World(store=Refusing())
    switch = FakeSwitch(PORTS)
    switch.connect(world.service)
    switch.run()
    world.store.error = StoreDoubt("no answer")
    with pytest.raises(StoreDoubt):
        world.service.set_rate(world.limit("red/a"), 5_000_000)
    world.store.error = None
    # It was: so it is in force, without anybody asking again.
    world.service.save_soft()
    switch.run()
    assert world.service.rates["red/a"] == 5_000_000
    assert switch.meters[world.service.numbers.meters["red/a"]].rate_kbps == 5_000


def test_applying_over_rest() -> None:
    world = World()
    api = Api(world.service, lambda: world.now)
    for body in ({}, {"file": 5}, {"file": "tenants: ["}, {"file": FILE, "dry_run": 1},
                 {"file": FILE, "more": 1}, {"file": "tenants: {}"}):
        answer = api.handle("POST", "/v1/apply", json.dumps(body).encode())
        assert answer.status == 400 and answer.body["error"]["message"], body
    text = FILE.replace("300Mbps", "301Mbps")
    body = json.dumps({"file": text}).encode()
    answer = api.handle("POST", "/v1/apply", body, who="me")
    assert (answer.status, answer.body["changes"]) == (200, ["~ red/a: 300Mbps -> 301Mbps"])
    (first, second) = api.handle("GET", "/v1/history").body["history"]
    assert (first["number"], second["number"], second["who"]) == (1, 2, "me")
    assert api.handle("POST", "/v1/history/1/rollback").status == 200
    assert world.service.rates["red/a"] == 300_000_000
    for bad, status in (("x", 400), ("77", 404), ("9" * 30, 400)):
        assert api.handle("POST", f"/v1/history/{bad}/rollback").status == status
    text = api.handle("GET", "/v1/export").body["file"]
    assert differences(config.parse(text), world.service.wanted()) == []


# A real ovsdb-server.


def start_thread(function: Callable[[], None]) -> None:
    threading.Thread(target=function, daemon=True).start()


def connect(server: Server) -> OvsdbStore:
    return OvsdbStore(server.remote, threading.Event, start_thread)


@pytest.fixture
def server(ovs_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="fb-") as directory:
        running = Server(Path(directory))
        try:
            yield running
        finally:
            running.close()


def test_a_database_has_all_of_it(server: Server) -> None:
    store = connect(server)
    world = World(SHARING.replace("b: {", 'b-ü: {'.replace("ü", "u")), store)
    switch = FakeSwitch({"a": 1, "b": 2})
    switch.connect(world.service)
    switch.run()
    for mbps in range(1, 30):
        world.service.set_rate(world.limit("t/a->10.0.0.9"), mbps * 1_000_000, "me")
    world.service.set_share(world.service.vm("t", "a"), weight=9)
    world.text = "unknown_sources: forward\ntenants: {}"
    world.service.reload(force=True)
    world.service.save_soft()
    before, history = world.picture(), world.service.history()
    store.close()
    world.store = connect(server)
    world.restart()
    assert world.picture() == before
    assert world.service.history() == history
    assert len(world.service.closed) == 2
    world.service.rollback(30)
    assert world.service.rates["t/a->10.0.0.9"] == 29_000_000
    world.store.close()


def test_a_second_controller_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = connect(server)
    assert first.load() is None
    monkeypatch.setattr("ovsdb_store.CONNECT_TIMEOUT", 1.0)
    with pytest.raises(StoreError, match="another controller has it"):
        connect(server)
    first.close()
    monkeypatch.undo()
    connect(server).close()


def test_what_is_more_than_a_socket_takes(server: Server) -> None:
    vms = ", ".join(f"v{n}: {{port: p{n}, rate: 1Mbps}}" for n in range(1000))
    world = World(f"tenants: {{t: {{vms: {{{vms}}}}}}}", connect(server))
    before = world.picture()
    world.service.apply(config.parse("tenants: {}"), force=True)
    world.service.rollback(1)
    world.store.close()
    world.store = connect(server)
    world.restart()
    assert world.service.rates == before[1] and world.service.config == before[0]
    world.store.close()


def test_a_database_that_has_something_is_not_begun_anew(server: Server) -> None:
    store = connect(server)
    row = Operation("Port", ("p",), {"name": "p", "max_rate": 1})
    store.commit([row], None, first=True)
    with pytest.raises(StoreError, match="not empty"):
        store.commit([row], None, first=True)
    store.close()


def test_rows_are_there_when_they_are_asked_for(server: Server) -> None:
    """Not only that there is a connection: an empty answer would be taken for an empty store."""
    store = connect(server)
    many = [
        Operation("Port", (f"p{n}",), {"name": f"p{n}", "max_rate": n}) for n in range(1, 2000)
    ]
    store.commit(many, None, first=True)
    store.close()
    for _ in range(20):
        again = connect(server)
        rows = again.load()
        assert rows is not None and len(rows["Port"]) == len(many)
        again.close()


def test_a_change_waits_for_a_server_that_comes_back(server: Server) -> None:
    store = connect(server)
    keeper = Keeper(store, time.time)
    keeper.do([Operation("Port", ("p",), {"name": "p", "max_rate": 1})], "me", "one")
    assert server.process is not None
    server.process.kill()
    server.process.wait()
    change = [Operation("Port", ("p",), {"name": "p", "max_rate": 2})]
    waiting = threading.Thread(target=keeper.do, args=(change, "me", "two"))
    waiting.start()
    time.sleep(0.5)  # It finds nobody there.
    assert waiting.is_alive()
    # Here: it ends with the thread that starts it.
    server.revive()
    waiting.join()
    rows = store.load()
    assert rows is not None and rows["Port"]["p",]["max_rate"] == 2
    assert [entry.what for entry in store.history()] == ["one", "two"]
    store.close()


def test_a_damaged_file_is_not_taken_for_less(server: Server) -> None:
    store = connect(server)
    keeper = Keeper(store, time.time)
    for number in range(1, 20):
        row = {"name": "p", "max_rate": number}
        keeper.do([Operation("Port", ("p",), row)], "me", f"to {number}")
    store.close()
    server.close()
    data = bytearray(server.database.read_bytes())
    data[len(data) // 2] ^= 1
    server.database.write_bytes(data)
    with pytest.raises(StoreError, match="damaged"):
        Server(server.directory)
    assert server.database.read_bytes() == data


def test_a_record_that_was_being_written_is_no_damage(server: Server) -> None:
    store = connect(server)
    keeper = Keeper(store, time.time)
    for number in range(1, 4):
        keeper.do([Operation("Port", ("p",), {"name": "p", "max_rate": number})], "me", "one")
    store.close()
    server.close()
    data = server.database.read_bytes()
    for cut in (1, 30, 100):
        server.database.write_bytes(data[:-cut])
        again = Server(server.directory)
        store = connect(again)
        rows = store.load()
        assert rows is not None and rows["Port"]["p",]["max_rate"] == 2
        store.close()
        again.close()


# Real processes.


def database_of(running: Controller) -> int:
    """The process id of a controller's own ovsdb-server."""
    assert running.process is not None
    pid = running.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (found,) = [int(c) for c in children if "ovsdb" in Path(f"/proc/{c}/comm").read_text()]
    return found


def put(running: Controller, rate: int) -> int:
    path = f"{running.url}/v1/tenants/red/vms/a/rate"
    headers = {"Prefer": "respond-async"}
    answer = running.session.put(path, json={"rate_bps": rate}, headers=headers, timeout=20)
    return answer.status_code


def rate_of(running: Controller) -> int:
    return int(running.get("/v1/tenants/red/vms/a/rate")["rate_bps"])


@pytest.mark.timeout(60 + 20 * ROUNDS)
def test_killed_right_after_the_answer(ovs_tree: Path, controller: Start) -> None:
    """Controller and database, by SIGKILL: what was answered is there again.

    There is no switch, so that 202 means: stored, and not in force yet.
    """
    running = controller(FILE)
    history = len(running.get("/v1/history")["history"])
    for number in range(1, ROUNDS + 1):
        pid = database_of(running)
        assert put(running, number * 1_000_000) == 202
        os.kill(pid, signal.SIGKILL)
        running.stop(signal.SIGKILL)
        running.start()
        assert rate_of(running) == number * 1_000_000, f"round {number}"
    assert len(running.get("/v1/history")["history"]) == history + ROUNDS


def test_the_database_is_started_again(ovs_tree: Path, controller: Start) -> None:
    running = controller(FILE)
    assert put(running, 2_000_000) == 202
    os.kill(database_of(running), signal.SIGKILL)
    wait_for("a change that is stored", lambda: put(running, 3_000_000) == 202)
    running.stop()
    running.start()
    assert rate_of(running) == 3_000_000
    assert running.stop() == 0
    assert running.process is not None


def test_a_database_that_is_away_is_said_so(server: Server, controller: Start) -> None:
    running = controller(FILE, "--db", server.remote)
    assert put(running, 2_000_000) == 202
    assert server.process is not None
    server.process.kill()
    server.process.wait()
    for _ in range(2):
        began = time.monotonic()
        assert put(running, 3_000_000) == 503
        assert time.monotonic() - began < 15
        assert rate_of(running) == 2_000_000
    server.revive()
    wait_for("a change that is stored", lambda: put(running, 4_000_000) == 202)
    assert rate_of(running) == 4_000_000
    # What was answered 503 was not done later, behind what came after it.
    time.sleep(1)
    assert rate_of(running) == 4_000_000


def test_the_commands(ovs_tree: Path, controller: Start, tmp_path: Path) -> None:
    running = controller(FILE)

    def ctl(*arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(ROOT / "utilities" / "flowbundler-ctl"), *arguments], input=answer,
            env={**os.environ, "FLOWBUNDLER_URL": running.url}, capture_output=True, text=True,
            timeout=20)

    assert put(running, 2_000_000) == 202
    file = tmp_path / "tenants.yaml"
    file.write_text(ctl("export").stdout)
    assert ctl("apply", str(file)).stdout == "nothing to change\n"
    file.write_text(FILE)
    shown = "~ red/a: 2Mbps -> 300Mbps\n"
    assert ctl("apply", str(file), "--dry-run").stdout == shown
    done = ctl("apply", str(file), answer="n\n")
    assert (done.returncode, rate_of(running)) == (1, 2_000_000)
    assert ctl("apply", str(file), answer="y\n").returncode == 0
    assert rate_of(running) == 300_000_000
    lines = ctl("history").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["N", "1", "2", "3"]
    assert "REST from 127.0.0.1" in lines[2] and "red/a: 300Mbps -> 2Mbps" in lines[2]
    assert ctl("rollback", "2", "--yes").returncode == 0
    assert rate_of(running) == 2_000_000
    done = ctl("rollback", "99", "--yes")
    assert (done.returncode, done.stdout) == (1, "")
    assert "unknown change 99" in done.stderr
    done = ctl("apply", str(tmp_path / "none"))
    assert done.returncode == 1 and "No such file" in done.stderr


def test_state_is_only_ours(ovs_tree: Path, controller: Start) -> None:
    running = controller(FILE)
    assert (running.directory / "state").stat().st_mode & 0o077 == 0
    assert state.INDEX.keys() < json.loads(
        (ROOT / "controller" / "fbrates" / "flowbundler.ovsschema").read_text())["tables"].keys()
