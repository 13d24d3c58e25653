"""What a recording says, as numbers, a table and a picture."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..analysis import NS
from .analysis import (
    batches,
    by_flow,
    flow_rates,
    gap_quantiles,
    ideal_gaps,
    intra_flow_bursts,
    lateness,
    lateness_ns,
    window_rates,
)
from .ring import Recording

WIDTH = 120
#: Flows with curves of their own.
CURVES = 8
POINTS = 201


def flow_name(flow: int, kind: str) -> str:
    """How a flow is called: by its IPv4 address if that is what identifies it."""
    return str(ipaddress.IPv4Address(flow)) if kind in ("dst", "src") else str(flow)


def summarize(recording: Recording, rates: Mapping[int, float] | None = None, *,
              window_s: float = 0.1, most_flows: int = 16) -> dict[str, Any]:
    """All numbers; `rates` are what flows should have had, in bit/s.

    Only the `most_flows` busiest flows are listed one by one.
    """
    records, kind = recording.records, recording.settings["flow"]
    rates = rates or {}
    measured = flow_rates(records)
    busiest = sorted(measured, key=lambda flow: -measured[flow].bytes)
    bursts = intra_flow_bursts(records, rates)
    parts = by_flow(records)
    flows = {}
    for flow in busiest[:most_flows]:
        gaps = np.diff(parts[flow]["time_ns"])
        flows[flow_name(flow, kind)] = {
            **asdict(measured[flow]),
            "should": rates.get(flow),
            "ratio": measured[flow].rate / rates[flow] if rates.get(flow) else None,
            "burst": asdict(bursts[flow]),
            "gaps_ns": gap_quantiles(gaps, POINTS).tolist(),
            "ideal_gaps_ns": gap_quantiles(ideal_gaps(parts[flow], rates.get(flow)),
                                           POINTS).tolist(),
        }
    middles, numbers, over_time = window_rates(records, window_s)
    column = {int(flow): i for i, flow in enumerate(numbers)}
    late = lateness_ns(records)
    return {
        "device": recording.device,
        "settings": recording.settings,
        "counters": asdict(recording.counters),
        "recorded": len(records),
        "clock_error_ns": recording.clock_error_ns,
        "seconds": float(records["time_ns"][-1] - records["time_ns"][0]) / NS
        if len(records) else 0.0,
        "flow_count": len(measured),
        "flows": flows,
        "lateness_ns": asdict(lateness(records, recording.clock_error_ns)),
        "lateness_quantiles_ns": gap_quantiles(late, POINTS).tolist(),
        "batches": asdict(batches(records)),
        "windows": {
            "seconds": window_s, "middles_s": middles.tolist(),
            "rates": {flow_name(flow, kind): over_time[column[flow]].tolist()
                      for flow in busiest[:CURVES]},
        },
    }


def _us(ns: float) -> str:
    return f"{ns / 1e3:,.3f}"


def table(summary: Mapping[str, Any]) -> Table:
    """A row for each of the busiest flows, and the rest below."""
    out = Table(box=SIMPLE_HEAD, pad_edge=False, title_justify="left", caption_justify="left",
                title=f"Departures from {summary['device']} in {summary['seconds']:.3f} s")
    for heading in ("flow", "packets", "Mbit/s", "of rate", "gap p50 us", "p99 us",
                    "excess bytes", "run"):
        out.add_column(heading, justify="left" if heading == "flow" else "right", no_wrap=True)
    for name, flow in summary["flows"].items():
        gaps, burst = flow["gaps_ns"], flow["burst"]
        out.add_row(
            name, f"{flow['packets']:,}", f"{flow['rate'] / 1e6:.3f}",
            f"{100 * flow['ratio']:.2f} %" if flow["ratio"] else "",
            _us(gaps[POINTS // 2]), _us(gaps[round(0.99 * (POINTS - 1))]),
            f"{burst['excess_bytes']:,.0f}", str(burst["run_packets"]))
    out.caption = "\n".join(_notes(summary))
    return out


def _notes(summary: Mapping[str, Any]) -> list[str]:
    late, batch, counters = summary["lateness_ns"], summary["batches"], summary["counters"]
    notes = []
    if (more := summary["flow_count"] - len(summary["flows"])) > 0:
        notes.append(f"{more:,} flows more.")
    if late["packets"]:
        quantiles = ", ".join(f"{q:g} %: {_us(v)}" for q, v in late["percentiles"].items())
        notes.append(f"Lateness in us: {quantiles}, most {_us(late['latest'])}; "
                     f"{late['early']:,} of {late['packets']:,} packets early (by more than "
                     f"the clock's {summary['clock_error_ns']:.0f} ns), least "
                     f"{_us(late['earliest'])}.")
    notes.append(f"{batch['count']:,} transmissions of {batch['mean']:.2f} packets and "
                 f"{batch['mean_flows']:.2f} flows on average.")
    notes.append(f"{counters['packets']:,} packets left, {summary['recorded']:,} recorded, "
                 f"{counters['lost']:,} lost to the ring, {counters['overwritten']:,} "
                 "overwritten.")
    notes.append("Excess: the least burst with which every window has at most rate x its length; "
                 "run: most packets of the flow back to back in one transmission.")
    return notes


def picture(summary: Mapping[str, Any], path: Path) -> None:
    """Rates over time, lateness, gaps against the ideal, and batches."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ((rate, late), (gap, batch)) = plt.subplots(2, 2, figsize=(10, 7), dpi=120)
    steps = np.linspace(0, 1, POINTS)

    for name, values in summary["windows"]["rates"].items():
        rate.plot(summary["windows"]["middles_s"], np.array(values) / 1e6, label=name, lw=1.2)
    rate.set(title=f"Rates in windows of {summary['windows']['seconds']:g} s",
             xlabel="seconds", ylabel="Mbit/s")
    rate.set_ylim(bottom=0)
    if summary["windows"]["rates"]:
        rate.legend(fontsize=7, frameon=False)

    if summary["lateness_ns"]["packets"]:
        late.plot(np.array(summary["lateness_quantiles_ns"]) / 1e3, steps, lw=1.4)
        late.set_xscale("symlog", linthresh=1)
        late.axvline(0, color="0.4", lw=0.8)
    else:
        late.text(0.5, 0.5, "no departure times recorded", ha="center", transform=late.transAxes)
    late.set(title="Departure after EDT", xlabel="us", ylabel="share of packets")

    for name, flow in list(summary["flows"].items())[:CURVES]:
        line, = gap.plot(np.array(flow["gaps_ns"]) / 1e3, steps, lw=1.2, label=name)
        gap.plot(np.array(flow["ideal_gaps_ns"]) / 1e3, steps, lw=1, ls=":",
                 color=line.get_color())
    gap.set_xscale("symlog", linthresh=0.1)
    gap.set(title="Gaps within a flow (dotted: ideal)", xlabel="us", ylabel="share of gaps")

    for key, label, shift in (("sizes", "packets", -0.2), ("flows", "different flows", 0.2)):
        counts = summary["batches"][key]
        number = np.array([int(n) for n in counts])
        batch.bar(number + shift, list(counts.values()), 0.4, label=label)
    batch.set(title="In one transmission", xlabel="how many", ylabel="transmissions")
    batch.set_yscale("log" if summary["batches"]["count"] else "linear")
    batch.legend(fontsize=7, frameon=False)

    for ax in (rate, late, gap, batch):
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def write(summary: Mapping[str, Any], *, json_file: Path | None = None,
          text_file: Path | None = None, png_file: Path | None = None) -> None:
    """Write the files that are asked for."""
    if json_file is not None:
        json_file.write_text(json.dumps(summary, indent=1) + "\n")
    if text_file is not None:
        with text_file.open("w") as file:
            Console(file=file, width=WIDTH).print(table(summary))
    if png_file is not None:
        picture(summary, png_file)
