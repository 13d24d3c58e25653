"""What the parameters of a link say, in the terms of the switch.

The parameters are TCLink's.  What they ask for is held by a port of the switch:
what the switch sends by the port's QoS (`Shape.qos`), what it receives, which is
what the host at the link's other end sends, by keys of the Interface
(`Shape.reception`).

Plain functions of their arguments: they need neither mininet nor root.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Bytes of a full Ethernet frame without FCS, which queues are counted in.
FRAME_BYTES = 1514
#: Packets that wait for a link's rate unless max_queue_size says otherwise: as many as
#: with TCLink, whose HTB class takes them from the veth's txqueuelen.
QUEUE_PACKETS = 1000
#: The range of bw in Mbit/s, as of the rates of flowbundler(8) and its meters.
BW_MIN, BW_MAX = 0.001, 400_000
#: The longest delay, and the longest that a packet may wait for a rate, in us.
MAX_US = 10_000_000
#: Part of OVS's buffers that packets may wait in; the rest is for receiving.
BUFFERS_PART = 0.75

#: Microseconds of a unit of time, as tc knows them; none is microseconds, too.
_UNITS_US = {"": 1, "us": 1, "usec": 1, "usecs": 1, "ms": 1e3, "msec": 1e3, "msecs": 1e3,
             "s": 1e6, "sec": 1e6, "secs": 1e6}

_TIME = re.compile(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)\s*([a-z]*)")

#: What a link has for its rate and times.
SHAPING = ("bw", "delay", "jitter", "loss", "max_queue_size")
#: What TCIntf takes besides, and is met, or has no meaning here.
MET = ("gro", "disable_gro", "txo", "rxo", "use_htb")
#: What TCIntf takes and is not to be had, and why.
REFUSED = {
    "use_hfsc": "the shaper is neither HTB nor HFSC: leave it out",
    "use_tbf": "the shaper has no token bucket with a latency of its own: leave it out, and "
               "give max_queue_size for a shorter queue",
    "latency_ms": "it belongs to use_tbf; give max_queue_size for a shorter queue",
    "enable_ecn": "RED is not to be had; to have packets marked (CE) that wait, set "
                  "other-config:ecn-threshold of the port's QoS",
    "enable_red": "RED is not to be had; give max_queue_size for a shorter queue",
    "speedup": "a switch's ports have the rates of their links; give the link another bw",
}
#: What Link and Intf take.
PLAIN = ("mac", "ip", "ifconfig", "up", "port", "moveIntfFn")


class LinkError(ValueError):
    """A link's parameter that cannot be; the message says what can."""


@dataclass(frozen=True)
class Shape:
    """What one direction of a link is to do.

    `rate` in bit/s of whole Ethernet frames without FCS, None for no limit; `delay_us` and
    `jitter_us` in us; `queue` in full frames, or None for the default; `loss` in percent.
    """

    rate: int | None = None
    delay_us: int = 0
    jitter_us: int = 0
    queue: int | None = None
    loss: float = 0.0

    @property
    def wait_us(self) -> int:
        """How long a packet may wait for the rate, in us: the time of `queue` frames."""
        if self.rate is None:
            return MAX_US
        packets = QUEUE_PACKETS if self.queue is None else self.queue
        return max(1, min(MAX_US, math.ceil(packets * FRAME_BYTES * 8e6 / self.rate)))

    @property
    def buffers(self) -> int:
        """How many full frames are held at most, those under way (delay) and those waiting."""
        if self.rate is None:
            return 0
        waiting = QUEUE_PACKETS if self.queue is None else self.queue
        under_way = self.rate * (self.delay_us + self.jitter_us) / 8e6 / FRAME_BYTES
        return math.ceil(under_way) + waiting

    def qos(self) -> dict[str, str]:
        """The other_config of the QoS of the port that sends so."""
        keys: dict[str, int] = {}
        if self.rate is not None:
            keys |= {"max-rate": self.rate, "max-delay": self.wait_us}
        if self.delay_us:
            keys["delay"] = self.delay_us
        if self.jitter_us:
            keys["jitter"] = self.jitter_us
        return {key: str(value) for key, value in keys.items()}

    def reception(self) -> dict[str, str]:
        """The keys in other_config of the Interface that receives what is sent so."""
        keys: dict[str, int] = {}
        if self.rate is not None:
            keys |= {"shaper-rx-rate": self.rate, "shaper-rx-max-delay": self.wait_us}
        if self.delay_us:
            keys["shaper-rx-delay"] = self.delay_us
        if self.jitter_us:
            keys["shaper-rx-jitter"] = self.jitter_us
        return {key: str(value) for key, value in keys.items()}

    def text(self) -> str:
        """What mininet prints behind a link, as TCLink does."""
        parts = []
        if self.rate is not None:
            parts.append(f"{self.rate / 1e6:.2f}Mbit")
        if self.delay_us:
            parts.append(f"{self.delay_us / 1000:g}ms delay")
        if self.jitter_us:
            parts.append(f"{self.jitter_us / 1000:g}ms jitter")
        if self.loss:
            parts.append(f"{self.loss:.5f}% loss")
        return " ".join(parts)

    def check_buffers(self, available: int) -> None:
        """Refuse what does not fit into a switch that has `available` buffers."""
        most = int(available * BUFFERS_PART)
        if self.buffers > most:
            raise LinkError(
                f"bw={self.rate_mbit:g}, delay={self.delay_us / 1000:g}ms"
                f"{'' if self.queue is None else f', max_queue_size={self.queue}'}: "
                f"{self.buffers} full frames ({self.buffers * FRAME_BYTES / 1e6:.0f} MB) would be "
                f"under way and waiting, and the switch has buffers for {most}: allowed is less "
                "of these, or more memory for DPDK (memory=MB of FlowBundlerSwitch)")

    @property
    def rate_mbit(self) -> float:
        """The rate in Mbit/s, 0 if there is none."""
        return (self.rate or 0) / 1e6


