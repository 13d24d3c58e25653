"""Who uses how much of a port that is shared, and what everybody's meter is to be.

One `PortSharing` for each shared port of each switch turns what the switch's meters have
counted into demands, divides the port's rate (`fbrates.share`), and says which meters are
to be changed.  A `Poller` asks one switch for these counts and gives the changes to its
`SwitchSync`.  No I/O here: times are passed in, messages are queued.

What a meter is set to:

- A VM that wants more than it has gets its share of the division.
- Any other VM keeps at least its *fair share*, which is its share if all wanted all, and
  so not below its min-rate.  It can use that at once when it wakes up; what it does not
  use is lent, and taken back from the others at the next poll.

So the meters' sum may be above the port's rate while somebody lends; the port's own
max-rate, set at the switch, keeps the total at the port's rate meanwhile.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fbrates import share
from fbrates.plan import Meter
from fbrates.share import Claim
from fbrates.sync import SwitchSync, Waiter

POLL_INTERVAL = 0.02
"""Seconds between polls.  A VM that wakes up is seen at the next poll or, if it woke just
before that, at the one after; what the others had waiting then leaves within the switch's
meter-shaping-max-delay (50 ms by default).  Together that is less than 100 ms."""

IDLE_INTERVAL = 0.25
"""Seconds after which to look again whether anybody shares anything."""

POLL_SHARE = 0.5
"""Part of the time that polling may take; when it takes more, polls become rarer."""

POLL_TIMEOUT = 1.0
"""Seconds after which an unanswered poll is forgotten."""

HUNGRY_USAGE = 0.95
"""Who uses this part of its rate, in any one poll, wants more."""

HUNGRY_HOLD = 0.1
"""Seconds for which it then counts as wanting more: TCP's rate, seen over 20 ms in
milliseconds and packets, varies by more than the 5 % above."""

HEADROOM = 1.25
"""A VM that does not want more is given this times its usage: its rate may grow by so
much between two polls without costing it anything.  With less, noise in what is measured
would make it look hungry."""

USAGE_FADE = 0.1
"""Seconds in which the memory of a VM's highest usage fades by a factor of e."""

WAKING_PART = 1 / 16
"""A VM whose usage grows beyond what is reserved for it wants more, if the usage is at
least this part of its fair share: so a keepalive or an ARP request reserves nothing."""

CHANGE = 0.01
"""Meters are changed if the rate differs by at least this part of it."""

SETTLED_CHANGE = 0.001
SETTLED_TIME = 0.5
"""A meter that has not been changed for so many seconds is changed for less."""

CHANGE_UNUSED = 0.2
"""The same for those that do not use up what they have: their usage varies all the time,
and their meters need not follow each variation."""

DRAIN_DEADBAND = 0.002
DRAIN_TIME = 0.1
DRAIN_MOST = 0.2
"""What becomes due faster than the port can send waits at the port: what borrowers had
waiting when they were cut down.  While all go on to want more than there is, nothing else
would ever drain that, so a little less is divided meanwhile: what waits above
DRAIN_DEADBAND seconds of the port's rate (about the error of what is measured) within
DRAIN_TIME, at most DRAIN_MOST of the rate."""

BACKLOG_MOST = 0.1
"""Seconds of the port's rate that can wait at it at most, by our reckoning."""


@dataclass(frozen=True)
class MeterSample:
    """What a meter has counted so far, and for how long, by the switch's clock."""

    bytes_in: int
    bytes_dropped: int
    seconds: float


@dataclass(frozen=True)
class Member:
    """One who shares: rates in kbit/s; `destinations` are meters that are its alone."""

    key: str
    meter: int
    minimum: int
    maximum: int
    weight: int
    destinations: tuple[int, ...] = ()


