"""Slab histories: evenly spread moments, however long it runs."""

import itertools

from block_layouts import HYBRID, packed_layout
from kvstow.blocks.pool import Pool
from kvstow.render.data import MAX_MOMENTS, SlabHistory


def test_a_history_keeps_evenly_spread_moments_of_any_length():
    pool, history = Pool(packed_layout(HYBRID, 9)), SlabHistory()
    for moment in range(5 * MAX_MOMENTS):
        history.see(pool, float(moment), prompt_tokens=4, hit_tokens=1)
    seconds = history.record()["seconds"]
    assert MAX_MOMENTS / 2 <= len(seconds) <= MAX_MOMENTS
    assert len({b - a for a, b in itertools.pairwise(seconds)}) == 1
    assert set(history.record()["hit_rate"]) == {0.25}


def test_a_history_of_nothing_is_empty():
    assert SlabHistory().record()["slabs"] == []
