"""A small OpenFlow switch in memory: obeys plain messages, and moves packets.

It follows the specification where the controller depends on it: the flow entry of
highest priority, masks, meters that vanish with their flows, errors for what cannot
be, replies in the order of the requests.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fbrates import plan, sync
from fbrates.plan import Flow, FlowKey, FlowMod, Meter, MeterMod
from fbrates.sharing import MeterSample

Packet = dict[str, Any]
BAD_BAND = "OFPET_METER_MOD_FAILED OFPMMFC_BAD_BAND"


@dataclass
class Result:
    """What happened to a packet."""

    meters: list[int] = field(default_factory=list)
    outputs: list[int | str] = field(default_factory=list)
    tables: list[int] = field(default_factory=list)


def field_matches(name: str, wanted: int | str, value: Any) -> bool:
    """Whether one field of a packet matches."""
    if value is None:
        return False
    if name.startswith(("ipv4_", "ipv6_", "arp_")):
        return ipaddress.ip_address(value) in ipaddress.ip_network(str(wanted))
    if name in ("eth_src", "eth_dst"):
        address, _, mask = str(wanted).partition("/")
        bits = _mac(mask) if mask else _mac("ff:ff:ff:ff:ff:ff")
        return _mac(value) & bits == _mac(address) & bits
    if isinstance(wanted, str):
        number, mask = (int(part, 0) for part in wanted.split("/"))
        return value & mask == number & mask
    return bool(value == wanted)


def _mac(text: str) -> int:
    return int(text.replace(":", ""), 16)


def lookup(flows: dict[FlowKey, Flow], table: int, packet: Packet) -> Flow | None:
    """Find the flow entry of highest priority; two equally good ones are a fault of ours."""
    hits = [
        flow
        for key, flow in flows.items()
        if key.table == table
        and all(field_matches(name, wanted, packet.get(name)) for name, wanted in key.match)
    ]
    if not hits:
        return None
    top = max(flow.key.priority for flow in hits)
    best = [flow for flow in hits if flow.key.priority == top]
    behaviours = {(f.meter, f.metadata, f.goto, f.outputs) for f in best}
    assert len(behaviours) == 1, f"ambiguous for {packet}: {best}"
    return best[0]


def send(flows: dict[FlowKey, Flow], packet: Packet) -> Result:
    """Send a packet through the tables."""
    packet = dict(packet, metadata=0)
    result = Result()
    table: int | None = 0
    while table is not None:
        result.tables.append(table)
        flow = lookup(flows, table, packet)
        if flow is None:
            return result
        if flow.meter is not None:
            result.meters.append(flow.meter)
        result.outputs += flow.outputs
        if flow.metadata is not None:
            packet["metadata"] = flow.metadata
        assert flow.goto is None or flow.goto > table
        table = flow.goto
    return result


class FakeSwitch:
    """A connected switch: give it to `Service.connect` as `send`, then `run`."""

    def __init__(self, ports: dict[str, int] | None = None) -> None:
        self.ports = dict(ports or {})
        self.meters: dict[int, Meter] = {}
        self.flows: dict[FlowKey, Flow] = {}
        self.max_meters = 1 << 18
        self.shapes = False  # Has it the shape band?
        self.reads_shape_bands = False  # Has who is connected said that he knows them?
        self.refuse_trial = ""
        self.sent: list[sync.Message] = []
        self.queue: list[tuple[int, sync.Message]] = []
        self.xid = 0
        self.sync: sync.SwitchSync | None = None
        self.stats: Callable[[int], MeterSample] = lambda number: MeterSample(0, 0, 0.0)
        self.service: Any = None
        self.part = 3  # entries in one part of a multipart reply
        self.observe: Callable[[], None] = lambda: None
        self.before_part: Callable[[], None] = lambda: None

    def send(self, message: sync.Message) -> int:
        """Queue a message, as a connection does."""
        self.xid += 1
        self.sent.append(message)
        self.queue.append((self.xid, message))
        return self.xid

    def connect(self, service: Any, datapath_id: int = 1) -> sync.SwitchSync:
        """Connect to a controller, anew if there was a connection."""
        self.queue.clear()
        self.sent.clear()
        self.reads_shape_bands = False
        self.service = service
        self.sync = service.connect(datapath_id, self.send)
        assert self.sync is not None
        return self.sync

    def run(self, limit: int | None = None) -> None:
        """Obey what is queued, and what that brings, up to a number of messages."""
        while self.queue and limit != 0:
            xid, message = self.queue.pop(0)
            self._obey(xid, message)
            self.observe()
            if limit is not None:
                limit -= 1

    def changes(self) -> list[plan.Change]:
        """Give the messages since the last call that change something."""
        result = [item for item in self.sent if isinstance(item, MeterMod | FlowMod)]
        self.sent.clear()
        return result

    def _obey(self, xid: int, message: sync.Message) -> None:
        connection = self.sync
        assert connection is not None
        match message:
            case sync.ReadsShapeBands():
                if self.shapes:
                    self.reads_shape_bands = True
                else:
                    connection.error(xid, "OFPET_BAD_REQUEST OFPBRC_BAD_EXP_TYPE")
            case sync.PortsRequest():
                self._reply(xid, list(self.ports.items()), connection.ports_reply)
            case sync.MetersRequest():
                shown = [self._shown(meter) for meter in self.meters.values()]
                self._reply(xid, shown, connection.meters_reply)
            case sync.FlowsRequest(window, windows):
                ours = [
                    flow
                    for flow in self.flows.values()
                    if flow.cookie >> plan.COOKIE_SHIFT == plan.COOKIE_PREFIX
                    and flow.cookie & windows - 1 == window
                ]
                self._reply(xid, ours, connection.flows_reply)
            case sync.MeterStatsRequest(None):
                self._reply(xid, sorted(self.meters), self._stats_reply)
            case sync.MeterStatsRequest(number):
                if number in self.meters:
                    self._reply(xid, [number], self._stats_reply)
                else:
                    connection.error(xid, "UNKNOWN_METER")
            case plan.Barrier():
                connection.barrier_reply(xid)
            case MeterMod(command, meter) | sync.Trial(command, meter):
                exists = meter.id in self.meters
                if isinstance(message, sync.Trial) and command == plan.ADD and self.refuse_trial:
                    connection.error(xid, self.refuse_trial)
                elif command != plan.DELETE and meter.shaping and not self.shapes:
                    connection.error(xid, BAD_BAND)
                elif command == plan.ADD and exists:
                    connection.error(xid, "METER_EXISTS")
                elif command == plan.MODIFY and not exists:
                    connection.error(xid, "UNKNOWN_METER")
                elif command == plan.ADD and len(self.meters) >= self.max_meters:
                    connection.error(xid, "OUT_OF_METERS")
                else:
                    plan.apply([MeterMod(command, meter)], self.meters, self.flows)
            case FlowMod(command, flow):
                if command == plan.ADD and flow.meter is not None and flow.meter not in self.meters:
                    connection.error(xid, "INVALID_METER")
                else:
                    plan.apply([message], self.meters, self.flows)

    def _shown(self, meter: Meter) -> Meter:
        hidden = self.shapes and not self.reads_shape_bands
        return replace(meter, shaping=None) if hidden else meter

    def _stats_reply(self, xid: int, numbers: list[int], more: bool) -> None:
        samples = {number: self.stats(number) for number in numbers}
        self.service.meter_stats(self.sync, xid, samples, more)

    def _reply(self, xid: int, items: list[Any], handler: Callable[..., None]) -> None:
        parts = [items[i : i + self.part] for i in range(0, len(items), self.part)] or [[]]
        for i, part in enumerate(parts):
            self.before_part()
            handler(xid, part, i < len(parts) - 1)
