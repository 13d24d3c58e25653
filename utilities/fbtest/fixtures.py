"""pytest fixtures: a sandboxed Open vSwitch and testbeds on it.

A conftest.py takes them over with ``pytest_plugins = ["fbtest.fixtures"]``.

`ovs_env` (once a test) is the environment of a running vswitchd, which tests
share: that of the `fb-sandbox run` which pytest itself was started under, or
else of one started here.  `testbed` (once a test) is a fresh `Testbed` on it,
gone after the test; the test fails if anything is left behind.
`probe_testbed` is the same on a vswitchd of its own that has loaded the probe.

A vswitchd that dies or hangs fails the test that it happened in, with the
backtraces of all its threads; tests that follow have another one.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest

from .netns import our_names
from .ovs import Ovs
from .switch import Switch, post_mortems
from .testbed import Testbed


def _need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces and DPDK need root")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Look, when a test has failed, whether that is because a switch has."""
    report = yield
    if report.failed:
        # Now, before what the test has made is removed: that would wait for the switch.
        report.sections += [("ovs-vswitchd", text) for text in post_mortems()]
    return report


def shared_switch(*options: str, given: dict[str, str] | None = None) -> Iterator[Switch]:
    """Give a vswitchd for several tests, of a fixture of more than a test's scope.

    Each test is to take its environment from its `watched`.
    """
    _need_root()
    switch = Switch(*options, given=given)
    try:
        yield switch
    finally:
        switch.close()


def sandbox(*options: str, crashed: bool = False, **variables: str
            ) -> Iterator[dict[str, str]]:
    """Give the environment of a vswitchd for one test.

    `crashed` says whether a daemon of it will have been killed.
    """
    _need_root()
    switch = Switch(*options, variables=variables, crashed=crashed)
    try:
        with switch.watched() as env:
            yield env
    finally:
        switch.close()


@pytest.fixture(scope="session")
def ovs_switch() -> Iterator[Switch]:
    """A vswitchd with DPDK."""
    yield from shared_switch(given=dict(os.environ) if "OVS_RUNDIR" in os.environ else None)


@pytest.fixture
def ovs_env(ovs_switch: Switch) -> Iterator[dict[str, str]]:
    """The environment of a running vswitchd with DPDK."""
    with ovs_switch.watched() as env:
        yield env


@pytest.fixture(scope="session")
def probe_switch() -> Iterator[Switch]:
    """A vswitchd that has loaded the probe."""
    yield from shared_switch("--probe", "--memory", "1024")


@pytest.fixture
def probe_env(probe_switch: Switch) -> Iterator[dict[str, str]]:
    """The environment of a vswitchd that has loaded the probe."""
    with probe_switch.watched() as env:
        yield env


def checked_testbed(env: dict[str, str]) -> Iterator[Testbed]:
    """Give a testbed; check at its end that all it made is gone, and nothing else changed.

    The latter if vswitchd still answers, which whoever gave `env` looks at.
    """
    ovs = Ovs(env)
    config = ovs.get("Open_vSwitch", ".", "other_config")
    before, pid = our_names(os.getpid()), ovs.pid()
    with Testbed(env) as bed:
        yield bed
    left = sorted(set(our_names(os.getpid())) - set(before))
    assert not left, f"left behind: {' '.join(left)}"
    if bed.ovs.gone:
        return
    assert ovs.pid() == pid, "vswitchd is another process than before"
    now = ovs.get("Open_vSwitch", ".", "other_config")
    for key in now.keys() - config.keys():
        ovs.vsctl("remove", "Open_vSwitch", ".", "other_config", key)
    for key, value in config.items():
        if now.get(key) != value:
            ovs.vsctl("set", "Open_vSwitch", ".", f"other_config:{key}={value}")


@pytest.fixture
def testbed(ovs_env: dict[str, str]) -> Iterator[Testbed]:
    """A testbed of its own for each test.

    Checks at the end that all it made is gone and that vswitchd lives, and
    has the configuration it had.
    """
    yield from checked_testbed(ovs_env)


@pytest.fixture
def probe_testbed(probe_env: dict[str, str]) -> Iterator[Testbed]:
    """As `testbed`, where ports can be recorded."""
    yield from checked_testbed(probe_env)
