"""A private ovsdb-server: the controller's own, on a file, for as long as it runs."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from fbrates.store import StoreError

SCHEMA = Path(__file__).parent / "flowbundler.ovsschema"
READY_TIMEOUT = 10.0
_PR_SET_PDEATHSIG = 1
_HEADER = re.compile(rb"OVSDB JSON ([0-9]{1,12}) ([0-9a-f]{40})\n")


def find(program: str) -> str:
    """Find one of OVS's programs: where it was built, or installed; raises StoreError."""
    build = os.environ.get("FB_BUILD") or Path(__file__).parents[2] / "build"
    tree = os.environ.get("FB_OVS_TREE") or Path(build) / "ovs"
    path = os.pathsep.join(
        [str(Path(tree, "ovsdb")), os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin"]
    )
    found = shutil.which(program, path=path)
    if found is None:
        raise StoreError(
            f"{program} is not installed; build or install Open vSwitch, name a database with "
            "--db, or remember nothing with --db none"
        )
    return found


def verify(database: Path) -> None:
    """Raise StoreError if a record of a database file is damaged.

    ovsdb-server would start with what is before it, and throw away the rest at its next
    write.  A last record that is cut off was being written, and nobody was told that it
    was there.  (The format: ovsdb(7), "Transaction log".)
    """
    with open(database, "rb") as file:
        while line := file.readline(256):
            match = _HEADER.fullmatch(line)
            if match is None:
                if line.endswith(b"\n") or file.read(1):
                    raise _damaged(database, file.tell())
                return
            length = int(match[1])
            data = file.read(length)
            if len(data) < length:
                return
            if hashlib.sha1(data).hexdigest().encode() != match[2]:
                raise _damaged(database, file.tell())


def _damaged(database: Path, where: int) -> StoreError:
    return StoreError(
        f"{database} is damaged before byte {where}; it is left as it is: restore or repair it, "
        "or move it away to begin with the file of tenants"
    )


class Server:
    """ovsdb-server on ``DIRECTORY/flowbundler.db``.

    It ends when the thread that has started it does, which is to be the process's first.
    """

    def __init__(self, directory: Path) -> None:
        """Start it, and make the database first if there is none; raises StoreError."""
        self.directory = directory
        self.socket = directory / "db.sock"
        self.remote = f"unix:{self.socket}"
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        database = self.database = directory / "flowbundler.db"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not database.exists():
                made = directory / "flowbundler.db.new"
                made.unlink(missing_ok=True)
                self._run(find("ovsdb-tool"), "create", str(made), str(SCHEMA))
                made.rename(database)
            verify(database)
            self._start(database)
        except OSError as error:
            raise StoreError(f"{directory}: {error.strerror or error}") from None

    def _start(self, database: Path) -> None:
        program, log = find("ovsdb-server"), self.directory / "ovsdb-server.log"
        libc = ctypes.CDLL(None)
        deadline = time.monotonic() + READY_TIMEOUT
        self.socket.unlink(missing_ok=True)
        while True:
            # Another one that has just lost its controller may still have the file.
            with open(log, "ab") as output:
                self.process = subprocess.Popen(
                    [
                        program,
                        str(database),
                        f"--remote=p{self.remote}",
                        f"--unixctl={self.directory}/ovsdb-server.ctl",
                        "--no-chdir",
                        "-vconsole:info",
                    ],
                    cwd=self.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
                )
            while self.process.poll() is None:
                if self.socket.exists():
                    return
                if time.monotonic() > deadline:
                    self.close()
                    raise StoreError(f"ovsdb-server is not ready in {READY_TIMEOUT:.0f} s: {log}")
                time.sleep(0.01)
            if time.monotonic() > deadline:
                last = log.read_text(errors="replace").splitlines()[-1:] or ["it said nothing"]
                raise StoreError(f"ovsdb-server does not start ({log}): {last[0]}")
            time.sleep(0.1)

    def revive(self) -> None:
        """Start it again if it has ended; raises StoreError."""
        if self.process is not None and self.process.poll() is not None:
            self.restarts += 1
            verify(self.database)
            self._start(self.database)

    @staticmethod
    def _run(*command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise StoreError(f"{command[0]}: {done.stderr.strip()}")

    def close(self) -> None:
        """End it."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
                return
            self.process.kill()
            self.process.wait()


def default_directory() -> Path:
    """Where state is kept if nobody says: systemd's choice, or the system's, or the user's."""
    if systemd := os.environ.get("STATE_DIRECTORY"):
        return Path(systemd.split(":")[0])
    if os.geteuid() == 0:
        return Path("/var/lib/flowbundler")
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "flowbundler"
