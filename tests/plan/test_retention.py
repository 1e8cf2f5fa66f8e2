"""What the next token sees, against the definitions of the kinds, position by position."""

from math import lcm
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import SpecError
from kvstow.plan.retention import (
    Chunk,
    Encoder,
    Full,
    Retention,
    State,
    Window,
    can_hit,
    first_seen_block,
    first_seen_token,
    forgets,
    in_words,
    lasting_first,
    longest_prefix,
    rows_bound,
    rows_needed,
    seen_blocks,
    short_name,
)

SMALL = st.integers(1, 9)
FORGETTING = st.one_of(st.builds(Window, SMALL), st.builds(Chunk, SMALL))
TOKENWISE = st.one_of(st.just(Full()), FORGETTING)
EVERY = [Full(), Window(4), Chunk(4), State(), Encoder(4)]


def sees(retention, position: int) -> set[int]:
    """Positions that the token at `position` reads, its own among them: the definitions."""
    match retention:
        case Full():
            return set(range(position + 1))
        case Window(tokens):
            return {p for p in range(position + 1) if position - p < tokens}
        case Chunk(tokens):
            return {p for p in range(position + 1) if p // tokens == position // tokens}


# ── values ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [Window, Chunk, Encoder])
@pytest.mark.parametrize("tokens", [0, -3, True, 2.0, "4", None, np.int64(4), 1 << 41])
def test_a_retention_of_no_tokens_cannot_be_built(kind, tokens):
    with pytest.raises(SpecError) as caught:
        kind(tokens)
    message = str(caught.value)
    assert f"{kind.__name__}: tokens is {tokens!r}" in message
    assert "1 to 1099511627776" in message
    assert "\n\nhint: " in message


def test_every_retention_has_a_name_words_and_a_rank_of_its_own():
    assert len({short_name(retention) for retention in EVERY}) == len(EVERY)
    assert len({in_words(retention) for retention in EVERY} - {None}) == len(EVERY)
    assert len({lasting_first(retention) for retention in EVERY}) == len(EVERY)
    assert min(EVERY, key=lasting_first) == Full()
    assert [retention for retention in EVERY if forgets(retention)] == [Window(4), Chunk(4)]


# ── what the next token sees ──────────────────────────────────────────────────────────


@given(TOKENWISE, st.integers(0, 40))
def test_seen_tokens_are_those_of_the_definition(retention, num_tokens):
    seen = range(first_seen_token(retention, num_tokens), num_tokens + 1)
    assert {*seen} == sees(retention, num_tokens)


@given(TOKENWISE, st.integers(0, 40), SMALL)
def test_blocks_before_the_first_seen_are_never_seen_again(retention, num_tokens, block_tokens):
    first = first_seen_block(retention, num_tokens, block_tokens)
    kept = {*range(first, 100)}
    for later in range(num_tokens, num_tokens + 30):
        assert {p // block_tokens for p in sees(retention, later)} <= kept
    if forgets(retention):
        assert first_seen_block(retention, num_tokens + 18, block_tokens) > 0


@pytest.mark.parametrize("retention", EVERY)
def test_arrays_of_lengths_give_what_each_length_gives(retention):
    lengths = np.arange(20)
    tokens = [first_seen_token(retention, n) for n in range(20)]
    assert first_seen_token(retention, lengths).tolist() == tokens
    blocks = [first_seen_block(retention, n, 3) for n in range(20)]
    assert first_seen_block(retention, lengths, 3).tolist() == blocks


@given(TOKENWISE, st.integers(0, 12), SMALL)
def test_seen_blocks_are_those_of_the_seen_tokens(retention, num_blocks, block_tokens):
    num_tokens = num_blocks * block_tokens
    seen = seen_blocks(retention, num_tokens, block_tokens)
    wanted = {p // block_tokens for p in sees(retention, num_tokens) - {num_tokens}}
    assert {*seen} == wanted


def test_of_a_summary_the_last_checkpoint_is_seen_and_of_an_encoder_nothing():
    assert seen_blocks(State(), 24, 8) == range(2, 3)
    assert list(seen_blocks(State(), 0, 8)) == []
    assert seen_blocks(Encoder(4), 24, 8) == range(0)


@given(TOKENWISE, SMALL, st.lists(st.booleans(), max_size=12))
def test_a_hit_is_possible_where_all_seen_blocks_are_present(retention, block_tokens, present):
    lengths = block_tokens * np.arange(len(present) + 1)
    expected = [
        all(present[p // block_tokens] for p in sees(retention, n) - {n}) for n in lengths.tolist()
    ]
    hits = can_hit(retention, lengths, block_tokens, np.array(present, np.bool_))
    assert hits.tolist() == expected


def test_a_hit_needs_the_checkpoint_at_its_end_and_nothing_of_an_encoder():
    lengths, present = np.array([0, 8, 16, 24]), np.array([False, True, False])
    assert can_hit(State(), lengths, 8, present).tolist() == [True, False, True, False]
    assert can_hit(Encoder(3), lengths, 8, present).all()


# ── the prefix law ────────────────────────────────────────────────────────────────────


class Kept(NamedTuple):
    retention: Retention
    block_tokens: int


def serves(kept: Kept, present: list[bool], num_tokens: int) -> bool:
    """Whether a group can serve so many tokens: the definition."""
    if num_tokens == 0 or isinstance(kept.retention, Encoder):
        return True
    if isinstance(kept.retention, State):
        return present[num_tokens // kept.block_tokens - 1]
    needed = {p // kept.block_tokens for p in sees(kept.retention, num_tokens) - {num_tokens}}
    return all(present[block] for block in needed)


PARTS = st.tuples(
    st.builds(
        Kept,
        st.one_of(TOKENWISE, st.just(State()), st.builds(Encoder, SMALL)),
        st.sampled_from([1, 2, 3, 4]),
    ),
    st.lists(st.sampled_from([True, True, True, False]), min_size=49, max_size=49),
)


@given(st.lists(PARTS, min_size=1, max_size=4), st.integers(-2, 48), st.sampled_from([None, 12]))
def test_the_longest_prefix_is_the_last_that_every_group_can_serve(parts, num_tokens, unit):
    questions: list[tuple[int, int]] = []

    def holds(g, num_blocks):
        questions.append((g, num_blocks))
        return np.array(parts[g][1][:num_blocks])

    groups = [(g, kept) for g, (kept, _) in enumerate(parts)]
    tokenwise = [kept for _, kept in groups if not isinstance(kept.retention, Encoder)]
    step = unit or lcm(*(kept.block_tokens for kept in tokenwise))
    expected = [
        n
        for n in range(0, max(0, num_tokens) + 1, step)
        if all(serves(kept, present, n) for kept, present in parts)
    ]
    assert longest_prefix(groups, num_tokens, holds, unit=unit) == expected[-1]
    assert len(dict(questions)) == len(questions)
    assert all(0 < n * parts[g][0].block_tokens <= num_tokens for g, n in questions)


def test_full_groups_bound_what_the_others_have_to_look_for():
    questions: list[tuple[int, int]] = []

    def holds(g, num_blocks):
        questions.append((g, num_blocks))
        return np.ones(3 if g == 1 else num_blocks, np.bool_)  # of group 1 only three are there

    groups = [(0, Kept(Window(8), 2)), (1, Kept(Full(), 4)), (2, Kept(State(), 4))]
    assert longest_prefix(groups, 100, holds) == 12
    assert longest_prefix(groups, -1, holds) == 0  # of an empty prompt
    assert questions == [(1, 25), (0, 6), (2, 3)]


# ── rows ──────────────────────────────────────────────────────────────────────────────


@given(TOKENWISE, SMALL, SMALL, st.integers(1, 40))
def test_rows_needed_cover_every_step_of_a_request(retention, block_tokens, in_flight, num_tokens):
    have = rows_needed(retention, num_tokens, block_tokens, in_flight=in_flight)
    most = 0
    for start in range(0, num_tokens, in_flight):
        step = range(start, min(num_tokens, start + in_flight))
        blocks = {p // block_tokens for position in step for p in sees(retention, position)}
        most = max(most, len(blocks))
    assert most <= have


@given(FORGETTING, SMALL, SMALL)
def test_a_window_is_bounded_for_any_length(retention, block_tokens, in_flight):
    """A million tokens hold no more rows than the window and one step need."""
    bound = rows_bound(retention, block_tokens, in_flight=in_flight)
    assert rows_needed(retention, 1_000_000, block_tokens, in_flight=in_flight) == bound
    assert bound * block_tokens <= 2 * 9 + in_flight + 4 * block_tokens + 9


@given(st.builds(Window, SMALL), SMALL, SMALL)
def test_a_window_holds_as_many_rows_as_its_tokens_can_touch(retention, block_tokens, in_flight):
    span = retention.tokens - 1 + in_flight
    touched = (
        {token // block_tokens for token in range(start, start + span)}
        for start in range(block_tokens)
    )
    assert rows_bound(retention, block_tokens, in_flight=in_flight) == max(map(len, touched))


def test_summaries_and_encoders_do_not_grow():
    assert rows_needed(State(), 1, 8) == rows_needed(State(), 1_000_000, 8) == 1
    assert rows_needed(Encoder(7), 1, 2) == rows_needed(Encoder(7), 1_000_000, 2) == 4
    assert rows_bound(Full(), 1, in_flight=1) is None