class _Schedule:
    """When what a meter has admitted becomes due, as the meter reckons it.

    A meter that shapes admits packets for up to meter-shaping-max-delay ahead, and a new
    rate leaves their times as they are.
    """

    def __init__(self) -> None:
        self._until = 0.0
        self._pieces: deque[tuple[float, float, int]] = deque()

    def admit(self, kbit: float, rate: int, since: float) -> None:
        """Note that `kbit` have been admitted at `rate` kbit/s from `since` (in s) on."""
        start = max(self._until, since)
        self._until = start + kbit / rate
        self._pieces.append((start, self._until, rate))

    def due(self, since: float, now: float) -> float:
        """Give the kbit that became due; `since` is the last call's `now`."""
        kbit = 0.0
        for start, end, rate in self._pieces:
            if start < now and end > since:
                kbit += rate * (min(end, now) - max(start, since))
        while self._pieces and self._pieces[0][1] <= now:
            self._pieces.popleft()
        return kbit


@dataclass
class _State:
    """What is known of one member."""

    rate: int
    fair: int = 0
    bytes_passed: int | None = None
    bytes_dropped: int = 0
    seconds: float = 0.0
    usage: float = 0.0
    """kbit/s in the last interval."""
    peak: float = 0.0
    """kbit/s: the highest usage, fading."""
    reserved: int = 0
    """What the last division gave it."""
    hungry_until: float = 0.0
    hungry: bool = False
    changed_at: float = 0.0
    schedule: _Schedule = field(default_factory=_Schedule)


