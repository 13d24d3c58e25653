"""What the controller is installed as: a service of systemd, manual pages, a wheel."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from controller_harness import ROOT, Controller, wait_for
from fbrates import cli, launch, manual, supervised

FILE = "tenants: {red: {vms: {a: {port: vm-a, rate: 30Mbps}}}}\n"
UNIT = ROOT / "controller" / "systemd" / "flowbundler-controller.service"


# A service.


class Supervisor:
    """Hears what systemd would hear."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(path)
        self.socket.settimeout(20)

    def hear(self, start: str) -> str:
        """Give the next message that starts so."""
        while not (text := self.socket.recv(4096).decode()).startswith(start):
            pass
        return text

    def close(self) -> None:
        self.socket.close()


def test_systemd_is_told(tmp_path: Path, ovs_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    # It is to say that it goes on at least that often.
    watchdog = 3.0
    monkeypatch.setenv("WATCHDOG_USEC", str(int(watchdog * 1e6)))
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    running = Controller(tmp_path, FILE)
    try:
        running.start()
        ready = supervisor.hear("READY=1")
        assert f"REST on {running.url.removeprefix('http://')}" in ready
        heard = time.monotonic()
        for _ in range(3):
            supervisor.hear("WATCHDOG=1")
            assert time.monotonic() - heard < watchdog
            heard = time.monotonic()
        assert running.process is not None
        running.process.send_signal(signal.SIGHUP)
        assert re.search(r"MONOTONIC_USEC=[0-9]+", supervisor.hear("RELOADING=1"))
        supervisor.hear("READY=1")
        wait_for("the reload", lambda: running.get("/v1/status")["reloads"] == 1)
        # Also one that is refused is over then.
        running.config.write_text("tenants: [")
        running.process.send_signal(signal.SIGHUP)
        supervisor.hear("RELOADING=1")
        supervisor.hear("READY=1")
        running.process.send_signal(signal.SIGTERM)
        supervisor.hear("STOPPING=1")
        assert running.stop() == 0
    finally:
        running.stop()
        supervisor.close()


@pytest.mark.parametrize("name", ["{}/n", "@fb-test-{}"])
def test_any_kind_of_socket(tmp_path: Path, name: str) -> None:
    address = name.format(tmp_path if name.startswith("{") else os.getpid())
    supervisor = Supervisor(address.replace("@", "\0", 1) if address[0] == "@" else address)
    assert supervised.notify("READY=1", {"NOTIFY_SOCKET": address})
    assert supervisor.hear("READY=1") == "READY=1"
    supervisor.close()
    assert not supervised.notify("READY=1", {"NOTIFY_SOCKET": address})
    assert not supervised.notify("READY=1", {})


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [({}, None), ({"WATCHDOG_USEC": "60000000"}, 30.0), ({"WATCHDOG_USEC": "0"}, None),
     ({"WATCHDOG_USEC": "x"}, None), ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, None),
     ({"WATCHDOG_USEC": "10", "WATCHDOG_PID": str(os.getpid())}, 5e-6)],
)  # fmt: skip
def test_how_often_to_say_so(environment: dict[str, str], seconds: float | None) -> None:
    assert supervised.watchdog_interval(environment) == seconds


def test_who_no_longer_works_does_not_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """That green threads run is not enough: what is to be done must be done."""
    said: list[str] = []
    monkeypatch.setattr(supervised, "notify", lambda text: said.append(text) or True)
    monkeypatch.setattr(supervised, "watchdog_interval", lambda: 2.0)
    service = argparse.Namespace(switches={})
    application = argparse.Namespace(service=service, ticked=time.monotonic())

    class Eventlet:
        def sleep(self, seconds: float) -> None:
            assert seconds == 2.0
            if len(said) == 4:
                raise KeyboardInterrupt
            if said.count("WATCHDOG=1") == 2:
                application.ticked -= 2.0
                said.append("stuck")

    with pytest.raises(KeyboardInterrupt):
        launch._supervise(Eventlet(), application, "here")
    assert said == ["STATUS=here; 0 of 0 switches in sync", "WATCHDOG=1", "WATCHDOG=1", "stuck"]


