"""deploy/grafana.json: made from the list of metrics, and naming only metrics that exist."""

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

from prometheus_client import Counter, Histogram

from kvstow.adapters.router import RouterMetrics
from kvstow.adapters.vllm.counts import VLLM_COUNTERS, VLLM_HISTOGRAMS
from kvstow.observe import Telemetry
from kvstow.offload.metrics import TIER_REASONS, TierMetrics
from kvstow.offload.tier import Counts, Usage
from kvstow.threads import guarded_thread
from kvstow.transfer.metrics import TransferMetrics

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "deploy" / "grafana.json"


def exposed() -> set[str]:
    """The names that Prometheus is told, by a router, the connector in vLLM, an agent and a tier
    that have counted something."""
    telemetry = Telemetry()
    router = RouterMetrics(telemetry.registry)
    for counter in (router.requests, router.faults):
        counter.labels("x").inc()
    router.answers.labels("x", "x").inc()
    for each in VLLM_COUNTERS:
        made = Counter(each.family, "x", each.labels, registry=telemetry.registry)
        (made.labels("x") if each.labels else made).inc()
    for each in VLLM_HISTOGRAMS:
        Histogram(each.family, "x", registry=telemetry.registry).observe(1)
    metrics = TransferMetrics(telemetry.registry)
    for counter in (metrics.transfers, metrics.bytes, metrics.served_bytes, metrics.descriptors):
        counter.labels("x").inc()
    for counter in (metrics.messages, metrics.lease_ends, metrics.errors, metrics.contacts):
        counter.labels("x").inc()
    usage = Usage(rows=1, nbytes=1, capacity=1)
    reasons = {name: {"x": 1.0} for name in TIER_REASONS}
    tier = SimpleNamespace(name="disk", counts=Counts(), usage=usage, reasons=reasons)
    TierMetrics(telemetry.registry, [tier])
    broken = guarded_thread("kvstow-broken", lambda: {}["x"], on_broken=lambda _: None)
    broken.start()
    broken.join()
    lines = telemetry.exposition().decode().splitlines()
    return {re.match(r"\w+", line)[0] for line in lines if not line.startswith("#")}


def asked() -> set[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    text = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    return set(re.findall(r"kvstow_\w+", text))


def test_the_dashboard_asks_only_for_metrics_that_exist():
    assert asked() <= exposed()


def test_no_metric_is_left_out():
    families = {re.sub(r"_(total|bucket|sum|count|created)$", "", name) for name in exposed()}
    shown = {re.sub(r"_(total|bucket)$", "", name) for name in asked()}
    assert shown == families


def test_the_file_is_what_the_script_makes_now():
    made = runpy.run_path(str(ROOT / "scripts" / "grafana.py"))["text"]()
    assert DASHBOARD.read_text() == made


def test_panels_do_not_lie_on_each_other():
    places = [panel["gridPos"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    assert all(place["x"] + place["w"] <= 24 for place in places)
