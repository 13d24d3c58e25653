"""HTTP requests to service calls, and what became of them to JSON.

`Api.handle` takes method, path and body and gives status and JSON, without a web
framework; ``ryu_rates.py`` puts it behind Ryu's.  The paths are in
docs/controller.md.  A request that is refused has changed nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fbrates import config, units
from fbrates.config import Destination, Vm
from fbrates.loader import InvalidConfig
from fbrates.service import Service, UnknownName

MAX_BODY = 65536
CONFIRM_TIMEOUT = 2.0
"""Seconds to wait for the switches' barrier replies."""

RATE_KEYS = 'rate (such as "50Mbps") or rate_bps (an integer of bit/s)'


@dataclass
class Response:
    """An answer: HTTP status, JSON body, further headers."""

    status: int
    body: Any
    headers: dict[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Give the body as sent."""
        return json.dumps(self.body, indent=2).encode() + b"\n"


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
        super().__init__(message)
        self.response = Response(
            status,
            {
                "error": {
                    "field": field_name,
                    "value": value,
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
        self._clock = clock

    def handle(self, method: str, path: str, body: bytes = b"") -> Response:
        """Answer a request; `path` is percent-decoded and without the query."""
        try:
            if len(body) > MAX_BODY:
                raise too_large()
            return self._route(method, path, body)
        except RequestError as error:
            return error.response
        except UnknownName as error:
            return Response(
                404,
                {
                    "error": {
                        "field": error.field,
                        "value": error.value,
                        "allowed": error.known,
                        "message": str(error),
                    }
                },
            )

    def _route(self, method: str, path: str, body: bytes) -> Response:
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
                return self._reload()
            case ["v1", "tenants"]:
                self._allow(method, "GET")
                return Response(200, {"tenants": service.tenants_view()})
            case ["v1", "tenants", tenant]:
                self._allow(method, "GET")
                return Response(200, service.tenant_view(service.tenant(tenant)))
            case ["v1", "tenants", tenant, "vms"]:
                self._allow(method, "GET")
                return Response(200, service.tenant_view(service.tenant(tenant))["vms"])
            case ["v1", "tenants", tenant, "vms", vm]:
                self._allow(method, "GET")
                return Response(200, service.vm_view(service.vm(tenant, vm)))
            case ["v1", "tenants", tenant, "vms", vm, "rate"]:
                self._allow(method, "GET", "PUT")
                names = {"tenant": tenant, "vm": vm}
                return self._rate(method, service.vm(tenant, vm), names, body)
            case ["v1", "tenants", tenant, "vms", vm, "destinations", *to, "rate"] if to:
                self._allow(method, "GET", "PUT")
                owner = service.vm(tenant, vm)
                destination = service.destination(owner, _network("/".join(to)))
                names = {
                    "tenant": tenant,
                    "vm": vm,
                    "destination": config.network_text(destination.network),
                }
                return self._rate(method, destination, names, body)
            case ["v1", "tenants", tenant, "destinations", *to, "rate"] if to:
                self._allow(method, "GET", "PUT")
                shared = service.destination(service.tenant(tenant), _network("/".join(to)))
                names = {
                    "tenant": tenant,
                    "destination": config.network_text(shared.network),
                }
                return self._rate(method, shared, names, body)
        raise RequestError(
            404,
            "no such path",
            "path",
            path,
            [
                "/v1/status",
                "/v1/meters",
                "/v1/reload",
                "/v1/tenants",
                "/v1/tenants/{tenant}",
                "/v1/tenants/{tenant}/vms/{vm}",
                "/v1/tenants/{tenant}/vms/{vm}/rate",
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
        self, method: str, limit: Vm | Destination, names: dict[str, str], body: bytes
    ) -> Response:
        if method != "PUT":
            return Response(200, {**names, **self.service.limit_view(limit)})
        rate = parse_rate_body(body)
        started = self._clock()
        change = self.service.set_rate(limit, rate)
        deadline = started + CONFIRM_TIMEOUT
        confirmed = True
        for waiter in change.waiters.values():
            confirmed &= bool(waiter.event.wait(max(deadline - self._clock(), 0)))
        switches = {
            name: {"applied": waiter.applied, "errors": list(waiter.errors)}
            for name, waiter in change.waiters.items()
        }
        applied = bool(switches) and all(item["applied"] for item in switches.values())
        answer: dict[str, Any] = {
            **names,
            "meter_id": change.meter,
            "old_rate": units.format_rate(change.old),
            "old_rate_bps": change.old,
            "new_rate": units.format_rate(change.new),
            "new_rate_bps": change.new,
            "applied": applied,
            "elapsed_ms": round((self._clock() - started) * 1000, 3),
            "switches": switches,
        }
        if not switches:
            answer["reason"] = "no connected switch has this VM; it will get this rate with it"
        elif not applied:
            answer["reason"] = (
                "a switch reported an error" if confirmed else "a switch has not confirmed yet"
            )
        return Response(200 if applied else 202, answer)

    def _reload(self) -> Response:
        try:
            return Response(200, self.service.reload())
        except InvalidConfig as error:
            problems = [problem.as_dict() for problem in error.problems]
            return Response(400, {"error": problems[0], "errors": problems})


def too_large() -> RequestError:
    """Give the refusal of a body that is too large."""
    return RequestError(413, "the body is too large", "body", None, f"at most {MAX_BODY} bytes")


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


def parse_rate_body(body: bytes) -> int | None:
    """Give the rate in bit/s that a PUT's body asks for, or None for unlimited.

    Raises RequestError.
    """
    try:
        data = json.loads(
            body.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constants
        )
    except (ValueError, RecursionError) as error:
        shown = body[:60].decode("utf-8", "replace")
        raise RequestError(
            400, f"the body is not JSON: {error}", "body", shown, f"an object with {RATE_KEYS}"
        ) from None
    if not isinstance(data, dict):
        raise RequestError(
            400, "the body is not an object", "body", data, f"an object with {RATE_KEYS}"
        )
    for key in data:
        if key not in ("rate", "rate_bps"):
            raise RequestError(400, "unknown key", key, data[key], RATE_KEYS)
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
