"""Ryu with applications of its own, as `ryu-manager` starts it, without any part of ours.

The only help is what Ryu 4.34 needs to start with today's eventlet, see docs/controller.md.
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import requests

from controller_harness import DEADLINE, end, wait_for

needs_ryu = pytest.mark.skipif(
    importlib.util.find_spec("ryu") is None and sys.version_info >= (3, 12),
    reason="Ryu needs a Python before 3.12",
)

START = """
import eventlet.wsgi
eventlet.wsgi.ALREADY_HANDLED = object()
from ryu.cmd.manager import main
main()
"""


def free_port() -> int:
    """Give a port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ryu:
    """A running Ryu; `target` is what switches connect to, `ask` talks to its REST."""

    def __init__(self, directory: Path, *apps: str) -> None:
        openflow, rest = free_port(), free_port()
        self.log = directory / "ryu.log"
        self.target = f"tcp:127.0.0.1:{openflow}"
        self.url = f"http://127.0.0.1:{rest}"
        self.session = requests.Session()
        self.session.trust_env = False
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", START),
                    *("--ofp-listen-host", "127.0.0.1", "--ofp-tcp-listen-port", str(openflow)),
                    *("--wsapi-host", "127.0.0.1", "--wsapi-port", str(rest)),
                    *apps,
                ],
                cwd=directory,
                stdout=log,
                stderr=log,
            )

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Ask for something that must succeed."""
        answer = self.session.request(method, self.url + path, json=body, timeout=DEADLINE)
        assert answer.status_code in (200, 201), (answer.status_code, answer.text)
        return answer.json() if answer.content else None

    def knows(self, datapath_id: int) -> None:
        """Wait for a switch, as ofctl_rest knows them."""
        wait_for("Ryu's switch", lambda: datapath_id in self.ask("GET", "/stats/switches"))

    def close(self) -> None:
        """End it."""
        self.session.close()
        end(self.process)
