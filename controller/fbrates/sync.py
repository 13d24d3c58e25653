"""One connected switch: what it has, what it should have, and the messages between.

Where a connection is, and what leads from there, is in `fbrates.states`.

An *audit* asks the switch for its meters and for the flows with our cookie, those in
windows of the cookie's lower half: each is answered in a time that does not grow with their
number, and what has come need not be asked for again.  *Reconcile* sends the differences to
the plan, and a barrier.  Between audits the switch is believed to have what was sent to it.

A meter is *ours* if a flow with our cookie uses it; or if its id is one that we have given
and the switch was taken on before, when nobody else had that id.  Others' meters are never
touched.  A switch on which somebody else has an id that we want is not taken on.

OpenFlow has no way to ask for bands of experimenters, so a meter with a *shape band* is
added and deleted again, under an id that is kept for that.  Only a switch that says that
there is no such band (`NO_SHAPE_BAND`) gets drop bands; any other refusal is an error, and
the trial is repeated.

Contract:

- Nothing here blocks, sleeps or yields: `send` must only queue.  The caller runs
  one method at a time.
- Messages are obeyed in the order sent; a barrier is sent after each group of
  changes, and at most one barrier of ours is under way at a time.
- A `Waiter` is completed exactly once: when the switch confirms everything sent
  before it, or when the connection ends.  After an error, what is believed of the VM or
  destination that it was about is in doubt: who changes that waits for the next audit.
- Changes of a plan's flows wait while an audit is under way (its answer could
  otherwise be older than the change); rates of existing meters do not wait.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fbrates import plan as planning
from fbrates import units
from fbrates.config import Shaping
from fbrates.plan import Barrier, Change, Flow, FlowKey, FlowMod, Meter, MeterMod, Plan
from fbrates.states import AWAITED, PLANNED, State, after
from fbrates.states import Event as Happening

REPLY_TIMEOUT = 10.0
"""Seconds after which an unanswered question is asked again."""

RETRY_DELAYS = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds to wait before auditing again after errors, one after the other."""

BARRIER_EVERY = 4096
"""Messages after which a barrier is sent though nobody waits for one: they are remembered
until it is answered, since any of them may be refused until then."""

WINDOW_FLOWS = 2048
MOST_WINDOWS = 1 << 12
"""Flows are asked for in so many windows that each has about WINDOW_FLOWS."""

NO_SHAPE_BAND = frozenset(
    {"OFPET_METER_MOD_FAILED OFPMMFC_BAD_BAND", "OFPET_BAD_REQUEST OFPBRC_BAD_LEN"}
)
"""How switches refuse a band that they do not know; the second is that of an Open vSwitch
without ours, which takes all bands to be 16 bytes long (docs/shape-band.md)."""

REMEMBERED_ERRORS = 20


@dataclass(frozen=True)
class PortsRequest:
    """Ask for the ports."""


@dataclass(frozen=True)
class ReadsShapeBands:
    """Say that we can read shape bands, or the switch would show them as drop bands.

    A switch that does not have them refuses this, which does not matter.
    """


@dataclass(frozen=True)
class MetersRequest:
    """Ask for the configuration of all meters."""


@dataclass(frozen=True)
class FlowsRequest:
    """Ask for the flows whose cookie is ours, and its lowest bits are `window`.

    There are `windows` windows, a power of two.
    """

    window: int = 0
    windows: int = 1


@dataclass(frozen=True)
class MeterStatsRequest:
    """Ask what a meter has counted, or all of them have (None)."""

    meter: int | None = None


@dataclass(frozen=True)
class Trial:
    """Add or delete a meter to find out whether the switch takes it."""

    command: str
    meter: Meter


Message = (
    Change
    | Trial
    | ReadsShapeBands
    | PortsRequest
    | MetersRequest
    | FlowsRequest
    | MeterStatsRequest
)


