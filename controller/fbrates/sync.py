"""One connected switch: what it has, what it should have, and the messages between.

Life of a connection::

    connect -> try the shape band, -> audit -> reconcile -> in sync -+
               ask for ports            ^                            |
                                        +--- every resync_interval, -+
                                             after an error or a silence

OpenFlow has no way to ask for bands of experimenters, so a meter with a *shape band* is
added and deleted again, under an id of ours that nothing has.  A switch that refuses it
gets drop bands.

An *audit* asks the switch for its meters and for the flows with our cookie.
*Reconcile* sends the differences to the plan, and a barrier.  Between audits the
switch is believed to have what was sent to it.

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fbrates import plan as planning
from fbrates import units
from fbrates.config import Shaping
from fbrates.plan import Barrier, Change, Flow, FlowKey, FlowMod, Meter, MeterMod, Plan

REPLY_TIMEOUT = 10.0
"""Seconds after which an unanswered question is asked again."""

RETRY_DELAYS = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds to wait before auditing again after errors, one after the other."""

BARRIER_EVERY = 4096
"""Messages after which a barrier is sent though nobody waits for one: they are remembered
until it is answered, since any of them may be refused until then."""

REMEMBERED_ERRORS = 20


@dataclass(frozen=True)
class PortsRequest:
    """Ask for the ports."""


@dataclass(frozen=True)
class MetersRequest:
    """Ask for the configuration of all meters."""


@dataclass(frozen=True)
class FlowsRequest:
    """Ask for the flows whose cookie is ours."""


@dataclass(frozen=True)
class MeterStatsRequest:
    """Ask what a meter has counted, or all of them have (None)."""

    meter: int | None = None


@dataclass(frozen=True)
class Trial:
    """Add or delete a meter to find out whether the switch takes it."""

    command: str
    meter: Meter


Message = Change | Trial | PortsRequest | MetersRequest | FlowsRequest | MeterStatsRequest


class Event(Protocol):
    """What a thread waits on: threading.Event or a green one."""

    def set(self) -> Any: ...  # noqa: D102
    def wait(self, timeout: float | None = None) -> bool: ...  # noqa: D102


class Waiter:
    """Someone who wants to know when the switch has done what was sent so far."""

    def __init__(self, event: Event) -> None:
        self.event = event
        self.owners: set[int] = set()
        """The numbers of what is waited for: errors about others are not told."""
        self.applied = False
        self.errors: list[str] = []

    def complete(self, confirmed: bool) -> None:
        """Wake the one who waits."""
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
    started: float
    meters: dict[int, Meter] = field(default_factory=dict)
    flows: dict[FlowKey, Flow] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    """Meters changed since the switch was asked: the answer is older than that."""
    doubtful: set[int] = field(default_factory=set)
    """Owners of what was refused since then."""
    meters_done: bool = False
    flows_done: bool = False


