"""Real processes for the controller's tests: an Open vSwitch and a controller.

Each runs in a directory of its own, is waited for by polling with a deadline, and is
ended by its own process id.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import requests

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = 20.0
START_DEADLINE = 60.0
T = TypeVar("T")


def wait_for(what: str, condition: Callable[[], T], deadline: float = DEADLINE) -> T:
    """Poll until the condition gives something true, and give that."""
    end = time.monotonic() + deadline
    error: Exception | None = None
    while True:
        try:
            result = condition()
            error = None
        except (AssertionError, LookupError, OSError, subprocess.CalledProcessError) as exc:
            result, error = None, exc  # type: ignore[assignment]
        if result:
            return result
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline} s: {what}") from error
        time.sleep(0.02)


def end(process: subprocess.Popen[Any], deadline: float = 10.0) -> int:
    """End one of our own processes: SIGTERM, and SIGKILL if that is not enough."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(deadline)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def ovs_tree() -> Path:
    """Find the built Open vSwitch, and say what to do if there is none."""
    build = Path(os.environ.get("FB_BUILD") or ROOT / "build")
    tree = Path(os.environ.get("FB_OVS_TREE") or build / "ovs")
    if not (tree / "vswitchd" / "ovs-vswitchd").exists():
        raise RuntimeError(
            f"no Open vSwitch in {tree}: run `make`, or let FB_OVS_TREE name a built source tree"
        )
    return tree


class Switch:
    """An ovsdb-server and an ovs-vswitchd with dummy datapaths."""

    def __init__(self, directory: Path, tree: Path) -> None:
        self.directory = directory
        self.tree = tree
        paths = [str(tree / part) for part in ("utilities", "ovsdb", "vswitchd")]
        self.env = {
            **os.environ,
            "PATH": os.pathsep.join([*paths, os.environ["PATH"]]),
            **{
                name: str(directory)
                for name in ("OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "OVS_SYSCONFDIR")
            },
            "OVS_PKGDATADIR": str(tree / "vswitchd"),
        }
        # Of no effect in a tree that is not built with them.
        for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS"):
            self.env[name] = f"{os.environ.get(name, '')}:log_path={directory}/sanitizer"
        self.db: subprocess.Popen[bytes] | None = None
        self.vswitchd: subprocess.Popen[bytes] | None = None

    def run(self, *command: str) -> str:
        """Run one of OVS's tools and give what it says."""
        result = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=DEADLINE
        )
        if result.returncode:
            sys.stderr.write(result.stderr)
            result.check_returncode()
        return result.stdout

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        with open(self.directory / f"{command[0]}.out", "ab") as output:
            return subprocess.Popen(
                command, env=self.env, cwd=self.directory, stdout=output, stderr=output
            )

    def start(self) -> None:
        """Start both."""
        database = self.directory / "conf.db"
        schema = self.tree / "vswitchd" / "vswitch.ovsschema"
        self.run("ovsdb-tool", "create", str(database), str(schema))
        self.db = self._spawn(
            "ovsdb-server",
            str(database),
            f"--remote=punix:{self.directory}/db.sock",
            f"--unixctl={self.directory}/ovsdb-server.ctl",
            "--no-chdir",
            "--log-file",
            "-vconsole:off",
        )
        wait_for("ovsdb-server", (self.directory / "db.sock").exists)
        self.run("ovs-vsctl", "--no-wait", "init")
        self.start_vswitchd()

    def start_vswitchd(self) -> None:
        """Start ovs-vswitchd, also again."""
        self.vswitchd = self._spawn(
            "ovs-vswitchd",
            f"unix:{self.directory}/db.sock",
            f"--unixctl={self.directory}/ovs-vswitchd.ctl",
            "--enable-dummy",
            "--disable-system",
            "--no-chdir",
            "--log-file",
            "-vconsole:off",
        )
        control = self.directory / "ovs-vswitchd.ctl"
        wait_for("ovs-vswitchd", control.exists)
        wait_for("ovs-vswitchd's database", lambda: self.vsctl("show"))

    def stop_vswitchd(self) -> None:
        """End ovs-vswitchd as a crash would: no goodbye to the controller."""
        assert self.vswitchd is not None
        self.vswitchd.kill()
        self.vswitchd.wait()
        (self.directory / "ovs-vswitchd.ctl").unlink(missing_ok=True)

    def stop(self) -> None:
        """End both; what sanitizers have found, at the end also leaks, is an error."""
        if self.vswitchd is not None and self.vswitchd.poll() is None:
            with contextlib.suppress(subprocess.SubprocessError):
                self.appctl("exit")
                self.vswitchd.wait(DEADLINE)
        for process in (self.vswitchd, self.db):
            if process is not None:
                end(process)
        found = [path.read_text() for path in self.directory.glob("sanitizer.*")]
        assert not found, "\n".join(found)

    def appctl(self, *arguments: str) -> str:
        """Run ovs-appctl against this ovs-vswitchd."""
        return self.run("ovs-appctl", "-t", f"{self.directory}/ovs-vswitchd.ctl", *arguments)

    def vsctl(self, *arguments: str) -> str:
        """Run ovs-vsctl."""
        return self.run("ovs-vsctl", "--timeout=10", *arguments)

    def ofctl(self, *arguments: str) -> str:
        """Run ovs-ofctl."""
        return self.run("ovs-ofctl", "-O", "OpenFlow13", *arguments)

    def add_bridge(self, name: str, *ports: str, datapath_id: int = 1) -> None:
        """Add a bridge of the dummy datapath with these ports."""
        self.vsctl(
            *("add-br", name, "--", "set", "bridge", name, "datapath_type=dummy"),
            f"other_config:datapath-id={datapath_id:016x}",
            *("fail_mode=secure", "protocols=OpenFlow13"),
        )
        for port in ports:
            self.add_port(name, port)

    def add_port(self, bridge: str, port: str, number: int | None = None) -> None:
        """Add a dummy port."""
        request = [f"ofport_request={number}"] if number else []
        command = ["add-port", bridge, port, "--", "set", "interface", port, "type=dummy"]
        self.vsctl(*command, *request)

    def meters(self, bridge: str) -> dict[int, int]:
        """Give the meters of a bridge: id -> kbit/s."""
        text = self.ofctl("dump-meters", bridge)
        return {
            int(number): int(rate)
            for number, rate in re.findall(r"meter=(\d+) kbps.*?rate=(\d+)", text, re.DOTALL)
        }

    def flows(self, bridge: str) -> list[str]:
        """Give the flows of a bridge, without counters, in an order of their text."""
        text = self.ofctl("--no-stats", "--no-names", "dump-flows", bridge)
        return sorted(line.strip() for line in text.splitlines() if "actions=" in line)

    def trace(self, bridge: str, flow: str) -> str:
        """Say what the bridge does with a packet."""
        return self.appctl("ofproto/trace", bridge, flow)


