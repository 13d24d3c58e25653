"""All tenants and all switches: reload, live changes of rates, status.

All of it is kept in a store (`fbrates.store`), and a change is made there first: what is
answered is durable.  The configuration is what the file said when it was applied; rates, and
shares of ports, are that or what was set since.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from fbrates import plan as planning
from fbrates import resources, units
from fbrates.config import (
    Config,
    Destination,
    Identity,
    Limit,
    Network,
    Share,
    Tenant,
    Total,
    Vm,
    check_port,
    check_shares,
    from_document,
    network_text,
)
from fbrates.differences import differences, flatten
from fbrates.loader import InvalidConfig, Problem
from fbrates.plan import Numbers, Plan
from fbrates.resources import Ref, Spec, UnknownName
from fbrates.sharing import Member, MeterSample, Poller
from fbrates.state import (
    SAID,
    UNLIMITED,
    Retirement,
    Rows,
    State,
    export,
    export_part,
    from_rows,
    share_text,
    to_rows,
)
from fbrates.store import Entry, Forgetful, Keeper, Operation, Store, StoreError
from fbrates.sync import REMEMBERED_ERRORS, Event, Message, SwitchError, SwitchSync, Waiter

REMOVABLE = 10
"""A file may leave out this part of all VMs (a tenth), or one, without saying so."""

SHARED = "shared"
"""What is shown in the place of the rate of a VM that shares a port's."""


@dataclass
class RateChange:
    """What became of a request to change a rate."""

    limit: Limit
    meter: int
    old: int | None
    new: int | None
    waiters: dict[str, Waiter] = field(default_factory=dict)
    """By datapath id, for the switches that have the meter."""


@dataclass
class ShareChange:
    """What became of a request to change a VM's share, or a shared port's rate."""

    old: Share | int
    new: Share | int
    waiters: dict[str, Waiter] = field(default_factory=dict)
    """By datapath id, for the switches where somebody shares the port."""


@dataclass
class Applied:
    """What a file, or going back, changed: lines to read, and who waits at which switch."""

    changes: list[str]
    waiters: dict[str, Waiter]


@dataclass
class Edited:
    """What became of one tenant, VM, destination or port; specs are None where it is not there."""

    before: Spec | None
    after: Spec | None
    numbers: set[int]
    """The meter ids that it has, or had."""
    waiters: dict[str, Waiter]
    """By datapath id, of all switches that are connected."""


Expect = Callable[[Spec | None], None]
"""Looks at what is wanted of something, and raises an exception if that is not expected."""


class _Desk:
    """What one switch asks of the service."""

    def __init__(self, service: Service, datapath_id: int) -> None:
        self.service = service
        self.datapath_id = datapath_id
        self.poller: Poller

    def plan(self, ports: Mapping[str, int], shape: bool) -> Plan:
        return self.service.plan(self.poller, ports, shape)

    def describe(self, number: int) -> str:
        return self.service.describe(number)

    def given(self) -> Mapping[int, str]:
        return self.service.given()

    def trial(self) -> int:
        return self.service.numbers.trial

    def meter_range(self) -> tuple[int, int]:
        return self.service.config.first_meter, self.service.config.last_meter

    def resync_interval(self) -> float:
        return self.service.config.resync_interval

    def taken_on(self) -> set[int] | None:
        return self.service.taken_on.get(self.datapath_id)

    def take_on(self, others: set[int]) -> None:
        self.service.taken_on[self.datapath_id] = others

    def adopt(self, ports: Mapping[str, int], meters: Mapping[int, planning.Meter]) -> None:
        self.service.plan(self.poller, ports, False)
        self.poller.adopt(meters)


