"""Guests that go, in every way, just as their ports do, over and over.

    sudo make rounds ROUNDS=50 SEED=1

Each round has a few guests with traffic (tests/vhost_peer.py) on vhost-user ports, one of
which goes in one of `WAYS`, at a random moment around one of `CHANGES` to the switch.  The
ports shape, so that packets wait for a guest and for a port that is gone, their meters
shape, and in half of the switch's lives receive queues are held back.  Both processors are
loaded with an endless loop each, and vswitchd comes before these.

vswitchd must answer within `PATIENCE_S` at any time.  It lives for `ROUNDS_OF_A_LIFE`
rounds, in the last of which it is told to exit; before that all ports are deleted, and it
may have no thread, descriptor, buffer, buffer pool or guest's memory more than it had when
its life began.

A seed determines all that is chosen, not when it happens.  Each run is a line of
docs/results/runs.csv; tests/runs.py adds the rounds up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "utilities")]

from fbtest.backtrace import backtraces  # noqa: E402
from fbtest.ovs import Ovs  # noqa: E402
from fbtest.proc import Background, CommandError, group_nice, wait_until  # noqa: E402
from fbtest.procfs import alive  # noqa: E402

import runs  # noqa: E402
from shaping import pmd_threads  # noqa: E402
from vhost_guests import VhostGuest, switch, threads  # noqa: E402
from vhost_peer import Step  # noqa: E402

PATIENCE_S = 2.0
ROUNDS_OF_A_LIFE = 16
MOST_GUESTS = 4
#: Frames of 200 bytes a second, of each guest: more than its meter lets through, and this is
#: more than the port that it goes to does.
OFFERED_PPS, METER_KBPS, PORT_BPS = 600, 800, 600_000
#: For how long packets may wait.
MAX_DELAY_US = 1_000_000
RX_LIMIT = 20_000

#: What a thread of DPDK's gets from OVS when it first has to wait for others, which may be
#: in any round: a latch.  Only "vhost-events" ever waits.
LATCH = Counter({"pipe:[N]": 2})

LOAD = "an endless loop on each processor"
CLIENT, SERVER = "dpdkvhostuserclient", "dpdkvhostuser"

WAYS = ("killed", "closed", "frozen", "connecting")
CHANGES = ("port-deleted", "bridge-deleted", "added-again", "exit")
#: Where a guest may be in connecting.
UNTIL = [step for step in Step if step is not Step.GET_VRING_BASE]


class RoundError(AssertionError):
    """vswitchd did what it must not."""


class Watch(threading.Thread):
    """Asks vswitchd for its version all the time, and measures how long it takes."""

    def __init__(self, control: Path):
        super().__init__(daemon=True)
        self._control, self._end = control, threading.Event()
        self.longest_s = 0.0
        self.asked = 0
        self._since: float | None = None

    def run(self) -> None:
        while not self._end.wait(0.02):
            self._since = time.monotonic()
            try:
                self._ask()
            except OSError:
                if not self._end.is_set() and self._control.exists():
                    continue  # It is busy with exiting, or gone: others look at that.
            self.longest_s = max(self.longest_s, time.monotonic() - self._since)
            self._since = None
            self.asked += 1

    def _ask(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(30)
            sock.connect(str(self._control))
            sock.sendall(json.dumps({"id": 0, "method": "version", "params": []}).encode())
            answer = b""
            while b"}" not in answer:
                part = sock.recv(4096)
                if not part:
                    raise ConnectionError
                answer += part

    def check(self) -> None:
        """Raise `RoundError` if an answer took too long, or takes it now."""
        since = self._since
        longest = max(self.longest_s, 0.0 if since is None else time.monotonic() - since)
        if longest > PATIENCE_S:
            raise RoundError(f"vswitchd did not answer for {longest:.1f} s")

    def stop(self) -> None:
        """Ask no more."""
        self._end.set()


@dataclass(frozen=True)
class Holdings:
    """What a process has of what can leak."""

    threads: Counter[str]
    descriptors: Counter[str]
    pools: frozenset[str]
    buffers: int
    guest_maps: int

    @classmethod
    def of(cls, ovs: Ovs, pid: int) -> Holdings:
        """What vswitchd has at the moment."""
        def kind(link: Path) -> str:
            with contextlib.suppress(FileNotFoundError):
                return re.sub(r"\d+", "N", os.readlink(link))
            return ""

        links = Counter(map(kind, Path(f"/proc/{pid}/fd").iterdir()))
        # Threads have numbers.
        names = Counter(re.sub(r"(/id:)?\d+$", "", name) for name in threads(pid))
        pools = ovs.mempools()
        return cls(names, links, frozenset(re.sub(r"\d+", "N", name) for name in pools),
                   sum(pools.values()),
                   Path(f"/proc/{pid}/maps").read_text().count("/memfd:guest"))

    def more_than(self, other: Holdings) -> str:
        """What is more here than there, in words."""
        found = [f"{name}: {count}" for what in ("threads", "descriptors")
                 for name, count in (getattr(self, what) - getattr(other, what)).items()]
        found += [f"pool {name}" for name in self.pools - other.pools]
        found += [f"buffers: {self.buffers - other.buffers}"] * (self.buffers > other.buffers)
        found += [f"guests' memory: {self.guest_maps}"] * (self.guest_maps > other.guest_maps)
        return ", ".join(found)


@dataclass
class Slot:
    """A port and its guest."""

    number: int
    mode: str
    path: Path
    guest: VhostGuest | None = None
    gone: bool = False
    """Its guest is not one that traffic can be expected of."""

    @property
    def name(self) -> str:
        return f"v{self.number}"


@dataclass
class Totals:
    """What a run has come to."""

    rounds: int = 0
    made: Counter[str] = field(default_factory=Counter)
    waited: int = 0
    longest_s: float = 0.0


class Life:
    """A vswitchd from its start to its end."""

    def __init__(self, env: dict[str, str], directory: Path, choose: random.Random,
                 totals: Totals):
        self.ovs, self._dir, self._choose, self._totals = Ovs(env), directory, choose, totals
        self.pid = self.ovs.pid()
        self._run_dir = Path(env["OVS_RUNDIR"])
        group_nice(self.pid, -20)
        self._watch = Watch(self._run_dir / f"ovs-vswitchd.{self.pid}.ctl")
        count = choose.randint(1, MOST_GUESTS)
        modes = [choose.choice((CLIENT, SERVER)) for _ in range(count)]
        self._slots = [Slot(i, mode, (directory if mode == CLIENT else self._run_dir) / f"v{i}")
                       for i, mode in enumerate(modes)]
        self._held_back = choose.random() < 0.5

    @property
    def longest_s(self) -> float:
        """How long vswitchd has taken to answer, at most."""
        return self._watch.longest_s

    # The switch.

    def begin(self) -> None:
        """Make a bridge, and what is there once and for all after the first guest."""
        if self._held_back:
            self.ovs.set_config(shaper_rx_limit=RX_LIMIT)
        self._qos = self.ovs.vsctl("create", "QoS", "type=flowbundler",
                                   f"other_config:max-rate={PORT_BPS}",
                                   f"other_config:max-delay={MAX_DELAY_US}").strip()
        first = [Slot(90, CLIENT, self._dir / "v90"), Slot(91, SERVER, self._run_dir / "v91")]
        # Making the first pool of buffers keeps the main thread busy for seconds.
        self._restore(first, patience_s=30)
        self._watch.start()
        for slot in first:
            self._drop_guest(slot)
            self.ovs.vsctl("wait-until", "Interface", slot.name, "link_state=down")
        self._clear(first)
        begun = self._holdings()
        self._begun = replace(begun, descriptors=begun.descriptors + LATCH)

    def _restore(self, slots: list[Slot], patience_s: float = 10) -> None:
        """Have the bridge, all ports, guests and traffic there again."""
        ovs = self.ovs
        bridges = ovs.vsctl("list-br").split()
        words: list[str] = []
        if not bridges:
            words += ["--", "add-br", "br", "--", "set", "Bridge", "br", "datapath_type=netdev",
                      "fail_mode=secure", "protocols=[OpenFlow13,OpenFlow15]"]
        ports = ovs.vsctl("list-ports", "br").split() if bridges else []
        if "keep" not in ports:
            words += ["--", "add-port", "br", "keep", "--", "set", "Interface", "keep",
                      f"type={SERVER}"]
        for slot in slots:
            if slot.guest is None and slot.mode == CLIENT:
                self._new_guest(slot)  # It listens before the port comes.
            if slot.name not in ports:
                words += self.add_port(slot)
        if words:
            ovs.vsctl(*words)
        if not bridges:
            self._add_flows()
        for slot in slots:
            if slot.guest is None:
                self._new_guest(slot)
        for thread in pmd_threads(ovs):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, thread, -20)
        for slot in slots:
            assert slot.guest is not None
            sent = slot.guest.report().sent
            wait_until(lambda guest=slot.guest, sent=sent: self._looked_at(
                guest.report().sent > sent), f"guest {slot.name} sends", patience_s)

    def _looked_at(self, condition: bool) -> bool:
        self._watch.check()
        return condition

    def add_port(self, slot: Slot) -> list[str]:
        """What adds a port, with its QoS at once."""
        path = [f"options:vhost-server-path={slot.path}"] if slot.mode == CLIENT else []
        return ["--", "add-port", "br", slot.name, "--", "set", "Interface", slot.name,
                f"type={slot.mode}", f"ofport_request={100 + slot.number}", *path,
                "--", "set", "Port", slot.name, f"qos={self._qos}"]

    def _add_flows(self) -> None:
        """Each guest sends to the next one, by a meter of its own; the last to the first."""
        flows = []
        for slot in self._slots:
            other = (slot.number + 1) % len(self._slots)
            out = "in_port" if other == slot.number else f"output:{100 + other}"
            self.ovs.ofctl("add-meter", "br", f"meter={1 + slot.number} kbps stats "
                           f"bands=type=shape rate={METER_KBPS} max_delay={MAX_DELAY_US}")
            flows.append(f"in_port={100 + slot.number},actions=meter:{1 + slot.number},{out}")
        self.ovs.replace_flows("br", flows)

    def _new_guest(self, slot: Slot, until: Step | None = None) -> None:
        slot.guest = VhostGuest(slot.path, connect=slot.mode == SERVER, rate=OFFERED_PPS,
                                until=until)
        slot.gone = False

    def _drop_guest(self, slot: Slot) -> None:
        if slot.guest is not None:
            slot.guest.close()
            slot.guest = None
        if slot.mode == CLIENT:
            slot.path.unlink(missing_ok=True)

    def _clear(self, slots: list[Slot]) -> None:
        """Delete all ports and end all guests."""
        self.ovs.vsctl(*(word for slot in slots
                         for word in ("--", "--if-exists", "del-port", slot.name)))
        for slot in slots:
            self._drop_guest(slot)

    def _holdings(self) -> Holdings:
        """What there is when nothing changes any more."""
        last = Holdings.of(self.ovs, self.pid)

        def same() -> bool:
            nonlocal last
            before, last = last, Holdings.of(self.ovs, self.pid)
            return self._looked_at(before == last)

        wait_until(same, "vswitchd has come to rest", 10, 0.2)
        return last

    # A round.

    def round(self, change: str) -> None:
        """Have one guest, or all of a bridge, go while something is changed."""
        choose, way = self._choose, self._choose.choice(WAYS)
        self._restore(self._slots)
        victims = [choose.choice(self._slots)] if "port" in change or "again" in change else (
            list(self._slots))
        self._totals.waited += self._waiting()
        if way == "connecting":
            for slot in victims:
                self._reconnect(slot, choose.choice(UNTIL))
        begins = choose.random() < 0.5
        delay = choose.choice((0.0, choose.uniform(0, 0.05), choose.uniform(0, 0.3)))
        if begins:
            changing = self._change(change, victims[0])
            time.sleep(delay)
            self._go(way, victims)
        else:
            self._go(way, victims)
            time.sleep(delay)
            changing = self._change(change, victims[0])
        self._wait_changed(change, changing)
        self._after(way, victims)
        self._totals.rounds += 1
        self._totals.made[f"{way} {change}"] += 1

    def _waiting(self) -> int:
        """Packets that wait at all ports."""
        return sum(int(shown["backlog"]) for shown in self.ovs.flowbundler_show().values())

    def _reconnect(self, slot: Slot, until: Step) -> None:
        """Have a guest in the middle of connecting, or about to be."""
        self._drop_guest(slot)
        self._new_guest(slot, until)
        if self._choose.random() < 0.5:
            assert slot.guest is not None
            slot.guest.wait_state("stopped")

    def _change(self, change: str, slot: Slot) -> Background:
        """Begin to change something."""
        program = ["ovs-vsctl", "--timeout=20"]
        if change == "port-deleted":
            argv = [*program, "del-port", slot.name]
        elif change == "bridge-deleted":
            argv = [*program, "del-br", "br"]
        elif change == "added-again":
            argv = [*program, "del-port", slot.name, *self.add_port(slot)]
        else:
            self._watch.stop()  # It answers when it has cleaned up.
            argv = ["ovs-appctl", "--timeout=20", "exit",
                    *["--cleanup"] * self._choose.randint(0, 1)]
        return Background(argv, env=self.ovs.env)

    def _go(self, way: str, victims: list[Slot]) -> None:
        """Have guests go."""
        for slot in victims:
            assert slot.guest is not None
            if way == "frozen":
                slot.guest.pause()
            elif way == "closed":
                with contextlib.suppress(CommandError, BrokenPipeError):
                    slot.guest.begin("close")
            else:
                slot.guest.kill()
            slot.gone = True

    def _wait_changed(self, change: str, changing: Background) -> None:
        begun = time.monotonic()
        while changing.running():
            self._looked_at(True)
            if time.monotonic() > begun + 10:
                raise RoundError(f"{change} takes more than 10 s")
            time.sleep(0.01)
        if change == "exit":
            wait_until(lambda: not alive(self.pid), "vswitchd has ended", 5)
        elif changing.popen.returncode:
            raise RoundError(f"{change}: {changing.stderr()}")
        changing.close()

    def _after(self, way: str, victims: list[Slot]) -> None:
        """Let some of those that are frozen go on, and have new ones for the others."""
        for slot in victims:
            if way == "frozen" and self._choose.random() < 0.5:
                assert slot.guest is not None
                slot.guest.resume()
            else:
                self._drop_guest(slot)

    # Its end.

    def check_holdings(self) -> None:
        """Without ports, it has no more than when it began."""
        self._restore([])
        self._clear(self._slots)

        def no_more() -> bool:
            return self._looked_at(not Holdings.of(self.ovs, self.pid).more_than(self._begun))

        try:
            wait_until(no_more, "vswitchd has given all back", 10, 0.2)
        except TimeoutError:
            more = Holdings.of(self.ovs, self.pid).more_than(self._begun)
            raise RoundError(f"vswitchd keeps {more}") from None

    def failed(self) -> None:
        """Say where its threads are, and end it."""
        print(backtraces(self.pid), file=sys.stderr)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)

    def close(self) -> None:
        """End all that is not vswitchd."""
        self._watch.stop()
        self._totals.longest_s = max(self._totals.longest_s, self._watch.longest_s)
        for slot in self._slots:
            self._drop_guest(slot)


@contextlib.contextmanager
def load() -> Iterator[None]:
    """Keep all processors busy, each by a process of its own session."""
    loops = [Background(["sh", "-c", "while :; do :; done"], name="loop", cpus={cpu})
             for cpu in sorted(os.sched_getaffinity(0))]
    try:
        yield
    finally:
        for loop in loops:
            loop.close()


def live(choose: random.Random, rounds: int, totals: Totals,
         say: Callable[[str], None]) -> None:
    """Run rounds with one vswitchd; it exits in the last one."""
    with (tempfile.TemporaryDirectory(prefix="fb-rounds-") as directory,
          switch("--private-net", "--memory", "256") as env):
        life = Life(env, Path(directory), choose, totals)
        try:
            life.begin()
            changes = [choose.choice(CHANGES[:-1]) for _ in range(rounds - 1)]
            for change in changes:
                begun = time.monotonic()
                life.round(change)
                say(f"{change}, {time.monotonic() - begun:.1f} s, "
                    f"longest answer {life.longest_s * 1000:.0f} ms")
            life.check_holdings()
            life.round("exit")
            say("exit")
        except BaseException:
            life.failed()
            raise
        finally:
            life.close()


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None, help="default: the time")
    parser.add_argument("--no-record", action="store_true", help="add no line to the record")
    args = parser.parse_args()
    seed = int(time.time()) if args.seed is None else args.seed
    print(f"rounds: {args.rounds} with --seed {seed}", flush=True)
    choose, totals, begun = random.Random(seed), Totals(), time.monotonic()
    error: BaseException | None = None

    def say(text: str) -> None:
        print(f"rounds: {time.monotonic() - begun:6.1f} s: {totals.rounds}: {text}", flush=True)

    try:
        with load():
            while totals.rounds < args.rounds:
                live(choose, min(ROUNDS_OF_A_LIFE, args.rounds - totals.rounds), totals, say)
        if not totals.waited:
            raise RoundError("no packet has ever waited")
    except (AssertionError, CommandError, TimeoutError) as exc:
        error = exc
    detail = {"rounds": totals.rounds, "seed": seed, "seconds": int(time.monotonic() - begun),
              "longest_answer_ms": int(totals.longest_s * 1000), "packets_waited": totals.waited}
    if not args.no_record:
        runs.append("rounds", LOAD, error is None, detail)
    print("rounds:", *(f"{name}={value}" for name, value in detail.items()))
    for what, count in sorted(totals.made.items()):
        print(f"rounds: {count:4} {what}")
    if error is not None:
        print(f"rounds: FAILED with --seed {seed}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
