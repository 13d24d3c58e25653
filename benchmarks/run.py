#!/usr/bin/python3
"""Runs benchmarks of the real switch, and writes build/bench/NAME.{json,txt,png}.

Quick results go to build/bench/quick/.  The machine should have nothing else to
do meanwhile.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import signal
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = Path(os.environ.get("FB_BUILD") or HERE.parent / "build")
PYTHON = BUILD / "venv" / "bin" / "python"
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "utilities")]

#: Each is a module of this package, with TITLE, run, text and plot.
NAMES = ("ceiling", "hook-off", "max-rate", "fairness", "scaling", "pacing", "primary-flow",
         "scale", "memory", "batch-cost", "datastructure")


def run(name: str, quick: bool) -> str:
    """Run one benchmark; returns what to tell of it."""
    import matplotlib

    matplotlib.use("Agg")
    from benchmarks import results

    module = importlib.import_module(f"benchmarks.{name.replace('-', '_')}")
    began = time.monotonic()
    found = module.run(quick)
    text = module.text(found)
    command = f"sudo benchmarks/run.py {name}{' --quick' if quick else ''}"
    results.write(name, quick, command, found, text)
    module.plot(found, results.directory(quick) / f"{name}.png")
    return f"{module.TITLE} ({name}, {time.monotonic() - began:.0f} s)\n\n{text}\n"


def main() -> int:
    """Run what the command line names, in the project's Python environment."""
    if Path(sys.prefix) != PYTHON.parent.parent:
        if not (BUILD / "bench").exists() or not PYTHON.exists():
            print("run.py: what it needs is not built: run 'make bench-tools'", file=sys.stderr)
            return 2
        os.execv(PYTHON, [str(PYTHON), str(Path(__file__).resolve()), *sys.argv[1:]])
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="+", choices=[*NAMES, "all"], metavar="NAME",
                        help=f"all, or some of: {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true",
                        help="fewer cases and shorter: minutes in all")
    args = parser.parse_args()
    if os.geteuid() != 0:
        print("run.py: network namespaces and DPDK need root", file=sys.stderr)
        return 2
    # As Ctrl-C: what was started is ended by the "with" blocks.
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)
    told: list[str] = []
    try:
        for name in NAMES if "all" in args.name else dict.fromkeys(args.name):
            told.append(run(name, args.quick))
    except KeyboardInterrupt:
        print(f"run.py: interrupted: {shlex.join(sys.argv[1:])}", file=sys.stderr)
        return 130
    finally:
        print("\n".join(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
