"""The guest that speaks vhost-user itself, against a back end made here for it."""

from __future__ import annotations

import mmap
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

import vhost_peer
from vhost_peer import (
    ADDR,
    BUFFER,
    F_PROTOCOL_FEATURES,
    F_VERSION_1,
    FRAME_BYTES,
    GUEST_BASE,
    HEADER,
    NEED_REPLY,
    NET_HEADER,
    NUMBER_AT,
    PROTOCOL_F_MQ,
    PROTOCOL_F_REPLY_ACK,
    REGIONS,
    REPLY,
    RING,
    STATE,
    U64,
    USER_BASE,
    VERSION,
    Closed,
    Frontend,
    Peer,
    ProtocolError,
    Ring,
    Step,
)

ACKED = {Step.SET_FEATURES, Step.SET_MEM_TABLE, Step.SET_VRING_NUM, Step.SET_VRING_BASE,
         Step.SET_VRING_ADDR, Step.SET_VRING_CALL, Step.SET_VRING_KICK, Step.SET_VRING_ENABLE}


class Backend(threading.Thread):
    """The switch's side of a connection: answers, and keeps what it is told."""

    def __init__(self, sock: socket.socket, *, features: int = F_VERSION_1 | F_PROTOCOL_FEATURES,
                 protocol: int = PROTOCOL_F_MQ | PROTOCOL_F_REPLY_ACK, refuses: Step | None = None):
        super().__init__(daemon=True)
        self._sock, self._protocol, self._refuses = sock, protocol, refuses
        self._values = {Step.GET_FEATURES: features, Step.GET_PROTOCOL_FEATURES: protocol,
                        Step.GET_QUEUE_NUM: 8}
        self.seen: list[tuple[Step, int, bytes]] = []
        self.fds: dict[Step, list[int]] = {}
        self.tail = b""

    def run(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._sock, HEADER.size, 8)
            if len(data) < HEADER.size:
                return
            request, flags, size = HEADER.unpack(data)
            step = Step(request)
            if fds:
                self.fds.setdefault(step, []).extend(fds)
            body = self._sock.recv(size, socket.MSG_WAITALL) if size else b""
            if len(body) < size:
                self.tail = data + body
                return
            self.seen.append((step, flags, body))
            if step in self._values:
                self._reply(step, U64.pack(self._values[step]))
            elif step is Step.GET_VRING_BASE:
                self._reply(step, STATE.pack(STATE.unpack(body)[0], 7))
            elif flags & NEED_REPLY:
                self._reply(step, U64.pack(step is self._refuses))

    def _reply(self, step: Step, body: bytes) -> None:
        self._sock.sendall(HEADER.pack(step, VERSION | REPLY, len(body)) + body)

    def payloads(self, step: Step) -> list[bytes]:
        return [body for name, _, body in self.seen if name is step]


@pytest.fixture
def connection() -> Iterator[Callable[..., tuple[Frontend, Backend]]]:
    """Make both sides; call it with what is said to each."""
    made: list[tuple[socket.socket, Frontend, Backend]] = []

    def make(back: dict[str, object] | None = None, **front: object) -> tuple[Frontend, Backend]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        frontend, backend = Frontend(ours, **front), Backend(theirs, **(back or {}))
        backend.start()
        made.append((theirs, frontend, backend))
        return frontend, backend

    yield make
    for theirs, frontend, backend in made:
        frontend.close()
        backend.join(5)
        assert not backend.is_alive()
        theirs.close()
        for fds in backend.fds.values():
            for fd in fds:
                os.close(fd)


