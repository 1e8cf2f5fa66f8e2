"""Events: what a reader learns of what became cached and what is gone."""

from collections import Counter

import pytest

from block_layouts import computed, layer, ledger_of, tokens
from kvstow.blocks.prompt import Prompt
from kvstow.errors import BlockError
from kvstow.plan.retention import Window


def test_replayed_events_say_what_is_cached_now() -> None:
    ledger = ledger_of(layer("a", tokens=2), layer("b", Window(4), tokens=2, dim=48), num_slabs=9)
    for seed in range(25):
        ledger.release(computed(ledger, Prompt.of(tokens(11, seed=seed % 7)), step=3))
    known: set[tuple[int, int]] = set()
    for event in ledger.prefixes.events.since(0):
        pairs = {(event.group, int(h)) for h in event.hashes}
        if event.kind == "stored":
            assert not pairs & known
            known |= pairs
        else:
            assert pairs <= known
            known -= pairs
    assert known
    assert Counter(g for g, _ in known) == {
        g: n for g in range(2) if (n := ledger.pool.num_cached(g))
    }


def test_events_are_numbered_and_old_ones_are_refused() -> None:
    ledger = ledger_of(layer("a", tokens=2))
    events = ledger.prefixes.events
    told: list[int] = []
    events.on_event.append(lambda event: told.append(event.sequence))
    ledger.release(computed(ledger, Prompt.of(tokens(8))))
    ledger.release(computed(ledger, Prompt.of(tokens(8) + tokens(4, seed=1))))
    assert told == [0, 1]
    second = list(events.since(1))
    assert [e.sequence for e in second] == [1]
    assert second[0].parent == int(Prompt.of(tokens(8)).hashes(2)[3])
    with pytest.raises(BlockError, match="event 3 is not among"):
        events.since(3)
