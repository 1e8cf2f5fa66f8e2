"""What the connector counts, and what that is called on vLLM's /metrics."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

import kvstow.adapters.vllm
from kvstow.adapters.vllm.counts import (
    VLLM_COUNTERS,
    VLLM_HISTOGRAMS,
    VLLM_INFO,
    vllm_counter,
    vllm_counts,
)
from kvstow.offload.metrics import TIER_REASONS


def counted_in_source() -> set[str]:
    """Every name under which the connector's modules count, with an x for what is filled in."""
    folder = Path(kvstow.adapters.vllm.__file__).parent
    text = "\n".join(file.read_text() for file in sorted(folder.rglob("*.py")))
    found = re.findall(r'counts(?:\.seconds)?\[f?"([^"]+)"\]', text)
    return {re.sub(r"\{\w+\}", "x", name) for name in found}


def test_every_count_of_the_connector_has_a_counter_of_one_unit():
    names = counted_in_source()
    assert {"pull x", "lease x", "pulled bytes", "pull seconds", "refused"} <= names
    durations = {each.what for each in VLLM_HISTOGRAMS}
    assert durations <= names
    for what in (*(names - durations), *(f"remote {name}: x" for name in TIER_REASONS)):
        counter, value = vllm_counter(what)
        assert bool(value) == bool(counter.label)
        for unit in ("bytes", "seconds", "tokens", "rows", "prompts", "descriptors"):
            assert (unit in what) <= counter.name.endswith(unit)
    with pytest.raises(KeyError, match="somersaults"):
        vllm_counter("somersaults")


def test_a_counter_is_named_as_prometheus_wants_it():
    for counter in (*VLLM_COUNTERS, *VLLM_HISTOGRAMS, VLLM_INFO):
        assert re.fullmatch(r"kvstow_vllm_[a-z]+(_[a-z]+)*", counter.family)
        assert not counter.family.endswith("_total")
    assert len({counter.name for counter in VLLM_COUNTERS}) == len(VLLM_COUNTERS)


def test_every_counter_is_in_the_reference():
    text = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()
    names = [f"{each.family}_total" for each in VLLM_COUNTERS]
    names += [each.family for each in (*VLLM_HISTOGRAMS, VLLM_INFO)]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_counts_of_all_engines_are_read_back_under_their_names():
    registry = CollectorRegistry()
    given = {
        "pull accepted": 2.0,
        "pull fence": 1.0,
        "lease read": 7.0,
        "remote missed_rows: budget": 3.0,
        "stored rows": 40.0,
    }
    made: dict[str, Counter] = {}
    for what, count in given.items():
        counter, value = vllm_counter(what)
        names = ["engine", *counter.labels]
        if counter.name not in made:
            made[counter.name] = Counter(counter.family, "x", names, registry=registry)
        for engine in "01":
            labels = [engine, *([value] if value else [])]
            made[counter.name].labels(*labels).inc(count / 2)
    Histogram("kvstow_vllm_pull_seconds", "x", ["engine"], registry=registry)
    Counter("kvstow_vllm_restored_tokens", "nothing yet", registry=registry)
    Counter("vllm:requests", "somebody else's", registry=registry).inc()
    assert vllm_counts(registry.collect()) == given
