"""What the tests with generated hostile input share."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

#: How many times as many examples as usual: for long runs, which then also
#: choose other ones each time.  See docs/testing.md.
FACTOR = int(os.environ.get("FB_EXAMPLES", "1"))


def examples(count: int) -> settings:
    """The same `count` examples each time, unless asked for more."""
    return settings(
        max_examples=count * FACTOR,
        derandomize=FACTOR == 1,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


#: Text as JSON and OVSDB may carry it: no NUL, nothing that UTF-8 lacks.
TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=12)


def strict_json(data: bytes | str) -> Any:
    """Parse what must be JSON; Python's own parser takes NaN, too."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(data, parse_constant=refuse)


class Unixctl:
    """ovs-appctl without a process for each command."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(20)
        self._socket.connect(str(path))
        self._number = 0

    def __call__(self, command: str, *arguments: str) -> str:
        self._number += 1
        request = {"id": self._number, "method": command, "params": arguments}
        self._socket.sendall(json.dumps(request).encode())
        data = b""
        while True:
            more = self._socket.recv(1 << 20)
            assert more, f"{command}: connection closed after {data!r}"
            data += more
            try:
                reply = json.loads(data)
                break
            except ValueError:
                continue
        assert reply["error"] is None, f"{command} {arguments}: {reply['error']}"
        return reply["result"]

    def close(self) -> None:
        self._socket.close()
