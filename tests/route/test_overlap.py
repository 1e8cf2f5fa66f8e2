"""What two ranks both hold, against counting: units of an axis, and bits of a field."""

from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from kvstow.plan.spec import DType, Extent, Field
from kvstow.route.copies import Copies
from kvstow.route.overlap import Interval, common, content_bits


@st.composite
def extents(draw: st.DrawFn, total: int) -> Extent:
    cuts = sorted(draw(st.sets(st.integers(0, total), min_size=2, max_size=6)))
    pieces = tuple(pairwise(cuts))[:: draw(st.integers(1, 2))]
    return Extent("axis", total, pieces)


def held(extent: Extent) -> list[int]:
    """Places on the whole axis, as they lie in memory."""
    return [place for piece in extent.pieces for place in range(*piece)]


def pairs(copies: Copies) -> list[tuple[int, int]]:
    """Every unit that is copied: from where, and to where."""
    columns = copies.source.tolist(), copies.destination.tolist(), copies.nbytes.tolist()
    return [(s + i, d + i) for s, d, size in zip(*columns, strict=True) for i in range(size)]


def runs(units: list[tuple[int, int]]) -> int:
    return sum(b != (a[0] + 1, a[1] + 1) for a, b in pairwise(units)) + bool(units)


@given(st.data(), st.integers(1, 12))
def test_what_both_hold_of_an_axis_is_what_both_list(data, total):
    here, there = data.draw(extents(total)), data.draw(extents(total))
    low, high = sorted((data.draw(st.integers(0, total)), data.draw(st.integers(0, total))))
    spans = common(here, there, (low, high))
    places = held(here)
    wanted = [(places.index(p), i) for i, p in enumerate(held(there)) if p in places]
    wanted = [pair for pair in wanted if low <= places[pair[0]] < high]
    assert pairs(spans) == wanted
    assert len(spans) == runs(wanted)


@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.booleans())
def test_what_both_hold_of_a_field_is_what_both_list_bit_by_bit(data, totals, has_box):
    sides = [
        Field("k", DType.UINT8, tuple(data.draw(extents(2 * total)) for total in totals))
        for _ in range(2)
    ]
    box: tuple[Interval, ...] | None = None
    if has_box:
        box = tuple((0, data.draw(st.integers(1, 2 * total))) for total in totals)
    places = [list(product(*map(held, side.axes))) for side in sides]
    wanted = [
        (8 * places[0].index(at) + bit, 8 * i + bit)
        for i, at in enumerate(places[1])
        if at in places[0] and all(x < end for x, (_, end) in zip(at, box or (), strict=False))
        for bit in range(8)
    ]
    spans = content_bits(*sides, box)
    assert pairs(spans) == wanted
    assert len(spans) == runs(wanted)
