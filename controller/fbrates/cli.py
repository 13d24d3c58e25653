"""What utilities/flowbundler-ctl runs: a client of the controller's REST interface.

Needs nothing but Python's standard library, so that it starts at once and on any
machine.  Exit status: 0 done, 1 the controller refused, could not be reached or could
not confirm, 2 a wrong command line.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import ssl
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from datetime import datetime
from typing import Any

PROGRAM = "flowbundler-ctl"
DEFAULT_URL = "http://127.0.0.1:8080"
TIMEOUT = 10.0

_headers: list[tuple[str, str]] = []
_handlers: list[urllib.request.BaseHandler] = []


class Failure(Exception):
    """What the user is told before exit status 1."""


def parser() -> argparse.ArgumentParser:
    """Give the command line's grammar."""
    url = os.environ.get("FLOWBUNDLER_URL", DEFAULT_URL)
    common = argparse.ArgumentParser(add_help=False)
    # Also behind the command, where they must not undo what stood before it.
    common.add_argument("--url", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    common.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    top = argparse.ArgumentParser(
        prog=PROGRAM, description="Shows and changes the rates that a FlowBundler controller keeps."
    )
    top.add_argument(
        "--url", default=url, help=f"the controller (default FLOWBUNDLER_URL or {DEFAULT_URL})"
    )
    top.add_argument(
        "--token-file",
        metavar="FILE",
        default=os.environ.get("FLOWBUNDLER_TOKEN_FILE"),
        help="the file that has your token (default FLOWBUNDLER_TOKEN_FILE)",
    )
    top.add_argument(
        "--ca",
        metavar="FILE",
        default=os.environ.get("FLOWBUNDLER_CA"),
        help="whose certificate an https controller has (PEM; default FLOWBUNDLER_CA)",
    )
    top.add_argument("--json", action="store_true", help="print the controller's answer as it is")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    rate = commands.add_parser("set-rate", parents=[common], help="change a VM's rate now")
    rate.add_argument("tenant", metavar="TENANT")
    rate.add_argument("vm", metavar="VM", help="'-' for what a tenant's VMs share")
    rate.add_argument("rate", metavar="RATE", help="such as 50Mbps, 1.5Gbps, 50000000, unlimited")
    rate.add_argument("--to", metavar="DEST", help="the rate towards this address or prefix")
    share = commands.add_parser(
        "set-share", parents=[common], help="change what a VM may have of a shared port now"
    )
    share.add_argument("tenant", metavar="TENANT")
    share.add_argument("vm", metavar="VM")
    share.add_argument("--min-rate", metavar="RATE", help="what it has whenever it wants it")
    share.add_argument("--max-rate", metavar="RATE", help="what it never has more than")
    share.add_argument("--weight", metavar="N", type=int, help="how much it has of the rest")
    port = commands.add_parser(
        "set-port", parents=[common], help="change the rate of a shared port now"
    )
    port.add_argument("port", metavar="PORT", help="its name in the file")
    port.add_argument("rate", metavar="RATE", help="such as 10Gbps")
    port.add_argument("--new", action="store_true", help="make it, if there is none")
    putting = commands.add_parser(
        "put", parents=[common], help="make a tenant, VM or destination, or make it what is said"
    )
    deleting = commands.add_parser(
        "delete", parents=[common], help="delete a tenant, VM or destination"
    )
    for command in (putting, deleting):
        command.add_argument("tenant", metavar="TENANT")
        command.add_argument("vm", metavar="VM", help="'-' for the tenant itself")
        command.add_argument("--to", metavar="DEST", help="the rate towards this address or prefix")
    putting.add_argument(
        "settings", metavar="KEY=VALUE", nargs="*", help="as in the file, such as port=vm-a"
    )
    deleting.add_argument("--yes", action="store_true", help="do not ask before a tenant goes")
    port_gone = commands.add_parser(
        "delete-port", parents=[common], help="delete a port that nobody shares"
    )
    port_gone.add_argument("port", metavar="PORT")
    applying = commands.add_parser(
        "apply", parents=[common], help="make what a file says the truth, after showing the changes"
    )
    applying.add_argument("file", metavar="FILE", help="a file of tenants (YAML), '-' for stdin")
    going_back = commands.add_parser(
        "rollback", parents=[common], help="make all as it was right after a change of the history"
    )
    going_back.add_argument("number", metavar="N", type=int)
    for command in (applying, going_back):
        command.add_argument("--dry-run", action="store_true", help="only show the changes")
        command.add_argument("--yes", action="store_true", help="do not ask")
    applying.add_argument(
        "--force", action="store_true", help="also if many VMs are no longer in the file"
    )
    commands.add_parser("export", parents=[common], help="print what is wanted now as a file")
    commands.add_parser("history", parents=[common], help="show who changed what, and when")
    commands.add_parser("ports", parents=[common], help="show shared ports: who has and uses what")
    show = commands.add_parser("show", parents=[common], help="show rates")
    show.add_argument("tenant", metavar="TENANT", nargs="?")
    commands.add_parser("status", parents=[common], help="show switches and errors")
    reloading = commands.add_parser(
        "reload", parents=[common], help="let the controller read its file again"
    )
    reloading.add_argument(
        "--force", action="store_true", help="also if many VMs are no longer in the file"
    )
    adopting = commands.add_parser(
        "adopt", parents=[common], help="take the meters among our ids at a switch for ours"
    )
    adopting.add_argument("switch", metavar="SWITCH", help="its datapath id, as status shows it")
    forgetting = commands.add_parser(
        "forget", parents=[common], help="do not count on a switch that is gone to come back"
    )
    forgetting.add_argument("switch", metavar="SWITCH", help="its datapath id")
    closed = commands.add_parser(
        "release", parents=[common], help="show what is closed, or let it be an unknown source"
    )
    closed.add_argument("closed", metavar="WHAT", nargs="?", help='such as "port vm-a"')
    return top


def request(url: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Ask the controller; raises Failure with its own words."""
    data = json.dumps(body).encode() if body is not None else None
    try:
        call = urllib.request.Request(url.rstrip("/") + path, data=data, method=method)
    except ValueError as error:
        raise Failure(f"--url {url}: {error}") from None
    for name, value in headers.items():
        call.add_header(name.replace("_", "-"), value)
    if data is not None:
        call.add_header("Content-Type", "application/json")
    # The controller is near: no proxy has a part in this.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *_handlers)
    opener.addheaders += _headers
    try:
        with opener.open(call, timeout=TIMEOUT) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        data = error.read()
        answer = _parsed(data)
        if isinstance(answer, dict) and ("applied" in answer or "stored" in answer):
            # Accepted, and not in force.
            return error.code, answer
        raise Failure(_explain(error, data)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Failure(f"no answer from the controller at {url}: {reason}") from None


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _explain(error: urllib.error.HTTPError, data: bytes) -> str:
    try:
        answer = json.loads(data)
        problems = answer.get("errors") or [answer["error"]]
        return "\n".join(_problem(problem) for problem in problems)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"the controller answered {error.code} {error.reason}"


def _problem(problem: dict[str, Any]) -> str:
    text = f"line {problem['line']}: " if problem.get("line") else ""
    text += problem["message"]
    if problem.get("value") is not None:
        text = f"{problem['field']} {problem['value']!r}: {text}"
    elif problem.get("field"):
        text = f"{problem['field']}: {text}"
    allowed = problem.get("allowed")
    if isinstance(allowed, list):
        allowed = ", ".join(map(str, allowed)) or "none"
    return f"{text}; allowed: {allowed}" if allowed else text


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Set rows in columns."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]
    return "\n".join(lines)


def set_rate(options: argparse.Namespace) -> int:
    """Run set-rate."""
    quote = urllib.parse.quote
    path = f"/v1/tenants/{quote(options.tenant, safe='')}"
    if options.vm != "-":
        path += f"/vms/{quote(options.vm, safe='')}"
    if options.to:
        path += f"/destinations/{quote(options.to, safe='')}"
    status, answer = request(options.url, "PUT", f"{path}/rate", {"rate": options.rate})
    applied = answer["applied"]
    if options.json:
        print(json.dumps(answer, indent=2))
    else:
        who = options.tenant if options.vm == "-" else f"{options.tenant}/{options.vm}"
        who += f" to {answer['destination']}" if options.to else ""
        if applied:
            print(
                f"{who}: {answer['old_rate']} -> {answer['new_rate']} "
                f"(meter {answer['meter_id']}, confirmed in {answer['elapsed_ms']:.1f} ms)"
            )
        else:
            print(f"{who}: {answer['old_rate']} -> {answer['new_rate']}, accepted")
    return _outcome(status, answer)


def _outcome(status: int, answer: Any) -> int:
    """Say why a change is not in force, if it is not; gives the exit status."""
    if not answer["applied"]:
        print(f"{PROGRAM}: not in force: {answer.get('reason')}", file=sys.stderr)
        _print_errors(answer)
    return 0 if answer["applied"] and status == 200 else 1


def _print_errors(answer: Any) -> None:
    """Print what switches refused of a change, to stderr."""
    for name, switch in answer["switches"].items():
        for error in switch["errors"]:
            print(f"{PROGRAM}: switch {name}: {error}", file=sys.stderr)


def _changed(options: argparse.Namespace, answer: Any, text: str) -> None:
    """Print the answer to a change, or `text` and when it was confirmed."""
    if options.json:
        print(json.dumps(answer, indent=2))
    elif answer["applied"]:
        print(f"{text} (confirmed in {answer['elapsed_ms']:.1f} ms)")
    else:
        print(f"{text}, accepted")


def set_share(options: argparse.Namespace) -> int:
    """Run set-share."""
    given = {
        "min-rate": options.min_rate,
        "max-rate": options.max_rate,
        "weight": options.weight,
    }
    body = {key: value for key, value in given.items() if value is not None}
    if not body:
        raise Failure("nothing to change; give --min-rate, --max-rate or --weight")
    quote = urllib.parse.quote
    path = f"/v1/tenants/{quote(options.tenant, safe='')}/vms/{quote(options.vm, safe='')}/share"
    status, answer = request(options.url, "PUT", path, body)
    old, new = answer["old"], answer["new"]
    what = ", ".join(f"{key} {old[key]} -> {new[key]}" for key in body)
    _changed(options, answer, f"{options.tenant}/{options.vm}: {what}")
    return _outcome(status, answer)


def set_port(options: argparse.Namespace) -> int:
    """Run set-port."""
    path = f"/v1/ports/{urllib.parse.quote(options.port, safe='')}"
    if options.new:
        match = {"If_None_Match": "*"}
    else:
        # A misspelt one would be a new one.
        match = {"If_Match": "*"}
        request(options.url, "GET", path)
    status, answer = request(options.url, "PUT", path, {"max-rate": options.rate}, **match)
    if options.new:
        return _edited(options, status, answer, f"port {options.port}")
    _changed(
        options,
        answer,
        f"{options.port}: max-rate {answer['old_max-rate']} -> {answer['new_max-rate']}",
    )
    return _outcome(status, answer)


NUMBERS = ("vlan", "vni", "weight")
"""What is a number in the file; all else is text."""


def _place(options: argparse.Namespace) -> tuple[str, str]:
    """Give the path of what a command is about, and its name."""
    quote = urllib.parse.quote
    path, name = f"/v1/tenants/{quote(options.tenant, safe='')}", str(options.tenant)
    if options.vm != "-":
        path += f"/vms/{quote(options.vm, safe='')}"
        name += f"/{options.vm}"
    if options.to:
        path += f"/destinations/{quote(options.to, safe='')}"
        name += f" to {options.to}"
    return path, name


def _settings(texts: Sequence[str]) -> dict[str, Any]:
    """Read KEY=VALUE; raises Failure."""
    result: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key or key in result:
            raise Failure(f"{text!r} is not KEY=VALUE, each key once")
        if key in NUMBERS and value.isdecimal():
            result[key] = int(value)
        else:
            result[key] = value.split(",") if key == "ip" and "," in value else value
    return result


def put(options: argparse.Namespace) -> int:
    """Run put."""
    path, name = _place(options)
    status, answer = request(options.url, "PUT", path, _settings(options.settings))
    return _edited(options, status, answer, name)


def delete(options: argparse.Namespace) -> int:
    """Run delete; a tenant has VMs, so that is asked about."""
    path, name = _place(options)
    if options.vm == "-" and not options.to and not options.yes:
        seen = request(options.url, "GET", path)[1]
        print(f"delete {name} and its {len(seen['vms'])} VMs? [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("nothing is changed")
            return 1
    status, answer = request(options.url, "DELETE", path)
    return _edited(options, status, answer, name)


def delete_port(options: argparse.Namespace) -> int:
    """Run delete-port."""
    path = f"/v1/ports/{urllib.parse.quote(options.port, safe='')}"
    status, answer = request(options.url, "DELETE", path)
    return _edited(options, status, answer, f"port {options.port}")


def _edited(options: argparse.Namespace, status: int, answer: Any, name: str) -> int:
    """Say what became of one thing; gives the exit status."""
    done = {200: "changed", 201: "made"}.get(status, "stored")
    if answer["spec"] is None:
        done = "deleted"
    if options.json:
        print(json.dumps(answer, indent=2))
    elif answer["applied"]:
        print(f"{name}: {done} (confirmed in {answer['elapsed_ms']:.1f} ms)")
    else:
        print(f"{name}: {done}; not in force: {answer['reason']}")
    _print_errors(answer)
    if answer["not_connected"] and not options.json:
        print(f"not connected, and as before: {', '.join(answer['not_connected'])}")
    return 0 if status in (200, 201) else 1


def ports(options: argparse.Namespace) -> int:
    """Run ports."""
    answer = request(options.url, "GET", "/v1/ports")[1]
    if options.json:
        print(json.dumps(answer, indent=2))
        return 0
    rows: list[tuple[str, ...]] = []
    for name, port in answer["ports"].items():
        for key, vm in port["vms"].items():
            settings = (vm["min-rate"], vm["max-rate"], str(vm["weight"]))
            known = [(f"{switch}", state) for switch, state in vm["switches"].items()]
            for switch, state in known or [("-", None)]:
                now = ("-", "-", "-")
                if state is not None:
                    mbps = [f"{state[k] / 1e6:.1f}Mbps" for k in ("share_bps", "usage_bps")]
                    now = (mbps[0], mbps[1], "yes" if state["wants_more"] else "no")
                rows.append((name, port["max-rate"], key, *settings, switch, *now))
    header = ("PORT", "RATE", "VM", "MIN", "MAX", "WEIGHT", "SWITCH", "SHARE", "USED", "WANTS MORE")
    print(table(header, rows) if rows else "no port is shared")
    return 0


def show(options: argparse.Namespace) -> int:
    """Run show."""
    if options.tenant:
        path = f"/v1/tenants/{urllib.parse.quote(options.tenant, safe='')}"
        answer = request(options.url, "GET", path)[1]
        tenants = {options.tenant: answer}
    else:
        answer = request(options.url, "GET", "/v1/tenants")[1]
        tenants = answer["tenants"]
    if options.json:
        print(json.dumps(answer, indent=2))
        return 0
    rows = []

    def add(tenant: str, vm: str, to: str, item: dict[str, Any]) -> None:
        changed = "" if item["rate"] == item["file_rate"] else f"file: {item['file_rate']}"
        meter = str(item["meter_id"] or "-")
        rows.append((tenant, vm, to, item["rate"], meter, str(len(item["switches"])), changed))

    for name, tenant in tenants.items():
        if "rate" in tenant:
            add(name, "-", "any", tenant)
        for vm_name, vm in tenant["vms"].items():
            add(name, vm_name, "any", vm)
            for to, item in vm["destinations"].items():
                add(name, vm_name, to, item)
        for to, item in tenant["destinations"].items():
            add(name, "-", to, item)
    print(table(("TENANT", "VM", "TO", "RATE", "METER", "SWITCHES", "CHANGED"), rows))
    return 0


def status(options: argparse.Namespace) -> int:
    """Run status; exit status 1 if a switch is not in sync."""
    answer = request(options.url, "GET", "/v1/status")[1]
    if options.json:
        print(json.dumps(answer, indent=2))
    else:
        rows = []
        for name, switch in answer["switches"].items():
            state = "in sync" if switch["in_sync"] else "not in sync"
            rows.append(
                (
                    name,
                    state if switch["connected"] else "disconnected",
                    switch.get("band") or "-",
                    str(switch.get("meters", "-")),
                    str(switch.get("flows", "-")),
                    str(switch.get("repairs", "-")),
                    ", ".join(switch.get("missing_ports", [])) or "-",
                )
            )
        header = ("SWITCH", "STATE", "BAND", "METERS", "FLOWS", "REPAIRS", "MISSING PORTS")
        print(table(header, rows) if rows else "no switch is connected")
        for name, switch in answer["switches"].items():
            if switch.get("blocked"):
                print(f"{name}: left alone: {switch['blocked']}")
            for error in switch["errors"]:
                when = datetime.fromtimestamp(error["time"]).isoformat(" ", "seconds")
                times = f" ({error['count']} times)" if error["count"] > 1 else ""
                print(f"{name}: {when}: {error['about']}: {error['error']}{times}")
        policy = answer["unknown_sources"]
        rate = f" to {policy['rate']}" if policy["rate"] else ""
        print(f"unknown sources: {policy['policy']}{rate}")
        for line in answer["file_differs"][:20]:
            print(f"the file differs, and is not applied: {line}")
        if answer["closed"]:
            print(f"closed: {', '.join(answer['closed'])}")
        if answer["last_reload_error"]:
            print(f"last reload refused: {answer['last_reload_error']}")
    return 0 if answer["in_sync"] else 1


def reload(options: argparse.Namespace) -> int:
    """Run reload."""
    body = {"force": True} if options.force else None
    answer = request(options.url, "POST", "/v1/reload", body)[1]
    if options.json:
        print(json.dumps(answer, indent=2))
    else:
        print("reloaded: " + ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in answer.items()))
    return 0


def adopt(options: argparse.Namespace) -> int:
    """Run adopt."""
    path = f"/v1/switches/{urllib.parse.quote(options.switch, safe='')}/adopt"
    answer = request(options.url, "POST", path)[1]
    if options.json:
        print(json.dumps(answer, indent=2))
    else:
        print(f"{options.switch}: all meters among our ids are ours now; see status")
    return 0


def forget(options: argparse.Namespace) -> int:
    """Run forget."""
    path = f"/v1/switches/{urllib.parse.quote(options.switch, safe='')}"
    answer = request(options.url, "DELETE", path)[1]
    print(json.dumps(answer, indent=2) if options.json else f"{options.switch}: forgotten")
    return 0


def release(options: argparse.Namespace) -> int:
    """Run release."""
    if options.closed is None:
        answer = request(options.url, "GET", "/v1/closed")[1]
    else:
        answer = request(options.url, "DELETE", "/v1/closed", {"closed": options.closed})[1]
    if options.json:
        print(json.dumps(answer, indent=2))
    else:
        print("\n".join(answer["closed"]) or "nothing is closed")
    return 0


def apply(options: argparse.Namespace) -> int:
    """Run apply."""
    try:
        with open(0 if options.file == "-" else options.file, encoding="utf-8") as stream:
            text = stream.read()
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"{options.file}: {error}") from None
    return _change_all(options, "/v1/apply", {"file": text, "force": options.force})


def rollback(options: argparse.Namespace) -> int:
    """Run rollback."""
    return _change_all(options, f"/v1/history/{options.number}/rollback", {})


def _change_all(options: argparse.Namespace, path: str, body: dict[str, Any]) -> int:
    """Show what would change, ask, and do it."""
    preview = request(options.url, "POST", path, {**body, "dry_run": True})[1]
    if not options.json:
        print("\n".join(preview["changes"]) or "nothing to change")
    if options.dry_run or not preview["changes"]:
        if options.json:
            print(json.dumps(preview, indent=2))
        return 0
    if not options.yes:
        print(f"make these {len(preview['changes'])} changes? [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("nothing is changed")
            return 1
    status, answer = request(options.url, "POST", path, body)
    if options.json:
        print(json.dumps(answer, indent=2))
    for name, switch in answer["switches"].items():
        if not switch["applied"]:
            what = "; ".join(switch["errors"]) or "not confirmed yet"
            print(f"{PROGRAM}: switch {name}: {what}", file=sys.stderr)
    return 0 if status == 200 else 1


def export(options: argparse.Namespace) -> int:
    """Run export."""
    answer = request(options.url, "GET", "/v1/export")[1]
    print(json.dumps(answer, indent=2) if options.json else answer["file"].rstrip())
    return 0


def history(options: argparse.Namespace) -> int:
    """Run history."""
    answer = request(options.url, "GET", "/v1/history")[1]
    if options.json:
        print(json.dumps(answer, indent=2))
        return 0
    rows = [
        (
            str(item["number"]),
            datetime.fromtimestamp(item["time"]).isoformat(" ", "seconds"),
            item["who"] or "-",
            item["what"],
        )
        for item in answer["history"]
    ]
    print(table(("N", "TIME", "WHO", "WHAT"), rows))
    return 0


COMMANDS = {
    "apply": apply,
    "export": export,
    "history": history,
    "rollback": rollback,
    "adopt": adopt,
    "forget": forget,
    "release": release,
    "set-rate": set_rate,
    "set-share": set_share,
    "set-port": set_port,
    "put": put,
    "delete": delete,
    "delete-port": delete_port,
    "ports": ports,
    "show": show,
    "status": status,
    "reload": reload,
}


def _identify(options: argparse.Namespace) -> None:
    """Take token and authority for all requests; raises Failure."""
    try:
        if options.token_file:
            with open(options.token_file, encoding="ascii") as stream:
                _headers.append(("Authorization", f"Bearer {stream.read().strip()}"))
        if options.ca:
            context = ssl.create_default_context(cafile=options.ca)
            _handlers.append(urllib.request.HTTPSHandler(context=context))
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"--token-file, --ca: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    grammar = parser()
    options, rest = grammar.parse_known_args(argv)
    # argparse takes "none" for KEY=VALUE... if an option comes before them.
    settings = options.command == "put" and all("=" in item and item[0] != "-" for item in rest)
    if rest and not settings:
        grammar.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "put":
        options.settings += rest
    try:
        _identify(options)
        return COMMANDS[options.command](options)
    except Failure as failure:
        for line in str(failure).splitlines():
            print(f"{PROGRAM}: {line}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    sys.exit(main())
