"""The sockets that switches and REST clients connect to.

Ryu's own listeners have no limits: a thousand idle connections use up all file descriptors,
the next `accept` fails, and that ends the listener for as long as the process lives.  And
they take a single TLS connection: the second one finds the key's name gone from the
arguments, and after one has ended its thread reads the same error forever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import eventlet
import eventlet.event
import eventlet.patcher
import eventlet.wsgi
from eventlet.greenio import GreenPipe

from fbrates.admission import Admission

LOG = logging.getLogger("flowbundler")
ACCEPT_PAUSE = 0.1
"""Seconds to wait after an `accept` that failed, for instance for lack of descriptors."""


class Wire:
    """A connected socket as the frameworks use it.

    It is the same object with TLS and without, and one that ends with a TLS error, such as a
    peer that did not say goodbye, has ended, which is all that the frameworks can take.
    """

    def __init__(self, connection: Any) -> None:
        self._socket = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv(self, size: int) -> bytes:
        """Read; nothing at the end, raises TimeoutError."""
        try:
            return bytes(self._socket.recv(size))
        except TimeoutError:
            raise
        except ssl.SSLError as error:
            if "timed out" in str(error):
                raise TimeoutError from None
            LOG.debug("TLS: %s", error)
            return b""

    def secure(self, context: ssl.SSLContext, patience: float) -> None:
        """Do TLS's handshake; raises OSError."""
        self._socket.settimeout(patience)
        self._socket = context.wrap_socket(self._socket, server_side=True)


class _Handle:
    """What an Admission knows of a connection."""

    def __init__(self, wire: Any) -> None:
        self.wire = wire

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Handle) and other.wire is self.wire

    def __hash__(self) -> int:
        return id(self.wire)

    def fileno(self) -> int:
        return int(self.wire.fileno())

    def close(self) -> None:
        # Who reads from it is woken, and closes it.
        with contextlib.suppress(OSError):
            self.wire.shutdown(socket.SHUT_RDWR)


class Listener:
    """A listening socket with limits.  `accept` never fails."""

    def __init__(self, listening: Any, admission: Admission, name: str) -> None:
        self.admission = admission
        self.name = name
        self.failures = 0
        self.tls: ssl.SSLContext | None = None
        """What each connection is to have; its handshake is done by whoever reads first."""
        self._socket = listening
        self._told = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def accept(self) -> tuple[Any, Any]:
        """Wait for the next connection."""
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError as error:
                self.failures += 1
                if not self._told:
                    self._told = True
                    LOG.error("%s: cannot accept connections: %s", self.name, error)
                self.admission.expire()
                eventlet.sleep(ACCEPT_PAUSE)
                continue
            self._told = False
            if self.tls is not None:
                try:
                    connection = self.tls.wrap_socket(
                        connection, server_side=True, do_handshake_on_connect=False
                    )
                except (OSError, ValueError):
                    connection.close()
                    continue
            wire = Wire(connection)
            self.admission.admit(_Handle(wire), str(address[0]) if address else "")
            return wire, address

    def settle(self, wire: Any) -> None:
        """The connection has shown who it is."""
        self.admission.settle(_Handle(wire))

    def touch(self, wire: Any) -> None:
        """The connection has done what it is for."""
        self.admission.touch(_Handle(wire))


class HttpProtocol(eventlet.wsgi.HttpProtocol):  # type: ignore[misc]
    """One that knows that a connection may fail to become one of TLS."""

    def handle(self) -> None:
        """Answer requests until the connection ends."""
        try:
            super().handle()
        except ssl.SSLError as error:
            LOG.debug("REST: TLS with %s: %s", self.client_address, error)
            self.close_connection = 1


@dataclass(frozen=True)
class Tls:
    """Files, in PEM, that TLS needs; with `ca` clients must have a certificate of it."""

    key: Path
    certificate: Path
    ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Read them; raises OSError (ssl.SSLError is one) and ValueError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate, self.key)
        if self.ca is not None:
            context.load_verify_locations(self.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def serve(
    listener: Listener, handle: Callable[[Any, Any], None], context: ssl.SSLContext | None
) -> None:
    """Hand each connection, behind its TLS handshake, to `handle` in a green thread."""

    def begin(wire: Wire, address: Any) -> None:
        if context is not None:
            try:
                wire.secure(context, listener.admission.limits.patience)
            except (OSError, ValueError) as error:
                LOG.warning("%s: TLS with %s: %s", listener.name, address[0], error)
                wire.close()
                return
        handle(wire, address)

    while True:
        eventlet.spawn_n(begin, *listener.accept())


class Bridge:
    """Lets native threads set events that green threads wait for."""

    def __init__(self) -> None:
        self._set: deque[Any] = deque()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        eventlet.spawn_n(self._run)

    def event(self) -> BridgedEvent:
        """Give an event that may be set from anywhere, and is waited for in green threads."""
        return BridgedEvent(self)

    def tell(self, event: Any) -> None:
        """Have an event sent; from any thread."""
        self._set.append(event)
        with contextlib.suppress(BlockingIOError):
            os.write(self._writing, b"x")

    def _run(self) -> None:
        pipe = GreenPipe(self._reading, "rb", 0)
        while pipe.read(1):
            while self._set:
                self._set.popleft().send()


class BridgedEvent:
    """As threading.Event; see `Bridge`."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._event = eventlet.event.Event()

    def set(self) -> None:
        """Set it, once."""
        self._bridge.tell(self._event)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait in a green thread; False if it is not set in time."""
        with eventlet.Timeout(timeout, False):
            self._event.wait()
        return bool(self._event.ready())


def start_native_thread(function: Callable[[], None]) -> None:
    """Run a function beside all green threads."""
    threading = eventlet.patcher.original("threading")
    threading.Thread(target=function, daemon=True).start()


native_poll = eventlet.patcher.original("select").poll


def raise_descriptor_limit() -> int:
    """Allow as many file descriptors as the system lets us have; gives how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
