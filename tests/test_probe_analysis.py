"""What is said of departures, made by hand so that the answers are known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fbtest.probe import (
    Counters,
    Recording,
    batches,
    between,
    by_flow,
    cli,
    flow_rates,
    gap_quantiles,
    ideal_gaps,
    intra_flow_bursts,
    lateness,
    report,
    window_rates,
)

from probe_files import departures, write_file

EMPTY = departures((0, 0, 0, 0))[:0]


def two_flows() -> np.ndarray:
    """Flow 1: 1000 bytes each 100 us (80 Mbit/s); flow 2: 500 bytes each 200 us (20)."""
    rows = []
    for n in range(101):
        rows.append((n * 100_000, 1, 1000, 0))
        if n % 2 == 0:
            rows.append((n * 100_000, 2, 500, 1))
    return departures(*rows)


def test_between_takes_the_first_and_not_the_last() -> None:
    assert between(two_flows(), 100_000, 200_000)["time_ns"].tolist() == [100_000]


def test_by_flow_keeps_the_order_of_time() -> None:
    parts = by_flow(two_flows())
    assert list(parts) == [1, 2]
    assert parts[2]["time_ns"].tolist() == [n * 200_000 for n in range(51)]


def test_rates_are_exact() -> None:
    rates = flow_rates(two_flows())
    assert (rates[1].packets, rates[1].bytes, rates[1].rate) == (101, 101_000, 80e6)
    assert (rates[2].packets, rates[2].bytes, rates[2].rate) == (51, 25_500, 20e6)


def test_a_flow_of_one_burst_has_no_rate() -> None:
    assert flow_rates(departures((5, 1, 100, 0), (5, 1, 100, 1)))[1].rate == 0


def test_window_rates() -> None:
    middles, flows, rates = window_rates(two_flows(), 0.001)
    assert middles == pytest.approx(np.arange(10) * 0.001 + 0.0005)
    assert flows.tolist() == [1, 2]
    assert rates[0] == pytest.approx(80e6) and rates[1] == pytest.approx(20e6)
    with pytest.raises(ValueError, match="window_s: 0"):
        window_rates(two_flows(), 0)


def test_lateness() -> None:
    records = departures(*((1000 * n, 1, 100, 0) for n in range(1, 102)), (10**6, 2, 100, 0),
                         edt=[1000 * n - n for n in range(1, 102)] + [0])
    late = lateness(records)
    assert (late.packets, late.early, late.earliest, late.latest) == (101, 0, 1, 101)
    assert late.mean == 51 and late.percentiles[50.0] == 51 and late.percentiles[90.0] == 91


def test_early_beyond_the_tolerance() -> None:
    records = departures((100, 1, 60, 0), (200, 1, 60, 0), (300, 1, 60, 0), edt=[110, 231, 300])
    assert [lateness(records, t).early for t in (0, 10, 30.9, 31)] == [2, 1, 1, 0]
    assert lateness(records).earliest == -31


def test_what_is_no_edt_is_noticed() -> None:
    with pytest.raises(ValueError, match="edt_offset"):
        lateness(departures((100, 1, 60, 0), edt=[2**40]))


def test_gaps_against_the_ideal() -> None:
    part = departures((0, 1, 100, 0), (30, 1, 100, 0), (40, 1, 200, 0))
    # 10 bytes a ns.
    assert ideal_gaps(part, 80e9).tolist() == [10, 20]
    # At its own rate: 300 bytes in 40 ns.
    assert ideal_gaps(part) == pytest.approx([40 / 3, 80 / 3])
    part["edt_ns"] = [5, 25, 20]
    assert ideal_gaps(part).tolist() == [20, 0]
    assert gap_quantiles(np.array([10, 20, 30]), 5).tolist() == [10, 15, 20, 25, 30]
    assert gap_quantiles(np.array([]), 3).tolist() == [0, 0, 0]


def test_bursts_within_a_flow() -> None:
    # 8 Gbit/s is a byte a ns.  Flow 1: 3 packets at once, a run of 2 and one behind
    # flow 2; then one on time.
    records = departures((0, 1, 100, 0), (0, 1, 100, 1), (0, 2, 60, 2), (0, 1, 100, 3),
                         (300, 1, 100, 0), (300, 1, 100, 0), (1000, 2, 60, 0))
    bursts = intra_flow_bursts(records, {1: 8e9, 2: 8e9})
    assert bursts[1].excess_bytes == pytest.approx(300) and bursts[1].window_s == 0
    # In one transmission: the two at 300 ns were two.
    assert (bursts[1].run_packets, bursts[1].run_bytes) == (2, 200)
    assert bursts[2].excess_bytes == pytest.approx(60) and bursts[2].run_packets == 1
    # Without a rate, that which it had: 60 bytes in 1000 ns.
    assert intra_flow_bursts(records)[2].rate == pytest.approx(60 * 8 / 1e-6)


def test_a_burst_over_a_longer_window() -> None:
    # Twice the rate for ten packets, then none for a while.
    times = [n * 50 for n in range(10)] + [5000]
    records = departures(*((t, 1, 100, 0) for t in times))
    worst = intra_flow_bursts(records, {1: 8e9})[1]
    assert worst.excess_bytes == pytest.approx(550) and worst.window_s == pytest.approx(450e-9)


def test_batches() -> None:
    records = departures((0, 1, 60, 0), (0, 1, 60, 1), (0, 2, 60, 2),
                         (9, 7, 60, 0), (9, 8, 60, 1), (20, 7, 60, 0))
    found = batches(records)
    assert (found.count, found.mean, found.mean_flows) == (3, 2.0, pytest.approx(5 / 3))
    assert found.sizes == {1: 1, 2: 1, 3: 1} and found.flows == {1: 1, 2: 2}
    # A part of a recording does not begin with burst 0.
    assert batches(records[3:]).sizes == {1: 1, 2: 1}


def test_nothing_recorded_says_nothing() -> None:
    assert by_flow(EMPTY) == flow_rates(EMPTY) == intra_flow_bursts(EMPTY) == {}
    assert window_rates(EMPTY, 1)[2].size == 0
    assert lateness(EMPTY).packets == 0 and batches(EMPTY).count == 0
    recording = Recording("d", EMPTY, Counters(0, 0, 0, 0, 0), 1.0, {"flow": "dst"})
    assert report.summarize(recording)["flows"] == {}


def test_ten_million_take_seconds() -> None:
    """Not measured here but by the time limit: a loop over packets would take minutes."""
    count = 10_000_000
    records = np.zeros(count, EMPTY.dtype)
    n = np.arange(count)
    records["time_ns"], records["position"], records["burst"] = n // 32 * 1000, n % 32, n // 32
    records["flow"], records["bytes"], records["edt_ns"] = n % 256, 1514, 1
    assert flow_rates(records)[0].packets == -(-count // 256)
    assert batches(records).mean == pytest.approx(32) and lateness(records).packets == count
    assert intra_flow_bursts(records)[255].run_packets == 1


def test_report_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # 2 GHz: 200 ticks are 100 ns; 125 bytes in 100 ns are 10 Gbit/s.
    rows = [(200 * n, 0x0A000001, 125, 0, 1_000_000 + 100 * n - 5) for n in range(64)]
    file = write_file(tmp_path / "f", [rows], room=64, edt=True)
    json_file, png = tmp_path / "r.json", tmp_path / "r.png"
    assert cli.main(["report", str(file), "--rate", "10.0.0.1=10e9", "--window", "1e-6",
                     "--json", str(json_file), "--png", str(png)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "10.0.0.1" in said and "100.00 %" in said and "0 of 64 packets early" in said
    numbers = json.loads(json_file.read_text())
    assert numbers["flows"]["10.0.0.1"]["rate"] == pytest.approx(10e9)
    assert numbers["lateness_ns"]["percentiles"]["50.0"] == 5
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("arguments", "message"), [
    (["report", "f", "--rate", "10.0.0.300=1"], "FLOW=RATE"),
    (["report", "f", "--rate", "1=0"], "above 0"),
    (["report", "f", "--window", "0"], "a number above 0"),
    (["record", "p", "-1", "--out", "d"], "a number above 0"),
])
def test_bad_arguments(arguments: list[str], message: str,
                       capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "/nowhere/f"]) == 1
    assert "fb-probe: " in capsys.readouterr().err
