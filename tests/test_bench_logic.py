"""What the benchmarks compute from what they measure."""

from __future__ import annotations

import math
import random

import pytest
from benchmarks.frames import Mix, address, frames
from benchmarks.openflow import ADD, meter_mod
from benchmarks.search import highest
from benchmarks.stats import median_interval, quantile, spread
from benchmarks.summary import replace_sections


def search(truth: float, guess: float) -> tuple[float, list[float]]:
    """What is found where `truth` is the most that is ever achieved; and what was tried."""
    tried: list[float] = []

    def achieved(rate: float) -> float:
        tried.append(rate)
        return min(rate, truth)

    return highest(achieved, guess, tolerance=1e-9, precision=0.01, lowest=50e6,
                   ceiling=400e9), tried


@pytest.mark.parametrize("truth", [0.06e9, 1e9, 9.7e9, 88e9, 399e9])
@pytest.mark.parametrize("guess", [1e6, 9e9, 90e9, 1e12])
def test_search_finds_the_highest_rate_that_holds(truth: float, guess: float) -> None:
    found, tried = search(truth, guess)
    assert found <= truth <= found * 1.01
    assert found in tried
    assert len(set(tried)) == len(tried)


@pytest.mark.parametrize("guess", [95e9, 400e9])
def test_search_tries_little(guess: float) -> None:
    assert len(search(96e9, guess)[1]) <= 9


@pytest.mark.parametrize(("truth", "found"), [(1e6, 0.0), (1e15, 400e9)])
def test_search_ends_at_its_bounds(truth: float, found: float) -> None:
    assert search(truth, 10e9)[0] == found


def test_interval_of_the_median() -> None:
    # For n = 9 the second smallest and largest: 1 - 2 * (1 + 9) / 512.
    low, high, confidence = median_interval([5, 1, 2, 3, 4, 9, 8, 7, 6])
    assert (low, high) == (2, 8)
    assert confidence == pytest.approx(1 - 20 / 512)
    assert median_interval([3, 1, 2]) == (1, 3, 0.75)


def test_interval_of_the_median_covers_it() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(2000):
        low, high, _ = median_interval([rng.lognormvariate(0, 1) for _ in range(15)])
        hits += low <= 1 <= high
    assert hits / 2000 > 0.95


def test_quantile_and_spread() -> None:
    values = [10.0, 11.0, 12.0, 13.0, 14.0]
    assert quantile(values, 0.25) == 11 and quantile(values, 1) == 14
    assert spread(values) == pytest.approx(1 / 12)
    assert spread([7.0]) == 0
    assert not math.isnan(quantile([1.0], 0.5))


def test_meter_message() -> None:
    # OpenFlow 1.3: header, command, flags (kbps, burst, stats), meter; one drop band.
    assert meter_mod(ADD, 7, 100_000, 13).hex() == (
        "041d002000000000" "0000000d00000007" "00010010000186a00000000d00000000")


def test_summary_replaces_only_its_sections() -> None:
    page = ("by hand\n<!-- begin a -->\nold\n<!-- end a -->\nby hand, too\n"
            "<!-- begin b -->\n<!-- end b -->\n")
    new = replace_sections(page, {"a": "| 1 |\n", "c": "nowhere"})
    assert new == page.replace("old", "| 1 |")
    assert replace_sections(new, {"a": "| 1 |"}) == new
    assert replace_sections(page, {"b": r"\1 is no reference"}).endswith(
        "<!-- begin b -->\n\\1 is no reference\n<!-- end b -->\n")


@pytest.mark.parametrize("run", [1, 3])
def test_frames_go_to_each_destination_in_turn(run: int) -> None:
    mix = Mix("mix", (64, 570, 1514))
    sent = [(frame[33], len(frame)) for frame in frames(range(2, 6), mix, run)]
    assert [n for n, _ in sent[:8 * run]] == [n for n in (2, 3, 4, 5) * 2 for _ in range(run)]
    for n in range(2, 6):
        sizes = [size for to, size in sent if to == n]
        assert sorted(sizes) == sorted(mix.sizes * run)


def test_frames_have_right_checksums() -> None:
    for frame in frames(range(70000, 70003), Mix("mix", (64,))):
        words = sum(int.from_bytes(frame[at:at + 2], "big") for at in range(14, 34, 2))
        assert (words & 0xFFFF) + (words >> 16) == 0xFFFF
        assert frame[30:34] == bytes(map(int, address(int.from_bytes(
            frame[30:34], "big") - int.from_bytes(bytes([10, 73, 0, 0]), "big")).split(".")))