class Service:
    """The controller without its wires.

    Not thread-safe: one call at a time (Ryu's green threads give that, as nothing
    here yields).
    """

    def __init__(
        self,
        read_config: Callable[[], Config],
        event: Callable[[], Event],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        log: logging.Logger | None = None,
        store: Store | None = None,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Go on with what is in the store, or begin with the file if that is empty.

        A file that says something else than the store changes nothing: `file_differs` has
        the differences.  Raises InvalidConfig and StoreError.

        `lock` lets in one change at a time, as the store's answer may take a while.
        """
        self._read_config = read_config
        self._event = event
        self._clock = clock
        self._wall_clock = wall_clock
        self._log = log or logging.getLogger("flowbundler")
        self._lock = lock if lock is not None else nullcontext()
        self._keeper = Keeper(store if store is not None else Forgetful(), wall_clock)
        self.file_differs: list[str] = []
        self.config: Config
        self.numbers: Numbers
        self.rates: dict[str, int | None]
        self.shares: dict[str, Share]
        self.port_rates: dict[str, int]
        self.retired: dict[int, Retirement] = {}
        self.closed: list[Identity] = []
        self.edited: set[str] = set()
        self.taken_on: dict[int, set[int]] = {}
        self._saved_soft: object = None
        self.switches: dict[int, SwitchSync] = {}
        self.pollers: dict[int, Poller] = {}
        self.ignored_switches: set[int] = set()
        self.reloads = 0
        self.rate_changes = 0
        self.last_reload_error: str | None = None
        self._errors: dict[int, deque[SwitchError]] = {}
        self._started = clock()
        if self._keeper.rows is None:
            self._begin(read_config())
        else:
            self._take(self._keeper.rows)
            self._compare_file()

    # The store.

    def _begin(self, config: Config) -> None:
        """Fill an empty store."""
        rates = {limit.key: limit.rate for limit in config.limits()}
        numbers = self._number(config)
        state = State(config.document, rates, config.shares(), dict(config.ports))
        state.meters, state.tenants = numbers.all(), numbers.tenants
        self._keeper.save(to_rows(state), "fb-controller", "began with the file")
        self._take_state(state)

    def _take(self, rows: Rows) -> None:
        """Take all from the store; raises InvalidConfig if that is no state."""
        try:
            state = from_rows(rows)
        except (LookupError, TypeError, ValueError) as error:
            problem = Problem("", f"the database has what is no state of ours: {error!r}")
            raise InvalidConfig([problem]) from None
        self._take_state(state)

    def _take_state(self, state: State, config: Config | None = None) -> None:
        """Go on with this state; `config` is what its document says, if that is known."""
        config = config or from_document(state.document)
        numbers = Numbers.of(config, state.meters, state.tenants, state.retired)
        self.config, self.numbers = config, numbers
        self.rates, self.shares, self.port_rates = state.rates, state.shares, state.ports
        self.retired, self.closed, self.taken_on = state.retired, state.closed, state.taken_on
        self.edited = state.edited
        self._saved_soft = self._soft()

    def _state(self) -> State:
        return State(
            self.config.document,
            self.rates,
            self.shares,
            self.port_rates,
            self.numbers.all(),
            self.numbers.tenants,
            self.retired,
            self.taken_on,
            self.closed,
            self.edited,
        )

    def _soft(self) -> object:
        """What switches make of it, in a form to compare: nobody waits for that to be kept."""
        retired = {number: frozenset(item.pending) for number, item in self.retired.items()}
        return retired, {name: frozenset(others) for name, others in self.taken_on.items()}

    def save_soft(self) -> None:
        """Keep what has come from switches; to be called now and then, where one may wait."""
        with self._lock:
            try:
                if self._keeper.doubtful:
                    rows = self._keeper.refresh()
                    if rows is not None:
                        self._take(rows)
                        self._replan_all()
                if self._soft() != self._saved_soft:
                    soft = self._soft()
                    self._keeper.save(to_rows(self._state()), "switches", "")
                    self._saved_soft = soft
            except StoreError as error:
                self._log.error("%s", error)

    def _ready_to_change(self) -> None:
        """Raise StoreError if it is not known what the store has."""
        if self._keeper.doubtful:
            rows = self._keeper.refresh()
            if rows is not None:
                self._take(rows)
                self._replan_all()

    def _replan_all(
        self, waiters: dict[str, Waiter] | None = None, owners: set[int] | None = None
    ) -> None:
        for switch in self.switches.values():
            waiter = None
            if waiters is not None:
                waiter = waiters[switch.name] = Waiter(self._event())
            switch.replan(waiter, owners)

    def wanted(self) -> Config:
        """Give the configuration that says what is wanted now, with all that was set live."""
        return from_document(export(self._state()))

    def _compare_file(self) -> None:
        try:
            config = self._read_config()
        except InvalidConfig as error:
            self.last_reload_error = str(error)
            self._log.error("the file is not right; going on with the store: %s", error)
            return
        if config.document:
            self.file_differs = differences(self.wanted(), config)
        for line in self.file_differs[:10]:
            self._log.warning("the file differs from what is in force: %s", line)
        if self.file_differs:
            self._log.warning(
                "%d differences; nothing is changed: flowbundler-ctl apply FILE",
                len(self.file_differs),
            )

    def export_text(self) -> str:
        """Give a file (YAML) that says what is wanted now."""
        return str(yaml.safe_dump(export(self._state()), sort_keys=False, width=100))

    def history(self) -> list[Entry]:
        """Give the changes, the oldest first; raises StoreError."""
        return self._keeper.store.history()

    # Switches.

    def connect(self, datapath_id: int, send: Callable[[Message], int]) -> SwitchSync | None:
        """Take on a switch that connected; None if the file is not about it."""
        if not self.config.selects(datapath_id):
            self.ignored_switches.add(datapath_id)
            self._log.info("switch %016x: not in 'switches', left alone", datapath_id)
            return None
        self.ignored_switches.discard(datapath_id)
        previous = self.switches.get(datapath_id)
        if previous is not None:
            previous.disconnect()
        desk = _Desk(self, datapath_id)
        errors = self._errors.setdefault(datapath_id, deque(maxlen=REMEMBERED_ERRORS))
        switch = SwitchSync(
            datapath_id, send, desk, self._clock, self._wall_clock, self._log, errors
        )
        poller = desk.poller = Poller(switch, self._clock, self._log)
        self.switches[datapath_id] = switch
        self.pollers[datapath_id] = poller
        self._log.info("switch %s: connected", switch.name)
        switch.connect()
        return switch

    def disconnect(self, switch: SwitchSync) -> None:
        """Note that the switch's connection ended (another may have replaced it)."""
        switch.disconnect()
        if self.switches.get(switch.datapath_id) is switch:
            del self.switches[switch.datapath_id]
            del self.pollers[switch.datapath_id]
            self._log.warning("switch %s: disconnected", switch.name)

    def tick(self) -> None:
        """Do what is due; to be called about twice a second."""
        for switch in list(self.switches.values()):
            switch.tick()
        self._free_numbers()

    def poll(self, switch: SwitchSync) -> float:
        """Ask the switch for what its meters have counted, if that is due.

        Gives the seconds after which to call again.
        """
        poller = self.pollers.get(switch.datapath_id)
        return poller.poll() if poller is not None and poller.switch is switch else 1.0

    def meter_stats(
        self, switch: SwitchSync, xid: int, samples: Mapping[int, MeterSample], more: bool
    ) -> None:
        """Take (a part of) the switch's answer."""
        poller = self.pollers.get(switch.datapath_id)
        if poller is not None and poller.switch is switch:
            poller.reply(xid, samples, more)

    def plan(self, poller: Poller, ports: Mapping[str, int], shape: bool) -> Plan:
        """Give what a switch with these ports should have."""
        poller.configure(self._members(ports))
        rates = ChainMap(poller.rates(), self.rates)  # type: ignore[arg-type]
        return planning.build(self.config, self.numbers, rates, ports, shape, self.closed)

    def _members(self, ports: Mapping[str, int]) -> dict[str, tuple[int, list[Member]]]:
        """Give who shares which port on a switch with these ports."""
        result: dict[str, tuple[int, list[Member]]] = {
            name: (rate // 1000, []) for name, rate in self.port_rates.items()
        }
        numbers = self.numbers.meters
        for tenant in self.config.tenants.values():
            for vm in tenant.vms.values():
                share = self.shares.get(vm.key)
                if share is None or (vm.port is not None and vm.port not in ports):
                    continue
                capacity, members = result[share.port]
                most = capacity if share.max_rate is None else share.max_rate // 1000
                members.append(
                    Member(
                        vm.key,
                        numbers[vm.key],
                        share.min_rate // 1000,
                        min(most, capacity),
                        share.weight,
                        tuple(
                            numbers[item.key]
                            for item in vm.destinations.values()
                            if self.rates[item.key] is not None
                        ),
                    )
                )
        return result

    # Numbers.

    def given(self) -> dict[int, str]:
        """Give the meter ids that are given, or were and are not free yet, with their owners."""
        numbers = {number: item.owner for number, item in self.retired.items()}
        return {**numbers, **self.numbers.owners, self.numbers.trial: planning.TRIAL}

    def describe(self, number: int) -> str:
        """Name who has a meter id, or had it."""
        return self.given().get(number, f"number {number}")

    def _number(self, config: Config, before: Numbers | None = None) -> Numbers:
        """Give numbers; raises InvalidConfig if there are too few."""
        kept = {item.owner: number for number, item in self.retired.items()}
        unusable = set(self.retired).union(*self.taken_on.values())
        try:
            if before is None:
                return Numbers.of(config)
            kept.update(before.all())
            return Numbers.of(config, kept, before.tenants, unusable | before.owners.keys())
        except ValueError:
            problem = Problem(
                "meters",
                f"there are not enough meter ids: {len(unusable)} are still in use elsewhere",
                f"{config.first_meter}..{config.last_meter}",
                "more ids, or the same once all switches are connected and in sync",
            )
            raise InvalidConfig([problem]) from None

    def _free_numbers(self) -> None:
        """Free the numbers of which all switches have said that they do not have them."""
        if not self.retired:
            return
        asked = set().union(*(item.pending for item in self.retired.values()))
        in_use = {
            datapath_id: self.switches[datapath_id].numbers_in_use()
            for datapath_id in asked & self.switches.keys()
        }
        for number, item in list(self.retired.items()):
            item.pending = {
                datapath_id
                for datapath_id in item.pending & self.taken_on.keys()
                if (numbers := in_use.get(datapath_id)) is None or number in numbers
            }
            if not item.pending:
                del self.retired[number]

    # Tenants and rates.

    def tenant(self, name: str) -> Tenant:
        """Look a tenant up; raises UnknownName."""
        if name not in self.config.tenants:
            raise UnknownName("tenant", name, list(self.config.tenants))
        return self.config.tenants[name]

    def vm(self, tenant: str, name: str) -> Vm:
        """Look a VM up; raises UnknownName."""
        vms = self.tenant(tenant).vms
        if name not in vms:
            raise UnknownName("vm", name, list(vms))
        return vms[name]

    def total(self, tenant: str) -> Total:
        """Look a tenant's own rate up; raises UnknownName."""
        found = self.tenant(tenant).total
        if found is None:
            those = [name for name, item in self.config.tenants.items() if item.total is not None]
            raise UnknownName("rate of tenant", tenant, those)
        return found

    @staticmethod
    def destination(owner: Vm | Tenant, network: Network) -> Destination:
        """Look a destination up; raises UnknownName."""
        text = network_text(network)
        if text not in owner.destinations:
            raise UnknownName("destination", text, list(owner.destinations))
        return owner.destinations[text]

    def set_rate(
        self,
        limit: Limit,
        rate: int | None,
        who: str = "",
        expect: Callable[[], None] = lambda: None,
    ) -> RateChange:
        """Change one rate now, durably, on every switch that has it, unless `expect` raises.

        A limited rate stays limited: one message to modify the meter.  To or from
        unlimited, flows change too.  Raises StoreError, and UnknownName if it has gone
        meanwhile.
        """
        with self._lock:
            self._ready_to_change()
            if limit.key not in self.rates:
                raise UnknownName("name", limit.key, [])
            expect()
            old = self.rates[limit.key]
            what = f"{limit.key}: {units.format_rate(old)} -> {units.format_rate(rate)}"
            self._keeper.do(self._rate_row(limit.key, rate), who, what)
            return self._set_rate(limit, rate)

    def _rate_row(self, key: str, rate: int | None) -> list[Operation]:
        """Give what changes a rate in the store."""
        owner, _, to = key.partition("->")
        tenant, _, vm = owner.partition("/")
        table, where = ("VM", (tenant, vm)) if vm else ("Tenant", (tenant,))
        row = (self._keeper.rows or {})[table][where]
        rates = {**row["rates"], to: UNLIMITED if rate is None else rate}
        return [Operation(table, where, {**row, "rates": rates})]

    def _set_rate(self, limit: Limit, rate: int | None) -> RateChange:
        number = self.numbers.meters[limit.key]
        old = self.rates[limit.key]
        change = RateChange(limit, number, old, rate)
        self.rates[limit.key] = rate
        self.rate_changes += 1
        for switch in self.switches.values():
            waiter = Waiter(self._event())
            shaping = self.config.shaping if switch.shapes else None
            meter = planning.meter_for(limit, number, rate, shaping)
            if meter is not None and old is not None:
                has_it = switch.set_meter(meter, waiter)
            else:
                switch.replan(waiter, {number})
                has_it = switch.has_owner(number)
            if has_it:
                change.waiters[switch.name] = waiter
        self._log.info(
            "%s: rate %s -> %s (meter %d)",
            limit.key,
            units.format_rate(old),
            units.format_rate(rate),
            number,
        )
        return change

    def set_share(
        self,
        vm: Vm,
        min_rate: int | None = None,
        max_rate: int | None = None,
        weight: int | None = None,
        who: str = "",
        expect: Callable[[], None] = lambda: None,
    ) -> ShareChange:
        """Change what a VM that shares a port has a right to; None leaves as it is.

        Raises ShareError if that cannot be honoured, and StoreError; then nothing has
        changed.
        """
        with self._lock:
            self._ready_to_change()
            if vm.key not in self.shares:
                raise UnknownName("vm", vm.key, [])
            expect()
            return self._set_share(vm, min_rate, max_rate, weight, who)

    def _set_share(
        self, vm: Vm, min_rate: int | None, max_rate: int | None, weight: int | None, who: str
    ) -> ShareChange:
        old = self.shares[vm.key]
        new = replace(
            old,
            min_rate=old.min_rate if min_rate is None else min_rate,
            max_rate=old.max_rate if max_rate is None else max_rate,
            weight=old.weight if weight is None else weight,
        )
        shares = {**self.shares, vm.key: new}
        for error in check_shares(
            new.port, self.port_rates[new.port], self._sharing(new.port, shares)
        ):
            raise error
        where = (vm.tenant, vm.name)
        row = (self._keeper.rows or {})["VM"][where]
        operation = Operation("VM", where, {**row, "share": share_text(new)})
        self._keeper.do([operation], who, f"{vm.key}: {share_text(old)} -> {share_text(new)}")
        self.shares = shares
        self._log.info("%s: %s -> %s", vm.key, old, new)
        return ShareChange(old, new, self._divide(new.port, vm.key))

    def set_port_rate(
        self, name: str, rate: int, who: str = "", expect: Callable[[], None] = lambda: None
    ) -> ShareChange:
        """Change the rate of a shared port.

        Raises UnknownName, ShareError if it is too little for those who share it, and
        StoreError.
        """
        with self._lock:
            self._ready_to_change()
            expect()
            return self._set_port_rate(name, rate, who)

    def _set_port_rate(self, name: str, rate: int, who: str) -> ShareChange:
        old = self.port_rate(name)
        for error in check_port(rate, self._sharing(name, self.shares)):
            raise error
        row = {"name": name, "max_rate": rate}
        what = f"port {name}: {units.format_rate(old)} -> {units.format_rate(rate)}"
        self._keeper.do([Operation("Port", (name,), row)], who, what)
        self.port_rates[name] = rate
        self._log.info(
            "port %s: max-rate %s -> %s", name, units.format_rate(old), units.format_rate(rate)
        )
        return ShareChange(old, rate, self._divide(name))

    def port_rate(self, name: str) -> int:
        """Give the rate of a shared port; raises UnknownName."""
        if name not in self.port_rates:
            raise UnknownName("port", name, list(self.port_rates))
        return self.port_rates[name]

    @staticmethod
    def _sharing(port: str, shares: Mapping[str, Share]) -> dict[str, Share]:
        return {key: share for key, share in shares.items() if share.port == port}

    def _divide(self, name: str, key: str | None = None) -> dict[str, Waiter]:
        """Divide a port's rate anew where it is shared (by this VM)."""
        self.rate_changes += 1
        waiters = {}
        for poller in self.pollers.values():
            poller.configure(self._members(poller.switch.ports))
            members = poller.ports[name].members
            if poller.switch.audits and (key in members if key is not None else members):
                waiter = waiters[poller.switch.name] = Waiter(self._event())
                poller.divide(name, waiter)
        return waiters

    def reload(self, force: bool = False, who: str = "") -> dict[str, int]:
        """Read the file again; raises InvalidConfig or StoreError, and nothing has changed.

        What the file says as before stays as it is, also if it was changed live.  A file
        that many VMs have vanished from is refused, unless that is meant (`force`): it may
        be half of one.
        """
        with self._lock:
            try:
                self._ready_to_change()
                config = self._read_config()
                if not force:
                    self._check_edited(config)
                old, old_file = self._settings(), self._file_settings()
                live = self._live()
                state = self._state_for(config, force)
                kept = _keep(state, config, live, old_file)
                self._keeper.save(to_rows(state), who, "read the file again")
            except InvalidConfig as error:
                self.last_reload_error = str(error)
                self._log.error("reload refused, what ran keeps running:")
                for problem in error.problems:
                    self._log.error("  %s", problem.text())
                raise
            self._turn_to(state, config)
        new = self._settings()
        self.reloads += 1
        self.last_reload_error = None
        self.file_differs = differences(config, self.wanted())
        keys, old_keys = new.keys(), old.keys()
        result = {
            "added": len(_limits(keys) - _limits(old_keys)),
            "removed": len(_limits(old_keys) - _limits(keys)),
            "rates_changed": sum(old[key] != new[key] for key in new.keys() & old.keys()),
            "live_changes_kept": kept,
            "live_changes_dropped": len(live) - kept,
        }
        self._log.info("reloaded: %s", ", ".join(f"{k} {v}" for k, v in result.items()))
        return result

    def apply(
        self, config: Config, who: str = "", dry_run: bool = False, force: bool = False
    ) -> Applied:
        """Make what a file says the truth, all of it, or only say what that would change.

        Raises InvalidConfig, also if many VMs would vanish without `force`, and StoreError.
        """
        with self._lock:
            self._ready_to_change()
            changes = differences(self.wanted(), config)
            state = self._state_for(config, force or dry_run)
            if dry_run or not changes:
                return Applied(changes, {})
            what = "; ".join(changes[:3]) + (f" and {len(changes) - 3} more" * (len(changes) > 3))
            self._keeper.save(to_rows(state), who, f"applied a file: {what}")
            self.file_differs = []
            return Applied(changes, self._turn_to(state, config))

    def rollback(self, number: int, who: str = "", dry_run: bool = False) -> Applied:
        """Make all as it was right after a change of the history; raises UnknownName.

        And InvalidConfig, StoreError.  What has come from switches since stays.
        """
        with self._lock:
            self._ready_to_change()
            try:
                then = from_rows(self._keeper.undoing(number))
            except LookupError:
                known = [str(entry.number) for entry in self.history()[-10:]]
                raise UnknownName("change", str(number), known) from None
            config = from_document(export(then))
            changes = differences(self.wanted(), config)
            state = self._state_for(config, force=True)
            state.edited = then.edited
            if dry_run or not changes:
                return Applied(changes, {})
            self._keeper.save(to_rows(state), who, f"rolled back to {number}")
            return Applied(changes, self._turn_to(state, config))

    def spec(self, ref: Ref) -> Spec | None:
        """Give what is wanted of something, None if it is not there; raises UnknownName."""
        return export_part(self._state(), ref)

    def edit(
        self,
        ref: Ref,
        spec: Spec | None,
        who: str = "",
        expect: Expect = lambda _: None,
        force: bool = False,
    ) -> Edited:
        """Make one thing what `spec` says, or (None) take it away, and leave all else as it is.

        Raises UnknownName, InvalidConfig (fields are those of `spec`), StoreError, and what
        `expect` does; then nothing has changed.
        """
        with self._lock:
            self._ready_to_change()
            before = self.spec(ref)
            if spec is None and before is None:
                raise UnknownName(ref.kind, ref.key, [])
            config = self._edited(ref, spec)
            expect(before)
            live = {key: item for key, item in self._live().items() if not ref.covers(key, spec)}
            state = self._state_for(config, force or spec is None)
            _keep(state, config, live, self._file_settings())
            state.edited = self.edited | {ref.key}
            after = export_part(state, ref) if spec is not None else None
            numbers = state.meters if spec is not None else self.numbers.meters
            mine = {number for key, number in numbers.items() if ref.covers(key)}
            rows = to_rows(state)
            # (That it was said again is no change.)
            if all(rows[table] == (self._keeper.rows or {})[table] for table in SAID):
                waiters: dict[str, Waiter] = {}
                self._replan_all(waiters, mine)
                return Edited(before, after, mine, waiters)
            done = "deleted" if after is None else "made" if before is None else "changed"
            self._keeper.save(rows, who, f"{ref.key}: {done}{_short(after)}")
            return Edited(before, after, mine, self._turn_to(state, config, mine))

    def _edited(self, ref: Ref, spec: Spec | None) -> Config:
        """Give the configuration that is the present one but for this."""
        document = copy.deepcopy(self.config.document)
        if spec is None:
            resources.remove(document, ref)
            return from_document(document)
        if ref.kind == "port":
            # Who shares the only port need not say so; now there may be another.
            for key, share in self.shares.items():
                tenant, _, vm = key.partition("/")
                document["tenants"][tenant]["vms"][vm]["shares"] = share.port
        path = resources.put(document, ref, copy.deepcopy(spec))
        try:
            return from_document(document)
        except InvalidConfig as error:
            problems = [resources.relative(problem, ref, path) for problem in error.problems]
            raise InvalidConfig(problems) from None

    def absent(self) -> list[str]:
        """Name the switches that may have meters of ours and are not connected."""
        return [f"{number:016x}" for number in sorted(self.taken_on.keys() - self.switches.keys())]

    def _live(self) -> dict[str, object]:
        """Give what was set live and is not what was applied."""
        file = self._file_settings()
        return {key: item for key, item in self._settings().items() if file[key] != item}

    def _check_edited(self, config: Config) -> None:
        """Raise InvalidConfig if a file would undo what was made, changed or deleted by itself."""
        if not self.edited:
            return
        now, then = flatten(self.config), flatten(config)
        lost = [
            key
            for key in sorted(self.edited)
            if [now.get(name) for name in (key, f"{key} is", f"tenant {key}")]
            != [then.get(name) for name in (key, f"{key} is", f"tenant {key}")]
        ]
        if lost:
            shown = ", ".join(lost[:10]) + (" ..." if len(lost) > 10 else "")
            raise InvalidConfig(
                [
                    Problem(
                        "tenants",
                        f"the file says otherwise of what was changed since by REST: {shown}; "
                        "flowbundler-ctl export writes a file with that; if undoing it is meant: "
                        "flowbundler-ctl apply FILE, or reload --force",
                        None,
                        "a file that says the same of it",
                    )
                ]
            )

    def _state_for(self, config: Config, force: bool) -> State:
        """Give the state in which this is what is wanted; nothing changes yet."""
        if not force:
            self._check_removal(config)
        numbers = self._number(config, self.numbers)
        rates = {limit.key: limit.rate for limit in config.limits()}
        state = State(config.document, rates, config.shares(), dict(config.ports))
        state.meters, state.tenants = numbers.all(), numbers.tenants
        state.taken_on = {
            number: others for number, others in self.taken_on.items() if config.selects(number)
        }
        state.retired = dict(self.retired)
        for number in state.meters.values():
            state.retired.pop(number, None)
        for key, number in self.numbers.all().items():
            if state.meters.get(key) != number and state.taken_on:
                state.retired[number] = Retirement(key, set(state.taken_on))
        state.closed = self._closed_by(config)
        return state

    def _turn_to(
        self, state: State, config: Config, owners: set[int] | None = None
    ) -> dict[str, Waiter]:
        """Take a state that is in the store already, and its configuration, and tell switches.

        Who waits hears of errors about these numbers, or all.
        """
        for identity in state.closed:
            if identity not in self.closed:
                self._log.info("%s: was a VM's and is nobody's now: closed", identity)
        self._take_state(state, config)
        for datapath_id in [number for number in self._errors if not config.selects(number)]:
            del self._errors[datapath_id]
        for switch in list(self.switches.values()):
            if not config.selects(switch.datapath_id):
                self._log.warning("switch %s: no longer in 'switches', left as it is", switch.name)
                switch.disconnect()
                del self.switches[switch.datapath_id]
                del self.pollers[switch.datapath_id]
                self.ignored_switches.add(switch.datapath_id)
        waiters: dict[str, Waiter] = {}
        self._replan_all(waiters, owners)
        return waiters

    def _check_removal(self, config: Config) -> None:
        """Raise InvalidConfig if suspiciously many VMs are gone."""
        old = {vm.key for tenant in self.config.tenants.values() for vm in tenant.vms.values()}
        gone = sorted(
            old - {vm.key for tenant in config.tenants.values() for vm in tenant.vms.values()}
        )
        most = max(1, len(old) // REMOVABLE)
        if len(gone) > most:
            shown = ", ".join(gone[:10]) + (" ..." if len(gone) > 10 else "")
            raise InvalidConfig(
                [
                    Problem(
                        "tenants",
                        f"{len(gone)} of {len(old)} VMs would be removed at once ({shown}); "
                        "if that is meant: flowbundler-ctl reload --force",
                        None,
                        f"at most {most} without force",
                    )
                ]
            )

    def _closed_by(self, config: Config) -> list[Identity]:
        """Say what is closed with this configuration: what was a VM and is none in it."""
        named = set(config.identities())
        uplinks = {Identity(port) for port in self.config.uplinks}
        known = named | uplinks
        was = [*self.closed, *self.config.identities()]
        return list(dict.fromkeys(item for item in was if item not in known))

    def release(self, identity: Identity, who: str = "") -> None:
        """Let what was a VM be treated as any unknown source; raises UnknownName, StoreError."""
        with self._lock:
            self._ready_to_change()
            if identity not in self.closed:
                raise UnknownName("closed", str(identity), [str(item) for item in self.closed])
            state = self._state()
            state.closed = [item for item in self.closed if item != identity]
            self._keeper.save(to_rows(state), who, f"released {identity}")
            self.closed = state.closed
        self._log.info("%s: no longer closed", identity)
        self._replan_all()

    def forget(self, datapath_id: int, who: str = "") -> None:
        """Do not count on a switch to come back; raises UnknownName, ValueError, StoreError."""
        name = f"{datapath_id:016x}"
        with self._lock:
            self._ready_to_change()
            if datapath_id in self.switches:
                raise ValueError(f"switch {name} is connected")
            if datapath_id not in {*self._errors, *self.taken_on}:
                known = {*self._errors, *self.taken_on} - self.switches.keys()
                raise UnknownName("switch", name, [f"{one:016x}" for one in sorted(known)])
            state = self._state()
            state.taken_on = {
                number: others for number, others in self.taken_on.items() if number != datapath_id
            }
            self._keeper.save(to_rows(state), who, f"forgot switch {name}")
            self.taken_on = state.taken_on
            self._errors.pop(datapath_id, None)
            self._free_numbers()

    def adopt(self, datapath_id: int, who: str = "") -> None:
        """Take all meters of a switch that are in our range for ours.

        Raises UnknownName and StoreError.
        """
        with self._lock:
            self._ready_to_change()
            if datapath_id not in self.switches:
                known = [switch.name for switch in self.switches.values()]
                raise UnknownName("switch", f"{datapath_id:016x}", known)
            switch = self.switches[datapath_id]
            self._keeper.note(who, f"adopted the meters of switch {switch.name}")
            switch.adopt()

    def _file_rates(self) -> dict[str, int | None]:
        return {limit.key: limit.rate for limit in self.config.limits()}

    def _settings(self) -> dict[str, object]:
        """Give all that can be set live: a VM's share in the place of its rate."""
        ports = {f"port {name}": rate for name, rate in self.port_rates.items()}
        return {**self.rates, **self.shares, **ports}

    def _file_settings(self) -> dict[str, object]:
        ports = {f"port {name}": rate for name, rate in self.config.ports.items()}
        return {**self._file_rates(), **self.config.shares(), **ports}

    # What there is to see.

    def tenants_view(self) -> dict[str, Any]:
        """Everything of every tenant."""
        return {name: self.tenant_view(tenant) for name, tenant in self.config.tenants.items()}

    def tenant_view(self, tenant: Tenant) -> dict[str, Any]:
        """One tenant."""
        total = {} if tenant.total is None else self.limit_view(tenant.total)
        return {
            **total,
            "vms": {name: self.vm_view(vm) for name, vm in tenant.vms.items()},
            "destinations": self._destinations_view(tenant.destinations),
        }

    def vm_view(self, vm: Vm) -> dict[str, Any]:
        """One VM."""
        view: dict[str, Any] = {}
        if vm.port is not None:
            view["port"] = vm.port
        if vm.mac is not None:
            view["mac"] = vm.mac
        if vm.ips:
            view["ip"] = [str(address) for address in vm.ips]
        view.update(self.limit_view(vm))
        view["destinations"] = self._destinations_view(vm.destinations)
        return view

    def limit_view(self, limit: Limit) -> dict[str, Any]:
        """A rate, the file's rate and the meter."""
        number = self.numbers.meters[limit.key]
        if isinstance(limit, Vm) and limit.share is not None:
            return {
                "rate": SHARED,
                "rate_bps": None,
                "file_rate": SHARED,
                "file_rate_bps": None,
                "meter_id": number,
                "switches": [s.name for s in self.switches.values() if number in s.meters],
                "share": self.share_view(limit),
            }
        rate = self.rates[limit.key]
        return {
            "rate": units.format_rate(rate),
            "rate_bps": rate,
            "file_rate": units.format_rate(limit.rate),
            "file_rate_bps": limit.rate,
            "meter_id": number if rate is not None else None,
            "switches": [s.name for s in self.switches.values() if number in s.meters],
        }

    def share_view(self, vm: Vm) -> dict[str, Any]:
        """Show what a VM that shares a port has a right to, has, and uses."""
        share = self.shares[vm.key]
        return {
            **_share_settings(share),
            "file": _share_settings(self.config.shares()[vm.key]),
            "switches": {
                poller.switch.name: poller.ports[share.port].view(vm.key)
                for poller in self.pollers.values()
                if share.port in poller.ports and vm.key in poller.ports[share.port].members
            },
        }

    def port_view(self, name: str) -> dict[str, Any]:
        """Show a shared port, and those who share it."""
        rate, file_rate = self.port_rate(name), self.config.ports[name]
        return {
            "max-rate": units.format_rate(rate),
            "max_rate_bps": rate,
            "file_max-rate": units.format_rate(file_rate),
            "file_max_rate_bps": file_rate,
            "vms": {
                vm.key: self.share_view(vm)
                for tenant in self.config.tenants.values()
                for vm in tenant.vms.values()
                if vm.share is not None and vm.share.port == name
            },
        }

    def ports_view(self) -> dict[str, Any]:
        """Show all shared ports."""
        return {name: self.port_view(name) for name in self.port_rates}

    def _destinations_view(self, destinations: dict[str, Destination]) -> dict[str, Any]:
        return {text: self.limit_view(item) for text, item in destinations.items()}

    def status_view(self) -> dict[str, Any]:
        """How it all is."""
        switches = {
            switch.name: {**switch.status(), "sharing": self.pollers[number].view()}
            for number, switch in self.switches.items()
        }
        known = {*self._errors, *self.taken_on, *(self.config.switches or ())}
        for datapath_id in known - self.switches.keys():
            switches[f"{datapath_id:016x}"] = {
                "connected": False,
                "in_sync": False,
                "errors": [error.as_dict() for error in self._errors.get(datapath_id, ())],
            }
        return {
            "in_sync": bool(self.switches)
            and all(status["in_sync"] for status in switches.values()),
            "switches": switches,
            "ignored_switches": [f"{number:016x}" for number in sorted(self.ignored_switches)],
            "tenants": len(self.config.tenants),
            "vms": sum(len(tenant.vms) for tenant in self.config.tenants.values()),
            "unknown_sources": {
                "policy": self.config.unknown_sources,
                "rate": units.format_rate(self.config.unknown_rate)
                if self.config.unknown_rate is not None
                else None,
                "uplinks": list(self.config.uplinks),
            },
            "closed": [str(identity) for identity in self.closed],
            "meters": {str(number): key for number, key in sorted(self.numbers.owners.items())},
            "retired_meters": {str(number): item.owner for number, item in self.retired.items()},
            "rate_changes": self.rate_changes,
            "reloads": self.reloads,
            "last_reload_error": self.last_reload_error,
            "file_differs": self.file_differs,
            "uptime_s": round(self._clock() - self._started, 3),
        }

    def meters_view(self) -> dict[str, Any]:
        """Give the meters by switch, in the form that Ryu's ofctl_rest has for them."""
        return {
            switch.name: [
                {
                    "meter_id": meter.id,
                    "owner": self.describe(meter.id),
                    "flags": ["KBPS"] + (["BURST"] if meter.burst_kbit else []),
                    "bands": [_band_view(meter)],
                }
                for _, meter in sorted(switch.meters.items())
            ]
            for switch in self.switches.values()
        }


def _short(spec: Spec | None) -> str:
    """Show what a spec says itself, in a line of the history."""
    if spec is None:
        return ""
    return ": " + ", ".join(
        f"{key} {value}" if key not in resources.PARTS else f"{len(value)} {key}"
        for key, value in spec.items()
    )


def _limits(keys: Iterable[str]) -> set[str]:
    return {key for key in keys if not key.startswith("port ")}


def _keep(
    state: State, config: Config, live: Mapping[str, object], old_file: Mapping[str, object]
) -> int:
    """Keep in `state` what was set live where the file says what it said before; give how many.

    Shares that together are too much for their port are the file's.
    """
    shares, done = config.shares(), 0
    file: dict[str, object] = {limit.key: limit.rate for limit in config.limits()}
    file |= {**shares, **{f"port {name}": rate for name, rate in config.ports.items()}}
    kept = {key: value for key, value in live.items() if file.get(key, ...) == old_file[key]}
    for key, value in kept.items():
        if key in state.rates and key not in shares:
            state.rates[key] = value  # type: ignore[assignment]
            done += 1
    for name, file_rate in config.ports.items():
        rate: Any = kept.get(f"port {name}", file_rate)
        those: Any = {
            key: kept.get(key, share) for key, share in shares.items() if share.port == name
        }
        changed = [key for key in (*those, f"port {name}") if key in kept]
        if changed and not check_shares(name, rate, those):
            state.ports[name] = rate
            state.shares.update(those)
            done += len(changed)
    return done


def _share_settings(share: Share) -> dict[str, Any]:
    return {
        "port": share.port,
        "min-rate": units.format_rate(share.min_rate),
        "min_rate_bps": share.min_rate,
        "max-rate": units.format_rate(share.max_rate),
        "max_rate_bps": share.max_rate,
        "weight": share.weight,
    }


def _band_view(meter: planning.Meter) -> dict[str, Any]:
    """Give a meter's band in the form of Ryu's ofctl_rest, which has no shape band."""
    band: dict[str, Any] = {
        "type": "DROP" if meter.shaping is None else "SHAPE",
        "rate": meter.rate_kbps,
        "burst_size": meter.burst_kbit or 0,
    }
    if meter.shaping is not None:
        band["max_delay"] = meter.shaping.max_delay_us
        band["ecn_threshold"] = meter.shaping.ecn_threshold_us
        band["fair"] = meter.shaping.fair
    return band
