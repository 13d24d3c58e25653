"""Guests of vhost-user ports that come and go in milliseconds, as processes.

`VhostGuest` runs tests/vhost_peer.py.  `answers` is what has to hold whatever a
guest does: that vswitchd answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from fbtest import procfs
from fbtest.ovs import Ovs
from fbtest.proc import Background, CommandError, wait_until
from fbtest.switch import Sandbox

from vhost_peer import Counters, Step

PROGRAM = Path(__file__).resolve().parent / "vhost_peer.py"
#: How long vswitchd may take to answer.
PATIENCE_S = 2


class VhostGuest:
    """A guest at the socket `path`: where it listens, or with `connect` the port does.

    It stops connecting after `until`, or with `half` in the middle of that message.
    """

    def __init__(self, path: Path, *, connect: bool = False, rate: int = 0,
                 until: Step | None = None, half: bool = False, sender: int = 1,
                 destination: int = 1, cpus: set[int] | None = None):
        self.path = path
        options = [f"--rate={rate}", f"--sender={sender}", f"--destination={destination}"]
        options += ["--connect"] * connect + ["--half"] * half
        options += [f"--until={until.name}"] if until is not None else []
        # Nothing of the environment of Python is needed, and it takes time to look for.
        self._process = Background([sys.executable, "-I", "-S", str(PROGRAM), *options, str(path)],
                                   name="vhost_peer", stdin=subprocess.PIPE, cpus=cpus)
        self._seen = 0
        if not connect:
            wait_until(self._listening, f"a guest listens on {path}", interval=0.002)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def _listening(self) -> bool:
        self._process.check_running()
        return self.path.exists()

    def command(self, command: str, timeout: float = 10) -> Counters:
        """Have it do one of its commands."""
        self.begin(command)

        def line() -> str:
            text = self._process.stdout()[self._seen:]
            if not text.endswith("}\n"):
                self._process.check_running()
            return text if text.endswith("}\n") else ""

        text = wait_until(line, f"the guest does {command}", timeout, interval=0.002)
        self._seen += len(text)
        return Counters(**json.loads(text))

    def begin(self, command: str) -> None:
        """Tell it to do one of its commands, and do not wait for that."""
        stdin = self._process.popen.stdin
        assert stdin is not None
        stdin.write(command.encode() + b"\n")
        stdin.flush()

    def report(self) -> Counters:
        """What it has counted."""
        return self.command("report")

    def wait_state(self, state: str, timeout: float = 10) -> None:
        """Wait until it is "waiting", "running", "stopped" or "half"."""
        wait_until(lambda: self.report().state == state, f"the guest is {state}", timeout, 0.005)

    def pause(self) -> None:
        """Stop it, as if it had no processor."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run again."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.stop(first=signal.SIGKILL)

    def close(self) -> None:
        """End it, if it still runs."""
        self.kill()
        stdin = self._process.popen.stdin
        if stdin is not None:
            stdin.close()
        self._process.close()


def answers(ovs: Ovs) -> bool:
    """Whether vswitchd answers within `PATIENCE_S`."""
    try:
        ovs.appctl("version", timeout=PATIENCE_S)
    except CommandError:
        return False
    return True


def threads(pid: int) -> list[str]:
    """The names of a process's threads, sorted."""
    return sorted(procfs.threads(pid).values())


@contextlib.contextmanager
def switch(*options: str, **variables: str) -> Iterator[dict[str, str]]:
    """Give the environment of a vswitchd in a sandbox; it may have exited in the end.

    That is what is different from `fbtest.fixtures.sandbox`.
    """
    running = Sandbox(*options, **variables)
    try:
        yield running.env
    finally:
        status = running.stop()
    assert status == 0, f"fb-sandbox ended with status {status}"
