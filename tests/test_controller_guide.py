"""docs/controller-guide.md: each of its commands does what it says there."""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from controller_harness import DEADLINE, ROOT, Controller, Switch, wait_for
from fbrates import cli

GUIDE = ROOT / "docs" / "controller-guide.md"
ADDRESSES = {"http://127.0.0.1:8080": "url", "tcp:127.0.0.1:6653": "target"}


def commands() -> list[tuple[str, str]]:
    """Give the commands of the guide, and what they say."""
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    [^$]))+", GUIDE.read_text(), re.MULTILINE)
    found = []
    for block in blocks:
        for part in re.split(r"^\$ ", textwrap.dedent(block), flags=re.MULTILINE)[1:]:
            command, _, said = part.partition("\n")
            found.append((command, said.strip("\n")))
    return found


def fits(said: str, expected: str) -> bool:
    """Whether something is what the guide shows; runs of spaces are one."""
    wanted = [re.escape(" ".join(part.split())) for part in expected.split("...")]
    pattern = ".*".join(wanted)
    return re.fullmatch(rf"\s*{pattern}\s*", " ".join(said.split()), re.DOTALL) is not None


def test_what_fits() -> None:
    assert fits("a  b\n", "a b") and fits("a 12 ms", "a ... ms") and not fits("a", "b")
    assert fits("x\ny\nz", "...\ny\n...") and not fits("x\ny\nz", "y")


def test_the_guide_has_commands() -> None:
    found = commands()
    assert len(found) == GUIDE.read_text().count("\n    $ ") > 20
    # What the command line has, and an operator needs, is in it.
    text = "\n".join(command for command, _ in found)
    for word in ("status", "set-rate", "show", "put", "delete", "release", "export", "apply",
                 "history", "rollback", "forget", "backup"):  # fmt: skip
        assert word in text


def test_settings() -> None:
    texts = ["port=vm-a", "vlan=7", "rate=5000000", "ip=10.0.0.1,10.0.0.2", "burst=a=b", "vni=x"]
    assert cli._settings(texts) == {
        "port": "vm-a", "vlan": 7, "rate": "5000000", "ip": ["10.0.0.1", "10.0.0.2"],
        "burst": "a=b", "vni": "x"}  # fmt: skip
    for bad in (["port"], ["=x"], ["rate=1", "rate=2"]):
        with pytest.raises(cli.Failure, match="KEY=VALUE"):
            cli._settings(bad)


@pytest.mark.parametrize(
    "arguments",
    [["put", "red", "a", "--to", "x", "y"], ["put", "red"], ["delete", "red", "a", "b=c"],
     ["put", "red", "a", "--rate=5"], ["status", "x=y"]],
)  # fmt: skip
def test_a_wrong_command_line(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


@pytest.mark.switch
def test_each_command_does_what_it_says(
    ovs: Switch, controller: Callable[..., Controller], tmp_path: Path
) -> None:
    found = commands()
    assert found[0][0] == "cat tenants.yaml"
    ovs.add_bridge("br0", "vm-a", "vm-b", "vm-c")
    running = controller(found[0][1] + "\n")
    environment = {
        **ovs.env,
        "PATH": os.pathsep.join([str(ROOT / "utilities"), ovs.env["PATH"]]),
        "FLOWBUNDLER_URL": running.url,
    }
    directory = running.directory
    for command, expected in found:
        for shown, name in ADDRESSES.items():
            command = command.replace(shown, getattr(running, name))
        done = subprocess.run(
            ["bash", "-c", command], cwd=directory, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=DEADLINE)  # fmt: skip
        assert done.returncode == 0, (command, done.stdout)
        assert fits(done.stdout, expected), f"$ {command}\n{done.stdout}\nexpected:\n{expected}"
        if "set-controller" in command:
            running.in_sync(1)
        if "del-controller" in command:

            def gone() -> bool:
                return not running.get("/v1/status")["switches"]["0000000000000001"]["connected"]

            wait_for("the switch to go", gone)
