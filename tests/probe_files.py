"""Departures, and files as the plug-in writes them, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fbtest.probe.ring import CLOCK, HEADER, QUEUE, RECORD, STORED, Records

#: (TSC, flow, bytes, position, EDT) of a packet.
Stored = tuple[int, int, int, int, int]

TSC_HZ = 2_000_000_000


def departures(*rows: tuple[int, int, int, int], edt: Sequence[int] | None = None) -> Records:
    """Departures of one queue, from (time, flow, bytes, position)."""
    records = np.zeros(len(rows), RECORD)
    for name, column in zip(("time_ns", "flow", "bytes", "position"), zip(*rows, strict=True),
                            strict=True):
        records[name] = column
    records["burst"] = np.cumsum(records["position"] == 0) - 1
    if edt is not None:
        records["edt_ns"] = edt
    return records


def write_file(path: Path, queues: Sequence[Sequence[Stored]], *, room: int = 8, edt: bool = False,
               flags: int = 0, clocks: Sequence[tuple[int, int, int]] = ((0, 1_000_000, 20),),
               claimed: int | None = None, lost: int = 0, **header: object) -> Path:
    """A file in which each of `queues` has a ring with `room` for records.

    More than that wrap around.  `claimed` is what the first queue's writer has begun.
    """
    stored = STORED[24 if edt else 16]
    h = np.zeros((), HEADER)
    h["magic"], h["version"], h["header_size"] = b"FBPROBE", 1, HEADER.itemsize
    h["flags"] = flags | (2 if edt else 0)
    h["record_size"], h["queue_size"] = stored.itemsize, QUEUE.itemsize
    h["n_queues"], h["n_records"] = len(queues), room
    h["queues_offset"], h["clocks_offset"] = 192, 192 + 64 * len(queues)
    h["max_clocks"], h["n_clocks"] = 16, len(clocks)
    h["records_offset"], h["tsc_hz"], h["device"] = 4096, TSC_HZ, b"net_null0"
    for name, value in header.items():
        h[name] = value
    data = np.zeros(4096 + len(queues) * room * stored.itemsize, np.uint8)
    data[:HEADER.itemsize] = np.frombuffer(h.tobytes(), np.uint8)
    shared = data[192:192 + 64 * len(queues)].view(QUEUE)
    data[192 + 64 * len(queues):][:CLOCK.itemsize * len(clocks)].view(CLOCK)[:] = (
        np.array(list(clocks), CLOCK))
    rings = data[4096:].view(stored).reshape(len(queues), room)
    for number, rows in enumerate(queues):
        for i, row in enumerate(rows):
            rings[number][i % room] = row[:len(stored.names)]
        shared[number]["written"] = shared[number]["claimed"] = len(rows)
        shared[number]["packets"] = len(rows)
        shared[number]["bytes"] = sum(row[2] for row in rows)
        shared[number]["bursts"] = sum(row[3] == 0 for row in rows)
    if claimed is not None:
        shared[0]["claimed"] = claimed
    shared[0]["lost"] = lost
    path.write_bytes(data.tobytes())
    return path
