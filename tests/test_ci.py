""".ci/run: what it runs, and how it counts, with a make that does nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "run"
GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "safe.directory=*")

#: What each part must print and how it ends, in lines "PART STATUS TEXT".
MAKE = """#!/bin/sh
echo "make $*"
while read -r part status text; do
    [ "$part" != "$1" ] || { echo "$text"; exit "$status"; }
done <"$(dirname "$0")/parts"
echo "== 5 passed in 0.1s =="
"""
ALWAYS = ["check", "check-upstream-changed", "check-asan-switch"]


class Ci:
    """A project of some commits that has nothing but .ci/run."""

    def __init__(self, directory: Path, commits: int):
        self.top, self.bin = directory / "project", directory / "bin"
        (self.top / ".ci").mkdir(parents=True)
        self.bin.mkdir()
        (self.top / ".ci" / "run").write_text(SCRIPT.read_text())
        (self.bin / "make").write_text(MAKE)
        (self.bin / "make").chmod(0o755)
        self.parts()
        self.git("init", "-q")
        for _ in range(commits):
            self.git("commit", "-q", "--allow-empty", "-m", "x")

    def git(self, *args: str) -> None:
        subprocess.run([*GIT, *args], cwd=self.top, check=True, timeout=60)

    def parts(self, *lines: str) -> None:
        (self.bin / "parts").write_text("".join(f"{line}\n" for line in lines))

    def run(self, *args: str, top: Path | None = None, **env: str) -> tuple[int, list[str]]:
        """Run it; returns its status and what it printed in the end."""
        done = subprocess.run(
            ["bash", str((top or self.top) / ".ci" / "run"), *args], text=True, timeout=60,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", **env})
        return done.returncode, f"\n{done.stdout}".rpartition("\n\n")[2].splitlines()


def ran(report: list[str]) -> list[str]:
    """The parts that were run, in order."""
    return [line.split()[1].rstrip(":") for line in report
            if line.startswith("make ") and "not " not in line]


@pytest.fixture
def ci(tmp_path: Path) -> Ci:
    return Ci(tmp_path, 6)


def test_some_always_and_two_others(ci: Ci) -> None:
    seen = []
    for _ in range(5):
        status, report = ci.run()
        assert status == 0
        assert ran(report)[:3] == ALWAYS and len(ran(report)) == 5
        not_chosen = {line.split(":")[0] for line in report if "not chosen" in line}
        assert len(not_chosen) == 3
        assert report[-1] == "25 passed, 0 failed"
        seen += ran(report)[3:]
        ci.git("commit", "-q", "--allow-empty", "-m", "x")
    assert sorted(seen) == sorted(2 * ["debian13", "check-tsan", "check-asan", "check-clang",
                                       "check-nodpdk"])


def test_shallow_clone(ci: Ci, tmp_path: Path) -> None:
    ci.git("add", ".ci")
    ci.git("commit", "-q", "-m", "run")
    shallow = tmp_path / "shallow"
    subprocess.run([*GIT, "clone", "-q", "--depth=1", f"file://{ci.top}", str(shallow)],
                   check=True, timeout=60)
    status, report = ci.run(top=shallow)
    assert status == 0 and len(ran(report)) == 5
    assert "after 1 commits" in report[0]


def test_only_what_is_named(ci: Ci) -> None:
    status, report = ci.run("check-clang")
    assert (status, report) == (0, ["make check-clang: passed, 5 passed, 0 failed, 0 s",
                                    "5 passed, 0 failed"])


@pytest.mark.parametrize("line, says", [
    ("check 1 == 2 failed, 9 passed in 3s ==", "make check: FAILED, 9 passed, 2 failed"),
    ("check 1 == 9 passed, 3 errors in 3s ==", "make check: FAILED, 9 passed, 3 failed"),
    ("check 2 no rule", "make check: FAILED, 0 passed, 1 failed"),
    ("check 124 == 9 passed in 3s ==", "make check: FAILED, not ended, 9 passed, 1 failed")])
def test_what_fails(ci: Ci, line: str, says: str) -> None:
    ci.parts(line)
    status, report = ci.run("check", "check-clang")
    assert status == 1
    assert report[0].startswith(says)
    assert report[-1].split(", ")[1] == f"{says.split()[-2]} failed"


def test_what_passed_only_when_run_again(ci: Ci) -> None:
    ci.parts("check-upstream-changed 0 FAILED AT FIRST, passed when it was run again, alone: a")
    _, report = ci.run("check-upstream-changed")
    assert report[0].endswith(", 1 PASSED ONLY WHEN RUN AGAIN")


def test_what_begins_too_late_fails(ci: Ci) -> None:
    status, report = ci.run("check", "check-clang", CI_SECONDS=str(70 * 60))
    assert status == 1
    assert report == [f"make {part}: FAILED, not begun: 4200 s have passed"
                      for part in ("check", "check-clang")] + ["0 passed, 2 failed"]


def test_what_does_not_end_fails(ci: Ci) -> None:
    (ci.bin / "make").write_text("#!/bin/sh\nexec sleep 100\n")
    # (Minute 87 is past already.)
    script = ci.top / ".ci" / "run"
    script.write_text(script.read_text().replace("last_end_s=$((87 * 60))", "last_end_s=1"))
    status, report = ci.run("check")
    assert status == 1
    assert report[0].startswith("make check: FAILED, not ended, 0 passed, 1 failed")
