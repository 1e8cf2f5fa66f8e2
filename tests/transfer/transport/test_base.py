"""Spans: merged and cut without losing or moving a byte."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstow.transfer.transport.base import Spans, chunks, merged


@st.composite
def copies(draw: st.DrawFn) -> Spans:
    """Disjoint copies, some of them neighbours on both sides."""
    local, remote, rows = 100, 9000, []
    for _ in range(draw(st.integers(0, 12))):
        nbytes = draw(st.integers(1, 5))
        rows.append((local, remote, nbytes))
        local += nbytes + draw(st.sampled_from([0, 0, 3]))
        remote += nbytes + draw(st.sampled_from([0, 0, 3]))
    rows = draw(st.permutations(rows))
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    return Spans(*(np.ascontiguousarray(column) for column in columns))


def pairs(spans: Spans) -> set[tuple[int, int]]:
    """Which byte goes where."""
    rows = zip(spans.local.tolist(), spans.remote.tolist(), spans.nbytes.tolist(), strict=True)
    return {(a + i, b + i) for a, b, n in rows for i in range(n)}


@given(copies())
def test_merged_copies_are_the_same_copies_in_the_fewest_pieces(spans):
    fewer = merged(spans)
    assert pairs(fewer) == pairs(spans)
    ordered = sorted(pairs(spans))
    breaks = sum((b[0] - a[0], b[1] - a[1]) != (1, 1) for a, b in pairwise(ordered))
    assert len(fewer) == (breaks + 1 if ordered else 0)


def in_order(*parts: Spans) -> list[tuple[int, int]]:
    """Which byte goes where, copy after copy."""
    rows = [row for part in parts for row in zip(part.local.tolist(), part.remote.tolist(),
                                                 part.nbytes.tolist(), strict=True)]  # fmt: skip
    return [(a + i, b + i) for a, b, n in rows for i in range(n)]


@given(copies(), st.integers(1, 20))
def test_chunks_are_the_copies_in_order(spans, size):
    parts = chunks(spans, size)
    assert in_order(*parts) == in_order(spans)
    longest = min(size, max(spans.nbytes.tolist(), default=0))
    assert all(0 < part.total < size + longest for part in parts)
    if spans.total > size:
        assert all((part.nbytes <= size).all() for part in parts)


def test_one_long_copy_makes_as_many_chunks_as_short_ones():
    one = Spans(*(np.array([number]) for number in (0, 1 << 40, 1000)))
    assert [part.nbytes.tolist() for part in chunks(one, 300)] == [[250]] * 4
