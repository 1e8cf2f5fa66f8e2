"""Slab histories: evenly spread moments, however long it runs."""

import itertools

from block_layouts import HYBRID, packed_layout
from kvstow.render.data import MAX_MOMENTS, SlabHistory
from kvstow.simulate.replay import Pace, Replay
from kvstow.simulate.trace import TraceRequest


def test_a_history_keeps_evenly_spread_moments_of_any_length():
    replay = Replay(packed_layout(HYBRID, 9), [TraceRequest(0.0, 1, 1)], Pace())
    replay.record.prompt_tokens, replay.record.hit_tokens = 4, 1
    history = SlabHistory()
    for moment in range(5 * MAX_MOMENTS):
        replay.seconds = float(moment)
        history.see(replay)
    seconds = history.record()["seconds"]
    assert MAX_MOMENTS / 2 <= len(seconds) <= MAX_MOMENTS
    assert len({b - a for a, b in itertools.pairwise(seconds)}) == 1
    assert set(history.record()["hit_rate"]) == {0.25}


def test_a_history_of_nothing_is_empty():
    assert SlabHistory().record()["slabs"] == []
