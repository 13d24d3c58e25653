"""``make quick``: what it chooses for a change, how long it takes, what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from scripts import load

REPO = Path(__file__).resolve().parent.parent
OVS = Path(os.environ.get("FB_BUILD") or REPO / "build") / "ovs"


@pytest.fixture(scope="module")
def quick() -> ModuleType:
    return load("quick")


def chosen(quick: ModuleType, *files: str) -> dict[str, str]:
    return {step.name: " ".join(step.command) for step in quick.steps_for(list(files))}


def test_a_file_of_the_shaper(quick: ModuleType) -> None:
    steps = chosen(quick, "lib/shaper-ecn.c")
    assert list(steps) == ["build", "style", "C programs", "autotests"]
    assert "lib/shaper-ecn.c" in steps["style"]
    assert "-k test-shaper-ecn" in steps["C programs"] and "test-mltw" not in steps["C programs"]
    assert "flowbundler,ecn" in steps["autotests"]


def test_what_all_use_has_all(quick: ModuleType) -> None:
    steps = chosen(quick, "lib/mltw.h", "lib/shaper-ecn.c")
    assert {"test-mltw", "test-flow-shaper"} <= set(steps["C programs"].split())
    assert "flowbundler,ecn" not in steps["autotests"]


def test_python(quick: ModuleType) -> None:
    steps = chosen(quick, "controller/ryu_rates.py", "docs/design.md")
    assert list(steps) == ["style", "Python"]
    assert "tests/test_controller_plan.py" in steps["Python"] and "not switch" in steps["Python"]


def test_words_of_autotests_are_those_of_tests(quick: ModuleType) -> None:
    for word in set(quick.AUTOTESTS.values()):
        listed = subprocess.run(["sh", "testsuite", "-C", ".", "--list", "-k",
                                 f"flowbundler,{word}"], cwd=OVS / "tests", text=True, check=True,
                                stdout=subprocess.PIPE).stdout
        assert 0 < len(re.findall(r"^ *\d+: ", listed, re.M)) < 60, (word, listed)
    for stem in quick.AUTOTESTS:
        assert (REPO / "lib" / f"{stem}.c").exists(), stem


def test_what_fails_and_what_was_not_run_is_said(quick: ModuleType) -> None:
    def step(name: str, code: str) -> object:
        return quick.Step(name, [sys.executable, "-c", code])

    steps = [step("good", ""), step("bad", "raise SystemExit(1)"),
             step("slow", "import time; time.sleep(60)"), step("late", "")]
    assert quick.run(steps, 2) == (["bad"], ["slow (not to the end)", "late"])


def test_a_file_that_is_not_there_is_refused() -> None:
    done = subprocess.run([sys.executable, REPO / "utilities" / "quick", "lib/mltw2.c"],
                          text=True, capture_output=True)
    assert done.returncode == 2 and "lib/mltw2.c: there is no such file" in done.stderr
