"""The real controller, as a child process that a bridge is connected to."""

from __future__ import annotations

import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from .ovs import Ovs
from .proc import Background, wait_until

PROGRAM = Path(__file__).resolve().parent.parent / "fb-controller"
_READY = re.compile(r"ready: OpenFlow on (\S+), REST on (\S+)")


@dataclass
class RateChange:
    """A change made over REST.

    `asked` and `answered` are CLOCK_MONOTONIC seconds: the new rate was in
    the switch at some time between.
    """

    asked: float
    answered: float
    answer: dict[str, Any]


class Controller:
    """``fb-controller`` on free ports of the loopback, until `close`."""

    def __init__(self, config: Path, ovs: Ovs, bridge: str,
                 cpus: set[int] | None = None):
        self.ovs, self.bridge = ovs, bridge
        self._connected = False
        self._http = requests.Session()
        self._http.trust_env = False  # No proxy stands before the loopback.
        self._state = tempfile.TemporaryDirectory(prefix="fb-state-")
        self._process = Background(
            [str(PROGRAM), "--config", str(config), "--state", self._state.name, "--ofp-listen",
             "127.0.0.1:0", "--rest-listen", "127.0.0.1:0"],
            name="fb-controller", cpus=cpus)
        try:
            wait_until(self._ready, "fb-controller is ready", 30)
            match = _READY.search(self._process.stdout())
            assert match is not None
            self.openflow, rest = match.groups()
            self.url = f"http://{rest}"
        except BaseException:
            self.close()
            raise

    def _ready(self) -> bool:
        self._process.check_running()
        return bool(_READY.search(self._process.stdout()))

    def connect(self) -> None:
        """Connect the bridge, and wait until it has the controller's flows.

        Without in-band control: its hidden flows would let a VM past its meter.
        """
        self._connected = True
        self.ovs.vsctl("set", "Bridge", self.bridge, "other_config:disable-in-band=true",
                       "--", "set-controller", self.bridge, f"tcp:{self.openflow}")
        wait_until(lambda: self.get("/v1/status")["in_sync"],
                   "the switch is as the controller wants it", 20, 0.1)

    def get(self, path: str) -> dict[str, Any]:
        """GET a path of the REST interface."""
        self._process.check_running()
        reply = self._http.get(self.url + path, timeout=5)
        reply.raise_for_status()
        return reply.json()

    def set_rate(self, tenant: str, vm: str, rate: str,
                 destination: str | None = None) -> RateChange:
        """Change a rate; raises unless the switch has confirmed it."""
        path = f"/v1/tenants/{tenant}/vms/{vm}"
        if destination is not None:
            path += f"/destinations/{destination}"
        asked = time.monotonic()
        reply = self._http.put(f"{self.url}{path}/rate", json={"rate": rate},
                               timeout=5)
        answered = time.monotonic()
        if reply.status_code != 200:
            raise RuntimeError(f"PUT {path}/rate {rate}: "
                               f"{reply.status_code} {reply.text}")
        return RateChange(asked, answered, reply.json())

    def meter(self, tenant: str, vm: str) -> int:
        """The number of a VM's meter."""
        return self.get(f"/v1/tenants/{tenant}/vms/{vm}")["meter_id"]

    def log(self) -> str:
        """What it has said so far."""
        return self._process.stdout() + self._process.stderr()

    def close(self) -> None:
        """Take the controller off the bridge and end it."""
        if self._connected and self.ovs.alive():
            self.ovs.vsctl("del-controller", self.bridge)
        self._connected = False
        self._http.close()
        self._process.close()
        self._state.cleanup()