def test_connects_in_order_and_hands_over_its_memory(connection) -> None:
    frontend, backend = connection(queues=2)
    assert frontend.connect()
    frontend.close()
    backend.join(5)
    setup = [Step.SET_VRING_NUM, Step.SET_VRING_BASE, Step.SET_VRING_ADDR, Step.SET_VRING_CALL,
             Step.SET_VRING_KICK]
    assert [step for step, _, _ in backend.seen] == [
        Step.SET_OWNER, Step.GET_FEATURES, Step.GET_PROTOCOL_FEATURES, Step.SET_PROTOCOL_FEATURES,
        Step.GET_QUEUE_NUM, Step.SET_FEATURES, Step.SET_MEM_TABLE, *(setup * 4),
        *([Step.SET_VRING_ENABLE] * 4)]
    for step, flags, _ in backend.seen:
        assert flags == VERSION | (NEED_REPLY if step in ACKED else 0), step
    assert [STATE.unpack(p) for p in backend.payloads(Step.SET_VRING_ENABLE)] == [
        (i, 1) for i in range(4)]
    n, _, guest, size, user, offset = REGIONS.unpack(*backend.payloads(Step.SET_MEM_TABLE))
    assert (n, guest, size, user, offset) == (1, GUEST_BASE, frontend.size, USER_BASE, 0)
    memory_fd, = backend.fds[Step.SET_MEM_TABLE]
    assert os.fstat(memory_fd).st_size == size
    assert len(backend.fds[Step.SET_VRING_KICK]) == len(backend.fds[Step.SET_VRING_CALL]) == 4
    # Parts of rings are where they are said to be, aligned as virtio wants, and apart.
    parts = []
    for payload in backend.payloads(Step.SET_VRING_ADDR):
        _, flags, desc, used, avail, log = ADDR.unpack(payload)
        assert (flags, log, desc % 16, used % 4, avail % 2) == (0, 0, 0, 0, 0)
        parts += [(desc, 16 * RING), (avail, 6 + 2 * RING), (used, 6 + 8 * RING)]
    parts.sort()
    assert parts[0][0] >= USER_BASE and sum(parts[-1]) <= USER_BASE + size
    assert all(a + length <= b for (a, length), (b, _) in zip(parts, parts[1:], strict=False))


@pytest.mark.parametrize("until, half", [
    *((step, False) for step in list(Step)[:-1]), *((step, True) for step in list(Step)[1:-1])])
def test_stops_connecting(connection, until: Step, half: bool) -> None:
    """After the message, or in the middle of it: not a byte more."""
    frontend, backend = connection(until=until, half=half)
    assert not frontend.connect()
    frontend.close()
    backend.join(5)
    told = [step for step, _, _ in backend.seen]
    assert until not in told[:-1]
    if half:
        assert until not in told
        assert backend.tail == HEADER.pack(until, VERSION, STATE.size)
    else:
        assert backend.tail == b"" and told[-1:] == ([until] if until else [])


def test_without_options_of_the_protocol(connection) -> None:
    frontend, backend = connection({"protocol": 0})
    assert frontend.connect()
    assert all(flags == VERSION for _, flags, _ in backend.seen)
    assert backend.payloads(Step.GET_QUEUE_NUM) == []


@pytest.mark.parametrize("back, message", [
    ({"features": F_VERSION_1}, "features 0x100000000 lack"),
    ({"refuses": Step.SET_MEM_TABLE}, "SET_MEM_TABLE failed: 1"),
])
def test_what_it_does_not_accept(connection, back: dict[str, object], message: str) -> None:
    frontend, _ = connection(back)
    with pytest.raises(ProtocolError, match=message):
        frontend.connect()


def test_more_queues_than_there_may_be(connection) -> None:
    frontend, _ = connection(queues=9)
    with pytest.raises(ProtocolError, match="8 pairs of queues at most"):
        frontend.connect()


def test_closes_in_order(connection) -> None:
    frontend, backend = connection()
    frontend.connect()
    assert frontend.close_in_order() == [7, 7]
    backend.join(5)
    assert [STATE.unpack(p)[0] for p in backend.payloads(Step.GET_VRING_BASE)] == [0, 1]


def test_other_side_closes() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    frontend = Frontend(ours)
    theirs.close()
    with pytest.raises(Closed):
        frontend.connect()
    frontend.close()


class Device:
    """The device's side of a ring, from nothing but the ring's memory."""

    def __init__(self, memory: bytearray | mmap.mmap | memoryview, ring: Ring):
        self.memory, self.ring, self.next = memory, ring, 0

    def offered(self) -> int:
        """Buffers that it may take now."""
        idx, = struct.unpack_from("=H", self.memory, self.ring.avail_at + 2)
        return (idx - self.next) & 0xFFFF

    def take(self, content: bytes = b"") -> bytes:
        """Take a buffer, write to it, return it; returns what was in it."""
        at = self.next % RING
        head, = struct.unpack_from("=H", self.memory, self.ring.avail_at + 4 + 2 * at)
        address, length, flags, _ = struct.unpack_from("=QIHH", self.memory,
                                                       self.ring.desc_at + 16 * head)
        start = address - GUEST_BASE
        assert flags == (2 if content else 0) and length >= len(content)
        old = bytes(self.memory[start:start + length])
        self.memory[start:start + len(content)] = content
        self.give_back(head, len(content))
        return old

    def give_back(self, head: int, length: int) -> None:
        struct.pack_into("=II", self.memory, self.ring.used_at + 4 + 8 * (self.next % RING),
                         head, length)
        self.next = (self.next + 1) & 0xFFFF
        struct.pack_into("=H", self.memory, self.ring.used_at + 2, self.next)