class Event(Protocol):
    """What a thread waits on: threading.Event or a green one."""

    def set(self) -> Any: ...  # noqa: D102
    def wait(self, timeout: float | None = None) -> bool: ...  # noqa: D102


class Waiter:
    """Someone who wants to know when the switch has done what was sent so far."""

    def __init__(self, event: Event) -> None:
        self.event = event
        self.owners: set[int] | None = set()
        """The numbers of what is waited for: errors about others are not told.  None: all."""
        self.done = False
        self.applied = False
        self.errors: list[str] = []

    def complete(self, confirmed: bool) -> None:
        """Wake the one who waits."""
        self.done = True
        self.applied = confirmed and not self.errors
        self.event.set()


@dataclass
class SwitchError:
    """An error message from the switch, with what it was about."""

    time: float
    about: str
    error: str
    count: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Give what GET /v1/status shows."""
        return {
            "time": self.time,
            "about": self.about,
            "error": self.error,
            "count": self.count,
        }


@dataclass(frozen=True)
class _Sent:
    """What a message was about, in case it is refused."""

    about: str
    owner: int | None = None
    """The number of the VM or destination that it changed, 0 for what is nobody's."""


@dataclass
class _Trial:
    add_xid: int
    barrier_xid: int
    started: float
    error: str | None = None


@dataclass
class _Audit:
    meters_xid: int
    flows_xid: int
    windows: int
    progress: float
    """When something was last heard."""
    window: int = 0
    meters: dict[int, Meter] = field(default_factory=dict)
    """All that the switch has."""
    flows: dict[FlowKey, Flow] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    """Meters changed since the switch was asked: the answer is older than that."""
    doubtful: set[int] = field(default_factory=set)
    """Owners of what was refused since then."""
    meters_done: bool = False
    flows_done: bool = False


class Desk(Protocol):
    """What a switch has to ask of those who know what it should have."""

    def plan(self, ports: Mapping[str, int], shape: bool) -> Plan:
        """Give what it should have."""

    def describe(self, number: int) -> str:
        """Name the owner of a meter id."""

    def given(self) -> Mapping[int, str]:
        """Give the meter ids that are given, or were and are not free yet, with their owners."""

    def trial(self) -> int:
        """Give the meter id that shape bands are tried with; it is among `given`."""

    def meter_range(self) -> tuple[int, int]:
        """Give the first and last id that are ours."""

    def resync_interval(self) -> float:
        """Give the seconds between audits; 0: only when there is a reason."""

    def taken_on(self) -> set[int] | None:
        """Give the ids that others had when the switch was taken on; None: it was not yet."""

    def take_on(self, others: set[int]) -> None:
        """Note that the switch is taken on, and which ids others have."""

    def adopt(self, ports: Mapping[str, int], meters: Mapping[int, Meter]) -> None:
        """Hear of the ports and our meters that it has at first, before the plan is made."""


