"""An index behaves like a dictionary, less what found no room and was said to have none."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstow.blocks.prefix import WIDTH, PrefixIndex

NUM_ROWS = 40
BUCKETS = st.sampled_from([0, 1, 2, 31])
HASHES = st.builds(
    lambda column, high, bucket: (column << 61) | (high << 32) | bucket,
    st.integers(0, WIDTH - 1),
    st.integers(1, 1 << 24),
    BUCKETS,
)
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "remove"]), st.lists(HASHES, unique=True, max_size=30),
              st.permutations(range(NUM_ROWS))),
    max_size=12,
)  # fmt: skip


def asked(index: PrefixIndex, hashes: list[int]) -> list[int]:
    return index.find(np.array(hashes, np.uint64)).tolist()


@given(STEPS)
def test_an_index_finds_what_a_dictionary_would(steps) -> None:
    """Four first buckets for all hashes: most are not at their usual place, many not in
    their first bucket, and some find both full."""
    index, rows_of, seen = PrefixIndex(NUM_ROWS), {}, set()
    for number, (what, hashes, order) in enumerate(steps):
        seen |= set(hashes)
        if what == "remove":
            gone = [h for h in rows_of if rows_of[h] in order[: len(hashes)]]
            rows = np.array([rows_of.pop(h) for h in gone], np.int64)
            assert index.remove(rows).tolist() == gone
            assert (index.witness[rows] == -1).all()
        else:
            rows = order[: len(hashes)]
            new = [h not in rows_of and r not in rows_of.values()
                   for h, r in zip(hashes, rows, strict=True)]  # fmt: skip
            array = np.array(hashes, np.uint64)
            added = index.add(np.array(rows, np.int64), array, number).tolist()
            for h, row, could, did in zip(hashes, rows, new, added, strict=True):
                assert could or not did
                if did:
                    rows_of[h] = row
                    assert index.witness[row] == number
        assert asked(index, sorted(seen)) == [rows_of.get(h, -1) for h in sorted(seen)]
        has = index.has(np.arange(NUM_ROWS)).tolist()
        assert has == [row in rows_of.values() for row in range(NUM_ROWS)]


@given(st.lists(HASHES, unique=True, min_size=1, max_size=NUM_ROWS))
def test_a_hash_is_turned_away_only_when_both_its_buckets_are_full(hashes: list[int]) -> None:
    index = PrefixIndex(NUM_ROWS)
    array = np.array(hashes, np.uint64)
    added = index.add(np.arange(len(hashes)), array, 0)
    kept = np.array(hashes, np.uint64)[added]
    if not added.all():
        assert added.sum() >= 2 * WIDTH
    if len(hashes) <= WIDTH:
        assert added.all()
    assert np.array_equal(np.sort(index.remove(index.find(kept))), np.sort(kept))
    assert (index.find(array) == -1).all()
