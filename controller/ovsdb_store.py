"""The store in an OVSDB database, by the ``ovs`` package's IDL.

One native thread owns the IDL: loading many rows would hold up green threads for a second.
Requests go in by a queue and a pipe, and come back by an event that is given.  All of a
change is one transaction, with ``{"op": "commit", "durable": true}``: without that a
stand-alone ovsdb-server does not wait for the disk.

When a connection breaks under a transaction nobody knows whether it took place.  So each
writes a request's id into the one row of `Global`: whoever reads it there again knows.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ovs.db.idl
import ovs.poller

from fbrates.state import INDEX, Rows
from fbrates.store import REMEMBERED, Entry, Operation, StoreDoubt, StoreError
from fbrates.sync import Event

SCHEMA = Path(__file__).parent / "fbrates" / "flowbundler.ovsschema"
LOCK = "flowbundler_controller"
CONNECT_TIMEOUT = 20.0
BACKOFF_MS = (100, 1000)
COMMIT_TIMEOUT = 5.0
COMMIT_TIMEOUT_ROW = 0.02
"""Seconds, and for each row, after which who waits is told that it is not known what became
of a change."""
READ_TIMEOUT = 60.0
"""Seconds for reading at the start; later others would have to wait for that."""

PIECE = 2000
"""Characters of a long text that are kept together."""

KEYS = {**INDEX, "Change": ("number",)}


class _Idl(ovs.db.idl.Idl):  # type: ignore[misc]
    """An IDL that finds rows by the columns of their index."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.found: dict[str, dict[tuple[Any, ...], Any]] = {table: {} for table in KEYS}
        super().__init__(*args, **kwargs)

    def notify(self, event: str, row: Any, updates: Any = None) -> None:
        """Keep what is found in step with the rows."""
        table = row._table.name
        key = tuple(getattr(row, column) for column in KEYS[table])
        if event != ovs.db.idl.ROW_DELETE:
            self.found[table][key] = row
        elif self.found[table].get(key) is row:
            del self.found[table][key]

    def row(self, table: str, key: tuple[Any, ...]) -> Any:
        """Find a row, or None."""
        row = self.found[table].get(key)
        # After a new connection rows may be other objects, or gone without a word.
        return row if row is not None and self.tables[table].rows.get(row.uuid) is row else None

    def all(self, table: str) -> list[Any]:
        """Give all rows of a table."""
        return list(self.tables[table].rows.values())


class _Poll:
    """select.poll, but what is registered twice is waited for in both ways.

    The ovs package registers its socket for writing and then for reading; the second would
    take the place of the first, and what does not fit into the socket at once would stay.
    """

    def __init__(self, poll: Any) -> None:
        self._poll = poll
        self._events: dict[int, int] = {}

    def register(self, fd: Any, events: int) -> None:
        """Wait for these events, too."""
        number = fd if isinstance(fd, int) else fd.fileno()
        self._events[number] = self._events.get(number, 0) | events
        self._poll.register(number, self._events[number])

    def poll(self, timeout: int) -> list[tuple[int, int]]:
        """Wait; milliseconds, -1: for ever."""
        found: list[tuple[int, int]] = self._poll.poll(timeout)
        return found


@dataclass
class _Request:
    done: Event
    read: Callable[[], Any] | None = None
    operations: list[Operation] = field(default_factory=list)
    entry: Entry | None = None
    first: bool = False
    """Whether the database has to be empty."""
    number: str = field(default_factory=lambda: str(uuid.uuid4()))
    result: Any = None
    error: StoreError | None = None
    abandoned: bool = False


