"""Counts on vLLM's /metrics."""

from functools import partial
from types import ModuleType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from connected_engine import vllm_config


def labels(engine: str) -> dict[str, str]:
    return {"model_name": "m", "engine": engine}


def test_counts_come_to_vllms_metrics_by_engine_each_under_its_name(connector: ModuleType):
    registry = CollectorRegistry()
    engines = {0: ["m", "0"], 1: ["m", "1"]}
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = connector.KvstowMetrics(vllm_config(), kinds, ["model_name", "engine"], engines)
    assert registry.get_sample_value("kvstow_vllm_pulled_bytes_total", labels("1")) == 0.0
    metrics.observe({"pulls accepted": 2, "pull_seconds": [0.5, 0.25], "pulled_bytes": 100}, 0)
    metrics.observe({"pulls accepted": 1, "pulls fence": 1, "remote_missed_rows budget": 3}, 1)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and sample.value
    }
    assert found == {
        ("kvstow_vllm_pulls_total", "m", "0", "accepted"): 2,
        ("kvstow_vllm_pulls_total", "m", "1", "accepted"): 1,
        ("kvstow_vllm_pulls_total", "m", "1", "fence"): 1,
        ("kvstow_vllm_pulled_bytes_total", "m", "0"): 100,
        ("kvstow_vllm_remote_missed_rows_total", "m", "1", "budget"): 3,
    }
    assert registry.get_sample_value("kvstow_vllm_pull_seconds_count", labels("0")) == 2
    assert registry.get_sample_value("kvstow_vllm_pull_seconds_sum", labels("0")) == 0.75
    assert registry.get_sample_value("kvstow_vllm_load_seconds_count", labels("0")) == 0


def test_what_the_connector_was_started_with_is_on_vllms_metrics(connector: ModuleType):
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    options = vllm_config(host_bytes=1 << 20, remote="redis://user:secret@there/0", digest="off")
    connector.KvstowMetrics(options, kinds, ["model_name", "engine"], {0: ["m", "0"]})
    (info,) = [each for each in registry.collect() if each.name == "kvstow_vllm_config_info"]
    (sample,) = info.samples
    assert sample.value == 1
    assert sample.labels["digest"] == "off"
    assert sample.labels["host_bytes"] == str(1 << 20)
    assert sample.labels["remote"] == "redis", "no address and no secret"


def test_stats_of_two_ranks_add_up(connector: ModuleType):
    one, other = (
        connector.KvstowStats(data={"pulls accepted": 1, "pull_seconds": [seconds]})
        for seconds in (0.5, 0.25)
    )
    both = one.aggregate(other)
    assert both.data == {"pulls accepted": 2, "pull_seconds": [0.5, 0.25]}
    assert both.reduce() == {"pulls accepted": 2, "pull_seconds": 0.75}
