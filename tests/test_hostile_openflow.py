"""meter_mods of all kinds against a real ovs-vswitchd, beside a model of its meters.

The messages are made byte by byte: most are right or wrong in one thing, at the edges of
what is allowed, and some have lengths that lie.  docs/shape-band.md says what is allowed.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller_harness import Switch
from hostile import Unixctl, examples

pytestmark = pytest.mark.switch

HEADER = struct.Struct("!BBHI")
VERSION, HELLO, ERROR, ECHO_REQUEST, ECHO_REPLY = 4, 0, 1, 2, 3
MULTIPART_REQUEST, MULTIPART_REPLY, BARRIER_REQUEST, BARRIER_REPLY = 18, 19, 20, 21
METER_MOD = 29
METER_CONFIG, METER_FEATURES = 10, 11

ADD, MODIFY, DELETE = 0, 1, 2
KBPS, PKTPS, BURST, STATS = 1, 2, 4, 8
MAX_ID, SLOWPATH, TO_CONTROLLER, ALL = 0xFFFF0000, 0xFFFFFFFD, 0xFFFFFFFE, 0xFFFFFFFF
DROP, DSCP_REMARK, EXPERIMENTER = 1, 2, 0xFFFF
NICIRA, SHAPE = 0x2320, 1
MAX_BANDS = 8
DEFAULT_MAX_DELAY_US = 50_000


@dataclass(frozen=True)
class Band:
    """A band; one that drops has neither of the last three."""

    kind: int
    rate: int
    burst: int
    max_delay: int = 0
    ecn_threshold: int = 0
    subtype: int = 0
    experimenter: int = 0
    zeros: bytes = bytes(6)
    length: int | None = None
    """What it says its length is, if not the truth."""

    def encode(self) -> bytes:
        if self.kind == EXPERIMENTER:
            body = struct.pack("!IH6sII", self.experimenter, self.subtype, self.zeros,
                               self.max_delay, self.ecn_threshold)
        else:
            body = bytes(4)
        length = 12 + len(body) if self.length is None else self.length
        return struct.pack("!HHII", self.kind, length, self.rate, self.burst) + body


@dataclass(frozen=True)
class MeterMod:
    """A meter_mod; `cut` bytes are missing at its end, or so many zeros too many there."""

    command: int
    flags: int
    meter: int
    bands: tuple[Band, ...]
    cut: int = 0

    def encode(self) -> bytes:
        data = struct.pack("!HHI", self.command, self.flags, self.meter)
        data += b"".join(band.encode() for band in self.bands)
        return data[:len(data) - self.cut] if self.cut >= 0 else data + bytes(-self.cut)


Meter = tuple[int, tuple[Band, ...]]


@dataclass
class Model:
    """Which meters there must be, and what they must say."""

    meters: dict[int, Meter] = field(default_factory=dict)

    def apply(self, mod: MeterMod) -> bool:
        """Do what the message says; False if it is to be refused."""
        if mod.cut and (mod.cut % 8 or mod.command != DELETE or len(mod.encode()) < 8):
            return False
        if mod.command == DELETE:
            if mod.meter == ALL:
                self.meters.clear()
            else:
                self.meters.pop(mod.meter, None)
            return True
        if mod.command not in (ADD, MODIFY) or not self.allowed(mod):
            return False
        if (mod.meter in self.meters) == (mod.command == ADD):
            return False
        # OVS gives drop bands without a burst one of a second at the rate.
        self.meters[mod.meter] = mod.flags, tuple(
            Band(DROP, band.rate, band.burst or band.rate) if band.kind == DROP else band
            for band in mod.bands)
        return True

    @staticmethod
    def allowed(mod: MeterMod) -> bool:
        """Whether there can be such a meter."""
        virtual = mod.meter in (SLOWPATH, TO_CONTROLLER)
        if not (1 <= mod.meter <= MAX_ID or virtual):
            return False
        if mod.flags & ~15 or mod.flags & (KBPS | PKTPS) not in (KBPS, PKTPS):
            return False
        if not 1 <= len(mod.bands) <= MAX_BANDS:
            return False
        for band in mod.bands:
            if band.length is not None or not band.rate:
                return False
            if band.kind == EXPERIMENTER:
                if (band.experimenter, band.subtype, band.zeros) != (NICIRA, SHAPE, bytes(6)):
                    return False
                if len(mod.bands) > 1 or virtual:
                    return False
                if band.burst and not mod.flags & BURST:
                    return False
                per_packet = bool(mod.flags & PKTPS)
                if not 1 <= band.rate <= (0xFFFFFFFF if per_packet else 400_000_000):
                    return False
                if not per_packet and band.burst * 125 > 1 << 32:
                    return False
                if band.max_delay > 10_000_000:
                    return False
                if band.ecn_threshold >= (band.max_delay or DEFAULT_MAX_DELAY_US):
                    return False
            elif band.kind != DROP:
                return False
        return True


class Connection:
    """An OpenFlow connection that sends what it is told, right or wrong."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(20)
        self._socket.connect(str(path))
        self._data = b""
        self._xid = 100
        self.send(HELLO)
        assert self.receive()[0] == HELLO

    def close(self) -> None:
        self._socket.close()

    def send(self, kind: int, body: bytes = b"") -> int:
        self._xid += 1
        self._socket.sendall(HEADER.pack(VERSION, kind, 8 + len(body), self._xid) + body)
        return self._xid

    def add_meters(self, first: int, count: int) -> None:
        """Add meters with ids from `first` on, in one piece."""
        body = struct.pack("!HH", ADD, KBPS)
        band = Band(DROP, 1, 1).encode()
        header = HEADER.pack(VERSION, METER_MOD, 16 + len(band), 1)
        self._socket.sendall(b"".join(header + body + struct.pack("!I", number) + band
                                      for number in range(first, first + count)))

    def receive(self) -> tuple[int, int, bytes]:
        """Give the next message that is not an echo request: type, xid, body."""
        while True:
            while len(self._data) < 8 or len(self._data) < HEADER.unpack_from(self._data)[2]:
                more = self._socket.recv(1 << 16)
                assert more, "ovs-vswitchd has closed the connection"
                self._data += more
            _, kind, length, xid = HEADER.unpack_from(self._data)
            body, self._data = self._data[8:length], self._data[length:]
            if kind != ECHO_REQUEST:
                return kind, xid, body
            self._socket.sendall(HEADER.pack(VERSION, ECHO_REPLY, 8 + len(body), xid) + body)

    def errors(self) -> list[tuple[int, int, int]]:
        """Wait for all that was sent; gives xid, type, code of each error."""
        barrier = self.send(BARRIER_REQUEST)
        found = []
        while True:
            kind, xid, body = self.receive()
            if kind == ERROR:
                found.append((xid, *struct.unpack_from("!HH", body)))
            elif kind == BARRIER_REPLY and xid == barrier:
                return found

    def multipart(self, kind: int, body: bytes) -> bytes:
        """Give the whole reply."""
        request = self.send(MULTIPART_REQUEST, struct.pack("!HH4x", kind, 0) + body)
        reply = b""
        while True:
            what, xid, data = self.receive()
            assert (what, xid) == (MULTIPART_REPLY, request)
            reply += data[8:]
            if not struct.unpack_from("!HH", data)[1] & 1:
                return reply

    def meters(self) -> dict[int, Meter]:
        """Give all meters."""
        data = self.multipart(METER_CONFIG, struct.pack("!I4x", ALL))
        result: dict[int, Meter] = {}
        while data:
            length, flags, number = struct.unpack_from("!HHI", data)
            bands, rest, data = [], data[8:length], data[length:]
            while rest:
                kind, size, rate, burst = struct.unpack_from("!HHII", rest)
                if kind == EXPERIMENTER:
                    experimenter, subtype, zeros, delay, ecn = struct.unpack_from("!IH6sII",
                                                                                  rest, 12)
                    bands.append(Band(kind, rate, burst, delay, ecn, subtype, experimenter, zeros))
                else:
                    bands.append(Band(kind, rate, burst))
                rest = rest[size:]
            assert number not in result
            result[number] = flags, tuple(bands)
        return result

    def max_meters(self) -> int:
        """Give the number of meters that the switch says it can have."""
        return struct.unpack_from("!I", self.multipart(METER_FEATURES, b""))[0]


