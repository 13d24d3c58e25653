"""Starting and stopping recordings, by DPDK's telemetry."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..ovs import Ovs
from ..proc import CommandError
from .ring import Recording, Records, packet_counter, read_recording

BUILD = Path(os.environ.get("FB_BUILD") or Path(__file__).resolve().parents[3] / "build")
#: Where recordings lie while they are made: memory.
DIRECTORY = Path("/dev/shm")
_SYSTEM = Path("/var/run/dpdk")
_serial = itertools.count()


class ProbeError(RuntimeError):
    """The probe could not do what was asked; the message says why."""


class Telemetry:
    """A connection to the telemetry socket of a DPDK application."""

    def __init__(self, path: Path):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(10)
            self._socket.connect(os.fspath(path))
            greeting = json.loads(self._socket.recv(1024))
        except (OSError, ValueError) as exc:
            self._socket.close()
            raise ProbeError(f"{path}: {exc}") from exc
        self.pid: int = greeting["pid"]
        self._most: int = greeting["max_output_len"]

    def command(self, name: str, *params: str) -> Any:
        """The reply to ``name,params...``; raises `ProbeError` if it is an error."""
        try:
            self._socket.send(",".join([name, *params]).encode())
            reply = json.loads(self._socket.recv(self._most))
        except (OSError, ValueError) as exc:
            raise ProbeError(f"{name}: {exc}") from exc
        value = reply.get(name)
        if value is None:
            raise ProbeError(f"{name}: not known there: the plug-in is not loaded "
                             "(fb-sandbox --probe)")
        if isinstance(value, dict) and "error" in value:
            raise ProbeError(value["error"])
        return value

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


@contextlib.contextmanager
def connect(ovs: Ovs) -> Iterator[Telemetry]:
    """The telemetry of the vswitchd that `ovs` talks to."""
    pid = ovs.pid()
    for directory in (Path(ovs.env["OVS_RUNDIR"], "dpdk"), _SYSTEM):
        for path in sorted(directory.glob("*/dpdk_telemetry.v2")):
            try:
                telemetry = Telemetry(path)
            except ProbeError:
                continue  # What a process that is gone has left.
            with contextlib.closing(telemetry):
                if telemetry.pid == pid:
                    yield telemetry
                    return
    raise ProbeError(f"vswitchd (pid {pid}) has no telemetry socket: fb-sandbox starts "
                     "it with one if told --probe")


def dpdk_port(ovs: Ovs, port: str) -> str:
    """DPDK's number of the port that OVS calls `port`."""
    try:
        status = ovs.get("Interface", port, "status")
    except CommandError as exc:
        names = sorted(name for bridge in ovs.vsctl("list-br").split()
                       for name in ovs.vsctl("list-ports", bridge).split())
        raise ProbeError(f"port: '{port}' is not a port of the switch: "
                         f"{', '.join(names) or 'it has none'}") from exc
    if "port_no" not in status:
        raise ProbeError(f"port: '{port}' is not driven by DPDK's ethdev (type=dpdk), so it "
                         "cannot be recorded")
    return str(status["port_no"])


def offsets() -> dict[str, int]:
    """Where in a packet's mbuf OVS keeps what `edt` and `flow=meter` read."""
    path = BUILD / "fbprobe.json"
    try:
        return json.loads(path.read_text())
    except OSError as exc:
        raise ProbeError(f"{path} is missing: run 'make probe'") from exc


def parameters(*, edt: bool = False, flow: str = "dst", burst_wait_ns: int = 0,
               records: int = 1 << 20, wrap: bool = False, queues: int = 0,
               file: Path | None = None) -> str:
    """The plug-in's parameters."""
    values: dict[str, object] = {"records": records, "mode": "wrap" if wrap else "stop",
                                 "burst_wait_ns": burst_wait_ns, "queues": queues}
    values["flow"] = f"mbuf:{offsets()['chain_offset']}" if flow == "meter" else flow
    if edt:
        values |= {key: offsets()[key] for key in ("edt_offset", "edt_valid_offset")}
    if file is not None:
        if {",", ";"} & set(str(file)):
            raise ProbeError(f"file: '{file}' is not allowed: a path without , and ;")
        values["file"] = file
    return ";".join(f"{key}={value}" for key, value in values.items())


def start(ovs: Ovs, port: str, **options: Any) -> dict[str, Any]:
    """Start to record `port` into a file that stays; see `parameters`."""
    number = dpdk_port(ovs, port)
    with connect(ovs) as telemetry:
        return telemetry.command("/fbprobe/start", number, parameters(**options))


def stop(ovs: Ovs, port: str) -> dict[str, Any]:
    """End the recording of `port`; the file stays."""
    number = dpdk_port(ovs, port)
    with connect(ovs) as telemetry:
        return telemetry.command("/fbprobe/stop", number)


def status(ovs: Ovs, port: str) -> dict[str, Any]:
    """The recording of `port`: its file, and how many of its queues are recorded."""
    number = dpdk_port(ovs, port)
    with connect(ovs) as telemetry:
        return telemetry.command("/fbprobe/status", number)


class Probe:
    """Records what leaves an OVS port of type dpdk while a ``with`` block runs.

    `flow` is ``dst``, ``src``, ``offset:N``, ``mbuf:N``, or ``meter``: the
    id of the chain of meters that stamped the packet.  `edt` records departure times
    that meters have assigned.  `burst_wait_ns` makes each transmission take so much
    longer, as a NIC's doorbell would.  `records` is the room for each of
    `queues` tx queues (default: those the port has): packets that come when it
    is used up are counted only or, with `wrap`, take the place of the oldest.

    The file is anonymous: nothing is left, whatever ends this process.
    """

    def __init__(self, ovs: Ovs, port: str, **options: Any):
        self.ovs, self.port = ovs, port
        self._options = options
        self._fd = -1
        self._on = False

    def __enter__(self) -> Probe:
        name = f"fbprobe-{os.getpid()}-{next(_serial)}"
        file = DIRECTORY / name
        start(self.ovs, self.port, **self._options, file=file)
        self._on = True
        try:
            self._fd = os.open(file, os.O_RDONLY)
        except OSError:
            self.stop()
            raise
        finally:
            file.unlink(missing_ok=True)
        return self

    def __exit__(self, *_exc: object) -> None:
        try:
            self.stop()
        except (ProbeError, CommandError):
            # A port or a vswitchd that is gone has ended its recording.
            if _exc[0] is None and self.ovs.alive():
                raise

    def stop(self) -> None:
        """End the recording; what was recorded can still be read."""
        if self._on:
            self._on = False
            stop(self.ovs, self.port)

    def status(self) -> dict[str, Any]:
        """How many ``rings`` there are, queues ``recorded``, and ``tx_queues``."""
        return status(self.ovs, self.port)

    def recording(self) -> Recording:
        """All that is known; while recording, what has been recorded so far."""
        return read_recording(self._fd)

    def packet_counter(self) -> Callable[[], int]:
        """What tells how many packets have left; vswitchd is not asked for it."""
        return packet_counter(self._fd)

    def records(self) -> Records:
        """The departures: a structured array of `ring.RECORD`."""
        return self.recording().records

    def close(self) -> None:
        """Give back the memory of what was recorded."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    __del__ = close
