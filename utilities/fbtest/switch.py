"""vswitchds for tests, in sandboxes, and what becomes of one that dies or hangs.

A `Switch` is shared by tests, one after another.  One that does not answer any
more is killed, its threads' backtraces are in the report of the test that it
happened in, and the next test has a new one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .ovs import Ovs
from .proc import CommandError, run

SANDBOX = Path(__file__).resolve().parent.parent / "fb-sandbox"

#: How fb-sandbox ends if a daemon crashed or hung.
CRASHED = 125
#: How long fb-sandbox may take to end: with one that hangs it waits, and calls gdb.
END_S = 180
#: For how long a thread may keep the others from freeing memory, in ms.  OVS logs it
#: when it has been for 1000 ms, and each time that is twice as long.
MOST_BLOCKED_MS = 3000
_BLOCKED = re.compile(r"\|ovs_rcu(?:\([^)]*\))?\|WARN\|blocked (\d+) ms waiting for .* to quiesce")

# Runs inside the sandbox: tells its environment, and stays until told to
# end by the end of its input, which also comes if pytest is killed.
_INSIDE = """
import json, os, sys
print("FBTEST " + json.dumps(dict(os.environ)), flush=True)
sys.stdin.read()
"""


class SwitchError(AssertionError):
    """Something is wrong with a vswitchd."""


class Sandbox:
    """A running ``fb-sandbox run``; it ends with this process at the latest."""

    def __init__(self, *options: str, **variables: str):
        self._process = subprocess.Popen(
            [str(SANDBOX), "run", *options, "--", sys.executable, "-c", _INSIDE],
            env={**os.environ, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, start_new_session=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("FBTEST "):
                self.env: dict[str, str] = json.loads(line[len("FBTEST "):])
                return
        raise SwitchError(f"fb-sandbox ended with status {self._process.wait()}")

    def stop(self) -> int:
        """End it; returns the exit status of fb-sandbox."""
        # Popen closes its ends of the pipes, and waits.
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait(END_S)
        return process.returncode


class Log:
    """What the vswitchd of an environment logs from now on."""

    def __init__(self, env: Mapping[str, str]):
        self._ovs = Ovs(env)
        path = Path(env.get("OVS_LOGDIR", env["OVS_RUNDIR"]), "ovs-vswitchd.log")
        # Held open: a sandbox that ends in order removes it.
        self._file = path.open("rb")
        self._flush()
        self._start = self._file.seek(0, os.SEEK_END)

    def _flush(self) -> None:
        """Have vswitchd, if it lives, write what it has logged.

        It leaves that to the C library's asynchronous I/O: a line may come to the file
        long after what was done next.  All of it comes before the file is closed.
        """
        try:
            self._ovs.appctl("vlog/reopen")
        except CommandError:
            if self._ovs.running():
                raise

    def lines(self) -> list[str]:
        """The lines logged since then."""
        self._flush()
        self._file.seek(self._start)
        return self._file.read().decode(errors="replace").splitlines()

    def blocked(self) -> list[str]:
        """Those that say that a thread has not come round for too long."""
        return [line for line in self.lines()
                if (match := _BLOCKED.search(line)) and int(match[1]) > MOST_BLOCKED_MS]


#: All that there are, for `post_mortems`.
_switches: list[Switch] = []


class Switch:
    """A vswitchd that tests share, in a sandbox with these options.

    It is started for the first test that needs it, with these `variables` in its
    environment.  `given` is the environment of one that runs already, and is somebody
    else's to stop.  `crashed`: a daemon of it will have been killed in the end.
    """

    def __init__(self, *options: str, given: Mapping[str, str] | None = None,
                 variables: Mapping[str, str] | None = None, crashed: bool = False):
        self._options = list(options)
        self._variables = dict(variables or {})
        self._given = given
        self._status = CRASHED if crashed else 0
        self._sandbox: Sandbox | None = None
        #: Why it is not to be used any more; "" if it is.
        self._dead = ""
        _switches.append(self)

    @property
    def env(self) -> dict[str, str] | None:
        """Its environment, if it runs."""
        if self._sandbox is not None:
            return self._sandbox.env
        return None if self._given is None else dict(self._given)

    def _start(self) -> None:
        """Have it run, in place of one that is dead."""
        if self._dead:
            if self._sandbox is None:
                # Like the one that somebody else had started.
                tree = (self._given or {}).get("FB_OVS_TREE")
                self._options += ["--stock-tree", tree] if tree else []
                self._given = None
            self.stop()
        if self.env is None:
            self._sandbox = Sandbox(*self._options, **self._variables)

    def post_mortem(self) -> str:
        """If it has died or hangs: kill it, and return what there is to say.

        Else, or if that has been said, returns "".
        """
        env = self.env
        if env is None or self._dead or Ovs(env).alive():
            return ""
        try:
            self._dead = run(str(SANDBOX), "kill", "--run-dir", env["OVS_RUNDIR"],
                             timeout=END_S)
        except CommandError as exc:
            self._dead = str(exc)
        return self._dead

    @contextmanager
    def watched(self) -> Iterator[dict[str, str]]:
        """Give the environment of a vswitchd that answers, for one test.

        Raises `SwitchError` in the end if it has died, hangs, or was blocked for too
        long; of one that was dead before too, since no other test has.
        """
        before = self.post_mortem()
        self._start()
        env = self.env
        assert env is not None
        log = Log(env)
        yield env
        if before:
            raise SwitchError(f"ovs-vswitchd was dead or hung before this test: {before}")
        if self._dead:
            return  # It has been said.
        if text := self.post_mortem():
            raise SwitchError(f"ovs-vswitchd has died or hangs: {text}")
        if blocked := log.blocked():
            raise SwitchError("ovs-vswitchd was blocked:\n" + "\n".join(blocked))

    def stop(self) -> None:
        """End it; raises `SwitchError` if that shows that something was wrong."""
        sandbox, self._sandbox = self._sandbox, None
        dead, self._dead = self._dead, ""
        if sandbox is not None:
            status = sandbox.stop()
            if status != self._status and not dead:
                raise SwitchError(f"fb-sandbox ended with status {status}")

    def close(self) -> None:
        """`stop` for good."""
        _switches.remove(self)
        self.stop()


def post_mortems() -> list[str]:
    """Of each switch that has died or hangs what there is to say, once."""
    return [text for switch in list(_switches) if (text := switch.post_mortem())]