# What is sent.

_u32 = st.integers(0, 0xFFFFFFFF)
_ids = st.sampled_from([1, 1, 2, 2, 3, 65535, MAX_ID]) | st.sampled_from(
    [0, MAX_ID + 1, SLOWPATH - 1, SLOWPATH, TO_CONTROLLER, ALL]) | _u32
_rates = st.sampled_from([1, 1000, 400_000_000]) | st.sampled_from(
    [0, 400_000_001, 0xFFFFFFFF]) | _u32
_bursts = st.sampled_from([0, 0, 1, 34_359_738]) | st.sampled_from([34_359_739, 0xFFFFFFFF]) | _u32
_times = st.sampled_from([0, 0, 1, 49_999, 50_000, 10_000_000]) | st.sampled_from(
    [10_000_001, 0xFFFFFFFF])
_drops = st.builds(Band, st.just(DROP), _rates, _bursts)
_shapes = st.builds(Band, st.just(EXPERIMENTER), _rates, _bursts, _times, _times, st.just(SHAPE),
                    st.just(NICIRA))
_odd_bands = (
    st.builds(Band, st.sampled_from([0, DSCP_REMARK, 3, 0xFFFE]), _rates, _bursts)
    | st.builds(Band, st.just(EXPERIMENTER), _rates, _bursts, _times, _times,
                st.sampled_from([0, SHAPE, 2]), st.sampled_from([NICIRA, 0, 0xFFFFFFFF]),
                st.sampled_from([bytes(6), b"\0\0\0\0\0\1"]))
    | st.builds(Band, st.sampled_from([DROP, EXPERIMENTER]), _rates, _bursts, st.just(0),
                st.just(0), st.just(SHAPE), st.just(NICIRA),
                length=st.sampled_from([0, 4, 15, 17, 24, 31, 40, 0xFFFF]))
)
_bands = (
    st.tuples(_drops) | st.tuples(_shapes) | st.tuples(_odd_bands)
    | st.lists(_drops | _shapes | _odd_bands, max_size=MAX_BANDS + 2).map(tuple)
)
_flags = st.sampled_from([KBPS, PKTPS, KBPS | BURST, PKTPS | BURST | STATS, KBPS | STATS]) \
    | st.sampled_from([0, BURST, KBPS | PKTPS, 16, 0xFFFF])
