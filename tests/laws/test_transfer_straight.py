"""Law: the short way through a straight route makes the copies that the route itself makes."""

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import strategies
from kvstow.errors import RouteError
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies, merged
from kvstow.route.route import Route, route
from kvstow.testing.measure.setting import BLOCK_TOKENS, Setting
from kvstow.transfer.straight import Ways

BASES = (1 << 40, 1 << 50)

quick = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much,
                           HealthCheck.data_too_large],
)  # fmt: skip


def listed(copies: Copies) -> list[tuple[int, int, int]]:
    columns = (copies.destination.tolist(), copies.source.tolist(), copies.nbytes.tolist())
    return sorted(zip(*columns, strict=True))


def by_route(way: Route, source, destination, tokens) -> list[tuple[int, int, int]] | str:
    try:
        moves = way.copies(source, destination, tokens[1], start_token=tokens[0])
    except RouteError as error:
        return str(error)
    return listed(merged(moves.moved(*BASES)))


def by_ways(way: Route, source, destination, tokens) -> list[tuple[int, int, int]] | str:
    try:
        return listed(Ways(way).spans(source, destination, tokens, BASES))
    except RouteError as error:
        return str(error)


@quick
@given(st.data())
def test_short_and_long_way_make_the_same_copies(data: st.DataObject) -> None:
    model = data.draw(strategies.models())
    num_tokens = data.draw(st.integers(0, 40))
    how = data.draw(strategies.served(model, most_tokens=8))
    layout = how.layout(model, 0, 0, num_tokens)
    assume(layout.nbytes <= 1 << 21)
    ours, theirs = (data.draw(strategies.listed(layout, num_tokens)) for _ in range(2))
    tokens = data.draw(st.integers(0, num_tokens)), num_tokens
    way = route(layout, layout)
    assert by_ways(way, ours, theirs, tokens) == by_route(way, ours, theirs, tokens)


SETTING = Setting(rows=24, layers=2, piece=128)
BLOCKS = st.tuples(
    st.permutations(range(1, SETTING.rows)), st.integers(0, 5), st.integers(0, 12)
).map(lambda drawn: Blocks(np.array(drawn[0][: drawn[2]], np.int64),
                           np.arange(drawn[1], drawn[1] + drawn[2])))  # fmt: skip


@quick
@given(BLOCKS, BLOCKS, st.integers(0, 8 * BLOCK_TOKENS), st.integers(0, 12 * BLOCK_TOKENS))
def test_packed_rows_of_any_lists_are_the_same_copies(ours, theirs, first, end):
    layout = SETTING.layout()
    way = route(layout, layout)
    wanted = {0: ours}, {0: theirs}, (first, end)
    assert by_ways(way, *wanted) == by_route(way, *wanted)


def test_packed_rows_go_the_short_way(monkeypatch):
    layout = SETTING.layout()
    ways = Ways(route(layout, layout))
    monkeypatch.setattr(Route, "moves", None)
    for num_tokens in (SETTING.rows * BLOCK_TOKENS, SETTING.rows * BLOCK_TOKENS - 5):
        spans = ways.spans({0: SETTING.in_order()}, {0: SETTING.in_order()}, (0, num_tokens), BASES)
        assert len(spans) == 1
        assert 0 <= SETTING.nbytes - spans.total < SETTING.row_bytes
