"""Prefix hits: how long they are for every retention, and that a collision is no hit."""

from collections import Counter

import numpy as np
import pytest

from block_layouts import layer, packed_layout, state
from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prefix import MAX_DEPTH, PrefixIndex, SourceTokens, blocks_seen, served
from kvstow.blocks.prompt import Prompt
from kvstow.errors import BlockError
from kvstow.plan.group import Group
from kvstow.plan.retention import Chunk, Full, Retention, Sink, Window

RNG = np.random.default_rng(0)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, count).tolist()


def ledger_of(*layers, num_slabs: int = 200) -> Ledger:
    return Ledger(Pool(packed_layout(layers, num_slabs)))


def served_request(ledger: Ledger, prompt: Prompt, step: int | None = None) -> int:
    """Admit and compute a prompt, `step` tokens at a time."""
    admission = ledger.admit(prompt, num_tokens=min(step or len(prompt), len(prompt)))
    while (have := ledger.num_tokens(admission.request)) < len(prompt):
        ledger.grow(admission.request, min(len(prompt), have + (step or len(prompt))))
    return admission.request


# ── index ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("num_rows", [1, 2, 100, 3000])
def test_an_index_finds_what_was_added_and_not_what_was_removed(num_rows: int) -> None:
    index = PrefixIndex(num_rows)
    hashes = RNG.integers(1, 1 << 62, num_rows).astype(np.uint64)
    rows = RNG.permutation(num_rows)
    added = index.add(rows, hashes, 0)
    assert added.mean() > 0.99
    assert np.array_equal(index.find(hashes)[added], rows[added])
    gone = rows[added][::2]
    index.remove(gone)
    left = np.isin(rows, rows[added][1::2])
    assert np.array_equal(index.find(hashes), np.where(left, rows, -1))


def test_keys_that_meet_in_one_bucket_are_all_found_until_both_are_full() -> None:
    index = PrefixIndex(64)
    hashes = (np.arange(1, 31, dtype=np.uint64) << np.uint64(40)) | np.uint64(5)
    added = index.add(np.arange(30), hashes, 0)
    assert added.sum() >= 16
    assert np.array_equal(index.find(hashes) >= 0, added)


# ── hit rules ─────────────────────────────────────────────────────────────────────────


def sees(retention: Retention, position: int, before: int) -> bool:
    match retention:
        case Window(size):
            return before > position - size
        case Chunk(size):
            return before // size == position // size
        case Sink(sink, size):
            return before < sink or before > position - size
        case _:
            return True


