"""Listeners with limits, TLS for switches, and what is read at the start: real sockets."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import resource
import socket
import ssl
import struct
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controller_harness import Controller, Switch, wait_for
from fbrates.admission import Admission, Limits

FILE = "tenants: {red: {vms: {a: {port: vm-a, rate: 3Mbps}, b: {port: vm-b, rate: 4Mbps}}}}"
DESCRIPTORS = 256
Start = Callable[..., Controller]

HELLO = struct.pack("!BBHI", 4, 0, 8, 1)


class Connection:
    """What Admission knows of a connection."""

    def __init__(self) -> None:
        self.open = True

    def fileno(self) -> int:
        return 5 if self.open else -1

    def close(self) -> None:
        self.open = False


# Who goes when there are too many.


def test_the_longest_waiting_of_the_busiest_source_goes() -> None:
    now = [0.0]
    admission = Admission(Limits(total=6, per_source=4, patience=10), lambda: now[0])
    many, few = [Connection() for _ in range(4)], [Connection() for _ in range(2)]
    for item in few:
        admission.admit(item, "b")
    for item in many:
        admission.admit(item, "a")
    later = Connection()
    admission.admit(later, "c")
    assert [item.open for item in (*many, *few, later)] == [False, *[True] * 6]
    # More than one source may have.
    more = [Connection() for _ in range(2)]
    for item in more:
        admission.admit(item, "a")
    assert [item.open for item in many] == [False, False, False, True]
    assert all(item.open for item in (*few, later, *more))


def test_who_has_shown_who_it_is_stays_and_silence_ends() -> None:
    now = [0.0]
    admission = Admission(Limits(total=3, per_source=3, patience=10), lambda: now[0])
    known, silent, talking = Connection(), Connection(), Connection()
    for item in (known, silent, talking):
        admission.admit(item, "a")
    admission.settle(known)
    now[0] = 9
    admission.touch(talking)
    now[0] = 11
    admission.expire()
    assert (known.open, silent.open, talking.open) == (True, False, True)
    for _ in range(20):
        admission.admit(Connection(), "a")
    assert known.open and len(admission) == 3


# A flood of connections that say nothing.


@pytest.fixture
def starved(controller: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    """A controller that may have few file descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    popen = subprocess.Popen

    def limited(*args: object, **options: object) -> subprocess.Popen[str]:
        limit = (DESCRIPTORS, DESCRIPTORS)
        return popen(*args, **options, preexec_fn=lambda: resource.setrlimit(  # type: ignore
            resource.RLIMIT_NOFILE, limit))

    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    monkeypatch.setattr(subprocess, "Popen", limited)
    running = controller(FILE)
    monkeypatch.undo()
    yield running
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def address(controller: Controller, which: str) -> tuple[str, int]:
    text = controller.url if which == "rest" else controller.target.replace("tcp:", "tcp://")
    parts = urllib.parse.urlsplit(text)
    assert parts.hostname and parts.port
    return parts.hostname, parts.port


def answers_hello(where: tuple[str, int], context: ssl.SSLContext | None = None) -> bool:
    """Whether a switch that begins to talk gets HELLO and FEATURES_REQUEST."""
    with socket.create_connection(where, 5) as plain, contextlib.ExitStack() as stack:
        connection = plain
        if context is not None:
            connection = stack.enter_context(context.wrap_socket(plain))
        connection.sendall(HELLO)
        connection.settimeout(5)
        seen: set[int] = set()
        data = b""
        while not {0, 5} <= seen:
            more = connection.recv(4096)
            if not more:
                return False
            data += more
            while len(data) >= 8 and len(data) >= (length := int.from_bytes(data[2:4], "big")):
                seen.add(data[1])
                data = data[length:]
    return True


def answers_http(controller: Controller) -> bool:
    """Whether REST answers on a connection of its own."""
    connection = http.client.HTTPConnection(*address(controller, "rest"), timeout=5)
    with contextlib.closing(connection):
        connection.request("GET", "/v1/status")
        return connection.getresponse().status == 200


