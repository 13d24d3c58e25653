"""The states of a connected switch, and what leads from one to another: all of it, in one table.

`fbrates.sync` keeps a state for each switch and changes it by `after` only.  What happens
beside, audits above all, changes no state by itself: it is what they find that does.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Where a switch is; the values are what GET /v1/status shows."""

    SURVEYING = "surveying"
    """Its ports, meters and flows are being asked for; nothing is changed yet."""
    BLOCKED = "blocked"
    """Others have meters with ids that are wanted: it is left alone."""
    TRYING = "trying"
    """It is found out whether it has the shape band."""
    DIFFERENT = "different"
    """It is not known to be as planned, and nothing that was sent is awaited."""
    SETTLING = "settling"
    """What was missing, or may be wrong, has been sent; its confirmation is awaited."""
    IN_SYNC = "in sync"
    """All that is wanted is confirmed."""
    CHANGING = "changing"
    """It was in sync, and a change has been sent; its confirmation is awaited."""
    GONE = "gone"
    """The connection has ended, or another has taken its place."""


class Event(Enum):
    """What happens to a switch."""

    SURVEYED = "its ports, meters and flows are known, and nobody else's are in the way"
    HELD = "others have ids that are wanted"
    TRIED = "it is known whether it has the shape band"
    SENT = "changes to the plan are sent"
    CONFIRMED = "it has done all of them"
    DOUBTED = "it is done with them, and has refused something"
    REFUSED = "it refuses something"
    DISCONNECTED = "the connection ends"


_S, _E = State, Event

TRANSITIONS: dict[tuple[State, Event], State] = {
    (_S.SURVEYING, _E.SURVEYED): _S.TRYING,
    (_S.SURVEYING, _E.HELD): _S.BLOCKED,
    (_S.SURVEYING, _E.REFUSED): _S.SURVEYING,
    (_S.BLOCKED, _E.SURVEYED): _S.TRYING,
    (_S.BLOCKED, _E.HELD): _S.BLOCKED,
    (_S.BLOCKED, _E.REFUSED): _S.BLOCKED,
    (_S.TRYING, _E.TRIED): _S.DIFFERENT,
    (_S.TRYING, _E.HELD): _S.BLOCKED,
    (_S.TRYING, _E.REFUSED): _S.TRYING,
    (_S.DIFFERENT, _E.SENT): _S.SETTLING,
    (_S.DIFFERENT, _E.HELD): _S.BLOCKED,
    (_S.DIFFERENT, _E.REFUSED): _S.DIFFERENT,
    (_S.SETTLING, _E.SENT): _S.SETTLING,
    (_S.SETTLING, _E.CONFIRMED): _S.IN_SYNC,
    (_S.SETTLING, _E.DOUBTED): _S.DIFFERENT,
    (_S.SETTLING, _E.HELD): _S.BLOCKED,
    (_S.SETTLING, _E.REFUSED): _S.SETTLING,
    (_S.IN_SYNC, _E.SENT): _S.CHANGING,
    (_S.IN_SYNC, _E.HELD): _S.BLOCKED,
    (_S.IN_SYNC, _E.REFUSED): _S.DIFFERENT,
    (_S.CHANGING, _E.SENT): _S.CHANGING,
    (_S.CHANGING, _E.CONFIRMED): _S.IN_SYNC,
    (_S.CHANGING, _E.DOUBTED): _S.DIFFERENT,
    (_S.CHANGING, _E.HELD): _S.BLOCKED,
    (_S.CHANGING, _E.REFUSED): _S.SETTLING,
}
"""What is not here cannot happen; but any state ends with DISCONNECTED, and GONE stays so."""

PLANNED = frozenset({State.DIFFERENT, State.SETTLING, State.IN_SYNC, State.CHANGING})
"""The states in which there is a plan for the switch, and it may be changed."""

AWAITED = frozenset({State.SETTLING, State.CHANGING})
"""The states in which a confirmation is awaited."""


def after(state: State, event: Event) -> State:
    """Give the state that follows; raises ValueError for what cannot happen."""
    if event is Event.DISCONNECTED or state is State.GONE:
        return State.GONE
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"{event.name} cannot happen to a switch that is {state.value}") from None


def diagram() -> str:
    """Draw the table, for Mermaid."""
    names = {state: state.value.replace(" ", "_") for state in State}
    lines = ["stateDiagram-v2", f"    [*] --> {names[State.SURVEYING]}"]
    for (state, event), following in TRANSITIONS.items():
        if state is not following:
            lines.append(f"    {names[state]} --> {names[following]}: {event.name.lower()}")
    return "\n".join(lines)
