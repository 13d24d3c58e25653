"""A recorder's stamps on the machine's clock."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import numpy as np

from .pcap import Packets

_GLOBAL_HEADER = 24
_RECORD_HEADER = 16


class CaptureClock:
    """What a recorder's clock shows, against CLOCK_MONOTONIC.

    DPDK's net_pcap driver stamps packets by the CPU's time stamp counter and
    a frequency that DPDK rounds to 10 MHz, so a second of its clock can be
    off by 0.2 %: too much for rates that are right to 0.5 %.  `mark` notes
    how long the file is at what time, which costs the recorder nothing; when
    all is recorded, `apply` finds which packet was the last at each mark.

    Mark while packets leave, once before and once after what is measured.
    Each mark is right to the least time since a packet left that was seen:
    microseconds where packets leave often.
    """

    def __init__(self, path: Path):
        self.path = path
        self._marks: list[list[tuple[int, int]]] = []

    def mark(self, seconds: float = 0.02) -> None:
        """Look at the file for `seconds`, once every 0.1 ms."""
        looks: list[tuple[int, int]] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            now = time.monotonic_ns()
            looks.append((now, os.stat(self.path).st_size))
            time.sleep(0.0001)
        self._marks.append(looks)

    def apply(self, packets: Packets, others: Packets | None = None
              ) -> Packets:
        """The packets of the whole file, stamped with CLOCK_MONOTONIC.

        Or `others`, which another recorder stamped with the same clock.
        """
        ends = _GLOBAL_HEADER + np.cumsum(packets.length + _RECORD_HEADER)
        points: list[tuple[int, int]] = []
        for looks in self._marks:
            now = np.array([t for t, _ in looks], dtype=np.int64)
            size = np.array([s for _, s in looks], dtype=np.int64)
            last = np.searchsorted(ends, size, "right") - 1
            now, last = now[last >= 0], last[last >= 0]
            if len(now):
                ago = now - packets.time_ns[last]
                best = int(np.argmin(ago))
                points.append((int(packets.time_ns[last[best]]),
                               int(now[best])))
        if len(points) < 2 or points[-1][0] <= points[0][0]:
            raise ValueError("two marks while packets leave are needed")
        (stamp, now_ns), (stamp2, now2_ns) = points[0], points[-1]
        speed = (now2_ns - now_ns) / (stamp2 - stamp)
        result = packets if others is None else others
        on_clock = now_ns + np.rint((result.time_ns - stamp) * speed)
        return dataclasses.replace(result, time_ns=on_clock.astype(np.int64))
