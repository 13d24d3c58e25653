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
            "Rate in force for a VM or destination; absent if unlimited.",
            labels=["owner"],
        )
        for key, rate in service.rates.items():
            if rate is not None:
                rates.add_metric([key], rate)
        yield rates
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
        for name, status in service.status_view()["switches"].items():
            for key, family in per_switch.items():
                value = status.get(key, 0)
                family.add_metric([name], len(value) if isinstance(value, list) else value)
            repairs.add_metric([name], status.get("repairs", 0))
        yield from per_switch.values()
        yield repairs
        yield CounterMetricFamily(
            "flowbundler_rate_changes", "Rates changed live.", value=service.rate_changes
        )
        yield CounterMetricFamily("flowbundler_reloads", "Reloads done.", value=service.reloads)


class Metrics:
    """The text of GET /metrics."""

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_ServiceCollector(service))

    def render(self) -> bytes:
        """Give the state as it is now."""
        return generate_latest(self._registry)
