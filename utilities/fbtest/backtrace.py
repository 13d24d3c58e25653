"""What all threads of a process are doing, for the report of one that hangs.

Needs nothing but Python's own library, and gdb if there is one.
"""

from __future__ import annotations

import os
import re

from . import procfs
from .proc import CommandError, run

#: What gdb may take.  It waits for ever where a thread hangs in the kernel.
GDB_S = 60.0
_NOISE = re.compile(r"^\[New LWP|^\[Thread debugging|^Using host libthread_db|^\s*$|^warning: ")


def in_kernel(pid: int) -> str:
    """A line for each thread: its state, its processors, where in the kernel it waits."""
    lines = []
    cpus = procfs.affinities(pid)
    for tid, name in procfs.threads(pid).items():
        state = procfs.state(pid, tid)
        stack = re.sub(r"\[<0>\] |\+0x\S+", "", procfs.read(pid, f"task/{tid}/stack") or "")
        on = ",".join(map(str, sorted(cpus.get(tid, ()))))
        lines.append(f"{tid} {name}: state {state or '?'}, CPUs {on or '?'}: "
                     f"{' < '.join(stack.split()) or '?'}")
    return "\n".join(lines)


def backtraces(pid: int, seconds: float = GDB_S) -> str:
    """The backtraces of all threads of process `pid`, which is stopped meanwhile.

    One that is stopped already (SIGSTOP) stays so.  Takes `seconds` at most and
    some more; what cannot be had is said in the text.
    """
    if not procfs.alive(pid):
        return f"process {pid} has ended"
    kernel = in_kernel(pid)
    try:
        # Nothing is asked for over the network.
        user = run("gdb", "--nx", "--batch", "-p", str(pid), "-ex", "thread apply all bt",
                   env={name: value for name, value in os.environ.items()
                        if name != "DEBUGINFOD_URLS"}, timeout=seconds)
    except CommandError as exc:
        user = str(exc)
    kept = [line for line in user.splitlines() if not _NOISE.match(line)]
    return "\n".join([kernel, *kept])
