"""The commands in pages work, as a reader types them.

Of a page whose blocks of commands begin with "```sh" all are run, in their order, in the
project's own directory under a file system that forgets what they change.  A block
that is not run says why: "```sh no-run: REASON".
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

_BLOCK = re.compile(r"^```sh(?: no-run: (?P<reason>\S[^\n]*))?\n(?P<commands>.*?)^```$",
                    re.M | re.S)

# What is written goes to memory, and is gone with the mount namespace.
_FORGETFUL = """
mount -t tmpfs tmpfs {scratch} && mkdir {scratch}/upper {scratch}/work
mount -t overlay overlay -o lowerdir={top},upperdir={scratch}/upper,workdir={scratch}/work {top}
cd {top}
"""


def blocks(text: str) -> list[tuple[str | None, str]]:
    """The blocks of commands of a page, with why they are not run, if so."""
    return [(match["reason"], match["commands"]) for match in _BLOCK.finditer(text)]


def run(commands: str, top: Path, scratch: Path) -> subprocess.CompletedProcess[str]:
    """Run `commands` in `top`, which afterwards is as it was.  (We are root; sudo is not.)"""
    script = _FORGETFUL.format(top=shlex.quote(str(top)), scratch=shlex.quote(str(scratch)))
    script += "set -x\n" + re.sub(r"^sudo ", "", commands, flags=re.M)
    config = {"user.name": "Reader", "user.email": "reader@example.org", "safe.directory": "*"}
    git = {f"GIT_CONFIG_{what}_{i}": text for i, pair in enumerate(config.items())
           for what, text in zip(("KEY", "VALUE"), pair, strict=True)}
    env = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(["unshare", "--mount", "bash", "-e", "-o", "pipefail", "-c", script],
                          env=env | git | {"GIT_CONFIG_COUNT": str(len(config))}, text=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", ["CONTRIBUTING.md"])
def test_commands_work(page: str, tmp_path: Path) -> None:
    found = blocks((REPO / page).read_text())
    commands = [text for reason, text in found if reason is None]
    assert commands
    done = run("".join(commands), REPO, tmp_path)
    assert done.returncode == 0, done.stdout[-6000:]


def test_a_command_that_fails_is_found_and_forgotten(tmp_path: Path) -> None:
    top, scratch = tmp_path / "top", tmp_path / "scratch"
    top.mkdir()
    scratch.mkdir()
    (top / "kept").write_text("kept\n")
    done = run("sudo touch new\nrm kept\nls\n", top, scratch)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "new"
    assert run("false\ntouch new\n", top, scratch).returncode == 1
    assert [path.name for path in top.iterdir()] == ["kept"]


def test_what_is_not_run_says_why() -> None:
    page = "a\n```sh\nls\n```\n\n```sh no-run: slow\nmake\n```\n```text\nx\n```\n"
    assert blocks(page) == [(None, "ls\n"), ("slow", "make\n")]


def test_the_places_of_a_key() -> None:
    """Those that the page on contributing lists are all that there are."""
    text = (REPO / "CONTRIBUTING.md").read_text()
    table = text.partition("## A key of the QoS")[2].partition("```sh")[0]
    listed = set(re.findall(r"^\| `([\w./-]+)` \|", table, re.M)) - {"NEWS"}
    pattern = re.compile(r"\boverhead(_bytes)?\b")
    found = {str(path.relative_to(REPO)) for directory in ("lib", "vswitchd", "tests")
             for path in (REPO / directory).iterdir()
             if path.suffix in (".c", ".h", ".at", ".xml") and pattern.search(path.read_text())}
    assert found == listed
