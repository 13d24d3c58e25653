"""The C tests: our programs, and OVS autotests of the shaper.

``make`` builds the programs; each prints what is wrong and how to get at it
again (``build/ovs/tests/test-mltw --seed=N TEST``).
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
OVS = Path(os.environ.get("FB_BUILD") or REPO / "build") / "ovs"
PROGRAMS = sorted(path.stem for path in (REPO / "tests").glob("test-*.c"))


def unit_tests() -> list[tuple[str, str]]:
    """Returns (program, test) for what the programs say they can do."""
    tests = []
    for program in PROGRAMS:
        path = OVS / "tests" / program
        if not path.exists():
            # Not skipped: a test that was not built is not a test passed.
            tests.append((program, "not built"))
            continue
        listing = subprocess.run([path, "--help"], capture_output=True, text=True, check=True)
        default = listing.stdout.partition("Not run by default")[0]
        tests += [(program, name) for name in re.findall(r"^    (\S+)$", default, re.M)]
    return tests


@pytest.mark.parametrize(("program", "name"), unit_tests())
def test_unit(program: str, name: str) -> None:
    assert name != "not built", f"{program} is not built: run 'make'"
    result = subprocess.run([OVS / "tests" / program, name], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert result.returncode == 0, result.stdout[-4000:]


def autotests(*keywords: str, jobs: int) -> None:
    """Runs the autotests of OVS with one of `keywords`; all must pass."""
    # Autotest finds its own way; the variables of "make check" would mislead
    # OVS's make.
    environ = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    flags = " ".join([f"-j{jobs}", *(f"-k {keyword}" for keyword in keywords)])
    # RECHECK: as OVS's own CI, for tests that wait for a busy machine.
    result = subprocess.run(
        ["make", "-C", OVS, "check", f"TESTSUITEFLAGS={flags}", "RECHECK=yes"], env=environ,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = result.stdout.splitlines()
    failed = [line for line in lines if re.match(r"\s*\d+: .*FAILED", line)]
    assert result.returncode == 0, "\n".join(failed or lines[-30:])
    passed = [line for line in lines if re.match(r"\s*\d+: .* ok$", line)]
    assert passed, f"no autotest with {' or '.join(keywords)} ran"


@pytest.mark.timeout(900)
def test_autotests() -> None:
    """Those of ours: dummy ports, virtual time."""
    autotests("flowbundler", jobs=2)


@pytest.mark.timeout(2400)
def test_upstream_autotests() -> None:
    """OVS's own for what the series changes: with the feature off, all is as before."""
    # They sleep for most of their time, hence more jobs than processors.
    autotests("dpif-netdev", "pmd", "ofproto-dpif", "ofp-print", "ovs-ofctl", "meter", "meters",
              "qos", "queue", jobs=4)
