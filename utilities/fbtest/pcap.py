"""Test packets: making capture files, and reading large ones fast.

A test packet carries, behind its UDP header, a tag of 16 bytes: a mark, a
flow number and a sequence number (big endian).  That fits the smallest frame
(60 bytes without FCS), and lets a reader tell loss and disorder per flow.
UDP checksums are zero, "not computed", so that a tag can be changed in place.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TAG = struct.Struct("!4sIQ")
TAG_MARK = b"FBT1"
_HEADERS = 14 + 20 + 8
MIN_FRAME = _HEADERS + TAG.size + 2  # 60: Ethernet pads to it
_LINKTYPE_ETHERNET = 1
_GLOBAL_HEADER = 24
_RECORD_HEADER = 16
_RUN = 65536


@dataclass(frozen=True)
class FlowSpec:
    """A UDP flow of test packets, all of one frame size (without FCS)."""

    flow: int
    src_mac: str = "02:fb:00:01:00:01"
    dst_mac: str = "02:fb:00:02:00:01"
    src_ip: str = "10.72.0.1"
    dst_ip: str = "10.73.0.1"
    sport: int = 10000
    dport: int = 9
    frame_size: int = 1514


def tagged_frame(spec: FlowSpec) -> bytearray:
    """The flow's frame, with sequence number 0."""
    from scapy.layers.inet import IP, UDP
    from scapy.layers.l2 import Ether
    from scapy.packet import Raw

    if spec.frame_size < MIN_FRAME:
        raise ValueError(f"frame_size {spec.frame_size}: at least {MIN_FRAME}")
    payload = TAG.pack(TAG_MARK, spec.flow, 0)
    payload += bytes(spec.frame_size - _HEADERS - len(payload))
    packet = (
        Ether(src=spec.src_mac, dst=spec.dst_mac)
        / IP(src=spec.src_ip, dst=spec.dst_ip)
        / UDP(sport=spec.sport, dport=spec.dport, chksum=0)
        / Raw(payload)
    )
    return bytearray(bytes(packet))


def write_frames(path: str | os.PathLike, frames: Iterable[bytes]) -> int:
    """Write `frames` to a capture file; returns how many there were."""
    from scapy.utils import RawPcapWriter

    count = 0
    with RawPcapWriter(os.fspath(path), linktype=_LINKTYPE_ETHERNET,
                       nano=True) as writer:
        writer.write_header(None)
        for frame in frames:
            writer.write_packet(frame, sec=0, usec=0)
            count += 1
    return count


def write_flows(path: str | os.PathLike, flows: Sequence[FlowSpec],
                packets_per_flow: int) -> int:
    """Write `packets_per_flow` test packets of each flow, interleaved.

    Sequence numbers run from 0; a source that repeats the file repeats them,
    so `packets_per_flow` is the modulus for an order check.
    """
    frames = [(spec.flow, tagged_frame(spec)) for spec in flows]

    def interleaved() -> Iterable[bytes]:
        for seq in range(packets_per_flow):
            for flow, frame in frames:
                TAG.pack_into(frame, _HEADERS, TAG_MARK, flow, seq)
                yield bytes(frame)

    return write_frames(path, interleaved())


@dataclass
class Packets:
    """A capture as arrays, one element per packet, in the file's order.

    `time_ns` is the stamp; `length` the frame's bytes without FCS; `flow` and
    `seq` the tag's numbers, -1 without one; `src`, `dst` the IPv4 addresses
    as numbers, `sport`, `dport` the ports, `proto` the protocol (0 where the
    packet is not IPv4).
    """

    time_ns: NDArray[np.int64]
    length: NDArray[np.int64]
    flow: NDArray[np.int64]
    seq: NDArray[np.int64]
    src: NDArray[np.uint32]
    dst: NDArray[np.uint32]
    sport: NDArray[np.uint16]
    dport: NDArray[np.uint16]
    proto: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.time_ns)

    def select(self, which) -> Packets:
        """The packets that a mask, slice or index array picks."""
        return Packets(**{f.name: getattr(self, f.name)[which]
                          for f in fields(self)})

    def of_flow(self, flow: int) -> Packets:
        """The packets tagged with `flow`."""
        return self.select(self.flow == flow)

    def between(self, start_ns: int, end_ns: int) -> Packets:
        """The packets stamped in [start_ns, end_ns)."""
        return self.select((self.time_ns >= start_ns)
                           & (self.time_ns < end_ns))


