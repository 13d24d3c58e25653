"""The Ryu application: OpenFlow 1.3 and HTTP on the wire, nothing else.

What to send and when is decided in the package ``fbrates`` beside this file; here are
Ryu's event handlers, the translation of plain messages to Ryu's classes and back, and
Ryu's WSGI in front of the REST interface.

``utilities/fb-controller`` starts it.  Under a ``ryu-manager`` of one's own, the
environment variable FLOWBUNDLER_CONFIG names the file of tenants, and
FLOWBUNDLER_REST_NAMES the names, with commas between, that REST is asked for by.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import urllib.parse
from collections import deque
from typing import Any

from ryu import cfg
from ryu.app.wsgi import ControllerBase, WSGIApplication, route
from ryu.base import app_manager
from ryu.controller import ofp_event
from ryu.controller.handler import DEAD_DISPATCHER, MAIN_DISPATCHER, set_ev_cls
from ryu.lib import hub
from ryu.ofproto import ofproto_v1_3 as ofp
from ryu.ofproto import ofproto_v1_3_parser as parser
from webob import Response as WebobResponse

import shape_band
from fbrates import config, metrics, origin, plan, sync
from fbrates.rest import MAX_BODY, Api, RequestError, Response, too_large
from fbrates.service import Service
from fbrates.sharing import MeterSample

CONFIG_VARIABLE = "FLOWBUNDLER_CONFIG"
NAMES_VARIABLE = "FLOWBUNDLER_REST_NAMES"
TICK = 0.5
LOG = logging.getLogger("flowbundler")

shape_band.install()


class RyuRates(app_manager.RyuApp):
    """Keeps switches at the rates that the file and the REST interface say."""

    OFP_VERSIONS = [ofp.OFP_VERSION]
    _CONTEXTS = {"wsgi": WSGIApplication}

    instance: RyuRates | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        filename = os.environ.get(CONFIG_VARIABLE)
        if not filename:
            raise SystemExit(f"{CONFIG_VARIABLE} must name the file of tenants")
        self.service = Service(lambda: config.load(filename), hub.Event, log=LOG)
        self.api = Api(self.service)
        self.connections: dict[Any, Connection] = {}
        names = [cfg.CONF.wsapi_host, *os.environ.get(NAMES_VARIABLE, "").split(",")]
        kwargs["wsgi"].register(
            RestController,
            {
                "api": self.api,
                "metrics": metrics.Metrics(self.service),
                "names": frozenset(name.lower() for name in names if origin.NAME.fullmatch(name)),
            },
        )
        LOG.info("%s: %d rates", filename, len(self.service.rates))
        RyuRates.instance = self
        hub.spawn(self._tick_forever)

    def _tick_forever(self) -> None:
        while True:
            hub.sleep(TICK)
            try:
                self.service.tick()
                for connection in list(self.connections.values()):
                    connection.adopt()
            except Exception:
                LOG.exception("tick failed")

    def reload(self) -> None:
        """Read the file again, as SIGHUP asks."""
        self.api.handle("POST", "/v1/reload")

    # Connections.

    @set_ev_cls(ofp_event.EventOFPStateChange, [MAIN_DISPATCHER, DEAD_DISPATCHER])
    def state_changed(self, event: Any) -> None:
        """Take note of switches that connect and disconnect."""
        datapath = event.datapath
        if event.state == MAIN_DISPATCHER:
            if datapath not in self.connections:
                self.connections[datapath] = Connection(datapath, self.service)
        elif datapath in self.connections:
            self.connections.pop(datapath).close()

    def _switch(self, message: Any) -> sync.SwitchSync | None:
        connection = self.connections.get(message.datapath)
        switch = connection.switch if connection is not None else None
        return switch if switch is not None and switch.connected else None

    # Messages from the switch.

    @set_ev_cls(ofp_event.EventOFPPortDescStatsReply, MAIN_DISPATCHER)
    def ports_reply(self, event: Any) -> None:
        """Ports of the switch."""
        if switch := self._switch(event.msg):
            ports = [(_text(port.name), port.port_no) for port in event.msg.body]
            switch.ports_reply(event.msg.xid, ports, _more(event.msg))

    @set_ev_cls(ofp_event.EventOFPPortStatus, MAIN_DISPATCHER)
    def port_status(self, event: Any) -> None:
        """A port came, went or changed."""
        if switch := self._switch(event.msg):
            port = event.msg.desc
            deleted = event.msg.reason == ofp.OFPPR_DELETE
            switch.port_changed(_text(port.name), port.port_no, deleted)

    @set_ev_cls(ofp_event.EventOFPMeterConfigStatsReply, MAIN_DISPATCHER)
    def meters_reply(self, event: Any) -> None:
        """Meters of the switch."""
        if switch := self._switch(event.msg):
            meters = [meter_from_wire(item) for item in event.msg.body]
            switch.meters_reply(event.msg.xid, meters, _more(event.msg))

    @set_ev_cls(ofp_event.EventOFPMeterStatsReply, MAIN_DISPATCHER)
    def meter_stats_reply(self, event: Any) -> None:
        """What meters have counted."""
        if switch := self._switch(event.msg):
            samples = {item.meter_id: sample_from_wire(item) for item in event.msg.body}
            self.service.meter_stats(switch, event.msg.xid, samples, _more(event.msg))

    @set_ev_cls(ofp_event.EventOFPFlowStatsReply, MAIN_DISPATCHER)
    def flows_reply(self, event: Any) -> None:
        """Flows of the switch."""
        if switch := self._switch(event.msg):
            flows = [flow_from_wire(item) for item in event.msg.body]
            switch.flows_reply(event.msg.xid, flows, _more(event.msg))

    @set_ev_cls(ofp_event.EventOFPBarrierReply, MAIN_DISPATCHER)
    def barrier_reply(self, event: Any) -> None:
        """All before the barrier is done."""
        if switch := self._switch(event.msg):
            switch.barrier_reply(event.msg.xid)

    @set_ev_cls(ofp_event.EventOFPErrorMsg, MAIN_DISPATCHER)
    def error(self, event: Any) -> None:
        """The switch refused something."""
        if switch := self._switch(event.msg):
            switch.error(event.msg.xid, error_text(event.msg))


class Connection:
    """A connected datapath, with an outbox that is filled without ever yielding."""

    def __init__(self, datapath: Any, service: Service) -> None:
        self.datapath = datapath
        self.service = service
        self.switch: sync.SwitchSync | None = None
        self._outbox: deque[Any] = deque()
        self._wake = hub.Event()
        self._closed = False
        hub.spawn(self._send_forever)
        self.adopt(first=True)
        hub.spawn(self._poll_forever)

    def adopt(self, first: bool = False) -> None:
        """Hand the switch to the service if it is, or has become, one of ours."""
        if self.switch is not None and not self.switch.connected:
            self.switch = None
        number = self.datapath.id
        # A new connection of the same switch takes over from one that is not known to
        # be dead yet; that one must not take it back.
        wanted = self.service.config.selects(number) and number not in self.service.switches
        if self.switch is None and (first or wanted):
            self.switch = self.service.connect(self.datapath.id, self.send)

    def send(self, message: sync.Message) -> int:
        """Queue a plain message; gives its transaction id."""
        wire = to_wire(self.datapath, message)
        self.datapath.set_xid(wire)
        self._outbox.append(wire)
        if not self._wake.is_set():
            self._wake.set()
        return wire.xid

    def close(self) -> None:
        """The switch is gone."""
        self._closed = True
        self._wake.set()
        if self.switch is not None:
            self.service.disconnect(self.switch)

    def _poll_forever(self) -> None:
        while not self._closed:
            wait = 1.0
            try:
                if self.switch is not None:
                    wait = self.service.poll(self.switch)
            except Exception:
                LOG.exception("polling failed")
            hub.sleep(wait)

    def _send_forever(self) -> None:
        while not self._closed:
            while self._outbox and not self._closed:
                message = self._outbox.popleft()
                # Not what was queued before another connection of this switch took over.
                if self.switch is not None and self.switch.connected:
                    self.datapath.send_msg(message)
            self._wake.clear()
            if not self._outbox:
                self._wake.wait()


class RestController(ControllerBase):
    """Ryu's WSGI in front of fbrates.rest.Api."""

    def __init__(self, req: Any, link: Any, data: dict[str, Any], **config: Any) -> None:
        super().__init__(req, link, data, **config)
        self.api: Api = data["api"]
        self.metrics: metrics.Metrics = data["metrics"]
        self.names: frozenset[str] = data["names"]

    @route("flowbundler", "/v1{rest:(/.*)?}")
    def answer(self, req: Any, **_kwargs: Any) -> WebobResponse:
        """Answer any request below /v1."""
        try:
            origin.check(req.headers, self.names)
            body = _read_body(req)
            return _to_webob(self.api.handle(req.method, _path(req), body, req.headers))
        except RequestError as error:
            return _to_webob(error.response)
        except Exception:
            # Only what cannot fail again: not what webob would have to decode.
            LOG.exception("%s %r", req.method, req.environ.get("PATH_INFO"))
            return _to_webob(Response(500, {"error": {"message": "internal error, see the log"}}))

    @route("flowbundler", "/metrics", methods=["GET"])
    def scrape(self, req: Any, **_kwargs: Any) -> WebobResponse:
        """Answer Prometheus."""
        try:
            origin.check(req.headers, self.names)
        except RequestError as error:
            return _to_webob(error.response)
        return WebobResponse(
            body=self.metrics.render(), headerlist=[("Content-Type", metrics.CONTENT_TYPE)]
        )


def _to_webob(response: Response) -> WebobResponse:
    return WebobResponse(
        status=response.status,
        body=response.encode(),
        headerlist=[("Content-Type", "application/json"), *response.headers.items()],
    )


def _path(req: Any) -> str:
    try:
        path: str = req.path_info
    except UnicodeDecodeError:
        # WSGI's PATH_INFO has a character for each byte.
        shown = urllib.parse.quote(req.environ["PATH_INFO"].encode("latin-1"))
        raise RequestError(400, "the path is not UTF-8", "path", shown, "quoted UTF-8") from None
    return path


def _read_body(req: Any) -> bytes:
    length = req.content_length
    if length is not None and length > MAX_BODY:
        raise too_large()
    chunked = "chunked" in req.headers.get("Transfer-Encoding", "").lower()
    if length is None and not chunked:
        return b""
    body: bytes = req.environ["wsgi.input"].read(MAX_BODY + 1 if chunked else length)
    return body


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


def _more(message: Any) -> bool:
    return bool(message.flags & ofp.OFPMPF_REPLY_MORE)


def _text(name: bytes | str) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else name
