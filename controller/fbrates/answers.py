"""Answers of the REST interface, and refusals as problem details (RFC 9457)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fbrates.loader import plain

JSON = "application/json"
PROBLEM = "application/problem+json"


@dataclass
class Response:
    """An answer: HTTP status, JSON body, further headers."""

    status: int
    body: Any
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Let a refusal be what RFC 9457 calls problem details, with its members and ours."""
        if self.status < 400 or not isinstance(self.body, dict) or "error" not in self.body:
            return
        errors = self.body.get("errors", [self.body["error"]])
        self.body = {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.body["error"]["message"],
            **self.body,
            "errors": errors,
        }

    @property
    def content_type(self) -> str:
        """What the body is."""
        refused = self.status >= 400 and isinstance(self.body, dict) and "detail" in self.body
        return PROBLEM if refused else JSON

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
