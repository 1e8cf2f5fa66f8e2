"""Metrics of tiers, for Prometheus: read from the tiers at every scrape."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvstow.errors import StoreError
from kvstow.offload.tier import Reasons, Tier

TIER_COUNTS = {
    "hits": "Rows found",
    "misses": "Rows not found",
    "stored_rows": "Rows stored",
    "stored_bytes": "Bytes stored",
    "loaded_rows": "Rows loaded",
    "loaded_bytes": "Bytes loaded",
    "evicted_rows": "Rows evicted",
    "failures": "Rows that could not be written, or were damaged when read",
}
TIER_GAUGES = {
    "rows": "Rows held",
    "nbytes": "Bytes reserved for rows",
    "capacity": "Capacity in bytes",
}
TIER_REASONS = {
    "missed_rows": "Rows not read from a remote store, by reason",
    "dropped_rows": "Rows not written to a remote store, by reason",
}
_NAMED_BY_UNIT = {"nbytes": "bytes", "capacity": "capacity_bytes"}


def tier_metric(fact: str) -> str:
    """The metric of a tier's fact, by Prometheus' rules: the unit at its end."""
    return f"kvstow_tier_{_NAMED_BY_UNIT.get(fact, fact)}"


class TierMetrics(Collector):
    """Metrics of offload tiers, read from them at every scrape. A tier that cannot be read is
    left out."""

    def __init__(self, registry: CollectorRegistry, tiers: Iterable[Tier]) -> None:
        self._tiers = tuple(tiers)
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        numbers: dict[str, Mapping[str, float]] = {}
        for tier in self._tiers:
            with suppress(StoreError):  # closed, or it cannot be asked now: others can
                numbers[tier.name] = asdict(tier.counts) | asdict(tier.usage)
        for kind, texts in ((CounterMetricFamily, TIER_COUNTS), (GaugeMetricFamily, TIER_GAUGES)):
            for name, text in texts.items():
                metric = kind(tier_metric(name), text, labels=["tier"])
                for tier, values in numbers.items():
                    metric.add_metric([tier], values[name])
                yield metric
        reasons: dict[str, Reasons] = {t.name: getattr(t, "reasons", {}) for t in self._tiers}
        for name, text in TIER_REASONS.items():
            counter = CounterMetricFamily(tier_metric(name), text, labels=["tier", "reason"])
            for tier, by_name in reasons.items():
                for reason, count in by_name.get(name, {}).items():
                    counter.add_metric([tier, reason], count)
            yield counter
