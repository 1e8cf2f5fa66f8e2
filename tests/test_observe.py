"""Telemetry: nothing shared, nothing lost, nothing broken by watching."""

import json

from prometheus_client import Gauge

from kvstow.observe import RECENT_EVENTS, Events, Telemetry
from kvstow.threads import guarded_thread


def test_two_telemetries_share_nothing():
    one, two = Telemetry(), Telemetry()
    Gauge("leases", "Leases", registry=one.registry).inc()
    Gauge("leases", "Leases", registry=two.registry)
    assert b"leases 1.0" in one.exposition()
    assert b"leases 0.0" in two.exposition()


def test_a_thread_that_ended_with_an_error_is_in_every_exposition():
    telemetry = Telemetry()
    assert b"kvstow-lost" not in telemetry.exposition()
    thread = guarded_thread("kvstow-lost", lambda: {}["lost"], on_broken=lambda _: None)
    thread.start()
    thread.join()
    assert b'kvstow_broken_threads{thread="kvstow-lost"} 1.0' in telemetry.exposition()


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
