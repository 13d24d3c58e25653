"""Departures as DPDK's tx callbacks see them, independent of the shaper.

    with Probe(bed.ovs, "out", edt=True) as probe:
        time.sleep(1)
    departures = probe.records()
    print(lateness(departures).percentiles, batches(departures).mean)

vswitchd must run with the plug-in loaded (``fb-sandbox run --probe``);
docs/probe.md has the rest.
"""

from .analysis import (
    Batches,
    FlowRate,
    IntraFlowBurst,
    Lateness,
    batches,
    between,
    by_flow,
    flow_rates,
    gap_quantiles,
    ideal_gaps,
    intra_flow_bursts,
    lateness,
    window_rates,
)
from .control import Probe, ProbeError, Telemetry
from .ring import Counters, Recording, RingError, read_recording

__all__ = [
    "Batches", "Counters", "FlowRate", "IntraFlowBurst", "Lateness", "Probe",
    "ProbeError", "Recording", "RingError", "Telemetry", "batches", "between",
    "by_flow", "flow_rates", "gap_quantiles", "ideal_gaps",
    "intra_flow_bursts", "lateness", "read_recording", "window_rates",
]
