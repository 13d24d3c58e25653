"""HTTP requests to service calls, and what became of them to JSON.

`Api.handle` takes method, path and body and gives status and JSON, without a web
framework; ``http_front.py`` puts it behind one.  The paths are in `fbrates.routes` and
docs/controller.md.  A request that is refused has changed nothing.
"""

from __future__ import annotations

import re
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fbrates import bodies, config, loader, openapi, resources, routes, units
from fbrates.answers import RequestError, Response
from fbrates.changes import Changes, Wanted
from fbrates.config import Limit, ShareError, Vm
from fbrates.loader import InvalidConfig
from fbrates.resources import Ref, Spec, UnknownName
from fbrates.routes import Operation
from fbrates.service import Applied, Edited, Service
from fbrates.store import StoreDoubt, StoreError
from fbrates.sync import Waiter

__all__ = ["Api", "RequestError", "Response"]

MAX_BODY = 65536
MAX_FILE = 2 * loader.MAX_BYTES
"""Bytes of a body that has a file of tenants in it, or a tenant."""
CONFIRM_TIMEOUT = 2.0
"""Seconds to wait for the switches' barrier replies."""
MAX_PAGE = 1000


@dataclass(frozen=True)
class Request:
    """What is asked, by whom, and how."""

    method: str
    path: str
    names: dict[str, str]
    """Those in the path."""
    operation: Operation
    body: bytes
    headers: Mapping[str, str]
    """Looks names up in any case."""
    query: dict[str, str]
    who: str
    ceiling: bool
    """Whether no rate may go above what was applied."""

    @property
    def later(self) -> bool:
        """Whether to answer before switches do: ``Prefer: respond-async`` (RFC 7240)."""
        preferences = self.headers.get("Prefer", "").split(",")
        return "respond-async" in (item.split(";")[0].strip().lower() for item in preferences)

    def expect(self, spec: Any) -> None:
        """Raise RequestError (412) if what is wanted now is not what who asks has seen."""
        now = None if spec is None else resources.tag(spec)
        for header, wanted in (("If-Match", True), ("If-None-Match", False)):
            if header not in self.headers:
                continue
            given = self.headers[header]
            tags = [item.strip() for item in given.split(",")]
            if (now is not None and ("*" in tags or now in tags)) != wanted:
                found = "there is none" if now is None else now
                message = "it is not as expected; nothing is changed"
                raise RequestError(412, message, header, given, f"now: {found}")

    def page(self, items: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Give the part of `items` that is asked for, in order of their names, and headers."""
        text, after = self.query.get("limit"), self.query.get("after")
        if text is None and after is None:
            return dict(items), {}
        names = sorted(name for name in items if after is None or name > after)
        limit = _limit(text)
        headers = {}
        if len(names) > limit:
            query = urllib.parse.urlencode({"limit": limit, "after": names[limit - 1]})
            headers["Link"] = f'<{urllib.parse.quote(self.path)}?{query}>; rel="next"'
        return {name: items[name] for name in names[:limit]}, headers


def _limit(text: str | None) -> int:
    if text is None:
        return MAX_PAGE
    if not re.fullmatch("[0-9]{1,4}", text, re.ASCII) or not 1 <= int(text) <= MAX_PAGE:
        raise RequestError(400, "not a size of a page", "limit", text, f"1 to {MAX_PAGE}")
    return int(text)


class Api:
    """The REST interface of a Service.  Each operation of `routes` is a method."""

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
        query: str = "",
    ) -> Response:
        """Answer a request; `path` is percent-decoded, `query` is not.

        `headers` looks names up in any case; `who` asks, for the history, and may
        with `ceiling` set no rate above what was applied.
        """
        try:
            if len(body) > (most := most_bytes(path)):
                raise too_large(most)
            request = self._request(method, path, body, headers or {}, who, ceiling, query)
            answer: Response = getattr(self, request.operation.name)(request)
            return answer
        except StoreError as error:
            # Nothing has changed, or that is not known: see fbrates.store.StoreDoubt.
            doubt = isinstance(error, StoreDoubt)
            said = "it is not known whether this is stored" if doubt else "not stored"
            return RequestError(503, f"{said}: {error}", "database", None, "try again").response
        except InvalidConfig as error:
            return _invalid(error)
        except RequestError as error:
            return error.response
        except ShareError as error:
            value, allowed = error.value, error.allowed
            if error.key is not None:
                allowed += f" (this is about {error.key})"
            return RequestError(400, error.message, error.field, value, allowed).response
        except UnknownName as error:
            return RequestError(404, str(error), error.field, error.value, error.known).response

    @staticmethod
    def _request(
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        who: str,
        ceiling: bool,
        query: str,
    ) -> Request:
        """Find out what is asked; raises RequestError."""
        path = "/" + path.strip("/")
        found = routes.find(path)
        if found is None:
            known = [route.template for route in routes.ROUTES]
            raise RequestError(404, "no such path", "path", path, known)
        route, names = found
        if method == "HEAD":
            method = "GET"
        if method not in route.methods:
            allowed = list(route.methods)
            headers = {"Allow": ", ".join(allowed)}
            raise RequestError(405, "method not allowed here", "method", method, allowed, headers)
        operation = route.methods[method]
        known = ", ".join(operation.query) or "no query"
        try:
            pairs = urllib.parse.parse_qsl(query, keep_blank_values=True, max_num_fields=16)
        except ValueError as error:
            raise RequestError(400, f"not a query: {error}", "query", query, known) from None
        for key, value in pairs:
            if key not in operation.query:
                raise RequestError(400, "unknown key of a query", key, value, known)
        if len(dict(pairs)) != len(pairs):
            raise RequestError(400, "a key is given twice", "query", query, known)
        return Request(method, path, names, operation, body, headers, dict(pairs), who, ceiling)

    # The whole.

    def openapi(self, _request: Request) -> Response:
        """Describe all of this."""
        return Response(200, openapi.document())

    def status(self, _request: Request) -> Response:
        """Show how it all is."""
        return Response(200, self.service.status_view())

    def meters(self, _request: Request) -> Response:
        """Show meters."""
        return Response(200, self.service.meters_view())

    def reload(self, request: Request) -> Response:
        """Read the file again."""
        force = bodies.read(bodies.ForceBody, request.body).force if request.body else False
        return Response(200, self.service.reload(force, request.who))

    def apply(self, request: Request) -> Response:
        """Make what a file says the truth, or say what that would change."""
        body = bodies.read(bodies.ApplyBody, request.body)
        parsed = config.parse(body.file)
        done = self.service.apply(parsed, request.who, body.dry_run, body.force)
        return self._applied(done, body.dry_run)

    def rollback(self, request: Request) -> Response:
        """Go back."""
        number = request.names["number"]
        dry_run = bodies.read(bodies.DryRunBody, request.body).dry_run if request.body else False
        if not number.isdecimal() or len(number) > 18:
            raise RequestError(400, "not a number", "change", number, "a number of the history")
        return self._applied(self.service.rollback(int(number), request.who, dry_run), dry_run)

    def export(self, _request: Request) -> Response:
        """Give a file."""
        return Response(200, {"file": self.service.export_text()})

    def history(self, request: Request) -> Response:
        """Show changes."""
        after, text = request.query.get("after", "0"), request.query.get("limit")
        if not after.isdecimal() or len(after) > 18:
            raise RequestError(400, "not a number", "after", after, "a number of the history")
        entries = [entry for entry in self.service.history() if entry.number > int(after)]
        headers = {}
        if text is not None and len(entries) > (limit := _limit(text)):
            entries = entries[:limit]
            query = urllib.parse.urlencode({"limit": limit, "after": entries[-1].number})
            headers["Link"] = f'</v1/history?{query}>; rel="next"'
        return Response(200, {"history": [entry.view() for entry in entries]}, headers)

    def change(self, request: Request) -> Response:
        """Show what became of a change."""
        return Response(200, self.changes.view(request.names["number"]))

    def adopt(self, request: Request) -> Response:
        """Take a switch's meters for ours."""
        name = request.names["switch"]
        self.service.adopt(_datapath_id(name), request.who)
        return Response(200, {"switch": name, "adopting": True})

    def forget(self, request: Request) -> Response:
        """Forget a switch."""
        name = request.names["switch"]
        try:
            self.service.forget(_datapath_id(name), request.who)
        except ValueError as error:
            allowed = "switches that are not connected"
            raise RequestError(409, str(error), "switch", name, allowed) from None
        return Response(200, {"switch": name, "forgotten": True})

    def closed(self, _request: Request) -> Response:
        """Show what is closed."""
        return Response(200, {"closed": [str(identity) for identity in self.service.closed]})

    def release(self, request: Request) -> Response:
        """Let something closed be an unknown source like any other."""
        name = bodies.read(bodies.ClosedBody, request.body).closed
        known = [str(identity) for identity in self.service.closed]
        if name not in known:
            raise RequestError(404, "is not closed", "closed", name, known)
        self.service.release(self.service.closed[known.index(name)], request.who)
        return self.closed(request)

    # Tenants, VMs, destinations and ports.

    def tenants(self, request: Request) -> Response:
        """Show all tenants."""
        those, headers = request.page(self.service.config.tenants)
        return Response(
            200,
            {"tenants": {name: self.service.tenant_view(item) for name, item in those.items()}},
            headers,
        )

    def vms(self, request: Request) -> Response:
        """Show a tenant's VMs."""
        those, headers = request.page(self.service.tenant(request.names["tenant"]).vms)
        return Response(
            200, {name: self.service.vm_view(vm) for name, vm in those.items()}, headers
        )

    def ports(self, request: Request) -> Response:
        """Show shared ports."""
        those, headers = request.page(self.service.port_rates)
        return Response(
            200, {"ports": {name: self.service.port_view(name) for name in those}}, headers
        )

    def get_thing(self, request: Request) -> Response:
        """Show a tenant, VM or destination."""
        ref, names = _ref(request.names)
        spec = self.service.spec(ref)
        if spec is None:
            raise UnknownName(ref.kind, _name(ref), self._known(ref))
        match ref.kind:
            case "tenant":
                view = self.service.tenant_view(self.service.tenant(ref.tenant))
            case "vm":
                view = self.service.vm_view(self.service.vm(ref.tenant, ref.vm))
            case _:
                view = {**names, **self.service.limit_view(self._limit_of(request)[0])}
        return Response(200, {**view, "spec": spec}, {"ETag": resources.tag(spec)})

    def _known(self, ref: Ref) -> list[str]:
        """Give the names of those of the same kind that are there."""
        service = self.service
        match ref.kind:
            case "port":
                return list(service.port_rates)
            case "tenant":
                return list(service.config.tenants)
            case "vm":
                return list(service.tenant(ref.tenant).vms)
        if ref.vm:
            return list(service.vm(ref.tenant, ref.vm).destinations)
        return list(service.tenant(ref.tenant).destinations)

    def put_thing(self, request: Request) -> Response:
        """Make a tenant, VM, destination or port, or make it another."""
        ref, _ = _ref(request.names)
        body = request.operation.body
        assert body is not None
        spec = bodies.read_object(request.body, bodies.keys_of(body))
        if "to" in spec and ref.kind == "destination":
            raise RequestError(400, "unknown key", "to", spec["to"], bodies.keys_of(body))
        force = request.query.get("force", "false")
        if force not in ("true", "false"):
            raise RequestError(400, "not a truth value", "force", force, "true or false")
        done = self.service.edit(ref, spec, request.who, request.expect, force == "true")
        return self._edited(ref, done, request)

    def delete_thing(self, request: Request) -> Response:
        """Delete a tenant, VM, destination or port."""
        ref, _ = _ref(request.names)
        try:
            done = self.service.edit(ref, None, request.who, request.expect)
        except InvalidConfig as error:
            # Others need it.
            return _invalid(error, 409)
        except UnknownName as error:
            if error.field != ref.kind:
                raise
            raise UnknownName(ref.kind, _name(ref), self._known(ref)) from None
        return self._edited(ref, done, request)

    def _edited(self, ref: Ref, done: Edited, request: Request) -> Response:
        """Wait for the switches, unless who asks will do so later, and say what they say."""
        started = self._clock()
        _, names = _ref(request.names)
        made = done.before is None and done.after is not None
        switches = self.service.switches.values()
        waiters = {
            switch.name: done.waiters[switch.name]
            for switch in switches
            if switch.name in done.waiters
            and (done.after is None or switch.may_concern(done.numbers))
        }

        def current() -> bool:
            try:
                return self.service.spec(ref) == done.after
            except UnknownName:
                return done.after is None

        answer: dict[str, Any] = {**names, "spec": done.after, "stored": True}
        wanted = Wanted(done.numbers, current, gone=done.after is None)
        place = f"/v1/changes/{self.changes.add(answer, waiters, wanted)}"
        headers = {} if done.after is None else {"ETag": resources.tag(done.after)}
        if request.later and waiters:
            headers |= {"Location": place, "Preference-Applied": "respond-async"}
            return Response(202, {**answer, "applied": False, "change": place}, headers)
        said, late, errors = self._wait(waiters, started)
        gone = done.after is None
        applied = not late and (gone or not done.numbers or bool(waiters))
        answer |= {
            "applied": applied,
            "elapsed_ms": round((self._clock() - started) * 1000, 3),
            "switches": said,
            "not_connected": self.service.absent(),
        }
        if not late:
            if not applied:
                answer |= {"change": place, "reason": "no connected switch has it"}
            if made:
                headers["Location"] = urllib.parse.quote(request.path)
            return Response(201 if made else 200, answer, headers)
        return _not_in_force(answer, place, late, errors, headers)

    def _wait(
        self, waiters: Mapping[str, Waiter], started: float
    ) -> tuple[dict[str, Any], list[str], list[str]]:
        """Wait for switches; give what they said, where it is not in force, and all errors."""
        deadline = started + CONFIRM_TIMEOUT
        for waiter in waiters.values():
            waiter.event.wait(max(deadline - self._clock(), 0))
        said = {
            name: {"applied": waiter.applied, "errors": list(waiter.errors)}
            for name, waiter in waiters.items()
        }
        late = [name for name, item in said.items() if not item["applied"]]
        return said, late, [error for item in said.values() for error in item["errors"]]

    # Rates.

    def _limit_of(self, request: Request) -> tuple[Limit, dict[str, str]]:
        """Give what has the rate that is asked about, and the names of it."""
        ref, names = _ref(request.names)
        service = self.service
        if ref.to is None:
            if ref.vm or "vm" in request.names:
                return service.vm(ref.tenant, ref.vm), names
            return service.total(ref.tenant), names
        owner: Any = service.tenant(ref.tenant)
        if "vm" in request.names:
            owner = service.vm(ref.tenant, ref.vm)
        return service.destination(owner, ref.to), names

    def get_rate(self, request: Request) -> Response:
        """Show a rate."""
        limit, names = self._limit_of(request)
        view = {**names, **self.service.limit_view(limit)}
        return Response(200, view, {"ETag": resources.tag(self._rate_spec(limit))})

    def _rate_spec(self, limit: Limit) -> Spec:
        if isinstance(limit, Vm) and limit.share is not None:
            return _share_spec(self.service.shares[limit.key])
        return {"rate": units.format_rate(self.service.rates[limit.key])}

    def put_rate(self, request: Request) -> Response:
        """Change a rate."""
        limit, names = self._limit_of(request)
        if isinstance(limit, Vm) and limit.share is not None:
            raise RequestError(
                400,
                f"{limit.key} shares port {limit.share.port} and has no rate of its own",
                "rate",
                request.body[:60].decode("utf-8", "replace"),
                f"PUT /v1/tenants/{limit.tenant}/vms/{limit.name}/share with {bodies.SHARE_KEYS}",
            )
        rate = bodies.read(bodies.RateBody, request.body).bps()
        if request.ceiling and limit.rate is not None and (rate is None or rate > limit.rate):
            most = units.format_rate(limit.rate)
            raise RequestError(
                403, "is above what you have", "rate", units.format_rate(rate), f"at most {most}"
            )
        started = self._clock()
        change = self.service.set_rate(
            limit, rate, request.who, lambda: request.expect(self._rate_spec(limit))
        )
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
        tag = resources.tag({"rate": units.format_rate(rate)})
        return self._confirm(answer, change.waiters, started, missing, wanted, request, tag)

    def get_share(self, request: Request) -> Response:
        """Show what a VM has of a port."""
        vm, names = self._sharer(request, 404)
        tag = resources.tag(_share_spec(self.service.shares[vm.key]))
        return Response(200, {**names, **self.service.share_view(vm)}, {"ETag": tag})

    def _sharer(self, request: Request, status: int) -> tuple[Vm, dict[str, str]]:
        _, names = _ref(request.names)
        vm = self.service.vm(request.names["tenant"], request.names["vm"])
        if vm.share is None:
            raise RequestError(
                status,
                f"{vm.key} has a rate of its own and shares no port",
                "vm",
                vm.name,
                "VMs with shares, min-rate, max-rate or weight in the file",
            )
        return vm, names

    def put_share(self, request: Request) -> Response:
        """Change what a VM may have of a port."""
        vm, names = self._sharer(request, 400)
        values = bodies.read(bodies.ShareBody, request.body).given()
        started = self._clock()
        change = self.service.set_share(
            vm,
            **values,
            who=request.who,
            expect=lambda: request.expect(_share_spec(self.service.shares[vm.key])),
        )
        old, new = (_share_spec(share) for share in (change.old, change.new))
        assert vm.share is not None
        answer: dict[str, Any] = {**names, "port": vm.share.port, "old": old, "new": new}
        wanted = Wanted(
            {self.service.numbers.meters[vm.key]},
            lambda: self.service.shares.get(vm.key) == change.new,
        )
        missing = "has this VM; it will get this"
        return self._confirm(
            answer, change.waiters, started, missing, wanted, request, resources.tag(new)
        )

    def get_port(self, request: Request) -> Response:
        """Show a shared port."""
        name = request.names["port"]
        rate = units.format_rate(self.service.port_rate(name))
        view = {"port": name, **self.service.port_view(name), "spec": {"max-rate": rate}}
        return Response(200, view, {"ETag": resources.tag({"max-rate": rate})})

    def put_port(self, request: Request) -> Response:
        """Change a shared port, or make one."""
        name = request.names["port"]
        if name not in self.service.port_rates:
            return self.put_thing(request)
        rate = bodies.read(config.PortSpec, request.body).max_rate
        started = self._clock()

        def expect() -> None:
            now = self.service.port_rates.get(name)
            request.expect(None if now is None else {"max-rate": units.format_rate(now)})

        change = self.service.set_port_rate(name, rate, request.who, expect)
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
        tag = resources.tag({"max-rate": units.format_rate(rate)})
        if not numbers:
            # Nobody shares it: there is nothing that a switch could have to do.
            return Response(200, {**answer, "applied": True, "switches": {}}, {"ETag": tag})
        return self._confirm(answer, change.waiters, started, missing, wanted, request, tag)

    def _confirm(
        self,
        answer: dict[str, Any],
        waiters: dict[str, Waiter],
        started: float,
        missing: str,
        wanted: Wanted,
        request: Request,
        tag: str,
    ) -> Response:
        """Wait for the switches, unless who asks will do so later, and answer what they say.

        What is not in force stays wanted, and has a place to ask at.
        """
        place = f"/v1/changes/{self.changes.add(answer, waiters, wanted)}"
        headers = {"ETag": tag}
        if request.later and waiters:
            headers |= {"Location": place, "Preference-Applied": "respond-async"}
            return Response(202, {**answer, "applied": False, "change": place}, headers)
        switches, late, errors = self._wait(waiters, started)
        answer |= {
            "applied": bool(switches) and not late,
            "elapsed_ms": round((self._clock() - started) * 1000, 3),
            "switches": switches,
        }
        if answer["applied"]:
            return Response(200, answer, headers)
        if switches:
            refused = _not_in_force(answer, place, late, errors, headers)
        else:
            reason = f"no connected switch {missing} with it"
            refused = _not_in_force(answer, place, late, errors, headers, 503, reason)
        if request.later:
            # There is no switch to wait for: the answer is known already.
            return Response(202, answer, headers | {"Location": place})
        return refused

    def _applied(self, done: Applied, dry_run: bool) -> Response:
        """Say what a file or going back has changed, and where that is in force."""
        switches, late, errors = self._wait(done.waiters, self._clock())
        stored = bool(done.changes) and not dry_run
        answer: dict[str, Any] = {"changes": done.changes, "stored": stored, "switches": switches}
        if not late:
            return Response(200, answer)
        answer["error"] = {
            "field": "switch",
            "value": ", ".join(late),
            "allowed": "it is stored, and will be in force: GET /v1/status",
            "message": "; ".join(["not in force everywhere", *errors]),
        }
        return Response(502 if errors else 504, answer)


def _not_in_force(
    answer: dict[str, Any],
    place: str,
    late: list[str],
    errors: list[str],
    headers: dict[str, str],
    status: int | None = None,
    reason: str | None = None,
) -> Response:
    """Say that what is stored is not in force; `answer` gets the reason, too."""
    if status is None or reason is None:
        status, reason = 504, "a switch has not confirmed yet"
        if errors:
            status, reason = 502, "a switch reported an error"
    answer |= {
        "change": place,
        "reason": reason,
        "error": {
            "field": "switch",
            "value": ", ".join(late) or None,
            "allowed": f"what was asked for stays wanted: GET {place}",
            "message": "; ".join([f"not in force: {reason}", *errors]),
        },
    }
    return Response(status, answer, headers | {"Location": place})


def _invalid(error: InvalidConfig, status: int = 400) -> Response:
    problems = [problem.as_dict() for problem in error.problems]
    return Response(status, {"error": problems[0], "errors": problems})


def most_bytes(path: str) -> int:
    """Give the bytes that a body may have: what a file may where a whole tenant may be in it."""
    parts = path.strip("/").split("/")
    whole = parts == ["v1", "apply"] or (len(parts) == 3 and parts[:2] == ["v1", "tenants"])
    return MAX_FILE if whole else MAX_BODY


def too_large(most: int = MAX_BODY) -> RequestError:
    """Give the refusal of a body that is too large."""
    return RequestError(413, "the body is too large", "body", None, f"at most {most} bytes")


def _share_spec(share: config.Share) -> Spec:
    return {
        "min-rate": units.format_rate(share.min_rate),
        "max-rate": units.format_rate(share.max_rate),
        "weight": share.weight,
    }


def _datapath_id(text: str) -> int:
    if not re.fullmatch(r"[0-9A-Fa-f]{16}", text):
        raise RequestError(
            400, "not a datapath id", "switch", text, "16 hexadecimal digits, as in /v1/status"
        )
    return int(text, 16)


def _ref(names: Mapping[str, str]) -> tuple[Ref, dict[str, str]]:
    """Give what a path is about, and the names for an answer; raises RequestError."""
    to = None
    shown = dict(names)
    if "destination" in names:
        try:
            to = config.parse_network(names["destination"])
        except units.UnitError as error:
            raise RequestError(
                400, error.message, "destination", names["destination"], error.allowed
            ) from None
        shown["destination"] = config.network_text(to)
    for kind in ("tenant", "vm", "port"):
        # (Also what would be nobody's: an empty name is not the same as none.)
        if kind in names and not names[kind]:
            raise UnknownName(kind, "", [])
    return Ref(names.get("tenant", ""), names.get("vm", ""), to, names.get("port", "")), shown


def _name(ref: Ref) -> str:
    if ref.to is not None:
        return config.network_text(ref.to)
    return ref.port or ref.vm or ref.tenant
