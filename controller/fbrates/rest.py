"""HTTP requests to service calls, and what became of them to JSON.

`Api.handle` takes method, path and body and gives status and JSON, without a web
framework; ``ryu_rates.py`` puts it behind Ryu's.  The paths are in
docs/controller.md.  A request that is refused has changed nothing.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fbrates import config, loader, units
from fbrates.changes import Changes, Wanted
from fbrates.config import Limit, ShareError, Vm
from fbrates.loader import InvalidConfig, plain
from fbrates.service import Applied, Service, UnknownName
from fbrates.store import StoreDoubt, StoreError
from fbrates.sync import Waiter

MAX_BODY = 65536
MAX_FILE = 2 * loader.MAX_BYTES
"""Bytes of a body that has a file of tenants in it."""
CONFIRM_TIMEOUT = 2.0
"""Seconds to wait for the switches' barrier replies."""

APPLY_KEYS = "file (the text of a file of tenants), dry_run, force"

SHARE_KEYS = "min-rate, max-rate and weight, or some of them"

RATE_KEYS = 'rate (such as "50Mbps") or rate_bps (an integer of bit/s)'


@dataclass
class Response:
    """An answer: HTTP status, JSON body, further headers."""

    status: int
    body: Any
    headers: dict[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Give the body as sent."""
        return json.dumps(self.body, indent=2, allow_nan=False).encode() + b"\n"


class RequestError(Exception):
    """A request that is refused."""

    def __init__(
        self,
        status: int,
        message: str,
        field_name: str | None = None,
        value: Any = None,
        allowed: Any = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Say why; of a `value` that is not a scalar only a short text is sent back."""
        super().__init__(message)
        self.response = Response(
            status,
            {
                "error": {
                    "field": field_name,
                    "value": plain(value),
                    "allowed": allowed,
                    "message": message,
                }
            },
            headers or {},
        )


class Api:
    """The REST interface of a Service."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self.service = service
        self.changes = Changes(service)
        self._clock = clock

    def handle(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        who: str = "",
        ceiling: bool = False,
    ) -> Response:
        """Answer a request; `path` is percent-decoded and without the query.

        `headers` looks names up in any case; `who` asks, for the history, and may
        with `ceiling` set no rate above what was applied.
        """
        try:
            if len(body) > (most := MAX_FILE if path == "/v1/apply" else MAX_BODY):
                raise too_large(most)
            return self._route(
                method, path, body, _Asker(who, prefers_async(headers or {}), ceiling)
            )
        except StoreError as error:
            # Nothing has changed, or that is not known: see fbrates.store.StoreDoubt.
            doubt = isinstance(error, StoreDoubt)
            said = "it is not known whether this is stored" if doubt else "not stored"
            return RequestError(503, f"{said}: {error}", "database", None, "try again").response
        except InvalidConfig as error:
            problems = [problem.as_dict() for problem in error.problems]
            return Response(400, {"error": problems[0], "errors": problems})
        except RequestError as error:
            return error.response
        except ShareError as error:
            value, allowed = error.value, error.allowed
            if error.key is not None:
                allowed += f" (this is about {error.key})"
            return RequestError(400, error.message, error.field, value, allowed).response
        except UnknownName as error:
            return Response(
                404,
                {
                    "error": {
                        "field": error.field,
                        "value": plain(error.value),
                        "allowed": error.known,
                        "message": str(error),
                    }
                },
            )

    def _route(self, method: str, path: str, body: bytes, asker: _Asker) -> Response:
        parts = path.strip("/").split("/")
        service = self.service
        match parts:
            case ["v1", "status"]:
                self._allow(method, "GET")
                return Response(200, service.status_view())
            case ["v1", "meters"]:
                self._allow(method, "GET")
                return Response(200, service.meters_view())
            case ["v1", "reload"]:
                self._allow(method, "POST")
                return self._reload(body, asker)
            case ["v1", "apply"]:
                self._allow(method, "POST")
                return self._apply(body, asker)
            case ["v1", "export"]:
                self._allow(method, "GET")
                return Response(200, {"file": self.service.export_text()})
            case ["v1", "history"]:
                self._allow(method, "GET")
                entries = [entry.view() for entry in self.service.history()]
                return Response(200, {"history": entries})
            case ["v1", "history", number, "rollback"]:
                self._allow(method, "POST")
                return self._rollback(number, body, asker)
            case ["v1", "changes", number]:
                self._allow(method, "GET")
                return Response(200, self.changes.view(number))
            case ["v1", "switches", name, "adopt"]:
                self._allow(method, "POST")
                self.service.adopt(_datapath_id(name))
                return Response(200, {"switch": name, "adopting": True})
            case ["v1", "switches", name]:
                self._allow(method, "DELETE")
                try:
                    self.service.forget(_datapath_id(name), asker.who)
                except ValueError as error:
                    allowed = "switches that are not connected"
                    raise RequestError(409, str(error), "switch", name, allowed) from None
                return Response(200, {"switch": name, "forgotten": True})
            case ["v1", "closed"]:
                self._allow(method, "GET", "DELETE")
                return self._closed(method, body, asker)
            case ["v1", "tenants"]:
                self._allow(method, "GET")
                return Response(200, {"tenants": service.tenants_view()})
            case ["v1", "tenants", tenant]:
                self._allow(method, "GET")
                return Response(200, service.tenant_view(service.tenant(tenant)))
            case ["v1", "tenants", tenant, "rate"]:
                self._allow(method, "GET", "PUT")
                return self._rate(method, service.total(tenant), {"tenant": tenant}, body, asker)
            case ["v1", "tenants", tenant, "vms"]:
                self._allow(method, "GET")
                return Response(200, service.tenant_view(service.tenant(tenant))["vms"])
            case ["v1", "tenants", tenant, "vms", vm]:
                self._allow(method, "GET")
                return Response(200, service.vm_view(service.vm(tenant, vm)))
            case ["v1", "tenants", tenant, "vms", vm, "rate"]:
                self._allow(method, "GET", "PUT")
                names = {"tenant": tenant, "vm": vm}
                return self._rate(method, service.vm(tenant, vm), names, body, asker)
            case ["v1", "tenants", tenant, "vms", vm, "share"]:
                self._allow(method, "GET", "PUT")
                return self._share(method, service.vm(tenant, vm), body, asker)
            case ["v1", "ports"]:
                self._allow(method, "GET")
                return Response(200, {"ports": service.ports_view()})
            case ["v1", "ports", port]:
                self._allow(method, "GET", "PUT")
                return self._port(method, port, body, asker)
            case ["v1", "tenants", tenant, "vms", vm, "destinations", *to, "rate"] if to:
                self._allow(method, "GET", "PUT")
                owner = service.vm(tenant, vm)
                destination = service.destination(owner, _network("/".join(to)))
                names = {
                    "tenant": tenant,
                    "vm": vm,
                    "destination": config.network_text(destination.network),
                }
                return self._rate(method, destination, names, body, asker)
            case ["v1", "tenants", tenant, "destinations", *to, "rate"] if to:
                self._allow(method, "GET", "PUT")
                shared = service.destination(service.tenant(tenant), _network("/".join(to)))
                names = {
                    "tenant": tenant,
                    "destination": config.network_text(shared.network),
                }
                return self._rate(method, shared, names, body, asker)
        raise RequestError(
            404,
            "no such path",
            "path",
            path,
            [
                "/v1/status",
                "/v1/meters",
                "/v1/reload",
                "/v1/apply",
                "/v1/export",
                "/v1/history",
                "/v1/history/{number}/rollback",
                "/v1/changes/{number}",
                "/v1/closed",
                "/v1/switches/{switch}",
                "/v1/switches/{switch}/adopt",
                "/v1/ports",
                "/v1/ports/{port}",
                "/v1/tenants",
                "/v1/tenants/{tenant}",
                "/v1/tenants/{tenant}/rate",
                "/v1/tenants/{tenant}/vms/{vm}",
                "/v1/tenants/{tenant}/vms/{vm}/rate",
                "/v1/tenants/{tenant}/vms/{vm}/share",
                "/v1/tenants/{tenant}/vms/{vm}/destinations/{destination}/rate",
                "/v1/tenants/{tenant}/destinations/{destination}/rate",
            ],
        )

    @staticmethod
    def _allow(method: str, *allowed: str) -> None:
        if method == "HEAD":
            method = "GET"
        if method not in allowed:
            raise RequestError(
                405,
                "method not allowed here",
                "method",
                method,
                list(allowed),
                {"Allow": ", ".join(allowed)},
            )

    def _rate(
        self,
        method: str,
        limit: Limit,
        names: dict[str, str],
        body: bytes,
        asker: _Asker,
    ) -> Response:
        if method != "PUT":
            return Response(200, {**names, **self.service.limit_view(limit)})
        if isinstance(limit, Vm) and limit.share is not None:
            raise RequestError(
                400,
                f"{limit.key} shares port {limit.share.port} and has no rate of its own",
                "rate",
                body[:60].decode("utf-8", "replace"),
                f"PUT /v1/tenants/{limit.tenant}/vms/{limit.name}/share with {SHARE_KEYS}",
            )
        rate = parse_rate_body(body)
        if asker.ceiling and limit.rate is not None and (rate is None or rate > limit.rate):
            most = units.format_rate(limit.rate)
            raise RequestError(
                403, "is above what you have", "rate", units.format_rate(rate), f"at most {most}"
            )
        started = self._clock()
        change = self.service.set_rate(limit, rate, asker.who)
        answer: dict[str, Any] = {
            **names,
            "meter_id": change.meter,
            "old_rate": units.format_rate(change.old),
            "old_rate_bps": change.old,
            "new_rate": units.format_rate(change.new),
            "new_rate_bps": change.new,
        }
        wanted = Wanted({change.meter}, lambda: self.service.rates.get(limit.key, -1) == rate)
        missing = "has this VM; it will get this rate"
        return self._confirm(answer, change.waiters, started, missing, wanted, asker)

    def _confirm(
        self,
        answer: dict[str, Any],
        waiters: dict[str, Waiter],
        started: float,
        missing: str,
        wanted: Wanted,
        asker: _Asker,
    ) -> Response:
        """Wait for the switches, unless who asks will do so later, and answer what they say.

        What is not in force stays wanted, and has a place to ask at.
        """
        number = self.changes.add(answer, waiters, wanted)
        path = f"/v1/changes/{number}"
        if asker.later and waiters:
            headers = {"Location": path, "Preference-Applied": "respond-async"}
            return Response(202, {**answer, "applied": False, "change": path}, headers)
        deadline = started + CONFIRM_TIMEOUT
        confirmed = True
        for waiter in waiters.values():
            confirmed &= bool(waiter.event.wait(max(deadline - self._clock(), 0)))
        switches = {
            name: {"applied": waiter.applied, "errors": list(waiter.errors)}
            for name, waiter in waiters.items()
        }
        applied = bool(switches) and all(item["applied"] for item in switches.values())
        answer |= {
            "applied": applied,
            "elapsed_ms": round((self._clock() - started) * 1000, 3),
            "switches": switches,
        }
        if applied:
            return Response(200, answer)
        if not switches:
            status, reason = 503, f"no connected switch {missing} with it"
        elif confirmed:
            status, reason = 502, "a switch reported an error"
        else:
            status, reason = 504, "a switch has not confirmed yet"
        late = [name for name, item in switches.items() if not item["applied"]]
        errors = [error for item in switches.values() for error in item["errors"]]
        answer |= {
            "change": path,
            "reason": reason,
            "error": {
                "field": "switch",
                "value": ", ".join(late) or None,
                "allowed": f"what was asked for stays wanted: GET {path}",
                "message": "; ".join([f"not in force: {reason}", *errors]),
            },
        }
        if asker.later:
            # There is no switch to wait for: the answer is known already.
            return Response(202, answer, {"Location": path})
        return Response(status, answer, {"Location": path})

    def _share(self, method: str, vm: Vm, body: bytes, asker: _Asker) -> Response:
        """Answer about what a VM has of a port."""
        if vm.share is None:
            raise RequestError(
                404 if method != "PUT" else 400,
                f"{vm.key} has a rate of its own and shares no port",
                "vm",
                vm.name,
                "VMs with shares, min-rate, max-rate or weight in the file",
            )
        names = {"tenant": vm.tenant, "vm": vm.name}
        if method != "PUT":
            return Response(200, {**names, **self.service.share_view(vm)})
        values = parse_share_body(body)
        started = self._clock()
        change = self.service.set_share(vm, **values, who=asker.who)
        old, new = (
            {
                "min-rate": units.format_rate(share.min_rate),
                "max-rate": units.format_rate(share.max_rate),
                "weight": share.weight,
            }
            for share in (change.old, change.new)
        )
        answer: dict[str, Any] = {**names, "port": vm.share.port, "old": old, "new": new}
        wanted = Wanted(
            {self.service.numbers.meters[vm.key]},
            lambda: self.service.shares.get(vm.key) == change.new,
        )
        missing = "has this VM; it will get this"
        return self._confirm(answer, change.waiters, started, missing, wanted, asker)

    def _port(self, method: str, name: str, body: bytes, asker: _Asker) -> Response:
        """Answer about a shared port."""
        if method != "PUT":
            return Response(200, {"port": name, **self.service.port_view(name)})
        self.service.port_rate(name)
        data = _object(body, ("max-rate",), "max-rate")
        rate = _value(data, "max-rate", units.parse_rate)
        if rate is None:
            raise RequestError(400, "max-rate is missing", "max-rate", None, units.RATE_ALLOWED)
        started = self._clock()
        change = self.service.set_port_rate(name, rate, asker.who)
        answer: dict[str, Any] = {
            "port": name,
            "old_max-rate": units.format_rate(change.old),
            "new_max-rate": units.format_rate(change.new),
        }
        missing = "has a VM that shares this port; it will have this rate"
        numbers = {
            self.service.numbers.meters[key]
            for key, share in self.service.shares.items()
            if share.port == name
        }
        wanted = Wanted(numbers, lambda: self.service.port_rates.get(name) == rate)
        return self._confirm(answer, change.waiters, started, missing, wanted, asker)

    def _closed(self, method: str, body: bytes, asker: _Asker) -> Response:
        """Show what is closed, or let one of it be an unknown source like any other."""
        if method == "DELETE":
            name = _object(body, ("closed",), "closed").get("closed")
            known = [str(identity) for identity in self.service.closed]
            if name not in known:
                raise RequestError(404, "is not closed", "closed", name, known)
            self.service.release(self.service.closed[known.index(name)], asker.who)
        return Response(200, {"closed": [str(identity) for identity in self.service.closed]})

    def _reload(self, body: bytes, asker: _Asker) -> Response:
        force = _flags(body, "force")["force"] if body else False
        return Response(200, self.service.reload(force, asker.who))

    def _apply(self, body: bytes, asker: _Asker) -> Response:
        """Make what a file says the truth, or say what that would change."""
        data = _object(body, ("file", "dry_run", "force"), APPLY_KEYS)
        text, flags = data.pop("file", None), _truths(data, "dry_run", "force")
        if not isinstance(text, str):
            raise RequestError(400, "is missing, or no text", "file", text, APPLY_KEYS)
        parsed = config.parse(text)
        done = self.service.apply(parsed, asker.who, flags["dry_run"], flags["force"])
        return self._applied(done, flags["dry_run"])

    def _rollback(self, number: str, body: bytes, asker: _Asker) -> Response:
        flags = _flags(body, "dry_run") if body else {"dry_run": False}
        if not number.isdecimal() or len(number) > 18:
            raise RequestError(400, "not a number", "change", number, "a number of the history")
        done = self.service.rollback(int(number), asker.who, flags["dry_run"])
        return self._applied(done, flags["dry_run"])

    def _applied(self, done: Applied, dry_run: bool) -> Response:
        """Say what a file or going back has changed, and where that is in force."""
        deadline = self._clock() + CONFIRM_TIMEOUT
        for waiter in done.waiters.values():
            waiter.event.wait(max(deadline - self._clock(), 0))
        switches = {
            name: {"applied": waiter.applied, "errors": list(waiter.errors)}
            for name, waiter in done.waiters.items()
        }
        stored = bool(done.changes) and not dry_run
        answer: dict[str, Any] = {"changes": done.changes, "stored": stored, "switches": switches}
        late = [name for name, item in switches.items() if not item["applied"]]
        if not late:
            return Response(200, answer)
        errors = [error for item in switches.values() for error in item["errors"]]
        answer["error"] = {
            "field": "switch",
            "value": ", ".join(late),
            "allowed": "it is stored, and will be in force: GET /v1/status",
            "message": "; ".join(["not in force everywhere", *errors]),
        }
        return Response(502 if errors else 504, answer)


@dataclass(frozen=True)
class _Asker:
    who: str
    later: bool
    """Whether it wants to be answered before switches are."""
    ceiling: bool = False
    """Whether it may not go above what was applied."""


def too_large(most: int = MAX_BODY) -> RequestError:
    """Give the refusal of a body that is too large."""
    return RequestError(413, "the body is too large", "body", None, f"at most {most} bytes")


def prefers_async(headers: Mapping[str, str]) -> bool:
    """Whether a request has ``Prefer: respond-async`` (RFC 7240)."""
    preferences = headers.get("Prefer", "").split(",")
    return "respond-async" in (item.split(";")[0].strip().lower() for item in preferences)


def _datapath_id(text: str) -> int:
    if not re.fullmatch(r"[0-9A-Fa-f]{16}", text):
        raise RequestError(
            400, "not a datapath id", "switch", text, "16 hexadecimal digits, as in /v1/status"
        )
    return int(text, 16)


def _network(text: str) -> config.Network:
    try:
        return config.parse_network(text)
    except units.UnitError as error:
        raise RequestError(400, error.message, "destination", text, error.allowed) from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is given twice")
    return result


def _no_constants(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _object(body: bytes, known: tuple[str, ...], keys: str) -> dict[str, Any]:
    """Read a body that is a JSON object with no keys but the `known`; `keys` says which."""
    try:
        data = json.loads(
            body.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constants
        )
    except (ValueError, RecursionError) as error:
        start = body[:60].decode("utf-8", "replace")
        raise RequestError(
            400, f"the body is not JSON: {error}", "body", start, f"an object with {keys}"
        ) from None
    if not isinstance(data, dict):
        raise RequestError(400, "the body is not an object", "body", data, f"an object with {keys}")
    for key in data:
        if key not in known:
            raise RequestError(400, "unknown key", key, data[key], keys)
    return data


def _value(data: dict[str, Any], key: str, parse: Callable[[object], int]) -> int | None:
    """Read one value of a body, None if it is not there."""
    if key not in data:
        return None
    try:
        return parse(data[key])
    except units.UnitError as error:
        raise RequestError(400, error.message, key, data[key], error.allowed) from None


def _flags(body: bytes, *names: str) -> dict[str, bool]:
    """Read a body that has truth values only."""
    return _truths(_object(body, names, ", ".join(names)), *names)


def _truths(data: dict[str, Any], *names: str) -> dict[str, bool]:
    for name in names:
        if not isinstance(data.get(name, False), bool):
            raise RequestError(400, "not a truth value", name, data[name], "true or false")
    return {name: data.get(name, False) for name in names}


def parse_share_body(body: bytes) -> dict[str, int | None]:
    """Give what a PUT of a share asks for, None for what it does not name.

    Raises RequestError.
    """
    data = _object(body, ("min-rate", "max-rate", "weight"), SHARE_KEYS)
    if not data:
        raise RequestError(400, "nothing is to be changed", "body", data, SHARE_KEYS)
    return {
        "min_rate": _value(data, "min-rate", config.parse_min_rate),
        "max_rate": _value(data, "max-rate", units.parse_rate),
        "weight": _value(data, "weight", config.parse_weight),
    }


def parse_rate_body(body: bytes) -> int | None:
    """Give the rate in bit/s that a PUT's body asks for, or None for unlimited.

    Raises RequestError.
    """
    data = _object(body, ("rate", "rate_bps"), RATE_KEYS)
    if len(data) != 1:
        message = "rate is missing" if not data else "rate and rate_bps are both given"
        raise RequestError(400, message, "rate", None, f"either {RATE_KEYS}")
    ((key, value),) = data.items()
    try:
        if key == "rate_bps":
            if isinstance(value, str) and not value.isdecimal():
                raise units.UnitError("not an integer", units.RATE_ALLOWED)
            return units.parse_rate(value)
        return config.parse_rate_or_unlimited(value) or None
    except units.UnitError as error:
        raise RequestError(400, error.message, key, value, error.allowed) from None
