"""What the connector counts, and what that is called on vLLM's /metrics."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram

import kvstow.adapters.vllm
from kvstow.adapters.vllm.counts import (
    VLLM_COUNTERS,
    VLLM_HISTOGRAMS,
    VLLM_INFO,
    Count,
    vllm_counts,
)
from kvstow.offload.metrics import TIER_REASONS


def test_every_count_has_a_metric_with_a_label_where_it_is_counted_with_one():
    folder = Path(kvstow.adapters.vllm.__file__).parent
    text = "\n".join(file.read_text() for file in sorted(folder.rglob("*.py")))
    pattern = r'counts(?:\.seconds)?\[(?:Count\.([A-Z_]+)|f"\{Count\.([A-Z_]+)\} [^"]+")\]'
    found = re.findall(pattern, text)
    plain = {getattr(Count, name) for name, _ in found if name}
    labelled = {getattr(Count, name) for _, name in found if name}
    labelled |= {f"remote_{name}" for name in TIER_REASONS}
    assert {"pulled_bytes", "pull_seconds"} <= plain
    assert {"pulls", "lease_ends"} <= labelled
    assert plain <= {*VLLM_HISTOGRAMS} | {str(each) for each in VLLM_COUNTERS if not each.label}
    assert labelled == {str(each) for each in VLLM_COUNTERS if each.label}


def test_a_metric_is_named_as_prometheus_wants_it():
    metrics = (*VLLM_COUNTERS, *VLLM_HISTOGRAMS, VLLM_INFO)
    for each in metrics:
        assert re.fullmatch(r"kvstow_vllm_[a-z]+(_[a-z]+)*", each.family)
        assert not each.family.endswith("_total")
    assert len({str(each) for each in metrics}) == len(metrics)


def test_every_metric_is_in_the_reference():
    text = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()
    names = [f"{each.family}_total" for each in VLLM_COUNTERS]
    names += [each.family for each in (*VLLM_HISTOGRAMS, VLLM_INFO)]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_counts_of_all_engines_are_read_back_under_their_names():
    registry = CollectorRegistry()
    expected = {
        "pulls accepted": 2.0,
        "pulls fence": 1.0,
        "remote_missed_rows budget": 3.0,
        "stored_rows": 40.0,
    }
    labels = {str(each): each.labels for each in VLLM_COUNTERS}
    made: dict[str, Counter] = {}
    for what, count in expected.items():
        name, _, label = what.partition(" ")
        if name not in made:
            names = ["engine", *labels[name]]
            made[name] = Counter(f"kvstow_vllm_{name}", "x", names, registry=registry)
        for engine in "01":
            made[name].labels(engine, *([label] if label else [])).inc(count / 2)
    Histogram("kvstow_vllm_pull_seconds", "x", registry=registry).observe(0.5)
    Counter("kvstow_vllm_restored_tokens", "nothing yet", registry=registry)
    Counter("vllm:requests", "somebody else's", registry=registry).inc()
    assert vllm_counts(registry.collect()) == {**expected, "pull_seconds": 0.5}