class PortSharing:
    """One port of one switch, and those who share its rate."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.capacity = 0
        self.members: dict[str, Member] = {}
        self._states: dict[str, _State] = {}
        self._backlog = 0.0  # kbit that wait at the port, by our reckoning
        self._time = 0.0  # s, by the switch's clock, since the first sample

    def configure(self, capacity: int, members: Iterable[Member]) -> None:
        """Take new settings; raises ValueError if the minimums add up to too much.

        Who is new starts with its fair share.  Those who stay keep the rates that they
        have, as far as the new settings allow, until the next division.
        """
        by_key = {member.key: member for member in members}
        fair = share.fair_shares(
            capacity, [Claim(m.minimum, m.maximum, m.weight, None) for m in by_key.values()]
        )
        states = {}
        for (key, member), least in zip(by_key.items(), fair, strict=True):
            state = self._states.get(key)
            if state is None or self.members[key].meter != member.meter:
                state = _State(least)
            state.fair = least
            state.rate = min(max(state.rate, member.minimum), member.maximum)
            states[key] = state
        self.capacity, self.members, self._states = capacity, by_key, states

    def adopt(self, rates: Mapping[str, int]) -> None:
        """Start from rates, in kbit/s, that the switch has already, where they are possible.

        What an earlier controller has left in force was a division, and is better than
        the fair share until there is a new one.
        """
        for key, rate in rates.items():
            member, state = self.members.get(key), self._states.get(key)
            if member and state and state.fair <= rate <= member.maximum:
                state.rate = rate

    def rates(self) -> dict[str, int]:
        """Give the rate in kbit/s that each one's meter is to have."""
        return {key: state.rate for key, state in self._states.items()}

    def sample(self, samples: Mapping[int, MeterSample], now: float) -> dict[str, int]:
        """Take what the meters have counted (by id); gives the rates to change, in kbit/s."""
        measured: dict[str, float] = {}
        elapsed = 0.0
        for key, member in self.members.items():
            sample = samples.get(member.meter)
            if sample is None:
                continue
            behind = sum(samples[m].bytes_dropped for m in member.destinations if m in samples)
            seconds, kbit = self._measure(self._states[key], sample, behind, now)
            if seconds:
                elapsed += seconds
                measured[key] = kbit
        if not measured:
            return {}
        # Of all meters together: the switch tells whole milliseconds for each of them.
        self._note_backlog(measured, elapsed / len(measured))
        return self.divide(now)

    def _note_backlog(self, measured: Mapping[str, float], interval: float) -> None:
        """Reckon what waits at the port, from what the meters have let pass (in kbit)."""
        since, self._time = self._time, self._time + interval
        due = 0.0
        for key, state in self._states.items():
            kbit = measured.get(key, 0.0)
            if kbit:
                state.schedule.admit(kbit, state.rate, since)
            due += state.schedule.due(since, self._time)
        waiting = self._backlog + due - self.capacity * interval
        self._backlog = min(max(waiting, 0.0), self.capacity * BACKLOG_MOST)

    @staticmethod
    def _measure(
        state: _State, sample: MeterSample, behind: int, now: float
    ) -> tuple[float, float]:
        """Update one member; gives seconds since the last sample, and kbit that passed.

        `behind` are bytes that passed this meter and were dropped by one behind it,
        which has given their time back.
        """
        passed = sample.bytes_in - sample.bytes_dropped - behind
        seconds = sample.seconds - state.seconds
        previous, dropped = state.bytes_passed, sample.bytes_dropped - state.bytes_dropped
        state.bytes_passed = passed
        state.bytes_dropped, state.seconds = sample.bytes_dropped, sample.seconds
        if previous is None or seconds <= 0 or passed < previous or dropped < 0:
            # The first sample of this meter, or of another one with its number.
            return 0.0, 0.0
        kbit = (passed - previous) * 8 / 1000
        state.usage = kbit / seconds
        growing = state.usage > HEADROOM * state.peak and state.usage >= WAKING_PART * state.fair
        if dropped or growing or state.usage >= HUNGRY_USAGE * state.rate:
            state.hungry_until = now + HUNGRY_HOLD
        state.hungry = now < state.hungry_until
        fade = min(seconds / USAGE_FADE, 1.0)
        state.peak = max(state.usage, state.peak - (state.peak - state.usage) * fade)
        return seconds, kbit

    def divide(self, now: float) -> dict[str, int]:
        """Divide by what is known; gives the rates to change, in kbit/s."""
        claims = []
        for key, member in self.members.items():
            state = self._states[key]
            state.hungry = now < state.hungry_until
            demand = None if state.hungry else int(HEADROOM * state.peak)
            claims.append(Claim(member.minimum, member.maximum, member.weight, demand))
        changes: dict[str, int] = {}
        small: list[tuple[int, str, int]] = []
        in_force = 0
        capacity = self._divisible(claims)
        for (key, state), divided in zip(
            self._states.items(), share.divide(capacity, claims), strict=True
        ):
            state.reserved = divided
            target = divided if state.hungry else max(divided, state.fair)
            threshold = CHANGE if state.hungry else CHANGE_UNUSED
            if state.hungry and now - state.changed_at >= SETTLED_TIME:
                threshold = SETTLED_CHANGE
            if abs(target - state.rate) >= max(threshold * state.rate, 1):
                changes[key] = target
                in_force += divided
            else:
                in_force += state.rate if state.hungry else divided
                if target < state.rate and state.hungry:
                    small.append((target - state.rate, key, target))
        # Many differences below CHANGE can add up to more than the port has.
        for difference, key, target in sorted(small):
            if in_force <= self.capacity:
                break
            changes[key] = target
            in_force += difference
        for key, target in changes.items():
            self._states[key].rate = target
            self._states[key].changed_at = now
        return changes

    def _divisible(self, claims: Iterable[Claim]) -> int:
        excess = self._backlog - self.capacity * DRAIN_DEADBAND
        less = min(max(excess, 0.0) / DRAIN_TIME, self.capacity * DRAIN_MOST)
        return max(int(self.capacity - less), sum(claim.minimum for claim in claims))

    @property
    def backlog_seconds(self) -> float:
        """What waits at the port, by our reckoning, in seconds of the port's rate."""
        return self._backlog / self.capacity

    def view(self, key: str) -> dict[str, Any]:
        """Show one member's share and usage, in bit/s."""
        state = self._states[key]
        return {
            "share_bps": state.rate * 1000,
            "usage_bps": round(state.usage * 1000),
            "wants_more": state.hungry,
        }


@dataclass
class _Poll:
    """A poll under way."""

    started: float
    xids: set[int]
    samples: dict[int, MeterSample] = field(default_factory=dict)


