"""Reading the probe's files, made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fbtest.probe import RingError, read_recording
from fbtest.probe.ring import CLOCK, packet_counter, ticks_to_ns

from probe_files import TSC_HZ, write_file


def packets(first: int, count: int, burst: int = 1) -> list[tuple[int, int, int, int, int]]:
    """Bursts of `burst` packets, 1000 ticks (500 ns) apart."""
    return [(n // burst * 1000, n, 100 + n, n % burst, n * 7) for n in range(first, first + count)]


def test_records_of_two_queues_are_in_the_order_of_time(tmp_path: Path) -> None:
    file = write_file(tmp_path / "f", [
        [(0, 1, 60, 0, 0), (4000, 1, 61, 0, 0), (4000, 2, 62, 1, 0)],
        [(2000, 3, 63, 0, 0), (6000, 3, 64, 0, 0)]], lost=9)
    recording = read_recording(file)
    r = recording.records
    assert r["time_ns"].tolist() == [1_000_000, 1_001_000, 1_002_000, 1_002_000, 1_003_000]
    assert r["flow"].tolist() == [1, 3, 1, 2, 3]
    assert r["bytes"].tolist() == [60, 63, 61, 62, 64]
    assert r["burst"].tolist() == [0, 1, 2, 2, 3]
    assert r["queue"].tolist() == [0, 1, 0, 0, 1]
    assert not r["edt_ns"].any()
    assert recording.device == "net_null0"
    counters = recording.counters
    assert (counters.packets, counters.bursts, counters.lost) == (5, 4, 9)
    assert counters.bytes == 310 and counters.overwritten == 0
    assert packet_counter(file)() == counters.packets


def test_edts(tmp_path: Path) -> None:
    r = read_recording(write_file(tmp_path / "f", [packets(0, 3)], edt=True)).records
    assert r["edt_ns"].tolist() == [0, 7, 14]


def test_a_ring_that_wrapped_begins_with_a_whole_burst(tmp_path: Path) -> None:
    # 11 packets in bursts of 3, the last one of 2; room for 8: packets 3 to 10 are
    # there, the first burst is gone.
    recording = read_recording(write_file(tmp_path / "f", [packets(0, 11, 3)], flags=1))
    assert recording.records["flow"].tolist() == list(range(3, 11))
    assert recording.counters.overwritten == 3
    # 10 packets: 2 to 9, of which 2 is the rest of a burst.
    recording = read_recording(write_file(tmp_path / "g", [packets(0, 10, 3)], flags=1))
    assert recording.records["flow"].tolist() == list(range(3, 10))
    assert recording.records["burst"].tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert recording.counters.overwritten == 3


def test_what_the_writer_has_begun_to_overwrite_is_left_out(tmp_path: Path) -> None:
    file = write_file(tmp_path / "f", [packets(0, 16, 2)], flags=1, claimed=19)
    assert read_recording(file).records["flow"].tolist() == [12, 13, 14, 15]


def test_nothing_recorded(tmp_path: Path) -> None:
    recording = read_recording(write_file(tmp_path / "f", [[], []]))
    assert len(recording.records) == 0
    assert read_recording(write_file(tmp_path / "g", [[]], room=0)).settings["records"] == 0


def test_the_last_pair_of_clocks_may_be_torn_while_recording(tmp_path: Path) -> None:
    clocks = [(n * 1000, n * 500, 20) for n in range(15)] + [(15000, 9_999_999, 20)]
    file = write_file(tmp_path / "f", [packets(0, 2)], clocks=clocks)
    assert read_recording(file).clock_error_ns == pytest.approx(10)
    # All are complete once it has stopped, and one of them is far off.
    file = write_file(tmp_path / "g", [packets(0, 2)], clocks=clocks, flags=4)
    assert read_recording(file).clock_error_ns > 1e6


@pytest.mark.parametrize(("header", "message"), [
    ({"magic": b"PCAP"}, "not a recording"), ({"version": 2}, "layout 2"),
    ({"record_size": 20}, "sizes"), ({"header_size": 8}, "sizes"), ({"flow": 9}, "sizes"),
    ({"n_records": 16}, "cut off"), ({"n_records": 7}, "cut off"),
    ({"n_clocks": 0}, "no pair of clocks"),
])
def test_what_is_not_a_recording_is_refused(tmp_path: Path, header: dict[str, object],
                                            message: str) -> None:
    file = write_file(tmp_path / "f", [packets(0, 2)], **header)
    with pytest.raises(RingError, match=message):
        read_recording(file)


def test_a_short_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"FBPROBE")
    with pytest.raises(RingError, match="7 bytes are no recording"):
        read_recording(tmp_path / "f")


def clocks(*pairs: tuple[int, int, int]) -> np.ndarray:
    return np.array(list(pairs), CLOCK)


def test_ticks_follow_the_pairs_and_go_on_beyond() -> None:
    # After weeks, at 2.45 GHz; then the clock is slewed by 100 ppm.
    tsc, mono = 10**16, 4 * 10**15
    pairs = clocks((tsc, mono, 30), (tsc + 245_000_000, mono + 100_000_000, 30),
                   (tsc + 490_000_000, mono + 200_010_000, 30))
    ticks = tsc + np.array([-245_000, 0, 122_500_000, 367_500_000, 490_000_000], np.int64)
    times, error = ticks_to_ns(ticks.astype(np.uint64), pairs, 0)
    assert (times[1:] - mono).tolist() == [0, 50_000_000, 150_005_000, 200_010_000]
    assert abs(times[0] - mono + 100_000) <= 10
    # The pair in the middle lies 5 us off the line between the others.
    assert error == pytest.approx(5000 + 30 / 2.45, rel=1e-3)


def test_a_pair_that_was_interrupted_does_not_count() -> None:
    pairs = clocks((0, 0, 20), (1_000_000, 777_777, 9000), (2_000_000, 1_000_000, 20))
    times, error = ticks_to_ns(np.array([1_000_000], np.uint64), pairs, 0)
    assert times.tolist() == [500_000] and error == pytest.approx(10)


def test_one_pair_uses_the_frequency_dpdk_believes() -> None:
    times, _ = ticks_to_ns(np.array([100, 2100], np.uint64), clocks((100, 5000, 20)), TSC_HZ)
    assert times.tolist() == [5000, 6000]
