"""Sampling counters while traffic runs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping

from .analysis import CounterSeries


class Sampler:
    """A thread that reads counters every `interval` seconds.

    `read` gives all counters at once, by name.  Each sample is stamped with
    CLOCK_MONOTONIC halfway between before and after the reading, so a late
    or slow sample still gives the right rate.  The thread asks for real-time
    priority: traffic on the same cores would otherwise hold it up.
    """

    def __init__(self, read: Callable[[], Mapping[str, float]],
                 interval: float = 0.05):
        self._read = read
        self.interval = interval
        self._samples: list[tuple[float, Mapping[str, float]]] = []
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sampler",
                                        daemon=True)

    def start(self) -> Sampler:
        """Begin to sample."""
        self._thread.start()
        return self

    __enter__ = start

    def __exit__(self, *_exc) -> None:
        self.stop()

    def stop(self) -> None:
        """Take a last sample and end the thread; raise what it raised."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_RR,
                                  os.sched_param(1))
        try:
            due = time.monotonic()
            while True:
                last = self._stop.is_set()
                before = time.monotonic()
                values = self._read()
                after = time.monotonic()
                self._samples.append(((before + after) / 2, values))
                if last:
                    return
                due = max(due + self.interval, after)
                self._stop.wait(due - after)
        except Exception as exc:
            self._error = exc

    def names(self) -> list[str]:
        """The names of the counters sampled so far."""
        return sorted(self._samples[-1][1]) if self._samples else []

    def series(self, name: str) -> CounterSeries:
        """The samples of one counter."""
        samples = self._samples[:]
        return CounterSeries([t for t, _ in samples],
                             [v[name] for _, v in samples])

    def recent_rate(self, name: str, window: float = 0.5) -> float:
        """The rate, in bit/s, of the byte counter over the last `window`."""
        samples = self._samples[:]
        if len(samples) < 2:
            return 0.0
        end, values = samples[-1]
        older = (s for s in reversed(samples) if end - s[0] >= window)
        start, old = next(older, samples[0])
        return (values[name] - old[name]) * 8 / (end - start)
