"""What is written here is written as OVS, and this project, write it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
BUILD = Path(os.environ.get("FB_BUILD") or REPO / "build")
PATCHES = sorted((REPO / "ovs-patches").glob("*.patch"))
SOURCES = sorted(path for directory in ("benchmarks/sched", "lib", "tests", "tests/preload")
                 for pattern in ("*.c", "*.h")
                 for path in (REPO / directory).glob(pattern))

SCRIPTS = [path.relative_to(REPO) for path in (REPO / "utilities").iterdir()
           if path.is_file() and re.match(rb"#!.*python", path.read_bytes()[:80])]

# A file has none.
NO_SUBJECT = "The subject summary should "


def checkpatch(*args: str | Path) -> list[str]:
    """What OVS's checkpatch.py finds, each with the place."""
    done = subprocess.run(
        ["/usr/bin/python3", BUILD / "ovs/utilities/checkpatch.py", "--quiet", *args],
        cwd=REPO, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode in (0, 1) and "Traceback" not in done.stdout, done.stdout
    found = re.findall(r"^(?:WARNING|ERROR): .*(?:\n.+)*", done.stdout, re.M)
    # Its status is that of the last line's counts, so they must agree.
    assert bool(found) == bool(done.returncode), done.stdout
    return found


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.name[:4])
def test_patch(patch: Path) -> None:
    assert not checkpatch(patch)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_source(source: Path) -> None:
    found = [text for text in checkpatch("-f", source.relative_to(REPO))
             if NO_SUBJECT not in text]
    assert not found


def test_checkpatch_finds_what_is_wrong(tmp_path: Path) -> None:
    bad = tmp_path / "bad.c"
    bad.write_text("int\nmain(void)\n{\n\treturn 0;\n}\n\n/* " + 80 * "-" + " */\n")
    assert len([text for text in checkpatch("-f", bad) if NO_SUBJECT not in text]) == 2


def test_python() -> None:
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", ".", *SCRIPTS],
                          cwd=REPO, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