def new_ring(*, writable: bool) -> tuple[Device, Ring]:
    memory = memoryview(bytearray(vhost_peer.AREA + RING * BUFFER))
    ring = Ring(memory, 0, vhost_peer.AREA, writable=writable)
    return Device(memory, ring), ring


def test_ring_goes_round() -> None:
    """More buffers than indices have numbers, in batches of all sizes."""
    device, ring = new_ring(writable=False)
    choose, given, taken = random.Random(1), 0, 0
    while taken < 70_000:
        for _ in range(choose.randint(1, 300)):
            i = ring.offer(8)
            if i is None:
                assert len(ring.free) == 0
                break
            struct.pack_into("=Q", ring.buffer(i), 0, given)
            given += 1
        before = device.offered()
        ring.publish()
        assert before <= device.offered() == given - taken <= RING
        for _ in range(choose.randint(0, device.offered())):
            assert struct.unpack("=Q", device.take())[0] == taken
            taken += 1
        list(ring.take())
    assert len(ring.free) == RING - (given - taken)


def test_device_returns_what_it_does_not_have() -> None:
    device, ring = new_ring(writable=True)
    i = ring.offer()
    ring.publish()
    device.give_back((i + 1) % RING, 0)
    with pytest.raises(ProtocolError, match="which it did not have"):
        list(ring.take())


@pytest.fixture
def peer() -> Iterator[Peer]:
    """One that is connected to nothing."""
    ours, theirs = socket.socketpair()
    peer = Peer(lambda: ours, rate=1000, queues=2, sender=3, destination=4)
    peer.frontend = Frontend(ours, queues=2)
    peer._start(peer.frontend)
    yield peer
    peer.frontend.close()
    theirs.close()


def devices(peer: Peer) -> list[Device]:
    assert peer.frontend is not None
    return [Device(ring.memory, ring) for ring in peer.frontend.rings]


def test_sends_numbered_frames_at_its_rate(peer: Peer) -> None:
    rings = devices(peer)
    start = peer._due
    for ms in range(1, 101):
        peer.send_due(start + ms / 1000 + 1e-6)
    frames = [ring.take() for ring in rings[1::2] for _ in range(ring.offered())]
    assert len(frames) == 100
    numbers = []
    for text in frames:
        assert text[:12] == NET_HEADER and len(text) == 12 + FRAME_BYTES
        assert text[12:24] == bytes.fromhex("02fb00040004" "02fb00040003")
        ip = text[26:46]
        total = sum(struct.unpack("!10H", ip))
        assert (total & 0xFFFF) + (total >> 16) == 0xFFFF, "the checksum of the IP header"
        assert struct.unpack("!H", ip[2:4])[0] == FRAME_BYTES - 14
        numbers.append(struct.unpack_from("!Q", text, 12 + NUMBER_AT)[0])
    assert sorted(numbers) == list(range(1, 101))
    peer.take()
    assert peer.counters.sent == 100
    # What nobody took in a second is not sent at once afterwards.
    peer.send_due(start + 1.1)
    assert sum(ring.offered() for ring in rings) - rings[0].offered() - rings[2].offered() <= 1000
    peer.rate = 0
    peer.send_due(start + 2)


def test_counts_what_comes(peer: Peer) -> None:
    ring = devices(peer)[0]
    assert ring.offered() == RING
    good = NET_HEADER + vhost_peer.frame(9, 3)
    for content in (good, good, good[:-1], NET_HEADER + bytes(FRAME_BYTES)):
        ring.take(content)
    peer.take()
    assert (peer.counters.received, peer.counters.strange) == (2, 2)
    assert ring.offered() == RING, "buffers are offered again"
