"""Which blocks meet, and which ids come after each other, against counting token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow.errors import BlockError
from kvstow.plan.group import grouped
from kvstow.plan.pack import Alignment, Site, packed
from kvstow.route import meeting
from kvstow.route.blocks import Blocks
from kvstow.route.lanes import Overlap
from kvstow.route.pairing import Listed, Tokens, ascending, listed
from kvstow.route.period import Pattern
from planning import attention

SPANS = st.integers(1, 9)


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
@given(st.data(), SPANS, SPANS, st.integers(0, 60), st.booleans(), st.sampled_from([1, 3, 1000]))
def test_blocks_with_a_common_token_are_a_pair(data, s_span, d_span, end, exact, at_once):
    tokens = Tokens(data.draw(st.integers(0, end)), end)
    source, destination = (side(data.draw, span, end) for span in (s_span, d_span))
    found = meeting.meeting(source, destination, tokens, exact=exact)
    got, missing = [], set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "AT_ONCE", at_once)
        for pairs, own, lacking in found.lots() if found else ():
            mine = pairs.some(own)
            got += [(s, d, found.kinds.overlaps[k]) for s, d, k in
                    zip(mine.source.tolist(), mine.destination.tolist(), mine.kind.tolist(),
                        strict=True)]  # fmt: skip
            missing |= set(zip(*lacking.tolist(), strict=True))
    expected, lost = met(source, destination, tokens, exact=exact)
    assert got == expected
    assert missing == set(lost)
    assert len(got) <= (found.most if found else 0)


@settings(max_examples=100, deadline=None)
@given(st.data(), SPANS, SPANS, st.integers(1, 60))
def test_a_lot_has_the_neighbours_of_its_pairs(data, s_span, d_span, end):
    source, destination = (side(data.draw, span, end) for span in (s_span, d_span))
    found = meeting.meeting(source, destination, Tokens(0, end), exact=True)
    blocks = {(s, d) for s, d, _ in met(source, destination, Tokens(0, end), exact=True)[0]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "AT_ONCE", 2)
        for pairs, own, _ in found.lots() if found else ():
            near = set(zip(pairs.source.tolist(), pairs.destination.tolist(), strict=True))
            mine = pairs.some(own)
            for s, d in zip(mine.source.tolist(), mine.destination.tolist(), strict=True):
                around = {(s + i, d + j) for i in (-1, 0, 1) for j in (-1, 0, 1)}
                assert around & blocks <= near


@given(st.lists(st.integers(0, 1 << 62), max_size=40, unique=True), st.sampled_from([6, 40, 62]))
def test_ids_are_sorted_with_their_places_however_large_they_are(numbers, bits):
    array = np.unique(np.array(numbers, np.int64) % (1 << bits))
    array = np.random.default_rng(len(array)).permutation(array)
    found, places = ascending(array, 1 << bits)
    assert places.tolist() == np.argsort(array).tolist()
    assert (found == array[places]).all()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 9), st.integers(0, 50))
def test_a_pattern_goes_on_with_a_step(values, step, number):
    values = [value - values[0] for value in values]
    turn, i = divmod(number, len(values))
    assert Pattern.of(values, step).at(np.array([number])).tolist() == [values[i] + turn * step]


@pytest.mark.parametrize("num_slabs", [12, 4000])
def test_ids_named_twice_are_refused_in_small_and_in_large_pools(num_slabs):
    layout = packed(grouped([attention("layers.0")]), num_slabs=num_slabs,
                    site=Site(alignment=Alignment(page=1, row=1, base=64)))  # fmt: skip
    with pytest.raises(BlockError, match="source group 'full': blocks 3, 7 are named twice"):
        listed(layout, 0, Blocks.first([3, 7, 5, 3, 7]), "source")
    assert listed(layout, 0, Blocks.first([3, 7, 5]), "source").ids.tolist() == [3, 7, 5]
    with pytest.raises(BlockError, match=f"blocks 0, {num_slabs} are not among its {num_slabs}"):
        listed(layout, 0, Blocks.first([0, num_slabs, 5]), "source")
