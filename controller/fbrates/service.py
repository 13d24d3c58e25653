"""All tenants and all switches: reload, live changes of rates, status.

The configuration is the file's, the rates are the file's or what was set since: a
rate set live stays until the file is read again, through any number of re-syncs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fbrates import plan as planning
from fbrates import units
from fbrates.config import Config, Destination, Network, Tenant, Vm, network_text
from fbrates.loader import InvalidConfig
from fbrates.plan import Numbers, Plan
from fbrates.sync import REMEMBERED_ERRORS, Event, Message, SwitchError, SwitchSync, Waiter


class UnknownName(LookupError):
    """No such tenant, VM or destination; `known` are those there are."""

    def __init__(self, field_name: str, value: str, known: list[str]) -> None:
        super().__init__(f"unknown {field_name} {value}")
        self.field = field_name
        self.value = value
        self.known = known


@dataclass
class RateChange:
    """What became of a request to change a rate."""

    limit: Vm | Destination
    meter: int
    old: int | None
    new: int | None
    waiters: dict[str, Waiter] = field(default_factory=dict)
    """By datapath id, for the switches that have the meter."""


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
    ) -> None:
        """Read the configuration; raises InvalidConfig."""
        self._read_config = read_config
        self._event = event
        self._clock = clock
        self._wall_clock = wall_clock
        self._log = log or logging.getLogger("flowbundler")
        self.config = read_config()
        self.numbers = Numbers.of(self.config)
        self.rates = self._file_rates()
        self.switches: dict[int, SwitchSync] = {}
        self.ignored_switches: set[int] = set()
        self.reloads = 0
        self.rate_changes = 0
        self.last_reload_error: str | None = None
        self._errors: dict[int, deque[SwitchError]] = {}
        self._started = clock()

    # Switches.

    def connect(self, datapath_id: int, send: Callable[[Message], int]) -> SwitchSync | None:
        """Take on a switch that connected; None if the file is not about it."""
        if not self.config.selects(datapath_id):
            self.ignored_switches.add(datapath_id)
            self._log.info("switch %016x: not in 'switches', left alone", datapath_id)
            return None
        previous = self.switches.get(datapath_id)
        if previous is not None:
            previous.disconnect()
        switch = SwitchSync(
            datapath_id,
            send,
            self._plan,
            lambda: self.numbers.spare(self.config),
            lambda number: self.numbers.describe(number),
            (self.config.first_meter, self.config.last_meter),
            self._clock,
            self._wall_clock,
            self._log,
            self._errors.setdefault(datapath_id, deque(maxlen=REMEMBERED_ERRORS)),
            self.config.resync_interval,
        )
        self.switches[datapath_id] = switch
        self._log.info("switch %s: connected", switch.name)
        switch.connect()
        return switch

    def disconnect(self, switch: SwitchSync) -> None:
        """Note that the switch's connection ended (another may have replaced it)."""
        switch.disconnect()
        if self.switches.get(switch.datapath_id) is switch:
            del self.switches[switch.datapath_id]
            self._log.warning("switch %s: disconnected", switch.name)

    def tick(self) -> None:
        """Do what is due; to be called about twice a second."""
        for switch in list(self.switches.values()):
            switch.tick()

    def _plan(self, ports: Mapping[str, int], shape: bool) -> Plan:
        return planning.build(self.config, self.numbers, self.rates, ports, shape)

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

    @staticmethod
    def destination(owner: Vm | Tenant, network: Network) -> Destination:
        """Look a destination up; raises UnknownName."""
        text = network_text(network)
        if text not in owner.destinations:
            raise UnknownName("destination", text, list(owner.destinations))
        return owner.destinations[text]

    def set_rate(self, limit: Vm | Destination, rate: int | None) -> RateChange:
        """Change one rate now, on every switch that has it.

        A limited rate stays limited: one message to modify the meter.  To or from
        unlimited, flows change too.
        """
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
                switch.replan(waiter)
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

    def reload(self) -> dict[str, int]:
        """Read the file again; raises InvalidConfig, and then nothing has changed."""
        try:
            config = self._read_config()
        except InvalidConfig as error:
            self.last_reload_error = str(error)
            self._log.error("reload refused, what ran keeps running:")
            for problem in error.problems:
                self._log.error("  %s", problem.text())
            raise
        old_keys = set(self.rates)
        live = sum(self._file_rates()[key] != rate for key, rate in self.rates.items())
        self.config = config
        self.numbers = Numbers.of(config)
        old_rates, self.rates = self.rates, self._file_rates()
        self.reloads += 1
        self.last_reload_error = None
        for switch in list(self.switches.values()):
            if not config.selects(switch.datapath_id):
                self._log.warning("switch %s: no longer in 'switches', left as it is", switch.name)
                switch.disconnect()
                del self.switches[switch.datapath_id]
                self.ignored_switches.add(switch.datapath_id)
                continue
            switch.resync_interval = config.resync_interval
            switch.meter_range = (config.first_meter, config.last_meter)
            switch.replan()
        keys = set(self.rates)
        result = {
            "added": len(keys - old_keys),
            "removed": len(old_keys - keys),
            "rates_changed": sum(old_rates[key] != self.rates[key] for key in keys & old_keys),
            "live_changes_dropped": live,
        }
        self._log.info("reloaded: %s", ", ".join(f"{k} {v}" for k, v in result.items()))
        return result

    def _file_rates(self) -> dict[str, int | None]:
        return {limit.key: limit.rate for limit in self.config.limits()}

    # What there is to see.

    def tenants_view(self) -> dict[str, Any]:
        """Everything of every tenant."""
        return {name: self.tenant_view(tenant) for name, tenant in self.config.tenants.items()}

    def tenant_view(self, tenant: Tenant) -> dict[str, Any]:
        """One tenant."""
        return {
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

    def limit_view(self, limit: Vm | Destination) -> dict[str, Any]:
        """A rate, the file's rate and the meter."""
        rate = self.rates[limit.key]
        number = self.numbers.meters[limit.key]
        return {
            "rate": units.format_rate(rate),
            "rate_bps": rate,
            "file_rate": units.format_rate(limit.rate),
            "file_rate_bps": limit.rate,
            "meter_id": number if rate is not None else None,
            "switches": [s.name for s in self.switches.values() if number in s.meters],
        }

    def _destinations_view(self, destinations: dict[str, Destination]) -> dict[str, Any]:
        return {text: self.limit_view(item) for text, item in destinations.items()}

    def status_view(self) -> dict[str, Any]:
        """How it all is."""
        switches = {switch.name: switch.status() for switch in self.switches.values()}
        for datapath_id, errors in self._errors.items():
            if datapath_id not in self.switches:
                switches[f"{datapath_id:016x}"] = {
                    "connected": False,
                    "in_sync": False,
                    "errors": [error.as_dict() for error in errors],
                }
        return {
            "in_sync": bool(self.switches)
            and all(status["in_sync"] for status in switches.values()),
            "switches": switches,
            "ignored_switches": [f"{number:016x}" for number in sorted(self.ignored_switches)],
            "tenants": len(self.config.tenants),
            "vms": sum(len(tenant.vms) for tenant in self.config.tenants.values()),
            "meters": {str(number): key for number, key in sorted(self.numbers.owners.items())},
            "rate_changes": self.rate_changes,
            "reloads": self.reloads,
            "last_reload_error": self.last_reload_error,
            "uptime_s": round(self._clock() - self._started, 3),
        }

    def meters_view(self) -> dict[str, Any]:
        """Give the meters by switch, in the form that Ryu's ofctl_rest has for them."""
        return {
            switch.name: [
                {
                    "meter_id": meter.id,
                    "owner": self.numbers.describe(meter.id),
                    "flags": ["KBPS"] + (["BURST"] if meter.burst_kbit else []),
                    "bands": [_band_view(meter)],
                }
                for _, meter in sorted(switch.meters.items())
            ]
            for switch in self.switches.values()
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
    return band
