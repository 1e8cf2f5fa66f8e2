"""Free slabs are found by level as if every slab were looked at; runs are few."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstow.blocks.rows import SEGMENT, FreeSlabs, fewest_runs, num_runs

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
    assert made.search(range(low, high + 1), count).tolist() == wanted[:count]
    assert made.search(range(low, high + 1), count, from_top=True).tolist() == wanted[::-1][:count]


@given(free_slabs(), st.integers(1, NUM_LEVELS), st.integers(1, 3000))
def test_as_many_slabs_as_there_are_can_be_had(given, level: int, count: int) -> None:
    made, model = given
    wanted = {slab for slab, at in model.items() if at == level}
    assert made.totals[level] == len(wanted)
    for ids in (made.side_by_side(level, count), made.scattered(level, count)):
        assert len(ids) == min(count, len(wanted))
        assert set(ids.tolist()) <= wanted
        assert (ids[1:] > ids[:-1]).all()


def test_an_untouched_segment_gives_one_run_from_its_beginning() -> None:
    made = FreeSlabs(3 * SEGMENT, 1)
    made.move(np.arange(5, 3 * SEGMENT), 1)
    assert made.side_by_side(1, SEGMENT).tolist() == list(range(SEGMENT, 2 * SEGMENT))


# ── runs ──────────────────────────────────────────────────────────────────────────────


def test_a_hold_that_fits_nowhere_takes_the_longest_runs() -> None:
    assert fewest_runs(np.array([1, 2, 3, 7, 9, 10, 11, 12]), 6).tolist() == [1, 2, 9, 10, 11, 12]
    assert fewest_runs(np.array([4]), 1).tolist() == [4]
    assert fewest_runs(np.array([4, 6]), 2).tolist() == [4, 6]


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 70))
def test_the_longest_runs_are_taken_and_no_more_than_asked_for(
    chosen: set[int], count: int
) -> None:
    ids = np.array(sorted(chosen))
    lengths = sorted(
        (len(run) for run in np.split(ids, np.nonzero(np.diff(ids) != 1)[0] + 1)), reverse=True
    )
    some = fewest_runs(ids, count)
    assert set(some.tolist()) <= chosen
    assert len(some) == min(count, len(ids))
    assert (some[1:] > some[:-1]).all()
    assert num_runs(some) == next(
        (n for n in range(1, len(lengths)) if sum(lengths[:n]) >= count), len(lengths)
    )
