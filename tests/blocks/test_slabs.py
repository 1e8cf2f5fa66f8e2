"""Slabs as letters, against a pool that is asked row by row."""

import itertools

import numpy as np
import pytest

from kvstow.blocks.pool import Pool
from kvstow.blocks.slabs import MAX_LETTERS
from kvstow.plan.group import grouped
from kvstow.plan.models import model_layers
from kvstow.plan.pack import packed, separate
from kvstow.render.film import MAX_FRAMES, Film


def layout(name="gemma-3-270m", slabs=9, pack=packed):
    return pack(grouped(model_layers(name).layers), num_slabs=slabs)


def levels(pool):
    """Owner and fullness of every slab, from the holds of single rows."""
    told = []
    for slab in range(1, pool.layout.num_slabs):
        found = (-1, 0)
        for g, rows in enumerate(pool.layout.groups):
            ids = np.arange(slab * rows.rows_per_slab, (slab + 1) * rows.rows_per_slab)
            held = int((pool.holds(g, ids) > 0).sum())
            if held:
                part = held / rows.rows_per_slab
                found = (g, 3 if part == 1 else 2 if part > 0.5 else 1)
        told.append(found)
    return told


def read(letters):
    return [((ord(letter) - 33) // 4 - 1, (ord(letter) - 33) % 4) for letter in letters]


@pytest.mark.parametrize("held", [(0, 0), (1, 0), (5, 1), (3, 2), (7, 3), (40, 0)])
def test_letters_say_who_owns_a_slab_and_how_full_it_is(held):
    pool = Pool(layout())
    for g, count in enumerate(held):
        if count:
            pool.hold(g, count)
    found = pool.slab_map()
    assert read(found.letters) == levels(pool)
    assert found.groups == ("full", "window512")
    assert (found.num_slabs, found.step) == (8, 1)


def test_a_lone_group_has_one_letter_per_row():
    pool = Pool(layout("llama-3.2-1b", slabs=2))
    assert read(pool.slab_map().letters) == [(-1, 0)]
    pool.hold(0, 1)
    assert read(pool.slab_map().letters) == [(0, 3)]


def test_of_many_slabs_some_are_told():
    found = Pool(layout(slabs=2 * MAX_LETTERS + 2)).slab_map()
    assert found.step == 3
    assert len(found.letters) == -(-found.num_slabs // 3) <= MAX_LETTERS


def test_groups_that_share_nothing_have_no_letters():
    assert Pool(layout(pack=separate)).slab_map().letters == ""


def test_a_film_keeps_evenly_spread_frames_of_any_length():
    pool, film = Pool(layout()), Film()
    for moment in range(5 * MAX_FRAMES):
        film.see(pool, float(moment), prompt_tokens=4, hit_tokens=1)
    seconds = film.record()["seconds"]
    assert MAX_FRAMES / 2 <= len(seconds) <= MAX_FRAMES
    assert len({b - a for a, b in itertools.pairwise(seconds)}) == 1
    assert set(film.record()["hit_rate"]) == {0.25}


def test_a_film_of_nothing_is_empty():
    assert Film().record()["slabs"] == []
