"""Commands and child processes that never outlive the test.

Every child is started through ``setpriv --pdeathsig KILL``: whatever happens
to the test (also SIGKILL), the kernel ends its children.  Children are ended
by their own pid, never by name.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from . import procfs

T = TypeVar("T")

#: How long a process that is killed may take to end.
KILL_S = 5.0


class CommandError(RuntimeError):
    """A command failed; the message shows the command and what it said."""

    def __init__(self, argv: Sequence[str], status: int | None, output: str):
        self.argv = list(argv)
        self.status = status
        self.output = output
        how = "timed out" if status is None else f"exit status {status}"
        super().__init__(f"{' '.join(argv)}: {how}: {output.strip()}")


def run(
    *argv: str,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    timeout: float = 30.0,
    check: bool = True,
) -> str:
    """Run a command to its end and return its standard output.

    Raises `CommandError`, with standard error in it, if the command fails
    (unless `check` is false) or does not end in `timeout` seconds.
    """
    try:
        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as exc:
        raise CommandError(argv, 127, str(exc)) from exc
    try:
        out, err = process.communicate(stdin, timeout)
    except subprocess.TimeoutExpired as exc:
        raise CommandError(argv, None, f"after {timeout} s{_kill(process)}") from exc
    except BaseException:
        _kill(process)
        raise
    if check and process.returncode:
        raise CommandError(argv, process.returncode, err or out)
    return out


def _kill(process: subprocess.Popen[str]) -> str:
    """Kill a process; returns what is to be said of it if it does not end.

    One that waits in the kernel, for a lock of it, ends after that only: it is left
    alone.  (`subprocess.run` would wait for it for ever.)
    """
    waits = procfs.read(process.pid, "wchan") or "?"
    process.kill()
    try:
        process.communicate(timeout=KILL_S)
    except subprocess.TimeoutExpired:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return f"; it does not end when it is killed: it waits in the kernel ({waits})"
    return ""


def wait_until(
    condition: Callable[[], T],
    what: str,
    timeout: float = 10.0,
    interval: float = 0.02,
) -> T:
    """Poll `condition` until it gives a true value, and return that value.

    Raises `TimeoutError` naming `what` once `timeout` seconds have passed.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not so after {timeout:g} s")
        time.sleep(interval)


def parse_cpu_mask(mask: str) -> set[int]:
    """The CPUs of a hexadecimal mask such as ``0x2`` or ``2``."""
    bits = int(mask, 16)
    return {cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1}


def spare_cpus(busy: set[int]) -> set[int]:
    """The CPUs this process may use that are not `busy`; all if none is left.

    Traffic programs are kept off the cores that a PMD thread polls on:
    otherwise the kernel takes the core from the PMD for milliseconds.
    """
    allowed = os.sched_getaffinity(0)
    return (allowed - busy) or allowed


def group_nice(pid: int, nice: int) -> int | None:
    """Set how nice the session of process `pid` is; returns what it was.

    Where the kernel schedules sessions as groups, the niceness of a thread
    counts in its session only.  None if the kernel does not.
    """
    path = Path(f"/proc/{pid}/autogroup")
    try:
        old = int(path.read_text().split()[-1])
        path.write_text(str(nice))
    except OSError:
        return None
    return old


class Background:
    """A child process with its output in a file, ended with `stop`."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        name: str = "",
        env: Mapping[str, str] | None = None,
        cpus: set[int] | None = None,
        stdin: int | None = subprocess.DEVNULL,
    ):
        self.name = name or Path(argv[0]).name
        self.argv = list(argv)
        # The shell sees to it that this process was not gone before its
        # death could be told to the child.
        full = ["setpriv", "--pdeathsig", "KILL",
                "sh", "-c", '[ "$PPID" = "$0" ] && exec "$@"', str(os.getpid())]
        if cpus:
            full += ["taskset", "-c", ",".join(map(str, sorted(cpus)))]
        self._out = tempfile.TemporaryFile()  # noqa: SIM115
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            # A session of its own: Ctrl-C at the terminal reaches only the
            # test, which then ends its children in order.
            self.popen = subprocess.Popen(
                full + self.argv,
                env=env,
                stdin=stdin,
                stdout=self._out,
                stderr=self._err,
                start_new_session=True,
            )
        except OSError:
            self._out.close()
            self._err.close()
            raise

    @property
    def pid(self) -> int:
        """The process's pid (what comes before it in the command execs into it)."""
        return self.popen.pid

    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return self.popen.poll() is None

    def stdout(self) -> str:
        """What it has written to standard output so far."""
        return self._read(self._out)

    def stderr(self) -> str:
        """What it has written to standard error so far."""
        return self._read(self._err)

    @staticmethod
    def _read(file) -> str:
        size = os.fstat(file.fileno()).st_size
        return os.pread(file.fileno(), size, 0).decode(errors="replace")

    def check_running(self) -> None:
        """Raise `CommandError` if the process has ended."""
        if not self.running():
            raise CommandError(
                self.argv, self.popen.returncode, self.stderr() or self.stdout()
            )

    def wait(self, timeout: float) -> int:
        """Wait for its end; raise `CommandError` after `timeout` seconds."""
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired as exc:
            raise CommandError(
                self.argv, None, f"after {timeout} s: {self.stderr()}"
            ) from exc

    def stop(
        self, grace: float = 2.0, first: signal.Signals = signal.SIGTERM
    ) -> int:
        """End the process: `first`, then SIGKILL after `grace` seconds."""
        if self.running():
            self.popen.send_signal(first)
            try:
                self.popen.wait(grace)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                # (One that waits in the kernel ends after that only.)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.popen.wait(KILL_S)
        return self.popen.returncode

    def close(self) -> None:
        """`stop`, and give back the output files."""
        self.stop()
        self._out.close()
        self._err.close()
