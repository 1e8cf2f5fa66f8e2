"""When rows of failed pulls may be used again; what waits on a real engine is in test_isolation."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvstow.transfer.quarantine import Quarantine


def quarantine(endpoint: Any) -> Quarantine:
    return Quarantine(
        endpoint,
        None,
        is_moving=lambda: False,
        before_close=lambda error: None,  # type: ignore
    )


def test_a_dead_writer_needs_one_fresh_engine_and_no_more():
    """Its rows may have to wait for another writer: engine after engine was made meanwhile, and
    nobody was greeted who could have said that it had stopped."""
    gauge = SimpleNamespace(set=lambda rows: None)
    endpoint = SimpleNamespace(
        clock=lambda: 0.0, num_engines=1, metrics=SimpleNamespace(quarantined=gauge)
    )
    waiting = quarantine(endpoint)
    with waiting.case([], rows=1) as case:
        both = [waiting._engine_replaced(case) for _ in range(2)]
        for story in both:
            next(story)
        assert case.needs_engine
        endpoint.num_engines += 1
        for story in both:
            assert case.needs_engine
            with pytest.raises(StopIteration):
                next(story)
        assert not case.needs_engine


def test_upkeep_goes_on_after_an_error_of_any_kind(caplog):
    """Rows would stay in quarantine for good."""
    looks: list[int] = []

    def poll() -> None:
        looks.append(1)
        if len(looks) < 3:
            raise RuntimeError("dictionary changed size during iteration")

    endpoint = SimpleNamespace(
        name="a",
        poll_flights=poll,
        disconnect_idle=lambda: None,
        note=lambda what, facts: None,
        options=SimpleNamespace(),
        clock=lambda: 0.0,
        flights={},
    )
    upkeep = quarantine(endpoint).upkeep()
    for _ in range(5):
        next(upkeep)
    assert len(looks) == 3
    assert "RuntimeError: dictionary changed size" in caplog.text
