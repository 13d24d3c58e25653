"""What tests/rounds.py judges by."""

from __future__ import annotations

import socket
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from fbtest.proc import wait_until

import rounds
from rounds import Holdings, RoundError, Watch

LEAST = Holdings(Counter({"pmd": 1}), Counter({"socket:[N]": 3}), frozenset({"ovs"}), 10, 0)


@pytest.mark.parametrize("more, told", [
    ({"threads": Counter({"pmd": 1, "vhost": 2})}, "vhost: 2"),
    ({"descriptors": Counter({"socket:[N]": 4})}, "socket:[N]: 1"),
    ({"pools": frozenset({"ovs", "other"})}, "pool other"),
    ({"buffers": 11}, "buffers: 1"),
    ({"guest_maps": 2}, "guests' memory: 2"),
])
def test_what_is_more_is_told(more: dict[str, object], told: str) -> None:
    assert replace(LEAST, **more).more_than(LEAST) == told
    assert LEAST.more_than(replace(LEAST, **more)) == LEAST.more_than(LEAST) == ""


def test_answer_that_comes_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has come, and one that has not come yet."""
    monkeypatch.setattr(rounds, "PATIENCE_S", 0.3)
    path = tmp_path / "ctl"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen()
        watch = Watch(path)
        watch.start()

        def answer(delay: float) -> None:
            with server.accept()[0] as sock:
                assert b'"version"' in sock.recv(4096)
                time.sleep(delay)
                sock.sendall(b'{"id":0,"result":"3.5","error":null}')

        for _ in range(3):
            answer(0)
        watch.check()
        assert watch.longest_s < 0.3
        time.sleep(0.4)
        with pytest.raises(RoundError, match="did not answer for 0"):
            watch.check()
        watch.stop()
        answer(0)
        wait_until(lambda: not watch.is_alive(), "it has stopped")
        assert watch.longest_s >= 0.3
