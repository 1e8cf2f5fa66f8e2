"""How many pages of a prefix can be restored."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstow.adapters.sglang.hits import leading, restorable_pages, trailing
from kvstow.plan.retention import Full

pages = st.lists(st.booleans(), max_size=9)


@st.composite
def prefixes(draw: st.DrawFn):
    kv = draw(pages)
    same = st.lists(st.booleans(), min_size=len(kv), max_size=len(kv))
    needs = st.none() | st.integers(1, 4)
    return kv, draw(st.lists(st.tuples(same, needs), max_size=3))


def can_restore(length: int, kv: list[bool], pools: list[tuple[list[bool], int | None]]) -> bool:
    needed = [all(kv[:length])]
    for present, last in pools:
        first = 0 if last is None else max(0, length - last)
        needed.append(all(present[first:length]))
    return all(needed)


@given(prefixes())
def test_a_prefix_is_restorable_if_every_pool_has_what_it_needs_of_it(prefix):
    kv, pools = prefix
    others = {
        f"p{i}": (Full() if last is None else trailing(last), np.array(present, bool))
        for i, (present, last) in enumerate(pools)
    }
    found = restorable_pages(np.array(kv, bool), others)
    expected = [n for n in range(1, len(kv) + 1) if can_restore(n, kv, pools)]
    assert found.lengths == expected
    assert found.longest == max(expected, default=0)


@given(pages)
def test_leading_pages_end_before_the_first_that_is_absent(present):
    expected = [*present, False].index(False)
    assert leading(np.array(present, bool)) == expected


def test_a_pool_alone_may_reach_further_than_all_together():
    kv = np.ones(5, bool)
    states = trailing(1), np.array([0, 0, 1, 0, 1], bool)
    sparse = Full(), np.array([1, 1, 1, 1, 0], bool)
    found = restorable_pages(kv, {"mamba": states, "indexer": sparse})
    assert found.lengths == [3]
    assert found.by_pool == {"kv": 5, "mamba": 5, "indexer": 4}
