"""A virtual machine that numbers what it sends and checks what it receives.

It is the program ``fb-vm`` (``make vm``) with a virtio-user device for each of
its ports.  Between two of them every packet can be counted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from .proc import Background, group_nice, wait_until

PROGRAM = Path(os.environ.get("FB_BUILD")
               or Path(__file__).resolve().parents[2] / "build") / "fb-vm"


@dataclass(frozen=True)
class VmCounters:
    """What a VM counts; `sent` is what its virtqueue took."""

    sent: int = 0
    pending: int = 0
    received: int = 0
    received_bytes: int = 0
    misordered: int = 0
    duplicates: int = 0
    damaged: int = 0
    strange: int = 0
    lacpdus: int = 0

    def since(self, before: VmCounters) -> VmCounters:
        """What has been counted since `before`."""
        return VmCounters(**{field.name: getattr(self, field.name) - getattr(before, field.name)
                             for field in fields(self)})

    def plus(self, other: VmCounters) -> VmCounters:
        """What both have counted."""
        return VmCounters(**{field.name: getattr(self, field.name) + getattr(other, field.name)
                             for field in fields(self)})


class Vm:
    """A VM that listens on the sockets `paths`, a device for each.

    It sends from the first one, on command, frames of `flows` flows, each to
    an address of its own: 10.73.0.1 and so on.  `frame_bytes` is the longest
    of its frames.  It sends the flows from number `flow` on; each one's first frame
    has the number `first`.
    """

    def __init__(self, paths: Sequence[Path], *, cpus: set[int], directory: Path,
                 flows: int = 16, frame_bytes: int = 1000, first: int = 0, flow: int = 0):
        if not PROGRAM.exists():
            raise RuntimeError(f"{PROGRAM} is missing: run 'make vm'")
        # As long as a virtqueue may be: the VM may have to wait for a processor.
        devices = [f"--vdev=net_virtio_user{i},path={path},server=1,queue_size=1024"
                   for i, path in enumerate(paths)]
        lcore = f"0@({','.join(map(str, sorted(cpus)))})"
        self._process = Background(
            [str(PROGRAM), "--lcores", lcore, "--no-pci", "--no-huge", "-m", "128",
             "--no-telemetry", "--no-shconf", *devices, "--", str(flows), str(frame_bytes),
             str(first), str(flow)],
            name="fb-vm", cpus=cpus, stdin=subprocess.PIPE,
            env={**os.environ, "RUNTIME_DIRECTORY": str(directory)})
        # Its own sleeps make room for others; it should not wait for them.
        group_nice(self._process.pid, -15)
        self._seen = 0
        self._paths = list(paths)
        try:
            wait_until(self._listening, "fb-vm listens", 20)
        except BaseException:
            self.close()
            raise

    def _listening(self) -> bool:
        self._process.check_running()
        return self._paths[0].exists()

    def wait_ready(self, timeout: float = 30) -> None:
        """Wait until the switch has connected to all devices."""
        self._answer(timeout)

    def _answer(self, timeout: float = 10) -> VmCounters:
        def line() -> str:
            self._process.check_running()
            text = self._process.stdout()[self._seen:]
            return text if text.endswith("}\n") else ""

        # EAL may have said something before.
        text = wait_until(line, "fb-vm answers", timeout, interval=0.005)
        self._seen += len(text)
        return VmCounters(**json.loads(text[text.index("{"):]))

    def _command(self, command: str) -> VmCounters:
        stdin = self._process.popen.stdin
        assert stdin is not None
        stdin.write(command.encode() + b"\n")
        stdin.flush()
        return self._answer()

    def rate(self, pps: int) -> VmCounters:
        """Send so many frames a second from now on, at most."""
        return self._command(f"rate {pps}")

    def lacp(self) -> VmCounters:
        """Be the other end of a bond of all devices from now on."""
        return self._command("lacp")

    def report(self) -> VmCounters:
        """What it has counted so far."""
        return self._command("report")

    def pause(self) -> None:
        """Stop it, as if it had no processor, until `resume`."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run again."""
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash would, in the middle of what it does."""
        self._process.stop(first=signal.SIGKILL)
        # DPDK binds to no socket that is there already.
        for path in self._paths:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """End it, if it still runs."""
        stdin = self._process.popen.stdin
        if stdin is not None and not stdin.closed:
            stdin.close()
        self._process.close()
