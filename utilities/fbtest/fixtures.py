"""pytest fixtures: a sandboxed Open vSwitch and testbeds on it.

A conftest.py takes them over with ``pytest_plugins = ["fbtest.fixtures"]``.

`ovs_env` (once a session) is the environment of a running vswitchd: that of
the `fb-sandbox run` which pytest itself was started under, or else of one
started here.  `testbed` (once a test) is a fresh `Testbed` on it, gone after
the test; the test fails if anything is left behind.  `probe_testbed` is the
same on a vswitchd of its own that has loaded the probe.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .netns import our_names
from .ovs import Ovs
from .proc import wait_until
from .testbed import Testbed

SANDBOX = Path(__file__).resolve().parent.parent / "fb-sandbox"

#: How fb-sandbox ends if a daemon crashed.
CRASHED = 125

# Runs inside the sandbox: tells its environment, and stays until told to
# end by the end of its input, which also comes if pytest is killed.
_INSIDE = """
import json, os, sys
print("FBTEST " + json.dumps(dict(os.environ)), flush=True)
sys.stdin.read()
"""


def _need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces and DPDK need root")


def sandbox(*options: str, crashed: bool = False, **variables: str
            ) -> Iterator[dict[str, str]]:
    """Run a sandbox, and give the environment in it.

    `crashed` says whether a daemon of it will have been killed.
    """
    _need_root()
    process = subprocess.Popen(
        [str(SANDBOX), "run", *options, "--", sys.executable, "-c", _INSIDE],
        env={**os.environ, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, start_new_session=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("FBTEST "):
                break
        else:
            pytest.fail(f"fb-sandbox ended with status {process.wait()}")
        yield json.loads(line[len("FBTEST "):])
    finally:
        process.stdin.close()
        try:
            status = process.wait(60)
        except subprocess.TimeoutExpired:
            process.terminate()
            status = process.wait(60)
        process.stdout.close()
    assert status == (CRASHED if crashed else 0), f"fb-sandbox ended with status {status}"


@pytest.fixture(scope="session")
def ovs_env() -> Iterator[dict[str, str]]:
    """The environment of a running vswitchd with DPDK."""
    _need_root()
    if "OVS_RUNDIR" in os.environ:
        yield dict(os.environ)
        return
    if not SANDBOX.exists():
        pytest.skip("there is no fb-sandbox, and OVS_RUNDIR is not set")
    yield from sandbox()


@pytest.fixture(scope="session")
def probe_env() -> Iterator[dict[str, str]]:
    """The environment of a vswitchd that has loaded the probe."""
    yield from sandbox("--probe", "--memory", "1024")


def checked_testbed(env: dict[str, str]) -> Iterator[Testbed]:
    """Give a testbed; check at its end that all it made is gone, and nothing else changed."""
    ovs = Ovs(env)
    config = ovs.get("Open_vSwitch", ".", "other_config")
    before, pid = our_names(os.getpid()), ovs.pid()
    with Testbed(env) as bed:
        yield bed
    left = sorted(set(our_names(os.getpid())) - set(before))
    assert not left, f"left behind: {' '.join(left)}"
    wait_until(ovs.alive, "vswitchd answers")
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
