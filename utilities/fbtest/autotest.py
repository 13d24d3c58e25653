"""Runs OVS's own test suites ("autotests") and reads what they say.

Nothing here needs a switch or root, except the suites whose makefile targets are
`check-system-*` and `check-dpdk`.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# OVS's make targets, and the script that each of them runs.
SUITES = {
    "check": "testsuite",
    "check-system-userspace": "system-userspace-testsuite",
    "check-dpdk": "system-dpdk-testsuite",
}

# "  12: ofproto-dpif - resubmit          ok"; a test that should fail is an "expected
# failure", or an "UNEXPECTED PASS".
_RESULT = re.compile(r"^\s*(\d+): .*?\s"
                     r"(ok|skipped|FAILED|expected failure|UNEXPECTED PASS)(?: \(.*\))?\s*$")
# "  12: ofproto-dpif.at:24  ofproto-dpif - resubmit"
_LISTED = re.compile(r"^\s*(\d+): \S+:\d+\s+(.*?)\s*$")

#: What is said of a test that is `unstable`; .ci/run looks for it.
AT_FIRST = "FAILED AT FIRST, passed when it was run again, alone"

#: Results of tests that did not do what they should.
FAILED = ("FAILED", "UNEXPECTED PASS")

# What makes tests that change interfaces and network namespaces leave the machine's
# alone, whose names they would share, and end with all that they have started.  Those
# with dummy ports are not to see the machine's either: when an interface comes or goes
# there, vswitchd reads its routes anew, and forgets the addresses of dummy ports.
_APART = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
          "--", "sh", "-c",
          "mount -t sysfs sysfs /sys && mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns "
          '&& ip link set lo up && exec "$@"', "sh")

_NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
#: More than vswitchd and two dpdk-testpmd take.
_HUGEPAGES = 1536


class SuiteError(RuntimeError):
    """A suite did not come to running tests; the message has what it said."""


# A test, the same in any tree: its title, and its place among those that have the
# same title.  Numbers shift with every test that is added before.
Test = tuple[str, int]


@dataclass
class Results:
    """What became of each test of a run.

    `unstable` are those that failed, and then passed when they were run again.
    """

    results: dict[Test, str] = field(default_factory=dict)
    unstable: set[Test] = field(default_factory=set)

    def having(self, *results: str) -> set[Test]:
        """The tests with one of `results`."""
        return {test for test, result in self.results.items() if result in results}

    @property
    def passed(self) -> set[Test]:
        """The tests that did what they should."""
        return self.having("ok", "expected failure")

    @property
    def skipped(self) -> set[Test]:
        """The tests that found this machine not fit for them."""
        return self.having("skipped")

    @property
    def failed(self) -> set[Test]:
        """The tests that failed, or passed where that is an error."""
        return self.having(*FAILED)


def parse_list(text: str) -> dict[Test, int]:
    """Read what a suite prints for --list: its tests and their numbers."""
    seen: Counter[str] = Counter()
    tests: dict[Test, int] = {}
    for line in text.splitlines():
        if match := _LISTED.match(line):
            title = match[2]
            tests[title, seen[title]] = int(match[1])
            seen[title] += 1
    return tests


def parse(text: str, tests: Mapping[Test, int]) -> Results:
    """Read what a suite of `tests` printed; of a test that ran again, the last counts."""
    named = {number: test for test, number in tests.items()}
    results, failed = Results(), set()
    for line in text.splitlines():
        if match := _RESULT.match(line):
            test = named[int(match[1])]
            results.results[test] = match[2]
            failed |= {test} if match[2] in FAILED else set()
    results.unstable = failed - results.failed
    return results


def _environ() -> dict[str, str]:
    """The environment without what a make around this one would tell OVS's."""
    return {name: value for name, value in os.environ.items()
            if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}


def tests_of(tree: Path, suite: str = "check") -> dict[Test, int]:
    """All tests of `suite` in the built OVS `tree`, and their numbers there."""
    done = subprocess.run(["sh", SUITES[suite], "-C", ".", "--list"], cwd=tree / "tests",
                          env=_environ(), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    tests = parse_list(done.stdout)
    if not tests:
        raise SuiteError(f"{suite} lists no test in {tree}:\n{done.stdout[-2000:]}")
    return tests


@contextlib.contextmanager
def _hugepages(wanted: int) -> Iterator[None]:
    """Have the kernel reserve so many huge pages more than it does."""
    _NR_HUGEPAGES.write_text(str(int(_NR_HUGEPAGES.read_text()) + wanted))
    try:
        yield
    finally:
        _NR_HUGEPAGES.write_text(str(max(0, int(_NR_HUGEPAGES.read_text()) - wanted)))


def run(tree: Path, suite: str = "check", *, jobs: int = 1, keywords: Sequence[str] = (),
        numbers: Iterable[int] = (), recheck: bool = False) -> Results:
    """Run `suite`, a make target, in the built OVS `tree`, `jobs` tests at once.

    All of it, or the tests with any of `keywords`, or those with these `numbers`.
    With `recheck` what fails is run again, alone, as OVS's own CI does for tests that
    wait for a busy machine - but not if a sanitizer has found something.  Raises
    `SuiteError` if no test ran, or if the suite failed without a test that did.
    """
    apart = _APART if suite != "check" or os.geteuid() == 0 else ()
    flags = [f"-j{jobs}", *(f"-k {keyword}" for keyword in keywords),
             *map(str, sorted(numbers))]
    with _hugepages(_HUGEPAGES) if suite == "check-dpdk" else contextlib.nullcontext():
        done = subprocess.run(
            [*apart, "make", "-C", str(tree), suite, f"TESTSUITEFLAGS={' '.join(flags)}",
             *(["RECHECK=yes"] if recheck else [])],
            env=_environ(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    ran = any(map(_RESULT.match, done.stdout.splitlines()))
    results = parse(done.stdout, tests_of(tree, suite)) if ran else Results()
    if not ran or (done.returncode and not results.failed):
        raise SuiteError(f"{suite} in {tree} ended with status {done.returncode} after "
                         f"{len(results.results)} tests:\n{done.stdout[-2000:]}")
    return results