@pytest.mark.parametrize("which", ["rest", "openflow"])
def test_idle_connections_end_nothing(starved: Controller, which: str) -> None:
    idle = []
    for _ in range(5):
        for _ in range(DESCRIPTORS // 2):
            idle.append(socket.create_connection(address(starved, which), 5))
        # While they are there, whoever has something to say is heard.
        assert answers_http(starved)
        assert answers_hello(address(starved, "openflow"))
    for item in idle:
        item.close()
    assert answers_http(starved)
    assert answers_hello(address(starved, "openflow"))
    assert "Traceback" not in starved.log.read_text()


@pytest.mark.switch
def test_a_known_switch_keeps_its_connection(ovs: Switch, starved: Controller) -> None:
    ovs.add_bridge("br0", "vm-a", "vm-b", "up")
    ovs.vsctl("set-controller", "br0", starved.target)
    starved.in_sync(1)
    idle = [
        socket.create_connection(address(starved, which), 5)
        for _ in range(2 * DESCRIPTORS)
        for which in ("rest", "openflow")
    ]
    for rate in ("2Mbps", "1Mbps"):
        # On a connection of its own: one that is idle gives way.
        starved.session.close()
        assert starved.put_rate("tenants/red/vms/a", {"rate": rate}).status_code == 200
        time.sleep(0.5)  # Not to wait for something: for nothing to happen.
    assert "disconnected" not in starved.log.read_text()
    for item in idle:
        item.close()


# TLS.


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities; keys and certificates of a controller and a switch by the first."""
    directory = tmp_path_factory.mktemp("keys")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    for name in ("ca", "other"):
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}",
                "-days", "2")
    for name, authority in (("controller", "ca"), ("switch", "ca"), ("stranger", "other")):
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey",
                f"{authority}.key", "-CAcreateserial", "-out", f"{name}.pem", "-days", "2")
    return directory


@pytest.fixture
def secured(controller: Start, keys: Path) -> Controller:
    files = {"key": "controller.key", "cert": "controller.pem", "ca": "ca.pem"}
    options = [text for name, file in files.items()
               for text in (f"--ofp-tls-{name}", str(keys / file))]
    return controller(FILE, *options)


@pytest.fixture(autouse=True, params=["ryu", "os_ken"])
def framework(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which framework the controller runs on: both do all of this."""
    if importlib.util.find_spec(request.param) is None and sys.version_info >= (3, 12):
        pytest.skip("Ryu needs a Python before 3.12")
    monkeypatch.setenv("FLOWBUNDLER_FRAMEWORK", request.param)
    return str(request.param)


def client(keys: Path, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(keys / "ca.pem")
    context.load_cert_chain(keys / f"{name}.pem", keys / f"{name}.key")
    return context


def test_tls_takes_more_than_one_connection(secured: Controller, keys: Path) -> None:
    where = address(secured, "openflow")
    for _ in range(3):
        assert answers_hello(where, client(keys, "switch"))
    # Who is not trusted, or talks something else, is not heard, and disturbs nobody.
    with pytest.raises(OSError):
        answers_hello(where, client(keys, "stranger"))
    with contextlib.suppress(OSError):
        assert not answers_hello(where)
    with socket.create_connection(where, 5):
        assert answers_hello(where, client(keys, "switch"))
    assert secured.get("/v1/status")["tenants"] == 1
    # What has ended is not read for ever.
    assert secured.process is not None
    pid = secured.process.pid

    def ticks() -> int:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().split()[13:15]))

    before = ticks()
    time.sleep(0.5)  # How much of this it runs is what is measured.
    assert ticks() - before < 0.25 * os.sysconf("SC_CLK_TCK")
    assert "Traceback" not in secured.log.read_text()


@pytest.mark.switch
def test_a_switch_by_tls(ovs: Switch, secured: Controller, keys: Path) -> None:
    ovs.add_bridge("br0", "vm-a", "vm-b", "up")
    ovs.vsctl("set-ssl", *(str(keys / f) for f in ("switch.key", "switch.pem", "ca.pem")))
    target = secured.target.replace("tcp:", "ssl:")
    for _ in range(2):
        ovs.vsctl("set-controller", "br0", target)
        secured.in_sync(1)
        ovs.vsctl("set-controller", "br0", "tcp:127.0.0.1:1")
        wait_for("its end", lambda: not secured.get("/v1/status")["in_sync"])


@pytest.mark.parametrize("option", ["--ofp-tls-key", "--ofp-tls-cert", "--ofp-tls-ca"])
def test_tls_needs_all_its_files(tmp_path: Path, keys: Path, option: str) -> None:
    running = Controller(tmp_path, FILE, option, str(keys / "ca.pem"))
    with pytest.raises(AssertionError, match="give all three, or none"):
        running.start()


# Files of the framework's own.


def test_no_file_of_the_framework_is_read(
    controller: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ryu", "os_ken", "fb-controller"):
        directory = tmp_path / f".{name}"
        directory.mkdir()
        (directory / f"{name}.conf").write_text("[DEFAULT]\nsocket_timeout = nonsense\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert answers_hello(address(controller(FILE), "openflow"))
