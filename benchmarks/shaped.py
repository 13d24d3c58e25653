"""A port that shapes traffic from a source that is held back, not dropped.

The source offers more than any rate.  A receive queue is not polled while so
many bytes that it received wait (shaper-rx-limit), which stands for
a sender with a bounded window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.rig import Rig
from benchmarks.search import highest
from benchmarks.switch import OURS, PEERS, Switch

#: The part by which the rate may be off.
TOLERANCE = 0.01
#: How precisely the highest rate is searched for, also a part.
PRECISION = 0.01
#: What no shaper here reaches, and the least that is tried, in bit/s.
HIGHEST, LOWEST = 400e9, 50e6
#: Frames that may wait for each destination (if the source sends runs, as long a
#: run at least), and at least in all.  More do not fit into a core's cache.
FRAMES_EACH, FRAMES = 8, 64
#: Frames that may wait at most: a part of the switch's buffers.
FRAMES_MAX = 32768
#: A meter's burst: as small as a packet, rounded up to a kbit.
BURST_FRAMES = 1
#: Time of the whole rate that waits besides, so that a late poll finds packets.
POLL_GAP_S = 20e-6
#: Longer than any packet waits, so that none is dropped.  (Without a QoS, until
#: there is the next one, nothing holds the source back, and meters get as far
#: ahead as this allows.)
MAX_DELAY_US = 200_000


def shaping_switch(*, private: bool = True, probe: bool = False, memory_mb: int = 2048,
                   peers: bool = False) -> Switch:
    """A switch whose meters shape; with `peers` one that has other schedulers, too."""
    config = {"meter-shaping": "true", "meter-shaping-max-delay": MAX_DELAY_US}
    return Switch(PEERS if peers else OURS, config=config, private=private, probe=probe,
                  memory_mb=memory_mb)


@dataclass(frozen=True)
class Scheduler:
    """A scheduler of the port, in a switch that has a choice of them."""

    name: str
    granularity_ns: int = 0
    batching: str = ""

    @property
    def label(self) -> str:
        """What tables call it."""
        if not self.granularity_ns:
            return self.name
        return f"{self.name} {self.granularity_ns} ns, {self.batching}"

    @property
    def words(self) -> list[str]:
        """The command that asks for it."""
        slots = [str(self.granularity_ns), self.batching] if self.granularity_ns else []
        return ["benchmark/scheduler", self.name, *slots]


MLTW = Scheduler("mltw")
SCHEDULERS = (MLTW, *(Scheduler(name, ns, batching) for ns in (100, 1000)
                      for name in ("carousel", "eiffel") for batching in ("slot", "all")))


@dataclass(frozen=True)
class Try:
    """One rate that was tried, and what was achieved, in bit/s."""

    target: float
    achieved: float
    share: float

    @property
    def holds(self) -> bool:
        """Whether it is close enough."""
        return abs(self.achieved / self.target - 1) <= TOLERANCE


def rx_limit(rig: Rig, total_bps: float) -> int:
    """Bytes that may wait: for every destination, and for a late poll."""
    each = max(FRAMES_EACH, rig.run)
    frames = max(FRAMES, min(each * rig.n, FRAMES_MAX))
    return round(frames * max(rig.mix.sizes) + total_bps / 8 * POLL_GAP_S)


class Shaped:
    """A rig whose port shapes, each destination at the same rate."""

    def __init__(self, rig: Rig, scheduler: Scheduler, seconds: float):
        self.rig, self.seconds = rig, seconds
        self.tries: list[Try] = []
        rig.ovs.clear_qos("out")
        if rig.switch.tree == PEERS:
            rig.switch.ctl(*scheduler.words)
        elif scheduler != MLTW:
            raise RuntimeError(f"this switch has no {scheduler.label}")
        rig.ovs.set_qos("out", "flowbundler")
        show = rig.ovs.flowbundler_show("out")["out"]
        if not show["shaping"]:
            raise RuntimeError(f"the port refused its QoS: {show.get('refused')}")
        if not rig.has_meters:
            self.set_rate(LOWEST)
            rig.forward(metered=True)

    def set_rate(self, total_bps: float) -> None:
        """Give all destinations equal parts of a rate."""
        self.set_rates([total_bps / self.rig.n] * self.rig.n)

    def set_rates(self, rates_bps: Sequence[float]) -> None:
        """Change the rates of all meters, and what may wait, in place."""
        limit = rx_limit(self.rig, sum(rates_bps))
        self.rig.ovs.hold_back(limit)
        self.rig.set_meters(rates_bps, BURST_FRAMES)

    def attempt(self, total_bps: float) -> Try:
        """What is achieved of a rate, once it is steady."""
        self.set_rate(total_bps)
        self._settle()
        # The machine is not quiet: what falls short once may not do so twice.
        for _ in range(2):
            seen = self.rig.measure(self.seconds)
            tried = Try(total_bps, seen.pps * self.rig.mix.mean * 8, seen.share)
            if tried.holds:
                break
        self.tries.append(tried)
        return tried

    def _settle(self) -> None:
        last = 0.0
        for _ in range(10):
            now = self.rig.measure(0.1).pps
            if last and abs(now - last) <= 0.005 * now:
                return
            last = now

    def search(self, guess: float) -> dict[str, Any]:
        """The highest rate that is held, and all that was tried."""
        rate = highest(lambda bps: self.attempt(bps).achieved, guess, tolerance=TOLERANCE,
                       precision=PRECISION, lowest=LOWEST, ceiling=HIGHEST)
        return {"bps": rate, "tries": [asdict(t) for t in self.tries]}
