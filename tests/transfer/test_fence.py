"""Fence rounds: every block's counter is read once, into its place, whatever the ids."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstow.transfer.fence import ENTRY, SLOT_ENTRIES, fence_rounds

TABLES = (1 << 20, 1 << 24)
IDS = st.one_of(
    st.lists(st.integers(0, 50), unique=True, max_size=12),
    st.lists(st.integers(0, 299_999), unique=True, max_size=60),
    st.integers(1, 9000).map(lambda n: list(range(0, 31 * n, 31))),
)


def read(rounds, counters):
    """What a transport would do: copy the pieces of one round into a slot."""
    for one in rounds:
        assert int(one.nbytes.sum()) <= SLOT_ENTRIES * ENTRY
        slot = np.full(SLOT_ENTRIES, -7, np.int64)
        for remote, local, nbytes in zip(one.remote, one.local, one.nbytes, strict=True):
            group = 1 if remote >= TABLES[1] else 0
            first = (int(remote) - TABLES[group]) // ENTRY
            assert local % ENTRY == 0
            count = int(nbytes) // ENTRY
            at = int(local) // ENTRY
            assert (slot[at : at + count] == -7).all()
            slot[at : at + count] = counters[group][first : first + count]
        yield one, slot


@given(IDS, IDS, st.data())
def test_exactly_the_blocks_whose_counters_moved_are_found(first, second, data):
    ids = {0: np.array(first, np.int64), 1: np.array(second, np.int64)}
    counters = [np.arange(300_000, dtype=np.int64) * 3 + g for g in range(2)]
    expected = {g: counters[g][listed] for g, listed in ids.items()}
    moved = {
        g: set(data.draw(st.lists(st.sampled_from(listed.tolist()), max_size=4)))
        for g, listed in ids.items()
        if len(listed)
    }
    for g, blocks in moved.items():
        for block in blocks:
            counters[g][block] += 1
    found = {g: set() for g in moved}
    seen = {0: [], 1: []}
    for one, slot in read(fence_rounds(TABLES, ids, expected), counters):
        for g, blocks in one.changed(slot).items():
            found[g] |= set(blocks)
        for g, block in zip(one.groups.tolist(), one.ids.tolist(), strict=True):
            seen[g].append(block)
    assert found == moved
    assert {g: sorted(blocks) for g, blocks in seen.items()} == {
        g: sorted(listed.tolist()) for g, listed in ids.items()
    }


def test_neighbours_are_read_in_one_piece():
    ids = {0: np.array([7, 4, 5, 900, 901], np.int64)}
    (one,) = fence_rounds(TABLES, ids, {0: np.zeros(5, np.int64)})
    assert one.nbytes.tolist() == [4 * ENTRY, 2 * ENTRY]


def test_no_blocks_need_no_reads():
    empty = np.zeros(0, np.int64)
    assert fence_rounds(TABLES, {0: empty}, {0: empty}) == []
