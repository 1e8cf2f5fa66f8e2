"""Slabs: who loses one, and slabs as letters, against a pool that is asked row by row."""

from typing import get_args

import numpy as np
import pytest

from block_layouts import (
    RECURRENT,
    layouts,
    packed_layout,
    rows_per_slab,
)
from kvstow.blocks.placement import Kind, RowDemand
from kvstow.blocks.pool import Pool
from kvstow.blocks.slabs import MAX_LETTERS
from kvstow.errors import OutOfBlocks
from kvstow.plan.group import grouped
from kvstow.plan.models import model_layers
from kvstow.plan.pack import packed, separate

LAYOUTS = layouts()


def layout(name="gemma-3-270m", slabs=9, pack=packed):
    return pack(grouped(model_layers(name).layers), num_slabs=slabs)


def levels(pool):
    """Owner and fullness of every slab, from the holds of single rows."""
    told = []
    for slab in range(1, pool.layout.num_slabs):
        seen = (-1, 0)
        for g, rows in enumerate(pool.layout.groups):
            ids = np.arange(slab * rows.rows_per_slab, (slab + 1) * rows.rows_per_slab)
            held = int((pool.holds(g, ids) > 0).sum())
            if held:
                part = held / rows.rows_per_slab
                seen = (g, 3 if part == 1 else 2 if part > 0.5 else 1)
        told.append(seen)
    return told


def read(letters):
    return [((ord(letter) - 33) // 4 - 1, (ord(letter) - 33) % 4) for letter in letters]


@pytest.mark.parametrize("held", [(0, 0), (1, 0), (5, 1), (3, 2), (7, 3), (40, 0)])
def test_letters_say_who_owns_a_slab_and_how_full_it_is(held):
    pool = Pool(layout())
    for g, count in enumerate(held):
        if count:
            pool.hold(g, count)
    letters = pool.slab_map()
    assert read(letters.letters) == levels(pool)
    assert letters.groups == ("full", "window512")
    assert (letters.num_slabs, letters.step) == (8, 1)


def test_a_lone_group_has_one_letter_per_row():
    pool = Pool(layout("llama-3.2-1b", slabs=2))
    assert read(pool.slab_map().letters) == [(-1, 0)]
    pool.hold(0, 1)
    assert read(pool.slab_map().letters) == [(0, 3)]


def test_of_many_slabs_some_are_told():
    letters = Pool(layout(slabs=2 * MAX_LETTERS + 2)).slab_map()
    assert letters.step == 3
    assert len(letters.letters) == -(-letters.num_slabs // 3) <= MAX_LETTERS


def test_groups_that_share_nothing_have_no_letters():
    assert Pool(layout(pack=separate)).slab_map().letters == ""


# ── slabs change hands ────────────────────────────────────────────────────────────────


def test_the_slab_with_the_fewest_cached_rows_changes_hands() -> None:
    pool = Pool(packed_layout(RECURRENT, 3))
    size = rows_per_slab(pool, 0)
    many = pool.hold(0, size)
    few = pool.hold(0, size)
    pool.keep(0, many)
    pool.keep(0, few[:1])
    pool.release(0, many)
    pool.release(0, few)
    gone: list[int] = []
    pool.on_evict.append(lambda group, ids: gone.extend(ids.tolist()))
    pool.hold(1, 1)
    assert gone == few[:1].tolist()


def test_a_slab_whose_cached_rows_are_held_again_is_not_idle() -> None:
    pool = Pool(packed_layout(RECURRENT, 2))
    ids = pool.hold(0, 1)
    pool.keep(0, ids)
    pool.release(0, ids)
    pool.share(0, ids)
    pool.check()
    with pytest.raises(OutOfBlocks):
        pool.hold(1, 1)


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_the_books_balance_while_rows_are_cached_and_held_again(name: str, kind: Kind) -> None:
    pool = Pool(LAYOUTS[name])
    for g in range(len(pool.layout.groups)):
        free = pool.num_free(g)
        (ids,) = pool.hold_all([RowDemand(g, min(3, free), kind)])
        pool.check()
        pool.keep(g, ids)
        for change in (pool.release, pool.share, pool.share, pool.release, pool.release):
            change(g, ids)
            pool.check()
        assert pool.num_cached(g) == len(ids)
        assert pool.num_free(g) == free
        pool.share(g, ids[:1])
        pool.forget(g, ids)
        pool.check()
        pool.release(g, ids[:1])
        pool.check()
        assert (pool.num_cached(g), pool.num_free(g)) == (0, free)


def test_tickets_for_rows_in_a_slab_that_another_group_gets_are_worthless() -> None:
    pool = Pool(packed_layout(RECURRENT, 3))
    first, second = pool.hold(0, rows_per_slab(pool, 0)), pool.hold(0, 1)
    before = pool.generations[0].copy()
    pool.release(0, first)
    pool.hold(1, 1)
    assert (pool.generations[0][first] > before[first]).all()
    assert (pool.generations[0][second] == before[second]).all()
