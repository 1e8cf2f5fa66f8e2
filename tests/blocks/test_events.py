"""Events: what a listener learns of what became cached and what is gone."""

from collections import Counter

import pytest

from block_layouts import computed, layer, ledger_of, tokens
from kvstow.blocks import BlockEvent
from kvstow.blocks.prompt import Prompt
from kvstow.plan.retention import Window


def test_events_say_what_is_cached_now() -> None:
    ledger = ledger_of(layer("a", tokens=2), layer("b", Window(4), tokens=2, dim=48), num_slabs=9)
    known: set[tuple[int, int]] = set()
    wrong: list[BlockEvent] = []

    def heard(event: BlockEvent) -> None:
        pairs = {(event.group, int(h)) for h in event.hashes}
        if event.kind == "stored":
            wrong.extend([event] if pairs & known else [])
            known.update(pairs)
        else:
            wrong.extend([] if pairs <= known else [event])
            known.difference_update(pairs)

    ledger.prefixes.on_change.append(heard)
    for seed in range(25):
        ledger.release(computed(ledger, Prompt.of(tokens(11, seed=seed % 7)), step=3))
    assert known
    assert not wrong
    assert Counter(g for g, _ in known) == {
        g: n for g in range(2) if (n := ledger.pool.num_cached(g))
    }


def test_a_prompt_that_continues_another_is_stored_from_where_that_ends() -> None:
    ledger = ledger_of(layer("a", tokens=2))
    told: list[BlockEvent] = []
    ledger.prefixes.on_change.append(told.append)
    longer = Prompt.of(tokens(8) + tokens(4, seed=1))
    ledger.release(computed(ledger, Prompt.of(tokens(8))))
    ledger.release(computed(ledger, longer))
    assert [(event.kind, event.group) for event in told] == [("stored", 0)] * 2
    assert [event.hashes.tolist() for event in told] == [
        longer.hashes(2)[:4].tolist(),
        longer.hashes(2)[4:].tolist(),
    ]


def test_a_listener_that_raises_changes_nothing_but_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger = ledger_of(layer("a", tokens=2), num_slabs=9)
    told: list[BlockEvent] = []

    def fails(*_: object) -> None:
        raise RuntimeError("on purpose")

    ledger.pool.on_evict.insert(0, fails)
    ledger.prefixes.on_change += [fails, told.append]
    for seed in range(9):  # more than there is room for: rows are given up for others
        prompt = Prompt.of(tokens(9, seed=seed))
        ledger.release(computed(ledger, prompt))
        ledger.check()
        assert ledger.hit_tokens(prompt) == 8
    assert {event.kind for event in told} == {"stored", "removed"}
    assert "on purpose" in caplog.text
