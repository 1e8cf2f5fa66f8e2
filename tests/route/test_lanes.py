"""From blocks to copies, against counting token by token and byte by byte."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS, Layout
from kvstow.plan.pack import Alignment, Site, packed
from kvstow.plan.view import align_up
from kvstow.route.blocks import Blocks, Tokens, block_pairs, cut_tokens
from kvstow.route.copies import Copies
from kvstow.route.lanes import Grid, Lanes
from kvstow.route.route import Route, plan_route
from planning import attention

NUM_BLOCKS = 16
ANY_SPAN = st.integers(1, 9)
SPANS = st.sampled_from([1, 2, 3, 4, 6])


# ── pairs of blocks ───────────────────────────────────────────────────────────────────


@given(ANY_SPAN, ANY_SPAN, st.integers(0, 40), st.integers(0, 40))
def test_tokens_are_cut_where_a_block_of_either_side_ends(s_span, d_span, one, other):
    first, end = sorted((one, other))
    found: dict[tuple[int, int], list[int]] = {}
    for token in range(first, end):
        found.setdefault((token // s_span, token // d_span), []).append(token)
    starts, ends = cut_tokens(Tokens(first, end), s_span, d_span)
    assert starts.tolist() == [tokens[0] for tokens in found.values()]
    assert ends.tolist() == [tokens[-1] + 1 for tokens in found.values()]


def test_no_tokens_are_cut_into_no_stretches():
    assert [each.tolist() for each in cut_tokens(Tokens(3, 3), 2, 5)] == [[], []]


def some_blocks(draw, span: int, end: int) -> Blocks:
    """At least one of the blocks of a request, ids in any order."""
    count = -(-end // span) + 1
    index = draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True).map(sorted))
    ids = draw(st.permutations(range(2 * count)))[: len(index)]
    return Blocks(np.array(ids, np.int64), np.array(index, np.int64))


@settings(max_examples=examples(300), deadline=None)
@given(st.data(), ANY_SPAN, ANY_SPAN, st.integers(1, 60))
def test_blocks_with_a_common_token_are_a_pair(data, s_span, d_span, end):
    tokens = Tokens(data.draw(st.integers(0, end - 1)), end)
    source, destination = (some_blocks(data.draw, span, end) for span in (s_span, d_span))
    found = list(block_pairs(source, destination, tokens, (s_span, d_span)))
    here, there = (
        dict(zip(x.index.tolist(), x.ids.tolist(), strict=True)) for x in (source, destination)
    )
    held: dict[tuple[int, int], list[int]] = {}
    whole = min(align_up(end, span) for span in (s_span, d_span))
    for token in range(tokens.first, whole):
        blocks = token // s_span, token // d_span
        if blocks[0] in here and blocks[1] in there:
            held.setdefault(blocks, []).append(token)
    expected = sorted(
        (there[d], common[0] - d * d_span, here[s], common[0] - s * s_span, len(common))
        for (s, d), common in held.items()
    )
    assert len({pairs.overlap for pairs in found}) == len(found)
    assert all((np.diff(pairs.destination) > 0).all() for pairs in found)
    assert expected == sorted(
        (d, pairs.overlap.destination_token, s, pairs.overlap.source_token, pairs.overlap.tokens)
        for pairs in found
        for s, d in zip(pairs.source.tolist(), pairs.destination.tolist(), strict=True)
    )


# ── copies ────────────────────────────────────────────────────────────────────────────


def layout(tokens: int, order: str, *, row: int = 1, layers_backwards: bool = False) -> Layout:
    """Two layers; without padding, unless rows are aligned."""
    layers = [attention(f"layers.{i}", tokens=tokens) for i in range(2)]
    site = Site(order=order, alignment=Alignment(page=1, row=row, base=64))
    found = packed(grouped(layers), num_slabs=NUM_BLOCKS, site=site)
    if not layers_backwards:
        return found
    rows = found.groups[0]
    offsets = [page[0].offset for page in reversed(rows.placements)]
    places = tuple(
        (replace(page[0], offset=offset),)
        for page, offset in zip(rows.placements, offsets, strict=True)
    )
    return replace(found, groups=(replace(rows, placements=places),))


def addresses(side: Layout, ids: list[int], num_tokens: int) -> np.ndarray:
    """Where each byte of the request is, by layer, token, head, and place in the cell."""
    tokens, found = np.arange(num_tokens), []
    for name in ("layers.0", "layers.1"):
        _, spec, (place,) = side.layers[name]
        block = np.array(ids, np.int64)[tokens // spec.block_tokens] * place.block_stride
        token = block + tokens % spec.block_tokens * place.token_stride
        head = np.arange(spec.heads.size) * place.head_stride
        cell = np.arange(sum(field.nbytes for field in spec.fields))
        found.append(place.offset + np.add.outer(np.add.outer(token, head), cell).ravel())
    return np.concatenate(found)


def check(way: Route, ours: list[int], theirs: list[int], num_tokens: int) -> None:
    found = way.copies({0: Blocks.first(ours)}, {0: Blocks.first(theirs)}, num_tokens)
    spans = (side.groups[0].group.block_tokens for side in (way.source, way.destination))
    num_tokens = min(align_up(num_tokens, span) for span in spans)
    source = addresses(way.source, ours, num_tokens)
    destination = addresses(way.destination, theirs, num_tokens)
    order = np.argsort(destination)
    source, destination = source[order], destination[order]
    together = (np.diff(source) == 1) & (np.diff(destination) == 1)
    assert len(found) == (1 + np.count_nonzero(~together) if num_tokens else 0)
    for column, expected in ((found.source, source), (found.destination, destination)):
        each = [np.arange(x, x + n) for x, n in zip(column, found.nbytes, strict=True)]
        assert np.concatenate([[], *each]).tolist() == expected.tolist()


def some_ids(draw, count: int) -> list[int]:
    """Blocks in any order, often runs of neighbours."""
    found = draw(st.permutations(range(1, NUM_BLOCKS)))
    return sorted(found[:count]) if draw(st.booleans()) else found[:count]


@settings(max_examples=examples(300), deadline=None)
@given(st.data(), SPANS, SPANS, st.sampled_from(ORDERS), st.sampled_from(ORDERS))
def test_copies_are_the_fewest_and_come_by_destination(data, s_span, d_span, one, other):
    num_tokens = data.draw(st.integers(0, min(s_span, d_span) * (NUM_BLOCKS - 1)))
    backwards = data.draw(st.booleans())
    way = plan_route(layout(s_span, one, layers_backwards=backwards), layout(d_span, other))
    ours, theirs = (some_ids(data.draw, -(-num_tokens // span)) for span in (s_span, d_span))
    check(way, ours, theirs, num_tokens)


@pytest.mark.parametrize(
    ("ours", "theirs", "num_copies"), [(1, 96, 3), (96, 1, 3), (96, 128, 3), (96, 96, 1)]
)
def test_rows_that_are_neighbours_on_both_sides_are_one_copy_only_if_as_far_apart(
    ours, theirs, num_copies
):
    sides = [layout(2, "BLNHC", row=row) for row in (ours, theirs)]
    found = plan_route(*sides).copies({0: Blocks.first([3, 4, 5])}, {0: Blocks.first([6, 7, 8])}, 6)
    assert len(found) == num_copies
    source, destination = np.random.default_rng(1).integers(0, 256, (2, 4096), np.uint8)
    for start, end, nbytes in zip(found.source, found.destination, found.nbytes, strict=True):
        destination[end : end + nbytes] = source[start : start + nbytes]
    here, there = addresses(sides[0], [3, 4, 5], 6), addresses(sides[1], [6, 7, 8], 6)
    assert destination[there].tolist() == source[here].tolist()


def test_lanes_that_go_on_in_the_next_block_and_those_that_do_not_are_all_copied():
    copies = Copies(*(np.array(column) for column in ([0, 8], [0, 8], [8, 4])))
    strides = np.array([8, 100])
    lanes = Lanes(
        tokens=1,
        copies=copies,
        source_stride=strides,
        destination_stride=strides,
        continues=np.array([True, False]),
    )
    ids = np.array([2, 3, 5])
    grid = Grid(lanes, ids, ids)
    found = grid.written_out()
    assert (len(grid), grid.nbytes) == (6, found.total)
    assert sorted(zip(found.source.tolist(), found.nbytes.tolist(), strict=True)) == [
        (16, 16),
        (40, 8),
        (208, 4),
        (308, 4),
        (508, 4),
    ]
    assert found.destination.tolist() == found.source.tolist()


@pytest.mark.parametrize("theirs", [[4, 5], [5, 4], [4, 7]])
def test_a_copy_goes_on_in_an_earlier_slot_where_layers_come_in_another_order(theirs):
    way = plan_route(layout(2, "BLNHC", layers_backwards=True), layout(4, "BLNHC"))
    for ours in permutations([5, 6, 7, 9], 4):
        check(way, list(ours), theirs, 8)
    found = way.copies({0: Blocks.first([6, 5])}, {0: Blocks.first([4])}, 4)
    assert len(found) == 3
