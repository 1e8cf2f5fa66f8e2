"""FreeSlabs: what lies where, found by kind, as if every item were looked at."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstow.blocks.rows import SEGMENT, FreeSlabs
from kvstow.blocks.runs import ids_at, num_at

NUM_SHELVES = 5


@st.composite
def shelves(draw: st.DrawFn) -> tuple[FreeSlabs, dict[int, int]]:
    """FreeSlabs of several segments, and what lies where as a dictionary."""
    num_items = draw(st.integers(1, 4 * SEGMENT))
    made, model = FreeSlabs(num_items, NUM_SHELVES), {}
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, num_items - 1))
        step = draw(st.sampled_from([1, 2, 7, 300, 1500]))
        items = np.arange(start, num_items, step)[: draw(st.integers(1, 2000))]
        kinds = (items * draw(st.integers(0, 9)) + draw(st.integers(0, 9))) % (NUM_SHELVES + 1)
        made.move(items, kinds)
        model |= dict(zip(items.tolist(), kinds.tolist(), strict=True))
    return made, model


@given(shelves(), st.integers(1, NUM_SHELVES), st.integers(1, NUM_SHELVES), st.integers(1, 3000))
def test_the_lowest_and_highest_items_are_found(given, low: int, high: int, count: int) -> None:
    made, model = given
    wanted = sorted(item for item, kind in model.items() if low <= kind <= high)
    assert made.lowest(range(low, high + 1), count).tolist() == wanted[:count]
    assert made.highest(range(low, high + 1), count).tolist() == wanted[::-1][:count]


@given(shelves(), st.integers(1, NUM_SHELVES), st.integers(1, 3000))
def test_as_many_items_as_there_are_can_be_had(given, kind: int, count: int) -> None:
    made, model = given
    lying = {item for item, on in model.items() if on == kind}
    assert made.totals[kind] == len(lying)
    for where in (made.side_by_side(kind, count), made.scattered(kind, count)):
        ids = ids_at(where)
        assert num_at(where) == len(ids) == min(count, len(lying))
        assert set(ids.tolist()) <= lying
        assert (ids[1:] > ids[:-1]).all()


def test_an_untouched_segment_gives_one_run_from_its_beginning() -> None:
    made = FreeSlabs(3 * SEGMENT, 1)
    made.put(slice(5, 3 * SEGMENT), 1)
    assert made.side_by_side(1, SEGMENT) == slice(SEGMENT, 2 * SEGMENT)
