"""A vswitchd that dies or hangs costs the test that it happened in, and no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from fbtest import backtrace, procfs
from fbtest.proc import Background, wait_until
from fbtest.switch import MOST_BLOCKED_MS, SANDBOX, Log

REPO = Path(__file__).resolve().parent.parent

#: What befalls the switch in a test, and what the test does about it.
SUITE = '''
import os
import signal
from pathlib import Path

import pytest

pytest_plugins = ["fbtest.fixtures"]


def hit(bed, number):
    os.kill(bed.ovs.pid(), number)


def use(bed):
    bed.ovs.vsctl("set", "Bridge", bed.bridge, "external_ids:used=yes")
    bed.ovs.appctl("version")


def test_first(testbed):
    use(testbed)


def test_stopped(testbed):
    testbed.host("a")
    hit(testbed, signal.SIGSTOP)
    testbed.ovs.appctl("version", timeout=1)


def test_after_stopped(testbed):
    use(testbed)


def test_killed(testbed):
    testbed.host("a")
    hit(testbed, signal.SIGKILL)
    testbed.ovs.appctl("version")


def test_after_killed(testbed):
    use(testbed)


def test_stopped_at_its_end(testbed):
    testbed.host("a")
    hit(testbed, signal.SIGSTOP)


def test_after_stopped_at_its_end(testbed):
    use(testbed)


def test_blocked(testbed):
    log = Path(testbed.ovs.env["OVS_RUNDIR"], "ovs-vswitchd.log")
    with log.open("a") as file:
        file.write("2026-01-01T00:00:00.000Z|00001|ovs_rcu(urcu1)|WARN|"
                   "blocked 4000 ms waiting for main to quiesce\\n")


def test_last(testbed):
    use(testbed)
'''

#: The tests of it that must fail, and what their reports must have: of a vswitchd that
#: hangs the backtraces of its main thread and of the others.
BACKTRACES = ("in poll_block", "in main", "pmd_thread_main", '"eal-intr')
FAILED = {
    "test_stopped": BACKTRACES,
    "test_killed": ("ovs-vswitchd does not run", "the end of its log"),
    "test_stopped_at_its_end": BACKTRACES,
    "test_blocked": ("blocked 4000 ms waiting for main to quiesce",),
}


def run_suite(directory: Path, *selected: str, prefix: tuple[str, ...] = ()
              ) -> tuple[dict[str, str], set[str]]:
    """Run the suite; returns the reports of what failed, and what passed, each by test."""
    (directory / "test_generated.py").write_text(SUITE)
    result = directory / "result.xml"
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("OVS_", "PYTEST_"))}
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
         "-c", os.devnull, f"--rootdir={directory}", f"--junitxml={result}",
         "-o", "junit_logging=all", str(directory), *selected],
        env={**env, "PYTHONPATH": str(REPO / "utilities")}, text=True, timeout=400,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print(done.stdout)
    failed: dict[str, str] = {}
    passed = set()
    for case in ET.parse(result).iter("testcase"):
        name = case.get("name", "")
        # A failure of the test, or an error when what it made is removed.
        if any(child.tag in ("failure", "error") for child in case):
            failed[name] = ""
        else:
            passed.add(name)
    # Each report begins with the name of its test, in a line of underscores.
    for part in done.stdout.split("\n___")[1:]:
        title = part.partition("\n")[0].strip("_ ").split()[-1]
        failed[title] += part
    return failed, passed - set(failed)


@pytest.mark.timeout(420)
def test_one_test_fails_for_one_switch(tmp_path: Path) -> None:
    failed, passed = run_suite(tmp_path)
    assert set(failed) == set(FAILED), failed
    assert len(passed) == 5
    for test, texts in FAILED.items():
        assert [text for text in texts if text not in failed[test]] == [], failed[test]


@pytest.mark.timeout(420)
def test_a_switch_that_was_given_is_replaced(tmp_path: Path) -> None:
    """pytest itself runs under fb-sandbox, which says in the end that it hung."""
    failed, passed = run_suite(
        tmp_path, "-k", "first or stopped and not end",
        prefix=(str(SANDBOX), "run", "--memory", "512", "--"))
    assert set(failed) == {"test_stopped"}
    assert passed == {"test_first", "test_after_stopped"}
    assert [text for text in BACKTRACES if text not in failed["test_stopped"]] == []


def test_backtraces() -> None:
    """Of one that sleeps and of one that is stopped, which stays so."""
    child = Background(["sleep", "1000"])
    try:
        wait_until(lambda: procfs.threads(child.pid) == {child.pid: "sleep"}, "it sleeps")
        assert "nanosleep" in backtrace.backtraces(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: procfs.state(child.pid) == "T", "it is stopped")
        text = backtrace.backtraces(child.pid)
        assert "nanosleep" in text and "sleep: state T" in text
        wait_until(lambda: procfs.state(child.pid) == "T", "it is stopped again")
    finally:
        child.close()
    assert "has ended" in backtrace.backtraces(child.pid)


def test_blocked_threads(tmp_path: Path) -> None:
    """Those that did not come round for more than a few seconds, from now on."""
    path = tmp_path / "ovs-vswitchd.log"
    line = "2026-11-23T21:00:00.000Z|{0:05}|{1}|WARN|blocked {0} ms waiting for {2} to quiesce\n"
    path.write_text(line.format(8000, "ovs_rcu(urcu1)", "main"))
    log = Log({"OVS_RUNDIR": str(tmp_path)})
    with path.open("a") as file:
        for ms in (1000, MOST_BLOCKED_MS, 4000):
            file.write(line.format(ms, "ovs_rcu(urcu1)", "pmd-c01/id:8"))
        file.write(line.format(16000, "ovs_rcu", "main"))
        file.write(line.format(32000, "other", "main"))
    assert [int(text.split("blocked ")[1].split()[0]) for text in log.blocked()] == [4000, 16000]