_commands = st.sampled_from([ADD, ADD, MODIFY, MODIFY, DELETE]) | st.sampled_from(
    [ADD, MODIFY, DELETE, 3, 0xFFFF])
_good_rates = st.sampled_from([1, 1000, 400_000_000]) | st.integers(1, 400_000_000)
_good_bursts = st.sampled_from([0, 1, 34_359_738]) | st.integers(0, 34_359_738)
_good_bands = st.builds(Band, st.just(DROP), _good_rates, _good_bursts) | st.builds(
    Band, st.just(EXPERIMENTER), _good_rates, _good_bursts,
    st.sampled_from([50_001, 10_000_000]), st.sampled_from([0, 1, 50_000]), st.just(SHAPE),
    st.just(NICIRA))
_good_mods = st.builds(MeterMod, st.sampled_from([ADD, ADD, MODIFY, DELETE]),
                       st.sampled_from([KBPS | BURST, PKTPS | BURST, KBPS | BURST | STATS]),
                       st.sampled_from([1, 2, 3, MAX_ID]), st.tuples(_good_bands))
_mods = _good_mods | st.builds(MeterMod, _commands, _flags, _ids, _bands,
                               st.sampled_from([0] * 10 + [1, 4, 8, -1, -8]))


@pytest.fixture
def switch(ovs: Switch) -> Switch:
    ovs.add_bridge("br0", "p1")
    return ovs


def test_sequences_of_meter_mods(switch: Switch) -> None:
    """After each message there are the meters that the model has, and no error too many.

    At the end, every id that a meter of the datapath can have is still free.
    """
    connection = Connection(switch.directory / "br0.mgmt")
    refused = done = 0

    @examples(150)
    @given(st.lists(_mods, min_size=1, max_size=25))
    def run(mods: list[MeterMod]) -> None:
        nonlocal refused, done
        connection.send(METER_MOD, MeterMod(DELETE, 0, ALL, ()).encode())
        assert connection.errors() == [] and connection.meters() == {}
        model = Model()
        for mod in mods:
            xid = connection.send(METER_MOD, mod.encode())
            errors = connection.errors()
            ok = model.apply(mod)
            assert [error[0] for error in errors] == ([] if ok else [xid]), (mod, errors)
            assert connection.meters() == model.meters, mod
            done, refused = done + ok, refused + (not ok)

    run()
    connection.send(METER_MOD, MeterMod(DELETE, 0, ALL, ()).encode())
    # Not one-sided.
    assert done > 300 and refused > 300, (done, refused)
    assert switch.vswitchd is not None and switch.vswitchd.poll() is None

    # What is deleted gives its id back when no flow can name it any more: two dumps of
    # the revalidators, each between grace periods.
    unixctl = Unixctl(switch.directory / "ovs-vswitchd.ctl")
    for _ in range(10):
        unixctl("revalidator/wait")
        time.sleep(0.1)
    count = connection.max_meters()
    assert count > 1000
    for first in range(1, count + 1, 1024):
        connection.add_meters(first, min(1024, count + 1 - first))
        assert connection.errors() == [], f"an id of {count} has leaked: refused from {first} on"
    connection.add_meters(count + 1, 1)
    assert len(connection.errors()) == 1, "more meters than the switch says it can have"
    connection.send(METER_MOD, MeterMod(DELETE, 0, ALL, ()).encode())
    assert connection.errors() == [] and connection.meters() == {}
    connection.close()
