"""The main job, shown: tenants' rates, from a controller, on real traffic.

Two tenants' VMs send to two destinations through Open vSwitch with DPDK: one
by TCP, the other a UDP flood.  Half way the rates change while the traffic
runs.  The same load runs under several limiters, and what left the ports is
compared with what was configured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from . import report as rep
from .analysis import CounterSeries, settle_time
from .controller import Controller
from .limiters import EgressPolicer, Htb
from .measure import Sampler
from .netns import remove_stale
from .report import LimiterResult, Phase, Report, Series, Vm
from .testbed import INNER, Host, Testbed
from .traffic import IperfTcp, UdpFlood

BUILD = Path(os.environ.get("FB_BUILD")
             or Path(__file__).resolve().parents[2] / "build")

#: Seconds until TCP has found its rate, and after a change.
WARM_UP = 2.0
SETTLE = 1.0
SAMPLE = 0.025
PLOT_STEP = 0.2
#: How the time until a new rate is in force is found: the first window of
#: this length that is right by this much, with no wrong one in the next second.
IN_FORCE_WINDOW = 0.1
IN_FORCE_TOLERANCE = 0.1
#: Below this share of its core's time a PMD thread was kept from forwarding.
PMD_SHARE = 0.98

MBIT = 1_000_000


def scenario() -> list[Vm]:
    """The two VMs, their loads and their rates in the two phases."""
    return [
        Vm("web", "red", "TCP", "shop", "#c0392b", [300 * MBIT, 150 * MBIT]),
        Vm("bulk", "blue", "UDP", "store", "#1f6fb2", [100 * MBIT, 200 * MBIT],
           offered=400 * MBIT),
    ]


class Run:
    """One limiter under the load; subclasses know the limiter."""

    key = ""
    title = ""

    def __init__(self, bed: Testbed, vms: list[Vm], options: argparse.Namespace):
        self.bed, self.vms, self.options = bed, vms, options

    def setting(self) -> str:
        """How the limiter was set, in words."""
        return ""

    def start(self) -> None:
        """Set up forwarding and the first phase's rates."""
        self.bed.set_flows()

    def set_rate(self, vm: Vm, phase: int) -> None:
        """Set a VM's rate of a phase."""
        raise NotImplementedError

    def change(self, phase: int) -> dict[str, float]:
        """Set a phase's rates; returns when each VM's was asked for."""
        asked = {}
        for vm in self.vms:
            asked[vm.label] = time.monotonic()
            self.set_rate(vm, phase)
        return asked

    def drops(self, vm: Vm) -> int:
        """Packets of the VM that the limiter has dropped so far."""
        raise NotImplementedError

    def details(self) -> dict[str, Any]:
        """What else is worth keeping, at the end."""
        return {}

    def stop(self) -> None:
        """Take the limiter away."""


class _PerVm(Run):
    """A limiter that is one object for each VM."""

    def __init__(self, bed: Testbed, vms: list[Vm], options: argparse.Namespace):
        super().__init__(bed, vms, options)
        self.limiters: dict[str, EgressPolicer | Htb] = {
            vm.label: self.make(vm) for vm in vms}

    def make(self, vm: Vm) -> EgressPolicer | Htb:
        """The VM's limiter."""
        raise NotImplementedError

    def start(self) -> None:
        """Set up forwarding and the first phase's rates."""
        super().start()
        self.change(0)

    def set_rate(self, vm: Vm, phase: int) -> None:
        """Set a VM's rate of a phase."""
        self.limiters[vm.label].set_rate(vm.rates[phase])

    def drops(self, vm: Vm) -> int:
        """Packets of the VM that its limiter has dropped so far."""
        return self.limiters[vm.label].drops()

    def stop(self) -> None:
        """Take the limiters away."""
        for limiter in self.limiters.values():
            limiter.clear()


class PolicerRun(_PerVm):
    """Stock Open vSwitch: what it has for DPDK ports is a policer."""

    key = "policer"
    title = "stock egress-policer"

    def make(self, vm: Vm) -> EgressPolicer:
        """A policer on the port to the VM's destination."""
        return EgressPolicer(self.bed.ovs, self.bed.bridge, vm.destination,
                             self.options.policer_burst_ms / 1000)

    def setting(self) -> str:
        """How it was set."""
        return (f"on the port to the destination, cbs = "
                f"{self.options.policer_burst_ms:g} ms of the rate; it counts "
                "without the 14 bytes of Ethernet header")


class HtbRun(_PerVm):
    """Kernel HTB in the sender: the mark to reach."""

    key = "htb"
    title = "kernel HTB in the sender"

    def make(self, vm: Vm) -> Htb:
        """HTB on the VM's own interface."""
        return Htb(self.bed.hosts[vm.name])

    def setting(self) -> str:
        """How it was set."""
        return ("on the VM's own interface, where it slows the sender down: "
                "the reference")


