"""What a benchmark leaves: NAME.json, NAME.txt and NAME.png in build/bench/."""

from __future__ import annotations

import datetime
import json
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.switch import BUILD, REPO


def directory(quick: bool) -> Path:
    """Where results go; quick ones do not take the place of full ones."""
    path = BUILD / "bench" / "quick" if quick else BUILD / "bench"
    path.mkdir(parents=True, exist_ok=True)
    return path


def progress(text: str) -> None:
    """Say what is being done, on one line that the next one replaces."""
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"  {text:<76}", end=end, file=sys.stderr, flush=True)


def _output(*argv: str) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, cwd=REPO).stdout.strip()
    except OSError:
        return ""


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.M)
    return match[1].strip() if match else "unknown"


def circumstances() -> dict[str, str]:
    """The machine, the versions and the commit that results are of."""
    cpu = Path("/proc/cpuinfo").read_text()
    memory = _first(r"^MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    virtual = _output("systemd-detect-virt")
    vswitchd = str(BUILD / "ovs" / "vswitchd" / "ovs-vswitchd")
    version = _output(vswitchd, "--version")
    return {
        "cpu": _first(r"^model name\s*:(.*)", cpu),
        "cores": _output("nproc"),
        "memory": f"{int(memory) / 2 ** 20:.0f} GiB",
        "virtual machine": virtual or "unknown",
        "kernel": platform.release(),
        "Open vSwitch": _first(r"Open vSwitch\)? (\S+)", version),
        "DPDK": _first(r"DPDK (\S+)", version),
        "compiler": _output("gcc", "-dumpfullversion"),
        "CFLAGS": _first(r'CFLAGS="([^"]*)"', (BUILD / "ovs" / "configured").read_text()),
        "commit": _output("git", "describe", "--always", "--dirty"),
    }


def write(name: str, quick: bool, command: str, results: dict[str, Any], text: str) -> None:
    """Write NAME.json and NAME.txt."""
    path = directory(quick)
    document = {
        "name": name, "command": command, "quick": quick,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "circumstances": circumstances(), "results": results,
    }
    (path / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    (path / f"{name}.txt").write_text(text + "\n")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, with columns that line up; floats are to be strings already."""
    cells = [list(map(str, row)) for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        # Numbers to the right: all but the first column.
        aligned = [cell.ljust(width) if i == 0 else cell.rjust(width)
                   for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        return "| " + " | ".join(aligned) + " |"

    rule = "|" + "|".join("-" * (width + 1) + ("-" if i == 0 else ":")
                          for i, width in enumerate(widths)) + "|"
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])
