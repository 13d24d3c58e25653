"""A guest at a vhost-user port that speaks the protocol itself, and starts in milliseconds.

    vhost_peer.py [--connect] [--rate PPS] [--queues N] [--until STEP [--half]] PATH

is the front end of vhost-user, which QEMU is for a virtual machine: it listens on the
socket PATH for a port of type dpdkvhostuserclient, or with --connect connects to that of
a port of type dpdkvhostuser, hands over its memory and N pairs of split virtqueues, sends
numbered frames, PPS a second, and counts those that come.  If the switch closes the
connection, it waits for the next one.

Commands on standard input, a line each, which standard output answers with one line of
JSON (`Counters`):

    report      nothing else
    rate PPS    sends so many frames a second from now on
    close       stops the virtqueues in order, closes the connection and ends
    half STEP   sends the header of that message only, and then nothing more

With --until it stops connecting after the message STEP (see `Step`) and keeps the
connection; with --half it sends only that message's header, so that whoever reads the
message waits for its rest.  Kill it or stop it (SIGSTOP) at any time.

The classes have no more in them than the specification asks of a front end
(https://qemu-project.gitlab.io/qemu/interop/vhost-user.html) and of a driver of virtio
1.1 without any optional feature.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import mmap
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import NoReturn

# The protocol.


class Step(enum.IntEnum):
    """Requests, in the order in which a connection has them, with their numbers."""

    CONNECT = 0  # (No request: nothing has been sent.)
    SET_OWNER = 3
    GET_FEATURES = 1
    GET_PROTOCOL_FEATURES = 15
    SET_PROTOCOL_FEATURES = 16
    GET_QUEUE_NUM = 17
    SET_FEATURES = 2
    SET_MEM_TABLE = 5
    SET_VRING_NUM = 8
    SET_VRING_BASE = 10
    SET_VRING_ADDR = 9
    SET_VRING_CALL = 13
    SET_VRING_KICK = 12
    SET_VRING_ENABLE = 18
    GET_VRING_BASE = 11


HEADER = struct.Struct("=III")  # Request, flags, bytes that follow.
VERSION, REPLY, NEED_REPLY = 1, 1 << 2, 1 << 3
U64, STATE = struct.Struct("=Q"), struct.Struct("=II")
ADDR = struct.Struct("=IIQQQQ")  # Index, flags; descriptors, used, avail, log.
REGIONS = struct.Struct("=IIQQQQ")  # One: number, 0; guest's, size, ours, offset.

F_PROTOCOL_FEATURES, F_VERSION_1 = 1 << 30, 1 << 32
PROTOCOL_F_MQ, PROTOCOL_F_REPLY_ACK = 1 << 0, 1 << 3

# What a driver has in memory.

RING = 256
#: A descriptor: address, bytes, flags, next one.
DESC = struct.Struct("=QIHH")
DESC_F_WRITE = 2
AVAIL_F_NO_INTERRUPT = 1
#: Of virtio 1: no offloads are used, so it is all zeros but for the number of buffers.
NET_HEADER = bytes(10) + b"\1\0"
BUFFER = 2048
AREA = 16384  # Descriptors, avail and used of a ring, each at a page's start.
#: Where the memory begins for the guest, and in "our" addresses: neither is where it is.
GUEST_BASE, USER_BASE = 0x1_0000_0000, 0x7F00_0000_0000

# Frames: what test-vhost-peer.py and the rounds take for one of a peer.

MAGIC = 0x66625065
PAYLOAD = struct.Struct("!IIQ")  # Magic, sender, number.
FRAME_BYTES = 200


class ProtocolError(RuntimeError):
    """The other side did what it must not."""


class Closed(Exception):
    """The other side has closed the connection."""


class Stopped(Exception):
    """This side has come to where it is to stop."""


def frame(sender: int, destination: int) -> bytearray:
    """An Ethernet frame of UDP from peer `sender` to peer `destination`, number 0."""
    size = FRAME_BYTES - 14
    ip = struct.pack("!BBHHHBBH4B4B", 0x45, 0, size, 0, 0, 64, 17, 0,
                     10, 75, 0, sender, 10, 75, 0, destination)
    total = sum(struct.unpack("!10H", ip))
    checksum = ~(total + (total >> 16)) & 0xFFFF
    ip = ip[:10] + struct.pack("!H", checksum) + ip[12:]
    text = (bytes((2, 0xFB, 0, 4, 0, destination, 2, 0xFB, 0, 4, 0, sender, 8, 0)) + ip
            + struct.pack("!HHHH", 4000, 4001, size - 20, 0) + PAYLOAD.pack(MAGIC, sender, 0))
    return bytearray(text.ljust(FRAME_BYTES, b"\0"))


#: Where in a frame the number is.
NUMBER_AT = 14 + 20 + 8 + 8


class Ring:
    """The driver's side of a split virtqueue of `RING` buffers of `BUFFER` bytes.

    Descriptor i is buffer i, for good.  `memory` is all of the guest's; the ring's
    parts are at `at`, its buffers from `buffers` on, both offsets in it.
    """

    def __init__(self, memory: memoryview, at: int, buffers: int, *, writable: bool):
        self.at, self.memory, self.buffers = at, memory, buffers
        self.desc_at, self.avail_at, self.used_at = at, at + 8192, at + 12288
        flags = DESC_F_WRITE if writable else 0
        for i in range(RING):
            DESC.pack_into(memory, at + i * DESC.size,
                           GUEST_BASE + buffers + i * BUFFER, BUFFER, flags, 0)
        # Both sides look at indices while the other writes: each is one store, one load.
        self._avail = memory[self.avail_at:self.avail_at + 4096].cast("H")
        self._used = memory[self.used_at:self.used_at + 4096].cast("H")
        self._used_entries = memory[self.used_at + 4:self.used_at + 4 + 8 * RING].cast("I")
        self._avail[0] = AVAIL_F_NO_INTERRUPT
        self._next = self._seen = self._avail[1] = self._used[1] = 0
        self.free = list(range(RING))

    def buffer(self, i: int) -> memoryview:
        """The bytes of buffer `i`."""
        return self.memory[self.buffers + i * BUFFER:self.buffers + (i + 1) * BUFFER]

    def offer(self, length: int = BUFFER) -> int | None:
        """Take a free buffer, which is to be given away by `publish`; None if there is none."""
        if not self.free:
            return None
        i = self.free.pop()
        struct.pack_into("=I", self.memory, self.desc_at + i * DESC.size + 8, length)
        self._avail[2 + self._next % RING] = i
        self._next += 1
        return i

    def publish(self) -> None:
        """Let the device have all that has been offered."""
        # x86 keeps the order of stores, and so does an interpreter of Python.
        self._avail[1] = self._next & 0xFFFF

    def take(self) -> Iterator[tuple[int, int]]:
        """Give the buffers that the device is done with, and how many bytes it wrote.

        They are free then.
        """
        used = self._used[1]
        while self._seen != used:
            at = self._seen % RING
            i, length = self._used_entries[2 * at], self._used_entries[2 * at + 1]
            self._seen = (self._seen + 1) & 0xFFFF
            if i >= RING or i in self.free:
                raise ProtocolError(f"the device returned buffer {i}, which it did not have")
            yield i, length
            self.free.append(i)


class Frontend:
    """A connection and the guest's memory; runs the protocol from its start to its end.

    Ring 2n is what the guest receives by, ring 2n + 1 what it sends by.
    """

    def __init__(self, sock: socket.socket, *, queues: int = 1, until: Step | None = None,
                 half: bool = False):
        self.sock, self.queues, self.until, self.half = sock, queues, until, half
        self.rings: list[Ring] = []
        self._acks = False
        self._fds: list[int] = []
        rings_bytes = 2 * queues * AREA
        self.size = rings_bytes + 2 * queues * RING * BUFFER
        self._memory_fd = self._keep(os.memfd_create("guest"))
        os.ftruncate(self._memory_fd, self.size)
        self._map = mmap.mmap(self._memory_fd, self.size)
        memory = memoryview(self._map)
        self.rings = [Ring(memory, n * AREA, rings_bytes + n * RING * BUFFER,
                           writable=n % 2 == 0) for n in range(2 * queues)]

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    # Messages.

    def send(self, step: Step, payload: bytes = b"", fds: tuple[int, ...] = (),
             reply: struct.Struct | None = None) -> tuple[int, ...]:
        """Send a request, and wait for what answers it, if anything does."""
        ack = reply is None and self._acks
        header = HEADER.pack(step, VERSION | (NEED_REPLY if ack else 0), len(payload))
        if self.half and step is self.until:
            self.send_half(step)
            raise Stopped
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"={len(fds)}i", *fds))]
        try:
            self.sock.sendmsg([header, payload], control if fds else [])
            if ack:
                reply = U64
            if reply is None:
                return ()
            request, flags, size = HEADER.unpack(self._read(HEADER.size))
            body = self._read(size)
        except (BrokenPipeError, ConnectionResetError):
            raise Closed from None
        if request != step or not flags & REPLY or size != reply.size:
            raise ProtocolError(f"{step.name} was answered by {request}, {flags}, {size} bytes")
        values = reply.unpack(body)
        if ack and values[0]:
            raise ProtocolError(f"{step.name} failed: {values[0]}")
        return values

    def send_half(self, step: Step) -> None:
        """Send the header of a message with a payload that does not come."""
        with contextlib.suppress(OSError):
            self.sock.sendall(HEADER.pack(step, VERSION, STATE.size))

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.sock.recv(size - len(data))
            if not part:
                raise Closed
            data += part
        return data

    # What a connection is.

    def steps(self) -> Iterator[Step]:
        """Connect: what has just been sent, one by one."""
        yield Step.CONNECT
        self.send(Step.SET_OWNER)
        yield Step.SET_OWNER
        features, = self.send(Step.GET_FEATURES, reply=U64)
        wanted = F_VERSION_1 | F_PROTOCOL_FEATURES
        if features & wanted != wanted:
            raise ProtocolError(f"the features {features:#x} lack some of {wanted:#x}")
        yield Step.GET_FEATURES
        offered, = self.send(Step.GET_PROTOCOL_FEATURES, reply=U64)
        yield Step.GET_PROTOCOL_FEATURES
        protocol = offered & (PROTOCOL_F_MQ | PROTOCOL_F_REPLY_ACK)
        self.send(Step.SET_PROTOCOL_FEATURES, U64.pack(protocol))
        yield Step.SET_PROTOCOL_FEATURES
        self._acks = bool(protocol & PROTOCOL_F_REPLY_ACK)
        if protocol & PROTOCOL_F_MQ:
            most, = self.send(Step.GET_QUEUE_NUM, reply=U64)
            if most < self.queues:
                raise ProtocolError(f"there may be {most} pairs of queues at most")
            yield Step.GET_QUEUE_NUM
        self.send(Step.SET_FEATURES, U64.pack(wanted))
        yield Step.SET_FEATURES
        self.send(Step.SET_MEM_TABLE, REGIONS.pack(1, 0, GUEST_BASE, self.size, USER_BASE, 0),
                  (self._memory_fd,))
        yield Step.SET_MEM_TABLE
        for index, ring in enumerate(self.rings):
            self.send(Step.SET_VRING_NUM, STATE.pack(index, RING))
            yield Step.SET_VRING_NUM
            self.send(Step.SET_VRING_BASE, STATE.pack(index, 0))
            yield Step.SET_VRING_BASE
            self.send(Step.SET_VRING_ADDR, ADDR.pack(
                index, 0, USER_BASE + ring.desc_at, USER_BASE + ring.used_at,
                USER_BASE + ring.avail_at, 0))
            yield Step.SET_VRING_ADDR
            for step in (Step.SET_VRING_CALL, Step.SET_VRING_KICK):
                self.send(step, U64.pack(index), (self._keep(os.eventfd(0)),))
                yield step
        for index in range(len(self.rings)):
            self.send(Step.SET_VRING_ENABLE, STATE.pack(index, 1))
            yield Step.SET_VRING_ENABLE

    def connect(self) -> bool:
        """Connect; returns whether it came to the end, not to `until`."""
        try:
            return all(step is not self.until for step in self.steps())
        except Stopped:
            return False

    def close_in_order(self) -> list[int]:
        """Stop all rings, then close the connection; returns the rings' last indices."""
        bases = [self.send(Step.GET_VRING_BASE, STATE.pack(index, 0), reply=STATE)[1]
                 for index in range(len(self.rings))]
        self.close()
        return bases

    def close(self) -> None:
        """Close the connection, whatever state it is in, and give the memory back."""
        self.sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