def _number(name: str, value: Any, allowed: str) -> float:
    """The finite number that `value` is, be it as text."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise LinkError(f"{name}={value!r}: is no number; allowed: {allowed}")
    return number


def rate_bps(bw: Any) -> int:
    """The bit/s of `bw`, which is in Mbit/s."""
    allowed = f"Mbit/s, {BW_MIN:g} to {BW_MAX}, such as bw=100 or bw=0.5"
    number = _number("bw", bw, allowed)
    if not BW_MIN <= number <= BW_MAX:
        raise LinkError(f"bw={bw!r}: out of range; allowed: {allowed}")
    return round(number * 1e6)


def time_us(name: str, value: Any) -> int:
    """The microseconds of a time such as "5ms"; a bare number is in us, as for tc."""
    allowed = f"0 to {MAX_US // 1_000_000}s, such as {name}='5ms', '250us' or '1s'"
    match = _TIME.fullmatch(str(value).strip().lower())
    unit = _UNITS_US.get(match[2]) if match else None
    if match is None or unit is None:
        raise LinkError(f"{name}={value!r}: is no time; allowed: {allowed}")
    microseconds = _number(name, match[1], allowed) * unit
    if microseconds > MAX_US:
        raise LinkError(f"{name}={value!r}: is too long; allowed: {allowed}")
    return round(microseconds)


def loss_percent(value: Any) -> float:
    """The percentage that `loss` is: 1, "1" and "1%" are the same."""
    allowed = "a percentage, 0 to 100"
    text = value.rstrip("% ") if isinstance(value, str) else value
    number = _number("loss", text, allowed)
    if not 0 <= number <= 100:
        raise LinkError(f"loss={value!r}: out of range; allowed: {allowed}")
    return number


def queue_packets(value: Any) -> int:
    """The number of packets that `max_queue_size` is."""
    allowed = "a number of packets, 1 to 10000000"
    number = _number("max_queue_size", value, allowed)
    if not 1 <= number <= 10_000_000 or number != int(number):
        raise LinkError(f"max_queue_size={value!r}: allowed: {allowed}")
    return int(number)


def check_names(params: Mapping[str, Any], tc: bool = False) -> None:
    """Refuse what no link here has, and what is not to be had (where `tc` is not used)."""
    known = (*SHAPING, *MET, *REFUSED, *PLAIN)
    for name, value in params.items():
        if name not in known:
            similar = difflib.get_close_matches(name, known, 1)
            hint = f", did you mean {similar[0]}?" if similar else ""
            raise LinkError(f"{name}={value!r}: unknown parameter of a link{hint}; allowed: "
                            + ", ".join((*SHAPING, *MET, *PLAIN[:4])))
        if name in REFUSED and value and not tc:
            raise LinkError(f"{name}={value!r}: {REFUSED[name]}")


def shape(params: Mapping[str, Any]) -> Shape | None:
    """What a link's `params` ask for; None if they say nothing about it.

    None is as good as a parameter that is not given.
    """
    check_names(params)
    given = {name: params[name] for name in SHAPING if params.get(name) is not None}
    if not given:
        return None
    delay_us = time_us("delay", given.get("delay", 0))
    jitter_us = time_us("jitter", given.get("jitter", 0))
    if jitter_us > delay_us:
        raise LinkError(f"jitter={params['jitter']!r}: allowed: up to the delay, which is "
                        f"{delay_us} us: packets cannot come before they are sent")
    return Shape(
        rate=rate_bps(given["bw"]) if "bw" in given else None,
        delay_us=delay_us,
        jitter_us=jitter_us,
        queue=queue_packets(given["max_queue_size"]) if "max_queue_size" in given else None,
        loss=loss_percent(given.get("loss", 0)),
    )
