"""Small UDP programs that run inside a namespace.

Run as ``python -m fbtest.agents flood|sink|echo|ping ...``.  Each prints one
line, ``ready``, when it is, and one JSON object at its end, which SIGTERM
brings about.  They import the standard library only: they start fast.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import signal
import socket
import struct
import sys
import time

TAG = struct.Struct("!4sIQ")
TAG_MARK = b"FBT1"
HEADERS = 14 + 20 + 8
#: How far behind its schedule a flood catches up, in seconds.
CATCH_UP = 0.02


class Ended(Exception):
    """SIGTERM or SIGINT came."""


def _end(_signum, _frame) -> None:
    raise Ended


def _report(**result) -> None:
    print(json.dumps(result), flush=True)


def _ready() -> None:
    print("ready", flush=True)


def flood(args: argparse.Namespace) -> None:
    """Send tagged datagrams at a rate, whatever the network does.

    Several destinations take turns; each is a flow with its own numbers.
    `skipped` counts datagrams that were due while the program did not run.
    """
    size = args.frame_size - HEADERS
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    # A datagram that fits no buffer is the sender's loss; waiting would let
    # a limiter downstream slow the flood.
    sock.setblocking(False)
    sock.bind(("", args.sport))
    peers = [(address, args.port) for address in args.to.split(",")]
    if len(peers) == 1:
        sock.connect(peers[0])
    payload = bytearray(size)
    interval = args.frame_size * 8 / args.rate
    behind = max(1, int(CATCH_UP / interval))
    sent = failed = tried = skipped = 0
    seqs = [0] * len(peers)
    _ready()
    start = time.monotonic()
    try:
        while True:
            now = time.monotonic() - start
            if args.seconds and now >= args.seconds:
                break
            due = int(now / interval) - skipped
            if due - tried > behind:
                skipped += due - tried - behind
                due = tried + behind
            while tried < due:
                which = tried % len(peers)
                tried += 1
                TAG.pack_into(payload, 0, TAG_MARK, args.flow + which,
                              seqs[which])
                seqs[which] += 1
                try:
                    if len(peers) == 1:
                        sock.send(payload)
                    else:
                        sock.sendto(payload, peers[which])
                    sent += 1
                except (BlockingIOError, ConnectionError):
                    failed += 1
                except OSError as exc:
                    if exc.errno != errno.ENOBUFS:  # A qdisc's own drop.
                        raise
                    failed += 1
            time.sleep(0.001)
    except Ended:
        pass
    _report(sent=sent, failed=failed, skipped=skipped,
            frame_bytes=sent * args.frame_size)


def sink(args: argparse.Namespace) -> None:
    """Hold a port open, so that no ICMP error is sent, and read nothing.

    The smallest buffer fills at once; the kernel drops the rest cheaply.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    sock.bind(("", args.port))
    _ready()
    try:
        while True:
            signal.pause()
    except Ended:
        pass
    _report()


def echo(args: argparse.Namespace) -> None:
    """Send each datagram back to where it came from."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("", args.port))
    _ready()
    count = 0
    try:
        while True:
            data, peer = sock.recvfrom(2048)
            sock.sendto(data, peer)
            count += 1
    except Ended:
        pass
    _report(echoed=count)


def ping(args: argparse.Namespace) -> None:
    """One request at a time to an echo; the round trips in microseconds."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect((args.to, args.port))
    sock.settimeout(args.timeout)
    rtts: list[float] = []
    lost = seq = 0
    payload = bytearray(max(args.frame_size - HEADERS, TAG.size))
    _ready()
    try:
        while not args.count or seq < args.count:
            TAG.pack_into(payload, 0, TAG_MARK, args.flow, seq)
            begin = time.monotonic()
            try:
                sock.send(payload)
                while True:
                    answer = sock.recv(2048)
                    if TAG.unpack_from(answer)[2] == seq:
                        rtts.append((time.monotonic() - begin) * 1e6)
                        break
            except (TimeoutError, ConnectionError):
                lost += 1
            seq += 1
            time.sleep(max(0.0, begin + args.interval - time.monotonic()))
    except Ended:
        pass
    _report(rtt_us=rtts, lost=lost)


def main(argv: list[str] | None = None) -> int:
    """Run one of the programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("flood")
    command.add_argument("--to", required=True,
                         help="an address, or several with commas between")
    command.add_argument("--port", type=int, required=True)
    command.add_argument("--sport", type=int, default=0)
    command.add_argument("--rate", type=float, required=True,
                         help="bit/s, counting whole frames")
    command.add_argument("--frame-size", type=int, default=1514)
    command.add_argument("--seconds", type=float, default=0)
    command.add_argument("--flow", type=int, default=0)
    command.set_defaults(run=flood)

    for name, function in (("sink", sink), ("echo", echo)):
        command = commands.add_parser(name)
        command.add_argument("--port", type=int, required=True)
        command.set_defaults(run=function)

    command = commands.add_parser("ping")
    command.add_argument("--to", required=True)
    command.add_argument("--port", type=int, required=True)
    command.add_argument("--interval", type=float, default=0.01)
    command.add_argument("--timeout", type=float, default=1.0)
    command.add_argument("--count", type=int, default=0)
    command.add_argument("--frame-size", type=int, default=98)
    command.add_argument("--flow", type=int, default=0)
    command.set_defaults(run=ping)

    args = parser.parse_args(argv)
    smallest = HEADERS + TAG.size
    if getattr(args, "frame_size", smallest) < smallest:
        parser.error(f"--frame-size: at least {smallest}")
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    with contextlib.suppress(Ended):
        args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
