"""A virtual machine's place at a vhost-user port, taken by dpdk-testpmd.

`Testpmd` is a process with a virtio-user device: to the switch it is a VM, with
virtqueues and memory of its own, that sends as fast as its virtqueue takes
frames.  Frames that the virtqueue does not take it throws away and counts, as
a sender that cannot wait would; what it calls sent is in the virtqueue.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .proc import Background, wait_until

PROGRAM = "dpdk-testpmd"
_PROMPT = "testpmd> "


@dataclass
class TestpmdCounters:
    """What testpmd counts: frames that its virtqueue took, and those it did not."""

    __test__ = False  # Not a test, whatever its name looks like to pytest.

    sent: int
    refused: int
    received: int


def parse_stop(text: str) -> TestpmdCounters:
    """Parse what testpmd prints when it is told to stop."""
    found = re.findall(
        r"Accumulated forward statistics for all ports.*?"
        r"RX-packets: (\d+).*?TX-packets: (\d+)\s+TX-dropped: (\d+)", text, re.S)
    if not found:
        raise ValueError(f"testpmd has told no statistics: {text[-500:]}")
    received, sent, refused = map(int, found[-1])
    return TestpmdCounters(sent, refused, received)


class Testpmd:
    """A VM that sends UDP frames of one length to `dst_mac`, as fast as it can.

    It listens on the socket `path`, which a dpdkvhostuserclient port connects
    to, and sends between `start` and `stop`.  `cpus` are those it may run on;
    it polls and so takes one of them.  Files of DPDK go to `directory`.
    """

    __test__ = False

    def __init__(self, path: Path, *, cpus: set[int], directory: Path,
                 frame_size: int = 1514, dst_mac: str = "02:fb:00:02:00:01",
                 env: Mapping[str, str] | None = None):
        if not cpus:
            raise ValueError("cpus is empty: testpmd must run somewhere")
        if shutil.which(PROGRAM) is None:
            raise RuntimeError(f"{PROGRAM} is not installed: run 'make guest'")
        cpu = min(cpus)
        device = f"net_virtio_user0,path={path},server=1"
        options = ["--total-num-mbufs=8192", "--forward-mode=txonly",
                   f"--txpkts={frame_size}", f"--eth-peer=0,{dst_mac}", "-i"]
        self._process = Background(
            # A line is told when it is written.  Two EAL threads, one of which
            # only waits for commands.
            ["stdbuf", "-oL", PROGRAM, "--lcores", f"0@{cpu},1@{cpu}", "--no-pci", "--no-huge",
             "-m", "256", "--no-telemetry", "--no-shconf", "--vdev", device,
             "--", *options],
            name=PROGRAM, cpus=cpus, stdin=subprocess.PIPE,
            env={**(os.environ if env is None else env),
                 "RUNTIME_DIRECTORY": str(directory)})
        self.path = path
        self._seen = 0
        try:
            # The device is not there before the switch has connected to it.
            wait_until(self._listening, f"{PROGRAM} listens", 20)
        except BaseException:
            self.close()
            raise

    def _listening(self) -> bool:
        self._process.check_running()
        return self.path.exists()

    def wait_ready(self, timeout: float = 20) -> None:
        """Wait until the switch has connected, and it takes commands."""
        self._wait_prompt(timeout)

    def _wait_prompt(self, timeout: float = 10) -> str:
        """Wait for the next prompt; returns what came before it."""
        def prompt() -> bool:
            self._process.check_running()
            return self._process.stdout().find(_PROMPT, self._seen) >= 0

        wait_until(prompt, f"{PROGRAM} takes commands", timeout)
        text = self._process.stdout()
        end = text.index(_PROMPT, self._seen)
        said, self._seen = text[self._seen:end], end + len(_PROMPT)
        return said

    def _command(self, command: str) -> str:
        stdin = self._process.popen.stdin
        assert stdin is not None
        stdin.write(command.encode() + b"\n")
        stdin.flush()
        return self._wait_prompt()

    def start(self) -> None:
        """Begin to send."""
        self._command("start")

    def stop(self) -> TestpmdCounters:
        """Send no more; returns what was sent since `start`."""
        return parse_stop(self._command("stop"))

    def close(self) -> None:
        """End it, if it still runs."""
        if self._process.popen.stdin is not None:
            self._process.popen.stdin.close()
        self._process.close()
