"""What REST answers: every path and method, once, for answering and for describing it.

`fbrates.rest` has an operation for each of them, `fbrates.openapi` tells programs of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import BaseModel

from fbrates import bodies, config


@dataclass(frozen=True)
class Operation:
    """What one method of a path does; `name` is that of the method of `fbrates.rest.Api`."""

    name: str
    summary: str
    body: type[BaseModel] | None = None
    body_optional: bool = False
    query: tuple[str, ...] = ()
    """Keys of the query."""
    tagged: bool = False
    """Whether the answer has an ETag, and a change heeds If-Match."""
    makes: bool = False
    """Whether it may make what is not there, and so heeds If-None-Match and answers 201."""
    applies: bool = False
    """Whether switches have to do something, so that it may be answered 202, 502 and so on."""


@dataclass(frozen=True)
class Route:
    """A path and what its methods do."""

    template: str
    methods: dict[str, Operation]
    pattern: re.Pattern[str]

    @property
    def parameters(self) -> list[str]:
        """What of the path is a name."""
        return re.findall(r"{(\w+)}", self.template)


def _route(template: str, **methods: Operation) -> Route:
    # The slash of a prefix may be quoted or not.
    pattern = re.sub(r"{(\w+)}", r"(?P<\1>[^/]*)", template)
    pattern = pattern.replace("(?P<destination>[^/]*)", "(?P<destination>.+?)")
    return Route(template, methods, re.compile(pattern, re.DOTALL))


PAGE = ("limit", "after")


def _put(
    what: str,
    summary: str,
    body: type[BaseModel],
    query: tuple[str, ...] = (),
    makes: bool = False,
) -> Operation:
    return Operation(
        f"put_{what}", summary, body, query=query, tagged=True, makes=makes, applies=True
    )


def _rate(whose: str) -> dict[str, Operation]:
    return {
        "GET": Operation("get_rate", f"the rate of {whose}", tagged=True),
        "PUT": _put("rate", f"change the rate of {whose} now", bodies.RateBody),
    }


def _thing(what: str, body: type[BaseModel]) -> dict[str, Operation]:
    return {
        "GET": Operation("get_thing", what, tagged=True),
        "PUT": _put(
            "thing",
            f"make {what}, or make it what is said here",
            body,
            query=("force",),
            makes=True,
        ),
        "DELETE": Operation("delete_thing", f"delete {what}", tagged=True, applies=True),
    }


TENANT = "/v1/tenants/{tenant}"
VM = TENANT + "/vms/{vm}"
DESTINATION = "/destinations/{destination}"

ROUTES = (
    _route("/v1/openapi.json", GET=Operation("openapi", "this document")),
    _route("/v1/status", GET=Operation("status", "switches, errors, meter ids")),
    _route("/v1/meters", GET=Operation("meters", "meters by switch, as Ryu's ofctl_rest has them")),
    _route(
        "/v1/reload",
        POST=Operation("reload", "read the file again", bodies.ForceBody, body_optional=True),
    ),
    _route(
        "/v1/apply",
        POST=Operation("apply", "make what a file says the truth", bodies.ApplyBody, applies=True),
    ),
    _route("/v1/export", GET=Operation("export", "what is wanted now, as a file")),
    _route("/v1/history", GET=Operation("history", "who changed what, and when", query=PAGE)),
    _route(
        "/v1/history/{number}/rollback",
        POST=Operation(
            "rollback",
            "make all as it was right after a change",
            bodies.DryRunBody,
            body_optional=True,
            applies=True,
        ),
    ),
    _route("/v1/changes/{number}", GET=Operation("change", "what became of a change")),
    _route(
        "/v1/switches/{switch}/adopt",
        POST=Operation("adopt", "take the meters among our ids at a switch for ours"),
    ),
    _route(
        "/v1/switches/{switch}",
        DELETE=Operation("forget", "forget a switch that is not connected"),
    ),
    _route(
        "/v1/closed",
        GET=Operation("closed", "what was a VM's and is nobody's, and so closed"),
        DELETE=Operation("release", "let it be an unknown source", bodies.ClosedBody),
    ),
    _route("/v1/ports", GET=Operation("ports", "ports whose rate VMs share", query=PAGE)),
    _route(
        "/v1/ports/{port}",
        GET=Operation("get_port", "a port that is shared", tagged=True),
        PUT=_put("port", "make a port to share, or change its rate", config.PortSpec, makes=True),
        DELETE=Operation("delete_thing", "delete a port that nobody shares", tagged=True),
    ),
    _route("/v1/tenants", GET=Operation("tenants", "all tenants", query=PAGE)),
    _route(TENANT, **_thing("a tenant", config.TenantBody)),
    _route(f"{TENANT}/rate", **_rate("a tenant's VMs together")),
    _route(f"{TENANT}/vms", GET=Operation("vms", "a tenant's VMs", query=PAGE)),
    _route(VM, **_thing("a VM", config.VmSpec)),
    _route(f"{VM}/rate", **_rate("a VM")),
    _route(
        f"{VM}/share",
        GET=Operation("get_share", "what a VM has of a shared port", tagged=True),
        PUT=_put("share", "change what a VM may have of a shared port", bodies.ShareBody),
    ),
    _route(f"{VM}{DESTINATION}/rate", **_rate("a VM towards a destination")),
    _route(f"{VM}{DESTINATION}", **_thing("a VM's destination", config.DestinationBody)),
    _route(f"{TENANT}{DESTINATION}/rate", **_rate("a tenant's VMs towards a destination")),
    _route(
        f"{TENANT}{DESTINATION}",
        **_thing("a destination that a tenant's VMs share", config.DestinationBody),
    ),
)
"""The first whose pattern is the whole path has it."""


def find(path: str) -> tuple[Route, dict[str, str]] | None:
    """Find who has a path, and the names in it; None if nobody has."""
    for route in ROUTES:
        if match := route.pattern.fullmatch(path):
            return route, match.groupdict()
    return None
