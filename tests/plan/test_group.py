import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import SpecError
from kvstow.plan.group import (
    Group,
    bounded_rows,
    grouped,
    natural,
    rows_needed,
    scaled,
    split,
)
from kvstow.plan.retention import Chunk, Encoder, Full, Sink, Window
from planning import attention, recurrent

SMALL = st.integers(1, 9)


def one(retention, tokens=2):
    return Group(name="g", layers=(attention("a", tokens=tokens, retention=retention),))


def test_layers_are_in_natural_order_not_in_string_order():
    """Facts 6: `layers.10` comes after `layers.2`."""
    names = [f"model.layers.{i}.attn" for i in range(12)]
    (group,) = grouped([attention(name) for name in sorted(names)])
    assert [layer.name for layer in group.layers] == names
    assert natural("a2b") < natural("a10")


def test_no_layer_name_is_reserved():
    """Facts 6: a layer may be called ALL_LAYERS."""
    (group,) = grouped([attention("ALL_LAYERS"), attention("")])
    assert {layer.name for layer in group.layers} == {"ALL_LAYERS", ""}


def test_one_group_per_retention_and_block_tokens_lasting_ones_first():
    layers = [
        recurrent("r"),
        attention("w", retention=Window(4)),
        attention("w8", retention=Window(4), tokens=8),
        attention("f"),
    ]
    assert [group.name for group in grouped(layers)] == [
        "full", "window4.8", "window4.2", "state",
    ]  # fmt: skip


def test_a_layer_twice_or_none_at_all_is_refused():
    with pytest.raises(SpecError, match="'a' is there twice"):
        grouped([attention("a"), attention("a")])
    with pytest.raises(SpecError, match="without layers"):
        grouped([])


def test_a_group_of_two_kinds_cannot_be_built():
    with pytest.raises(SpecError, match="mixes 2 kinds"):
        Group(name="g", layers=(attention("a"), attention("b", retention=Window(3))))


@given(st.integers(1, 9), st.data())
def test_split_keeps_every_layer_once_in_nearly_equal_parts(count, data):
    parts = data.draw(st.integers(1, count))
    (group,) = grouped([attention(f"l{i}") for i in range(count)])
    pieces = split(group, parts)
    assert [layer for piece in pieces for layer in piece.layers] == list(group.layers)
    sizes = [len(piece.layers) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1


def test_scaling_blocks_scales_pages():
    (group,) = grouped([attention("a", tokens=2)])
    assert scaled(group, 3).block_tokens == 6
    assert scaled(group, 3).page_bytes == 3 * group.page_bytes


def needed_tokens(retention, first: int, last: int) -> set[int]:
    """Positions that queries at [first, last] read or write, from the definitions."""
    wanted: set[int] = set()
    for p in range(first, last + 1):
        match retention:
            case Full():
                wanted |= set(range(p + 1))
            case Window(tokens):
                wanted |= set(range(max(0, p - tokens + 1), p + 1))
            case Chunk(tokens):
                wanted |= set(range(p - p % tokens, p + 1))
            case Sink(sink_tokens, tokens):
                wanted |= set(range(min(sink_tokens, p + 1)))
                wanted |= set(range(max(0, p - tokens + 1), p + 1))
    return wanted


@given(
    st.one_of(st.just(Full()), st.builds(Window, SMALL), st.builds(Chunk, SMALL),
              st.builds(Sink, SMALL, SMALL)),
    SMALL, SMALL, st.integers(1, 40),
)  # fmt: skip
def test_rows_needed_cover_every_step_of_a_request(retention, step, in_flight, num_tokens):
    group = one(retention, tokens=step)
    have = rows_needed(group, num_tokens, in_flight=in_flight)
    most = 0
    for start in range(0, num_tokens, in_flight):
        last = min(num_tokens, start + in_flight) - 1
        blocks = {p // step for p in needed_tokens(retention, start, last)}
        most = max(most, len(blocks))
    assert most <= have


@given(st.one_of(st.builds(Window, SMALL), st.builds(Chunk, SMALL), st.builds(Sink, SMALL, SMALL)),
       SMALL, SMALL)  # fmt: skip
def test_a_window_group_is_bounded_for_any_length(retention, step, in_flight):
    """Facts 2: a million tokens hold no more rows than the window and one step need."""
    group = one(retention, tokens=step)
    bound = bounded_rows(group, in_flight=in_flight)
    assert rows_needed(group, 1_000_000, in_flight=in_flight) == bound
    assert bound * step <= 2 * 9 + in_flight + 4 * step + 9


def test_states_and_encoders_do_not_grow():
    (state,) = grouped([recurrent("r")])
    assert rows_needed(state, 1) == rows_needed(state, 1_000_000) == 1
    assert rows_needed(one(Encoder(7)), 1) == 4
    assert bounded_rows(one(Full()), in_flight=1) is None
