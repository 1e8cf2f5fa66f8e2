"""Free slabs are found by level as if every slab were looked at."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstow.blocks.rows import SEGMENT, FreeSlabs
from kvstow.blocks.runs import ids_at, num_at

NUM_LEVELS = 5


@st.composite
def free_slabs(draw: st.DrawFn) -> tuple[FreeSlabs, dict[int, int]]:
    """Slabs of several segments, and the level of each as a dictionary."""
    num_slabs = draw(st.integers(1, 4 * SEGMENT))
    made, model = FreeSlabs(num_slabs, NUM_LEVELS), {}
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, num_slabs - 1))
        step = draw(st.sampled_from([1, 2, 7, 300, 1500]))
        slabs = np.arange(start, num_slabs, step)[: draw(st.integers(1, 2000))]
        levels = (slabs * draw(st.integers(0, 9)) + draw(st.integers(0, 9))) % (NUM_LEVELS + 1)
        made.move(slabs, levels)
        model |= dict(zip(slabs.tolist(), levels.tolist(), strict=True))
    return made, model


@given(free_slabs(), st.integers(1, NUM_LEVELS), st.integers(1, NUM_LEVELS), st.integers(1, 3000))
def test_the_lowest_and_highest_slabs_are_found(given, low: int, high: int, count: int) -> None:
    made, model = given
    wanted = sorted(slab for slab, level in model.items() if low <= level <= high)
    assert made.lowest(range(low, high + 1), count).tolist() == wanted[:count]
    assert made.highest(range(low, high + 1), count).tolist() == wanted[::-1][:count]


@given(free_slabs(), st.integers(1, NUM_LEVELS), st.integers(1, 3000))
def test_as_many_slabs_as_there_are_can_be_had(given, level: int, count: int) -> None:
    made, model = given
    wanted = {slab for slab, at in model.items() if at == level}
    assert made.totals[level] == len(wanted)
    for where in (made.side_by_side(level, count), made.scattered(level, count)):
        ids = ids_at(where)
        assert num_at(where) == len(ids) == min(count, len(wanted))
        assert set(ids.tolist()) <= wanted
        assert (ids[1:] > ids[:-1]).all()


def test_an_untouched_segment_gives_one_run_from_its_beginning() -> None:
    made = FreeSlabs(3 * SEGMENT, 1)
    made.add(slice(5, 3 * SEGMENT), 1)
    assert made.side_by_side(1, SEGMENT) == slice(SEGMENT, 2 * SEGMENT)
