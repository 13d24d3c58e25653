"""HTTP in front of fbrates.rest.Api: a WSGI application, and Ryu's way to have one."""

from __future__ import annotations

import io
import logging
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from http.client import responses
from typing import Any

import framework
from fbrates import metrics, origin, tokens
from fbrates.rest import Api, RequestError, most_bytes, too_large
from fbrates.service import Service

LOG = logging.getLogger("flowbundler")

StartResponse = Callable[[str, list[tuple[str, str]]], Any]


class Front:
    """Answers what is below /v1, and /metrics."""

    def __init__(self, api: Api, service: Service, names: Iterable[str]) -> None:
        self.api = api
        self.metrics = metrics.Metrics(service)
        self.names = frozenset(name.lower() for name in names if origin.NAME.fullmatch(name))
        self.tokens: tokens.Tokens | None = None
        """Who may ask what; None: whoever can connect, all."""
        self.answered: Callable[[Any], None] = lambda _environ: None
        """Told of the environment of each request that was answered."""

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request as WSGI has it."""
        status, body, headers = self.answer(environ)
        self.answered(environ)
        line = f"{status} {responses.get(status, '')}"
        start_response(line, [*headers, ("Content-Length", str(len(body)))])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]

    def answer(self, environ: dict[str, Any]) -> tuple[int, bytes, list[tuple[str, str]]]:
        """Give status, body and headers."""
        headers = _Headers(environ)
        try:
            origin.check(headers, self.names)
            method, path = environ["REQUEST_METHOD"], _path(environ)
            who, ceiling = f"REST from {environ.get('REMOTE_ADDR', '?')}", False
            if self.tokens is not None:
                role = self.tokens.role(headers)
                tokens.check(role, method, path)
                who, ceiling = f"{role.name} by {who}", role.tenant is not None
            if path == "/metrics" and method in ("GET", "HEAD"):
                return 200, self.metrics.render(), [("Content-Type", metrics.CONTENT_TYPE)]
            body = _read_body(environ, headers, most_bytes(path))
            query = environ.get("QUERY_STRING", "")
            response = self.api.handle(method, path, body, headers, who, ceiling, query)
        except RequestError as error:
            response = error.response
        except Exception:
            # Only what cannot fail again: not what would have to be decoded.
            LOG.exception("%s %r", environ.get("REQUEST_METHOD"), environ.get("PATH_INFO"))
            response = RequestError(500, "internal error, see the log").response
        return (
            response.status,
            response.encode(),
            [("Content-Type", response.content_type), *response.headers.items()],
        )


class _Headers(Mapping[str, str]):
    """A request's headers; names in any case."""

    def __init__(self, environ: Mapping[str, Any]) -> None:
        self._environ = environ

    @staticmethod
    def _key(name: str) -> str:
        key = name.upper().replace("-", "_")
        return key if key in ("CONTENT_LENGTH", "CONTENT_TYPE") else f"HTTP_{key}"

    def __getitem__(self, name: str) -> str:
        return str(self._environ[self._key(name)])

    def __iter__(self) -> Any:
        return (key[5:] for key in self._environ if key.startswith("HTTP_"))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _path(environ: Mapping[str, Any]) -> str:
    # WSGI's PATH_INFO has a character for each byte.
    data = environ["PATH_INFO"].encode("latin-1")
    try:
        return str(data.decode("utf-8"))
    except UnicodeDecodeError:
        shown = urllib.parse.quote(data)
        raise RequestError(400, "the path is not UTF-8", "path", shown, "quoted UTF-8") from None


def _read_body(environ: Mapping[str, Any], headers: Mapping[str, str], most: int) -> bytes:
    length_text = headers.get("Content-Length") or ""
    length = int(length_text) if length_text.isdecimal() else None
    if length is not None and length > most:
        raise too_large(most)
    chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
    if length is None and not chunked:
        return b""
    stream: io.BufferedIOBase = environ["wsgi.input"]
    return bytes(stream.read(most + 1 if chunked else length))


# Ryu's own WSGI, which other Ryu applications in this process use, too.

CONTEXTS: dict[str, Any] = {}

if framework.wsgi is not None:
    CONTEXTS["wsgi"] = framework.wsgi.WSGIApplication

    class _RyuController(framework.wsgi.ControllerBase):  # type: ignore[misc, name-defined]
        def __init__(self, req: Any, link: Any, data: dict[str, Any], **config: Any) -> None:
            super().__init__(req, link, data, **config)
            self.front: Front = data["front"]

        @framework.wsgi.route("flowbundler", "/v1{rest:(/.*)?}")  # type: ignore[misc]
        def v1(self, _req: Any, **_kwargs: Any) -> Any:
            """Answer any request below /v1."""
            return self.front

        @framework.wsgi.route("flowbundler", "/metrics", methods=["GET"])  # type: ignore[misc]
        def metrics(self, _req: Any, **_kwargs: Any) -> Any:
            """Answer Prometheus."""
            return self.front


def register(application: Any, front: Front) -> None:
    """Let Ryu's WSGI application answer for us."""
    application.register(_RyuController, {"front": front})
