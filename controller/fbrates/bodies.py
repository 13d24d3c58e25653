"""What the bodies of requests may be: pydantic models, and JSON read strictly.

What tenants, VMs, destinations and ports may be is in `fbrates.config`, as for the file.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from fbrates import config, units
from fbrates.answers import RequestError
from fbrates.config import FixedRate, MinRate, Model, Rate, Weight

APPLY_KEYS = "file (the text of a file of tenants), dry_run, force"
RATE_KEYS = 'rate (such as "50Mbps") or rate_bps (an integer of bit/s)'
SHARE_KEYS = "min-rate, max-rate and weight, or some of them"


def _parse_rate_bps(value: object) -> int:
    if isinstance(value, str) and not value.isdecimal():
        raise units.UnitError("not an integer", units.RATE_ALLOWED)
    return units.parse_rate(value)


_RateBps = Annotated[
    int,
    config.validator(_parse_rate_bps),
    WithJsonSchema(config.BPS_SCHEMA),
]


def _refusal(field: str, message: str, allowed: str) -> PydanticCustomError:
    return PydanticCustomError(
        "fbrates", "{message}", {"message": message, "allowed": allowed, "field": field}
    )


class RateBody(Model):
    """A rate: one of the two."""

    rate: Rate = config.UNSET
    rate_bps: _RateBps = config.UNSET

    @model_validator(mode="before")
    @classmethod
    def _not_both(cls, data: dict[str, Any]) -> dict[str, Any]:
        if {"rate", "rate_bps"} <= data.keys():
            raise _refusal("rate", "rate and rate_bps are both given", f"either {RATE_KEYS}")
        return data

    @model_validator(mode="after")
    def _one(self) -> Self:
        if not self.model_fields_set:
            raise _refusal("rate", "rate is missing", f"either {RATE_KEYS}")
        return self

    def bps(self) -> int | None:
        """Give the rate in bit/s, None for unlimited."""
        return (self.rate if "rate" in self.model_fields_set else self.rate_bps) or None


class ShareBody(Model):
    """What of a share is to be changed."""

    min_rate: Annotated[MinRate, Field(alias="min-rate")] = config.UNSET
    max_rate: Annotated[FixedRate, Field(alias="max-rate")] = config.UNSET
    weight: Weight = config.UNSET

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.model_fields_set:
            raise _refusal("body", "nothing is to be changed", SHARE_KEYS)
        return self

    def given(self) -> dict[str, int]:
        """Give what is to be changed."""
        return {name: getattr(self, name) for name in self.model_fields_set}


class ApplyBody(Model):
    """A file of tenants, and how it is meant."""

    file: str
    dry_run: bool = False
    force: bool = False


class ForceBody(Model):
    """How reading the file again is meant."""

    force: bool = False


class DryRunBody(Model):
    """How going back is meant."""

    dry_run: bool = False


class ClosedBody(Model):
    """What is no longer to be closed, as it is shown."""

    closed: str


KEYS = {
    RateBody: RATE_KEYS,
    ShareBody: SHARE_KEYS,
    ApplyBody: APPLY_KEYS,
    config.PortSpec: f"max-rate ({units.RATE_ALLOWED})",
    config.TenantBody: "rate, burst, vms, destinations",
}
"""What is said to be allowed of those of which more than the keys is to be said."""

_MESSAGES = {"missing": "is missing", "bool_type": "not a truth value", "string_type": "no text"}

SomeModel = TypeVar("SomeModel", bound=BaseModel)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is given twice")
    return result


def _no_constants(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def keys_of(model: type[BaseModel]) -> str:
    """Say which keys a body has."""
    names = [info.alias or name for name, info in model.model_fields.items()]
    return KEYS.get(model, ", ".join(names))


def read_object(body: bytes, keys: str) -> dict[str, Any]:
    """Read a body that is a JSON object; `keys` says which it may have."""
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
    return data


def read(model: type[SomeModel], body: bytes) -> SomeModel:
    """Read a body; raises RequestError."""
    keys = keys_of(model)
    data = read_object(body, keys)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _refused(error, keys) from None


def _refused(error: ValidationError, keys: str) -> RequestError:
    errors = error.errors(include_url=False)
    # A key that is misspelt is why another is missing.
    first = min(errors, key=lambda item: item["type"] != "extra_forbidden")
    name = str(first["loc"][0]) if first["loc"] else "body"
    context: dict[str, Any] = first.get("ctx") or {}
    value = None if first["type"] == "missing" else first["input"]
    if first["type"] == "fbrates":
        name = context.get("field", name)
        value = value if first["loc"] else None
        return RequestError(400, context["message"], name, value, context["allowed"])
    if first["type"] == "extra_forbidden":
        return RequestError(400, "unknown key", name, value, keys)
    message = _MESSAGES.get(first["type"], first["msg"])
    allowed = "true or false" if first["type"] == "bool_type" else keys
    return RequestError(400, message, name, value, allowed)
