"""What utilities/fb-controller runs: makes Ryu start, be ready, and end.

Ryu 4.34 is older than the libraries under it.  Three things are done for it here:
`eventlet.wsgi.ALREADY_HANDLED`, which Ryu imports and current eventlet no longer has,
is provided; everything is made green before anything else is imported; and the
sockets it listens on are watched, so that a port that is taken ends the program with
a message, and readiness is told when it is true.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fbrates.config import Config

PROGRAM = "fb-controller"


def address(text: str) -> tuple[str, int]:
    """Read HOST:PORT; an IPv6 address goes in brackets, port 0 takes a free one."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def host_name(text: str) -> str:
    """Read the name of a host, without a port."""
    from fbrates.origin import NAME

    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a host's name: 1 to 253 letters, digits, '.', '-' and '_'"
        )
    return text


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Keeps Open vSwitch at the rates that a file of tenants says. "
        "See docs/controller.md.",
    )
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="the file of tenants (YAML)"
    )
    parser.add_argument(
        "--ofp-listen",
        type=address,
        default=("127.0.0.1", 6653),
        metavar="HOST:PORT",
        help="where switches connect to (default 127.0.0.1:6653)",
    )
    parser.add_argument(
        "--rest-listen",
        type=address,
        default=("127.0.0.1", 8080),
        metavar="HOST:PORT",
        help="where REST is (default 127.0.0.1:8080; it has no authentication)",
    )
    parser.add_argument(
        "--rest-name",
        type=host_name,
        action="append",
        default=[],
        metavar="NAME",
        help="a name under which REST is asked, beside localhost, IP addresses and the "
        "HOST of --rest-listen (repeatable)",
    )
    parser.add_argument("--check", action="store_true", help="only check the file: status 0 or 1")
    parser.add_argument(
        "--ryu-app",
        action="append",
        default=[],
        metavar="APP",
        help="also run this Ryu application, such as ryu.app.ofctl_rest",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log each message")
    return parser.parse_args(argv)


def check(filename: str) -> Config | None:
    """Check the file, and tell what is wrong with it on standard error."""
    from fbrates import config
    from fbrates.loader import InvalidConfig

    try:
        return config.load(filename)
    except InvalidConfig as error:
        for problem in error.problems:
            print(problem.text(filename), file=sys.stderr)
        count = len(error.problems)
        print(f"{PROGRAM}: {filename}: {count} error{'s'[: count != 1]}", file=sys.stderr)
        return None


def main(argv: list[str] | None = None) -> int:
    """Check, or run until SIGTERM or SIGINT."""
    options = arguments(argv)
    options.config = os.path.abspath(options.config)
    eventlet = None if options.check else _green()
    parsed = check(options.config)
    if parsed is None:
        return 1
    if options.check:
        vms = sum(len(tenant.vms) for tenant in parsed.tenants.values())
        limits = sum(1 for _ in parsed.limits())
        print(
            f"{options.config}: good: {len(parsed.tenants)} tenants, {vms} VMs, "
            f"{limits - vms} destinations"
        )
        return 0
    return run(options, eventlet)


def _green() -> Any:
    """Make Python's blocking calls green, and eventlet what Ryu 4.34 expects."""
    # Eventlet announces on import that it is in maintenance; docs/controller.md
    # says why it is here.
    warnings.filterwarnings("ignore", message=r"\s*Eventlet is deprecated")
    import eventlet

    eventlet.monkey_patch()
    fit_eventlet()
    return eventlet


def fit_eventlet() -> None:
    """Give eventlet what Ryu 4.34 imports from it."""
    import eventlet.wsgi

    if not hasattr(eventlet.wsgi, "ALREADY_HANDLED"):
        eventlet.wsgi.ALREADY_HANDLED = object()


def run(options: argparse.Namespace, eventlet: Any) -> int:
    """Run Ryu's manager with our application."""
    import logging

    os.environ["FLOWBUNDLER_CONFIG"] = options.config
    os.environ["FLOWBUNDLER_REST_NAMES"] = ",".join(options.rest_name)
    ofp_listen = _free_port(options.ofp_listen)
    rest_listen = _free_port(options.rest_listen)
    _watch_listeners(eventlet, {"OpenFlow": ofp_listen, "REST": rest_listen})

    import ryu.cmd.manager
    import ryu.log
    from ryu.lib import hub

    set_up = ryu.log.init_log

    def init_log() -> None:
        # Ryu says nothing of when, which a controller's log cannot do without.
        set_up()
        formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
        for handler in logging.getLogger().handlers:
            handler.setFormatter(formatter)

    ryu.log.init_log = init_log

    logging.getLogger("flowbundler").setLevel(logging.DEBUG if options.verbose else logging.INFO)
    if not options.verbose:
        # Ryu says at this level what each request and each application is.
        for name in ("ryu", "ryu.lib.hub", "ryu.base.app_manager"):
            logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger("ryu.lib.hub").propagate = True
    _handle_signals(eventlet, hub)
    # A switch that has died without a word is noticed in 20 s.
    ryu.cmd.manager.CONF.set_override("echo_request_interval", 5.0)
    ryu.cmd.manager.CONF.set_override("maximum_unreplied_echo_requests", 3)
    ryu.cmd.manager.main(
        args=[
            "--ofp-listen-host",
            ofp_listen[0],
            "--ofp-tcp-listen-port",
            str(ofp_listen[1]),
            "--wsapi-host",
            rest_listen[0],
            "--wsapi-port",
            str(rest_listen[1]),
            "--default-log-level",
            str(logging.DEBUG if options.verbose else logging.INFO),
            "ryu_rates",
            *options.ryu_app,
        ],
        prog=PROGRAM,
    )
    return 0


def _free_port(listen: tuple[str, int]) -> tuple[str, int]:
    """Replace port 0 by a free one: Ryu takes 0 as "not given"."""
    host, port = listen
    if port:
        return listen
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind(listen)
        except OSError as error:
            _cannot_listen(host, port, error)
        return host, probe.getsockname()[1]


def _cannot_listen(host: str, port: int, error: OSError) -> None:
    print(f"{PROGRAM}: cannot listen on {_show(host, port)}: {error.strerror}", file=sys.stderr)
    sys.stderr.flush()
    # This may be any green thread: an exception would only end that one.
    os._exit(1)


def _show(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _watch_listeners(eventlet: Any, expected: dict[str, tuple[str, int]]) -> None:
    """Tell on standard output when all of Ryu's servers listen."""
    listen = eventlet.listen
    waiting = set(expected.values())

    def watched(listen_address: Any, *args: Any, **kwargs: Any) -> Any:
        # Eventlet would let two controllers share one port and its connections.
        kwargs["reuse_port"] = False
        try:
            result = listen(listen_address, *args, **kwargs)
        except OSError as error:
            _cannot_listen(listen_address[0], listen_address[1], error)
        if waiting:
            waiting.discard(tuple(listen_address))
            if not waiting:
                where = ", ".join(f"{name} on {_show(*at)}" for name, at in expected.items())
                print(f"{PROGRAM}: ready: {where}", flush=True)
        return result

    eventlet.listen = watched


def _handle_signals(eventlet: Any, hub: Any) -> None:
    """Handle signals in a green thread of their own.

    A Python signal handler runs inside whichever green thread is active and cannot
    wake the hub's poll; a pipe can.
    """
    from eventlet.greenio import GreenPipe
    from greenlet import getcurrent

    main_greenlet = getcurrent()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)

    def watch() -> None:
        pipe = GreenPipe(reading, "rb", 0)
        while True:
            for number in pipe.read(1):
                if number == signal.SIGHUP:
                    _reload()
                elif number in (signal.SIGTERM, signal.SIGINT):
                    print(f"{PROGRAM}: {signal.Signals(number).name}, ending", flush=True)
                    # Ryu's manager closes its applications on this.
                    eventlet.kill(main_greenlet, KeyboardInterrupt)
                    return

    hub.spawn(watch)


def _reload() -> None:
    """Read the file again.

    Never raises: the green thread that calls this is the one that hears all signals.
    """
    import logging

    try:
        import ryu_rates

        if ryu_rates.RyuRates.instance is not None:
            ryu_rates.RyuRates.instance.reload()
    except Exception:
        logging.getLogger("flowbundler").exception("reload failed")


if __name__ == "__main__":
    sys.exit(main())
