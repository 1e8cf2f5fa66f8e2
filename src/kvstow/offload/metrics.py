"""Metrics of tiers, for Prometheus: read from the tiers at every scrape."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvstow.errors import StoreError
from kvstow.observe import Telemetry
from kvstow.offload.remote.tier import RemoteTier
from kvstow.offload.tier import Reasons, Tier, facts

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
_NO_REASONS: Reasons = {}


def tier_metric(fact: str) -> str:
    """The metric of a tier's fact, by Prometheus' rules: the unit at its end."""
    return f"kvstow_tier_{_NAMED_BY_UNIT.get(fact, fact)}"


class TierMetrics(Collector):
    """Metrics of offload tiers, read from them at every scrape. A tier that cannot be read is
    left out."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tiers: dict[str, Callable[[], Mapping[str, float]]] = {}
        self._reasons: dict[str, Callable[[], Reasons]] = {}
        registry.register(self)

    def watch(
        self,
        tier: str,
        facts: Callable[[], Mapping[str, float]],
        reasons: Callable[[], Reasons] = lambda: _NO_REASONS,
    ) -> None:
        """Show a tier under that name; `facts` has the keys of TIER_COUNTS and TIER_GAUGES,
        `reasons` some of TIER_REASONS."""
        self._tiers[tier], self._reasons[tier] = facts, reasons

    def collect(self) -> Iterable[Metric]:
        numbers: dict[str, Mapping[str, float]] = {}
        for tier, read in self._tiers.items():
            with suppress(StoreError):  # closed, or it cannot be asked now: others can
                numbers[tier] = read()
        for kind, texts in ((CounterMetricFamily, TIER_COUNTS), (GaugeMetricFamily, TIER_GAUGES)):
            for name, text in texts.items():
                metric = kind(tier_metric(name), text, labels=["tier"])
                for tier, values in numbers.items():
                    metric.add_metric([tier], values[name])
                yield metric
        by_reason = {tier: read() for tier, read in self._reasons.items()}
        for name, text in TIER_REASONS.items():
            counter = CounterMetricFamily(tier_metric(name), text, labels=["tier", "reason"])
            for tier, reasons in by_reason.items():
                for reason, count in reasons.get(name, {}).items():
                    counter.add_metric([tier, reason], count)
            yield counter


def watch_tiers(telemetry: Telemetry, tiers: Sequence[Tier | None]) -> None:
    """Show the numbers of a process's tiers in a telemetry."""
    metrics = TierMetrics(telemetry.registry)
    for tier in tiers:
        if isinstance(tier, RemoteTier):
            metrics.watch(tier.name, partial(facts, tier), lambda tier=tier: tier.reasons)
        elif tier is not None:
            metrics.watch(tier.name, partial(facts, tier))