class SwitchSync:
    """See the module's text."""

    def __init__(
        self,
        datapath_id: int,
        send: Callable[[Message], int],
        build_plan: Callable[[Mapping[str, int], bool], Plan],
        spare_meter: Callable[[], int | None],
        describe: Callable[[int], str],
        meter_range: tuple[int, int],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        log: logging.Logger,
        errors: deque[SwitchError] | None = None,
        resync_interval: float = 10,
        adopt: Callable[[Mapping[int, Meter]], None] | None = None,
    ) -> None:
        """Take on a switch.

        `adopt` is told of the meters that the first audit found, before the plan is
        made again and carried out.
        """
        self.datapath_id = datapath_id
        self.ports: dict[str, int] = {}
        self.meters: dict[int, Meter] = {}
        self.flows: dict[FlowKey, Flow] = {}
        self.plan = Plan()
        self.in_sync = False
        self.shapes: bool | None = None
        """Whether it has the shape band; None until that is known."""
        self.no_shape_reason: str | None = None
        self.connected = True
        self.audits = 0
        self.repairs = 0
        self.errors = errors if errors is not None else deque(maxlen=REMEMBERED_ERRORS)
        self.describe = describe
        self.meter_range = meter_range
        self.resync_interval = resync_interval

        self._send = send
        self._build_plan = build_plan
        self._adopt = adopt
        self._spare_meter = spare_meter
        self._clock = clock
        self._wall_clock = wall_clock
        self._log = log
        self._ports_xid: int | None = None
        self._asked_ports = 0.0
        self._port_changes: list[tuple[str, int, bool]] = []
        """Told since the ports were asked for."""
        self._trial: _Trial | None = None
        self._audit: _Audit | None = None
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
        self._settling = False
        self._told: set[tuple[str, str]] = set()
        self._failures = 0
        self._failed_since_barrier = False
        self._retry_at: float | None = None

    @property
    def name(self) -> str:
        """The datapath id as OVS writes it."""
        return f"{self.datapath_id:016x}"

    # What the connection tells us.

    def connect(self) -> None:
        """Start: the switch has just connected."""
        self._try_shape()
        self._ask_ports()

    def disconnect(self) -> None:
        """End: nothing that is under way will be answered."""
        self.connected = self.in_sync = False
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
        first, last = self.meter_range
        audit.meters.update({meter.id: meter for meter in meters if first <= meter.id <= last})
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
        audit.flows_done = not more
        self._finish_audit()

    def barrier_reply(self, xid: int) -> None:
        """Take the answer to a Barrier."""
        if xid in self._sent:
            # Nothing that was sent before it can be refused any more.
            while self._sent.popitem(last=False)[0] != xid:
                pass
        if self._trial is not None and xid == self._trial.barrier_xid:
            error, self._trial = self._trial.error, None
            self._know_shape(error is None, error)
            self._begin()
            return
        if xid != self._barrier:
            return
        self._barrier = None
        waiters, self._barrier_waiters = self._barrier_waiters, []
        if self._next_barrier_wanted:
            self._send_barrier()
        elif self._settling:
            self._settling = False
            if not self._failed_since_barrier and not self._doubtful:
                if not self.in_sync:
                    self._log.info(
                        "switch %s: in sync, %d meters, %d flows",
                        self.name,
                        len(self.meters),
                        len(self.flows),
                    )
                self.in_sync = True
                self._failures = 0
                self._told.clear()
            else:
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
        now = self._wall_clock()
        same = [item for item in self.errors if (item.about, item.error) == (about, error)]
        if same:
            same[0].time = now
            same[0].count += 1
        else:
            self.errors.append(SwitchError(now, about, error))
        if (about, error) not in self._told:
            # Once until the switch was in sync again: a cause that stays must not
            # fill the log.
            self._told.add((about, error))
            self._log.error("switch %s: %s: %s", self.name, about, error)
        if sent.owner is not None:
            # Also who came later and found that what he wants had been sent already.
            for waiter in self._waiters():
                if sent.owner in waiter.owners:
                    waiter.errors.append(f"{about}: {error}")
            self._doubtful.add(sent.owner)
            if self._audit is not None:
                # The answers that are on their way may be older than this message.
                self._audit.doubtful.add(sent.owner)
        self.in_sync = False
        self._failed_since_barrier = True
        self._schedule_retry()

    # What the controller wants.

    def replan(self, waiter: Waiter | None = None, owner: int | None = None) -> None:
        """Bring the switch to a changed configuration, of `owner`, or changed ports."""
        if waiter is not None:
            waiter.owners = set() if owner is None else {owner}
            in_doubt = owner in self._doubtful
            (self._audit_waiters if in_doubt else self._held_waiters).append(waiter)
        if self._ready:
            self.plan = self._plan()
            self._reconcile()

    def set_meter(self, meter: Meter, waiter: Waiter) -> bool:
        """Change the rate of one meter at once; False if the switch has no such meter.

        For a meter that is only about to be added (the switch has just connected),
        the plan is changed, and the addition will have the new rate.
        """
        if self._ready and meter.id not in self.plan.meters:
            return False
        if meter.id in self.plan.meters:
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

    def start_audit(self) -> None:
        """Ask the switch what it has, and then repair what differs."""
        if self._audit is not None:
            return
        self._retry_at = None
        meters_xid = self._send(MetersRequest())
        flows_xid = self._send(FlowsRequest())
        self._note(meters_xid, "asking for meters")
        self._note(flows_xid, "asking for flows")
        self._audit = _Audit(meters_xid, flows_xid, self._clock())

    def tick(self) -> None:
        """Do what is due; to be called about twice a second."""
        now = self._clock()
        if self._trial is not None and now - self._trial.started > REPLY_TIMEOUT:
            self._try_shape()
        if self._ports_xid is not None and now - self._asked_ports > REPLY_TIMEOUT:
            self._ask_ports()
        if not self._ready:
            return
        if self._audit is not None and now - self._audit.started > REPLY_TIMEOUT:
            self._log.warning("switch %s: no answer to an audit, asking again", self.name)
            self._audit = None
            self.start_audit()
        if self._barrier is not None and now - self._barrier_sent > REPLY_TIMEOUT:
            self._log.warning("switch %s: no answer to a barrier, sending another", self.name)
            self._send_barrier()
        if self._audit is not None:
            return
        if self._retry_at is not None:
            if now >= self._retry_at:
                self.start_audit()
        elif (
            self.resync_interval
            and self._audited_at is not None
            and now - self._audited_at >= self.resync_interval
        ):
            self.start_audit()

    # Inside.

    @property
    def _ready(self) -> bool:
        """Whether what a plan depends on is known."""
        return self._ports_xid is None and self.shapes is not None

    def _plan(self) -> Plan:
        return self._build_plan(self.ports, bool(self.shapes))

    def _begin(self) -> None:
        """Audit for the first time, or after all ports were asked for again."""
        if self._ready:
            self.plan = self._plan()
            self.start_audit()

    def _try_shape(self) -> None:
        number = self._spare_meter()
        if number is None:
            self._know_shape(False, "no meter id is left for a trial")
            return
        # With the flag: a switch that did not know it would refuse all that a file asks for.
        meter = Meter(number, 1, shaping=Shaping(fair=True))
        # Deleted first because an earlier trial may have been interrupted.
        before = self._send(Trial(planning.DELETE, meter))
        add = self._send(Trial(planning.ADD, meter))
        after = self._send(Trial(planning.DELETE, meter))
        barrier = self._send(Barrier())
        for xid in (before, add, after, barrier):
            self._note(xid, "trying the shape band")
        self._trial = _Trial(add, barrier, self._clock())

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
        for number in audit.changed & audit.meters.keys():
            audit.meters[number] = self.meters[number]
        self.meters, self.flows = audit.meters, audit.flows
        self._doubtful = audit.doubtful
        self._held_waiters += self._audit_waiters
        self._audit_waiters = []
        if self._adopt is not None and self.audits == 1:
            self._adopt(self.meters)
            self.plan = self._plan()
        self._reconcile(found=True)

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
                "switch %s: deleting meters that are not wanted: %s%s",
                self.name,
                ", ".join(deleted[:10]),
                "" if len(deleted) <= 10 else f" and {len(deleted) - 10} more",
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
            self._settling = True
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
                return f"{command} meter {meter.id} of {self.describe(meter.id)}{rate}"
            case FlowMod(command, flow):
                owner = flow.cookie & 0xFFFFFFFF
                of = f" of {self.describe(owner)}" if owner else ""
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
            "band": None if self.shapes is None else "shape" if self.plan.shape else "drop",
            "no_shape_reason": "the file says so"
            if self.shapes and not self.plan.shape
            else self.no_shape_reason,
            "in_sync": self.in_sync and self._audit_clean(),
            "ports": len(self.ports),
            "missing_ports": sorted(self.plan.missing_ports),
            "meters": len(self.meters),
            "flows": len(self.flows),
            "audits": self.audits,
            "repairs": self.repairs,
            "errors": [error.as_dict() for error in self.errors],
        }

    def _audit_clean(self) -> bool:
        return self._ports_xid is None and not self._settling
