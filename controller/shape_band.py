"""The shape band on the wire, for Ryu.

Ryu 4.34 knows of bands of experimenters only the 16 bytes that they have in common, and
fails on a meter that has a longer one; the reply that lists all meters is then lost.
`install` makes it read them: ours as `ShapeBand`, others as `OtherBand`.  The switch shows
them as drop bands on a connection on which nobody has said that he can read them, which
the message of `reads_shape_bands` does.

The format is that of ``struct nx_meter_band_shape``, docs/shape-band.md.
"""

from __future__ import annotations

import struct
from typing import Any

from framework import ofp, parser

EXPERIMENTER = 0x00002320
SUBTYPE = 1
SET_METER_BANDS = 64
"""The experimenter message NXT_SET_METER_BANDS."""

# Type, length, rate, burst size, experimenter; then what is ours: subtype, flags, four bytes
# of zeros, longest wait and ECN threshold in us.
_COMMON = struct.Struct("!HHIII")
_BODY = struct.Struct("!HH4xII")
FAIR = 1 << 0
LENGTH = _COMMON.size + _BODY.size


class ShapeBand(parser.OFPMeterBandHeader):  # type: ignore[misc]
    """A band that delays.

    `rate` and `burst_size` are in the meter's unit, `max_delay` and `ecn_threshold` in us;
    with `fair` the flows that pass the meter share its rate equally.
    """

    cls_meter_band_type = ofp.OFPMBT_EXPERIMENTER
    cls_meter_band_len = LENGTH
    experimenter = EXPERIMENTER  # Ryu's own applications ask for it.

    def __init__(
        self,
        rate: int = 0,
        burst_size: int = 0,
        max_delay: int = 0,
        ecn_threshold: int = 0,
        fair: bool = False,
    ) -> None:
        super().__init__()
        self.rate = rate
        self.burst_size = burst_size
        self.max_delay = max_delay
        self.ecn_threshold = ecn_threshold
        self.fair = fair

    def serialize(self, buf: bytearray, offset: int) -> None:
        """Write it at `offset`, as Ryu's bands do, extending `buf`."""
        buf += bytes(max(0, offset + LENGTH - len(buf)))
        _COMMON.pack_into(
            buf, offset, self.type, self.len, self.rate, self.burst_size, EXPERIMENTER
        )
        flags = FAIR if self.fair else 0
        body = SUBTYPE, flags, self.max_delay, self.ecn_threshold
        _BODY.pack_into(buf, offset + _COMMON.size, *body)


class OtherBand(parser.OFPMeterBandHeader):  # type: ignore[misc]
    """A band of somebody else's, of any length."""

    cls_meter_band_type = ofp.OFPMBT_EXPERIMENTER
    cls_meter_band_len = 0

    def __init__(self, length: int, experimenter: int) -> None:
        super().__init__()
        self.len = length
        self.experimenter = experimenter


def parse(buf: bytes, offset: int) -> ShapeBand | OtherBand:
    """Read the experimenter's band at `offset`; raises ValueError if it is malformed."""
    if offset + _COMMON.size > len(buf):
        raise ValueError("meter band is cut off")
    _, length, rate, burst_size, experimenter = _COMMON.unpack_from(buf, offset)
    if length < _COMMON.size or offset + length > len(buf):
        raise ValueError(f"meter band has a length of {length}")
    if experimenter == EXPERIMENTER and length == LENGTH:
        subtype, flags, max_delay, ecn_threshold = _BODY.unpack_from(buf, offset + _COMMON.size)
        # One with flags of a later day says more than we would keep.
        if subtype == SUBTYPE and not flags & ~FAIR:
            return ShapeBand(rate, burst_size, max_delay, ecn_threshold, bool(flags & FAIR))
    return OtherBand(length, experimenter)


def reads_shape_bands(datapath: Any) -> Any:
    """Give the message that says that whoever reads on this connection knows shape bands."""
    bands = struct.pack("!I", 1 << SUBTYPE)
    return parser.OFPExperimenter(datapath, EXPERIMENTER, SET_METER_BANDS, bands)


def install() -> None:
    """Make Ryu's parser read bands of experimenters; once or more often."""
    header = parser.OFPMeterBandHeader
    if getattr(header, "reads_experimenters", False):
        return
    others = header.parser.__func__

    def parse_any(cls: Any, buf: bytes, offset: int) -> Any:
        (kind,) = struct.unpack_from("!H", buf, offset)
        return parse(buf, offset) if kind == ofp.OFPMBT_EXPERIMENTER else others(cls, buf, offset)

    header.parser = classmethod(parse_any)
    header.reads_experimenters = True
