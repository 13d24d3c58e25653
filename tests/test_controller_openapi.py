"""The description of REST: complete, and true of what any request that it allows is answered."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CheckFunction
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

import http_front
from fbrates import config, openapi, routes
from test_controller_resources import FILE, World


class Application:
    """A WSGI application: what answers over HTTP, of a world that can be begun anew."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.world = World()
        self.front = http_front.Front(self.world.api, self.world.service, [])

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        return self.front(environ, start_response)


APPLICATION = Application()
CHECKS: list[CheckFunction] = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
NAMES = {"tenant": "red", "vm": "a", "destination": "10.0.0.9", "port": "up",
         "switch": "0000000000000001", "number": "1"}  # fmt: skip

schema = schemathesis.openapi.from_wsgi("/v1/openapi.json", APPLICATION)


@schema.parametrize()
@settings(max_examples=20, deadline=None, derandomize=True,
          suppress_health_check=list(HealthCheck))  # fmt: skip
def test_what_is_described_is_true(case: Any) -> None:
    APPLICATION.renew()
    before = APPLICATION.world.state()
    # What is not there is refused soon: most names are those of things that are.
    for name, value in (case.path_parameters or {}).items():
        if len(str(value)) % 4 and name in NAMES:
            case.path_parameters[name] = NAMES[name]
    for name, value in list((case.headers or {}).items()):
        if name.startswith("If-") and len(str(value)) % 4:
            del case.headers[name]
    response = case.call_and_validate(checks=CHECKS)
    assert response.status_code != 500
    if 400 <= response.status_code < 500:
        assert APPLICATION.world.state() == before


RED, VM = "/v1/tenants/{tenant}", "/v1/tenants/{tenant}/vms/{vm}"
GOOD: dict[tuple[str, str], Any] = {
    ("POST", "/v1/reload"): {"force": True},
    ("POST", "/v1/apply"): {"file": FILE, "dry_run": True},
    ("POST", "/v1/history/{number}/rollback"): {"dry_run": True},
    ("DELETE", "/v1/closed"): {"closed": "port vm-b"},
    ("PUT", "/v1/ports/{port}"): {"max-rate": "200Mbps"},
    ("PUT", RED): {"rate": "1Gbps", "burst": "15kB", "destinations": [],
                   "vms": {"s": {"port": "vm-s", "min-rate": "1Mbps"}}},
    ("PUT", f"{RED}/rate"): {"rate": "1Gbps"},
    ("PUT", VM): {"port": "vm-a", "ip": "10.0.0.1", "mac": "02:00:00:00:00:01", "vlan": 5,
                  "rate": "unlimited", "destinations": [{"to": "10.0.0.9", "rate": 5_000_000}]},
    ("PUT", f"{VM}/rate"): {"rate_bps": 7_000_000},
    ("PUT", f"{VM}/share"): {"weight": 3, "max-rate": "250Mbps"},
    ("PUT", f"{VM}/destinations/{{destination}}"): {"rate": "3Mbps", "burst": "15kB"},
    ("PUT", f"{VM}/destinations/{{destination}}/rate"): {"rate": "3Mbps"},
    ("PUT", f"{RED}/destinations/{{destination}}"): {"rate": "3Mbps"},
    ("PUT", f"{RED}/destinations/{{destination}}/rate"): {"rate": "unlimited"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "template"),
    [(method, route.template) for route in routes.ROUTES for method in route.methods],
)
def test_what_is_good_is_done(method: str, template: str) -> None:
    APPLICATION.renew()
    world = APPLICATION.world
    names = {name: NAMES[name] for name in NAMES if f"{{{name}}}" in template}
    if template.endswith("/share"):
        names["vm"] = "s"
    if template.startswith(f"{RED}/destinations"):
        names["destination"] = "10.2.0.0/16"
    if template == "/v1/closed":
        world.ask("DELETE", "/v1/tenants/blue/vms/b")
    if template == "/v1/changes/{number}":
        world.ask("PUT", "/v1/tenants/red/rate", {"rate": "1Mbps"})
    if (method, template) == ("DELETE", "/v1/ports/{port}"):
        world.ask("DELETE", "/v1/tenants/red/vms/s")
    if (method, template) == ("DELETE", "/v1/switches/{switch}"):
        assert world.switch.sync is not None
        world.service.disconnect(world.switch.sync)
    body = GOOD.get((method, template))
    operation = schema[template][method]
    case = operation.Case(path_parameters=names, **({} if body is None else {"body": body}))
    response = case.call_and_validate(checks=CHECKS)
    assert response.status_code in (200, 201), response.text
    (described,) = (route for route in routes.ROUTES if route.template == template)
    assert (described.methods[method].body is None) == (body is None)


def test_each_path_and_method_is_described_once() -> None:
    document = openapi.document()
    assert document == json.loads(json.dumps(document))
    described = {
        (path, method.upper())
        for path, item in document["paths"].items()
        for method in item
        if method != "parameters"
    }
    answered = {(route.template, method) for route in routes.ROUTES for method in route.methods}
    assert described == answered
    names = [
        item["operationId"]
        for path in document["paths"].values()
        for method, item in path.items()
        if method != "parameters"
    ]
    assert len(set(names)) == len(names) == len(described)


@pytest.mark.parametrize("name", ["RateBody", "VmSpec", "TenantBody", "FileSpec", "PortSpec"])
def test_models_say_what_their_fields_take(name: str) -> None:
    model = openapi.document()["components"]["schemas"][name]
    assert model["additionalProperties"] is False
    for field, item in model["properties"].items():
        assert item.keys() & {"type", "anyOf", "$ref", "enum", "allOf"}, field
        # Not what only says that nothing was given.
        assert item.get("default") not in (config.UNSET, "", ())


def test_the_file_is_described_by_the_same() -> None:
    schemas = openapi.document()["components"]["schemas"]
    vms = schemas["TenantSpec"]["properties"]["vms"]
    assert vms == schemas["TenantBody"]["properties"]["vms"]
    assert list(vms["patternProperties"].values()) == [{"$ref": "#/components/schemas/VmSpec"}]
    rate = schemas["VmSpec"]["properties"]["rate"]
    assert {"const": "unlimited"} in rate["anyOf"]
