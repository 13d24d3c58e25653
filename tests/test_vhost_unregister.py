"""A guest that goes just as its port does: vswitchd goes on answering.

DPDK's thread is then in OVS's destroy_device(), where it waits for the main thread to let
go of the device, and the main thread has DPDK take the port's socket away, which waits for
that thread.  tests/preload/vhost-race.c has the guest's end always come at the worst
moment.  Neither may wait for the other.
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fbtest.backtrace import backtraces
from fbtest.ovs import Ovs
from fbtest.proc import Background, run, wait_until
from fbtest.procfs import alive

from vhost_guests import VhostGuest, answers, switch
from vhost_peer import Step

HERE = Path(__file__).resolve().parent

#: enum hold in vhost-race.c.
HOLD_LOCK, HOLD_UNREGISTER = 1, 2
CLIENT, SERVER = "dpdkvhostuserclient", "dpdkvhostuser"
MODES = pytest.mark.parametrize("mode", [CLIENT, SERVER])


class Race:
    """A switch with a vhost-user port, and what is held in it."""

    def __init__(self, env: dict[str, str], shared: Path, directory: Path):
        self.ovs, self._shared = Ovs(env), shared
        self._run_dir, self._dir = Path(env["OVS_RUNDIR"]), directory
        self.pid = self.ovs.pid()
        self.guests: list[VhostGuest] = []
        # The second port keeps datapath and PMD thread where they are.
        self.ovs.vsctl("add-br", "br", "--", "set", "Bridge", "br", "datapath_type=netdev")
        self.ovs.vsctl("add-port", "br", "other", "--", "set", "Interface", "other",
                       f"type={SERVER}")

    # What is shared with vhost-race.c.

    def hold(self, what: int) -> None:
        """Have the next of these wait until a guest's device is being taken away."""
        with self._shared.open("r+b", buffering=0) as file:
            file.write(struct.pack("=i", what))

    def wait_held(self) -> None:
        """Wait until something is held."""
        wait_until(lambda: self._counts()[0] == 1, "a thread is at the window", 10, 0.002)

    def _counts(self) -> tuple[int, ...]:
        """Times held, devices taken away, times held in vain."""
        return struct.unpack("=4i", self._shared.read_bytes())[1:]

    # The switch.

    def path(self, mode: str) -> Path:
        """The socket of the port."""
        return (self._run_dir if mode == SERVER else self._dir) / "vhost0"

    def columns(self, mode: str) -> list[str]:
        """Columns of the port's Interface."""
        path = [] if mode == SERVER else [f"options:vhost-server-path={self.path(mode)}"]
        return [f"type={mode}", *path]

    def add_port(self, mode: str) -> None:
        self.ovs.vsctl("add-port", "br", "vhost0", "--", "set", "Interface", "vhost0",
                       *self.columns(mode))

    def guest(self, mode: str, **kwargs: object) -> VhostGuest:
        guest = VhostGuest(self.path(mode), connect=mode == SERVER, rate=1000, **kwargs)
        self.guests.append(guest)
        return guest

    def running_guest(self, mode: str) -> VhostGuest:
        """A guest whose frames the switch takes."""
        guest = self.guest(mode)
        wait_until(lambda: guest.report().sent > 100, "the guest's frames are taken", 20)
        return guest

    # What is checked.

    def guest_goes(self, guest: VhostGuest) -> None:
        """Kill the guest when something is held."""
        self.wait_held()
        guest.kill()
        for _ in range(5):
            self.check_answers()
        self.check_moment()

    def check_moment(self) -> None:
        """The guest's end has come at the moment that it was to come at."""
        held, begun, in_vain = self._counts()
        assert (held, in_vain) == (1, 0) and begun >= 1

    def check_answers(self) -> None:
        """Have a switch that does not answer end, too."""
        if not answers(self.ovs):
            text = backtraces(self.pid)
            os.kill(self.pid, signal.SIGKILL)
            pytest.fail(f"vswitchd does not answer:\n{text}")


