"""The command line of fb-probe."""

from __future__ import annotations

import argparse
import ipaddress
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from ..ovs import Ovs
from ..proc import CommandError
from . import control, report
from .control import ProbeError
from .ring import RingError, read_recording

_DESCRIPTION = """\
Records when packets leave a port of type dpdk, and says what that means.

It talks to the vswitchd that OVS_RUNDIR names, which must run with the
plug-in loaded: fb-sandbox run --probe -- fb-probe record PORT 5 --out DIR
"""


def _rate(text: str) -> tuple[int, float]:
    """Parses FLOW=RATE."""
    flow, equals, rate = text.partition("=")
    try:
        number = int(ipaddress.IPv4Address(flow)) if "." in flow else int(flow, 0)
        value = float(rate)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not allowed: FLOW=RATE, such as 10.0.0.1=50e6 (bit/s)") from exc
    if not equals or value <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not allowed: the rate must be above 0")
    return number, value


def _positive(text: str) -> float:
    """Parses a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not allowed: a number above 0")
    return value


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fb-probe", description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    how = argparse.ArgumentParser(add_help=False)
    how.add_argument("port", metavar="PORT", help="OVS's name of the port")
    how.add_argument("--edt", action="store_true",
                     help="record the departure times that meters gave the packets")
    how.add_argument("--flow", default="dst", metavar="KIND",
                     help="what identifies a flow: dst, src, offset:N, mbuf:N or meter "
                     "(default: %(default)s)")
    how.add_argument("--records", type=int, default=1 << 20, metavar="N",
                     help="room for so many packets, for each tx queue (default: %(default)s; "
                     "0: only count)")
    how.add_argument("--queues", type=int, default=0, metavar="N",
                     help="room for so many tx queues (default: those the port has)")
    how.add_argument("--wrap", action="store_true",
                     help="when the room is used up, overwrite the oldest")
    how.add_argument("--burst-wait-ns", type=int, default=0, metavar="N",
                     help="busy-wait so long in each transmission, as for a NIC's doorbell")

    what = argparse.ArgumentParser(add_help=False)
    what.add_argument("--rate", action="append", type=_rate, default=[], metavar="FLOW=RATE",
                      help="what a flow should have, in bit/s; repeat it for others")
    what.add_argument("--window", type=_positive, default=0.1, metavar="SECONDS",
                      help="length of the windows of rates over time (default: %(default)s)")
    what.add_argument("--flows", type=int, default=16, metavar="N",
                      help="list the N busiest flows (default: %(default)s)")

    command = commands.add_parser("start", parents=[how], help="begin to record")
    command.add_argument("--file", type=Path, metavar="FILE",
                         help="record into FILE, which must not exist (default: in /dev/shm)")
    command = commands.add_parser("stop", help="end a recording; its file stays")
    command.add_argument("port", metavar="PORT", help="OVS's name of the port")
    command = commands.add_parser("status", help="what is being recorded")
    command.add_argument("port", metavar="PORT", help="OVS's name of the port")
    command = commands.add_parser("record", parents=[how, what],
                                  help="record for some time, and report")
    command.add_argument("seconds", type=_positive, metavar="SECONDS")
    command.add_argument("--out", type=Path, required=True, metavar="DIR",
                         help="where PORT.fbp and report.txt, .json and .png go")
    command = commands.add_parser("report", parents=[what], help="say what was recorded")
    command.add_argument("file", type=Path, metavar="FILE")
    command.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    command.add_argument("--png", type=Path, metavar="FILE", help="draw them")
    return parser.parse_args(argv)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The recording's options."""
    return {"edt": args.edt, "flow": args.flow, "records": args.records,
            "queues": args.queues, "wrap": args.wrap, "burst_wait_ns": args.burst_wait_ns}


def _print_table(summary: dict[str, Any]) -> None:
    # What is not a terminal has no width of its own.
    width = None if sys.stdout.isatty() else report.WIDTH
    Console(width=width).print(report.table(summary))


def _print_status(status: dict[str, Any]) -> None:
    for key, value in status.items():
        print(f"{key:<10} {value}")


def _summarize(file: Path, args: argparse.Namespace) -> dict[str, Any]:
    return report.summarize(read_recording(file), dict(args.rate), window_s=args.window,
                            most_flows=args.flows)


def _record(args: argparse.Namespace) -> dict[str, Any]:
    """Records, and writes everything to args.out."""
    ovs = Ovs()
    args.out.mkdir(parents=True, exist_ok=True)
    begun = Path(control.start(ovs, args.port, **_options(args))["file"])
    kept = args.out / f"{args.port}.fbp"
    try:
        try:
            time.sleep(args.seconds)
        finally:
            control.stop(ovs, args.port)
        shutil.copyfile(begun, kept)
    finally:
        begun.unlink(missing_ok=True)
    summary = _summarize(kept, args)
    report.write(summary, json_file=args.out / "report.json", text_file=args.out / "report.txt",
                 png_file=args.out / "report.png")
    return summary


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    args = _parse(argv)
    try:
        match args.command:
            case "start":
                # The plug-in gets an absolute path: it runs elsewhere.
                file = args.file.absolute() if args.file else None
                _print_status(control.start(Ovs(), args.port, **_options(args), file=file))
            case "stop":
                _print_status(control.stop(Ovs(), args.port))
            case "status":
                _print_status(control.status(Ovs(), args.port))
            case "record":
                _print_table(_record(args))
            case "report":
                summary = _summarize(args.file, args)
                _print_table(summary)
                report.write(summary, json_file=args.json, png_file=args.png)
    except (ProbeError, RingError, CommandError, OSError, RuntimeError, ValueError) as exc:
        print(f"fb-probe: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
