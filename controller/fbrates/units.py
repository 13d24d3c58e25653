"""Rates and sizes: text to numbers, strictly, and back.

A rate is bits per second.  OpenFlow meters count whole kbit/s, so a rate that is
not a whole number of kbit/s is refused rather than rounded.
"""

from __future__ import annotations

import re
from decimal import Decimal

MIN_RATE = 1_000
"""The smallest rate, in bit/s: one kbit/s, the unit of OpenFlow meters."""

MAX_RATE = 400_000_000_000
"""The largest rate, in bit/s: what the shaper's arithmetic is exact up to."""

MAX_BURST_KBIT = 34_359_738
"""The largest burst, in kbit: 4 GiB, what a switch takes in a shape band."""

RATE_ALLOWED = (
    "1kbps to 400Gbps in whole kbit/s: a number with bps, kbps, Mbps or Gbps, "
    "or an integer of bit/s"
)
BURST_ALLOWED = (
    "1kbit to 34359738kbit in whole kbit (1000 bit): a number with bit, kbit, Mbit, B, kB or MB"
)

MAX_DURATION_US = 10_000_000
"""The longest time, in us, that a switch lets a packet wait."""

DURATION_ALLOWED = "1us to 10s in whole us: a number with us, ms or s"

UNLIMITED = "unlimited"

_SCALE = {"": 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000}
_RATE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?(?:([kMG]?)bps)")
_INTEGER = re.compile(r"[0-9]{1,30}")
_DURATION = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?(us|ms|s)")
_DURATION_SCALE = {"us": 1, "ms": 1_000, "s": 1_000_000}
_BURST = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([kM]?)(bit|B)")


class UnitError(ValueError):
    """A value that is not a rate, a size or a time; ``allowed`` says what would be one."""

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.message = message
        self.allowed = allowed


def parse_rate(value: object) -> int:
    """Turn ``300Mbps``, ``"50000000"`` or ``50000000`` into bit/s.

    Raises UnitError for everything else, among it zero, negative numbers, units in
    the wrong case and rates that are not a whole number of kbit/s.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise UnitError("not a rate", RATE_ALLOWED)
    if isinstance(value, int) or _INTEGER.fullmatch(value):
        bps = Decimal(value)
    elif match := _RATE.fullmatch(value):
        bps = Decimal(match[1]) * _SCALE[match[2]]
    else:
        raise UnitError("not a rate", RATE_ALLOWED)
    if bps < MIN_RATE or bps > MAX_RATE:
        raise UnitError("rate out of range", RATE_ALLOWED)
    if bps % 1_000:
        raise UnitError(
            "rate is not a whole number of kbit/s, which OpenFlow meters count in", RATE_ALLOWED
        )
    return int(bps)


def parse_burst(value: object) -> int:
    """Turn ``120kbit`` or ``15kB`` into kbit; raises UnitError."""
    if not isinstance(value, str) or not (match := _BURST.fullmatch(value)):
        raise UnitError("not a burst size", BURST_ALLOWED)
    bits = Decimal(match[1]) * _SCALE[match[2]] * (8 if match[3] == "B" else 1)
    if bits % 1_000:
        raise UnitError(
            "burst is not a whole number of kbit, which OpenFlow meters count in", BURST_ALLOWED
        )
    if not 1 <= bits / 1_000 <= MAX_BURST_KBIT:
        raise UnitError("burst out of range", BURST_ALLOWED)
    return int(bits / 1_000)


def parse_duration(value: object) -> int:
    """Turn ``20ms`` or ``500us`` into us; raises UnitError."""
    if not isinstance(value, str) or not (match := _DURATION.fullmatch(value)):
        raise UnitError("not a time", DURATION_ALLOWED)
    us = Decimal(match[1]) * _DURATION_SCALE[match[2]]
    if us % 1:
        raise UnitError("time is not a whole number of us", DURATION_ALLOWED)
    if not 1 <= us <= MAX_DURATION_US:
        raise UnitError("time out of range", DURATION_ALLOWED)
    return int(us)


def format_rate(bps: int | None) -> str:
    """Show a rate the way the file spells it: ``1.5Gbps``; None is ``unlimited``."""
    if bps is None:
        return UNLIMITED
    for suffix in ("G", "M", "k"):
        scale = _SCALE[suffix]
        # At most three decimals, or the next smaller unit is easier to read.
        if bps >= scale and (bps * 1_000) % scale == 0:
            return f"{(Decimal(bps) / scale).normalize():f}{suffix}bps"
    return f"{bps}bps"
