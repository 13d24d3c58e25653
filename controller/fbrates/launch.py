"""What utilities/fb-controller runs: makes the framework start, be ready, and end.

Not by Ryu's manager: that reads /etc/ryu and other places without a word, listens without
limits (``transport.py``), and os-ken has none.  Everything is made green before anything
else is imported.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
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


def parser() -> argparse.ArgumentParser:
    """Give the command line's grammar."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Keeps Open vSwitch at the rates that a file of tenants says. "
        "See docs/controller.md.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="the file of tenants (YAML): it fills an empty database; else its differences are "
        "shown, and nothing is changed",
    )
    parser.add_argument(
        "--db",
        metavar="REMOTE",
        default="private",
        help="the OVSDB database that has the state: unix:FILE or tcp:HOST:PORT, more with commas "
        "between; private (the default): one of our own; none: remember nothing",
    )
    parser.add_argument(
        "--state",
        metavar="DIR",
        help="where the private database is (default /var/lib/flowbundler for root)",
    )
    parser.add_argument(
        "--ofp-listen",
        type=address,
        default=("127.0.0.1", 6653),
        metavar="HOST:PORT",
        help="where switches connect to (default 127.0.0.1:6653)",
    )
    for option, metavar, text in (
        ("key", "KEY", "OpenFlow by TLS: the controller's private key (PEM)"),
        ("cert", "CERT", "its certificate (PEM)"),
        ("ca", "CA", "whose certificates switches must have (PEM)"),
    ):
        parser.add_argument(f"--ofp-tls-{option}", metavar=metavar, help=text)
    parser.add_argument(
        "--rest-listen",
        type=address,
        default=("127.0.0.1", 8080),
        metavar="HOST:PORT",
        help="where REST is (default 127.0.0.1:8080)",
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
    for option, metavar, text in (
        ("tls-key", "KEY", "REST by TLS: the controller's private key (PEM)"),
        ("tls-cert", "CERT", "its certificate (PEM)"),
        ("tokens", "FILE", "who may ask what of REST: tokens and roles (YAML)"),
    ):
        parser.add_argument(f"--rest-{option}", metavar=metavar, help=text)
    parser.add_argument("--check", action="store_true", help="only check the file: status 0 or 1")
    parser.add_argument(
        "--ryu-app",
        action="append",
        default=[],
        metavar="APP",
        help="also run this application of the framework, such as ryu.app.ofctl_rest",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log each message")
    return parser


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    grammar = parser()
    options = grammar.parse_args(argv)
    tls = (options.ofp_tls_key, options.ofp_tls_cert, options.ofp_tls_ca)
    if any(tls) and not all(tls):
        grammar.error("--ofp-tls-key, --ofp-tls-cert and --ofp-tls-ca: give all three, or none")
    if bool(options.rest_tls_key) != bool(options.rest_tls_cert):
        grammar.error("--rest-tls-key and --rest-tls-cert: give both, or none")
    if options.check and not options.config:
        grammar.error("--check needs --config")
    return options


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
    options.config = os.path.abspath(options.config) if options.config else ""
    eventlet = None if options.check else _green()
    parsed = check(options.config) if options.config else None
    if parsed is None and options.config:
        return 1
    if options.check:
        assert parsed is not None
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
    return eventlet


OPENFLOW_PATIENCE, REST_PATIENCE = 10.0, 30.0
"""Seconds that a switch has for its handshake, and a REST client between requests."""

PER_SOURCE = 64
"""Connections of one address that have not shown that they are switches, or are REST's."""


def run(options: argparse.Namespace, eventlet: Any) -> int:
    """Run the framework with our application."""
    import logging

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    if not options.verbose:
        # The frameworks say at lower levels what each request and each application is.
        for name in ("ryu", "os_ken", "eventlet.wsgi.server"):
            logging.getLogger(name).setLevel(logging.WARNING)
    else:
        logging.getLogger().setLevel(logging.DEBUG)
    os.environ["FLOWBUNDLER_CONFIG"] = options.config
    os.environ["FLOWBUNDLER_REST_NAMES"] = ",".join([options.rest_listen[0], *options.rest_name])

    import framework
    import transport
    from fbrates import dbserver, supervised, tokens
    from fbrates.loader import InvalidConfig
    from fbrates.store import StoreError

    context = None
    if options.ofp_tls_key:
        files = (options.ofp_tls_key, options.ofp_tls_cert, options.ofp_tls_ca)
        try:
            context = transport.Tls(*map(Path, files)).context()
        except (OSError, ValueError) as error:
            print(f"{PROGRAM}: --ofp-tls-...: {', '.join(files)}: {error}", file=sys.stderr)
            return 1
    rest_context, rest_tokens = None, None
    try:
        if options.rest_tls_key:
            files = (options.rest_tls_key, options.rest_tls_cert)
            rest_context = transport.Tls(*map(Path, files)).context()
        if options.rest_tokens:
            rest_tokens = tokens.Tokens.load(options.rest_tokens)
    except InvalidConfig as error:
        for problem in error.problems:
            print(problem.text(options.rest_tokens), file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"{PROGRAM}: --rest-tls-...: {', '.join(files)}: {error}", file=sys.stderr)
        return 1
    descriptors = transport.raise_descriptor_limit()
    ofp = _listen(eventlet, "OpenFlow", options.ofp_listen, OPENFLOW_PATIENCE, descriptors)
    rest = _listen(eventlet, "REST", options.rest_listen, REST_PATIENCE, descriptors)

    conf = framework.cfg.CONF
    # What the command line says, and nothing from /etc or elsewhere.
    conf([], project=PROGRAM, default_config_files=[], default_config_dirs=[])
    controller = importlib.import_module(f"{framework.NAME}.controller.controller")
    # Before the application's module is loaded, which would load OpenFlow's handlers.
    conf.set_override("ofp_tcp_listen_port", options.ofp_listen[1] or 6653)
    # A switch that has died without a word is noticed in 20 s.
    conf.set_override("echo_request_interval", 5.0)
    conf.set_override("maximum_unreplied_echo_requests", 3)
    controller.OpenFlowController.server_loop = lambda *_: transport.serve(
        ofp, controller.datapath_connection_factory, context
    )

    import ryu_rates

    database, store = None, None
    try:
        if options.db == "private":
            directory = Path(options.state) if options.state else dbserver.default_directory()
            database = dbserver.Server(directory.absolute())
        if options.db != "none":
            remote = database.remote if database is not None else options.db
            store = _store(remote, transport)
    except StoreError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        if database is not None:
            database.close()
        return 1
    ryu_rates.RyuRates.store = store

    manager = framework.app_manager.AppManager.get_instance()
    manager.load_apps(["ryu_rates", *options.ryu_app])
    try:
        services = manager.instantiate_apps(**manager.create_contexts())
    except (InvalidConfig, StoreError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return _end(1, store, database)
    application = ryu_rates.RyuRates.instance
    assert application is not None
    application.openflow = ofp
    application.rest = rest
    application.front.tokens = rest_tokens
    rest.tls = rest_context
    application.front.answered = lambda environ: rest.touch(environ["eventlet.input"].get_socket())
    wsgi = manager.contexts.get("wsgi", application.front)
    if rest_tokens is not None:
        # What other applications answer asks for no token.
        wsgi = application.front
    log = logging.getLogger("eventlet.wsgi.server")
    eventlet.spawn(
        eventlet.wsgi.server,
        rest,
        wsgi,
        log,
        protocol=transport.HttpProtocol,
        socket_timeout=REST_PATIENCE,
        debug=False,
    )
    if database is not None:
        eventlet.spawn(_keep_alive, eventlet, database)
    _handle_signals(eventlet, framework.hub)
    at = [
        _show(given[0], listener.getsockname()[1])
        for given, listener in ((options.ofp_listen, ofp), (options.rest_listen, rest))
    ]
    where = f"OpenFlow on {at[0]}, REST on {at[1]}"
    print(f"{PROGRAM}: ready: {where}", flush=True)
    supervised.notify(f"READY=1\nSTATUS={where}")
    eventlet.spawn(_supervise, eventlet, application, where)
    try:
        framework.hub.joinall(services)
        eventlet.event.Event().wait()
    except KeyboardInterrupt:
        pass
    finally:
        supervised.notify("STOPPING=1")
        manager.close()
    return _end(0, store, database)


def _store(remote: str, transport: Any) -> Any:
    from ovsdb_store import OvsdbStore

    bridge = transport.Bridge()
    return OvsdbStore(remote, bridge.event, transport.start_native_thread, transport.native_poll)


def _keep_alive(eventlet: Any, database: Any) -> None:
    import logging

    from fbrates.store import StoreError

    while True:
        eventlet.sleep(0.5)
        try:
            database.revive()
        except (OSError, StoreError) as error:
            logging.getLogger("flowbundler").error("%s", error)


def _supervise(eventlet: Any, application: Any, where: str) -> None:
    """Tell the supervisor how it is, and that it goes on, as long as it does."""
    from fbrates import supervised

    interval = supervised.watchdog_interval()
    last = ""
    while True:
        eventlet.sleep(min(interval or 10.0, 10.0))
        switches = application.service.switches.values()
        good = sum(switch.in_sync for switch in switches)
        status = f"STATUS={where}; {good} of {len(switches)} switches in sync"
        if status != last and supervised.notify(status):
            last = status
        # Green threads run, or we were not here; this asks for more: that work is done.
        if interval is not None and time.monotonic() - application.ticked < interval:
            supervised.notify("WATCHDOG=1")


def _end(status: int, store: Any, database: Any) -> int:
    """End for good: green threads that serve for ever are still there."""
    if store is not None:
        store.close()
    if database is not None:
        database.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _listen(
    eventlet: Any, name: str, address: tuple[str, int], patience: float, descriptors: int
) -> Any:
    """Listen, with limits; ends the program if that cannot be."""
    import transport
    from fbrates.admission import Admission, Limits

    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # Not shared: two controllers would take each other's connections.
        listening = eventlet.listen(address, family=family, backlog=512, reuse_port=False)
    except OSError as error:
        shown = error.strerror or str(error)
        print(f"{PROGRAM}: cannot listen on {_show(host, port)}: {shown}", file=sys.stderr)
        sys.exit(1)
    limits = Limits(min(512, descriptors // 4), min(PER_SOURCE, descriptors // 8), patience)
    return transport.Listener(listening, Admission(limits, time.monotonic), name)


def _show(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
                    eventlet.kill(main_greenlet, KeyboardInterrupt)
                    return

    hub.spawn(watch)


def _reload() -> None:
    """Read the file again.

    Never raises: the green thread that calls this is the one that hears all signals.
    """
    import logging

    from fbrates import supervised

    try:
        import ryu_rates

        if ryu_rates.RyuRates.instance is not None:
            supervised.notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
            ryu_rates.RyuRates.instance.reload()
    except Exception:
        logging.getLogger("flowbundler").exception("reload failed")
    finally:
        supervised.notify("READY=1")


if __name__ == "__main__":
    sys.exit(main())