class SwitchSync:
    """See the module's text."""

    def __init__(
        self,
        datapath_id: int,
        send: Callable[[Message], int],
        desk: Desk,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        log: logging.Logger,
        errors: deque[SwitchError] | None = None,
    ) -> None:
        """Take on a switch."""
        self.datapath_id = datapath_id
        self.ports: dict[str, int] = {}
        self.meters: dict[int, Meter] = {}
        """Those that are ours."""
        self.others: set[int] = set()
        """Ids in our range that others have."""
        self.flows: dict[FlowKey, Flow] = {}
        self.plan = Plan()
        self.state = State.SURVEYING
        self.shapes: bool | None = None
        """Whether it has the shape band; None until that is known."""
        self.no_shape_reason: str | None = None
        self.blocked: str | None = None
        """Why it is left alone."""
        self.audits = 0
        self.repairs = 0
        self.errors = errors if errors is not None else deque(maxlen=REMEMBERED_ERRORS)

        self._send = send
        self._desk = desk
        self._clock = clock
        self._wall_clock = wall_clock
        self._log = log
        self._ports_xid: int | None = None
        self._asked_ports = 0.0
        self._port_changes: list[tuple[str, int, bool]] = []
        """Told since the ports were asked for."""
        self._trial: _Trial | None = None
        self._audit: _Audit | None = None
        self._surveyed = False
        """Whether what the switch has is known, and may be changed."""
        self._begun = False
        self._adopting = False
        self._audited_at: float | None = None
        self._sent: OrderedDict[int, _Sent] = OrderedDict()
        self._doubtful: set[int] = set()
        """Owners of what was refused: `meters` and `flows` may be wrong about them."""
        self._barrier: int | None = None
        self._barrier_sent = 0.0
        self._barrier_waiters: list[Waiter] = []
        self._next_waiters: list[Waiter] = []
        self._held_waiters: list[Waiter] = []
        self._audit_waiters: list[Waiter] = []
        self._next_barrier_wanted = False
        self._told: set[tuple[str, str]] = set()
        self._failures = 0
        self._failed_since_barrier = False
        self._retry_at: float | None = None

    @property
    def name(self) -> str:
        """The datapath id as OVS writes it."""
        return f"{self.datapath_id:016x}"

    @property
    def connected(self) -> bool:
        """Whether this is the switch's connection."""
        return self.state is not State.GONE

    @property
    def in_sync(self) -> bool:
        """Whether all was confirmed, but for a change that has been sent since."""
        return self.state in (State.IN_SYNC, State.CHANGING)

    @property
    def _settling(self) -> bool:
        """Whether a confirmation is awaited."""
        return self.state in AWAITED

    @property
    def _ready(self) -> bool:
        """Whether there is a plan, and the switch may be changed."""
        return self.state in PLANNED

    def _enter(self, event: Happening) -> None:
        """Go to the state that follows."""
        self.state = after(self.state, event)

    # What the connection tells us.

    def connect(self) -> None:
        """Start: the switch has just connected."""
        self._send(ReadsShapeBands())
        self._ask_ports()
        self.start_audit()

    def disconnect(self) -> None:
        """End: nothing that is under way will be answered."""
        self._enter(Happening.DISCONNECTED)
        # Answers to it may still be read: they must bring nothing about.
        self._send = lambda _message: 0
        waiters = self._waiters()
        self._barrier_waiters, self._next_waiters = [], []
        self._held_waiters, self._audit_waiters = [], []
        for waiter in waiters:
            waiter.errors.append("the switch disconnected")
            waiter.complete(False)

    def ports_reply(self, xid: int, ports: Iterable[tuple[str, int]], more: bool = False) -> None:
        """Take (a part of) the answer to PortsRequest."""
        if xid != self._ports_xid:
            return
        for name, number in ports:
            if self.ports.setdefault(name, number) != number:
                self._log.warning("switch %s: two ports are named %s", self.name, name)
        if not more:
            self._ports_xid = None
            # Those that the answer is older than, and those before it: all that the
            # switch has told of a port until now, so the last one is true either way.
            changes, self._port_changes = self._port_changes, []
            for change in changes:
                self._change_port(*change)
            self._begin()

    def port_changed(self, name: str, number: int, deleted: bool) -> None:
        """Take a port-status message.

        Most say nothing that matters here, such as that a guest took its link down, and
        guests can cause as many as they like: these must cost nothing.
        """
        if self._ports_xid is not None:
            self._port_changes.append((name, number, deleted))
        elif self._change_port(name, number, deleted):
            self.replan()

    def _change_port(self, name: str, number: int, deleted: bool) -> bool:
        """Take note of a port; False if that is what was known of it."""
        if (self.ports.get(name) == number) != deleted:
            return False
        if deleted:
            del self.ports[name]
            return True
        for other in [n for n, value in self.ports.items() if value == number]:
            del self.ports[other]
        self.ports[name] = number
        return True

    def meters_reply(self, xid: int, meters: Iterable[Meter], more: bool = False) -> None:
        """Take (a part of) the answer to MetersRequest."""
        audit = self._audit
        if audit is None or xid != audit.meters_xid:
            return
        audit.progress = self._clock()
        audit.meters.update({meter.id: meter for meter in meters})
        audit.meters_done = not more
        self._finish_audit()

    def flows_reply(self, xid: int, flows: Iterable[Flow], more: bool = False) -> None:
        """Take (a part of) the answer to FlowsRequest."""
        audit = self._audit
        if audit is None or xid != audit.flows_xid:
            return
        ours = planning.COOKIE_PREFIX << planning.COOKIE_SHIFT
        audit.flows.update(
            {flow.key: flow for flow in flows if flow.cookie & planning.COOKIE_MASK == ours}
        )
        audit.progress = self._clock()
        if not more:
            audit.window += 1
            audit.flows_done = audit.window == audit.windows
            if not audit.flows_done:
                self._ask_flows(audit)
        self._finish_audit()

    def barrier_reply(self, xid: int) -> None:
        """Take the answer to a Barrier."""
        if xid in self._sent:
            # Nothing that was sent before it can be refused any more.
            while self._sent.popitem(last=False)[0] != xid:
                pass
        if self._trial is not None and xid == self._trial.barrier_xid:
            error, self._trial = self._trial.error, None
            self._judge_trial(error)
            return
        if xid != self._barrier:
            return
        self._barrier = None
        waiters, self._barrier_waiters = self._barrier_waiters, []
        if self._next_barrier_wanted:
            self._send_barrier()
        elif self._settling:
            if not self._failed_since_barrier and not self._doubtful:
                if not self.in_sync:
                    self._log.info(
                        "switch %s: in sync, %d meters, %d flows",
                        self.name,
                        len(self.meters),
                        len(self.flows),
                    )
                self._enter(Happening.CONFIRMED)
                self._failures = 0
                self._told.clear()
            else:
                self._enter(Happening.DOUBTED)
                self._schedule_retry()
            self._failed_since_barrier = False
        for waiter in waiters:
            waiter.complete(True)

    def error(self, xid: int, error: str) -> None:
        """Take an error message."""
        if self._trial is not None and xid == self._trial.add_xid:
            self._trial.error = error
            return
        sent = self._sent.get(xid)
        if sent is None:
            self._log.debug("switch %s: a message of another application: %s", self.name, error)
            return
        about = sent.about
        self._note_error(about, error)
        if sent.owner is not None:
            # Also who came later and found that what he wants had been sent already.
            for waiter in self._waiters():
                if waiter.owners is None or sent.owner in waiter.owners:
                    waiter.errors.append(f"{about}: {error}")
            self._doubtful.add(sent.owner)
            if self._audit is not None:
                # The answers that are on their way may be older than this message.
                self._audit.doubtful.add(sent.owner)
        self._enter(Happening.REFUSED)
        self._failed_since_barrier = True
        self._schedule_retry()

    def _note_error(self, about: str, error: str) -> None:
        """Remember an error, and tell it once until the switch was in sync again."""
        now = self._wall_clock()
        same = [item for item in self.errors if (item.about, item.error) == (about, error)]
        if same:
            same[0].time = now
            same[0].count += 1
        else:
            self.errors.append(SwitchError(now, about, error))
        if (about, error) not in self._told:
            # A cause that stays must not fill the log.
            self._told.add((about, error))
            self._log.error("switch %s: %s: %s", self.name, about, error)

    # What the controller wants.

    def adopt(self) -> None:
        """Take all meters in our range for ours, whoever made them, at the next audit."""
        self._adopting = True
        self._audit = None
        self.start_audit()

    def numbers_in_use(self) -> set[int] | None:
        """Give the numbers that its meters and flows have; None while that is not sure."""
        if self.state is not State.IN_SYNC or self._doubtful:
            return None
        numbers = set(self.meters)
        for flow in self.flows.values():
            numbers.add(flow.cookie & 0xFFFFFFFF)
            if flow.meter is not None:
                numbers.add(flow.meter)
        return numbers

    def replan(self, waiter: Waiter | None = None, owners: set[int] | None = None) -> None:
        """Bring the switch to a changed configuration, of `owners` or all, or changed ports."""
        if waiter is not None:
            waiter.owners = owners
            in_doubt = bool(self._doubtful if owners is None else self._doubtful & owners)
            (self._audit_waiters if in_doubt else self._held_waiters).append(waiter)
        if self._ready:
            self.plan = self._plan()
            self._reconcile()

    def set_meter(self, meter: Meter, waiter: Waiter) -> bool:
        """Change the rate of one meter at once; False if the switch has no such meter.

        For a meter that is only about to be added (the switch has just connected),
        the plan is changed, and the addition will have the new rate.
        """
        if not self._ready:
            waiter.owners = {meter.id}
            self._held_waiters.append(waiter)
            return True
        if meter.id not in self.plan.meters:
            return False
        self.plan.meters[meter.id] = meter
        if self.meters.get(meter.id, meter) != meter:
            self._change(MeterMod(planning.MODIFY, meter))
            if self._audit is not None:
                self._audit.changed.add(meter.id)
        self._confirm(waiter, {meter.id})
        return True

    def set_meters(self, meters: Iterable[Meter], waiter: Waiter | None = None) -> None:
        """Change meters of the plan at once, in this order; those it has not are left out.

        Without a `waiter` no confirmation is asked for; errors are noted as ever.
        """
        changed = set()
        for meter in meters:
            if meter.id not in self.plan.meters:
                continue
            changed.add(meter.id)
            self.plan.meters[meter.id] = meter
            if self.meters.get(meter.id, meter) != meter:
                self._change(MeterMod(planning.MODIFY, meter))
                if self._audit is not None:
                    self._audit.changed.add(meter.id)
        if waiter is not None:
            self._confirm(waiter, changed)

    def request_stats(self, meter: int | None = None) -> int:
        """Ask what a meter has counted, or all have; gives the transaction id."""
        xid = self._send(MeterStatsRequest(meter))
        self._note(xid, "asking for meters' counters")
        return xid

    def has_owner(self, number: int) -> bool:
        """Whether any planned flow belongs to the VM or destination with this number."""
        cookie = planning.COOKIE_PREFIX << planning.COOKIE_SHIFT | number
        return any(flow.cookie == cookie for flow in self.plan.flows.values())

    def concerns(self, numbers: set[int]) -> bool:
        """Whether the switch has, or should have, one of these."""
        return (
            not numbers.isdisjoint(self.meters)
            or not numbers.isdisjoint(self.plan.meters)
            or any(self.has_owner(number) for number in numbers)
        )

    def may_concern(self, numbers: set[int]) -> bool:
        """As `concerns`, but true, too, while it is not known what the switch is to have."""
        return not self._ready or self.concerns(numbers)

    def has_done(self, numbers: set[int]) -> bool:
        """Whether what is wanted of these is confirmed."""
        return self.in_sync and self._audit_clean() and numbers.isdisjoint(self._doubtful)

    def start_audit(self) -> None:
        """Ask the switch what it has, and then repair what differs."""
        if self._audit is not None:
            return
        self._retry_at = None
        meters_xid = self._send(MetersRequest())
        self._note(meters_xid, "asking for meters")
        windows, expected = 1, max(len(self.flows), len(self._desk.given()))
        while windows * WINDOW_FLOWS < expected and windows < MOST_WINDOWS:
            windows *= 2
        self._audit = _Audit(meters_xid, 0, windows, self._clock())
        self._ask_flows(self._audit)

    def _ask_flows(self, audit: _Audit) -> None:
        audit.flows_xid = self._send(FlowsRequest(audit.window, audit.windows))
        self._note(audit.flows_xid, "asking for flows")

    def _ask_again(self, audit: _Audit) -> None:
        """Ask again for what an audit still lacks."""
        self._log.warning("switch %s: no answer to an audit, asking again", self.name)
        audit.progress = self._clock()
        if not audit.meters_done:
            audit.meters_xid = self._send(MetersRequest())
            self._note(audit.meters_xid, "asking for meters")
        if not audit.flows_done:
            self._ask_flows(audit)

    def tick(self) -> None:
        """Do what is due; to be called about twice a second."""
        now = self._clock()
        if self._trial is not None and now - self._trial.started > REPLY_TIMEOUT:
            self._try_shape()
        if self._ports_xid is not None and now - self._asked_ports > REPLY_TIMEOUT:
            self._ask_ports()
        if self._audit is not None and now - self._audit.progress > REPLY_TIMEOUT:
            self._ask_again(self._audit)
        if self._trial is not None or self._ports_xid is not None:
            return
        if self._barrier is not None and now - self._barrier_sent > REPLY_TIMEOUT:
            self._log.warning("switch %s: no answer to a barrier, sending another", self.name)
            self._send_barrier()
        if self._audit is not None:
            return
        if self._retry_at is not None:
            if now >= self._retry_at:
                self.start_audit()
        elif (
            (interval := self._desk.resync_interval())
            and self._audited_at is not None
            and now - self._audited_at >= interval
        ):
            self.start_audit()

    # Inside.

    def _plan(self) -> Plan:
        return self._desk.plan(self.ports, bool(self.shapes))

    def _begin(self) -> None:
        """Go on when all that was asked at first, or the ports again, is answered."""
        if self._ports_xid is not None or not self._surveyed or self._trial is not None:
            return
        if self.state is not State.TRYING:
            self._enter(Happening.SURVEYED)
        if self.shapes is None:
            self._try_shape()
            return
        self._enter(Happening.TRIED)
        if not self._begun:
            self._begun = True
            self._desk.adopt(self.ports, self.meters)
        self.plan = self._plan()
        self._reconcile(found=True)

    def _try_shape(self) -> None:
        number = self._desk.trial()
        # With the flag: a switch that did not know it would refuse all that a file asks for.
        meter = trial_meter(number)
        messages: list[Message] = [Trial(planning.ADD, meter), Trial(planning.DELETE, meter)]
        if self._trial is not None or number in self.meters:
            # An earlier trial was interrupted.
            messages.insert(0, Trial(planning.DELETE, meter))
            self.meters.pop(number, None)
        xids = [self._send(message) for message in (*messages, Barrier())]
        for xid in xids:
            self._note(xid, "trying the shape band")
        self._trial = _Trial(xids[-3], xids[-1], self._clock())

    def _judge_trial(self, error: str | None) -> None:
        """Draw the conclusion from a trial, which was refused with `error` or was not."""
        if error is None or error in NO_SHAPE_BAND:
            self._know_shape(error is None, error)
            self._begin()
            return
        # This says nothing about the band, neither way.
        self._note_error("trying the shape band", error)
        if any(meter.shaping for meter in self.meters.values()):
            self._know_shape(True, None)
            self._begin()
            return
        self._schedule_retry()

    def _know_shape(self, shapes: bool, reason: str | None) -> None:
        self.shapes, self.no_shape_reason = shapes, reason
        if shapes:
            self._log.info("switch %s: has the shape band", self.name)
        else:
            self._log.warning(
                "switch %s: no shape bands (%s): its meters have drop bands, which shape "
                "with other_config:meter-shaping=true; 'shaping' of the file is not in force",
                self.name,
                reason,
            )

    def _ask_ports(self) -> None:
        self.ports = {}
        self._port_changes = []
        self._ports_xid = self._send(PortsRequest())
        self._asked_ports = self._clock()

    def _finish_audit(self) -> None:
        audit = self._audit
        if audit is None or not (audit.meters_done and audit.flows_done):
            return
        self._audit = None
        self._audited_at = self._clock()
        self.audits += 1
        for number in audit.changed & audit.meters.keys() & self.meters.keys():
            audit.meters[number] = self.meters[number]
        self._doubtful = audit.doubtful
        self._held_waiters += self._audit_waiters
        self._audit_waiters = []
        self.flows = audit.flows
        if not self._sort_out(audit):
            return
        if not self._surveyed:
            self._surveyed = True
            self._begin()
        elif not self._ready:
            self._begin()
        else:
            self._reconcile(found=True)

    def _sort_out(self, audit: _Audit) -> bool:
        """Find which meters are ours; False if others have ids that we want."""
        given, (first, last) = self._desk.given(), self._desk.meter_range()
        trial = trial_meter(self._desk.trial())
        used = {flow.meter for flow in audit.flows.values()}
        others_before = self._desk.taken_on()
        known = given.keys() - others_before if others_before is not None else set()
        ours = {
            number: meter
            for number, meter in audit.meters.items()
            if number in used or number in known or meter == trial
        }
        if self._adopting:
            ours = {n: m for n, m in audit.meters.items() if first <= n <= last or n in ours}
        others = {n for n in audit.meters if first <= n <= last and n not in ours}
        wanted = sorted(given.keys() & audit.meters.keys() - ours.keys())
        if wanted:
            self.others = others
            self._block(wanted, given)
            return False
        adopted = sorted(ours.keys() - used - known) if self._adopting else []
        if adopted:
            self._log.warning("switch %s: adopted meters %s", self.name, _some(adopted))
        if others - self.others:
            self._log.warning(
                "switch %s: meters of others among our ids, left alone: %s",
                self.name,
                _some(sorted(others)),
            )
        self._adopting, self.blocked = False, None
        self.others, self.meters = others, ours
        self._desk.take_on(others)
        return True

    def _block(self, numbers: list[int], given: Mapping[int, str]) -> None:
        held = _some([f"{number} ({given[number]})" for number in numbers])
        reason = f"others have meters with ids that are wanted here: {held}"
        if reason != self.blocked:
            self._log.error(
                "switch %s: left alone: %s; delete them there, choose other ids (meters.first, "
                "meters.last), or take them over: flowbundler-ctl adopt %s",
                self.name,
                reason,
                self.name,
            )
        self.blocked = reason
        self._enter(Happening.HELD)
        self._surveyed = False
        self._retry_at = None
        self._schedule_retry()

    def _reconcile(self, found: bool = False) -> None:
        if self._audit is not None:
            return
        self._failed_since_barrier = False
        changes = planning.diff(self.plan, self.meters, self.flows)
        if changes and found and self.in_sync:
            self.repairs += 1
            self._log.warning(
                "switch %s: differed from the plan in %d places, repairing",
                self.name,
                sum(not isinstance(change, Barrier) for change in changes),
            )
        deleted = [
            str(change.meter.id)
            for change in changes
            if isinstance(change, MeterMod) and change.command == planning.DELETE
        ]
        if deleted and found:
            self._log.info(
                "switch %s: deleting meters that are not wanted: %s", self.name, _some(deleted)
            )
        for change in changes:
            if isinstance(change, Barrier):
                self._note(self._send(change), "barrier")
            else:
                self._change(change)
        if self._held_waiters:
            self._next_waiters += self._held_waiters
            self._held_waiters = []
            self._want_barrier()
        if changes or not self.in_sync:
            # In sync once the switch has confirmed that, changes or none.
            self._enter(Happening.SENT)
            self._want_barrier()

    def _change(self, change: MeterMod | FlowMod) -> None:
        what = self._describe(change)
        owner = (
            change.meter.id
            if isinstance(change, MeterMod)
            else change.flow.cookie & ~planning.COOKIE_MASK
        )
        self._note(self._send(change), what, owner)
        planning.apply([change], self.meters, self.flows)
        self._log.debug("switch %s: %s", self.name, what)

    def _confirm(self, waiter: Waiter, owners: set[int]) -> None:
        """Tell `waiter` when what is wanted of these meters is known to be done."""
        waiter.owners = owners
        if not owners <= self.meters.keys():
            # Some are only about to be added.
            self._held_waiters.append(waiter)
        elif owners & self._doubtful:
            self._audit_waiters.append(waiter)
        else:
            self._next_waiters.append(waiter)
            self._want_barrier()

    def _waiters(self) -> list[Waiter]:
        return [
            *self._barrier_waiters,
            *self._next_waiters,
            *self._held_waiters,
            *self._audit_waiters,
        ]

    def _describe(self, change: Change) -> str:
        match change:
            case MeterMod(command, meter):
                rate = (
                    ""
                    if command == planning.DELETE
                    else (f" {units.format_rate(meter.rate_kbps * 1000)}")
                )
                return f"{command} meter {meter.id} of {self._desk.describe(meter.id)}{rate}"
            case FlowMod(command, flow):
                owner = flow.cookie & 0xFFFFFFFF
                of = f" of {self._desk.describe(owner)}" if owner else ""
                match_text = ",".join(f"{k}={v}" for k, v in flow.key.match) or "any"
                return f"{command} flow{of} in table {flow.key.table}: {match_text}"
        return "barrier"

    def _note(self, xid: int, what: str, owner: int | None = None) -> None:
        self._sent[xid] = _Sent(what, owner)
        if len(self._sent) > BARRIER_EVERY and self._barrier is None:
            self._send_barrier()

    def _want_barrier(self) -> None:
        self._next_barrier_wanted = True
        if self._barrier is None:
            self._send_barrier()

    def _send_barrier(self) -> None:
        self._next_barrier_wanted = False
        self._barrier_waiters += self._next_waiters
        self._next_waiters = []
        self._barrier = self._send(Barrier())
        self._barrier_sent = self._clock()
        self._note(self._barrier, "barrier")

    def _schedule_retry(self) -> None:
        if self._retry_at is None:
            delay = RETRY_DELAYS[min(self._failures, len(RETRY_DELAYS) - 1)]
            self._failures += 1
            self._retry_at = self._clock() + delay

    def status(self) -> dict[str, Any]:
        """Give the switch's part of GET /v1/status."""
        return {
            "connected": self.connected,
            "state": self.state.value,
            "band": None if self.shapes is None else "shape" if self.plan.shape else "drop",
            "no_shape_reason": "the file says so"
            if self.shapes and not self.plan.shape
            else self.no_shape_reason,
            "in_sync": self.in_sync and self._audit_clean(),
            "ports": len(self.ports),
            "missing_ports": sorted(self.plan.missing_ports),
            "blocked": self.blocked,
            "others_meters": sorted(self.others),
            "unknown_sources": self._unknown_sources(),
            "meters": len(self.meters),
            "flows": len(self.flows),
            "audits": self.audits,
            "repairs": self.repairs,
            "errors": [error.as_dict() for error in self.errors],
        }

    def _unknown_sources(self) -> dict[str, int]:
        """Say what came from nobody that is known, as of the last audit."""
        flow = self.flows.get(planning.UNKNOWN_FLOW)
        return {"packets": flow.packets if flow else 0, "bytes": flow.bytes if flow else 0}

    def _audit_clean(self) -> bool:
        return not self._settling


def trial_meter(number: int) -> Meter:
    """Give the meter that shape bands are tried with; no file can ask for such a one."""
    return Meter(number, 1, shaping=Shaping(fair=True))


def _some(items: Sequence[object]) -> str:
    """Show the first ten."""
    more = "" if len(items) <= 10 else f" and {len(items) - 10} more"
    return ", ".join(map(str, items[:10])) + more
