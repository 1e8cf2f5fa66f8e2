"""Law: the branch for equal rows makes the copies that the expander makes."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import strategies
from examples import examples
from kvstow.plan.alignment import Alignment
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.pack import Site, packed
from kvstow.route.blocks import Blocks, Tokens
from kvstow.route.copies import Copies
from kvstow.route.expand import BlockPairs, EqualRows, block_pairs, expanded
from kvstow.route.lanes import FreeAround, Lanes
from kvstow.route.route import GroupPair, route
from planning import attention

NUM_ROWS = 24
BLOCK_TOKENS = 4

quick = settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.data_too_large,
    ],
)


def triples(copies: Copies) -> list[tuple[int, int, int]]:
    columns = copies.source.tolist(), copies.destination.tolist(), copies.nbytes.tolist()
    return list(zip(*columns, strict=True))


def check(pair: GroupPair, ours: Blocks, theirs: Blocks, tokens: Tokens, *, exact: bool) -> bool:
    """Whether the branch was taken; if it was, that the copies are the expander's."""
    found = pair.equal_rows and pair.equal_rows.copies(ours, theirs, tokens, exact=exact)
    if found is None:
        return False
    pairs = block_pairs(ours, theirs, tokens, pair.spans, pair.last_ids, exact=exact)
    assert triples(found) == triples(expanded(pairs, [pair.lanes(kind) for kind in pairs.overlaps]))
    return True


@quick
@given(st.data())
def test_rows_of_any_model_are_copied_like_their_lanes(data: st.DataObject) -> None:
    model = data.draw(strategies.models())
    num_tokens = data.draw(st.integers(1, 40))
    how = data.draw(strategies.served(model, most_tokens=8))
    layout = how.layout(model, 0, 0, num_tokens)
    assume(layout.nbytes <= 1 << 21)
    ours, theirs = (data.draw(strategies.listed(layout, num_tokens)) for _ in range(2))
    tokens = Tokens(data.draw(st.integers(0, num_tokens - 1)), num_tokens)
    for pair in route(layout, layout).pairs:
        mine = tokens.of(pair.destination)
        exact = data.draw(st.booleans())
        check(pair, ours[pair.groups[0]], theirs[pair.groups[1]], mine, exact=exact)


def rows(row_align: int = 1, order: str = "BLHNC") -> Layout:
    layers = [attention(f"layers.{i}", tokens=BLOCK_TOKENS) for i in range(2)]
    site = Site(order=order, alignment=Alignment(page=1, row=row_align, base=256))
    return packed(grouped(layers), num_slabs=NUM_ROWS, site=site)


BLOCKS = st.tuples(
    st.permutations(range(1, NUM_ROWS)), st.integers(0, 5), st.integers(1, 12), st.booleans()
).map(
    lambda drawn: Blocks(
        np.array(sorted(drawn[0][: drawn[2]]) if drawn[3] else drawn[0][: drawn[2]], np.int64),
        np.arange(drawn[1], drawn[1] + drawn[2]),
    )
)
PACKED = {
    (align, order): route(rows(align, order), rows(align, order)).pairs[0]
    for align in (1, 48, 256)
    for order in ("BLHNC", "BLNHC", "BHLNC")
}


@quick
@given(
    st.sampled_from(sorted(PACKED)),
    BLOCKS,
    BLOCKS,
    st.integers(0, 8),
    st.integers(1, 12 * 4),
    st.booleans(),
)
def test_packed_rows_of_any_lists_are_copied_like_their_lanes(
    which, ours, theirs, first_block, end, exact
):
    first = first_block * BLOCK_TOKENS
    if first < end:
        check(PACKED[which], ours, theirs, Tokens(first, end), exact=exact)


@pytest.mark.parametrize("which", sorted(PACKED))
@pytest.mark.parametrize("unfilled", [0, 1])
def test_packed_rows_take_the_branch_whether_the_last_is_full_or_not(which, unfilled):
    pair, ids = PACKED[which], np.arange(1, NUM_ROWS)
    end = len(ids) * BLOCK_TOKENS - unfilled
    for blocks in (Blocks.first(ids), Blocks.first(ids[::-1])):
        for first in (0, 2 * BLOCK_TOKENS):
            assert check(pair, blocks, blocks, Tokens(first, end), exact=False)
    copies = pair.copies(Blocks.first(ids), Blocks.first(ids), Tokens(0, end), exact=False)
    assert len(copies) == 1


def test_layer_compact_layouts_have_no_equal_rows():
    assert route(rows(order="LBHNC"), rows(order="LBHNC")).pairs[0].equal_rows is None


def test_rows_of_unequal_tokens_are_not_equal_though_they_lie_at_equal_strides():
    def padded(tokens: int) -> Layout:
        layers = [attention(f"layers.{i}", tokens=tokens) for i in range(2)]
        site = Site(order="BLHNC", alignment=Alignment(page=1, row=4096, base=4096))
        return packed(grouped(layers), num_slabs=NUM_ROWS, site=site)

    short, long = padded(4), padded(8)
    assert short.row_stride(0) == long.row_stride(0)
    for one, other in ((short, long), (long, short)):
        assert route(one, other).pairs[0].equal_rows is None
    pair = route(long, long).pairs[0]
    assert pair.equal_rows is not None
    for spans in ((4, 8), (8, 4)):
        assert EqualRows.of(pair.lanes, spans, pair.last_ids) is None


@pytest.mark.parametrize("side", [0, 1])
def test_ids_that_two_do_not_fit_into_a_number_take_the_other_branch(side):
    pair = PACKED[1, "BLHNC"]
    for last, is_taken in ((2**31 - 2, True), (2**31 - 1, False), (2**40, False)):
        last_ids = (last, 5) if side == 0 else (5, last)
        found = EqualRows.of(pair.lanes, pair.spans, last_ids)
        assert (found is not None) == is_taken, last


def test_no_pairs_make_no_copies():
    none = np.zeros(0, np.int64)
    assert triples(expanded(BlockPairs(none, none, none, ()), [])) == []


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize(("source", "destination"), [(6, 6), (5, 6), (6, 5), (0, 6), (6, 0)])
def test_rows_are_equal_where_what_lies_between_them_is_free_on_both_sides(
    source, destination, before
):
    def one(number: int) -> np.ndarray:
        return np.array([number], np.int64)

    free = FreeAround(one(source - before), one(before), one(destination - before), one(before))
    lanes = Lanes(
        tokens=4,
        copies=Copies(one(0), one(64), one(10)),
        source_stride=one(16),
        destination_stride=one(16),
        free=free,
    )
    found = EqualRows.of(lambda overlap: lanes, (4, 4), (9, 9))
    assert (found is not None) == (source == destination == 6)
