"""Processes and threads that end while somebody looks at them."""

from __future__ import annotations

import os
import threading

from fbtest import procfs
from fbtest.proc import Background


def test_this_process() -> None:
    pid, tid = os.getpid(), threading.get_native_id()
    assert pid in procfs.pids()
    assert procfs.threads(pid)[pid]
    assert procfs.affinities(pid)[tid] == os.sched_getaffinity(0)
    assert (procfs.run_ns(pid, tid) or 0) > 0
    assert procfs.alive(pid) and procfs.state(pid, tid) == "R"
    child = Background(["sleep", "1000"])
    try:
        assert child.pid in procfs.descendants(pid)
    finally:
        child.close()


def test_who_has_ended_is_left_out() -> None:
    child = Background(["true"])
    child.wait(10)
    pid = child.pid
    child.close()
    assert not procfs.alive(pid) and procfs.state(pid) == ""
    assert procfs.read(pid, "comm") is None and procfs.run_ns(pid, pid) is None
    assert procfs.threads(pid) == procfs.affinities(pid) == {}
    assert list(procfs.descendants(pid)) == procfs.numbers(f"{pid}/fdinfo") == []


def test_a_zombie_is_not_alive() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    try:
        while procfs.state(pid) != "Z":
            pass
        assert not procfs.alive(pid)
    finally:
        os.waitpid(pid, 0)


def test_threads_that_come_and_go() -> None:
    """What one that walks through them must expect, a few thousand times."""
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            thread = threading.Thread(target=lambda: None)
            thread.start()
            thread.join()

    churns = [threading.Thread(target=churn) for _ in range(2)]
    for thread in churns:
        thread.start()
    try:
        pid = os.getpid()
        for _ in range(1000):
            for tid in procfs.threads(pid):
                procfs.run_ns(pid, tid)
            assert os.getpid() in procfs.affinities(pid)
    finally:
        stop.set()
        for thread in churns:
            thread.join()