@pytest.fixture
def race(tmp_path: Path) -> Iterator[Race]:
    library, shared = tmp_path / "vhost-race.so", tmp_path / "shared"
    flags = run("pkg-config", "--cflags", "libdpdk").split()
    run("cc", "-O2", "-shared", "-fPIC", *flags, "-o", str(library),
        str(HERE / "preload/vhost-race.c"))
    shared.write_bytes(bytes(16))
    with switch("--private-net", "--memory", "192", LD_PRELOAD=str(library),
                VHOST_RACE=str(shared)) as env:
        del env["LD_PRELOAD"]
        race = Race(env, shared, tmp_path)
        try:
            yield race
        finally:
            for guest in race.guests:
                guest.close()


def vsctl(race: Race, *args: str) -> Background:
    """Begin a change that does not end before the main thread goes on."""
    return Background(["ovs-vsctl", "--timeout=20", *args], env=race.ovs.env)


def end(change: Background) -> None:
    """Wait for a change that has begun."""
    try:
        assert change.wait(10) == 0, change.stderr()
    finally:
        change.close()


CHANGES: dict[str, Callable[[Race, str], list[str]]] = {
    "port-deleted": lambda _race, _mode: ["del-port", "vhost0"],
    "bridge-deleted": lambda _race, _mode: ["del-br", "br"],
    "type-changed": lambda race, mode: [
        "set", "Interface", "vhost0", *race.columns(SERVER if mode == CLIENT else CLIENT)],
    "added-again": lambda race, mode: [
        "del-port", "vhost0", "--", "add-port", "br", "vhost0", "--", "set", "Interface",
        "vhost0", "ofport_request=77", *race.columns(mode)],
}


@MODES
@pytest.mark.parametrize("change", CHANGES)
def test_guest_goes_with_its_port(race: Race, mode: str, change: str) -> None:
    race.add_port(mode)
    guest = race.running_guest(mode)
    race.hold(HOLD_LOCK)
    changing = vsctl(race, *CHANGES[change](race, mode))
    race.guest_goes(guest)
    end(changing)
    # And again, with the same socket.
    if change == "type-changed":
        race.ovs.vsctl("del-port", "vhost0")
    if change == "bridge-deleted":
        race.ovs.vsctl("add-br", "br", "--", "set", "Bridge", "br", "datapath_type=netdev")
    if change != "added-again":
        race.add_port(mode)
    assert race.running_guest(mode).command("close").connections == 1
    race.check_answers()


@MODES
@pytest.mark.parametrize("how", ["", "--cleanup"])
def test_guest_goes_when_vswitchd_exits(race: Race, mode: str, how: str) -> None:
    race.add_port(mode)
    guest = race.running_guest(mode)
    race.hold(HOLD_LOCK)
    # It is answered when all bridges are gone.
    exiting = Background(["ovs-appctl", "--timeout=20", "exit", *filter(None, [how])],
                         env=race.ovs.env)
    race.wait_held()
    guest.kill()
    try:
        wait_until(lambda: not alive(race.pid), "vswitchd has ended", 5)
    except TimeoutError:
        os.kill(race.pid, signal.SIGKILL)
        raise
    finally:
        exiting.close()
    race.check_moment()


def test_guest_goes_when_its_port_is_set_up_anew(race: Race) -> None:
    """A guest refused the port's features, so these are changed; another one came meanwhile."""
    race.add_port(CLIENT)
    race.hold(HOLD_UNREGISTER)
    first = race.guest(CLIENT, until=Step.SET_OWNER)
    first.wait_state("stopped")
    first.kill()
    race.wait_held()
    race.path(CLIENT).unlink()
    second = race.guest(CLIENT)
    second.wait_state("running")
    race.guest_goes(second)
    race.path(CLIENT).unlink()
    third = race.running_guest(CLIENT)
    race.check_answers()
    assert third.command("close").received == 0
