"""The record of long proofs that are run in parts: docs/results/runs.csv, a line a run.

Columns: date (UTC), proof, commit, processor, load, result ("passed" or "failed"), and
detail, which is "name=number" pairs, separated by spaces.

    tests/runs.py rounds rounds     prints the sum of "rounds" over the runs of that proof
                                    that passed, and how many failed
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
RECORD = REPO / "docs" / "results" / "runs.csv"
PASSED, FAILED = "passed", "failed"


@dataclass(frozen=True)
class Run:
    """A line of the record."""

    date: str
    proof: str
    commit: str
    processor: str
    load: str
    result: str
    detail: str

    def number(self, name: str) -> int:
        """What `detail` says of `name`, 0 if nothing."""
        return int(dict(pair.split("=") for pair in self.detail.split()).get(name, 0))


COLUMNS = [field.name for field in fields(Run)]


def processor() -> str:
    """What runs this, and how many of it."""
    names = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return f"{len(names)} x {names[0] if names else 'unknown'}"


def commit() -> str:
    """The commit that is checked out, with a "+" if files have been changed since."""
    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", str(REPO), *args], check=True, text=True,
                              capture_output=True).stdout.strip()

    changed = git("status", "--porcelain", "-uno", "--", ".", f":!{RECORD.relative_to(REPO)}")
    return git("rev-parse", "--short=10", "HEAD") + "+" * bool(changed)


def append(proof: str, load: str, passed: bool, detail: Mapping[str, int | str],
           path: Path = RECORD) -> Run:
    """Add a run that has just ended."""
    run = Run(datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"), proof, commit(), processor(), load,
              PASSED if passed else FAILED, " ".join(f"{k}={v}" for k, v in detail.items()))
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        writer.writerow(astuple(run))
    return run


def read(path: Path = RECORD) -> list[Run]:
    """All runs."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file, strict=True)
        if reader.fieldnames != COLUMNS:
            raise ValueError(f"{path}: the columns are {reader.fieldnames}, not {COLUMNS}")
        return [Run(**row) for row in reader]


def total(runs: list[Run], proof: str, name: str) -> tuple[int, int]:
    """The sum of `name` over the runs of `proof` that passed, and how many have failed."""
    those = [run for run in runs if run.proof == proof]
    return (sum(run.number(name) for run in those if run.result == PASSED),
            sum(run.result != PASSED for run in those))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print("{} passed in all; {} runs failed".format(*total(read(), *sys.argv[1:])))
