"""Moves of neighbouring pairs are one wherever they follow, against a list of bytes."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS, Layout
from kvstow.plan.pack import Alignment, Site, packed
from kvstow.route import meeting, moves
from kvstow.route.blocks import Blocks
from kvstow.route.route import Route, route
from planning import attention

NUM_BLOCKS = 16
SPANS = st.sampled_from([1, 2, 3, 4, 6])


def layout(tokens: int, order: str, *, layers_backwards: bool = False) -> Layout:
    """Two layers without padding."""
    layers = [attention(f"layers.{i}", tokens=tokens) for i in range(2)]
    found = packed(grouped(layers), num_slabs=NUM_BLOCKS,
                   site=Site(order=order, alignment=Alignment(page=1, row=1, base=64)))  # fmt: skip
    if not layers_backwards:
        return found
    rows = found.groups[0]
    offsets = [place.offset for place in reversed(rows.placements)]
    places = tuple(replace(place, offset=offset)
                   for place, offset in zip(rows.placements, offsets, strict=True))  # fmt: skip
    return replace(found, groups=(replace(rows, placements=places),))


def addresses(side: Layout, ids: list[int], num_tokens: int) -> np.ndarray:
    """Where each byte of the request is, by layer, token, head, and place in the cell."""
    tokens, found = np.arange(num_tokens), []
    for name in ("layers.0", "layers.1"):
        _, spec, place = side.layers[name]
        block = np.array(ids, np.int64)[tokens // spec.block_tokens] * place.block_stride
        token = block + tokens % spec.block_tokens * place.token_stride
        head = np.arange(spec.heads.size) * place.head_stride
        cell = np.arange(sum(field.nbytes for field in spec.fields))
        found.append(place.offset + np.add.outer(np.add.outer(token, head), cell).ravel())
    return np.concatenate(found)


def check(way: Route, ours: list[int], theirs: list[int], num_tokens: int) -> None:
    found = way.copies({0: Blocks.first(ours)}, {0: Blocks.first(theirs)}, num_tokens, exact=True)
    source, destination = (addresses(side, ids, num_tokens) for side, ids in
                           ((way.source, ours), (way.destination, theirs)))  # fmt: skip
    order = np.argsort(destination)
    source, destination = source[order], destination[order]
    together = (np.diff(source) == 1) & (np.diff(destination) == 1)
    assert len(found) == (1 + np.count_nonzero(~together) if num_tokens else 0)
    for column, expected in ((found.source, source), (found.destination, destination)):
        each = [np.arange(x, x + n) for x, n in zip(column, found.nbytes, strict=True)]
        by_destination = [each[i] for i in np.argsort(found.destination)]
        assert np.concatenate([[], *by_destination]).tolist() == expected.tolist()


def ids(draw, count: int) -> list[int]:
    """Blocks in any order, often runs of neighbours."""
    found = draw(st.permutations(range(1, NUM_BLOCKS)))
    return sorted(found[:count]) if draw(st.booleans()) else found[:count]


@settings(max_examples=300, deadline=None)
@given(st.data(), SPANS, SPANS, st.sampled_from(ORDERS), st.sampled_from(ORDERS),
       st.sampled_from([1, 2, 5, 1000]))  # fmt: skip
def test_moves_are_the_fewest_however_many_pairs_are_looked_at_together(
    data, s_span, d_span, one, other, at_once
):
    num_tokens = data.draw(st.integers(0, min(s_span, d_span) * (NUM_BLOCKS - 1)))
    backwards = data.draw(st.booleans())
    way = route(layout(s_span, one, layers_backwards=backwards), layout(d_span, other))
    ours, theirs = (ids(data.draw, -(-num_tokens // span)) for span in (s_span, d_span))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "AT_ONCE", at_once)
        patch.setattr(moves, "AT_ONCE", at_once)
        check(way, ours, theirs, num_tokens)


@pytest.mark.parametrize("theirs", [[4, 5], [5, 4], [4, 7]])
def test_a_lane_goes_on_in_an_earlier_slot_where_layers_come_in_another_order(theirs):
    way = route(layout(2, "BLNHC", layers_backwards=True), layout(4, "BLNHC"))
    for ours in permutations([5, 6, 7, 9], 4):
        check(way, list(ours), theirs, 8)
    joined = way.copies({0: Blocks.first([6, 5])}, {0: Blocks.first([4])}, 4)
    assert len(joined) == 3