class ControllerRun(Run):
    """The real controller's meters; `shaping` says what they do."""

    shaping = False

    def __init__(self, bed: Testbed, vms: list[Vm], options: argparse.Namespace):
        super().__init__(bed, vms, options)
        self.controller: Controller | None = None
        self.meters: dict[str, int] = {}

    def config(self) -> dict[str, Any]:
        """The controller's file of tenants."""
        tenants: dict[str, Any] = {}
        for vm in self.vms:
            tenant = tenants.setdefault(vm.tenant, {"vms": {}})
            tenant["vms"][vm.name] = {"port": vm.name,
                                      "rate": _rate(vm.rates[0])}
        band = "auto" if self.shaping else "drop"
        # The destinations answer, and are no tenant's VMs.
        uplinks = sorted({vm.destination for vm in self.vms})
        return {"shaping": {"band": band}, "uplinks": uplinks, "tenants": tenants}

    def start(self) -> None:
        """Write the file, start the controller, connect the bridge."""
        ovs, bridge = self.bed.ovs, self.bed.bridge
        ovs.ofctl("del-flows", bridge)
        if self.shaping:
            if "flowbundler/show" not in ovs.appctl("list-commands"):
                raise SystemExit("this ovs-vswitchd has no flowbundler QoS; "
                                 "build it with 'make'")
            ovs.set_config(meter_shaping=True)
            for vm in self.vms:
                ovs.set_qos(vm.destination, "flowbundler")
        path = self.options.output / "tenants.yaml"
        path.write_text("# Written by the demo, for utilities/fb-controller.\n"
                        + yaml.safe_dump(self.config(), sort_keys=False))
        self.controller = Controller(path, ovs, bridge, self.bed.cpus)
        self.controller.connect()
        self.meters = {vm.label: self.controller.meter(vm.tenant, vm.name)
                       for vm in self.vms}

    def set_rate(self, vm: Vm, phase: int) -> None:
        """Change a VM's rate by REST."""
        assert self.controller is not None
        self.controller.set_rate(vm.tenant, vm.name, _rate(vm.rates[phase]))

    def drops(self, vm: Vm) -> int:
        """Packets that the VM's meter has dropped so far."""
        stats = self.bed.ovs.meter_stats(self.bed.bridge)
        return stats[self.meters[vm.label]].drops

    def details(self) -> dict[str, Any]:
        """What the meters and the shaper say of themselves."""
        ovs, bridge = self.bed.ovs, self.bed.bridge
        found: dict[str, Any] = {
            "meters": ovs.ofctl("dump-meters", bridge),
            "meter_stats": ovs.ofctl("meter-stats", bridge)}
        if self.shaping:
            found["flowbundler_show"] = ovs.flowbundler_show()
        return found

    def stop(self) -> None:
        """End the controller, remove QoS and meters."""
        ovs = self.bed.ovs
        if self.controller is not None:
            self.controller.close()
        ovs.ofctl("del-flows", self.bed.bridge)
        ovs.del_meters(self.bed.bridge)
        if self.shaping:
            for vm in self.vms:
                ovs.clear_qos(vm.destination)
            ovs.set_config(meter_shaping=None)


class MeterRun(ControllerRun):
    """The same controller with meters that drop, as upstream."""

    key = "meter"
    title = "stock OpenFlow meters"

    def setting(self) -> str:
        """How it was set."""
        return "the same controller's meters, dropping, with the default burst"


class ShaperRun(ControllerRun):
    """The shaper."""

    key = "shaper"
    title = "flowbundler shaper"
    shaping = True

    def setting(self) -> str:
        """How it was set."""
        return ("type=flowbundler on the port to the destination, rates in "
                "the controller's meters, changed by REST")


RUNS: dict[str, type[Run]] = {
    run.key: run for run in (PolicerRun, MeterRun, ShaperRun, HtbRun)}


def _rate(bits_per_second: int) -> str:
    """The rate as the controller's file and REST interface spell it."""
    if bits_per_second % MBIT == 0:
        return f"{bits_per_second // MBIT}Mbps"
    return f"{bits_per_second // 1000}kbps"


def first_in_force(at_port: CounterSeries, changed: float, rate: int,
                   end: float) -> float | None:
    """Seconds from the change until the rate held for a second, if ever."""
    until = changed + 1
    while until <= end:
        # Not settled by then: look a little further.
        with contextlib.suppress(ValueError):
            delay = settle_time(at_port, changed, rate, IN_FORCE_TOLERANCE,
                                IN_FORCE_WINDOW, until).delay_s
            if delay <= until - changed - 1 + SAMPLE:
                return delay
        until += SAMPLE
    return None


