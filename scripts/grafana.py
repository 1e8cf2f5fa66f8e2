"""Writes deploy/grafana.json: a dashboard of every metric that kvstow has.

One panel per metric, made from the rooms' own lists, so that the dashboard names no
metric that does not exist and leaves none out. Run it again after a metric was added.
"""

import json
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import Metric

from kvstow.adapters.router import RouterMetrics
from kvstow.adapters.vllm.counts import VLLM_COUNTERS, VLLM_HISTOGRAMS
from kvstow.observe import BrokenThreads, Telemetry
from kvstow.offload.metrics import TIER_REASONS, TierMetrics, tier_metric
from kvstow.transfer.metrics import TransferMetrics

FILE = Path(__file__).parents[1] / "deploy" / "grafana.json"
WIDTH, HEIGHT = 8, 7
BY = {
    "kvstow_broken_threads": "thread",
    "kvstow_transfers": "outcome",
    "kvstow_transfer_bytes": "direction",
    "kvstow_transfer_served_bytes": "direction",
    "kvstow_transfer_descriptors": "direction",
    "kvstow_transfer_messages": "reason",
    "kvstow_transfer_lease_ends": "reason",
    "kvstow_router_requests": "outcome",
    "kvstow_router_faults": "kind",
    "kvstow_router_answers": "url",
    **{tier_metric(name): "reason" for name in TIER_REASONS},
    **{each.family: each.label for each in VLLM_COUNTERS if each.label},
}
"""The label by which a metric is split."""


def metrics() -> list[Metric]:
    """Every metric, by its family, in the order of the list."""
    telemetry = Telemetry()
    RouterMetrics(telemetry.registry)
    for each in VLLM_COUNTERS:
        Counter(each.family, f"vLLM: {each.text}", each.labels, registry=telemetry.registry)
    for each in VLLM_HISTOGRAMS:
        Histogram(each.family, f"vLLM: {each.text}", registry=telemetry.registry)
    TransferMetrics(telemetry.registry)
    TierMetrics(telemetry.registry, [])
    (broken,) = BrokenThreads().describe()
    return [broken, *(each for each in telemetry.registry.collect() if each.name != broken.name)]


def expression(metric: Metric) -> tuple[str, str]:
    """What is asked of Prometheus, and what a line is called."""
    default = "tier" if metric.name.startswith("kvstow_tier_") else "instance"
    label = BY.get(metric.name, default)
    match metric.type:
        case "counter":
            return f"sum by ({label}) (rate({metric.name}_total[$__rate_interval]))", label
        case "histogram":
            rates = f"sum by (le) (rate({metric.name}_bucket[$__rate_interval]))"
            return f"histogram_quantile(0.95, {rates})", "95 of 100"
        case _:
            return f"sum by ({label}) ({metric.name})", label


def unit(metric: Metric) -> str:
    """Grafana's name of the metric's unit."""
    if metric.name.endswith("seconds"):
        return "s" if metric.type == "histogram" else "short"  # seconds per second
    is_bytes = metric.name.endswith("bytes")
    if metric.type == "counter":
        return "Bps" if is_bytes else "cps"
    return "bytes" if is_bytes else "short"


def of_metric(metric: Metric) -> dict[str, Any]:
    asked, line = expression(metric)
    legend = line if " " in line else "{{" + line + "}}"
    return panel(metric.documentation, metric.name, asked, legend, unit(metric))


def panel(title: str, name: str, asked: str, legend: str, unit: str) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "description": name,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [{"refId": "A", "expr": asked, "legendFormat": legend}],
    }


def place(number: int) -> dict[str, int]:
    return {"x": number % 3 * WIDTH, "y": number // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT}


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it: the router's panels, vLLM's, agents', tiers'."""
    made = [of_metric(metric) for metric in metrics()]
    return {
        "title": "kvstow",
        "uid": "kvstow",
        "tags": ["kvstow"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [
            {"id": number + 1, "gridPos": place(number), **each} for number, each in enumerate(made)
        ],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
