"""Copies: merged, cut and dealt out without losing or moving a byte."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstow.route.copies import Copies, chunks, cut


@st.composite
def copies(draw: st.DrawFn) -> Copies:
    """Disjoint copies, some of them neighbours on both sides."""
    source, destination, rows = 9000, 100, []
    for _ in range(draw(st.integers(0, 12))):
        nbytes = draw(st.integers(1, 5))
        rows.append((source, destination, nbytes))
        source += nbytes + draw(st.sampled_from([0, 0, 3]))
        destination += nbytes + draw(st.sampled_from([0, 0, 3]))
    return of(*draw(st.permutations(rows)))


def of(*rows: tuple[int, int, int]) -> Copies:
    return Copies(*np.array(rows, np.int64).reshape(-1, 3).T)


def in_order(*parts: Copies) -> list[tuple[int, int]]:
    """Which byte goes where, copy after copy."""
    return [
        (int(source) + i, int(destination) + i)
        for part in parts
        for source, destination, nbytes in zip(
            part.source, part.destination, part.nbytes, strict=True
        )
        for i in range(int(nbytes))
    ]


@given(copies(), st.sampled_from(["source", "destination"]))
def test_merged_copies_are_the_same_copies_in_the_fewest_pieces(some, by):
    fewer = some.merged(by=by)
    assert sorted(in_order(fewer)) == sorted(in_order(some))
    ordered = sorted(in_order(some))
    breaks = sum((b[0] - a[0], b[1] - a[1]) != (1, 1) for a, b in pairwise(ordered))
    assert len(fewer) == (breaks + 1 if ordered else 0)
    assert (np.diff(getattr(fewer, by)) > 0).all()


@given(copies(), st.integers(1, 7))
def test_cut_copies_are_the_same_copies_none_too_long(some, most):
    pieces = cut(some, most)
    assert in_order(pieces) == in_order(some)
    assert all(0 < nbytes <= most for nbytes in pieces.nbytes.tolist())
    assert len(pieces) == sum(-(-nbytes // most) for nbytes in some.nbytes.tolist())


@given(copies(), st.integers(1, 20))
def test_chunks_are_the_copies_in_order(some, size):
    parts = chunks(some, size)
    assert in_order(*parts) == in_order(some)
    longest = min(size, max(some.nbytes.tolist(), default=0))
    assert all(0 < part.total < size + longest for part in parts)
    if some.total > size:
        assert all((part.nbytes <= size).all() for part in parts)


@given(copies(), st.integers(0, 12), st.integers(0, 12))
def test_parts_put_together_again_are_the_whole(some, one, other):
    lo, hi = sorted((min(one, len(some)), min(other, len(some))))
    parts = [some.part(0, lo), some.part(lo, hi), some.part(hi, len(some))]
    assert in_order(Copies.joined(parts)) == in_order(some)
    assert sum(part.total for part in parts) == some.total == len(in_order(some))


def test_copies_are_moved_to_addresses_and_reversed():
    there = of((1, 2, 3), (10, 20, 30)).moved(100, 1000)
    assert in_order(there) == [
        (100 + s, 1000 + d) for s, d in in_order(of((1, 2, 3), (10, 20, 30)))
    ]
    assert in_order(there.reversed()) == [(d, s) for s, d in in_order(there)]
