"""Who may be connected: limits on connections that have not shown yet who they are.

A listener asks before it keeps a connection.  One that has proved itself (`settle`: a switch
whose handshake is complete) is never closed to make room for others; those that have not
may be so many altogether and so many from one source.  When there are more, the longest
waiting one of the source that has most goes: whoever talks gets done before that, whoever
only holds connections open loses them.  No sockets here: a connection is anything with
`fileno` and `close`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """How many connections that have proved nothing, and for how long (seconds)."""

    total: int
    per_source: int
    patience: float


@dataclass
class _Entry:
    source: str
    since: float


class Admission:
    """The connections of one listener.  Not thread-safe; nothing here yields."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.refused = 0
        """Connections that were closed to make room, or because they took too long."""
        self._clock = clock
        self._waiting: dict[Any, _Entry] = {}
        """In the order in which they came."""

    def __len__(self) -> int:
        return len(self._waiting)

    def admit(self, connection: Any, source: str) -> None:
        """Take a connection, and close others if there are too many now."""
        self._forget_closed()
        self._waiting[connection] = _Entry(source, self._clock())
        counts = Counter(entry.source for entry in self._waiting.values())
        if counts[source] > self.limits.per_source:
            self._close_oldest(source)
        elif len(self._waiting) > self.limits.total:
            self._close_oldest(counts.most_common(1)[0][0])

    def replace(self, old: Any, new: Any) -> None:
        """Go on with another object for the same connection (TLS around it)."""
        entry = self._waiting.pop(old, None)
        if entry is not None:
            self._waiting[new] = entry

    def settle(self, connection: Any) -> None:
        """Take note that the connection has shown who it is."""
        self._waiting.pop(connection, None)

    def touch(self, connection: Any) -> None:
        """Take note that the connection has done what it is for: it counts as new."""
        entry = self._waiting.pop(connection, None)
        if entry is not None:
            self._waiting[connection] = _Entry(entry.source, self._clock())

    def expire(self) -> None:
        """Close those that have waited for too long; to be called now and then."""
        self._forget_closed()
        latest = self._clock() - self.limits.patience
        for connection, entry in list(self._waiting.items()):
            if entry.since < latest:
                self._close(connection)

    def _forget_closed(self) -> None:
        for connection in [item for item in self._waiting if item.fileno() < 0]:
            del self._waiting[connection]

    def _close_oldest(self, source: str) -> None:
        oldest = next(item for item, entry in self._waiting.items() if entry.source == source)
        self._close(oldest)

    def _close(self, connection: Any) -> None:
        del self._waiting[connection]
        self.refused += 1
        connection.close()
