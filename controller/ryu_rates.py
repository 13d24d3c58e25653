"""The application: the framework's events to the service, the service's messages back.

What to send and when is decided in the package ``fbrates`` beside this file; how OpenFlow
looks is in ``wire.py``, HTTP in ``http_front.py``, sockets are in ``transport.py``, and which
framework this is, Ryu or os-ken, in ``framework.py``.

``utilities/fb-controller`` starts it.  Under a ``ryu-manager`` of one's own, the
environment variable FLOWBUNDLER_CONFIG names the file of tenants, and
FLOWBUNDLER_REST_NAMES the names, with commas between, that REST is asked for by.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from typing import Any

import http_front
import wire
from fbrates import config, sync
from fbrates.loader import InvalidConfig, Problem
from fbrates.rest import Api
from fbrates.service import Service
from fbrates.store import Store
from framework import DEAD_DISPATCHER, MAIN_DISPATCHER, RyuApp, hub, ofp, ofp_event, set_ev_cls

CONFIG_VARIABLE = "FLOWBUNDLER_CONFIG"
NAMES_VARIABLE = "FLOWBUNDLER_REST_NAMES"
TICK = 0.5
LOG = logging.getLogger("flowbundler")


class RyuRates(RyuApp):
    """Keeps switches at the rates that the file and the REST interface say."""

    OFP_VERSIONS = [ofp.OFP_VERSION]
    _CONTEXTS = http_front.CONTEXTS

    instance: RyuRates | None = None
    store: Store | None = None
    """Where the state is kept; None: nowhere, as under a ryu-manager of one's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        filename = os.environ.get(CONFIG_VARIABLE)

        def read() -> config.Config:
            if not filename:
                problem = Problem("", "no file of tenants is named, and the store is empty")
                raise InvalidConfig([problem])
            return config.load(filename)

        self.service = Service(read, hub.Event, log=LOG, store=self.store, lock=hub.Semaphore(1))
        self.api = Api(self.service)
        self.connections: dict[Any, Connection] = {}
        names = os.environ.get(NAMES_VARIABLE, "").split(",")
        self.front = http_front.Front(self.api, self.service, names)
        if "wsgi" in kwargs:
            http_front.register(kwargs["wsgi"], self.front)
        LOG.info("%d rates", len(self.service.rates))
        # Listeners with limits, if we were started with such ones.
        self.openflow: Any = None
        self.rest: Any = None
        self.ticked = time.monotonic()
        """When what is to be done twice a second was last done."""
        RyuRates.instance = self
        hub.spawn(self._tick_forever)
        hub.spawn(self._save_forever)

    def _tick_forever(self) -> None:
        while True:
            hub.sleep(TICK)
            try:
                self.service.tick()
                for listener in (self.openflow, self.rest):
                    if listener is not None:
                        listener.admission.expire()
                for connection in list(self.connections.values()):
                    connection.adopt()
                self.ticked = time.monotonic()
            except Exception:
                LOG.exception("tick failed")

    def _save_forever(self) -> None:
        while True:
            hub.sleep(TICK)
            try:
                self.service.save_soft()
            except Exception:
                LOG.exception("saving failed")

    def reload(self) -> None:
        """Read the file again, as SIGHUP asks."""
        self.api.handle("POST", "/v1/reload", who="SIGHUP")

    # Connections.

    @set_ev_cls(ofp_event.EventOFPStateChange, [MAIN_DISPATCHER, DEAD_DISPATCHER])
    def state_changed(self, event: Any) -> None:
        """Take note of switches that connect and disconnect."""
        datapath = event.datapath
        if event.state == MAIN_DISPATCHER:
            if self.openflow is not None:
                self.openflow.settle(datapath.socket)
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
            ports = [(wire.text(port.name), port.port_no) for port in event.msg.body]
            switch.ports_reply(event.msg.xid, ports, wire.more(event.msg))

    @set_ev_cls(ofp_event.EventOFPPortStatus, MAIN_DISPATCHER)
    def port_status(self, event: Any) -> None:
        """A port came, went or changed."""
        if switch := self._switch(event.msg):
            port = event.msg.desc
            deleted = event.msg.reason == ofp.OFPPR_DELETE
            switch.port_changed(wire.text(port.name), port.port_no, deleted)

    @set_ev_cls(ofp_event.EventOFPMeterConfigStatsReply, MAIN_DISPATCHER)
    def meters_reply(self, event: Any) -> None:
        """Meters of the switch."""
        if switch := self._switch(event.msg):
            meters = [wire.meter_from_wire(item) for item in event.msg.body]
            switch.meters_reply(event.msg.xid, meters, wire.more(event.msg))

    @set_ev_cls(ofp_event.EventOFPMeterStatsReply, MAIN_DISPATCHER)
    def meter_stats_reply(self, event: Any) -> None:
        """What meters have counted."""
        if switch := self._switch(event.msg):
            samples = {item.meter_id: wire.sample_from_wire(item) for item in event.msg.body}
            self.service.meter_stats(switch, event.msg.xid, samples, wire.more(event.msg))

    @set_ev_cls(ofp_event.EventOFPFlowStatsReply, MAIN_DISPATCHER)
    def flows_reply(self, event: Any) -> None:
        """Flows of the switch."""
        if switch := self._switch(event.msg):
            flows = [wire.flow_from_wire(item) for item in event.msg.body]
            switch.flows_reply(event.msg.xid, flows, wire.more(event.msg))

    @set_ev_cls(ofp_event.EventOFPBarrierReply, MAIN_DISPATCHER)
    def barrier_reply(self, event: Any) -> None:
        """All before the barrier is done."""
        if switch := self._switch(event.msg):
            switch.barrier_reply(event.msg.xid)

    @set_ev_cls(ofp_event.EventOFPErrorMsg, MAIN_DISPATCHER)
    def error(self, event: Any) -> None:
        """The switch refused something."""
        if switch := self._switch(event.msg):
            switch.error(event.msg.xid, wire.error_text(event.msg))


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
        packed = wire.to_wire(self.datapath, message)
        self.datapath.set_xid(packed)
        self._outbox.append(packed)
        if not self._wake.is_set():
            self._wake.set()
        return packed.xid

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