@dataclass
class Counters:
    """What a peer has done; `sent` is what the switch took from its rings."""

    state: str = "waiting"
    connections: int = 0
    sent: int = 0
    received: int = 0
    strange: int = 0
    """Frames received that no peer has sent, or that are not whole."""


class Peer:
    """Traffic by the rings of one connection after another."""

    def __init__(self, open_socket: Callable[[], socket.socket], *, rate: int = 0,
                 queues: int = 1, until: Step | None = None, half: bool = False,
                 sender: int = 1, destination: int = 1):
        self._open, self.rate, self.queues = open_socket, rate, queues
        self._until, self._half = until, half
        self._frame = frame(sender, destination)
        self._number = 0
        self._due = time.monotonic()
        self.counters = Counters()
        self.frontend: Frontend | None = None

    # Traffic.

    def _start(self, frontend: Frontend) -> None:
        """Fill the rings: those that receive with buffers, the others' buffers with frames."""
        for n, ring in enumerate(frontend.rings):
            if n % 2:
                for i in range(RING):
                    ring.buffer(i)[:len(NET_HEADER) + FRAME_BYTES] = NET_HEADER + self._frame
            else:
                while ring.offer() is not None:
                    pass
                ring.publish()

    def send_due(self, now: float) -> None:
        """Send what is due; what the rings do not take is not sent later."""
        assert self.frontend is not None
        due, self._due = int((now - self._due) * self.rate), now if not self.rate else self._due
        if due <= 0:
            return
        self._due = max(self._due + due / self.rate, now - 0.1)
        rings = self.frontend.rings[1::2]
        for n, ring in enumerate(rings):
            for _ in range(due // len(rings) + (n < due % len(rings))):
                i = ring.offer(len(NET_HEADER) + FRAME_BYTES)
                if i is None:
                    break
                self._number += 1
                at = ring.buffers + i * BUFFER + len(NET_HEADER) + NUMBER_AT
                struct.pack_into("!Q", ring.memory, at, self._number)
            ring.publish()

    def take(self) -> None:
        """Look at what has come, and what has been sent."""
        assert self.frontend is not None
        for n, ring in enumerate(self.frontend.rings):
            if n % 2:
                self.counters.sent += sum(1 for _ in ring.take())
                continue
            for i, length in ring.take():
                at = len(NET_HEADER) + NUMBER_AT - 8
                magic, _, _ = PAYLOAD.unpack_from(ring.buffer(i), at)
                good = magic == MAGIC and length == len(NET_HEADER) + FRAME_BYTES
                self.counters.received += good
                self.counters.strange += not good
            while ring.offer() is not None:
                pass
            ring.publish()

    # Connections and commands.

    def run(self) -> None:
        """Do all that until standard input ends."""
        os.set_blocking(0, False)
        while True:
            try:
                self._connection(self._wait_for(self._open))
            except Closed:
                pass
            finally:
                if self.frontend is not None:
                    self.frontend.close()
                    self.frontend = None
            self.counters.state = "waiting"

    def _wait_for(self, open_socket: Callable[[], socket.socket]) -> socket.socket:
        while True:
            try:
                return open_socket()
            except (BlockingIOError, ConnectionRefusedError, FileNotFoundError):
                if select.select([0], [], [], 0.005)[0]:
                    self._command()

    def _connection(self, sock: socket.socket) -> None:
        self.frontend = Frontend(sock, queues=self.queues, until=self._until, half=self._half)
        self.counters.connections += 1
        if not self.frontend.connect():
            self._stay("stopped")
        self._start(self.frontend)
        self.counters.state = "running"
        self._due = time.monotonic()
        while True:
            ready = select.select([0, sock], [], [], 0.002)[0]
            if sock in ready:
                raise Closed  # Nobody asked it anything.
            if ready:
                self._command()
            self.take()
            self.send_due(time.monotonic())

    def _stay(self, state: str) -> NoReturn:
        """Say and hear nothing more from the switch; commands are obeyed."""
        self.counters.state = state
        while True:
            select.select([0], [], [])
            self._command()

    def _command(self) -> None:
        data = os.read(0, 4096)
        if not data:
            sys.exit()
        for line in data.decode().splitlines():
            word, _, argument = line.partition(" ")
            ends = word == "close"
            if word == "rate":
                self.rate = int(argument)
            elif word == "half" and self.frontend is not None:
                self.frontend.send_half(Step[argument])
                self.counters.state = "half"
            elif ends and self.frontend is not None:
                with contextlib.suppress(Closed):
                    self.frontend.close_in_order()
            elif word not in ("report", "close", "half"):
                sys.exit(f"vhost_peer: no command: {line}")
            print(json.dumps(asdict(self.counters)), flush=True)
            if ends:
                sys.exit()
            if word == "half":
                self._stay("half")


def listener(path: str) -> Callable[[], socket.socket]:
    """What accepts a connection at `path`, now or never."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(path)
    server.listen()
    server.setblocking(False)

    def accept() -> socket.socket:
        sock = server.accept()[0]
        sock.setblocking(True)
        return sock

    return accept


def connector(path: str) -> Callable[[], socket.socket]:
    """What connects to `path`, now or never."""
    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(path)
        except OSError:
            sock.close()
            raise
        return sock

    return connect


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--connect", action="store_true")
    parser.add_argument("--rate", type=int, default=0)
    parser.add_argument("--queues", type=int, default=1)
    parser.add_argument("--until", type=Step.__getitem__)
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--sender", type=int, default=1, help="number in addresses")
    parser.add_argument("--destination", type=int, default=1)
    args = parser.parse_args()
    opener = (connector if args.connect else listener)(args.path)
    Peer(opener, rate=args.rate, queues=args.queues, until=args.until, half=args.half,
         sender=args.sender, destination=args.destination).run()


if __name__ == "__main__":
    main()
