"""The Open vSwitch that the switches of this process's networks are bridges of.

One ovsdb-server and one ovs-vswitchd, which fb-sandbox starts and ends: on demand, and
with the last switch that uses them.  fb-sandbox runs a *holder*, a small program that
waits for the end of its input.  That comes when we close it and also when this process
dies, whatever of; then the holder deletes interfaces that we would have deleted, and
fb-sandbox ends the daemons and removes their files.

Not for several threads at once, as mininet is not.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from fbtest.ovs import Ovs
from fbtest.proc import group_nice, spare_cpus

HERE = Path(__file__).resolve().parent.parent
SANDBOX = HERE / "fb-sandbox"
HOLDER = Path(__file__).with_name("holder.py")
#: Memory for DPDK in MB, if there is as much: 262,144 buffers fit.
MEMORY_MB = 1024
#: How much a full frame takes of that, with what DPDK adds.
BUFFER_BYTES = 3200
#: OVS's pool has as many buffers at most.
BUFFERS_MAX = 262_144


class SwitchError(RuntimeError):
    """The switch cannot do what it should; the message says what to do."""


def built_tree() -> Path:
    """The Open vSwitch with our shaper: what is built here, or what is installed."""
    build = Path(os.environ.get("FB_BUILD") or HERE.parent / "build")
    installed = HERE.parents[2]  # PREFIX/share/flowbundler/utilities
    for tree, program in ((build / "ovs", "vswitchd/ovs-vswitchd"),
                          (installed, "sbin/ovs-vswitchd")):
        if os.access(tree / program, os.X_OK):
            return tree
    raise SwitchError(f"there is no Open vSwitch with the shaper in {build} or {installed}: "
                      f"run 'sudo make' in {HERE.parent}, or 'make install'")


class VSwitch:
    """A running ovs-vswitchd.

    `dpdk` says whether its ports are DPDK's, polled by a thread of their own; `buffers` is
    how many packets it can hold.  `close` ends it, if it was started here.
    """

    def __init__(self, dpdk: bool | None, memory: int | None):
        self._holder: subprocess.Popen[str] | None = None
        self._devices = itertools.count()
        self._own_cpus = os.sched_getaffinity(0)
        self.users: set[object] = set()
        memory = memory or min(MEMORY_MB, max(128, _available_mb() // 4))
        if "FB_SANDBOX" in os.environ:
            # We run in one that was started for us.
            self.ovs = Ovs()
        else:
            self.ovs = Ovs(self._start(dpdk, memory))
        config = self.ovs.get("Open_vSwitch", ".", "other_config")
        self.dpdk = config.get("dpdk-init") == "true"
        limit = int(config.get("dpdk-socket-limit") or config.get("dpdk-alloc-mem") or memory)
        self.buffers = min(BUFFERS_MAX, limit * 1_000_000 // BUFFER_BYTES)
        self.spare_cpus = spare_cpus(self.ovs.pmd_cpus() if self.dpdk else set())
        # A thread that polls has its core to itself in production.  Here it may have to
        # share: let it have nearly all, and keep what runs in hosts off it.
        group_nice(self.ovs.pid(), -20)
        self.keep_off(0)

    def _start(self, dpdk: bool | None, memory: int) -> dict[str, str]:
        """Start it, with DPDK if that can be and is not unwanted; returns its environment."""
        if os.geteuid() != 0:
            raise SwitchError("a switch needs root: run this with sudo")
        tree = built_tree()
        said = []
        for with_dpdk in (True, False) if dpdk is None else (dpdk,):
            options = ["--discard-logs", "--stock-tree", str(tree), "--memory", str(memory)]
            try:
                environ = self._run([*options, *([] if with_dpdk else ["--no-dpdk"])])
            except SwitchError as error:
                said.append(str(error))
                continue
            if said:
                print(f"*** DPDK does not start, so rates and times are less exact:\n{said[0]}",
                      file=sys.stderr)
            return environ
        raise SwitchError("\n".join(said))

    def _run(self, options: list[str]) -> dict[str, str]:
        with tempfile.TemporaryFile("w+") as errors:
            # In a session of its own: Ctrl-C is for mininet.
            holder = subprocess.Popen(
                [str(SANDBOX), "run", *options, "--", sys.executable, str(HOLDER)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True)
            assert holder.stdout is not None
            try:
                line = holder.stdout.readline()
            except BaseException:
                _end(holder)
                raise
            if not line:
                _end(holder)
                errors.seek(0)
                raise SwitchError(f"Open vSwitch does not start: {errors.read().strip()}")
        self._holder = holder
        self.guard(_links)
        return json.loads(line)

    def guard(self, links: Iterable[str]) -> None:
        """Have `links` deleted when this process has died without doing so."""
        if self._holder and self._holder.stdin:
            with contextlib.suppress(BrokenPipeError):
                for link in links:
                    self._holder.stdin.write(link + "\n")
                self._holder.stdin.flush()

    def keep_off(self, pid: int) -> None:
        """Keep process `pid` and its future children off the CPUs that switch."""
        with contextlib.suppress(OSError):
            os.sched_setaffinity(pid, self.spare_cpus)

    def device(self) -> str:
        """A name for a DPDK device that none has had."""
        return f"net_af_packet{os.getpid()}{next(self._devices):04}"

    def running(self) -> bool:
        """Whether it was started and has not been ended by others (mn -c)."""
        return self._holder is None or self._holder.poll() is None

    def close(self) -> None:
        """End it and remove what it has left.  A second time it does nothing."""
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self._own_cpus)
        self.guard([""])     # We live, and will delete ours.
        holder, self._holder = self._holder, None
        if holder is not None:
            _end(holder)


def _end(holder: subprocess.Popen[str]) -> None:
    """Have fb-sandbox end what it has started, and wait for that."""
    with contextlib.suppress(BrokenPipeError):
        holder.stdin.close()
    try:
        holder.wait(60)
    except subprocess.TimeoutExpired:
        holder.terminate()
        holder.wait()
    holder.stdout.close()


def _available_mb() -> int:
    """The machine's free memory in MB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 0


# The one of this process.
_current: VSwitch | None = None
# Interfaces between switches: no namespace takes them with it when it ends.
_links: set[str] = set()


def acquire(user: object, dpdk: bool | None = None, memory: int | None = None) -> VSwitch:
    """The running vswitchd, started if need be, for `user` until its `release`.

    `dpdk` and `memory` (MB) are those of the first user.  Raises SwitchError.
    """
    global _current
    if _current is not None and not _current.running():
        _stop()
    if _current is None:
        _current = VSwitch(dpdk, memory)
    _current.users.add(user)
    return _current


def release(users: Iterable[object]) -> None:
    """End it, unless there are users besides `users`."""
    if _current is not None:
        _current.users -= set(users)
        if not _current.users:
            _stop()


def guard(link: str) -> None:
    """Have interface `link` of this network namespace deleted at the end, however it comes."""
    _links.add(link)
    if _current is not None:
        _current.guard([link])


def _stop() -> None:
    global _current
    current, _current = _current, None
    if current is not None:
        current.close()


@atexit.register
def close() -> None:
    """End the vswitchd, and delete all links between switches, of whatever network."""
    _stop()
    there = _links & set(os.listdir("/sys/class/net"))
    for link in there:
        subprocess.run(["ip", "link", "del", link], check=False, stderr=subprocess.DEVNULL)
    _links.clear()
