"""The OpenAPI document, made from `fbrates.routes` and the models of what bodies may be."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from fbrates import config, routes
from fbrates.answers import JSON, PROBLEM
from fbrates.routes import Operation, Route

VERSION = "1.0"
REF = "#/components/schemas/{model}"

_NAMES = {
    "tenant": config.NAME_ALLOWED,
    "vm": config.NAME_ALLOWED,
    "port": config.NAME_ALLOWED,
    "destination": config.TO_ALLOWED + "; the slash of a prefix quoted (%2F)",
    "switch": "a datapath id: 16 hexadecimal digits",
    "number": "a number",
}
_QUERY: dict[str, dict[str, Any]] = {
    "limit": {
        "description": "how many at most; Link has the next page, in order of names",
        "schema": {"type": "integer", "minimum": 1, "maximum": 1000},
    },
    "after": {
        "description": "only what comes after this name (or number)",
        "schema": {"type": "string"},
    },
    "force": {
        "description": "also if many VMs are gone by that",
        "schema": {"type": "string", "enum": ["true", "false"]},
    },
}
_SCHEMAS: dict[str, Any] = {
    "Problem": {
        "description": "Problem details (RFC 9457); what is wrong with which field is in `errors`",
        "type": "object",
        "required": ["type", "title", "status", "detail", "error", "errors"],
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "error": {"$ref": "#/components/schemas/FieldProblem"},
            "errors": {
                "type": "array",
                "items": {"$ref": "#/components/schemas/FieldProblem"},
                "minItems": 1,
            },
        },
    },
    "FieldProblem": {
        "type": "object",
        "required": ["field", "value", "allowed", "message"],
        "properties": {
            "field": {"type": ["string", "null"]},
            "value": {"description": "what was given"},
            "allowed": {
                "type": ["string", "array", "null"],
                "items": {"type": "string"},
            },
            "message": {"type": "string"},
            "line": {"type": "integer", "description": "of a file"},
        },
    },
    "InForce": {
        "description": "What became of a change: stored, and in force or not",
        "type": "object",
        "required": ["applied"],
        "properties": {
            "applied": {"type": "boolean", "description": "whether all switches that have it "
                        "have confirmed it"},
            "change": {"type": "string", "description": "the place to ask what became of it"},
            "switches": {
                "type": "object",
                "additionalProperties": {
                    "type": "object",
                    "required": ["applied", "errors"],
                    "properties": {
                        "applied": {"type": "boolean"},
                        "errors": {"type": "array", "items": {"type": "string"}},
                    },
                },
            },
        },
    },
    "Object": {"type": "object"},
}  # fmt: skip


class _Generator(GenerateJsonSchema):
    """Leaves out the defaults that only say that nothing was given."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        if schema.get("default") in (config.UNSET, "", ()):
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)


def _models() -> list[type[BaseModel]]:
    found = [
        operation.body
        for route in routes.ROUTES
        for operation in route.methods.values()
        if operation.body is not None
    ]
    return list(dict.fromkeys([*found, config.FileSpec]))


@cache
def document() -> dict[str, Any]:
    """Give the document, for OpenAPI 3.1."""
    _, models = models_json_schema(
        [(model, "validation") for model in _models()],
        by_alias=True,
        ref_template=REF,
        schema_generator=_Generator,
    )
    schemas = {**models["$defs"], **_SCHEMAS}
    # What pydantic's types cannot say, and its validators do.
    schemas["RateBody"]["oneOf"] = [{"required": ["rate"]}, {"required": ["rate_bps"]}]
    schemas["ShareBody"]["minProperties"] = 1
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "FlowBundler controller",
            "version": VERSION,
            "description": "Rates of tenants, their VMs and destinations. See docs/controller.md.",
        },
        "paths": {route.template: _path(route) for route in routes.ROUTES},
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _path(route: Route) -> dict[str, Any]:
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": _NAMES[name],
            "schema": {"type": "string", "minLength": 1},
        }
        for name in route.parameters
    ]
    methods = {
        method.lower(): _operation(route, method, operation)
        for method, operation in route.methods.items()
    }
    return {**({"parameters": parameters} if parameters else {}), **methods}


def _identifier(route: Route, method: str) -> str:
    """Name an operation for programs that are made from this."""
    words = [part.strip("{}").split(".")[0] for part in route.template.split("/")[2:]]
    return "_".join([method.lower(), *words])


def _operation(route: Route, method: str, operation: Operation) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "query", "required": False, **_QUERY[name]} for name in operation.query
    ]
    headers: dict[str, Any] = {}
    if operation.tagged:
        headers["ETag"] = {
            "description": "of what is wanted, not of what switches say of it",
            "schema": {"type": "string"},
        }
        if method != "GET":
            parameters.append(
                _header("If-Match", "change it only if it is wanted as in the answer with this tag")
            )
    if operation.makes:
        parameters.append(_header("If-None-Match", "*: only make what is not there"))
    if operation.applies and operation.name not in ("apply", "rollback"):
        parameters.append(_header("Prefer", "respond-async: answer before switches have"))
    result: dict[str, Any] = {
        "operationId": _identifier(route, method),
        "summary": operation.summary,
        "responses": _responses(method, operation, headers),
    }
    if parameters:
        result["parameters"] = parameters
    if operation.body is not None:
        schema = {"$ref": REF.format(model=operation.body.__name__)}
        result["requestBody"] = {
            "required": not operation.body_optional,
            "content": {JSON: {"schema": schema}},
        }
    return result


def _header(name: str, description: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": description,
        "schema": {"type": "string"},
    }


def _responses(method: str, operation: Operation, headers: dict[str, Any]) -> dict[str, Any]:
    """Give what may be answered; all that is not listed is a problem, too."""
    applies = operation.applies and operation.name not in ("apply", "rollback")
    model = "InForce" if applies else "Object"
    good = {
        "description": "done, and in force" if operation.applies else "done",
        "content": {JSON: {"schema": {"$ref": REF.format(model=model)}}},
        **({"headers": headers} if headers else {}),
    }
    result: dict[str, Any] = {"200": good}
    if operation.makes:
        result["201"] = {**good, "description": "made; `applied` says whether it is in force"}
    if applies:
        result["202"] = {**good, "description": "stored; Location is the place to ask"}
    refusals = {
        "400": "not allowed; `errors` has which field, its value and what is allowed",
        "401": "no token that is known",
        "403": "not for this token, or asked by a web page",
        "404": "no such thing; `allowed` has what there is",
        "413": "the body is too large",
        "503": "not stored, or no switch has it",
    }
    if operation.name in ("forget", "delete_thing"):
        refusals["409"] = "others need it, or it is in use"
    if operation.tagged and method != "GET":
        refusals["412"] = "not as expected by If-Match or If-None-Match; nothing is changed"
    if operation.applies:
        refusals["502"] = "stored, and refused by a switch"
        refusals["504"] = "stored, and not confirmed by a switch in time"
    problem = {PROBLEM: {"schema": {"$ref": REF.format(model="Problem")}}}
    for status, description in refusals.items():
        result[status] = {"description": description, "content": problem}
    return dict(sorted(result.items()))
