"""Runs programs with mininet, each in namespaces of its own.

mininet names interfaces s1-eth1 and nodes h1, sets sysctls, and its cleanup ends processes
by their names.  So a program runs in a network, process and mount namespace: nothing of the
machine is in its reach, and what it has left can be seen when it has ended.

The programs are functions of mininet_programs.py, which Debian's Python runs, as it runs mn.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parent.parent
BUILD = Path(os.environ.get("FB_BUILD") or REPO / "build")
MODULE = REPO / "utilities" / "flowbundler_mininet.py"
PROGRAMS = Path(__file__).with_name("mininet_programs.py")
PYTHON = "/usr/bin/python3"

#: Is the first process in these namespaces, runs the program, and says what it has left.
INSIDE = Path(__file__).with_name("mininet_inside.py")


@dataclass
class Outcome:
    """How a program ended: its status, what it said, and what was left of it."""

    status: int
    said: str
    left: list[str] = field(default_factory=list)

    @property
    def result(self) -> Any:
        """What a function of mininet_programs.py returned."""
        assert self.status == 0, self.said
        return json.loads(self.said.strip().splitlines()[-1])


def run(*argv: str, timeout: float = 100, **environ: str) -> Outcome:
    """Run a command in namespaces of its own; fails the test if it leaves anything."""
    outcome = run_unchecked(*argv, timeout=timeout, **environ)
    assert not outcome.left, f"left behind: {outcome.left}\n{outcome.said}"
    return outcome


def run_unchecked(*argv: str, timeout: float = 100, **environ: str) -> Outcome:
    """The same; what is left is in the result."""
    if os.geteuid() != 0:
        pytest.skip("mininet needs root")
    assert shutil.which("mn"), "mininet is not there: make mininet"
    reading, writing = os.pipe()
    process = subprocess.Popen(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child",
         # Whoever runs the tests in the background ignores SIGINT, and so would it.
         "env", "--default-signal=INT",
         PYTHON, str(INSIDE), str(writing), str(REPO), str(BUILD), *argv],
        # Not the switch that pytest may run under: this is another network namespace.
        env={key: value for key, value in os.environ.items()
             if not key.startswith(("OVS_", "FB_SANDBOX", "FB_OVS_TREE"))}
        | {"FB_BUILD": str(BUILD), "PYTHONDONTWRITEBYTECODE": "1", **environ},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        pass_fds=[writing], start_new_session=True, cwd="/")
    os.close(writing)
    with os.fdopen(reading) as pipe:
        try:
            said, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            pipe.close()        # Which ends the program.
            said, _ = process.communicate()
            pytest.fail(f"{argv} does not end in {timeout:g} s:\n{said}")
        return Outcome(process.returncode, said, json.loads(pipe.read() or "[]"))


def program(name: str, timeout: float = 100, **arguments: Any) -> Any:
    """What function `name` of mininet_programs.py returns for `arguments`."""
    outcome = run(PYTHON, str(PROGRAMS), name, json.dumps(arguments), timeout=timeout)
    print("\n".join(outcome.said.splitlines()[:-1]))
    return outcome.result


def mn(*options: str, timeout: float = 100) -> Outcome:
    """Run mn with our file."""
    outcome = run("mn", "--custom", str(MODULE), *options, timeout=timeout)
    print(outcome.said)
    return outcome