def test_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    # (A program that is there.)
    unit.write_text(UNIT.read_text().replace("@PREFIX@/bin/fb-controller", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)],
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    # 10 is a service that may all; below 2 is what systemd calls "OK".
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit)],
        capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stdout
    text = UNIT.read_text()
    assert "Type=notify\n" in text and "WatchdogSec=60\n" in text
    options = re.search(r"^ExecStart=\S+ (.*)$", text, re.MULTILINE)
    assert options is not None
    arguments = options[1].replace("$FB_CONTROLLER_OPTIONS", "").split()
    assert launch.arguments(arguments).config == "/etc/flowbundler/tenants.yaml"


# Manual pages.


@pytest.mark.parametrize("name", ["fb-controller.8", "flowbundler-ctl.1"])
def test_manual_pages(tmp_path: Path, name: str) -> None:
    done = subprocess.run([sys.executable, "-m", "fbrates.manual", str(tmp_path)], timeout=60,
                          env={**os.environ, "PYTHONPATH": str(ROOT / "controller")})  # fmt: skip
    assert done.returncode == 0
    shown = subprocess.run(["man", "--warnings", "-l", str(tmp_path / name)], timeout=60,
                           capture_output=True, text=True,
                           env={**os.environ, "MANWIDTH": "500", "LC_ALL": "C.UTF-8"})  # fmt: skip
    assert (shown.returncode, shown.stderr) == (0, "")
    page = " ".join(shown.stdout.replace("‐\n", "").split())
    parser = launch.parser() if name.startswith("fb-") else cli.parser()
    for action in manual._shown(parser):
        for text in (*action.option_strings, manual._help(parser, action)):
            assert " ".join(text.split()) in page, text
    if name.startswith("flowbundler"):
        for command in cli.COMMANDS:
            assert f" {command} " in page
    assert not re.search(r"%\(|\\f|\\-", page)
    # Another terminal, or another's surroundings, make the same.
    assert (tmp_path / name).read_text() == manual.pages()[name]


# A wheel.


def test_the_wheel(tmp_path: Path) -> None:
    """It has all that is imported, and its commands run where only its requirements are."""
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    shutil.copytree(ROOT / "controller", source / "controller",
                    ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    for name in ("pyproject.toml", "requirements.txt", "LICENSE"):
        shutil.copy(ROOT / name, source)
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=100)
    python = str(environment / "bin" / "python")
    ours = Path(pytest.__file__).parent.parent
    tools = tmp_path / "tools"
    tools.mkdir()
    # A new environment has a setuptools up to Python 3.11 (and ours an old one, for Ryu).
    new = sys.version_info >= (3, 12)
    for name in ("setuptools",) if new else ("wheel", "packaging"):
        for path in (ours / name, *ours.glob(f"{name}-*.dist-info")):
            (tools / path.name).symlink_to(path)
    subprocess.run(
        [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
         "--disable-pip-version-check", "--wheel-dir", str(wheels), str(source)],
        check=True, timeout=100, env={**os.environ, "PYTHONPATH": str(tools)})  # fmt: skip
    (wheel,) = wheels.glob("flowbundler-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = (ROOT / "controller").rglob("*.py")
    expected = {str(path.relative_to(ROOT / "controller")) for path in modules}
    assert expected | {"fbrates/flowbundler.ovsschema"} <= names
    metadata = next(name for name in names if name.endswith("/METADATA"))
    required = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "Requires-Dist: pydantic==" in required
    for name in ("pytest", "matplotlib", "schemathesis", "ruff"):
        assert name not in required

    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
         "--disable-pip-version-check", str(wheel)], check=True, timeout=100)  # fmt: skip
    # Its requirements, as they are here; nothing of this tree.
    site = next((environment / "lib").glob("python*/site-packages"))
    (site / "requirements.pth").write_text(f"{ours}\n")
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    example = ROOT / "controller" / "examples" / "everything.yaml"
    done = subprocess.run([environment / "bin" / "fb-controller", "--check", "--config", example],
                          cwd=tmp_path, env=clean, capture_output=True, text=True,
                          timeout=60)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "") and "good" in done.stdout
    done = subprocess.run([environment / "bin" / "flowbundler-ctl", "--help"], cwd=tmp_path,
                          env=clean, capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0 and "rollback" in done.stdout
    # All of it runs, from there.
    process = subprocess.Popen(
        [environment / "bin" / "fb-controller", "--config", example, "--db", "none",
         "--ofp-listen", "127.0.0.1:0", "--rest-listen", "127.0.0.1:0"],
        cwd=tmp_path, env=clean, stdout=subprocess.PIPE, text=True)  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("fb-controller: ready: ")
    finally:
        process.terminate()
        assert process.wait(20) == 0
        assert process.stdout is not None
        process.stdout.close()