class Poller:
    """Asks one switch what its meters have counted, and divides by the answers.

    Not thread-safe; nothing here yields.
    """

    def __init__(self, switch: SwitchSync, clock: Callable[[], float], log: logging.Logger) -> None:
        self.switch = switch
        self.ports: dict[str, PortSharing] = {}
        self.polls = 0
        self.cost = 0.0
        """Seconds that a poll takes, on average."""
        self._clock = clock
        self._log = log
        self._poll: _Poll | None = None
        self._next = 0.0
        self._slow_told = False

    @property
    def interval(self) -> float:
        """Seconds between polls as it is now."""
        return max(POLL_INTERVAL, self.cost / POLL_SHARE)

    def configure(self, ports: Mapping[str, tuple[int, list[Member]]]) -> None:
        """Take new settings: by port, its rate in kbit/s and who shares it here."""
        for name in set(self.ports) - set(ports):
            del self.ports[name]
        for name, (capacity, members) in ports.items():
            self.ports.setdefault(name, PortSharing(name)).configure(capacity, members)

    def rates(self) -> dict[str, int]:
        """Give the rate in bit/s that each one's meter is to have, by key."""
        return {
            key: rate * 1000 for port in self.ports.values() for key, rate in port.rates().items()
        }

    def adopt(self, meters: Mapping[int, Meter]) -> None:
        """Start from what the switch has; see `PortSharing.adopt`."""
        for port in self.ports.values():
            port.adopt(
                {
                    member.key: meters[member.meter].rate_kbps
                    for member in port.members.values()
                    if member.meter in meters
                }
            )

    def poll(self) -> float:
        """Ask, if it is time to; gives the seconds after which to call again."""
        now = self._clock()
        if not self.switch.audits or not any(port.members for port in self.ports.values()):
            self._poll = None
            return IDLE_INTERVAL
        if self._poll is not None and now - self._poll.started < POLL_TIMEOUT:
            return POLL_INTERVAL / 4
        if now < self._next:
            return self._next - now
        self._poll = _Poll(now, {self.switch.request_stats(m) for m in self._questions()})
        self._next = now + self.interval
        return self.interval

    def _questions(self) -> list[int | None]:
        """Choose between a message for each meter, and one for all (None)."""
        wanted = [
            number
            for port in self.ports.values()
            for member in port.members.values()
            for number in (member.meter, *member.destinations)
        ]
        # A message costs the controller as much as dozens of a message's meters.
        if len(wanted) * 20 < len(self.switch.meters):
            return [number for number in wanted if number in self.switch.meters]
        return [None]

    def reply(self, xid: int, samples: Mapping[int, MeterSample], more: bool = False) -> None:
        """Take (a part of) the answer; after the last part meters are changed."""
        poll = self._poll
        if poll is None or xid not in poll.xids:
            return
        poll.samples.update(samples)
        if more:
            return
        poll.xids.discard(xid)
        if poll.xids:
            return
        self._poll = None
        for port in self.ports.values():
            self._change(port, port.sample(poll.samples, self._clock()))
        self.polls += 1
        self.cost += (self._clock() - poll.started - self.cost) / 8
        if self.interval > 2 * POLL_INTERVAL and not self._slow_told:
            self._slow_told = True
            self._log.warning(
                "switch %s: a poll of the meters takes %.0f ms, asking every %.0f ms: "
                "bandwidth that is lent is given back that much later",
                self.switch.name,
                self.cost * 1000,
                self.interval * 1000,
            )

    def divide(self, name: str, waiter: Waiter | None = None) -> None:
        """Divide a port's rate now, as its settings have changed."""
        port = self.ports[name]
        port.divide(self._clock())
        # All of them: settings may also have moved what is not a change of the division.
        self._change(port, port.rates(), waiter)

    def _change(
        self, port: PortSharing, rates: Mapping[str, int], waiter: Waiter | None = None
    ) -> None:
        """Set meters; lower ones first, so that what is lent on has been taken back."""
        meters = []
        for key, rate in rates.items():
            number = port.members[key].meter
            planned = self.switch.plan.meters.get(number)
            if planned is not None:
                meters.append((rate - planned.rate_kbps, replace(planned, rate_kbps=rate)))
        meters.sort(key=lambda item: item[0])
        self.switch.set_meters([meter for _, meter in meters], waiter)

    def view(self) -> dict[str, Any]:
        """Show how polling goes."""
        return {
            "polls": self.polls,
            "poll_ms": round(self.cost * 1000, 3),
            "interval_ms": round(self.interval * 1000, 3),
        }
