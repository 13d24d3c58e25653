"""OpenFlow 1.3 on the wire: plain messages to the framework's classes, and back.

Importing this also teaches the framework the shape band.
"""

from __future__ import annotations

import ipaddress
from typing import Any

import shape_band
from fbrates import config, plan, sync
from fbrates.sharing import MeterSample
from framework import ofp, parser

shape_band.install()

# Plain messages to Ryu's classes.


def to_wire(datapath: Any, message: sync.Message) -> Any:
    """Translate one plain message."""
    match message:
        case plan.Barrier():
            return parser.OFPBarrierRequest(datapath)
        case plan.MeterMod(command, meter) | sync.Trial(command, meter):
            return _meter_mod(datapath, command, meter)
        case plan.FlowMod(command, flow):
            return _flow_mod(datapath, command, flow)
        case sync.ReadsShapeBands():
            return shape_band.reads_shape_bands(datapath)
        case sync.PortsRequest():
            return parser.OFPPortDescStatsRequest(datapath, 0)
        case sync.MetersRequest():
            return parser.OFPMeterConfigStatsRequest(datapath, 0, ofp.OFPM_ALL)
        case sync.MeterStatsRequest(meter):
            number = ofp.OFPM_ALL if meter is None else meter
            return parser.OFPMeterStatsRequest(datapath, 0, number)
        case sync.FlowsRequest(window, windows):
            return parser.OFPFlowStatsRequest(
                datapath,
                table_id=ofp.OFPTT_ALL,
                cookie=plan.COOKIE_PREFIX << plan.COOKIE_SHIFT | window,
                cookie_mask=plan.COOKIE_MASK | windows - 1,
            )
    raise TypeError(message)


_METER_COMMANDS = {
    plan.ADD: ofp.OFPMC_ADD,
    plan.MODIFY: ofp.OFPMC_MODIFY,
    plan.DELETE: ofp.OFPMC_DELETE,
}


def _meter_mod(datapath: Any, command: str, meter: plan.Meter) -> Any:
    flags = ofp.OFPMF_KBPS | (ofp.OFPMF_BURST if meter.burst_kbit is not None else 0)
    bands = []
    if command != plan.DELETE:
        burst = meter.burst_kbit or 0
        if meter.shaping is None:
            bands = [parser.OFPMeterBandDrop(meter.rate_kbps, burst)]
        else:
            shaping = meter.shaping
            bands = [
                shape_band.ShapeBand(
                    meter.rate_kbps,
                    burst,
                    shaping.max_delay_us,
                    shaping.ecn_threshold_us,
                    shaping.fair,
                )
            ]
    return parser.OFPMeterMod(datapath, _METER_COMMANDS[command], flags, meter.id, bands)


def _flow_mod(datapath: Any, command: str, flow: plan.Flow) -> Any:
    instructions = []
    if command != plan.DELETE:
        if flow.meter is not None:
            instructions.append(parser.OFPInstructionMeter(flow.meter, ofp.OFPIT_METER))
        if flow.outputs:
            actions = [
                parser.OFPActionOutput(_RESERVED.get(output, output)) for output in flow.outputs
            ]
            instructions.append(parser.OFPInstructionActions(ofp.OFPIT_APPLY_ACTIONS, actions))
        if flow.metadata is not None:
            instructions.append(parser.OFPInstructionWriteMetadata(flow.metadata, plan.ALL_BITS))
        if flow.goto is not None:
            instructions.append(parser.OFPInstructionGotoTable(flow.goto))
    return parser.OFPFlowMod(
        datapath,
        cookie=flow.cookie,
        table_id=flow.key.table,
        command=ofp.OFPFC_ADD if command == plan.ADD else ofp.OFPFC_DELETE_STRICT,
        priority=flow.key.priority,
        out_port=ofp.OFPP_ANY,
        out_group=ofp.OFPG_ANY,
        match=match_to_wire(flow.key.match),
        instructions=instructions,
    )


_RESERVED = {plan.NORMAL: ofp.OFPP_NORMAL, plan.FLOOD: ofp.OFPP_FLOOD}
_RESERVED_NAMES = {number: name for name, number in _RESERVED.items()}
_IP_FIELDS = (
    *("ipv4_src", "ipv4_dst", "ipv6_src", "ipv6_dst"),
    *("arp_spa", "arp_tpa", "ipv6_nd_target"),
)
_MAC_FIELDS = ("eth_src", "eth_dst")


def match_to_wire(match: plan.Match) -> Any:
    """Translate a match."""
    fields: dict[str, Any] = {}
    for name, value in match:
        if isinstance(value, str) and "/" in value:
            left, right = value.split("/")
            if name in _IP_FIELDS:
                network = ipaddress.ip_network(value)
                fields[name] = (str(network.network_address), str(network.netmask))
            elif name in _MAC_FIELDS:
                fields[name] = (left, right)
            else:
                fields[name] = (int(left, 0), int(right, 0))
        else:
            fields[name] = value
    return parser.OFPMatch(**fields)


