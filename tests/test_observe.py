"""Telemetry: nothing shared, nothing lost, nothing broken by watching."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

import kvstow.adapters.vllm
from kvstow.observe import (
    RECENT_EVENTS,
    TIER_REASONS,
    VLLM_COUNTERS,
    Events,
    Telemetry,
    TransferMetrics,
    vllm_counter,
    vllm_counts,
)


def test_two_telemetries_share_nothing():
    one, two = Telemetry(), Telemetry()
    TransferMetrics(one.registry).leases.inc()
    TransferMetrics(two.registry)
    assert b"kvstow_transfer_leases 1.0" in one.exposition()
    assert b"kvstow_transfer_leases 0.0" in two.exposition()


def test_events_are_told_in_order_and_the_latest_are_kept():
    events, heard = Events(clock=lambda: 5.0), []
    events.listen(heard.append)
    for i in range(RECENT_EVENTS + 3):
        events.emit("transfer", "counted", {"i": i})
    assert [event.facts["i"] for event in heard] == list(range(RECENT_EVENTS + 3))
    assert [event.facts["i"] for event in events.recent()] == list(range(3, RECENT_EVENTS + 3))
    assert events.recent("offload") == ()


def test_an_event_is_one_line_of_json():
    events = Events(clock=lambda: 1.5)
    events.emit("transfer", "lease-ended", {"lease": 2**63 - 1, "reason": "a\nb"})
    (event,) = events.recent()
    assert "\n" not in event.as_json()
    assert json.loads(event.as_json()) == {
        "at": 1.5,
        "part": "transfer",
        "what": "lease-ended",
        "lease": 2**63 - 1,
        "reason": "a\nb",
    }


def test_a_listener_that_raises_is_removed_and_told_of():
    events, calls = Events(), []

    def broken(event) -> None:
        calls.append(event)
        raise RuntimeError("full disk")

    events.listen(broken)
    events.emit("transfer", "one")
    events.emit("transfer", "two")
    assert len(calls) == 1
    assert [event.what for event in events.recent()] == ["one", "listener-failed", "two"]


# ── what the connector counts in vLLM ─────────────────────────────────────────────────


def counted_in_source() -> set[str]:
    """Every name under which the connector's modules count, with an x for what is filled in."""
    folder = Path(kvstow.adapters.vllm.__file__).parent
    text = "\n".join(file.read_text() for file in sorted(folder.rglob("*.py")))
    found = re.findall(r'counts\[f?"([^"]+)"\]', text)
    return {re.sub(r"\{\w+\}", "x", name) for name in found}


def test_every_count_of_the_connector_has_a_counter_of_one_unit():
    names = counted_in_source()
    assert {"pull x", "lease x", "pulled bytes", "pull seconds", "refused"} <= names
    for what in (*names, *(f"remote {name}: x" for name in TIER_REASONS)):
        counter, value = vllm_counter(what)
        assert bool(value) == bool(counter.label)
        for unit in ("bytes", "seconds", "tokens", "rows", "prompts", "descriptors"):
            assert (unit in what) <= counter.name.endswith(unit)
    with pytest.raises(KeyError, match="somersaults"):
        vllm_counter("somersaults")


def test_a_counter_is_named_as_prometheus_wants_it():
    for counter in VLLM_COUNTERS:
        assert re.fullmatch(r"kvstow_vllm_[a-z]+(_[a-z]+)*", counter.family)
        assert not counter.family.endswith("_total")
    assert len({counter.name for counter in VLLM_COUNTERS}) == len(VLLM_COUNTERS)


def test_every_counter_is_in_the_reference():
    text = (Path(__file__).parents[1] / "docs" / "reference" / "metrics.md").read_text()
    assert [each.family for each in VLLM_COUNTERS if f"`{each.family}_total`" not in text] == []


def test_counts_of_all_engines_are_read_back_under_their_names():
    registry = CollectorRegistry()
    given = {
        "pull accepted": 2.0,
        "pull fence": 1.0,
        "pull seconds": 0.25,
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
    Counter("kvstow_vllm_restored_tokens", "nothing yet", registry=registry)
    Counter("vllm:requests", "somebody else's", registry=registry).inc()
    assert vllm_counts(registry.collect()) == given
