"""Who may ask what of REST: bearer tokens with roles.

A file of tokens has their SHA-256, so that whoever reads it cannot use them:

    tokens:
      - {name: ops, sha256: 9f86d081..., role: admin}
      - {name: red-portal, sha256: 60303ae2..., role: tenant, tenant: red}

`admin` may all.  `tenant` may read what is its own, and set rates of its own that are not
above what was applied for it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fbrates import loader, routes
from fbrates.answers import RequestError
from fbrates.loader import InvalidConfig, Problem, dotted


class _Token(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,63}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    role: Literal["admin", "tenant"]
    tenant: str | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    tokens: list[_Token]


@dataclass(frozen=True)
class Role:
    """Who asks: the token's name, and the only tenant that it may see; None: it may all."""

    name: str
    tenant: str | None = None


class Tokens:
    """The tokens of a file."""

    def __init__(self, roles: Mapping[str, Role]) -> None:
        self._roles = dict(roles)

    @classmethod
    def load(cls, filename: str) -> Tokens:
        """Read a file; raises InvalidConfig."""
        try:
            document = loader.parse(Path(filename).read_text(encoding="utf-8"))
            if document.problems:
                raise InvalidConfig(document.problems)
            parsed = _File.model_validate(document.data)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfig([Problem("", f"cannot be read: {error}")]) from None
        except ValidationError as error:
            # Without the values: one may be a token that was put there itself.
            raise InvalidConfig(
                [
                    Problem(dotted(item["loc"]), item["msg"], line=document.line_of(item["loc"]))
                    for item in error.errors()
                ]
            ) from None
        roles = {}
        for i, token in enumerate(parsed.tokens):
            if (token.role == "tenant") != (token.tenant is not None):
                allowed = "role: tenant with tenant, role: admin without"
                raise InvalidConfig([Problem(f"tokens[{i}].tenant", "role", None, allowed)])
            roles[token.sha256] = Role(token.name, token.tenant)
        return cls(roles)

    def role(self, headers: Mapping[str, str]) -> Role:
        """Say who asks; raises RequestError (401)."""
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token:
            digest = hashlib.sha256(token.strip().encode("latin-1", "replace")).hexdigest()
            for known, role in self._roles.items():
                if hmac.compare_digest(known, digest):
                    return role
        raise RequestError(
            401,
            "a token is needed that is known here",
            "Authorization",
            None,
            "Bearer TOKEN",
            {"WWW-Authenticate": 'Bearer realm="flowbundler"'},
        )


def check(role: Role, method: str, path: str) -> None:
    """Raise RequestError (403) for what a role may not ask at all.

    Of rates that a tenant sets the service sees to it that they are not too high.
    """
    if role.tenant is None:
        return
    parts = path.strip("/").split("/")
    own = parts[:3] == ["v1", "tenants", role.tenant]
    reads = method in ("GET", "HEAD")
    found = routes.find("/" + "/".join(parts))
    operation = found[0].methods.get(method) if found is not None else None
    sets = operation is not None and operation.name == "put_rate"
    if not (own and (reads or sets)):
        raise RequestError(
            403,
            f"{role.name} may not do this",
            "path",
            path,
            f"reading and lowering rates below /v1/tenants/{role.tenant}",
        )