class Controller:
    """A controller as a user starts it."""

    def __init__(self, directory: Path, config: str, *options: str) -> None:
        self.directory = directory
        self.config = directory / "tenants.yaml"
        self.config.write_text(config)
        self.options = options
        self.process: subprocess.Popen[str] | None = None
        self.url = ""
        self.target = ""
        self.log = directory / "controller.log"
        self.session = requests.Session()
        self.session.trust_env = False

    def start(self) -> Controller:
        """Start it and wait until it says that it is ready."""
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [
                    str(ROOT / "utilities" / "fb-controller"),
                    "--config",
                    str(self.config),
                    *("--ofp-listen", "127.0.0.1:0"),
                    *("--rest-listen", "127.0.0.1:0"),
                    *("--state", str(self.directory / "state")),
                    *self.options,
                ],
                cwd=self.directory,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        line = self._line()
        match = re.fullmatch(r"fb-controller: ready: OpenFlow on (\S+), REST on (\S+)\n", line)
        assert match, f"said {line!r}; log:\n{self.log.read_text()}"
        self.target = f"tcp:{match[1]}"
        self.url = f"http://{match[2]}"
        return self

    def _line(self) -> str:
        assert self.process is not None and self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], START_DEADLINE)
        assert ready, f"silent for {START_DEADLINE} s; log:\n{self.log.read_text()}"
        return self.process.stdout.readline()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it, and give its exit status."""
        assert self.process is not None
        self.session.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(DEADLINE)
        finally:
            end(self.process)
            if self.process.stdout is not None:
                self.process.stdout.close()

    def get(self, path: str) -> Any:
        """GET that must succeed."""
        answer = self.session.get(self.url + path, timeout=DEADLINE)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def put_rate(self, path: str, body: Any) -> requests.Response:
        """PUT a rate."""
        return self.session.put(f"{self.url}/v1/{path}/rate", json=body, timeout=DEADLINE)

    def in_sync(self, *datapath_ids: int) -> Any:
        """Give the status once these switches are connected and in sync."""

        def check() -> Any:
            status = self.get("/v1/status")
            switches = status["switches"]
            names = [f"{number:016x}" for number in datapath_ids]
            return status if all(switches[name]["in_sync"] for name in names) else None

        return wait_for(f"switches {datapath_ids} in sync", check)