# And back.


def match_from_wire(match: Any) -> plan.Match:
    """Translate a match into the form that fbrates.plan describes."""
    result: list[tuple[str, int | str]] = []
    for name, value in match.items():
        mask = None
        if isinstance(value, tuple):
            value, mask = value
        if name in _IP_FIELDS:
            value = _network_text(value, mask)
        elif name in _MAC_FIELDS:
            value = value if mask is None else f"{value}/{mask}"
        elif mask is not None:
            value = f"{value:#x}/{mask:#x}"
        result.append((name, value))
    return tuple(sorted(result))


def _network_text(value: str, mask: str | None) -> str:
    if mask is None:
        return str(ipaddress.ip_address(value))
    bits = int(ipaddress.ip_address(mask))
    width = ipaddress.ip_address(mask).max_prefixlen
    length = bits.bit_count()
    if bits != ((1 << length) - 1) << (width - length):
        return f"{value}/{mask}"
    return config.network_text(ipaddress.ip_network(f"{value}/{length}"))


def meter_from_wire(item: Any) -> plan.Meter:
    """Translate an entry of a meter configuration reply."""
    flags = item.flags & ~ofp.OFPMF_STATS
    known = {ofp.OFPMF_KBPS, ofp.OFPMF_KBPS | ofp.OFPMF_BURST}
    band = item.bands[0] if len(item.bands) == 1 else None
    shaping = None
    if isinstance(band, shape_band.ShapeBand):
        shaping = config.Shaping(band.max_delay, band.ecn_threshold, band.fair)
    elif not isinstance(band, parser.OFPMeterBandDrop):
        band = None
    if flags not in known or band is None:
        return plan.Meter(item.meter_id, 0, foreign=f"flags {item.flags}, bands {item.bands}")
    burst = band.burst_size if flags & ofp.OFPMF_BURST else None
    return plan.Meter(item.meter_id, band.rate, burst, shaping)


def sample_from_wire(item: Any) -> MeterSample:
    """Translate an entry of a meter statistics reply."""
    dropped = sum(band.byte_band_count for band in item.band_stats)
    seconds = item.duration_sec + item.duration_nsec * 1e-9
    return MeterSample(item.byte_in_count, dropped, seconds)


def flow_from_wire(item: Any) -> plan.Flow:
    """Translate an entry of a flow reply."""
    meter = metadata = goto = None
    outputs: list[int | str] = []
    foreign = ""
    if item.idle_timeout or item.hard_timeout:
        foreign = "timeouts"
    for instruction in item.instructions:
        if isinstance(instruction, parser.OFPInstructionMeter):
            meter = instruction.meter_id
        elif isinstance(instruction, parser.OFPInstructionGotoTable):
            goto = instruction.table_id
        elif (
            isinstance(instruction, parser.OFPInstructionWriteMetadata)
            and instruction.metadata_mask == plan.ALL_BITS
        ):
            metadata = instruction.metadata
        elif (
            isinstance(instruction, parser.OFPInstructionActions)
            and instruction.type == ofp.OFPIT_APPLY_ACTIONS
            and all(isinstance(action, parser.OFPActionOutput) for action in instruction.actions)
        ):
            outputs += [
                _RESERVED_NAMES.get(action.port, action.port) for action in instruction.actions
            ]
        else:
            foreign = str(instruction)
    key = plan.FlowKey(item.table_id, item.priority, match_from_wire(item.match))
    counted = item.packet_count, item.byte_count
    return plan.Flow(key, item.cookie, meter, metadata, goto, tuple(outputs), foreign, *counted)


_ERROR_CODES = {
    ofp.OFPET_BAD_REQUEST: "OFPBRC_",
    ofp.OFPET_BAD_ACTION: "OFPBAC_",
    ofp.OFPET_BAD_INSTRUCTION: "OFPBIC_",
    ofp.OFPET_BAD_MATCH: "OFPBMC_",
    ofp.OFPET_FLOW_MOD_FAILED: "OFPFMFC_",
    ofp.OFPET_METER_MOD_FAILED: "OFPMMFC_",
}


def error_text(message: Any) -> str:
    """Name an error message's type and code as the specification does."""
    kind = _constant("OFPET_", message.type)
    prefix = _ERROR_CODES.get(message.type)
    code = _constant(prefix, message.code) if prefix else f"code {message.code}"
    return f"{kind} {code}"


def _constant(prefix: str, value: int) -> str:
    for name, number in vars(ofp).items():
        if name.startswith(prefix) and number == value:
            return name
    return f"{prefix}{value}"


def more(message: Any) -> bool:
    """Whether another part of a multipart reply follows."""
    return bool(message.flags & ofp.OFPMPF_REPLY_MORE)


def text(name: bytes | str) -> str:
    """Give a port's name as text."""
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else name
