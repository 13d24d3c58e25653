"""What the benchmarks compute from what they measure."""

from __future__ import annotations

import math
import random

import pytest
from benchmarks.openflow import ADD, meter_mod
from benchmarks.search import highest
from benchmarks.stats import median_interval, quantile, spread
from benchmarks.summary import replace_sections


@pytest.mark.parametrize("truth", [0.06e9, 1e9, 9.7e9, 88e9, 399e9])
@pytest.mark.parametrize("guess", [1e6, 9e9, 90e9, 1e12])
def test_search_finds_the_highest_rate_that_holds(truth: float, guess: float) -> None:
    tried: list[float] = []

    def holds(rate: float) -> bool:
        tried.append(rate)
        return rate <= truth

    found = highest(holds, guess, lowest=50e6, ceiling=400e9)
    assert found <= truth < found * 1.0101
    assert found in tried
    assert len(set(tried)) == len(tried)


def test_search_with_a_good_guess_tries_little() -> None:
    tried: list[float] = []
    highest(lambda rate: tried.append(rate) or rate <= 96e9, 95e9, lowest=1e6, ceiling=1e12)
    assert len(tried) <= 8


@pytest.mark.parametrize(("truth", "found"), [(1e6, 0.0), (1e15, 400e9)])
def test_search_ends_at_its_bounds(truth: float, found: float) -> None:
    assert highest(lambda rate: rate <= truth, 10e9, lowest=50e6, ceiling=400e9) == found


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
