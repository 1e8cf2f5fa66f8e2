"""Copies of one pair of blocks: what may become one copy with its neighbour."""

import numpy as np
import pytest

from kvstow.route.copies import Copies
from kvstow.route.lanes import FreeAround, continued

TEN = np.full(3, 10, np.int64)
AT = np.array([0, 15, 30], np.int64)
"""Three copies of ten bytes, five bytes apart on both sides."""


def free(**some: list[int]) -> FreeAround:
    """So many bytes are free around three kinds of copies; 9 where nothing is said."""
    around = {name: np.full(3, 9, np.int64) for name in FreeAround._fields}
    around |= {name: np.array(values, np.int64) for name, values in some.items()}
    return FreeAround(**around)


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize(
    ("after", "before", "expected"),
    [
        ([5, 0, 0], [0, 0, 5], [True, True]),
        ([4, 0, 0], [0, 1, 5], [True, True]),
        ([4, 0, 0], [0, 0, 5], [False, True]),
        ([0, 0, 9], [5, 0, 0], [False, False]),
        ([5, 4, 9], [9, 0, 0], [True, False]),
    ],
)
def test_the_gap_must_be_free_behind_the_one_and_before_the_next(side, after, before, expected):
    around = free(**{f"{side}_after": after, f"{side}_before": before})
    found = continued(Copies(AT, AT + 100, TEN), np.arange(3), around)
    assert found.tolist() == expected


def test_the_kinds_of_the_copies_say_what_is_free():
    around = free(source_after=[5, 0, 0], source_before=[0, 0, 5])
    found = continued(Copies(AT, AT, TEN), np.array([1, 2, 0]), around)
    assert found.tolist() == [True, False]


def test_copies_at_unequal_distances_or_one_before_the_other_are_not_joined():
    wide = np.array([0, 16, 31], np.int64)
    assert continued(Copies(AT, wide, TEN), np.arange(3), free()).tolist() == [False, True]
    back = AT[::-1].copy()
    assert continued(Copies(back, back, TEN), np.arange(3), free()).tolist() == [False, False]
