#!/usr/bin/env python3
"""Puts the tables and plots of build/bench/ into docs/results.md.

What lies between "<!-- begin NAME -->" and "<!-- end NAME -->" there is replaced
by the results of benchmark NAME, and by the machine and the versions for
"machine".  What lies around is written by hand.  Plots go to docs/results/.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent

_SECTION = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end \2 -->)", re.S)


def replace_sections(text: str, sections: Mapping[str, str]) -> str:
    """`text` with the sections that `sections` has put in place of its own."""
    def section(match: re.Match[str]) -> str:
        if match[2] not in sections:
            return match[0]
        return f"{match[1]}{sections[match[2]].rstrip()}\n{match[3]}"

    return _SECTION.sub(section, text)


def machine(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """What all results have in common, as a table."""
    rows: dict[str, list[str]] = {}
    for document in documents.values():
        for key, value in document["circumstances"].items():
            if key != "commit" and value not in rows.setdefault(key, []):
                rows[key].append(value)
    return "\n".join(["| | |", "|---|---|",
                      *(f"| {key} | {', '.join(values)} |" for key, values in rows.items())])


def benchmark(document: Mapping[str, Any], text: str, picture: str) -> str:
    """A benchmark's section."""
    when = (f"`{document['command']}`, {document['date']}, "
            f"commit {document['circumstances']['commit']}")
    return f"{text.strip()}\n\n{when}\n\n![{document['name']}]({picture})"


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=REPO / "build" / "bench", metavar="DIR",
                        help="where the results are (default: build/bench)")
    parser.add_argument("page", type=Path, nargs="?", default=REPO / "docs" / "results.md")
    args = parser.parse_args()

    documents = {path.stem: json.loads(path.read_text())
                 for path in sorted(args.results.glob("*.json"))}
    if not documents:
        print(f"summary.py: no results in {args.results}", file=sys.stderr)
        return 1
    pictures = args.page.parent / "results"
    pictures.mkdir(exist_ok=True)
    sections = {"machine": machine(documents)}
    for name, document in documents.items():
        text = (args.results / f"{name}.txt").read_text()
        sections[name] = benchmark(document, text, f"results/{name}.png")
        shutil.copy(args.results / f"{name}.png", pictures)
    before = args.page.read_text()
    args.page.write_text(replace_sections(before, sections))
    for name in sections:
        if f"<!-- begin {name} -->" not in before:
            print(f"summary.py: {args.page} has no place for {name}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
