"""Runs: few of them, the longest or the tightest."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstow.blocks.runs import fewest_runs, num_runs


def test_a_hold_that_fits_nowhere_takes_the_longest_runs() -> None:
    assert fewest_runs(np.array([1, 2, 3, 7, 9, 10, 11, 12]), 6).tolist() == [1, 2, 9, 10, 11, 12]
    assert fewest_runs(np.array([4]), 1).tolist() == [4]
    assert fewest_runs(np.array([4, 6]), 2).tolist() == [4, 6]


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 70), st.integers(1, 9))
def test_the_longest_runs_are_taken_and_no_more_than_asked_for(
    chosen: set[int], count: int, most: int
) -> None:
    ids = np.array(sorted(chosen))
    lengths = sorted(
        (len(run) for run in np.split(ids, np.nonzero(np.diff(ids) != 1)[0] + 1)), reverse=True
    )
    some = fewest_runs(ids, count, most=most)
    assert set(some.tolist()) <= chosen
    assert len(some) == min(count, sum(lengths[:most]))
    assert num_runs(some) <= most
    assert (some[1:] > some[:-1]).all()
    every = fewest_runs(ids, count)
    assert len(every) == min(count, len(ids))
    assert num_runs(every) == next(
        (n for n in range(1, len(lengths)) if sum(lengths[:n]) >= count), len(lengths)
    )
