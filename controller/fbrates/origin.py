"""Requests that web pages make are refused.

Without tokens who reaches REST may use it.  A browser on the same machine
reaches it, too, and lets any page that it shows send requests: across origins it only
keeps the answers from the page, and not even that from a page whose name was made to
resolve to this machine's address (DNS rebinding).  What a page cannot help is that the
browser says in Origin and Sec-Fetch-Site who asks, and in Host which name it asked for
(the Fetch standard, 3.2; W3C's Fetch Metadata; RFC 9110, 7.2).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping

from fbrates.answers import RequestError

NAME = re.compile(r"[A-Za-z0-9_.-]{1,253}")
"""A host's name."""

_HOST = re.compile(r"(?:\[(?P<six>[^]]*)\]|(?P<name>[^:]*))(?::[0-9]*)?")


def check(headers: Mapping[str, str], names: Collection[str]) -> None:
    """Raise RequestError (403) for a request of a web page's.

    `headers` looks names up in any case.  Beside IP addresses and localhost, Host may
    be one of `names`, in lower case.  Requests without these headers pass: browsers
    send them.
    """
    origin = headers.get("Origin")
    if origin is not None:
        raise _refusal("Origin", origin, "requests without this header")
    site = headers.get("Sec-Fetch-Site")
    if site is not None and site not in ("none", "same-origin"):
        raise _refusal("Sec-Fetch-Site", site, "none, same-origin, or no such header")
    host = headers.get("Host")
    if host is not None and not _is_ours(host, names):
        known = ", ".join(["an IP address", "localhost", *sorted(names)])
        raise RequestError(
            403,
            "is not a name of this controller (--rest-name makes it one)",
            "Host",
            host,
            f"{known}, each with or without a port",
        )


def _refusal(header: str, value: str, allowed: str) -> RequestError:
    return RequestError(403, "requests of web pages are not answered", header, value, allowed)


def _is_ours(host: str, names: Collection[str]) -> bool:
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    six, name = match["six"], (match["name"] or "").lower()
    if name == "localhost" or name in names:
        return True
    try:
        ipaddress.IPv4Address(name) if six is None else ipaddress.IPv6Address(six)
    except ValueError:
        return False
    return True
