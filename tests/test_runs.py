"""The record of long proofs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import runs


def test_runs_add_up(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    for passed, detail in ((True, {"rounds": 50, "seed": 3}), (False, {"rounds": 7}),
                           (True, {"seed": 4, "rounds": 25}), (True, {"seed": 1})):
        runs.append("rounds", "busy, very", passed, detail, path)
    last = runs.append("other", "", True, {"rounds": 100}, path)
    read = runs.read(path)
    assert read[-1] == last and len(read) == 5
    assert read[0].load == "busy, very" and read[0].detail == "rounds=50 seed=3"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\dZ", last.date)
    assert re.fullmatch(r"[0-9a-f]{10}\+?", last.commit)
    assert runs.total(read, "rounds", "rounds") == (75, 1)
    assert runs.total(read, "none", "rounds") == (0, 0)


def test_other_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("date,proof\n2026-01-01,rounds\n")
    with pytest.raises(ValueError, match="the columns are"):
        runs.read(path)


def test_what_is_recorded_can_be_read() -> None:
    for run in runs.read():
        assert run.result in (runs.PASSED, runs.FAILED), run
        assert all(pair.count("=") == 1 for pair in run.detail.split()), run