def _record_offsets(data: NDArray[np.uint8], order: str) -> NDArray[np.int64]:
    """Where each record starts.

    Records of one length in a row are found by one vector comparison.  A
    record cut off at the end (a file being written) is left out.
    """
    size = len(data)
    view = data.data
    at = _GLOBAL_HEADER
    pieces: list[NDArray[np.int64]] = []
    unpack = struct.Struct(f"{order}I").unpack_from
    guess = _RUN
    while at + _RECORD_HEADER <= size:
        (caplen,) = unpack(view, at + 8)
        step = _RECORD_HEADER + caplen
        count = min((size - at) // step, guess)
        if count == 0:
            break
        if count > 1:
            words = np.ndarray((count,), dtype=f"{order}u4", buffer=data.data,
                               offset=at + 8, strides=(step,))
            other = words != caplen
            found = int(other.argmax())
            if other[found]:
                count = found
        pieces.append(at + step * np.arange(count, dtype=np.int64))
        at += step * count
        # Look as far ahead as lengths have lately stayed the same.
        guess = min(_RUN, max(4 * count, 2))
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


_MAGIC = {0xA1B2C3D4: 1000, 0xA1B23C4D: 1}


def no_packets() -> Packets:
    """What a capture has before there is any packet."""
    def empty(dtype) -> NDArray:
        return np.empty(0, dtype)

    return Packets(
        empty(np.int64), empty(np.int64), empty(np.int64),
        empty(np.int64), empty(np.uint32), empty(np.uint32),
        empty(np.uint16), empty(np.uint16), empty(np.uint8))


def read_pcap(path: str | os.PathLike) -> Packets:
    """Read a capture of Ethernet frames, in either byte order and precision.

    The file may still be growing; a record cut off at its end is left out.
    """
    data = np.fromfile(path, dtype=np.uint8)
    if len(data) < _GLOBAL_HEADER:
        raise ValueError(f"{path}: not a capture file: {len(data)} bytes")
    for order in "<>":
        (magic,) = struct.unpack_from(f"{order}I", data.data)
        if magic in _MAGIC:
            break
    else:
        raise ValueError(f"{path}: not a capture file: magic {magic:#x}")
    (linktype,) = struct.unpack_from(f"{order}I", data.data, 20)
    if linktype & 0xFFFF != _LINKTYPE_ETHERNET:
        raise ValueError(f"{path}: link type {linktype} is not Ethernet")

    at = _record_offsets(data, order)
    n = len(at)

    def gather(offset: int, width: int, dtype: str) -> NDArray:
        index = at[:, None] + np.arange(offset, offset + width)
        # Short frames: what lies beyond the file reads as its last byte.
        return data[np.minimum(index, len(data) - 1)].view(dtype)[:, 0]

    if n == 0:
        return no_packets()

    seconds = gather(0, 4, f"{order}u4").astype(np.int64)
    fraction = gather(4, 4, f"{order}u4").astype(np.int64)
    caplen = gather(8, 4, f"{order}u4").astype(np.int64)
    length = gather(12, 4, f"{order}u4").astype(np.int64)
    frame = _RECORD_HEADER
    ipv4 = (caplen >= 34) & (gather(frame + 12, 2, ">u2") == 0x0800) & (
        gather(frame + 14, 1, "u1") == 0x45)
    ports = ipv4 & (caplen >= _HEADERS)
    udp = ports & (gather(frame + 23, 1, "u1") == 17)
    tagged = udp & (caplen >= _HEADERS + TAG.size) & (
        gather(frame + _HEADERS, 4, ">u4")
        == int.from_bytes(TAG_MARK, "big"))

    def where(mask, offset, width, dtype, out, missing=0) -> NDArray:
        return np.where(mask, gather(frame + offset, width, dtype).astype(out),
                        out(missing))

    return Packets(
        time_ns=seconds * 1_000_000_000 + fraction * _MAGIC[magic],
        length=length,
        flow=where(tagged, _HEADERS + 4, 4, ">u4", np.int64, -1),
        seq=where(tagged, _HEADERS + 8, 8, ">i8", np.int64, -1),
        src=where(ipv4, 26, 4, ">u4", np.uint32),
        dst=where(ipv4, 30, 4, ">u4", np.uint32),
        sport=where(ports, 34, 2, ">u2", np.uint16),
        dport=where(ports, 36, 2, ">u2", np.uint16),
        proto=where(ipv4, 23, 1, "u1", np.uint8),
    )


def empty_pcap(path: str | os.PathLike) -> Path:
    """Write a capture file without packets; returns its path."""
    write_frames(path, [])
    return Path(path)
