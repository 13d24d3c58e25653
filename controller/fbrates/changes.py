"""What became of changes that were asked for: the place to ask, and to ask again.

A change that a switch has refused, or not confirmed in time, stays wanted: it is in force
when the switches that it is about are in sync, however long that takes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fbrates.service import Service, UnknownName
from fbrates.sync import SwitchSync, Waiter

REMEMBERED = 1000


@dataclass(frozen=True)
class Wanted:
    """What a change is about: meter ids, and whether it is still what is wanted."""

    numbers: set[int]
    current: Callable[[], bool]
    gone: bool = False
    """Whether what is wanted is that no switch has these."""


@dataclass
class _Change:
    answer: Mapping[str, Any]
    waiters: Mapping[str, Waiter]
    wanted: Wanted


class Changes:
    """The last changes, by number.  As `Service`, one call at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._changes: OrderedDict[int, _Change] = OrderedDict()
        self._last = 0

    def add(self, answer: Mapping[str, Any], waiters: Mapping[str, Waiter], wanted: Wanted) -> int:
        """Remember a change; gives its number."""
        self._last += 1
        self._changes[self._last] = _Change(dict(answer), waiters, wanted)
        while len(self._changes) > REMEMBERED:
            self._changes.popitem(last=False)
        return self._last

    @staticmethod
    def _is_done(change: _Change, switch: SwitchSync) -> bool:
        waiter = change.waiters.get(switch.name)
        waiting = waiter is not None and not waiter.done
        return not waiting and switch.has_done(change.wanted.numbers)

    def view(self, number: str) -> dict[str, Any]:
        """Say what became of a change; raises UnknownName."""
        change = self._changes.get(int(number)) if number.isdecimal() else None
        if change is None:
            known = [str(item) for item in self._changes]
            raise UnknownName("change", number, known[-5:])
        switches = {
            switch.name: {
                "applied": self._is_done(change, switch),
                "errors": list(change.waiters[switch.name].errors)
                if switch.name in change.waiters
                else [],
            }
            for switch in self._service.switches.values()
            if switch.concerns(change.wanted.numbers)
            or (change.wanted.gone and switch.name in change.waiters)
        }
        if not change.wanted.current():
            state = "superseded"
        elif all(item["applied"] for item in switches.values()) and (
            switches or change.wanted.gone or not change.wanted.numbers
        ):
            state = "applied"
        else:
            state = "pending"
        return {
            **change.answer,
            "change": f"/v1/changes/{number}",
            "state": state,
            "applied": state == "applied",
            "switches": switches,
        }
