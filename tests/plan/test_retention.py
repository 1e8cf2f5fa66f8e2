"""What the next token sees, against the definitions of the kinds, position by position."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import SpecError
from kvstow.plan.retention import (
    Chunk,
    Encoder,
    Full,
    Sink,
    State,
    Window,
    can_hit,
    check_retention,
    first_seen_block,
    first_seen_token,
    forgets,
    in_words,
    lasting_first,
    rows_bound,
    rows_needed,
    seen_blocks,
    seen_tokens,
    short_name,
    sink_blocks,
)

SMALL = st.integers(1, 9)
FORGETTING = st.one_of(
    st.builds(Window, SMALL), st.builds(Chunk, SMALL), st.builds(Sink, SMALL, SMALL)
)
TOKENWISE = st.one_of(st.just(Full()), FORGETTING)
EVERY = [Full(), Window(4), Chunk(4), Sink(2, 4), State(), State(2), Encoder(4)]


def sees(retention, position: int) -> set[int]:
    """Positions that the token at `position` reads, its own among them: the definitions."""
    match retention:
        case Full():
            return set(range(position + 1))
        case Window(tokens):
            return {p for p in range(position + 1) if position - p < tokens}
        case Chunk(tokens):
            return {p for p in range(position + 1) if p // tokens == position // tokens}
        case Sink(sink_tokens, tokens):
            return {p for p in range(position + 1) if p < sink_tokens or position - p < tokens}


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


@pytest.mark.parametrize(
    ("sinks", "tokens"), [(0, 4), (-1, 4), (4, 0), (4, -1), (1.5, 4), (4, True)]
)
def test_a_sink_has_tokens_at_both_ends(sinks, tokens):
    with pytest.raises(SpecError, match=r"Sink: (sink_)?tokens is .*\n\nhint: "):
        Sink(sinks, tokens)


@pytest.mark.parametrize("checkpoints", [-1, 1.0, False, "2"])
def test_a_summary_has_no_less_than_no_checkpoints(checkpoints):
    with pytest.raises(SpecError, match=r"State: checkpoints is .* from 0 to .*\n\nhint: "):
        State(checkpoints)
    assert State() == State(0)


@pytest.mark.parametrize("value", ["full", None, 4, Full, Window])
def test_what_is_no_retention_is_refused_with_the_kinds_there_are(value):
    with pytest.raises(SpecError, match=r"here: retention is .*Full, Window, Chunk.*\n\nhint: "):
        check_retention("here", value)
    for retention in EVERY:
        check_retention("here", retention)


def test_every_retention_has_a_name_words_and_a_rank_of_its_own():
    assert len({short_name(retention) for retention in EVERY}) == len(EVERY)
    assert len({in_words(retention) for retention in EVERY}) == len(EVERY)
    assert len({lasting_first(retention) for retention in EVERY}) == len(EVERY)
    assert min(EVERY, key=lasting_first) == Full()


# ── what the next token sees ──────────────────────────────────────────────────────────


@given(TOKENWISE, st.integers(0, 40))
def test_seen_tokens_are_those_of_the_definition(retention, num_tokens):
    sinks, rest = seen_tokens(retention, num_tokens)
    assert not set(sinks) & set(rest)
    assert {*sinks, *rest, num_tokens} == sees(retention, num_tokens)


@given(TOKENWISE, st.integers(0, 40), SMALL)
def test_blocks_before_the_first_seen_are_never_seen_again(retention, num_tokens, block_tokens):
    first = first_seen_block(retention, num_tokens, block_tokens)
    kept = {*range(sink_blocks(retention, block_tokens)), *range(first, 100)}
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
    sinks, rest = seen_blocks(retention, num_tokens, block_tokens)
    assert not set(sinks) & set(rest)
    wanted = {p // block_tokens for p in sees(retention, num_tokens) - {num_tokens}}
    assert {*sinks, *rest} == wanted


def test_of_a_summary_the_last_checkpoint_is_seen_and_of_an_encoder_nothing():
    assert seen_blocks(State(), 24, 8) == (range(0), range(2, 3))
    assert list(seen_blocks(State(), 0, 8)[1]) == []
    assert seen_blocks(Encoder(4), 24, 8) == (range(0), range(0))


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


def test_summaries_and_encoders_do_not_grow():
    assert rows_needed(State(), 1, 8) == rows_needed(State(), 1_000_000, 8) == 1
    assert rows_needed(State(2), 1_000_000, 8) == 3
    assert rows_needed(Encoder(7), 1, 2) == rows_needed(Encoder(7), 1_000_000, 2) == 4
    assert rows_bound(Full(), 1, in_flight=1) is None
