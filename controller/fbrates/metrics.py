"""GET /metrics: the controller's state for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from fbrates.service import Service

CONTENT_TYPE = CONTENT_TYPE_LATEST


class _ServiceCollector(Collector):
    """Reads everything when it is asked for: no second bookkeeping."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def collect(self) -> Iterator[Metric]:
        service = self.service
        rates = GaugeMetricFamily(
            "flowbundler_rate_bits_per_second",
            "Rate in force for a VM or destination; absent if unlimited or shared.",
            labels=["owner"],
        )
        for key, rate in service.rates.items():
            if rate is not None and key not in service.shares:
                rates.add_metric([key], rate)
        yield rates
        yield from self._sharing()
        per_switch = {
            name: GaugeMetricFamily(f"flowbundler_switch_{name}", text, labels=["switch"])
            for name, text in (
                ("connected", "Whether the switch is connected."),
                ("in_sync", "Whether the switch has what it should have."),
                ("meters", "Meters of ours that the switch has."),
                ("flows", "Flow entries of ours that the switch has."),
                ("missing_ports", "Ports that the file names and the switch does not have."),
            )
        }
        repairs = CounterMetricFamily(
            "flowbundler_switch_repairs", "Audits that found differences.", labels=["switch"]
        )
        unknown = {
            key: CounterMetricFamily(
                f"flowbundler_unknown_sources_{key}",
                f"What came from unknown sources, as of the last audit ({key}).",
                labels=["switch", "policy"],
            )
            for key in ("packets", "bytes")
        }
        for name, status in service.status_view()["switches"].items():
            for key, family in unknown.items():
                counted = status.get("unknown_sources", {}).get(key, 0)
                family.add_metric([name, service.config.unknown_sources], counted)
            for key, family in per_switch.items():
                value = status.get(key, 0)
                family.add_metric([name], len(value) if isinstance(value, list) else value)
            repairs.add_metric([name], status.get("repairs", 0))
        yield from unknown.values()
        yield from per_switch.values()
        yield repairs
        yield CounterMetricFamily(
            "flowbundler_rate_changes", "Rates changed live.", value=service.rate_changes
        )
        yield CounterMetricFamily("flowbundler_reloads", "Reloads done.", value=service.reloads)

    def _sharing(self) -> Iterator[Metric]:
        service = self.service
        bps = "_bits_per_second"
        capacity = GaugeMetricFamily(
            f"flowbundler_port_rate{bps}", "Rate of a port that is shared.", labels=["port"]
        )
        for name, rate in service.port_rates.items():
            capacity.add_metric([name], rate)
        per_vm = {
            "min_rate": "What a VM has of a shared port whenever it wants it.",
            "max_rate": "What a VM never has more than of a shared port; absent: the port's rate.",
            "weight": "A VM's weight among those that share a port.",
        }
        settings = {
            name: GaugeMetricFamily(
                f"flowbundler_share_{name}{'' if name == 'weight' else bps}",
                text,
                labels=["port", "owner"],
            )
            for name, text in per_vm.items()
        }
        for key, share in service.shares.items():
            for name, family in settings.items():
                if (value := getattr(share, name)) is not None:
                    family.add_metric([share.port, key], value)
        on_switch = ["switch", "port", "owner"]
        share_now = GaugeMetricFamily(
            f"flowbundler_share{bps}", "What a VM's meter is set to now.", labels=on_switch
        )
        usage = GaugeMetricFamily(
            f"flowbundler_share_usage{bps}",
            "What passed a VM's meter between the last two polls.",
            labels=on_switch,
        )
        backlog = GaugeMetricFamily(
            "flowbundler_port_backlog_seconds",
            "What waits at a shared port, by the controller's reckoning, in time of its rate.",
            labels=["switch", "port"],
        )
        polls = CounterMetricFamily(
            "flowbundler_share_polls", "Polls of the meters of those that share.", labels=["switch"]
        )
        interval = GaugeMetricFamily(
            "flowbundler_share_interval_seconds", "Time between polls.", labels=["switch"]
        )
        for poller in service.pollers.values():
            switch = poller.switch.name
            for name, port in poller.ports.items():
                if port.members:
                    backlog.add_metric([switch, name], port.backlog_seconds)
                for key in port.members:
                    view = port.view(key)
                    share_now.add_metric([switch, name, key], view["share_bps"])
                    usage.add_metric([switch, name, key], view["usage_bps"])
            if poller.polls:
                polls.add_metric([switch], poller.polls)
                interval.add_metric([switch], poller.interval)
        yield capacity
        yield from settings.values()
        yield from (share_now, usage, backlog, polls, interval)


class Metrics:
    """The text of GET /metrics."""

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_ServiceCollector(service))

    def render(self) -> bytes:
        """Give the state as it is now."""
        return generate_latest(self._registry)
