"""Capture files: what is written is what is read, whatever the form."""

import socket
import struct

import numpy as np
import pytest
from fbtest import pcap


def record(order, sec, frac, data, length=None):
    size = len(data) if length is None else length
    return struct.pack(f"{order}IIII", sec, frac, len(data), size) + data


def header(order, magic, linktype=1):
    return struct.pack(f"{order}IHHiIII", magic, 2, 4, 0, 0, 65535, linktype)


def test_flows_round_trip(tmp_path):
    path = tmp_path / "a.pcap"
    flows = [pcap.FlowSpec(5, frame_size=60),
             pcap.FlowSpec(6, dst_ip="10.73.0.2", dport=77, frame_size=1514)]
    assert pcap.write_flows(path, flows, 100) == 200
    packets = pcap.read_pcap(path)
    assert len(packets) == 200
    assert packets.length.tolist() == [60, 1514] * 100
    assert packets.flow.tolist() == [5, 6] * 100
    assert packets.seq.tolist() == [n // 2 for n in range(200)]
    assert set(packets.proto) == {17}
    second = packets.of_flow(6)
    assert len(second) == 100 and set(second.dport) == {77}
    assert socket.inet_ntoa(struct.pack("!I", second.dst[0])) == "10.73.0.2"


def test_smallest_frame_is_enforced():
    with pytest.raises(ValueError, match="at least 60"):
        pcap.tagged_frame(pcap.FlowSpec(1, frame_size=59))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("magic, unit", [(0xA1B2C3D4, 1000), (0xA1B23C4D, 1)])
def test_byte_order_and_precision(tmp_path, order, magic, unit):
    frame = bytes(pcap.tagged_frame(pcap.FlowSpec(9)))
    path = tmp_path / "a.pcap"
    path.write_bytes(header(order, magic) + record(order, 1_700_000_000, 7, frame)
                     + record(order, 1_700_000_001, 999, frame[:60], len(frame)))
    packets = pcap.read_pcap(path)
    assert packets.time_ns.tolist() == [
        1_700_000_000 * 10**9 + 7 * unit, 1_700_000_001 * 10**9 + 999 * unit]
    assert packets.length.tolist() == [1514, 1514]
    assert packets.flow.tolist() == [9, 9]


def test_lengths_that_change_all_the_time(tmp_path):
    rng = np.random.default_rng(1)
    sizes = rng.integers(60, 1514, 3000)
    sizes[1000:2500] = 1514
    frames = []
    for seq, size in enumerate(sizes):
        frame = pcap.tagged_frame(pcap.FlowSpec(1)) if seq == 0 else bytearray(frames[0])
        pcap.TAG.pack_into(frame, 42, pcap.TAG_MARK, 1, seq)
        frames.append(bytes(frame) if seq == 0 else bytes(frame[:size]))
    path = tmp_path / "a.pcap"
    pcap.write_frames(path, frames)
    packets = pcap.read_pcap(path)
    assert packets.length.tolist() == [len(frame) for frame in frames]
    assert packets.seq.tolist() == list(range(3000))


def test_growing_file(tmp_path):
    path = tmp_path / "a.pcap"
    pcap.write_flows(path, [pcap.FlowSpec(1, frame_size=100)], 10)
    whole = path.read_bytes()
    for cut in (1, 50, 100, 115):
        path.write_bytes(whole[:-cut])
        assert len(pcap.read_pcap(path)) == 9
    path.write_bytes(whole[:24])
    assert len(pcap.read_pcap(path)) == 0


def test_other_frames(tmp_path):
    arp = bytes(12) + b"\x08\x06" + bytes(46)
    plain = bytearray(pcap.tagged_frame(pcap.FlowSpec(1)))
    plain[42:46] = b"none"
    path = tmp_path / "a.pcap"
    pcap.write_frames(path, [arp, bytes(plain), bytes(20)])
    packets = pcap.read_pcap(path)
    assert packets.flow.tolist() == [-1, -1, -1]
    assert packets.proto.tolist() == [0, 17, 0]


def test_refuses_other_files(tmp_path):
    path = tmp_path / "a.pcap"
    path.write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="magic"):
        pcap.read_pcap(path)
    path.write_bytes(b"x")
    with pytest.raises(ValueError, match="1 bytes"):
        pcap.read_pcap(path)
    path.write_bytes(header("<", 0xA1B2C3D4, linktype=113))
    with pytest.raises(ValueError, match="link type 113"):
        pcap.read_pcap(path)


def test_empty(tmp_path):
    assert len(pcap.read_pcap(pcap.empty_pcap(tmp_path / "a.pcap"))) == 0
