"""fb-sandbox: CMD's status is passed on, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fbtest import procfs

REPO = Path(__file__).resolve().parent.parent
BUILD = Path(os.environ.get("FB_BUILD") or REPO / "build")
SANDBOX = REPO / "utilities" / "fb-sandbox"
HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")

ADD_BRIDGE = "ovs-vsctl add-br fbsb0 -- set bridge fbsb0 datapath_type=netdev"

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not (BUILD / "ovs/vswitchd/ovs-vswitchd").exists(),
    reason="needs root and a built OVS")


@dataclass
class Snapshot:
    """What a sandbox could leave behind on the machine."""

    links: set[str]
    mounts: str
    hugepages: str
    processes: set[str]
    runtime: set[str]


class Bed:
    """Runs fb-sandbox with a network and mounts that nobody else changes."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.holder = subprocess.Popen(["unshare", "--net", "--mount", "sleep", "1000"])
        exe = Path(f"/proc/{self.holder.pid}/exe")
        while exe.resolve().name != "sleep":
            time.sleep(0.01)
        self.prefix = ["nsenter", "--net", "--mount", f"--target={self.holder.pid}"]

    def command(self, command: str, *cmd: str, options: tuple[str, ...] = ()) -> list[str]:
        memory = ["--memory", "256"] if command in ("run", "start") else []
        return [*self.prefix, str(SANDBOX), command, "--run-dir", str(self.run_dir),
                *memory, *options, *(["--", *cmd] if cmd else [])]

    def run(self, *cmd: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command("run", *cmd, options=options),
                              capture_output=True, text=True, cwd="/")

    def call(self, command: str, *cmd: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(command, *cmd), capture_output=True, text=True)

    def snapshot(self) -> Snapshot:
        links = subprocess.run([*self.prefix, "ip", "-json", "link"],
                               capture_output=True, check=True).stdout
        processes = set()
        for pid in procfs.pids():
            if f"OVS_RUNDIR={self.run_dir}" in (procfs.read(pid, "environ") or ""):
                processes.add(procfs.read(pid, "cmdline") or "")
        return Snapshot(
            links={link["ifname"] for link in json.loads(links)},
            mounts=Path(f"/proc/{self.holder.pid}/mounts").read_text(),
            hugepages=HUGEPAGES.read_text(),
            processes=processes,
            runtime={path.name for path in Path("/run/dpdk").glob("fb" + "?" * 8)})

    def files(self) -> set[str]:
        """Returns what is in the run directory besides logs."""
        return {path.name for path in self.run_dir.rglob("*")
                if path.suffix != ".log" and path.stem != "sanitizer"}


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    """A test bed that must look afterwards as it did before."""
    bed = Bed(tmp_path / "run")
    before = bed.snapshot()
    try:
        yield bed
        assert bed.snapshot() == before
        assert bed.files() == set()
    finally:
        bed.call("stop")
        bed.holder.kill()
        bed.holder.wait()


def test_run_gives_cmd_its_ovs(bed: Bed) -> None:
    result = bed.run("sh", "-c", f"{ADD_BRIDGE} && ovs-vsctl show && ovs-appctl version && ip link")
    assert result.returncode == 0, result.stderr
    assert "Bridge fbsb0" in result.stdout
    assert "ovs-vswitchd (Open vSwitch)" in result.stdout
    assert "fbsb0:" in result.stdout, "the bridge's tap is not where CMD runs"


@pytest.mark.parametrize(("command", "status"), [
    ("exit 7", 7), ("kill -TERM $$", 128 + 15), ("exec /nonexistent", 127)])
def test_status_is_passed_on(bed: Bed, command: str, status: int) -> None:
    assert bed.run("sh", "-c", command).returncode == status


def test_cmd_not_found(bed: Bed) -> None:
    result = bed.run("/nonexistent/program")
    assert result.returncode == 127
    assert "/nonexistent/program" in result.stderr


