"""The C tests: our programs, and OVS autotests of the shaper.

``make`` builds the programs; each prints what is wrong and how to get at it
again (``build/ovs/tests/test-mltw --seed=N TEST``).
"""

from __future__ import annotations

import os
import re
import subprocess
import warnings
from pathlib import Path

import pytest
from fbtest import autotest

REPO = Path(__file__).resolve().parent.parent
OVS = Path(os.environ.get("FB_BUILD") or REPO / "build") / "ovs"
BUILD = OVS.parent
#: Where each program is: those of the tree, and that of what the wheel is compared with.
PROGRAMS = {path.stem: OVS / "tests" / path.stem
            for path in sorted((REPO / "tests").glob("test-*.c"))}
PROGRAMS |= {path.stem: BUILD / "bench" / path.stem
             for path in sorted((REPO / "benchmarks/sched").glob("test-*.c"))}


def unit_tests() -> list[tuple[str, str]]:
    """Returns (program, test) for what the programs say they can do."""
    tests = []
    for program, path in PROGRAMS.items():
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
    assert name != "not built", f"{program} is not built: run 'make peers'"
    result = subprocess.run([PROGRAMS[program], name], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert result.returncode == 0, result.stdout[-4000:]


@pytest.mark.timeout(1500)
def test_autotests() -> None:
    """OVS autotests of ours: dummy ports, virtual time.

    Without those that run the programs, which `test_unit` does.  One that fails, and
    then passes alone, is in the warnings that pytest ends with.
    """
    # They sleep for most of their time, hence more jobs than processors.
    results = autotest.run(OVS, keywords=["flowbundler,!unit"], jobs=4,
                           recheck=True)
    for title, _ in sorted(results.unstable):
        warnings.warn(f"{autotest.AT_FIRST}: {title}", stacklevel=1)
    assert results.passed
    assert not results.failed
    assert not results.skipped
