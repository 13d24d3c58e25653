"""The first process of the namespaces that mininet_bed.py runs a program in.

usage: mininet_inside.py FD REPOSITORY BUILD PROGRAM...

Makes the namespaces fit to run in, runs PROGRAM, and exits with its status (that of a
shell).  Writes to the file descriptor FD, as JSON, what is left of it after a while:
interfaces, processes, directories of sandboxes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

#: How long what has been killed may take to clean up.
PATIENCE_S = 20.0


def shell(command: str, *args: str) -> None:
    subprocess.run(["sh", "-ec", command, "sh", *args], check=True)


def directories(build: str) -> set[str]:
    try:
        return {f"{build}/run/{name}" for name in os.listdir(f"{build}/run")}
    except FileNotFoundError:
        return set()


def processes() -> list[str]:
    """Those that run, besides this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            zombie = path.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z"
            words = path.joinpath("cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue
        if path.name != "1" and not zombie:
            found.append(f"process {path.name}: {words}")
    return found


def main() -> int:
    """Run the program."""
    report, repository, build, *argv = sys.argv[1:]
    # mininet's cleanup removes files of certain names from /tmp, where the repository may
    # be as well.
    shell("""mount --rbind /sys/fs/cgroup /mnt
             mount -t sysfs sysfs /sys
             mount --rbind /mnt /sys/fs/cgroup
             mount -t tmpfs tmpfs /run
             mkdir -p /run/lock /run/netns /run/repository
             mount --bind "$1" /run/repository
             mount -t tmpfs tmpfs /tmp
             mkdir -p "$1"
             mount --bind /run/repository "$1"
             ip link set lo up""", repository)
    before = directories(build)
    program = subprocess.Popen(argv)
    # Who would read the report may be gone, or have lost patience.
    reader = select.poll()
    reader.register(int(report), select.POLLERR)
    while (status := program.poll()) is None:
        if reader.poll(100):
            program.terminate()

    def left() -> list[str]:
        links = [f"interface {name}" for name in os.listdir("/sys/class/net") if name != "lo"]
        return links + processes() + sorted(directories(build) - before)

    deadline = time.monotonic() + PATIENCE_S
    while (remaining := left()) and time.monotonic() < deadline:
        time.sleep(0.1)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
    with contextlib.suppress(BrokenPipeError), os.fdopen(int(report), "w") as pipe:
        json.dump(remaining, pipe)
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