@dataclass
class _Mark:
    """Time and totals at the edge of a phase's window."""

    time: float
    drops: dict[str, int]
    port_drops: dict[str, int]


class Runner:
    """Runs the load under each limiter, and shows how far it is."""

    def __init__(self, bed: Testbed, vms: list[Vm],
                 options: argparse.Namespace, progress: Progress):
        self.bed, self.vms, self.options = bed, vms, options
        self.progress = progress
        self.traffic: dict[str, IperfTcp | UdpFlood] = {}

    def host(self, vm: Vm) -> Host:
        """The VM's namespace."""
        return self.bed.hosts[vm.name]

    def _mark(self, run: Run) -> _Mark:
        ports = self.bed.ovs.dump_ports(self.bed.bridge)

        def other(port: str) -> int:
            counters = ports[port]
            return max(0, counters.tx_drop
                       - counters.custom.get("ovs_tx_qos_drops", 0))

        return _Mark(time.monotonic(),
                     {vm.label: run.drops(vm) for vm in self.vms},
                     {vm.label: other(vm.destination) for vm in self.vms})

    def measure(self, run: Run) -> LimiterResult:
        """Run the load under one limiter."""
        task = self.progress.add_task(run.title, total=1.0, rates="setting up")
        phase_s = self.options.seconds
        total = WARM_UP + SETTLE + 2 * phase_s
        windows: list[tuple[_Mark, _Mark]] = []
        with contextlib.ExitStack() as stack:
            stack.callback(run.stop)
            run.start()
            self._acquaint()
            sampler = stack.enter_context(self.bed.sampler(SAMPLE))
            begin = time.monotonic()
            for vm in self.vms:
                # Longer than measured, or the last window had its end in it.
                self.traffic[vm.label] = self._start(vm, total + 1)

            def until(when: float) -> None:
                self._wait(begin, when, total, task, sampler)

            until(WARM_UP)
            polled = self.bed.ovs.pmd_run_ns()
            since = time.monotonic_ns()
            first = self._mark(run)
            until(WARM_UP + phase_s)
            windows.append((first, self._mark(run)))
            changed = run.change(1)
            until(WARM_UP + phase_s + SETTLE)
            first = self._mark(run)
            until(total)
            windows.append((first, self._mark(run)))
            share = min((after - polled.get(name, after) for name, after
                         in self.bed.ovs.pmd_run_ns().items()), default=0
                        ) / (time.monotonic_ns() - since)
            reports = {label: traffic.result()
                       for label, traffic in self.traffic.items()}
            sampler.stop()
            details = run.details()
        self.progress.update(task, completed=1.0, rates="done")

        result = LimiterResult(run.key, run.title, run.setting(),
                               min(changed.values()) - begin,
                               details=details)
        details["pmd_share"] = share
        if share < PMD_SHARE:
            result.notes.append(
                f"the PMD thread had only {100 * share:.0f} % of its core: "
                "other work on this machine disturbed the run")
        for vm in self.vms:
            at_port = sampler.series(f"{vm.destination}.tx_bytes")
            middle, rate = at_port.rates(PLOT_STEP)
            result.series[vm.label] = Series(
                [float(t) for t in middle - begin], [float(r) for r in rate])
            result.phases[vm.label] = [
                self._phase(vm, n, window, sampler, at_port,
                            changed[vm.label])
                for n, window in enumerate(windows)]
            self._add_report(vm, result, reports[vm.label], begin)
        return result

    def _acquaint(self) -> None:
        """Have all hosts ask for each other's addresses.

        The switch learns from it where each is; without, it would send what
        is for a silent one to all, and ports would count others' traffic.
        """
        for host in self.bed.hosts.values():
            host.ns.ip("neighbor", "flush", "dev", INNER)
        for vm in self.vms:
            trips = self.bed.pingpong(
                self.host(vm), self.bed.hosts[vm.destination], count=3).result(10)
            if not trips.rtt_us:
                raise RuntimeError(f"{vm.label} cannot reach {vm.destination}")

    def _start(self, vm: Vm, total: float) -> IperfTcp | UdpFlood:
        destination = self.bed.hosts[vm.destination]
        if vm.traffic == "TCP":
            return self.bed.tcp(self.host(vm), destination, seconds=total)
        assert vm.offered is not None
        return self.bed.flood(self.host(vm), destination, rate=vm.offered)

    def _wait(self, begin: float, when: float, total: float, task: Any,
              sampler: Sampler) -> None:
        while (left := begin + when - time.monotonic()) > 0:
            for traffic in self.traffic.values():
                traffic.check()
            rates = []
            for vm in self.vms:
                rate = sampler.recent_rate(f"{vm.destination}.tx_bytes")
                rates.append(f"{vm.label} [bold]{rate / 1e6:6.1f}[/]")
            self.progress.update(
                task, completed=(time.monotonic() - begin) / total,
                rates="  ".join(rates) + " Mbit/s")
            time.sleep(min(left, 0.25))

    def _phase(self, vm: Vm, number: int, window: tuple[_Mark, _Mark],
               sampler: Sampler, at_port: CounterSeries, changed: float
               ) -> Phase:
        start, end = window
        begin = sampler.series(f"{vm.destination}.tx_bytes").time[0]
        retransmits = sampler.series(f"{vm.name}.retransmits")
        phase = Phase(
            configured=vm.rates[number],
            achieved=at_port.rate(start.time, end.time),
            start_s=start.time - begin, end_s=end.time - begin,
            offered=sampler.series(f"{vm.name}.rx_bytes").rate(
                start.time, end.time),
            retransmits=round(retransmits.at(end.time)
                              - retransmits.at(start.time)),
            drops=end.drops[vm.label] - start.drops[vm.label],
            port_drops=end.port_drops[vm.label] - start.port_drops[vm.label],
        )
        if number > 0:
            phase.in_force_s = first_in_force(at_port, changed,
                                              phase.configured, end.time)
        return phase

    def _add_report(self, vm: Vm, result: LimiterResult, report: Any,
                    begin: float) -> None:
        traffic = self.traffic[vm.label]
        if isinstance(traffic, IperfTcp):
            late = traffic.started - begin
            for phase in result.phases[vm.label]:
                phase.goodput = report.goodput_between(
                    phase.start_s - late, phase.end_s - late)
            result.details[vm.label] = {
                "iperf3_goodput": report.goodput,
                "iperf3_retransmits": report.retransmits,
                "iperf3_error": report.error}
        else:
            result.details[vm.label] = report
            if report["failed"] > report["sent"] / 100:
                result.notes.append(
                    f"{report['failed']:,} of {vm.label}'s datagrams were "
                    "refused in the VM itself, before any counter here")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fb-demo", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--limiters", default="policer,shaper,htb", metavar="LIST",
        help=f"which to run, in order, of {', '.join(RUNS)} "
        "(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S",
                        help="measured time of each phase (default: %(default)g)")
    parser.add_argument("--policer-burst-ms", type=float, default=50.0,
                        metavar="MS",
                        help="the policer's burst, in time at its rate "
                        "(default: %(default)g, the shaper's max-delay)")
    parser.add_argument("--tolerance", type=float, default=1.0,
                        metavar="PERCENT",
                        help="how far the shaper may be off (default: "
                        "%(default)g)")
    parser.add_argument("--output", type=Path, default=BUILD / "demo",
                        metavar="DIR", help="where the report goes")
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = _parser()
    options = parser.parse_args(argv)
    options.limiters = options.limiters.split(",")
    for key in options.limiters:
        if key not in RUNS:
            parser.error(f"--limiters: {key!r} is none of {', '.join(RUNS)}")
    if options.seconds < 1:
        parser.error("--seconds: at least 1")
    return options


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the program as Ctrl-C does: in order."""

    def end(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    old = {number: signal.signal(number, end)
           for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def demo(options: argparse.Namespace, console: Console) -> Report:
    """Run it all and write the report."""
    begin = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    remove_stale()
    vms = scenario()
    progress = Progress(
        TextColumn("{task.description:24}"), BarColumn(bar_width=20),
        TextColumn("{task.fields[rates]}"), TimeElapsedColumn(),
        console=console)
    with Testbed() as bed, progress:
        result = Report(rep.environment(bed.ovs), vms, options.tolerance / 100)
        for vm in vms:
            # They find each other by ARP, as VMs do.
            bed.host(vm.name, static_arp=False)
            bed.host(vm.destination, static_arp=False)
        runner = Runner(bed, vms, options, progress)
        for key in options.limiters:
            result.results.append(
                runner.measure(RUNS[key](bed, vms, options)))
        result.seconds = time.monotonic() - begin
    rep.write(result, options.output)
    return result


def main(argv: list[str] | None = None,
         run: Callable[..., Report] = demo) -> int:
    """Run the demo; 1 if the shaper did not hold its rates."""
    options = parse(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=rep.WIDTH)
    try:
        with ended_by_signals():
            result = run(options, console)
    except KeyboardInterrupt:
        return 130
    console.print(rep.table(result))
    console.print(f"{options.output}/report.json, report.txt, report.png "
                  f"({result.seconds:.0f} s)")
    failures = result.failures("shaper")
    for failure in failures:
        console.print(f"[bold red]out of tolerance[/] {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
