"""Meters by the hundred thousand: an OpenFlow 1.3 connection of our own.

``ovs-ofctl`` sets one meter per call, which takes 5 ms.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from pathlib import Path

VERSION = 4
HELLO, ERROR, ECHO_REQUEST, ECHO_REPLY = 0, 1, 2, 3
BARRIER_REQUEST, BARRIER_REPLY, METER_MOD = 20, 21, 29
ADD, MODIFY = 0, 1
KBPS, BURST, STATS = 1, 4, 8
DROP = 1

_HEADER = struct.Struct("!BBHI")


def meter_mod(command: int, meter: int, kbps: int, burst_kbits: int = 0) -> bytes:
    """An OFPT_METER_MOD with one drop band; no burst size means the switch's default."""
    flags = KBPS | STATS | (BURST if burst_kbits else 0)
    body = struct.pack("!HHI", command, flags, meter)
    body += struct.pack("!HHII4x", DROP, 16, kbps, burst_kbits)
    return _HEADER.pack(VERSION, METER_MOD, _HEADER.size + len(body), 0) + body


class OpenFlowError(RuntimeError):
    """The switch answered a message with an error."""


class Connection:
    """A connection to a bridge's management socket."""

    def __init__(self, rundir: str, bridge: str):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(120)
        self._socket.connect(str(Path(rundir, f"{bridge}.mgmt")))
        self._send(HELLO)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._socket.close()

    def _send(self, kind: int, body: bytes = b"", xid: int = 0) -> None:
        self._socket.sendall(_HEADER.pack(VERSION, kind, _HEADER.size + len(body), xid) + body)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._socket.recv(size - len(data))
            if not more:
                raise OpenFlowError("the switch closed the connection")
            data += more
        return data

    def barrier(self) -> None:
        """Wait until all that was sent is done; raise what was refused."""
        self._send(BARRIER_REQUEST, xid=1)
        while True:
            _, kind, size, xid = _HEADER.unpack(self._read(_HEADER.size))
            body = self._read(size - _HEADER.size)
            if kind == ERROR:
                what, code = struct.unpack_from("!HH", body)
                raise OpenFlowError(f"error type {what} code {code}")
            if kind == ECHO_REQUEST:
                self._send(ECHO_REPLY, body, xid)
            if kind == BARRIER_REPLY:
                return

    def set_meters(self, command: int, meters: Iterable[tuple[int, int]],
                   burst_kbits: int = 0) -> None:
        """Add or modify meters, given as (number, kbit/s), and wait until they are there."""
        messages = [meter_mod(command, meter, kbps, burst_kbits) for meter, kbps in meters]
        # A barrier now and then: errors would else fill the socket, which nobody reads.
        for at in range(0, len(messages), 1000):
            self._socket.sendall(b"".join(messages[at:at + 1000]))
            self.barrier()
