"""A virtual machine in QEMU at a vhost-user port, with a Linux of its own.

`Guest` emulates its processor (no KVM needed), boots the image that
utilities/guest-image makes in a few seconds, and runs commands that it is told
over its serial line: a TCP sender with a kernel that is not the switch's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from .proc import Background, CommandError, wait_until

PROGRAM = "qemu-system-x86_64"
_BUILD = Path(os.environ.get("FB_BUILD")
              or Path(__file__).resolve().parents[2] / "build")
IMAGE = _BUILD / "guest"
_STATUS = "fb-guest status "


class Guest:
    """A machine with one processor, that listens on the socket `path`.

    A dpdkvhostuserclient port connects to it.  It has `address` (with the
    prefix's length) and `mac`, and runs on `cpus` of this machine.
    """

    def __init__(self, path: Path, *, address: str, mac: str, cpus: set[int],
                 memory_mb: int = 256, image: Path = IMAGE):
        vmlinuz, initrd = image / "vmlinuz", image / "initrd"
        for file in (vmlinuz, initrd):
            if not file.exists():
                raise RuntimeError(f"{file} is not there: run 'make guest'")
        if shutil.which(PROGRAM) is None:
            raise RuntimeError(f"{PROGRAM} is not installed: run 'make guest'")
        self.address, self.mac = address, mac
        self._seen = 0
        arguments = f"console=ttyS0 quiet panic=-1 fb.address={address}"
        self._process = Background(
            [PROGRAM, "-machine", "pc,accel=tcg,memory-backend=memory",
             "-cpu", "max", "-smp", "1", "-m", str(memory_mb),
             # The switch maps the guest's memory.
             "-object", f"memory-backend-memfd,id=memory,size={memory_mb}M,share=on",
             "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
             "-kernel", str(vmlinuz), "-initrd", str(initrd),
             "-append", arguments, "-serial", "stdio",
             "-chardev", f"socket,id=vhost,path={path},server=on,wait=off",
             "-netdev", "vhost-user,id=net,chardev=vhost",
             # QEMU 7.2 without KVM does not deliver MSI-X for vhost-user.
             "-device", f"virtio-net-pci,netdev=net,mac={mac},vectors=0,romfile="],
            name=PROGRAM, cpus=cpus, stdin=subprocess.PIPE)

    def wait_ready(self, timeout: float = 60) -> None:
        """Wait until it has booted and takes commands."""
        self._wait_for("fb-guest ready\n", timeout)

    def _wait_for(self, text: str, timeout: float) -> str:
        """Wait until it says `text`; returns what it said before."""
        def said() -> bool:
            if text in self._output():
                return True
            self._process.check_running()
            return False

        try:
            wait_until(said, f"the guest says {text.strip()!r}", timeout)
        except TimeoutError as exc:
            raise TimeoutError(f"{exc}; it said: {self._output()[-1000:]}") from exc
        before, _, _ = self._output().partition(text)
        self._seen += len(before) + len(text)
        return before

    def _output(self) -> str:
        # A serial line's lines end with a carriage return, too.
        return self._process.stdout().replace("\r", "")[self._seen:]

    def start(self, command: str) -> None:
        """Have its shell run `command`, which `result` waits for."""
        stdin = self._process.popen.stdin
        assert stdin is not None and "\n" not in command
        self._process.check_running()
        stdin.write(command.encode() + b"\n")
        stdin.flush()

    def result(self, timeout: float = 60) -> str:
        """Wait for the end of what was started; returns what it said.

        Raises `CommandError` if it failed.
        """
        deadline = time.monotonic() + timeout
        said = self._wait_for(_STATUS, timeout)
        status = int(self._wait_for("\n", max(deadline - time.monotonic(), 1)))
        if status:
            raise CommandError([PROGRAM], status, said)
        return said

    def run(self, command: str, timeout: float = 60) -> str:
        """Run `command` to its end; returns what it said."""
        self.start(command)
        return self.result(timeout)

    @property
    def ip(self) -> str:
        """Its address without the prefix's length."""
        return self.address.partition("/")[0]

    def close(self) -> None:
        """End it, if it still runs."""
        if self._process.popen.stdin is not None:
            self._process.popen.stdin.close()
        self._process.close()
