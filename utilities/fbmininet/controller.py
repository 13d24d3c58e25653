"""FlowBundlerController: the project's Ryu controller as a controller of mininet."""

from __future__ import annotations

import re
import signal
import tempfile
from pathlib import Path
from typing import Any

from fbtest.proc import Background, wait_until
from mininet.log import info
from mininet.node import Controller

from .vswitch import HERE

#: The first start installs what the controller needs.
READY_S = 300


class ControllerError(RuntimeError):
    """The controller does not start; the message says why."""


class FlowBundlerController(Controller):
    """utilities/fb-controller with a file of tenants, for as long as the network runs.

    The VMs of the file are hosts: their `port` is the switch's interface, such as s1-eth1.
    """

    def __init__(self, name: str, config: str | None = None, rest: int = 8080,
                 unknown_sources: str = "forward", **params: Any):
        """Make the node; `start` starts the program.

        config: the file of tenants (YAML, docs/controller.md)
        rest: the TCP port of REST on 127.0.0.1
        unknown_sources: forward or drop, for frames of hosts that are not in the file, if
            the file does not say
        """
        if config is None:
            raise ControllerError(
                f"{name}: config is needed: the file of tenants, as in --controller "
                f"fb,config={HERE.parent}/controller/examples/two-tenants.yaml")
        self.config_file = Path(config).resolve()
        if not self.config_file.is_file():
            raise ControllerError(f"{name}: config={config}: there is no such file")
        if unknown_sources not in ("forward", "drop"):
            raise ControllerError(f"{name}: unknown_sources={unknown_sources!r}: allowed: "
                                  "forward, drop")
        self.rest = int(rest)
        self.unknown_sources = unknown_sources
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._program: Background | None = None
        Controller.__init__(self, name, **params)

    def start(self) -> None:
        """Start the program, and wait until it listens."""
        self._directory = tempfile.TemporaryDirectory(prefix="fb-mininet-")
        self._program = Background(
            [str(HERE / "fb-controller"), "--config", str(self._tenants()),
             "--state", f"{self._directory.name}/state",
             "--ofp-listen", f"{self.ip}:{self.port}", "--rest-listen", f"127.0.0.1:{self.rest}"],
            name=self.name)
        try:
            wait_until(self._ready, f"{self.name} is ready", READY_S, 0.1)
        except BaseException:
            self._end()
            raise

    def _ready(self) -> bool:
        assert self._program is not None
        ready = "ready:" in self._program.stdout()
        if not ready and not self._program.running():
            raise ControllerError(f"{self.name} does not start: {self.log().strip()}")
        return ready

    def _tenants(self) -> Path:
        """The file that the program reads: the user's, or one that says what that does not."""
        text = self.config_file.read_text()
        if re.search(r"^\s*[\"']?unknown_sources[\"']?\s*:", text, re.M):
            return self.config_file
        assert self._directory is not None
        completed = Path(self._directory.name, self.config_file.name)
        # Behind it all: so mistakes are reported at the user's lines.
        completed.write_text(f"{text.rstrip()}\nunknown_sources: {self.unknown_sources}\n")
        return completed

    def reload(self) -> None:
        """Have the file of tenants read again.  A mistake in it is in `log`."""
        if self._program is None:
            raise ControllerError(f"{self.name} is not running: net.start() comes first")
        self._tenants()
        self._program.popen.send_signal(signal.SIGHUP)

    def log(self) -> str:
        """What the program has said."""
        return self._program.stdout() + self._program.stderr() if self._program else ""

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """End the program."""
        self._end()
        super(Controller, self).stop(*args, **kwargs)

    def _end(self) -> None:
        if self._program is not None:
            if not self._program.running():
                info(f"{self.name} has ended before: {self.log().strip()}\n")
            self._program.stop(10)
            self._program.close()
            self._program = None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None