class OvsdbStore:
    """See `fbrates.store.Store` and the module's text."""

    def __init__(
        self,
        remote: str,
        event: Callable[[], Event],
        start_thread: Callable[[Callable[[], None]], Any],
        poll: Callable[[], Any] | None = None,
    ) -> None:
        """Connect to `remote` (unix:FILE, tcp:HOST:PORT, ssl:..., with commas between).

        Raises StoreError if there is no database in time, or another controller has it.
        `start_thread` runs a function in a native thread, `poll` is the native
        ``select.poll`` where eventlet has taken that away.
        """
        self.remote = remote
        self._poll = poll or select.poll
        ovs.poller.SelectPoll = lambda: _Poll(self._poll())
        helper = ovs.db.idl.SchemaHelper(str(SCHEMA))
        helper.register_all()
        self._idl = _Idl(remote, helper)
        self._idl.set_lock(LOCK)
        self._idl._session.reconnect.set_backoff(*BACKOFF_MS)
        self._event = event
        self._requests: deque[_Request] = deque()
        # Sockets: eventlet makes os.read wait in a way that a native thread cannot.
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)
        self._stopping = False
        self._current: _Request | None = None
        self._transaction: Any = None
        self._pause = 0.0
        self._patience = READ_TIMEOUT
        start_thread(self._run_forever)
        try:
            self._ask(_Request(event(), lambda: None), CONNECT_TIMEOUT)
        except StoreError:
            held = self._idl.is_lock_contended
            self.close()
            reason = "another controller has it" if held else "no answer"
            raise StoreError(f"database {remote}: {reason} in {CONNECT_TIMEOUT:.0f} s") from None

    # For everybody.

    def load(self) -> Rows | None:
        """Give all rows but the history's; None if the database is empty."""
        rows: Rows | None = self._ask(_Request(self._event(), self._read), self._patience)
        return rows

    def commit(self, operations: list[Operation], entry: Entry | None, first: bool = False) -> None:
        """Make a change durable, `first` only in an empty database; raises StoreError."""
        timeout = COMMIT_TIMEOUT + COMMIT_TIMEOUT_ROW * len(operations)
        self._ask(_Request(self._event(), None, operations, entry, first), timeout)

    def history(self) -> list[Entry]:
        """Give the changes, the oldest first."""
        request = _Request(self._event(), self._read_history)
        entries: list[Entry] = self._ask(request, self._patience)
        self._patience = COMMIT_TIMEOUT
        return entries

    def close(self) -> None:
        """End the thread and the connection."""
        self._stopping = True
        self._wake()

    def _ask(self, request: _Request, timeout: float) -> Any:
        self._requests.append(request)
        self._wake()
        if not request.done.wait(timeout):
            request.abandoned = True
            raise StoreDoubt(f"the database at {self.remote} does not answer")
        if request.error is not None:
            raise request.error
        return request.result

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._writing.send(b"x")

    # In the thread.

    def _run_forever(self) -> None:
        while not self._stopping:
            try:
                self._run()
            except Exception as error:
                # Not to the log: its locks are for green threads.
                if self._current is not None:
                    self._finish(StoreDoubt(f"the database at {self.remote}: {error!r}"))
                self._poll().poll(100)
        self._idl.close()

    def _run(self) -> None:
        self._idl.run()
        while self._step():
            pass
        poller = ovs.poller.Poller()
        self._idl.wait(poller)
        poller.fd_wait(self._reading.fileno(), select.POLLIN)
        if self._transaction is not None:
            self._transaction.wait(poller)
        if self._pause:
            poller.timer_wait(max(int((self._pause - time.monotonic()) * 1000), 1))
        poller.block()
        with contextlib.suppress(BlockingIOError):
            self._reading.recv(4096)

    def _step(self) -> bool:
        """Go on with the current request, or begin the next; False if there is nothing to do."""
        # `has_ever_connected` is true before the first rows are there.
        usable = self._idl.state == self._idl.IDL_S_MONITORING and self._idl.has_lock
        if not usable and self._transaction is None:
            return False
        if self._pause:
            if time.monotonic() < self._pause:
                return False
            self._pause = 0.0
        if self._current is None:
            if not self._requests:
                return False
            self._current = self._requests.popleft()
        request = self._current
        if request.read is not None and not request.abandoned:
            request.result = request.read()
            self._finish(None)
            return True
        if self._transaction is None:
            if request.abandoned:
                self._finish(StoreError("given up"))
                return True
            if self._took_place(request):
                self._finish(None)
                return True
            if request.first and self._idl.row("Global", ()) is not None:
                self._finish(StoreError(f"the database at {self.remote} is not empty"))
                return True
            self._transaction = self._build(request)
        status = self._transaction.commit()
        transaction = ovs.db.idl.Transaction
        if status == transaction.INCOMPLETE:
            return False
        error = self._transaction.get_error()
        self._transaction = None
        if status in (transaction.SUCCESS, transaction.UNCHANGED):
            self._finish(None)
        elif status in (transaction.TRY_AGAIN, transaction.NOT_LOCKED):
            # Whether it took place is seen when there is a connection again.
            self._pause = time.monotonic() + 0.02
        else:
            self._finish(StoreError(f"the database at {self.remote}: {error or status}"))
        return True

    def _finish(self, error: StoreError | None) -> None:
        request, self._current, self._transaction = self._current, None, None
        if request is not None:
            request.error = error
            request.done.set()

    def _took_place(self, request: _Request) -> bool:
        row = self._idl.row("Global", ())
        return row is not None and row.last_request == request.number

    def _build(self, request: _Request) -> Any:
        transaction = ovs.db.idl.Transaction(self._idl)
        top = self._idl.row("Global", ())
        if top is None:
            top = transaction.insert(self._idl.tables["Global"])
            top.commits = 0
        else:
            top.verify("commits")
        top.commits += 1
        top.last_request = request.number
        for item in request.operations:
            row = top if item.table == "Global" else self._idl.row(item.table, item.key)
            if item.row is not None:
                row = row or transaction.insert(self._idl.tables[item.table])
                for column, value in item.row.items():
                    _write(row, column, value)
            elif row is not None:
                row.delete()
        if request.entry is not None:
            row = transaction.insert(self._idl.tables["Change"])
            values = {**vars(request.entry), "undo": _pieces(request.entry.undo)}
            for column, value in values.items():
                setattr(row, column, value)
            old = self._idl.row("Change", (request.entry.number - REMEMBERED,))
            if old is not None:
                old.delete()
        transaction.add_op({"op": "commit", "durable": True})
        return transaction

    def _read(self) -> Rows | None:
        if self._idl.row("Global", ()) is None:
            return None
        rows: Rows = {table: {} for table in INDEX}
        for table, columns in INDEX.items():
            wanted = set(self._idl.tables[table].columns) - {"commits", "last_request"}
            for row in self._idl.all(table):
                key = tuple(getattr(row, column) for column in columns)
                rows[table][key] = {column: _plain(getattr(row, column)) for column in wanted}
        return rows

    def _read_history(self) -> list[Entry]:
        return [
            Entry(row.number, row.time_ms, row.who, row.what, _whole(row.undo))
            for row in sorted(self._idl.all("Change"), key=lambda one: one.number)
        ]


def _pieces(text: str) -> dict[int, str]:
    """Cut a text: the time that the ovs package takes to read one grows with its square."""
    return {at: text[at : at + PIECE] for at in range(0, len(text), PIECE)}


def _whole(pieces: dict[int, str]) -> str:
    return "".join(piece for _, piece in sorted(pieces.items()))


def _write(row: Any, column: str, value: Any) -> None:
    """Set a column; of a map only what differs."""
    fresh = column not in row.__dict__.get("_data", {}) if row._data is not None else True
    if fresh or not isinstance(value, dict):
        if fresh or _plain(getattr(row, column)) != value:
            setattr(row, column, value)
        return
    before = getattr(row, column)
    for key, item in value.items():
        if before.get(key) != item:
            row.setkey(column, key, item)
    for key in before.keys() - value.keys():
        row.delkey(column, key)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value