@pytest.mark.parametrize(
    "retention", [Full(), Window(1), Window(5), Window(8), Chunk(4), Chunk(6), Sink(1, 3),
                  Sink(5, 4), Sink(2, 1)]
)  # fmt: skip
@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_hit_needs_exactly_the_blocks_that_its_next_token_sees(
    retention: Retention, step: int
) -> None:
    group = Group(name="g", layers=(layer("a", retention, tokens=step),))
    for _ in range(50):
        present = RNG.random(12) < 0.8
        lengths = np.arange(0, 12 * step + 1, step)
        expected = [
            all(present[t // step] for t in range(n) if sees(retention, n, t)) for n in lengths
        ]
        assert served(group, present, lengths).tolist() == expected
    for n in lengths.tolist():
        wanted = sorted({t // step for t in range(n) if sees(retention, n, t)})
        assert blocks_seen(group, n).tolist() == wanted


def test_full_attention_hits_whole_blocks_short_of_the_last_token() -> None:
    ledger = ledger_of(layer("a", tokens=4))
    ids = tokens(16)
    ledger.release(served_request(ledger, Prompt.of(ids)))
    for length, hit in ((16, 12), (17, 16), (30, 16), (5, 4), (4, 0), (1, 0)):
        more = (ids + tokens(20, seed=1))[:length]
        assert ledger.hit_tokens(Prompt.of(more)) == hit, length
    other = ids.copy()
    other[6] += 1
    assert ledger.hit_tokens(Prompt.of(other + ids)) == 4


def test_a_window_hit_needs_only_the_last_window() -> None:
    ledger = ledger_of(layer("a", Window(4), tokens=2))
    ids = tokens(20)
    request = served_request(ledger, Prompt.of(ids), step=2)
    ledger.release(request)
    held = ledger.prefixes.hit(Prompt.of([*ids, 1]))
    assert held.num_tokens == 20
    assert held.blocks[0].logical.tolist() == [8, 9]


def test_the_hit_is_the_longest_that_all_groups_serve() -> None:
    ledger = ledger_of(layer("a", tokens=2), layer("b", Window(4), tokens=2, dim=48))
    ids = tokens(20)
    ledger.release(served_request(ledger, Prompt.of(ids), step=4))
    hit = ledger.prefixes.hit(Prompt.of([*ids, 1]))
    assert hit.num_tokens == 20
    ledger.pool.forget(1, hit.blocks[1].ids[-1:])
    shorter = ledger.prefixes.hit(Prompt.of([*ids, 1]))
    assert shorter.num_tokens == 18
    ledger.pool.forget(0, hit.blocks[0].ids[3:4])
    assert ledger.prefixes.hit(Prompt.of([*ids, 1])).num_tokens <= 6


def test_a_recurrent_hit_needs_a_checkpoint_at_exactly_its_length() -> None:
    ledger = ledger_of(layer("a", tokens=2), state("b", tokens=8))
    ids = tokens(30)
    ledger.release(served_request(ledger, Prompt.of(ids), step=8))
    for length, hit in ((30, 24), (24, 16), (17, 16), (16, 8), (9, 8), (8, 0)):
        assert ledger.hit_tokens(Prompt.of(ids[:length])) == hit


def test_a_prompt_computed_in_one_go_leaves_no_checkpoint_on_its_way() -> None:
    ledger = ledger_of(layer("a", tokens=2), state("b", tokens=8))
    ids = tokens(30)
    ledger.release(served_request(ledger, Prompt.of(ids)))
    assert ledger.hit_tokens(Prompt.of(ids + ids)) == 0


def test_blocks_of_unequal_tokens_hit_where_all_end() -> None:
    ledger = ledger_of(layer("a", tokens=4), layer("b", Window(9), tokens=6, dim=48))
    ids = tokens(40)
    ledger.release(served_request(ledger, Prompt.of(ids), step=4))
    assert ledger.hit_tokens(Prompt.of(ids)) == 36
    assert ledger.hit_tokens(Prompt.of(ids[:36])) == 24


# ── confirmation ──────────────────────────────────────────────────────────────────────


def test_a_collision_never_returns_another_prompts_rows() -> None:
    """Two prompts with the very same hashes: the second one is forged."""
    ledger = ledger_of(layer("a", tokens=2))
    mine, forged = Prompt.of(tokens(12)), Prompt.of(tokens(12, seed=9))
    ledger.release(served_request(ledger, mine))
    assert ledger.hit_tokens(mine) == 10
    lie = Prompt(forged.tokens, forged.salt, forged.extra, mine.sums)
    assert np.array_equal(lie.hashes(2), mine.hashes(2))
    assert ledger.hit_tokens(lie) == 0


def test_a_collision_of_the_beginning_alone_is_noticed_at_the_end() -> None:
    """Same last block, same hashes, another beginning: the window alone would not tell."""
    ledger = ledger_of(layer("a", Window(2), tokens=2))
    ids = tokens(12)
    ledger.release(served_request(ledger, Prompt.of(ids), step=2))
    other = [*tokens(4, seed=9), *ids[4:]]
    lie = Prompt(Prompt.of(other).tokens, b"", (), Prompt.of(ids).sums)
    assert ledger.hit_tokens(Prompt.of(ids)) == 10
    assert ledger.hit_tokens(lie) == 0


@pytest.mark.parametrize(
    ("first", "second", "hit"),
    [({}, {"salt": b"x"}, 0), ({"salt": b"x"}, {"salt": b"x"}, 10),
     ({"extra": ((5, b"cat"),)}, {"extra": ((5, b"dog"),)}, 4),
     ({"extra": ((5, b"cat"),)}, {"extra": ((5, b"cat"),)}, 10)],
)  # fmt: skip
def test_salts_and_extra_content_keep_prompts_apart(first: dict, second: dict, hit: int) -> None:
    ledger = ledger_of(layer("a", tokens=2))
    ids = tokens(12)
    ledger.release(served_request(ledger, Prompt.of(ids, **first)))
    assert ledger.hit_tokens(Prompt.of(ids, **second)) == hit


def test_a_long_line_of_witnesses_still_confirms() -> None:
    ids = tokens(100)
    witness = SourceTokens.of(Prompt.of(ids[:5]))
    for end in range(10, 101, 5):
        witness = SourceTokens.of(Prompt.of(ids[:end]), witness, end - 5)
        assert witness.depth <= MAX_DEPTH
        assert witness.confirms(Prompt.of(ids), end)
        assert not witness.confirms(Prompt.of([*ids[:2], -ids[2] % 7, *ids[3:]]), end)
        assert not witness.confirms(Prompt.of(ids), end + 1)


def test_witnesses_are_gone_when_their_rows_are() -> None:
    ledger = ledger_of(layer("a", tokens=2), num_slabs=8)
    for seed in range(30):
        ledger.release(served_request(ledger, Prompt.of(tokens(9, seed=seed))))
    assert len(ledger.prefixes._witnesses) <= 7


# ── events ────────────────────────────────────────────────────────────────────────────


def test_replayed_events_say_what_is_cached_now() -> None:
    ledger = ledger_of(layer("a", tokens=2), layer("b", Window(4), tokens=2, dim=48), num_slabs=9)
    for seed in range(25):
        ledger.release(served_request(ledger, Prompt.of(tokens(11, seed=seed % 7)), step=3))
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
    ledger.release(served_request(ledger, Prompt.of(tokens(8))))
    ledger.release(served_request(ledger, Prompt.of(tokens(8) + tokens(4, seed=1))))
    assert told == [0, 1]
    second = list(events.since(1))
    assert [e.sequence for e in second] == [1]
    assert second[0].parent == int(Prompt.of(tokens(8)).hashes(2)[3])
    with pytest.raises(BlockError, match="event 3 is not among"):
        events.since(3)
