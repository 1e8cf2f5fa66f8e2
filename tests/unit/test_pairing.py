"""Which blocks meet, and which pairs lie next to each other, against counting token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow.errors import BlockError
from kvstow.plan.align import Alignment, Site
from kvstow.plan.blocklist import Blocks
from kvstow.plan.group import grouped
from kvstow.plan.joining import links
from kvstow.plan.lanes import Overlap
from kvstow.plan.pack import packed
from kvstow.plan.pairing import Listed, Pairs, Tokens, by_number, listed, pairs
from kvstow.plan.route import route
from planning import attention

SPANS = st.integers(1, 9)
LAYOUT = packed(grouped([attention("layers.0")]), num_slabs=12,
                site=Site(alignment=Alignment(page=1, row=1, base=64)))  # fmt: skip
OPEN = route(LAYOUT, LAYOUT).lanes
"""Lanes of whole rows: each may be continued, and may continue another."""


def side(draw, span: int, end: int) -> Listed:
    """Some of the blocks of a request, ids in any order."""
    count = -(-end // span) + 1
    held = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    index = np.flatnonzero(held) if draw(st.booleans()) else np.arange(draw(st.integers(0, count)))
    ids = draw(st.permutations(range(2 * count)))[: len(index)]
    return Listed(ids=np.array(ids, np.int64), end_id=2 * count, index=index, span=span)


def met(source: Listed, destination: Listed, tokens: Tokens, *, exact: bool):
    """Pairs and what is missing, token by token."""
    here, there = (dict(zip(x.index.tolist(), x.ids.tolist(), strict=True))
                   for x in (source, destination))  # fmt: skip
    found: dict[tuple[int, int], list[int]] = {}
    for token in range(tokens.first, tokens.end):
        blocks = token // source.span, token // destination.span
        if blocks[1] in there:
            found.setdefault(blocks, []).append(token)
    pairs, missing = [], []
    for (s, d), held in found.items():
        if s not in here:
            missing.append((d, held[0], held[-1] + 1))
            continue
        filled = [x.span if exact else min(x.span, tokens.end - block * x.span)
                  for x, block in ((source, s), (destination, d))]  # fmt: skip
        overlap = Overlap(held[0] - s * source.span, held[0] - d * destination.span, len(held),
                          *filled)  # fmt: skip
        pairs.append((there[d], held[0], here[s], overlap))
    return [(s, d, overlap) for d, _, s, overlap in sorted(pairs)], missing


@settings(max_examples=300, deadline=None)
@given(st.data(), SPANS, SPANS, st.integers(0, 60), st.booleans())
def test_blocks_with_a_common_token_are_a_pair(data, s_span, d_span, end, exact):
    tokens = Tokens(data.draw(st.integers(0, end)), end)
    source, destination = (side(data.draw, span, end) for span in (s_span, d_span))
    found, missing = pairs(source, destination, tokens, exact=exact)
    expected, lost = met(source, destination, tokens, exact=exact)
    got = [(s, d, found.kinds[k]) for s, d, k in
           zip(found.source.tolist(), found.destination.tolist(), found.kind.tolist(),
               strict=True)]  # fmt: skip
    assert got == expected
    assert list(zip(*missing.tolist(), strict=True)) == lost
    assert max(np.bincount(found.destination), default=0) <= max(found.most, 0)


@settings(max_examples=300, deadline=None)
@given(st.data(), SPANS, SPANS, st.integers(0, 60))
def test_every_neighbour_of_a_pair_is_found(data, s_span, d_span, end):
    source, destination = (side(data.draw, span, end) for span in (s_span, d_span))
    found, _ = pairs(source, destination, Tokens(0, end), exact=True)
    if not len(found):
        return
    near = links(found, OPEN)
    got = set(zip(near.before.tolist(), near.after.tolist(), strict=True))
    blocks = list(zip(found.source.tolist(), found.destination.tolist(), strict=True))
    place = {pair: i for i, pair in enumerate(blocks)}
    steps = [((s, d), (s + i, d + j)) for s, d in blocks for i, j in ((0, 1), (1, 0), (1, 1))]
    assert got == {(place[a], place[b]) for a, b in steps if b in place}
    assert len(near.before) == len(got)


def test_neighbours_are_found_across_the_stretches_in_which_they_are_looked_for():
    ids = np.arange(1, 40_000)
    overlap = Overlap(0, 0, 1, 1, 1)
    found = Pairs(source=ids, destination=ids, kind=np.zeros(len(ids), np.int32),
                  kinds=(overlap,), most=1)  # fmt: skip
    near = links(found, OPEN)
    assert near.before.tolist() == list(range(len(ids) - 1))
    assert (near.after == near.before + 1).all()
    assert near.straight.all()


@given(st.lists(st.integers(0, 1 << 62), max_size=40), st.sampled_from([40, 62]))
def test_numbers_are_sorted_with_their_places_however_large_they_are(numbers, bits):
    array = np.array(numbers, np.int64) % (1 << bits)
    ascending, order = by_number(array, 1 << bits)
    assert order.tolist() == sorted(range(len(array)), key=lambda i: (array[i], i))
    assert (ascending == array[order]).all()


@pytest.mark.parametrize("num_slabs", [12, 4000])
def test_ids_named_twice_are_refused_in_small_and_in_large_pools(num_slabs):
    layout = packed(grouped([attention("layers.0")]), num_slabs=num_slabs,
                    site=Site(alignment=Alignment(page=1, row=1, base=64)))  # fmt: skip
    with pytest.raises(BlockError, match="source group 'full': blocks 3, 7 are named twice"):
        listed(layout, 0, Blocks.first([3, 7, 5, 3, 7]), "source")
    assert listed(layout, 0, Blocks.first([3, 7, 5]), "source").ids.tolist() == [3, 7, 5]
    with pytest.raises(BlockError, match=f"blocks 0, {num_slabs} are not among its {num_slabs}"):
        listed(layout, 0, Blocks.first([0, num_slabs, 5]), "source")