def test_no_huge(bed: Bed) -> None:
    result = bed.run("fb-sandbox", "status", "--run-dir", str(bed.run_dir),
                     options=("--no-huge",))
    assert result.returncode == 0, result.stderr
    assert "huge pages     no" in result.stdout


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted(bed: Bed, signum: signal.Signals) -> None:
    process = subprocess.Popen(
        bed.command("run", "sh", "-c", f"{ADD_BRIDGE} && echo ready && sleep 1000"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signum


@pytest.mark.parametrize("delay", [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6])
def test_interrupted_while_starting(bed: Bed, delay: float) -> None:
    process = subprocess.Popen(bed.command("run", "sleep", "1000"), stderr=subprocess.PIPE)
    time.sleep(delay)
    process.terminate()
    process.communicate(timeout=30)
    # Before Python runs our code, the signal just ends it.
    assert process.returncode in (128 + signal.SIGTERM, -signal.SIGTERM)


@pytest.mark.parametrize("daemons", [
    ("ovs-vswitchd",), ("ovsdb-server",), ("ovs-vswitchd", "ovsdb-server")])
def test_crash(bed: Bed, daemons: tuple[str, ...]) -> None:
    kill = "; ".join(f"kill -9 $(cat $OVS_RUNDIR/{daemon}.pid)" for daemon in daemons)
    result = bed.run("sh", "-c", f"{ADD_BRIDGE} && {kill}; exit 5")
    assert result.returncode == 5
    for daemon in daemons:
        assert f"{daemon} crashed" in result.stderr


def test_crash_is_no_success(bed: Bed) -> None:
    assert bed.run("sh", "-c", "kill -9 $(cat $OVS_RUNDIR/ovs-vswitchd.pid)").returncode == 125


def test_what_a_sanitizer_found_is_no_success(bed: Bed) -> None:
    """As daemons of an instrumented tree are told to log it."""
    result = bed.run("sh", "-c", "tr '\\0' '\\n' </proc/$(cat $OVS_RUNDIR/ovs-vswitchd.pid)/environ"
                     "| grep -E '^(A|UB|T)SAN_OPTIONS=';"
                     "echo 'ERROR: leak' >$OVS_RUNDIR/sanitizer.1")
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    assert all(line.endswith(f"log_path={bed.run_dir}/sanitizer") for line in lines)
    assert result.returncode == 125
    assert "ERROR: leak" in result.stderr


def test_bridge_deleted_after_crash(bed: Bed) -> None:
    """The database does not name the bridge any more, its tap is there."""
    result = bed.run("sh", "-c", f"{ADD_BRIDGE} && kill -9 $(cat $OVS_RUNDIR/ovs-vswitchd.pid);"
                     "ovs-vsctl --no-wait del-br fbsb0; exit 5")
    assert result.returncode == 5, result.stderr


def test_cmd_leaves_processes(bed: Bed) -> None:
    result = bed.run("sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & trap '' TERM")
    assert result.returncode == 0, result.stderr


def test_taps_of_others_stay(bed: Bed) -> None:
    subprocess.run([*bed.prefix, "ip", "tuntap", "add", "fbsb1", "mode", "tap"], check=True)
    result = bed.run("sh", "-c", f"{ADD_BRIDGE} && ovs-vsctl add-port fbsb0 fbsb1;"
                     "kill -9 $(cat $OVS_RUNDIR/ovs-vswitchd.pid); exit 5")
    assert result.returncode == 5, result.stderr
    assert "fbsb1" in bed.snapshot().links
    subprocess.run([*bed.prefix, "ip", "link", "delete", "fbsb1"], check=True)


def test_ovs_does_not_start(bed: Bed) -> None:
    result = bed.run("true", options=("--dpdk-extra=--no-such-option",))
    assert result.returncode == 125
    assert "unrecognized option" in result.stderr or "DPDK" in result.stderr


def test_start_status_shell_stop(bed: Bed) -> None:
    assert bed.call("status").returncode == 3
    assert bed.call("shell", "true").returncode == 1
    started = bed.call("start")
    assert started.returncode == 0, started.stderr
    for what in ("OVS ", "DPDK ", "PMD cores ", "huge pages ", "pid "):
        assert what in started.stdout
    again = bed.call("start")
    assert again.returncode == 1
    assert "running already" in again.stderr
    assert bed.call("status").returncode == 0
    assert bed.call("shell", "ovs-vsctl", "list-br").returncode == 0
    assert bed.call("shell", "sh", "-c", ADD_BRIDGE).returncode == 0
    assert bed.call("stop").returncode == 0
    assert bed.call("stop").returncode == 0


def test_start_cleans_up_after_kill(bed: Bed) -> None:
    """fb-sandbox itself was killed: the next one cleans up first."""
    process = subprocess.Popen(
        bed.command("run", "sh", "-c", f"{ADD_BRIDGE}; echo ready; exec sleep 1000"),
        stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    sleep = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[-1])
    process.kill()
    process.wait()
    os.kill(sleep, signal.SIGKILL)
    for daemon in ("ovs-vswitchd", "ovsdb-server"):
        os.kill(int((bed.run_dir / f"{daemon}.pid").read_text()), signal.SIGKILL)
    result = bed.run("ovs-vsctl", "list-br")
    assert result.returncode == 0
    assert "ended badly" in result.stderr


@pytest.mark.parametrize(("options", "message"), [
    (("--pmd-cpu-mask", "0"), "--pmd-cpu-mask"), (("--memory", "3"), "--memory"),
    (("--set", "novalue"), "novalue"), (("--stock-tree", "/nonexistent"), "run 'make'")])
def test_bad_options(bed: Bed, options: tuple[str, ...], message: str) -> None:
    result = bed.run("true", options=options)
    assert result.returncode != 0
    assert message in result.stderr


def test_set_and_private_net(bed: Bed) -> None:
    result = bed.run("sh", "-c", "ovs-vsctl get Open_vSwitch . other_config:userspace-tso-enable"
                     f" && {ADD_BRIDGE} && ip -brief link",
                     options=("--set", "userspace-tso-enable=true", "--private-net"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith('"true"')
    assert "fbsb0" in result.stdout
