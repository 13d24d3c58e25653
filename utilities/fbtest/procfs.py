"""What /proc says of processes and threads, any of which may end meanwhile.

Whoever has ended is left out, or is None: it is never an error.  Nor is what
this process may not read.  Needs nothing but Python's own library.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

#: What the kernel says of a process or thread that has ended: that there is no such
#: file, or, if it was opened before, no such process.  And of others' processes.
UNREADABLE = (FileNotFoundError, ProcessLookupError, PermissionError)


def read(pid: int, name: str) -> str | None:
    """The text of /proc/`pid`/`name`, None if the process has ended."""
    with contextlib.suppress(*UNREADABLE):
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    return None


def numbers(directory: str) -> list[int]:
    """The numbers among the names in /proc/`directory`, in order; none if it is gone."""
    with contextlib.suppress(*UNREADABLE):
        return sorted(int(name) for name in os.listdir(f"/proc/{directory}") if name.isdigit())
    return []


def pids() -> list[int]:
    """All processes that there are."""
    return numbers("")


def threads(pid: int) -> dict[int, str]:
    """The names of the threads of process `pid`, by the kernel's id of each."""
    found = {tid: read(pid, f"task/{tid}/comm") for tid in numbers(f"{pid}/task")}
    return {tid: name.rstrip("\n") for tid, name in found.items() if name is not None}


def run_ns(pid: int, tid: int) -> int | None:
    """How long thread `tid` of process `pid` has had a processor, in ns."""
    text = read(pid, f"task/{tid}/schedstat")
    return int(text.split()[0]) if text else None


def affinities(pid: int) -> dict[int, set[int]]:
    """The processors that each thread of process `pid` may run on."""
    found = {}
    for tid in numbers(f"{pid}/task"):
        with contextlib.suppress(ProcessLookupError):
            found[tid] = os.sched_getaffinity(tid)
    return found


def state(pid: int, tid: int | None = None) -> str:
    """The state of process `pid`, or of its thread `tid`, a letter as ps(1) has it.

    "" if there is none.
    """
    stat = read(pid, "stat" if tid is None else f"task/{tid}/stat")
    # (The name before it, in parentheses, may be anything.)
    return stat.rpartition(")")[2].split()[0] if stat else ""


def alive(pid: int) -> bool:
    """Whether process `pid` runs, or could; a zombie does not."""
    return state(pid) not in ("", "Z", "X")


def descendants(pid: int) -> Iterator[int]:
    """The processes below `pid`, children before their parents."""
    for tid in numbers(f"{pid}/task"):
        for child in map(int, (read(pid, f"task/{tid}/children") or "").split()):
            yield from descendants(child)
            yield child
