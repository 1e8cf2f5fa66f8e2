"""Prefix hits: how long they are for every retention, and that a collision is no hit."""

import gc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from block_layouts import computed, layer, ledger_of, state, tokens
from kvstow.blocks.prefix import BlockEvent, PrefixIndex, PromptSource
from kvstow.blocks.prompt import Prompt
from kvstow.plan.retention import Window

# ── index ─────────────────────────────────────────────────────────────────────────────


NUM_ROWS = 12
PAIRS = st.lists(
    st.tuples(st.integers(0, NUM_ROWS - 1), st.integers(1, 8)), unique_by=lambda p: p[0], max_size=9
)


@given(st.lists(st.tuples(st.booleans(), PAIRS), max_size=12))
def test_an_index_finds_the_rows_that_a_search_through_all_would(
    steps: list[tuple[bool, list[tuple[int, int]]]],
) -> None:
    """A row has one hash, a hash has one row, and whoever comes first stays."""
    index, pairs = PrefixIndex(NUM_ROWS), []
    sources = [PromptSource(Prompt.of([number])) for number in range(len(steps))]
    for number, (adds, some) in enumerate(steps):
        if adds:
            rows, hashes = [row for row, _ in some], [key for _, key in some]
            added = index.add(
                np.array(rows, np.int64), np.array(hashes, np.uint64), sources[number]
            )
            for row, key, was_added in zip(rows, hashes, added.tolist(), strict=True):
                is_new = all(row != r and key != k for r, k, _ in pairs)
                assert was_added == is_new
                pairs += [(row, key, number)] if is_new else []
        else:
            gone = [pair for pair in pairs if pair[0] in {row for row, _ in some}]
            rows = np.array([row for row, _, _ in gone], np.int64)
            assert index.remove(rows).tolist() == [key for _, key, _ in gone]
            pairs = [pair for pair in pairs if pair not in gone]
        keys = np.arange(1, 9).astype(np.uint64)
        expected = [next((row for row, k, _ in pairs if k == key), -1) for key in range(1, 9)]
        assert index.find(keys).tolist() == expected
        assert index.has(np.arange(NUM_ROWS)).tolist() == [
            any(row == r for r, _, _ in pairs) for row in range(NUM_ROWS)
        ]
        assert all(index.source[row] is sources[number] for row, _, number in pairs)


# ── hit rules ─────────────────────────────────────────────────────────────────────────


def test_full_attention_hits_whole_blocks_short_of_the_last_token() -> None:
    ledger = ledger_of(layer("a", tokens=4))
    ids = tokens(16)
    ledger.release(computed(ledger, Prompt.of(ids)))
    for length, hit in ((16, 12), (17, 16), (30, 16), (5, 4), (4, 0), (1, 0)):
        more = (ids + tokens(20, seed=1))[:length]
        assert ledger.hit_tokens(Prompt.of(more)) == hit, length
    other = ids.copy()
    other[6] += 1
    assert ledger.hit_tokens(Prompt.of(other + ids)) == 4


def test_a_recurrent_hit_needs_a_checkpoint_at_exactly_its_length() -> None:
    ledger = ledger_of(layer("a", tokens=2), state("b", tokens=8))
    ids = tokens(30)
    ledger.release(computed(ledger, Prompt.of(ids), step=8))
    for length, hit in ((30, 24), (24, 16), (17, 16), (16, 8), (9, 8), (8, 0)):
        assert ledger.hit_tokens(Prompt.of(ids[:length])) == hit


def test_a_prompt_computed_in_one_go_leaves_no_checkpoint_on_its_way() -> None:
    ledger = ledger_of(layer("a", tokens=2), state("b", tokens=8))
    ids = tokens(30)
    ledger.release(computed(ledger, Prompt.of(ids)))
    assert ledger.hit_tokens(Prompt.of(ids + ids)) == 0


# ── confirmation ──────────────────────────────────────────────────────────────────────


def test_a_collision_of_the_beginning_alone_is_noticed_at_the_end() -> None:
    """Same last block, same hashes, another beginning: the window alone would not tell."""
    ledger = ledger_of(layer("a", Window(2), tokens=2))
    ids = tokens(12)
    ledger.release(computed(ledger, Prompt.of(ids), step=2))
    other = [*tokens(4, seed=9), *ids[4:]]
    lie = Prompt(Prompt.of(other).tokens, b"", (), Prompt.of(ids).sums)
    assert ledger.hit_tokens(Prompt.of(ids)) == 10
    assert ledger.hit_tokens(lie) == 0


@pytest.mark.parametrize(
    ("first", "second", "hit"),
    [
        ({}, {"salt": b"x"}, 0),
        ({"salt": b"x"}, {"salt": b"x"}, 10),
        ({"extra": ((5, b"cat"),)}, {"extra": ((5, b"dog"),)}, 4),
        ({"extra": ((5, b"cat"),)}, {"extra": ((5, b"cat"),)}, 10),
    ],
)
def test_salts_and_extra_content_keep_prompts_apart(first: dict, second: dict, hit: int) -> None:
    ledger = ledger_of(layer("a", tokens=2))
    ids = tokens(12)
    ledger.release(computed(ledger, Prompt.of(ids, **first)))
    assert ledger.hit_tokens(Prompt.of(ids, **second)) == hit


@pytest.mark.parametrize("extra", [((0, b"dog"),), ((5, b"cat"),), ()])
def test_a_collision_with_other_content_between_the_tokens_is_no_hit(extra) -> None:
    ledger = ledger_of(layer("a", tokens=2))
    mine = Prompt.of(tokens(12), extra=((0, b"cat"),))
    ledger.release(computed(ledger, mine))
    assert ledger.hit_tokens(mine) == 10
    assert ledger.hit_tokens(Prompt(mine.tokens, mine.salt, extra, mine.sums)) == 0
    assert ledger.hit_tokens(Prompt(mine.tokens, b"salt", mine.extra, mine.sums)) == 0


@pytest.mark.parametrize("at", range(10))
def test_every_token_is_confirmed(at: int) -> None:
    ledger = ledger_of(layer("a", tokens=2))
    mine = Prompt.of(tokens(12))
    ledger.release(computed(ledger, mine))
    other = mine.tokens.copy()
    other[at] += 1
    assert ledger.hit_tokens(Prompt(other, mine.salt, mine.extra, mine.sums)) == 0


def test_blocks_of_tokens_that_come_one_by_one_are_confirmed_by_one_source() -> None:
    ledger = ledger_of(layer("a", tokens=2))
    ids = tokens(20)
    request = computed(ledger, Prompt.of(ids[:4]))
    for n in range(4, 20):
        ledger.append(request, ids[n : n + 1])
        ledger.grow(request, n + 1)
        assert len({*ledger.prefixes._index[0].source.tolist()} - {None}) == 1
    ledger.release(request)
    assert ledger.hit_tokens(Prompt.of([*ids, 1])) == 20
    assert ledger.hit_tokens(Prompt.of([*ids[:15], ids[15] + 1, *ids[16:], 1])) == 14


def test_source_tokens_are_gone_when_their_rows_are() -> None:
    def count_sources() -> int:
        gc.collect()
        return sum(isinstance(each, PromptSource) for each in gc.get_objects())

    ledger = ledger_of(layer("a", tokens=2), num_slabs=8)
    before = count_sources()
    for seed in range(30):
        ledger.release(computed(ledger, Prompt.of(tokens(9, seed=seed))))
    assert 1 <= count_sources() - before <= 7


# ── events ────────────────────────────────────────────────────────────────────────────


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
    assert "prefixes: a listener missed 4 blocks" in caplog.text
