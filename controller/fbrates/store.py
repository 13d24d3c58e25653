"""Where the state is kept, and the history of its changes.

A `Store` takes a change whole or not at all, and `commit` returns when the change is durable:
after that it survives the death of everything but the disk.  The real one is
``ovsdb_store.py`` beside this package; `Forgetful` keeps nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from fbrates.state import INDEX, Row, Rows

REMEMBERED = 1000
"""Changes that history goes back."""


class StoreError(Exception):
    """The store did not take a change."""


class StoreDoubt(StoreError):
    """It is not known whether the store took a change."""


@dataclass(frozen=True)
class Entry:
    """One change in the history; `undo` are operations, as JSON."""

    number: int
    time_ms: int
    who: str
    what: str
    undo: str

    def view(self) -> dict[str, Any]:
        """Show it."""
        return {"number": self.number, "time": self.time_ms / 1000, "who": self.who,
                "what": self.what}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """Make a row of a table so, or (`row` is None) take it away."""

    table: str
    key: tuple[Any, ...]
    row: Row | None


class Store(Protocol):
    """See the module's text.  One call at a time."""

    def load(self) -> Rows | None:
        """Give all rows but the history's; None if the store is empty."""

    def commit(self, operations: list[Operation], entry: Entry | None, first: bool = False) -> None:
        """Make a change durable; raises StoreError, and then it has not happened.

        The `first` one is for an empty store, and is refused by any other.
        """

    def history(self) -> list[Entry]:
        """Give the changes, the oldest first."""


class Forgetful:
    """Keeps what it is given for as long as it lives itself."""

    def __init__(self) -> None:
        self.rows: Rows | None = None
        self.entries: list[Entry] = []

    def load(self) -> Rows | None:
        """Give all rows."""
        return self.rows

    def commit(self, operations: list[Operation], entry: Entry | None, first: bool = False) -> None:
        """Take a change."""
        if first and self.rows is not None:
            raise StoreError("the store is not empty")
        if self.rows is None:
            self.rows = {table: {} for table in INDEX}
        perform(self.rows, operations)
        if entry is not None:
            self.entries = [*self.entries, entry][-REMEMBERED:]

    def history(self) -> list[Entry]:
        """Give the changes."""
        return list(self.entries)


def perform(rows: Rows, operations: list[Operation]) -> None:
    """Do operations to rows."""
    for item in operations:
        if item.row is None:
            rows[item.table].pop(item.key, None)
        else:
            rows[item.table][item.key] = item.row


def difference(old: Rows, new: Rows) -> list[Operation]:
    """Give the operations that turn `old` into `new`."""
    operations = []
    for table, rows in new.items():
        before = old.get(table, {})
        operations += [Operation(table, key, None) for key in before.keys() - rows.keys()]
        operations += [
            Operation(table, key, row) for key, row in rows.items() if before.get(key) != row
        ]
    return operations


def inverse(rows: Rows, operations: list[Operation]) -> str:
    """Give, as text, what undoes operations on these rows."""
    return json.dumps(
        [[item.table, item.key, rows[item.table].get(item.key)] for item in operations]
    )


def parse_operations(text: str) -> list[Operation]:
    """Read what `inverse` gives."""
    return [Operation(table, tuple(key), row) for table, key, row in json.loads(text)]


class Keeper:
    """A store, and the rows that are known to be in it."""

    def __init__(self, store: Store, wall_clock: Callable[[], float]) -> None:
        self.store = store
        self._wall_clock = wall_clock
        self.rows = store.load()
        self._last = max((entry.number for entry in store.history()), default=0)
        self.doubtful = False
        """Whether the store may have more than `rows`: `refresh` comes before all else."""

    def save(self, rows: Rows, who: str, what: str) -> None:
        """Make `rows` the truth; raises StoreError."""
        self.do(difference(self.rows or {}, rows), who, what)

    def do(self, operations: list[Operation], who: str, what: str) -> None:
        """Do these operations; with `what` "" there is nothing for the history.

        Raises StoreError, and then nothing has changed.
        """
        if operations:
            self._do(operations, who, what)

    def note(self, who: str, what: str) -> None:
        """Have the history say what was done that is in no row; raises StoreError."""
        self._do([], who, what)

    def _do(self, operations: list[Operation], who: str, what: str) -> None:
        before: Rows = self.rows or {table: {} for table in INDEX}
        entry = None
        if what:
            # Nobody goes back to before the beginning.
            undo = inverse(before, operations) if self.rows is not None else "[]"
            now = int(self._wall_clock() * 1000)
            entry = Entry(self._last + 1, now, who, what, undo)
        try:
            self.store.commit(operations, entry, self.rows is None)
        except StoreDoubt:
            self.doubtful = True
            raise
        if entry is not None:
            self._last = entry.number
        perform(before, operations)
        self.rows = before

    def refresh(self) -> Rows | None:
        """Read anew what the store has; raises StoreError."""
        self.rows = self.store.load()
        self._last = max((entry.number for entry in self.store.history()), default=0)
        self.doubtful = False
        return self.rows

    def undoing(self, number: int) -> Rows:
        """Give the rows as they were right after change `number`; raises LookupError."""
        history = self.store.history()
        if number not in [entry.number for entry in history]:
            raise LookupError(number)
        rows: Rows = {table: dict(items) for table, items in (self.rows or {}).items()}
        for entry in reversed(history):
            if entry.number > number:
                perform(rows, parse_operations(entry.undo))
        return rows
