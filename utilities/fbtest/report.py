"""The demo's result: what is kept, the table and the picture."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .ovs import Ovs
from .proc import run

#: Columns that the table needs.
WIDTH = 120


@dataclass
class Vm:
    """A VM of the demo and what it does."""

    name: str
    tenant: str
    traffic: str  # "TCP" or "UDP"
    destination: str
    color: str
    rates: list[int]  # bit/s, one for each phase
    offered: int | None = None  # bit/s, of a flood

    @property
    def label(self) -> str:
        """How it is called in the table and the picture."""
        return f"{self.tenant}/{self.name}"


@dataclass
class Phase:
    """What one VM got while one rate was configured.

    Rates are bit/s of Ethernet frames (without FCS) leaving the port to the
    VM's destination, over the window `start_s` to `end_s` of the run.
    """

    configured: int
    achieved: float
    start_s: float
    end_s: float
    offered: float
    retransmits: int
    drops: int
    port_drops: int
    goodput: float | None = None
    in_force_s: float | None = None

    @property
    def ratio(self) -> float:
        """Achieved over configured."""
        return self.achieved / self.configured


@dataclass
class Series:
    """Rate over time of one VM; seconds of the run, and bit/s."""

    time_s: list[float]
    rate: list[float]


@dataclass
class LimiterResult:
    """One run of the load under one limiter."""

    key: str
    title: str
    setting: str
    change_s: float
    phases: dict[str, list[Phase]] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """All that a run of the demo found."""

    environment: dict[str, str]
    vms: list[Vm]
    tolerance: float
    results: list[LimiterResult] = field(default_factory=list)
    seconds: float = 0.0

    def failures(self, key: str) -> list[str]:
        """Where the limiter `key` was off by more than the tolerance."""
        found = []
        for result in self.results:
            if result.key != key:
                continue
            for vm in self.vms:
                for phase in result.phases[vm.label]:
                    if abs(phase.ratio - 1) > self.tolerance:
                        found.append(
                            f"{vm.label} at {mbit(phase.configured)} Mbit/s: "
                            f"{mbit(phase.achieved)} left the port "
                            f"({100 * phase.ratio:.2f} %)")
        return found


def mbit(bits_per_second: float) -> str:
    """A rate in Mbit/s, as the table shows it."""
    value = bits_per_second / 1e6
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}"


def environment(ovs: Ovs) -> dict[str, str]:
    """What it ran on, for the record."""
    cpu = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    root = Path(__file__).resolve().parents[2]
    return {
        **ovs.versions(),
        "kernel": platform.release(),
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "commit": run("git", "-C", str(root), "rev-parse", "--short", "HEAD",
                      check=False).strip(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def table(report: Report) -> Table:
    """The table: a row for each limiter, VM and configured rate."""
    out = Table(box=SIMPLE_HEAD, pad_edge=False, title="Tenant rates: what left the port, Mbit/s",
                title_justify="left", caption_justify="left")
    for heading, justify in (
            ("limiter", "left"), ("VM", "left"), ("load", "left"),
            ("set", "right"), ("achieved", "right"), ("ratio", "right"),
            ("goodput", "right"), ("retrans.", "right"), ("drops", "right"),
            ("in force", "right")):
        out.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for result in report.results:
        limiter = result.title
        for vm in report.vms:
            name = vm.label
            for phase in result.phases[vm.label]:
                load = "TCP" if vm.traffic == "TCP" else (
                    f"UDP {phase.offered / 1e6:.0f}")
                good = abs(phase.ratio - 1) <= report.tolerance
                out.add_row(
                    limiter, name, load, mbit(phase.configured),
                    f"{phase.achieved / 1e6:.2f}",
                    f"[{'green' if good else 'red'}]"
                    f"{100 * phase.ratio:.2f} %[/]",
                    "" if phase.goodput is None
                    else f"{phase.goodput / 1e6:.2f}",
                    f"{phase.retransmits:,}" if vm.traffic == "TCP" else "",
                    f"{phase.drops + phase.port_drops:,}",
                    "" if phase.in_force_s is None
                    else f"{phase.in_force_s * 1000:.0f} ms")
                limiter = name = ""
        out.add_section()
    notes = [f"{r.title}: {text}" for r in report.results
             for text in (r.setting, *r.notes) if text]
    env = report.environment
    notes += [
        "Rates count Ethernet frames without FCS, over the steady part of "
        "each phase; goodput is TCP payload; a UDP load is what the VM sent.",
        "In force: until the first 100 ms that are within 10 % of a changed "
        "rate, with none in the next second that are not.",
        f"Open vSwitch {env.get('ovs', '')}, {env.get('dpdk', '')}, "
        f"kernel {env.get('kernel', '')}, {env.get('cores', '')} cores "
        f"({env.get('cpu', '')}), {env.get('date', '')}",
    ]
    out.caption = "\n".join(notes)
    return out


def picture(report: Report, path: Path) -> None:
    """Rate over time, a panel for each limiter."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MultipleLocator

    count = len(report.results)
    figure, axes = plt.subplots(1, count, figsize=(4.3 * count, 4.1),
                                sharey=True, squeeze=False, dpi=130)
    most = max(max(vm.rates) for vm in report.vms) / 1e6
    for ax, result in zip(axes[0], report.results, strict=True):
        end = max(s.time_s[-1] for s in result.series.values())
        for vm in report.vms:
            series = result.series[vm.label]
            ax.plot(series.time_s, [r / 1e6 for r in series.rate],
                    color=vm.color, linewidth=1.3,
                    label=f"{vm.label}: {vm.traffic}" + (
                        " flood" if vm.traffic == "UDP" else ""))
            times = [0, result.change_s, result.change_s, end]
            before, after = (rate / 1e6 for rate in vm.rates)
            ax.plot(times, [before, before, after, after], color=vm.color,
                    linewidth=1.1, linestyle=(0, (4, 3)), alpha=0.6)
            for phase in result.phases[vm.label]:
                ax.annotate(
                    f"{100 * phase.ratio:.1f} %",
                    ((phase.start_s + phase.end_s) / 2,
                     phase.configured / 1e6),
                    xytext=(0, 9), textcoords="offset points", ha="center",
                    fontsize=9, color=vm.color,
                    bbox={"boxstyle": "round,pad=0.15", "fc": "white",
                          "ec": "none", "alpha": 0.8})
        ax.axvline(result.change_s, color="0.35", linewidth=0.9)
        ax.annotate("rates\nchanged", (result.change_s, most * 1.42),
                    xytext=(4, 0), textcoords="offset points", va="top",
                    fontsize=8, color="0.35",
                    bbox={"boxstyle": "round,pad=0.1", "fc": "white",
                          "ec": "none", "alpha": 0.8})
        again = sum(phase.retransmits for vm in report.vms
                    for phase in result.phases[vm.label])
        ax.set_title(result.title, fontsize=11, fontweight="bold", pad=20)
        ax.text(0.5, 1.02, f"{again:,} TCP retransmissions", ha="center",
                va="bottom", transform=ax.transAxes, fontsize=9, color="0.3")
        ax.set_xlabel("seconds")
        ax.xaxis.set_major_locator(MultipleLocator(5))
        ax.set_xlim(0, end)
        ax.set_ylim(0, most * 1.45)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("Mbit/s leaving the port")
    handles, labels = axes[0][0].get_legend_handles_labels()
    handles.append(Line2D([], [], color="0.4", linewidth=1.1,
                          linestyle=(0, (4, 3))))
    labels.append("configured")
    figure.legend(handles, labels, loc="lower center", ncols=len(labels),
                  frameon=False, fontsize=10)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path)
    plt.close(figure)


def write(report: Report, directory: Path) -> None:
    """Write report.json, report.txt and report.png."""
    directory.mkdir(parents=True, exist_ok=True)
    data = asdict(report)
    for result, plain in zip(report.results, data["results"], strict=True):
        for label, phases in result.phases.items():
            for phase, out in zip(phases, plain["phases"][label], strict=True):
                out["ratio"] = phase.ratio
    (directory / "report.json").write_text(
        json.dumps(data, indent=1, default=str) + "\n")
    with open(directory / "report.txt", "w") as file:
        Console(file=file, width=WIDTH).print(table(report))
    picture(report, directory / "report.png")
