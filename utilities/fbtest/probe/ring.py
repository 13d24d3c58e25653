"""Reading what the plug-in records: the layout is utilities/probe/fb-probe-ring.h."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"FBPROBE"
VERSION = 1
WRAP, EDT, STOPPED = 1, 2, 4
FLOWS = ("dst", "src", "offset", "mbuf")

HEADER = np.dtype([
    ("magic", "S8"), ("version", "u4"), ("header_size", "u4"), ("flags", "u4"),
    ("record_size", "u4"), ("n_queues", "u4"), ("queue_size", "u4"),
    ("n_records", "u8"), ("queues_offset", "u8"), ("clocks_offset", "u8"),
    ("records_offset", "u8"), ("tsc_hz", "u8"), ("max_clocks", "u4"),
    ("n_clocks", "u4"), ("pid", "u4"), ("port_id", "u4"), ("flow", "u4"),
    ("flow_offset", "u4"), ("edt_offset", "u4"), ("burst_wait_ns", "u4"),
    ("device", "S64"),
])
QUEUE = np.dtype([
    ("claimed", "u8"), ("written", "u8"), ("bursts", "u8"), ("packets", "u8"),
    ("bytes", "u8"), ("lost", "u8"), ("pad", "u8", 2),
])
CLOCK = np.dtype([("tsc", "u8"), ("mono_ns", "u8"), ("error_tsc", "u8")])
_PLAIN = [("tsc", "u8"), ("flow", "u4"), ("bytes", "u2"), ("position", "u2")]
STORED = {16: np.dtype(_PLAIN), 24: np.dtype([*_PLAIN, ("edt_ns", "u8")])}

#: What a reader gets: departures of all queues, in the order of their times.
#: `time_ns` and `edt_ns` (0: none) are CLOCK_MONOTONIC, `burst` counts up, one
#: for each burst, `position` is the place in it.
RECORD = np.dtype([
    ("time_ns", "i8"), ("edt_ns", "i8"), ("flow", "u4"), ("burst", "u4"),
    ("bytes", "u2"), ("position", "u2"), ("queue", "u2"),
], align=True)

Records = NDArray[np.void]


def pick(records: Records, which: NDArray[np.intp]) -> Records:
    """``records[which]``, many times faster than numpy does it by fields."""
    words = np.ascontiguousarray(records).view(np.uint64)
    return words.reshape(len(records), -1).take(which, axis=0).view(RECORD)[:, 0]


class RingError(ValueError):
    """A file is not what the plug-in writes."""


@dataclass(frozen=True)
class Counters:
    """What the plug-in counted, recorded or not.

    `lost` are packets that did not fit into the ring, `overwritten` those
    that newer ones took the place of (mode=wrap).
    """

    bursts: int
    packets: int
    bytes: int
    lost: int
    overwritten: int


@dataclass(frozen=True)
class Recording:
    """What was recorded of a port.

    `clock_error_ns` bounds how far `time_ns` is from CLOCK_MONOTONIC.
    """

    device: str
    records: Records
    counters: Counters
    clock_error_ns: float
    settings: dict[str, Any]


def ticks_to_ns(tsc: NDArray[np.uint64], clocks: NDArray[np.void], tsc_hz: int
                ) -> tuple[NDArray[np.int64], float]:
    """TSC values on CLOCK_MONOTONIC, and how far off they may be, in ns.

    Straight lines between the pairs of clocks that were taken undisturbed.
    The error is that with which these were taken, and the farthest that one
    of them lies off the line between its neighbours.
    """
    if len(clocks) == 0:
        raise RingError("no pair of clocks was recorded")
    calm = clocks[clocks["error_tsc"] <= 2 * np.median(clocks["error_tsc"])]
    base, base_ns = calm["tsc"][0], int(calm["mono_ns"][0])
    # Differences are small enough to be exact as floats.
    x = (calm["tsc"] - base).astype(np.int64).astype(float)
    y = (calm["mono_ns"].astype(np.int64) - base_ns).astype(float)
    slope = (y[-1] - y[0]) / (x[-1] - x[0]) if len(x) > 1 else 1e9 / tsc_hz
    off_line = 0.0
    if len(x) > 2:
        part = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
        line = y[:-2] + part * (y[2:] - y[:-2])
        off_line = float(np.abs(y[1:-1] - line).max())
    error = float(calm["error_tsc"].max()) * slope + off_line
    if len(tsc) == 0:
        return np.empty(0, np.int64), error
    at = (tsc - base).astype(np.int64).astype(float)
    # Beyond the first and the last pair the lines go on.
    reach = max(0.0, x[0] - at.min(), at.max() - x[-1]) + 1.0
    x = np.r_[x[0] - reach, x, x[-1] + reach]
    y = np.r_[y[0] - reach * slope, y, y[-1] + reach * slope]
    return np.rint(np.interp(at, x, y)).astype(np.int64) + base_ns, error


class _File:
    """A file of the plug-in's, mapped: it may still be recorded into."""

    def __init__(self, file: Path | int):
        what = f"file descriptor {file}" if isinstance(file, int) else str(file)
        fd = os.dup(file) if isinstance(file, int) else os.open(file, os.O_RDONLY)
        with os.fdopen(fd, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size < HEADER.itemsize:
                raise RingError(f"{what}: {size} bytes are no recording")
            self.data = np.memmap(opened, np.uint8, "r")
        self.header = self.data[:HEADER.itemsize].view(HEADER)[0]
        h = self.header
        if h["magic"] != MAGIC:
            raise RingError(f"{what}: not a recording: it begins with {bytes(h['magic'])!r}")
        if h["version"] != VERSION:
            raise RingError(f"{what}: layout {h['version']}, only {VERSION} is known")
        stored = STORED.get(int(h["record_size"]))
        if (stored is None or h["header_size"] != HEADER.itemsize
                or h["queue_size"] != QUEUE.itemsize or h["flow"] >= len(FLOWS)):
            raise RingError(f"{what}: the sizes of its structures are not those of "
                            f"layout {VERSION}")
        self.stored = stored
        n = int(h["n_records"])
        end = int(h["records_offset"]) + int(h["n_queues"]) * n * stored.itemsize
        if n & (n - 1) or end > size:
            raise RingError(f"{what}: cut off, or damaged: {size} bytes instead of {end}")
        self.queues = self._array(h["queues_offset"], h["n_queues"], QUEUE)

    def _array(self, offset: int, count: int, dtype: np.dtype) -> NDArray[np.void]:
        start = int(offset)
        return self.data[start:start + int(count) * dtype.itemsize].view(dtype)

    def clocks(self) -> NDArray[np.void]:
        """The pairs of clocks that are complete and stay."""
        n, most = int(self.header["n_clocks"]), int(self.header["max_clocks"])
        if n == most and not self.header["flags"] & STOPPED:
            n -= 1
        return self._array(self.header["clocks_offset"], n, CLOCK).copy()

    def queue(self, number: int) -> tuple[NDArray[np.void], int]:
        """A queue's records, and how many were overwritten."""
        n = int(self.header["n_records"])
        ring = self._array(int(self.header["records_offset"]) + number * n * self.stored.itemsize,
                           n, self.stored)
        shared = self.queues[number]
        written = int(shared["written"])
        first = max(0, written - n)
        if first == 0:
            records = ring[:written].copy()
        else:
            at = written % n
            records = np.concatenate([ring[at:], ring[:at]])
        # What the writer has begun to overwrite while they were copied.
        void = max(0, int(shared["claimed"]) - n - first)
        records = records[void:]
        if first + void:
            # A burst of which the beginning is gone.
            begins = np.flatnonzero(records["position"] == 0)
            whole = int(begins[0]) if len(begins) else len(records)
            records = records[whole:]
        return records, written - len(records)


def packet_counter(file: Path | int) -> Callable[[], int]:
    """What tells, in microseconds, how many packets have left so far.

    `file` may be closed meanwhile.
    """
    f = _File(file)
    return lambda: int(f.queues["packets"].sum())


def read_recording(file: Path | str | int) -> Recording:
    """Read a recording, from a path or an open file; it may still go on."""
    f = _File(file if isinstance(file, int) else Path(file))
    parts, overwritten = [], 0
    for number in range(len(f.queues)):
        stored, gone = f.queue(number)
        overwritten += gone
        parts.append(stored)
    # After the records, so that they lie between pairs if there are later ones.
    clocks = f.clocks()
    stored = np.concatenate(parts)
    records = np.zeros(len(stored), RECORD)
    records["time_ns"], error = ticks_to_ns(stored["tsc"], clocks, int(f.header["tsc_hz"]))
    for name in stored.dtype.names[1:]:
        records[name] = stored[name]
    records["queue"] = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
    if sum(len(p) > 0 for p in parts) > 1:
        records = pick(records, np.argsort(stored["tsc"], kind="stable"))
    records["burst"] = np.cumsum(records["position"] == 0) - 1
    flags = int(f.header["flags"])
    total = {name: int(f.queues[name].sum()) for name in ("bursts", "packets", "bytes", "lost")}
    flow = FLOWS[f.header["flow"]]
    return Recording(
        device=f.header["device"].decode(errors="replace"), records=records,
        counters=Counters(**total, overwritten=overwritten), clock_error_ns=error,
        settings={
            "flow": f"{flow}:{f.header['flow_offset']}" if flow in ("offset", "mbuf") else flow,
            "edt": bool(flags & EDT), "mode": "wrap" if flags & WRAP else "stop",
            "stopped": bool(flags & STOPPED), "records": int(f.header["n_records"]),
            "queues": len(f.queues), "burst_wait_ns": int(f.header["burst_wait_ns"]),
            "pid": int(f.header["pid"]), "port_id": int(f.header["port_id"]),
        })
