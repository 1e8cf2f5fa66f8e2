"""Films of a pool: evenly spread frames, however long it runs."""

import itertools

from block_layouts import HYBRID, packed_layout
from kvstow.blocks.pool import Pool
from kvstow.render.film import MAX_FRAMES, Film


def test_a_film_keeps_evenly_spread_frames_of_any_length():
    pool, film = Pool(packed_layout(HYBRID, 9)), Film()
    for moment in range(5 * MAX_FRAMES):
        film.see(pool, float(moment), prompt_tokens=4, hit_tokens=1)
    seconds = film.record()["seconds"]
    assert MAX_FRAMES / 2 <= len(seconds) <= MAX_FRAMES
    assert len({b - a for a, b in itertools.pairwise(seconds)}) == 1
    assert set(film.record()["hit_rate"]) == {0.25}


def test_a_film_of_nothing_is_empty():
    assert Film().record()["slabs"] == []
