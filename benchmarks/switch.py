"""A switch to be measured: OVS-DPDK from a build tree, with one PMD thread."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from fbtest.ovs import Ovs

REPO = Path(__file__).resolve().parent.parent
BUILD = Path(os.environ.get("FB_BUILD") or REPO / "build")

#: All there are; a rig keeps this process off the PMD thread's.
_CPUS = ",".join(map(str, sorted(os.sched_getaffinity(0))))

#: The trees that are compared.  PEERS is ours with a choice of schedulers in the place
#: of the wheel: benchmarks/sched/peers.h.
OURS, STOCK, PEERS = "ovs", "ovs-stock", "bench/peers"

# Tells the environment of the sandbox it is started in, and stays until the
# end of its input, which also comes if we are killed.
_INSIDE = """
import json, os, sys
print("BENCH " + json.dumps(dict(os.environ)), flush=True)
sys.stdin.read()
"""


class Switch:
    """A running ovs-vswitchd, of OVS tree build/`tree`.

    Several can run at a time if all but one are `private`: in network namespaces
    of their own, which ports to other namespaces cannot be made from.
    """

    def __init__(self, tree: str = OURS, *, config: Mapping[str, str | int] | None = None,
                 private: bool = False, probe: bool = False, memory_mb: int = 2048):
        if not (BUILD / tree / "vswitchd" / "ovs-vswitchd").exists():
            raise RuntimeError(f"{BUILD / tree} is not built: run 'make bench-tools'")
        self.tree = tree
        options = ["--memory", str(memory_mb), *(["--private-net"] if private else [])]
        options += ["--probe"] if probe else []
        for key, value in (config or {}).items():
            options += ["--set", f"{key}={value}"]
        self._sandbox = subprocess.Popen(
            ["taskset", "--cpu-list", _CPUS, str(REPO / "utilities" / "fb-sandbox"), "run",
             "--stock-tree", str(BUILD / tree), *options, "--", sys.executable, "-c", _INSIDE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self._control = socket.socket(socket.AF_UNIX)
        self.pid = 0
        try:
            self.ovs = Ovs(self._environ())
            self.pid = self.ovs.pid()
            self._control.settimeout(60)
            self._control.connect(
                str(Path(self.ovs.env["OVS_RUNDIR"], f"ovs-vswitchd.{self.pid}.ctl")))
        except BaseException:
            self.close()
            raise

    def _environ(self) -> dict[str, str]:
        assert self._sandbox.stdout is not None
        for line in self._sandbox.stdout:
            if line.startswith("BENCH "):
                return json.loads(line[len("BENCH "):])
        raise RuntimeError(f"fb-sandbox ended with status {self._sandbox.wait()}")

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, kind: type[BaseException] | None, _exc: BaseException | None,
                 _traceback: TracebackType | None) -> None:
        status = self.close()
        if status and kind is None:
            raise RuntimeError(f"fb-sandbox ended with status {status}")

    def close(self) -> int:
        """End it; returns the sandbox's exit status."""
        assert self._sandbox.stdin is not None
        self.resume()
        self._control.close()
        # Popen closes its ends of the pipes, and waits.
        with self._sandbox:
            self._sandbox.stdin.close()
            try:
                self._sandbox.wait(60)
            except subprocess.TimeoutExpired:
                self._sandbox.terminate()
        return self._sandbox.returncode

    def pause(self) -> None:
        """Stop vswitchd, with its PMD threads, until `resume`."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let vswitchd run again."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)

    def ctl(self, command: str, *args: str) -> str:
        """What ``ovs-appctl`` would print, without starting a program."""
        request = {"id": 0, "method": command, "params": args}
        self._control.sendall(json.dumps(request).encode())
        text = b""
        while True:
            more = self._control.recv(1 << 16)
            if not more:
                raise RuntimeError(f"{command}: ovs-vswitchd is gone")
            text += more
            try:
                reply = json.loads(text)
            except ValueError:
                continue  # There is more to come.
            if reply["error"]:
                raise RuntimeError(f"{command}: {reply['error']}")
            return reply["result"]

    def pmd_stats(self) -> dict[str, int]:
        """The PMD thread's counters, by the names that pmd-stats-show has for them."""
        text = self.ctl("dpif-netdev/pmd-stats-show")
        block = text[text.index("pmd thread "):text.index("main thread")]
        pairs = (line.strip().split(": ", 1) for line in block.splitlines() if ": " in line)
        return {key: int(value.split()[0]) for key, value in pairs
                if value.split()[0].isdigit()}


@contextmanager
def only(switch: Switch, others: Iterable[Switch]) -> Iterator[None]:
    """Let `switch` run and hold the others, which share the PMD thread's core with it."""
    for other in others:
        if other is not switch:
            other.pause()
    switch.resume()
    try:
        yield
    finally:
        for other in others:
            other.resume()
